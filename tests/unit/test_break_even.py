"""Break-even: what measured bandwidth brings slower than measured prefill computes stays below."""

import pytest

from radixkv.core.cache import Cache
from radixkv.core.costs import Costs
from radixkv.core.health import FIRST_SUSPENSION_MS, MAX_FAILURES, MAX_SUSPENSION_MS, Direction
from radixkv.core.results import (
    AcquireAnswered,
    Acquired,
    AcquireRequest,
    CacheConfig,
    OnboardReason,
    ReleaseReason,
    Waiting,
)
from radixkv.core.tier_ops import Outcome, Place, Transfer
from tests.naive_model import int32

B = 16
PROMPT = list(range(16 * B + 1))
OTHER = list(range(1000, 1000 + 31 * B))


class Server:
    """A cache with a cpu tier whose transfers take as long as it is told."""

    def __init__(self, block_s: float, **config: object) -> None:
        self.cache = Cache(CacheConfig(32, B, cpu_blocks=64, **config))  # type: ignore[arg-type]
        self.cache.open_session(1)
        self.block_s = block_s
        self.now_ms = 1

    def settle(self) -> list[Acquired]:
        """Carry out everything; the leases that waiting Acquires got."""
        answers = []
        for _ in range(40):
            self.now_ms += 1
            for event in self.cache.poll(self.now_ms):
                if isinstance(event, AcquireAnswered):
                    assert isinstance(event.result, Acquired)
                    answers.append(event.result)
            for op in self.cache.tier_ops():
                assert isinstance(op, Transfer)
                count = len(op.target_ids)
                done = [Outcome.DONE] * count
                self.cache.transfer_done(op.transfer_id, done, self.block_s * count, self.now_ms)
        self.cache.check()
        return answers

    def serve(self, prompt: list[int], prefill_ms: int) -> Acquired:
        """One request whose worker takes so long for what is not cached."""
        request = AcquireRequest(int32(prompt), b"n", capacity_wait_ms=5000)
        got = self.cache.acquire(1, 1, request, self.now_ms)
        if isinstance(got, Waiting):
            (got,) = self.settle()
        self.now_ms += prefill_ms
        full = len(prompt) // B * B
        self.cache.commit(1, 1, full, b"", (), (), self.now_ms)
        self.cache.release(1, 1, ReleaseReason.FINISHED, self.now_ms)
        self.settle()
        return got


@pytest.mark.parametrize(("block_s", "prefill_ms", "loads"), [(0.001, 900, True), (0.5, 90, False)])
def test_only_what_pays_is_brought_up(block_s: float, prefill_ms: int, loads: bool) -> None:
    server = Server(block_s)
    for _ in range(3):  # the first load measures the bandwidth
        server.serve(PROMPT, prefill_ms)
        server.serve(OTHER, prefill_ms)
    last = server.serve(PROMPT, prefill_ms)
    assert last.onboarding is not None
    if loads:
        assert last.onboarding.reason is OnboardReason.LOADED
        assert last.cached_tokens == 16 * B and last.onboarding.cpu_tokens >= 15 * B
    else:
        assert last.onboarding.reason is OnboardReason.BREAK_EVEN
        assert last.cached_tokens + last.onboarding.left_tokens == 16 * B
        assert server.cache.counters.break_even_acquires > 0


def test_without_the_rule_all_is_brought_up() -> None:
    server = Server(0.5, break_even=False)
    for _ in range(3):
        server.serve(PROMPT, 90)
        server.serve(OTHER, 90)
    assert server.serve(PROMPT, 90).cached_tokens == 16 * B


def test_a_prefetch_is_done_whatever_it_costs() -> None:
    server = Server(0.5)
    for _ in range(3):
        server.serve(PROMPT, 90)
        server.serve(OTHER, 90)
    started = server.cache.prefetch(b"n", int32(PROMPT), (), frozenset(), server.now_ms)
    assert started.handle and started.loading_tokens


def test_gain_counts_what_is_queued_in_front() -> None:
    costs = Costs()
    assert costs.gain_s(Place.CPU, 4, B, 0) == 0.0, "not measured: assumed to pay"
    costs.moved(Place.CPU, Place.GPU, 4, 0.4)
    costs.prefilled(100, 1.0)
    assert costs.gain_s(Place.CPU, 4, B, 0) == pytest.approx(4 * B * 0.01 - 0.4)
    assert costs.gain_s(Place.CPU, 4, B, 10) == pytest.approx(4 * B * 0.01 - 1.4)


def test_suspensions_grow_and_end() -> None:
    reads = Direction()
    for _ in range(MAX_FAILURES - 1):
        reads.failed(0)
    assert not reads.is_suspended(0)
    now_ms, lengths = 0, []
    for _ in range(10):
        while not reads.is_suspended(now_ms):
            reads.failed(now_ms)
        lengths.append(reads.until_ms - now_ms)
        now_ms = reads.until_ms
    assert lengths[:3] == [FIRST_SUSPENSION_MS, 2 * FIRST_SUSPENSION_MS, 4 * FIRST_SUSPENSION_MS]
    assert lengths[-1] == MAX_SUSPENSION_MS
    reads.worked()
    reads.failed(now_ms)
    assert not reads.is_suspended(now_ms)
