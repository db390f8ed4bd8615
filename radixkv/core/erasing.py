"""Erasures: nothing that was invalidated may come back, not even after a restart.

Theory of operation
    A slot of nvme that the tree gives up keeps its record on the disk until it is overwritten. That
    is harmless while the record is true; an Invalidate makes it a lie. So an Invalidate erases the
    slots it takes from the tree and every *stale* slot (free, with a record), since those may
    belong to what is invalidated too. Slots that a transfer reads or writes meanwhile are *doomed*:
    erased when it lets go of them, unless they have become part of the tree.
    A slot is busy until its erasure is reported, so nobody writes it before. On the remote the
    objects of the digests that the tree knew are removed, those being written when that is over.
    A *ticket* stands for one Invalidate; its event comes when all of that is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from radixkv.core.digest import EVERYTHING, all_of
from radixkv.core.prefix_index import PrefixIndex
from radixkv.core.results import Event, InvalidateEnded
from radixkv.core.tier_ops import Erase, Place, Transfer
from radixkv.core.transfers import Transfers

MAX_ERASED = 1024  # slots or digests of one operation


@dataclass(slots=True)
class _Ticket:
    """What an Invalidate still waits for: writes to the remote, doomed slots, erasures.

    `digests` are what it removes from the remote.
    """

    number: int
    told: bool
    digests: set[bytes]
    writes: set[int] = field(default_factory=set)
    slots: set[int] = field(default_factory=set)
    erasures: set[int] = field(default_factory=set)
    failed: int = 0

    @property
    def is_over(self) -> bool:
        """Nothing is waited for any more."""
        return not (self.writes or self.slots or self.erasures)


class Erasing:
    """Erasures of a cache, and who waits for them."""

    def __init__(self, index: PrefixIndex, transfers: Transfers, events: list[Event]) -> None:
        self._transfers = transfers
        self._events = events
        self._slots = index.places[Place.NVME].pool if len(index.places) > Place.NVME else None
        self._running: dict[int, Erase] = {}
        self._digests: set[bytes] = set()  # being removed from the remote
        self._tickets: list[_Ticket] = []
        transfers.before_release = self._transfer_over
        if self._slots is not None:
            self._slots.on_free = self._doomed_are_free
            self._slots.on_kept = self._doomed_are_kept

    def begin(self, slots: Iterable[int], digests: Sequence[bytes], told: bool = True) -> int:
        """Erase these records, which the tree has just given up, and all stale ones.

        Returns the ticket; 0 if there is nothing to wait for, or nobody is to be told.
        """
        ticket = _Ticket(self._transfers.next_id(), told, set(digests))
        ticket.erasures.update(self._running)
        self._begin_slots(ticket, slots)
        written: set[bytes] = set()
        for running in self._transfers.running.values():
            if running.op.target is Place.REMOTE:
                ticket.writes.add(running.op.transfer_id)
                written.update(name.digest for name in running.op.identities)
        self._erase_digests([ticket], [digest for digest in digests if digest not in written])
        if ticket.is_over:
            return 0
        self._tickets.append(ticket)
        return ticket.number if told else 0

    def is_erased(self, digest: bytes) -> bool:
        """Whether an object of the remote is being removed, or will be."""
        doomed = [self._digests, *(ticket.digests for ticket in self._tickets)]
        return any(_covers(digests, digest) for digests in doomed)

    def done(self, erase_id: int, ok: bool) -> None:
        """An erasure is over."""
        op = self._running.pop(erase_id)
        self._digests.difference_update(op.digests)
        if self._slots is not None and self._slots.stale is not None:
            self._slots.let_go(op.ids)
            if ok:
                self._slots.stale.difference_update(op.ids)
        for ticket in self._tickets:
            if erase_id in ticket.erasures:
                ticket.erasures.discard(erase_id)
                ticket.failed += 0 if ok else len(op.ids or op.digests)
        self._finish()

    # ---- nvme -------------------------------------------------------------------------------

    def _begin_slots(self, ticket: _Ticket, slots: Iterable[int]) -> None:
        pool = self._slots
        if pool is None or pool.stale is None:
            return
        erased = {slot for op in self._running.values() for slot in op.ids}
        wanted = pool.stale.union(slots) - erased
        for running in self._transfers.running.values():
            if running.op.target is Place.NVME:
                wanted.update(running.op.target_ids)
        self._erase_slots([ticket], pool.withdraw(wanted))
        ticket.slots = {slot for slot in wanted if slot in pool.busy} - erased
        ticket.slots -= {slot for op in self._running.values() for slot in op.ids}
        pool.doomed |= ticket.slots
        if ticket.told and not ticket.erasures and not ticket.slots:
            # Nothing to erase is still a barrier: what was overwritten lately must stay so.
            self._start([ticket], Place.NVME, (), ())

    def _erase_slots(self, tickets: list[_Ticket], slots: Sequence[int]) -> None:
        """Slots that are parked and held for this."""
        for at in range(0, len(slots), MAX_ERASED):
            self._start(tickets, Place.NVME, slots[at : at + MAX_ERASED], ())

    def _doomed_are_free(self, slots: list[int]) -> None:
        """Nobody uses these doomed slots any more."""
        assert self._slots is not None
        self._slots.hold(slots)
        waiting = [ticket for ticket in self._tickets if not ticket.slots.isdisjoint(slots)]
        self._erase_slots(waiting, slots)
        self._doomed_are_kept(slots)

    def _doomed_are_kept(self, slots: list[int]) -> None:
        """No ticket waits for these slots any more."""
        for ticket in self._tickets:
            ticket.slots.difference_update(slots)
        if slots:
            self._finish()

    # ---- remote -----------------------------------------------------------------------------

    def _erase_digests(self, tickets: list[_Ticket], digests: Sequence[bytes]) -> None:
        chosen = [digest for digest in dict.fromkeys(digests) if digest not in self._digests]
        self._digests.update(chosen)
        for at in range(0, len(chosen), MAX_ERASED):
            self._start(tickets, Place.REMOTE, (), chosen[at : at + MAX_ERASED])

    def _transfer_over(self, op: Transfer) -> None:
        """A transfer has ended: if it wrote what is to be removed, remove it now."""
        waiting = [ticket for ticket in self._tickets if op.transfer_id in ticket.writes]
        if not waiting:
            return
        removed: set[bytes] = set().union(*(ticket.digests for ticket in waiting))
        written = [name.digest for name in op.identities]
        self._erase_digests(waiting, [digest for digest in written if _covers(removed, digest)])
        for ticket in waiting:
            ticket.writes.discard(op.transfer_id)
        self._finish()

    # ---- both -------------------------------------------------------------------------------

    def _start(
        self, tickets: list[_Ticket], place: Place, ids: Sequence[int], digests: Sequence[bytes]
    ) -> None:
        op = Erase(self._transfers.next_id(), place, tuple(ids), tuple(digests))
        self._running[op.erase_id] = op
        self._transfers.ops.append(op)
        for ticket in tickets:
            ticket.erasures.add(op.erase_id)

    def _finish(self) -> None:
        over = [ticket for ticket in self._tickets if ticket.is_over]
        for ticket in over:
            self._tickets.remove(ticket)
            if ticket.told:
                self._events.append(InvalidateEnded(ticket.number, ticket.failed))


def _covers(digests: set[bytes], digest: bytes) -> bool:
    """Whether these name an object, by itself or with others."""
    return digest in digests or all_of(digest) in digests or EVERYTHING in digests
