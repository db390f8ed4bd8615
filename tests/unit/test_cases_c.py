"""Cases of group C: races between tiers, failures, full disks, restarts. Told by hand.

Every story goes through the tier rig, which proves after each step that answers hold the right
bytes and that no block has two owners. Every negative is paired with a positive.
"""

from collections.abc import Callable
from random import Random

import pytest

from radixkv.core.tier_ops import Outcome, Transfer
from tests.core_audit import WaitingAcquire
from tests.tier_audit import TierLease
from tests.tier_places import CPU, GPU, NVME, REMOTE
from tests.tier_rig import TierRig

END = [9]  # what is asked for is one token longer than what is cached
B = 2  # tokens per block


def text(num_blocks: int, start: int = 100) -> list[int]:
    """Tokens of so many whole blocks; different ones for another `start`."""
    return list(range(start, start + B * num_blocks))


def new_rig(num_blocks: int = 8, write_policy: str = "write_through", **config: object) -> TierRig:
    """A rig with two sessions, where whatever lies below is brought up."""
    rig = TierRig(num_blocks, B, break_even=False, write_policy=write_policy, **config)
    rig.open(1)
    rig.open(2)
    return rig


def push_out(rig: TierRig, keep: int = 0, start: int = 5_000) -> None:
    """Session 2 takes all blocks of the gpu but `keep`, and gives them back."""
    rig.finish_all()
    lease = rig.lease(2, text(rig.config.num_blocks - keep, start), capacity_wait_ms=10_000)
    rig.release(lease)
    rig.finish_all()


def hit(rig: TierRig, tokens: list[int], **options: object) -> int:
    """Blocks that an Acquire in session 1 gets as cached, wherever they were."""
    lease = rig.lease(1, tokens + END, **options)
    rig.release(lease)
    return lease.published // B


def loads(rig: TierRig) -> list[Transfer]:
    """Unfinished transfers up to the gpu."""
    return rig.traffic.pending(target=GPU)


def ask(rig: TierRig, tokens: list[int], session: int = 1) -> WaitingAcquire:
    """An Acquire that has to wait for a load."""
    waiting = rig.acquire(session, tokens + END, capacity_wait_ms=10_000)
    assert isinstance(waiting, WaitingAcquire) and loads(rig)
    return waiting


# ---- C1: source evicted while it is being loaded back -------------------------------------


def test_c1_a_source_is_not_reused_while_it_is_loaded() -> None:
    rig = new_rig(16, cpu_blocks=8)
    p = text(8)
    rig.cache_prompt(1, p)
    push_out(rig)
    waiting = ask(rig, p)
    delayed = loads(rig)
    rig.cache_prompt(2, text(6, start=200))  # wants to be written to cpu as well
    for op in rig.traffic.pending(target=CPU):
        assert not set(op.target_ids) & {i for load in delayed for i in load.source_ids}
        rig.finish(op)
    for op in delayed:
        rig.finish(op)
    rig.finish_all()
    lease = rig.answer(waiting)
    assert isinstance(lease, TierLease) and lease.published == len(p)


@pytest.mark.parametrize("cpu_blocks", [8, 16])
def test_c1_loading_needs_room_that_must_be_written_down_first(cpu_blocks: int) -> None:
    rig = new_rig(8, "write_back", cpu_blocks=cpu_blocks, low_watermark=0.0, high_watermark=0.0)
    p, q = text(7), text(8, start=200)
    rig.cache_prompt(1, p)
    push_out(rig)
    assert rig.lookup(p + END) == len(p), "all of it is on cpu"
    rig.cache_prompt(2, q, capacity_wait_ms=10_000)
    assert rig.books().cached == 8 and not len(rig.traffic), "the gpu is full of unwritten blocks"
    lease = rig.lease(1, p + END, capacity_wait_ms=10_000)
    assert cpu_blocks == 8 or lease.published == len(p), "room for both: nothing is lost"
    rig.release(lease)
    rig.quiesce()
    assert cpu_blocks == 8 or rig.lookup(q + END) == len(q)


# ---- C2: block copied out before it was written -------------------------------------------


def test_c2_only_what_was_committed_is_copied_out() -> None:
    rig = new_rig(8, cpu_blocks=8, nvme_blocks=8)
    lease = rig.lease(1, text(4))
    rig.compute(lease, 3 * B)
    assert not rig.new_ops, "nothing was committed"
    rig.commit(lease, 2 * B)
    written = {i for op in rig.traffic.pending(source=GPU) for i in op.source_ids}
    assert written and written <= set(lease.table[:2])
    rig.compute(lease)  # the rig refuses to write a block that is being read
    rig.finish_all()
    rig.commit(lease)
    rig.release(lease)
    push_out(rig)
    assert hit(rig, text(4)) == 4


# ---- C3: request aborted or preempted while its blocks are being stored -------------------


@pytest.mark.parametrize("end", [TierRig.release, lambda rig, lease: rig.close(1)])
def test_c3_blocks_being_stored_are_not_given_away(end: Callable) -> None:
    rig = new_rig(8, cpu_blocks=16)
    p = text(4)
    lease = rig.compute(rig.lease(1, p))
    rig.commit(lease)
    stores = rig.traffic.pending(GPU, CPU)
    assert stores
    end(rig, lease)
    q = rig.acquire(2, text(8, start=200), capacity_wait_ms=10_000)
    assert isinstance(q, WaitingAcquire), "four of its blocks are being read"
    for op in stores:
        rig.finish(op)
    q_lease = rig.answer(q)
    assert isinstance(q_lease, TierLease)
    rig.compute(q_lease)
    rig.commit(q_lease)
    assert rig.lookup(p + END) == len(p), "its own bytes, from cpu"
    rig.release(q_lease)
    assert rig.lease(2, p + END, capacity_wait_ms=10_000).published == len(p)


def test_c3_a_prefix_is_attached_again_while_it_is_stored() -> None:
    rig = new_rig(8, cpu_blocks=16)
    p = text(4)
    rig.cache_prompt(1, p)
    assert rig.traffic.pending(GPU, CPU)
    again = rig.acquire(2, p + END)
    assert isinstance(again, TierLease) and again.published == len(p)
    rig.finish_all()
    rig.release(again)
    push_out(rig)
    assert hit(rig, p) == 4


@pytest.mark.parametrize("carried_out", [True, False])
def test_c3_a_load_that_nobody_waits_for_any_more(carried_out: bool) -> None:
    rig = new_rig(8, cpu_blocks=16)
    p = text(6)
    rig.cache_prompt(1, p)
    push_out(rig)
    waiting = ask(rig, p)
    delayed = loads(rig)
    rig.cancel(waiting)
    q = rig.acquire(2, text(8, start=200), capacity_wait_ms=10_000)
    assert isinstance(q, WaitingAcquire), "the blocks being written are not to be had"
    for op in delayed:
        failed = {} if carried_out else dict.fromkeys(range(len(op.target_ids)), Outcome.FAILED)
        rig.finish(op, failed)
    q_lease = rig.answer(q)
    assert isinstance(q_lease, TierLease)
    rig.compute(q_lease)
    rig.commit(q_lease)
    rig.release(q_lease)
    rig.quiesce()
    assert hit(rig, p) == 6


# ---- C4: one failed block in a batch ------------------------------------------------------


def finish_but(rig: TierRig, place: object, token: int, outcome: Outcome) -> int:
    """Finish everything; the block that begins with `token` never gets to or from `place`."""
    failed = 0
    for _ in range(50):
        ops = list(rig.traffic.transfers.values())
        if not ops:
            return failed
        for op in ops:
            blocks = [int.from_bytes(name.tokens[:4], "little") for name in op.identities]
            fates = {i: outcome for i, first in enumerate(blocks) if first == token}
            fates = fates if place in (op.source, op.target) else {}
            failed += len(fates)
            rig.finish(op, fates)
    raise AssertionError("tried again and again")


@pytest.mark.parametrize("place", [NVME, REMOTE])
def test_c4_i_a_failed_write_ends_what_is_found(place: object) -> None:
    rig = new_rig(8, nvme_blocks=16 * (place is NVME), remote=place is REMOTE, eviction_wait_ms=0)
    p = text(5)
    rig.cache_prompt(1, p)
    assert finish_but(rig, place, p[3 * B], Outcome.FAILED) >= 1
    assert rig.lookup(p + END) == len(p), "the gpu has all of it"
    lease = rig.acquire(2, text(8, start=200), capacity_wait_ms=10_000)
    while isinstance(lease, WaitingAcquire):
        finish_but(rig, place, p[3 * B], Outcome.FAILED)
        rig.advance(10)
        lease = rig.answer(lease) or lease
    assert isinstance(lease, TierLease)
    rig.release(lease)
    rig.finish_all()
    assert hit(rig, p) == 3
    rig.advance(120_000)  # however the place fared, it is tried again by then
    rig.cache_prompt(1, p)
    push_out(rig)
    assert hit(rig, p) == 5, "the next write may succeed"


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.BAD])
def test_c4_ii_a_failed_read_is_a_shorter_prefix(outcome: Outcome) -> None:
    rig = new_rig(8, nvme_blocks=16)
    p = text(5)
    rig.cache_prompt(1, p)
    push_out(rig)
    waiting = ask(rig, p)
    assert 1 <= finish_but(rig, NVME, p[3 * B], outcome) < 5, "not again and again"
    lease = rig.answer(waiting)
    assert isinstance(lease, TierLease) and lease.published == 3 * B
    assert lease.table[:3] and rig.books().leased == 6
    rig.release(lease)
    rig.quiesce()
    assert rig.lookup(p + END) == (3 * B if outcome is Outcome.BAD else 5 * B)
    rig.cache_prompt(1, p)
    push_out(rig)
    assert hit(rig, p) == 5


def test_c4_iii_a_record_that_vanishes_is_a_miss() -> None:
    rig = new_rig(8, nvme_blocks=16)
    p = text(5)
    rig.cache_prompt(1, p)
    push_out(rig)
    slot = next(s for s, r in rig.places.nvme.items() if r.identity.tokens[0] == p[2 * B])
    assert rig.lookup(p + END) == len(p)
    rig.places.lose(NVME, slot)
    assert hit(rig, p) == 2
    assert rig.lookup(p + END) == 2 * B, "not offered again"


# ---- C5 (iii), C6: disk limit and restart book-keeping ------------------------------------


def used(rig: TierRig) -> int:
    """Slots of nvme that the books say are not free."""
    books = rig.books(NVME)
    return books.total - books.free


def test_c6_the_disk_limit_holds_and_a_restart_finds_what_was_there() -> None:
    rig = new_rig(8, nvme_blocks=8)
    for start in range(1_000, 4_000, 100):
        rig.cache_prompt(1, text(4, start))
        rig.finish_all()
        assert used(rig) <= 8 and set(rig.places.nvme) <= set(range(1, 9))
    before = used(rig)
    assert rig.crash() == before == 8
    assert used(rig) == before
    rig.open(1)
    rig.open(2)
    assert rig.lookup(text(4, 3_900) + END) == 4 * B, "the newest are there"
    assert hit(rig, text(4, 3_900)) == 4
    rig.cache_prompt(1, text(4, 7_000))
    push_out(rig)
    assert hit(rig, text(4, 7_000)) == 4, "new ones displace old ones"
    assert used(rig) == 8


def test_c6_a_smaller_limit_after_a_restart() -> None:
    rig = new_rig(8, nvme_blocks=8)
    for start in (1_000, 2_000):
        rig.cache_prompt(1, text(4, start))
    rig.finish_all()
    assert rig.crash(nvme_blocks=4) <= 4
    assert rig.books(NVME).total == 4
    rig.open(1)
    rig.open(2)
    rig.cache_prompt(1, text(4, 3_000))
    push_out(rig)
    assert hit(rig, text(4, 3_000)) == 4


@pytest.mark.parametrize("seed", range(20))
def test_c6_what_was_under_way_when_the_process_died(seed: int) -> None:
    rig = new_rig(8, nvme_blocks=16)
    p = text(6)
    rig.cache_prompt(1, p)
    assert rig.traffic.pending(target=NVME)
    found = rig.crash(Random(seed))  # the rig checks that just the whole prefix is found
    rig.open(1)
    rig.open(2)
    assert hit(rig, p) == found
    rig.cache_prompt(1, p)
    push_out(rig)
    assert hit(rig, p) == 6
