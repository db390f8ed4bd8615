"""Faults the state machine and the simulation have found, as the shortest cases of their kind."""

import pytest

from radixkv.core.errors import InvalidArgument
from radixkv.core.results import AcquireRequest, ContentRange
from tests.core_audit import WaitingAcquire
from tests.core_rig import NAMESPACE, Rig
from tests.naive_model import ModelLease, int32


@pytest.mark.parametrize("wait_ms", [0, 500])
def test_a_partial_tail_never_keeps_an_acquire_from_fitting(wait_ms: int) -> None:
    rig = Rig(4, 4)
    rig.open(1)
    rig.cache_prompt(1, list(range(16)))
    lease = rig.lease(1, [0, 1] + list(range(50, 64)), partial_tail=True, capacity_wait_ms=wait_ms)
    assert len(lease.table) == 4 and not lease.copies


def test_a_refused_content_range_leaves_nothing_behind() -> None:
    rig = Rig(8, 4)
    rig.open(1)
    bad = (ContentRange(0, 2, b"cat"), ContentRange(1, 2, b"dog"))
    with pytest.raises(InvalidArgument):
        rig.cache.acquire(1, 1, AcquireRequest(int32(range(6)), NAMESPACE, bad), 0)
    rig.settle()
    rig.cache_prompt(1, list(range(6)), contents=(ContentRange(0, 3, b"cat"),))
    assert len(rig.model.entries) == 1, "cat may be of another length"


def follower(rig: Rig) -> tuple[ModelLease, WaitingAcquire]:
    """A lease that computes a prompt, and an Acquire that waits for it."""
    leader = rig.lease(1, list(range(6)))
    waiting = rig.acquire(1, list(range(6)), wait_ms=10_000)
    assert isinstance(waiting, WaitingAcquire)
    return leader, waiting


def test_nobody_waits_for_a_leader_whose_prefix_was_invalidated() -> None:
    rig = Rig(8, 2)
    rig.open(1)
    _, waiting = follower(rig)
    rig.invalidate(None)
    assert isinstance(rig.answers[1, waiting.lease_id], ModelLease)


def test_nobody_waits_for_what_a_leader_has_trimmed() -> None:
    rig = Rig(8, 2)
    rig.open(1)
    leader, waiting = follower(rig)
    rig.trim(leader, 0)
    assert isinstance(rig.answers[1, waiting.lease_id], ModelLease)


@pytest.mark.parametrize("invalidated", [False, True])
def test_a_block_is_not_freed_through_the_tree_while_a_copy_reads_it(invalidated: bool) -> None:
    rig = Rig(4, 2)
    rig.open(1)
    parent = rig.compute(rig.lease(1, [0]))
    (child,) = rig.fork(parent, 1, 1)
    parent.append(5)
    rig.compute(parent)
    rig.commit(parent)
    rig.release(parent)
    if invalidated:
        rig.invalidate(None)
    others = [rig.compute(rig.lease(1, [token])) for token in (7, 8)]
    rig.settle()
    rig.finish_copies()
    assert child.computed == 1
    rig.settle()
    for lease in (child, *others):
        rig.release(lease)
    assert rig.cache.books().leased == rig.cache.books().in_flight == 0


def test_releasing_an_invalidated_lease_tells_how_much_of_it_stays_cached() -> None:
    rig = Rig(8, 4)
    rig.open(1)
    lease = rig.compute(rig.lease(1, list(range(20))))
    rig.commit(lease)
    (child,) = rig.fork(lease, 1, 20)
    rig.invalidate(NAMESPACE, range(10))  # what begins with 10 tokens: all but two blocks
    assert rig.release(lease) == 8
    rig.invalidate(NAMESPACE)
    assert rig.release(child) == 0
    assert rig.lookup(range(20)) == 0


def test_what_took_the_place_of_an_invalidated_branch_stays_when_that_one_is_freed() -> None:
    rig = Rig(16, 4)
    rig.open(1)
    old = rig.compute(rig.lease(1, list(range(20))))
    rig.commit(old)
    rig.invalidate(NAMESPACE, range(10))
    new = rig.compute(rig.lease(1, list(range(20))))
    rig.commit(new)
    rig.invalidate(NAMESPACE)
    rig.release(old)
    rig.settle()
    rig.release(new)
    assert rig.cache.books().free == 16


def test_only_its_own_session_waits_behind_the_waiters_of_a_full_one() -> None:
    rig = Rig(16, 4, max_private_blocks=2)
    rig.open(1)
    rig.open(2)
    held = rig.lease(1, list(range(8)))
    waiting = [rig.acquire(1, [100 + i] * 8, capacity_wait_ms=1000 + i) for i in range(3)]
    rig.release(rig.lease(2, [50] * 8))
    rig.advance(500)
    rig.release(rig.lease(2, [60] * 8))
    rig.release(held)
    assert [isinstance(rig.answers.get((1, w.lease_id)), ModelLease) for w in waiting] == [
        True, False, False,
    ]  # fmt: skip
