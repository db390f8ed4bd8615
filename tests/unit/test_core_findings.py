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
