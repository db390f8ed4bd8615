"""A hypothesis state machine: any order of operations, against the naive model, checked each step.

Alphabets and blocks are tiny, so that prompts share, split and merge edges all the time, and the
pool is small, so that most steps evict. What is compared is in `tests/core_audit.py`.
"""

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radixkv.core.errors import AlreadyExists, Exhausted, NotFound, TooLarge
from radixkv.core.results import ContentRange, ReleaseReason
from tests.core_rig import Rig
from tests.naive_model import ModelLease

SESSIONS = (1, 2, 3)
IMAGE = 7  # placeholder token
IMAGE_LENGTH = 3
MAX_LEASES = 8  # of one namespace: single flight looks at no more per node

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
picks = st.integers(0, 1_000)
seldom = st.sampled_from((False, False, False, True))  # what ends much is done seldom
namespaces = st.sampled_from((b"tenant a", b"tenant b"))
reasons = st.sampled_from(ReleaseReason)


class CoreMachine(RuleBasedStateMachine):
    """Several sessions over one small pool."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(4, 20),
        max_private=st.sampled_from((0, 0, 6)),
    )
    def start(self, block_size: int, num_blocks: int, max_private: int) -> None:
        self.rig = Rig(
            num_blocks, block_size, max_private_blocks=min(max_private, num_blocks),
            max_reserve_blocks=4, max_edge_tokens=3 * block_size,
        )  # fmt: skip
        for session in SESSIONS:
            self.rig.open(session)

    def leases(self, ready: bool = True) -> list[ModelLease]:
        """Live leases; `ready` ones have had their answer."""
        return [lease for lease in self.rig.leases() if not (ready and lease.copies)]

    def pick(self, number: int) -> ModelLease:
        """One of the ready leases."""
        return self.leases()[number % len(self.leases())]

    # ---- acquire and what ends it ---------------------------------------------------------

    @precondition(lambda self: len(self.rig.leases()) < MAX_LEASES)
    @rule(
        session=st.sampled_from(SESSIONS),
        tokens=tokens,
        namespace=namespaces,
        image=st.sampled_from((b"", b"", b"cat", b"dog")),
        extra_blocks=st.integers(0, 2),
        partial_tail=st.booleans(),
        waits=st.sampled_from(((0, 0), (0, 0), (50, 0), (0, 50), (30, 60))),
    )
    def acquire(self, session, tokens, namespace, image, extra_blocks, partial_tail, waits):
        contents = ()
        if image:
            start = len(tokens) // 2
            tokens = tokens[:start] + [IMAGE] * IMAGE_LENGTH + tokens[start:]
            contents = (ContentRange(start, IMAGE_LENGTH, image),)
        with suppress(Exhausted, TooLarge):
            self.rig.acquire(
                session, tokens, namespace, contents,
                placeholder_tokens=frozenset({IMAGE}), extra_blocks=extra_blocks,
                partial_tail=partial_tail, capacity_wait_ms=waits[0], wait_ms=waits[1],
            )  # fmt: skip

    @precondition(lambda self: self.rig.leases())
    @rule(pick=picks, tokens=tokens)
    def acquire_again(self, pick, tokens):
        lease = self.rig.leases()[pick % len(self.rig.leases())]
        try:
            self.rig.acquire(lease.session, tokens, lease_id=lease.id)
        except AlreadyExists:
            return
        raise AssertionError("a live lease id was taken twice")

    @precondition(lambda self: self.rig.leases())
    @rule(pick=picks, reason=reasons)
    def release(self, pick, reason):
        lease = self.rig.leases()[pick % len(self.rig.leases())]
        self.rig.release(lease, reason)
        try:
            self.rig.cache.release(lease.session, lease.id, reason, self.rig.now_ms)
        except NotFound:
            return
        raise AssertionError("released twice")

    @precondition(lambda self: self.rig.waiting)
    @rule(pick=picks)
    def cancel(self, pick):
        waiting = list(self.rig.waiting.values())
        self.rig.cancel(waiting[pick % len(waiting)])

    @rule(session=st.sampled_from(SESSIONS), really=seldom)
    def session_dies(self, session, really):
        if not really:
            return
        self.rig.close(session)
        self.rig.open(session)

    # ---- a lease's life -------------------------------------------------------------------

    @precondition(lambda self: self.leases())
    @rule(pick=picks, upto=picks, all_of_it=st.booleans())
    def compute_and_commit(self, pick, upto, all_of_it):
        lease = self.pick(pick)
        room = len(lease.table) * self.rig.block_size
        end = min(len(lease.atoms), room)
        span = end - lease.committed
        upto = end if all_of_it else lease.committed + (upto % span if span else 0)
        self.rig.compute(lease, max(upto, lease.computed))
        self.rig.commit(lease, upto)

    @precondition(lambda self: self.leases())
    @rule(pick=picks, new=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def decode(self, pick, new):
        lease = self.pick(pick)
        for token in new:
            full = len(lease.atoms) == len(lease.table) * self.rig.block_size
            if full and not self.rig.draw(lease):
                break
            lease.append(token)
        self.rig.compute(lease, min(len(lease.atoms), len(lease.table) * self.rig.block_size))
        self.rig.settle()

    @precondition(lambda self: self.leases())
    @rule(pick=picks, num_blocks=st.integers(1, 3))
    def extend(self, pick, num_blocks):
        lease = self.pick(pick)
        if lease.drawn:
            self.rig.commit(lease, lease.committed)
        with suppress(Exhausted):
            self.rig.extend(lease, num_blocks)

    @precondition(lambda self: self.leases())
    @rule(pick=picks, cut=picks)
    def trim(self, pick, cut):
        lease = self.pick(pick)
        if self.rig.model.in_copy() & set(lease.table):
            return  # a worker that has not got its Fork's answer does not rewrite the tail
        first = max([lease.committed] + [c.start + c.length for c in lease.contents])
        if first <= len(lease.atoms):
            self.rig.trim(lease, first + cut % (len(lease.atoms) - first + 1))

    @precondition(lambda self: self.leases() and len(self.rig.leases()) < MAX_LEASES)
    @rule(pick=picks, cut=picks, num_children=st.integers(1, 3))
    def fork(self, pick, cut, num_children):
        lease = self.pick(pick)
        content_end = max([0] + [c.start + c.length for c in lease.contents])
        last = min(lease.computed, lease.committed + self.rig.block_size - 1)
        upto = lease.committed + cut % (last - lease.committed + 1)
        if upto < content_end:
            return
        with suppress(Exhausted):
            self.rig.fork(lease, num_children, upto)

    # ---- reserve, copies, time, administration --------------------------------------------

    @rule(session=st.sampled_from(SESSIONS), num_blocks=st.integers(1, 4))
    def refill(self, session, num_blocks):
        with suppress(Exhausted):
            self.rig.refill(session, num_blocks)

    @rule(session=st.sampled_from(SESSIONS), count=st.integers(1, 4))
    def give_back(self, session, count):
        self.rig.give_back(session, self.rig.undrawn(session)[:count])

    @precondition(lambda self: self.rig.model.copies)
    @rule(pick=picks, ok=st.booleans())
    def copy_ends(self, pick, ok):
        copies = list(self.rig.model.copies)
        self.rig.finish_copy(copies[pick % len(copies)], ok)

    @rule(milliseconds=st.integers(1, 40))
    def time_passes(self, milliseconds):
        self.rig.advance(milliseconds)

    @rule(
        namespace=st.none() | namespaces,
        prefix=st.lists(st.integers(0, 1), max_size=6),
        really=seldom,
    )
    def invalidate(self, namespace, prefix, really):
        if not really:
            return
        self.rig.invalidate(namespace, prefix if namespace is not None else [])

    @rule(namespace=namespaces, tokens=tokens)
    def lookup(self, namespace, tokens):
        before = self.rig.cache.books(), self.rig.cache.num_nodes
        self.rig.lookup(tokens, namespace)
        assert (self.rig.cache.books(), self.rig.cache.num_nodes) == before

    @invariant()
    def every_cached_block_is_found(self) -> None:
        if hasattr(self, "rig"):
            assert all(map(self.rig.is_cached, self.rig.model.entries.values()))

    def teardown(self) -> None:
        """At the end everything can be given back and evicted: nothing leaked."""
        if not hasattr(self, "rig"):
            return
        for session in SESSIONS:
            self.rig.close(session)
        self.rig.finish_copies()
        books = self.rig.cache.books()
        assert books.free + books.cached == books.total
        self.rig.invalidate(None)
        assert self.rig.cache.books().free == books.total


QUICK = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def test_any_order_of_operations_agrees_with_the_model() -> None:
    run_state_machine_as_test(CoreMachine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_more_orders_of_operations() -> None:
    run_state_machine_as_test(
        CoreMachine, settings=settings(QUICK, derandomize=False, database=None, max_examples=5_000)
    )
