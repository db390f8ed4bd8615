"""Two engines over one server: right tokens, shared blocks, little room, lost servers."""

import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from radixkv_worker import reference
from radixkv_worker.model import Model
from radixkv_worker.request import BadRequest, Failed, SamplingParams
from radixkv_worker.scheduler import SchedulerLimits
from radixkv_worker.weights import LoadedModel
from tests.server_process import ServerProcess
from tests.worker_rig import (
    EOS,
    TINY,
    Result,
    Worker,
    assert_idle,
    expected,
    random_prompt,
    sampled,
    tiny_model,
    tiny_tensors,
)

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    torch.set_num_threads(1)
    return tiny_model()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--check-invariants", gpu_blocks=400) as process:
        yield process


@pytest.mark.parametrize("transport", ["local", "grpc"])
def test_cold_hit_and_other_worker_give_the_same_tokens(
    server: ServerProcess, tiny: LoadedModel, transport: str
) -> None:
    prompt = random_prompt(100, seed=len(transport))
    with (
        Worker(server.socket_dir, tiny, transport=transport) as first,
        Worker(server.socket_dir, tiny, transport=transport) as second,
    ):
        results = [worker.run(prompt, max_tokens=20) for worker in (first, first, second)]
        want = expected(tiny, prompt, 20)
        assert [result.tokens() for result in results] == [want] * 3
        assert [result.stats.cached_tokens for result in results] == [0, 96, 96]
        assert [result.stats.computed_tokens for result in results] == [119, 23, 23]
        tables = [result.stats.block_ids[:6] for result in results]
        assert tables[0] == tables[1] == tables[2] and 0 not in tables[0]
        assert_idle(first.engine.client)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_a4_fully_cached_prompt(server: ServerProcess, tiny: LoadedModel, length: int) -> None:
    prompt = random_prompt(length, seed=1000 + length)
    want = expected(tiny, prompt, 4)
    with Worker(server.socket_dir, tiny) as worker:
        cold, hit = (worker.run(prompt, max_tokens=4) for _ in range(2))
    assert cold.tokens() == hit.tokens() == want
    assert hit.stats.cached_tokens == (length - 1) // 16 * 16


def test_follow_up_turn_hits_generated_tokens(server: ServerProcess, tiny: LoadedModel) -> None:
    with Worker(server.socket_dir, tiny) as first, Worker(server.socket_dir, tiny) as second:
        prompt = random_prompt(40, seed=5)
        answer = first.run(prompt, max_tokens=30).tokens()
        longer = prompt + tuple(answer) + random_prompt(10, seed=6)
        result = second.run(longer)
    # The answer's last token was chosen, never computed.
    assert result.stats.cached_tokens == (40 + 29) // 16 * 16
    assert result.tokens() == expected(tiny, longer, 8)


def test_same_tokens_whatever_runs_beside(server: ServerProcess, tiny: LoadedModel) -> None:
    prompts = [random_prompt(length, seed=50 + length) for length in (3, 20, 33, 64, 90, 200, 7)]
    limits = SchedulerLimits(token_budget=48)
    with Worker(server.socket_dir, tiny, limits=limits) as worker:
        results = [worker.submit(prompt, max_tokens=12) for prompt in prompts]
        for prompt, result in zip(prompts, results, strict=True):
            assert result.wait().tokens() == expected(tiny, prompt, 12)
        assert_idle(worker.engine.client)


def test_identical_prompts_at_once_are_computed_once(
    server: ServerProcess, tiny: LoadedModel
) -> None:
    prompt = random_prompt(900, seed=77)
    limits = SchedulerLimits(token_budget=64)
    with (
        Worker(server.socket_dir, tiny, limits=limits) as first,
        Worker(server.socket_dir, tiny, limits=limits) as second,
    ):
        before = first.engine.client.stats().counters.waits
        results = [worker.submit(prompt, max_tokens=4) for worker in (first, second, first)]
        computed = sum(result.wait().stats.computed_tokens for result in results)
        assert first.engine.client.stats().counters.waits > before
    assert [result.tokens() for result in results] == [expected(tiny, prompt, 4)] * 3
    assert computed == 900 + 2 * (900 - 896) + 3 * 3


def test_samples_depend_on_seed_and_index_only(server: ServerProcess, tiny: LoadedModel) -> None:
    prompt = random_prompt(53, seed=8)
    params = {"n": 4, "temperature": 0.8, "top_p": 0.9, "seed": 11, "max_tokens": 24}
    with Worker(server.socket_dir, tiny) as first, Worker(server.socket_dir, tiny) as second:
        before = first.engine.client.stats().counters
        result = first.run(prompt, **params)
        beside = [second.submit(random_prompt(30, seed=i), max_tokens=20) for i in range(3)]
        again = second.run(prompt, **params)
        after = first.engine.client.stats().counters
        for other in beside:
            other.wait()
        assert_idle(first.engine.client)
    assert after.forks - before.forks == 6 and after.copied_blocks - before.copied_blocks == 6
    # The prompt is computed once, each sample's tokens but its last one by itself.
    assert result.stats.computed_tokens == 53 + 4 * 23
    for index in range(4):
        want = sampled(tiny, prompt, SamplingParams(**params), index)
        assert result.tokens(index) == again.tokens(index) == want


@pytest.mark.parametrize("length", [32, 45])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_beams_equal_plain_beam_search(
    server: ServerProcess, tiny: LoadedModel, width: int, length: int
) -> None:
    prompt = random_prompt(length, seed=9)
    with Worker(server.socket_dir, tiny) as worker:
        for ignore_eos in (True, False):
            stops = () if ignore_eos else (EOS,)
            result = worker.run(
                prompt, n=width, beam_width=width, max_tokens=25, ignore_eos=ignore_eos
            )
            want = reference.beam_search(tiny.model, prompt, 25, width, stops)
            assert [result.tokens(index) for index in range(width)] == [t for _, t in want]
            scores = [delta.score for delta in result.deltas]
            assert scores == pytest.approx([score for score, _ in want], abs=1e-4)
        assert_idle(worker.engine.client)


def test_stop_tokens_and_strings_end_a_text(server: ServerProcess, tiny: LoadedModel) -> None:
    prompt = random_prompt(20, seed=10)
    with Worker(server.socket_dir, tiny) as worker:
        free = worker.run(prompt, max_tokens=30)
        stop_token = free.tokens()[5]
        first = free.tokens().index(stop_token)
        result = worker.run(prompt, max_tokens=30, ignore_eos=False, stop_tokens=(stop_token,))
        assert result.tokens() == free.tokens()[: first + 1]
        assert result.deltas[-1].finish_reason == "stop"
        stop = free.text()[6:8]
        result = worker.run(prompt, max_tokens=30, stop=(stop,))
        assert result.text() == free.text()[: free.text().index(stop)]
        assert result.deltas[-1].finish_reason == "stop"
        assert free.deltas[-1].finish_reason == "length"
        assert_idle(worker.engine.client)


def test_bad_requests_are_refused(server: ServerProcess, tiny: LoadedModel) -> None:
    with Worker(server.socket_dir, tiny) as worker:
        for prompt, message in (((), "empty"), ((5, 260), "outside"), ((5,) * 4090, "takes 4096")):
            with pytest.raises(BadRequest, match=message):
                worker.submit(prompt)


# ---- lost servers and workers ---------------------------------------------------------------


def test_server_killed_under_load(tiny: LoadedModel) -> None:
    """Requests go on where they were; what was handed out is not handed out again."""
    prompts = [random_prompt(50 + 7 * index, seed=300 + index) for index in range(5)]
    limits = SchedulerLimits(token_budget=32)
    with (
        ServerProcess("--check-invariants", gpu_blocks=200) as server,
        Worker(server.socket_dir, tiny, limits=limits) as first,
        Worker(server.socket_dir, tiny, limits=limits) as second,
    ):
        results = [
            (first, second)[index % 2].submit(prompt, max_tokens=120)
            for index, prompt in enumerate(prompts)
        ]
        beams = first.submit(prompts[0], n=2, beam_width=2, max_tokens=100)
        samples = second.submit(prompts[1], n=3, temperature=1.0, seed=5, max_tokens=100)
        for result in results:
            for _ in range(5):
                result.next()
        server.kill()
        server.restart()
        for prompt, result in zip(prompts, results, strict=True):
            assert result.wait().tokens() == expected(tiny, prompt, 120)
        want = reference.beam_search(tiny.model, prompts[0], 100, 2, ())
        assert [beams.wait().tokens(index) for index in range(2)] == [t for _, t in want]
        params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=100)
        for index in range(3):
            assert samples.wait().tokens(index) == sampled(tiny, prompts[1], params, index)
        assert first.engine.stats().reconnects == second.engine.stats().reconnects == 1
        assert_idle(first.engine.client)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_server_killed_again_and_again_with_little_room(tiny: LoadedModel, seed: int) -> None:
    chance = random.Random(seed)
    prompts = [random_prompt(chance.randint(1, 90), seed=600 + index) for index in range(8)]
    limits = SchedulerLimits(token_budget=chance.choice((16, 64)))
    with (
        ServerProcess("--check-invariants", gpu_blocks=chance.randint(16, 40)) as server,
        Worker(server.socket_dir, tiny, limits=limits) as first,
        Worker(server.socket_dir, tiny, limits=limits) as second,
    ):
        both = (first, second)
        greedy = [chance.choice(both).submit(prompt, max_tokens=90) for prompt in prompts]
        beams = chance.choice(both).submit(prompts[0], n=2, beam_width=2, max_tokens=60)
        params = {"n": 3, "temperature": 1.0, "seed": seed, "max_tokens": 60}
        samples = chance.choice(both).submit(prompts[1], **params)
        for _ in range(3):
            time.sleep(chance.uniform(0.05, 0.6))
            server.kill()
            time.sleep(chance.choice((0.0, 0.3, 1.5)))
            server.restart()
        for prompt, result in zip(prompts, greedy, strict=True):
            assert result.wait().tokens() == expected(tiny, prompt, 90), f"seed {seed}"
        want = reference.beam_search(tiny.model, prompts[0], 60, 2, ())
        assert [beams.wait().tokens(index) for index in range(2)] == [t for _, t in want]
        for index in range(3):
            answer = sampled(tiny, prompts[1], SamplingParams(**params), index)
            assert samples.wait().tokens(index) == answer, f"seed {seed}"
        assert_idle(first.engine.client)


def test_server_that_drains_lets_running_requests_finish(tiny: LoadedModel) -> None:
    with ServerProcess(gpu_blocks=64) as server, Worker(server.socket_dir, tiny) as worker:
        running = worker.submit(random_prompt(40), max_tokens=150)
        running.next()
        server.signal(signal.SIGTERM)
        time.sleep(0.05)
        late = worker.submit(random_prompt(30, seed=2))
        assert running.wait().tokens() == expected(tiny, random_prompt(40), 150)
        assert server.wait() == 0
        server.restart()
        assert late.wait().tokens() == expected(tiny, random_prompt(30, seed=2), 8)


def test_silent_server_is_waited_for(tiny: LoadedModel) -> None:
    with ServerProcess(gpu_blocks=64) as server, Worker(server.socket_dir, tiny) as worker:
        result = worker.submit(random_prompt(40), max_tokens=200)
        result.next()
        server.signal(signal.SIGSTOP)
        time.sleep(0.5)
        server.signal(signal.SIGCONT)
        assert result.wait().tokens() == expected(tiny, random_prompt(40), 200)
        assert worker.engine.stats().reconnects == 0


def test_bfloat16_shares_blocks_too(tiny: LoadedModel) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in tiny_tensors().items()}
    narrow = replace(tiny, model=Model(TINY, tensors), fingerprint="narrow")
    with (
        ServerProcess("--check-invariants", gpu_blocks=64) as server,
        Worker(server.socket_dir, narrow) as first,
        Worker(server.socket_dir, narrow) as second,
    ):
        cold, hit = (worker.run(random_prompt(50), max_tokens=6) for worker in (first, second))
    assert (cold.stats.cached_tokens, hit.stats.cached_tokens) == (0, 48)
    assert len(cold.tokens()) == len(hit.tokens()) == 6


def test_cancelled_requests_give_everything_back(server: ServerProcess, tiny: LoadedModel) -> None:
    with Worker(server.socket_dir, tiny) as worker:
        results = [worker.submit(random_prompt(50, seed=i), max_tokens=500, n=2) for i in range(3)]
        results[0].next()
        for index in range(3):
            worker.engine.cancel(f"request-{index + 1}")
        deadline = time.monotonic() + TIMEOUT_S
        while worker.engine.client.stats().num_leases and time.monotonic() < deadline:
            time.sleep(0.01)
        assert_idle(worker.engine.client)
        assert all(result.end is None for result in results)
        assert worker.run(random_prompt(50)).tokens()


def test_events_end_when_the_engine_stops(server: ServerProcess, tiny: LoadedModel) -> None:
    with Worker(server.socket_dir, tiny) as worker:
        result: Result = worker.submit(random_prompt(50), max_tokens=1000)
        result.next()
    end = result.wait().end
    assert isinstance(end, Failed) and end.retryable
