"""Case D7: an Invalidate after which nothing comes back, from whichever place or transfer."""

import pytest

from radixkv.core.tier_ops import Outcome
from tests.core_audit import WaitingAcquire
from tests.tier_audit import TierLease
from tests.tier_places import GPU, NVME
from tests.tier_rig import TierRig
from tests.unit.test_cases_c import END, B, ask, loads, new_rig, push_out, text


def everywhere() -> tuple[TierRig, list[int], TierLease]:
    """P on gpu, cpu and nvme and under a lease; a write-out and a load of its family delayed."""
    rig = new_rig(16, cpu_blocks=16, nvme_blocks=32)
    p = text(4)
    rig.cache_prompt(1, p + text(2, start=200))
    push_out(rig)
    lease = rig.lease(1, p + END)
    ask(rig, p + text(2, start=200), session=2)
    other = rig.compute(rig.lease(1, p + text(2, start=300) + END))
    rig.commit(other)
    assert rig.traffic.pending(source=GPU) and loads(rig)
    rig.release(other)
    return rig, p, lease


def test_d7_nothing_survives_an_invalidation() -> None:
    rig, p, lease = everywhere()
    done = rig.invalidate(prefix=p[:B])
    assert done.leased_blocks >= 4 and done.cpu_blocks >= 6 and done.nvme_blocks >= 6
    assert done.ticket and rig.tickets[done.ticket] is None, "records must be erased first"
    assert rig.lookup(p + END) == 0
    rig.finish_all()
    ended = rig.tickets[done.ticket]
    assert ended is not None and ended.failed_erasures == 0
    assert rig.lookup(p + text(2, start=200) + END) == rig.lookup(p + END) == 0
    assert not rig.places.nvme, "nothing of it is on the disk"
    rig.release(lease)  # the rig has checked its bytes all along
    assert rig.lookup(p + END) == 0, "nor is it published again"
    rig.quiesce()
    assert rig.crash() == 0
    rig.open(1)
    rig.cache_prompt(1, p)
    rig.finish_all()
    assert rig.crash() == 4, "what is computed anew is found"


@pytest.mark.parametrize("carried_out", ["before", "after"])
def test_d7_blocks_on_their_way_from_the_remote(carried_out: str) -> None:
    rig = new_rig(8, remote=True)
    p = text(4)
    rig.cache_prompt(1, p)
    push_out(rig)
    waiting = rig.acquire(1, p + END, capacity_wait_ms=10_000)
    assert isinstance(waiting, WaitingAcquire)
    rig.finish(next(iter(rig.traffic.probes.values())))
    (load,) = loads(rig)
    done = rig.invalidate(prefix=p[:B])
    if carried_out == "before":
        rig.finish(load)
    else:
        for op in list(rig.traffic.erases.values()):
            rig.finish(op)
        rig.finish(load)
    rig.finish_all()
    assert rig.lookup(p + END) == 0
    assert not rig.places.remote and (not done.ticket or rig.tickets[done.ticket])
    rig.quiesce()
    lease = rig.answer(waiting)
    assert isinstance(lease, TierLease) and not lease.published


def test_d7_twice_is_harmless() -> None:
    rig, p, lease = everywhere()
    first, second = rig.invalidate(None), rig.invalidate(None)
    assert first.nvme_blocks >= 6 and second.removed_blocks == second.nvme_blocks == 0
    rig.finish_all()
    assert all(rig.tickets.values())
    rig.release(lease)
    rig.close(2)
    rig.quiesce()
    for place in rig.sizes:
        assert rig.books(place).free == rig.books(place).total


def test_d7_a_failed_erasure_is_told() -> None:
    rig = new_rig(8, nvme_blocks=8)
    rig.cache_prompt(1, text(4))
    rig.finish_all()
    done = rig.invalidate()
    while rig.traffic.erases:
        rig.finish_erase(next(iter(rig.traffic.erases.values())), ok=False)
        rig.advance(10)
    ended = rig.tickets[done.ticket]
    assert ended is not None and ended.failed_erasures == 4
    assert rig.lookup(text(4) + END) == 0


@pytest.mark.parametrize("how", ["evicted", "failed"])
def test_d7_records_that_nobody_refers_to_any_more(how: str) -> None:
    """A slot that was given up keeps its record until it is written again; not for ever."""
    rig = new_rig(8, nvme_blocks=8, eviction_wait_ms=0)
    p = text(4)
    lease = rig.compute(rig.lease(1, p))
    rig.commit(lease)
    for op in rig.traffic.pending(target=NVME):
        outcomes = [rig.copy(op, index) for index in range(len(op.target_ids))]
        rig.report(op, [Outcome.FAILED] * len(outcomes) if how == "failed" else outcomes)
    if how == "evicted":
        rig.release(lease)
        for start in (1_000, 2_000):
            rig.cache_prompt(1, text(3, start), capacity_wait_ms=10_000)
            rig.finish_all()
    rig.invalidate(prefix=p[:B])
    rig.finish_all()
    assert all(rig.tickets.values())
    rig.crash()  # the rig checks that nothing invalidated is found
    rig.open(1)
    assert rig.lookup(p + END) == 0
