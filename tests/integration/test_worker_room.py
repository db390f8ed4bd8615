"""Workers that share a pool with little room: right tokens, bounded preemptions, no deadlock."""

import time

import pytest
import torch

from radixkv_client import FailedPrecondition, Lease
from radixkv_client.lease import LeaseState
from radixkv_client.protocol import Request
from radixkv_worker import reference, scheduler
from radixkv_worker.request import Failed, SamplingParams
from radixkv_worker.scheduler import SchedulerLimits
from radixkv_worker.sequence import Sequence
from radixkv_worker.weights import LoadedModel
from tests.server_process import ServerProcess
from tests.worker_rig import Worker, assert_idle, expected, random_prompt, sampled, tiny_model


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    torch.set_num_threads(1)
    return tiny_model()


def test_pool_of_one_and_a_half_requests_with_two_workers(tiny: LoadedModel) -> None:
    """Everything finishes with right tokens, and no sequence is preempted twice."""
    prompts = [random_prompt(64, seed=100 + index) for index in range(6)]
    with (
        ServerProcess("--check-invariants", gpu_blocks=12) as server,  # a request needs 8
        Worker(server.socket_dir, tiny) as first,
        Worker(server.socket_dir, tiny) as second,
    ):
        results = [
            (first, second)[index % 2].submit(prompt, max_tokens=64)
            for index, prompt in enumerate(prompts)
        ]
        for prompt, result in zip(prompts, results, strict=True):
            assert result.wait().tokens() == expected(tiny, prompt, 64)
        preemptions = [result.stats.preemptions for result in results]
        assert max(preemptions) <= 1 and sum(preemptions) >= 1
        assert_idle(first.engine.client)
        counters = first.engine.client.stats().counters
        assert counters.preemptions == sum(preemptions)
        # 64 tokens each were asked for, and resumes are not part of that.
        assert counters.queried_tokens == 6 * 64


def test_samples_and_beams_with_little_room(tiny: LoadedModel) -> None:
    prompts = [random_prompt(40, seed=200 + index) for index in range(2)]
    with (
        ServerProcess("--check-invariants", gpu_blocks=14) as server,
        Worker(server.socket_dir, tiny) as first,
        Worker(server.socket_dir, tiny) as second,
    ):
        samples = [
            worker.submit(prompt, n=4, temperature=1.0, seed=3, max_tokens=40)
            for worker, prompt in zip((first, second), prompts, strict=True)
        ]
        beams = [
            worker.submit(prompt, n=2, beam_width=2, max_tokens=40)
            for worker, prompt in zip((second, first), prompts, strict=True)
        ]
        for prompt, result in zip(prompts, samples, strict=True):
            result.wait()
            params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=40)
            for index in range(4):
                assert result.tokens(index) == sampled(tiny, prompt, params, index)
            assert result.stats.preemptions <= 4
        for prompt, result in zip(prompts, beams, strict=True):
            want = reference.beam_search(tiny.model, prompt, 40, 2, ())
            assert [result.wait().tokens(index) for index in range(2)] == [t for _, t in want]
        assert_idle(first.engine.client)


def test_beams_that_took_each_others_room(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They give up together, also when several Acquires of one group are refused at once."""
    monkeypatch.setattr(scheduler, "BEAM_ROOM_WAIT_MS", 50)
    prompts = [random_prompt(40, seed=500 + index) for index in range(4)]
    with (
        ServerProcess("--check-invariants", gpu_blocks=14) as server,
        Worker(server.socket_dir, tiny) as first,
        Worker(server.socket_dir, tiny) as second,
    ):
        results = [
            (first, second)[index % 2].submit(prompt, n=3, beam_width=3, max_tokens=40)
            for index, prompt in enumerate(prompts)
        ]
        for prompt, result in zip(prompts, results, strict=True):
            want = reference.beam_search(tiny.model, prompt, 40, 3, ())
            assert [result.wait().tokens(index) for index in range(3)] == [t for _, t in want]
        assert sum(result.stats.preemptions for result in results) >= 1
        assert_idle(first.engine.client)


def test_pressure_preempts_the_youngest(tiny: LoadedModel) -> None:
    """A second worker gets room from the first one's youngest request, never from its oldest."""
    prompts = [random_prompt(64, seed=400 + index) for index in range(4)]
    with (
        ServerProcess("--check-invariants", gpu_blocks=18) as server,
        Worker(server.socket_dir, tiny) as holder,
        Worker(server.socket_dir, tiny) as other,
    ):
        held = [holder.submit(prompt, max_tokens=60) for prompt in prompts[:3]]
        for result in held:
            result.next()
        late = other.run(prompts[3], max_tokens=4)
        assert late.tokens() == expected(tiny, prompts[3], 4)
        for prompt, result in zip(prompts, held, strict=False):
            assert result.wait().tokens() == expected(tiny, prompt, 60)
        assert holder.engine.client.stats().counters.pressure_events >= 1
        assert [result.stats.preemptions for result in held][0] == 0
        assert held[2].stats.preemptions == 1
        assert_idle(holder.engine.client)


def test_request_that_can_never_fit(tiny: LoadedModel) -> None:
    with ServerProcess(gpu_blocks=4) as server, Worker(server.socket_dir, tiny) as worker:
        end = worker.run(random_prompt(60), max_tokens=20).end
        assert isinstance(end, Failed) and not end.retryable
        assert end.code == "TOO_LARGE" and "5 blocks" in end.message and "4" in end.message
        assert worker.run(random_prompt(60), max_tokens=5).tokens()


def test_beams_that_can_never_fit_are_refused_at_once(tiny: LoadedModel) -> None:
    """Beams hold their blocks together; plain samples without room take turns."""
    prompt = random_prompt(40, seed=700)
    with (
        ServerProcess("--check-invariants", gpu_blocks=12) as server,
        Worker(server.socket_dir, tiny) as worker,
    ):
        beside = worker.submit(prompt, max_tokens=60)
        started = time.monotonic()
        for params in ({"n": 16, "beam_width": 16}, {"n": 16, "max_tokens": 170}):
            end = worker.run(prompt, **params).end
            assert isinstance(end, Failed) and end.code == "TOO_LARGE" and not end.retryable
            wanted = "14 blocks" if "beam_width" not in params else "18 blocks"
            assert wanted in end.message and "the pool has 12" in end.message
        assert time.monotonic() - started < 2
        samples = worker.run(prompt, n=16, temperature=1.0, seed=3, max_tokens=20)
        settings = SamplingParams(n=16, temperature=1.0, seed=3, max_tokens=20)
        for index in (0, 7, 15):
            assert samples.tokens(index) == sampled(tiny, prompt, settings, index)
        assert beside.wait().tokens() == expected(tiny, prompt, 60)
        assert_idle(worker.engine.client)


def test_beams_that_outgrow_the_pool_give_up_once(tiny: LoadedModel) -> None:
    """They would fit if they went on sharing; random ones do not."""
    prompt = random_prompt(4, seed=701)
    with (
        ServerProcess("--check-invariants", gpu_blocks=12) as server,
        Worker(server.socket_dir, tiny) as worker,
    ):
        started = time.monotonic()
        end = worker.run(prompt, n=6, beam_width=6, max_tokens=100).end
        assert isinstance(end, Failed) and end.code == "TOO_LARGE", end
        assert "6 beams need" in end.message and "the pool has 12" in end.message
        assert time.monotonic() - started < 6
        assert worker.run(prompt, max_tokens=6).tokens() == expected(tiny, prompt, 6)
        assert_idle(worker.engine.client)


@pytest.mark.parametrize("name", ["commit", "fork", "append_blocks"])
def test_a_refused_operation_fails_its_request_only(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whether the client or the server refuses it, the engine and other requests go on."""
    prompts = [random_prompt(40, seed=710 + index) for index in range(2)]

    def refuse(lease: LeaseState, *arguments: object, **options: object) -> None:
        raise FailedPrecondition("refused for the test")

    with (
        ServerProcess("--check-invariants", gpu_blocks=60) as server,
        Worker(server.socket_dir, tiny) as worker,
    ):
        beside = worker.submit(prompts[0], max_tokens=8)
        beside.wait()
        with monkeypatch.context() as patch:
            if name == "append_blocks":
                patch.setattr(Lease, name, refuse)
            else:
                patch.setattr(LeaseState, f"{name}_request", refuse)
            failed = worker.run(prompts[1], n=3, temperature=1.0, seed=1, max_tokens=40).end
        assert isinstance(failed, Failed) and failed.code == "FAILED_PRECONDITION"
        assert worker.engine.failure is None
        assert worker.run(prompts[1], max_tokens=8).tokens() == expected(tiny, prompts[1], 8)
        assert_idle(worker.engine.client)


def test_a_commit_the_server_refuses_fails_its_request_only(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled = random_prompt(70, seed=720)
    prompt = random_prompt(70, seed=721)
    commit_request = LeaseState.commit_request

    def spoil(lease: LeaseState, *arguments: object) -> Request:
        request = commit_request(lease, *arguments)
        if lease is victims[0]:
            request.op.commit.upto += 1_000_000
        return request

    victims: list[object] = [None]
    with (
        ServerProcess("--check-invariants", gpu_blocks=60) as server,
        Worker(server.socket_dir, tiny) as worker,
    ):
        monkeypatch.setattr(LeaseState, "commit_request", spoil)
        beside = worker.submit(prompt, max_tokens=60)
        beside.next()
        granted = scheduler.Scheduler._granted

        def grant(self: scheduler.Scheduler, sequence: Sequence) -> None:
            granted(self, sequence)
            if sequence.tokens[:70].tolist() == list(spoiled):
                victims[0] = sequence.lease

        monkeypatch.setattr(scheduler.Scheduler, "_granted", grant)
        end = worker.run(spoiled, max_tokens=60).end
        assert isinstance(end, Failed) and not end.retryable, end
        assert beside.wait().tokens() == expected(tiny, prompt, 60)
        assert worker.engine.failure is None
        assert_idle(worker.engine.client)


def test_no_room_within_the_deadline(tiny: LoadedModel) -> None:
    limits = SchedulerLimits(room_wait_ms=200, max_queue_s=0.1)
    with (
        ServerProcess(gpu_blocks=8) as server,
        Worker(server.socket_dir, tiny, limits=limits) as worker,
        Worker(server.socket_dir, tiny) as holder,
    ):
        lease = holder.engine.client.acquire(random_prompt(80))
        started = time.monotonic()
        end = worker.run(random_prompt(60, seed=1)).end
        assert time.monotonic() - started < 5
        assert isinstance(end, Failed) and end.retryable and end.code == "EXHAUSTED"
        lease.release()
        assert worker.run(random_prompt(60, seed=1)).tokens()
