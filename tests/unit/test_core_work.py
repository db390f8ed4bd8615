"""What single operations cost, counted in bytes and attempts instead of seconds."""

import pytest

from radixkv.core import acquires, evicted
from radixkv.core.cache import Cache
from radixkv.core.content import ContentTable
from radixkv.core.results import (
    Acquired,
    AcquireRequest,
    CacheConfig,
    ContentRange,
    MissKind,
    ReleaseReason,
    Waiting,
)
from tests.core_rig import NAMESPACE
from tests.naive_model import int32

BLOCK_SIZE = 4
NUM_TOKENS = 200_000


def count_bytes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the bytes that are made canonical or digested from now on."""
    counts = {"canonical": 0, "digest": 0}
    canonical, digest = ContentTable.canonical, evicted.xxh3_64_intdigest

    def counting_canonical(self: ContentTable, tokens: bytes) -> bytes:
        counts["canonical"] += len(tokens)
        return canonical(self, tokens)

    def counting_digest(data: bytes, seed: int) -> int:
        counts["digest"] += len(data)
        return digest(data, seed)

    monkeypatch.setattr(ContentTable, "canonical", counting_canonical)
    monkeypatch.setattr(evicted, "xxh3_64_intdigest", counting_digest)
    return counts


def cached_chain(contents: tuple[ContentRange, ...]) -> Cache:
    """A pool full of one released sequence of NUM_TOKENS, in many edges."""
    cache = Cache(CacheConfig(num_blocks=NUM_TOKENS // BLOCK_SIZE, block_size=BLOCK_SIZE))
    cache.open_session(1)
    prompt = AcquireRequest(int32(range(NUM_TOKENS)), NAMESPACE, contents)
    assert isinstance(cache.acquire(1, 1, prompt, 0), Acquired)
    assert cache.commit(1, 1, NUM_TOKENS, b"", ()).published_tokens == NUM_TOKENS
    cache.release(1, 1, ReleaseReason.FINISHED, 0)
    assert cache.num_nodes > 10
    return cache


@pytest.mark.parametrize(
    "contents", [(), (ContentRange(0, NUM_TOKENS - 8, b"video"),)], ids=["plain", "content"]
)
@pytest.mark.parametrize("kept_tokens", [0, 4, 100_004])
def test_an_eviction_reads_what_it_shortens_once(
    contents: tuple[ContentRange, ...], kept_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cached_chain(contents)
    counts = count_bytes(monkeypatch)
    other = AcquireRequest(int32(range(500_000, 700_000 - kept_tokens)), NAMESPACE)
    assert isinstance(cache.acquire(1, 2, other, 0), Acquired)
    assert cache.counters.evicted_blocks == (NUM_TOKENS - kept_tokens) // BLOCK_SIZE
    # the prefix of the shortened branch, the new prompt's first block, one block of each edge
    most = 4 * (kept_tokens + BLOCK_SIZE * 200)
    assert counts["canonical"] <= most and counts["digest"] <= most
    monkeypatch.undo()
    strange = cache.lookup(NAMESPACE, int32(range(900_000, 900_020)))
    assert strange.miss.kind is not MissKind.EVICTED
    cache.release(1, 2, ReleaseReason.FINISHED, 0)
    again = cache.acquire(1, 3, AcquireRequest(int32(range(NUM_TOKENS)), NAMESPACE, contents), 0)
    assert isinstance(again, Acquired) and again.cached_tokens == kept_tokens
    assert (again.miss.kind, again.miss.at_token) == (MissKind.EVICTED, kept_tokens)
    cache.check()


def test_the_waiters_of_a_full_session_cost_one_attempt_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    attempt = acquires.attempt

    def counting(state: object, waiter: object, now_ms: int) -> object:
        tried.append(waiter.session.session_id)  # type: ignore[attr-defined]
        return attempt(state, waiter, now_ms)  # type: ignore[arg-type]

    monkeypatch.setattr(acquires, "attempt", counting)
    cache = Cache(CacheConfig(num_blocks=4096, block_size=4, max_private_blocks=8))
    for session_id in (1, 2, 3):
        cache.open_session(session_id)
    for full in (1, 2):
        cache.acquire(full, 1, AcquireRequest(int32(range(32)), b"own"), 0)
        for lease_id in range(2, 1002):
            prompt = AcquireRequest(
                int32(range(lease_id * 8, lease_id * 8 + 8)), NAMESPACE, capacity_wait_ms=60_000
            )
            assert isinstance(cache.acquire(full, lease_id, prompt, 0), Waiting)
    assert len(tried) <= 4, "who comes behind a waiter of the same session queues without a try"
    cache.poll(0)
    tried.clear()
    for lease_id in range(1, 11):
        prompt = AcquireRequest(int32([7, lease_id]), NAMESPACE)
        assert isinstance(cache.acquire(3, lease_id, prompt, lease_id), Acquired)
        cache.release(3, lease_id, ReleaseReason.FINISHED, lease_id)
        cache.poll(lease_id)
    assert tried.count(3) == 10
    assert tried.count(1) <= 10 and tried.count(2) <= 10
    cache.release(1, 1, ReleaseReason.FINISHED, 20)
    answered = [event for event in cache.poll(20) if hasattr(event, "result")]
    assert [event.lease_id for event in answered] == [2, 3, 4, 5], "in order, as many as fit"
    cache.check()
