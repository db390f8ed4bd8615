"""The demo's own arithmetic: its naive model, and that every check can fail."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from radixkv_worker.demo import checks, table
from radixkv_worker.demo.naive import NaiveCache
from radixkv_worker.demo.runner import Answered
from radixkv_worker.demo.workload import LONG_TOKENS, WAVES, Ask, document

BLOCK_SIZE = 16


def answered(
    name: str, worker: int, wave: int, prompt: list[int], cached: int, **ask: Any
) -> Answered:
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    stats = {
        "cached_tokens": cached,
        "ttft_ms": 10.0 if cached else 100.0,
        "block_ids": list(range(1, num_blocks + 1)),
    }
    n = ask.get("n", 1)
    return Answered(
        Ask(name, worker, "topic", "?", **ask), wave, prompt, [[7, 8]] * n, "text", stats
    )


PROMPT = list(range(100, 140))
RUN = [
    answered("cold", 0, 0, PROMPT, 0),
    answered("same", 0, 1, PROMPT, 32),
    answered("other", 1, 2, PROMPT, 32, n=3),
]


def server(**changes: Any) -> SimpleNamespace:
    """Statistics of a server that did everything right in RUN."""
    values = {"hit_tokens": 64, "queried_tokens": 120, "copied_blocks": 2, "forks": 2, "cached": 2}
    values |= changes
    books = SimpleNamespace(cached=values.pop("cached"))
    return SimpleNamespace(counters=SimpleNamespace(**values), books=books, block_bytes=1 << 20)


def test_naive_cache_keeps_whole_blocks_and_leaves_a_token() -> None:
    cache = NaiveCache(4)
    assert cache.hit([1, 2, 3, 4, 5]) == 0
    cache.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.num_blocks == 2
    hits = [cache.hit(list(range(1, length + 1))) for length in (3, 4, 5, 8, 9, 30)]
    assert hits == [0, 0, 4, 4, 8, 8]
    assert cache.hit([1, 2, 3, 5, 5, 6, 7, 8, 9]) == 0


def test_naive_hits_of_a_wave_do_not_depend_on_its_order() -> None:
    chance = random.Random(3)
    prompts = [[1] * chance.randint(1, 40) + [2] * chance.randint(1, 40) for _ in range(8)]
    sums = set()
    for _ in range(20):
        cache, total = NaiveCache(4), 0
        chance.shuffle(prompts)
        for prompt in prompts:
            total += cache.hit(prompt)
            cache.add(prompt + [3])
        sums.add((total, cache.num_blocks))
    assert len(sums) == 1


def test_checks_hold_for_a_right_run_and_see_a_wrong_one() -> None:
    counted = checks.count_naively(RUN, 2, BLOCK_SIZE)
    assert counted == checks.Counted(64, 2, (2, 2))
    assert all(check.holds for check in checks.check_counts(RUN, counted, server()))
    assert checks.check_copies(RUN, server(), BLOCK_SIZE).holds
    assert checks.check_tables(RUN, BLOCK_SIZE).holds
    for wrong in ({"hit_tokens": 48}, {"cached": 3}):
        found = checks.check_counts(RUN, counted, server(**wrong))
        assert [check.holds for check in found].count(False) == 1
    assert not checks.check_copies(RUN, server(copied_blocks=3), BLOCK_SIZE).holds
    moved = replace(RUN[2], stats={**RUN[2].stats, "block_ids": [1, 9, 3]})
    assert not checks.check_tables([*RUN[:2], moved], BLOCK_SIZE).holds
    assert not checks.check_tables(RUN[:2], BLOCK_SIZE).holds  # one worker proves nothing


def test_check_of_answers_names_the_wrong_one() -> None:
    good = checks.check_answers(["a", "b"], [[[1, 2]], [[3]]], [[[1, 2]], [[3]]])
    assert good.holds and good.detail == "2 requests, 3 tokens"
    bad = checks.check_answers(["a", "b"], [[[1, 2]], [[3]]], [[[1, 2]], [[4]]])
    assert not bad.holds and "wrong: ['b']" in bad.detail


def test_check_of_single_flight() -> None:
    def answer(computed: int, token: int = 5) -> dict[str, Any]:
        choice = {"radixkv": {"tokens": [token] * 4}}
        return {"radixkv": {"computed_tokens": computed}, "choices": [choice]}

    whole, rest = LONG_TOKENS + 3, 16 + 3
    assert checks.check_single_flight([answer(whole), answer(rest)], 1, BLOCK_SIZE).holds
    for answers, waits in (
        ([answer(whole), answer(whole)], 1),
        ([answer(whole), answer(rest)], 0),
        ([answer(whole), answer(rest, token=6)], 1),
    ):
        assert not checks.check_single_flight(answers, waits, BLOCK_SIZE).holds


def test_table_shows_every_kind_and_every_failure() -> None:
    counted = checks.count_naively(RUN, 2, BLOCK_SIZE)
    found = [checks.check_copies(RUN, server(), BLOCK_SIZE), checks.Check("odd", False, "why")]
    text = table.render(RUN, counted, server(), found)
    assert "10.0 times as fast as cold" in text
    assert "53.3% (64 of 120 tokens)" in text
    assert "2 (2 MiB); 2 private caches: 4 (4 MiB)" in text
    assert "KV bytes copied for hits  0" in text
    assert "FAILED odd" in text and "why" in text


def test_workload_has_every_kind_of_request() -> None:
    asks = [ask for wave in WAVES for ask in wave]
    assert len({ask.name for ask in asks}) == len(asks)
    assert {ask.worker for ask in asks} == {0, 1} and max(ask.n for ask in asks) > 1
    seen: set[str] = set()
    for wave in WAVES:
        assert all(not ask.follows or ask.follows in seen for ask in wave)
        assert len({ask.worker for ask in wave}) == len(wave)
        seen |= {ask.name for ask in wave}
    assert document("mill") == document("mill") != document("depot")
