"""Erasures: nothing that was invalidated may come back, not even after a restart.

Theory of operation
    A slot of nvme that the tree gives up keeps its record on the disk until it is overwritten. That
    is harmless while the record is true; an Invalidate makes it a lie. So an Invalidate erases the
    slots it takes from the tree and every *stale* slot (free, with a record), since those may
    belong to what is invalidated too. Writes to nvme that run meanwhile are looked at when they
    end: a slot that did not become resident is erased then.
    A slot stays busy until its erasure is reported, so nobody writes it before. On the remote the
    objects of the digests that the tree knows are removed.
    A *ticket* stands for one Invalidate; its event comes when all of that is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from radixkv.core.prefix_index import PrefixIndex
from radixkv.core.results import Event, InvalidateEnded
from radixkv.core.tier_ops import Erase, Place, Transfer
from radixkv.core.transfers import Transfers

MAX_ERASED = 1024  # slots or digests of one operation


@dataclass(slots=True)
class _Ticket:
    """What an Invalidate still waits for. `doomed` are the digests it removes from the remote."""

    number: int
    writes: set[int]
    erasures: set[int]
    doomed: set[bytes]
    failed: int = 0


class Erasing:
    """Erasures of a cache, and who waits for them."""

    def __init__(self, index: PrefixIndex, transfers: Transfers, events: list[Event]) -> None:
        self._transfers = transfers
        self._events = events
        nvme = len(index.places) > Place.NVME
        self._slots = index.places[Place.NVME].pool if nvme else None
        self._running: dict[int, Erase] = {}
        self._tickets: list[_Ticket] = []
        transfers.before_release = self._transfer_over

    def begin(self, slots: Iterable[int], digests: Sequence[bytes]) -> int:
        """Erase these records, which the tree has just given up, and all stale ones.

        Returns the ticket; 0 if there is nothing to wait for.
        """
        ticket = _Ticket(self._transfers.next_id(), set(), set(self._running), set(digests))
        for running in self._transfers.running.values():
            if running.op.target in (Place.NVME, Place.REMOTE):
                ticket.writes.add(running.op.transfer_id)
        if self._slots is not None and self._slots.stale is not None:
            self._erase_slots([ticket], self._slots.stale.union(slots))
        self._erase_digests([ticket], digests)
        if not ticket.writes and not ticket.erasures:
            return 0
        self._tickets.append(ticket)
        return ticket.number

    def done(self, erase_id: int, ok: bool) -> None:
        """An erasure is over."""
        op = self._running.pop(erase_id)
        if self._slots is not None and self._slots.stale is not None:
            self._slots.let_go(op.ids)
            if ok:
                self._slots.stale.difference_update(op.ids)
        for ticket in self._tickets:
            if erase_id in ticket.erasures:
                ticket.erasures.discard(erase_id)
                ticket.failed += 0 if ok else len(op.ids or op.digests)
        self._finish()

    def _erase_slots(self, tickets: list[_Ticket], slots: Iterable[int]) -> None:
        """Those of these slots that nobody owns; they are kept from being written meanwhile."""
        assert self._slots is not None
        chosen = self._slots.withdraw(slots)
        for at in range(0, len(chosen), MAX_ERASED):
            self._start(tickets, Place.NVME, chosen[at : at + MAX_ERASED], ())

    def _erase_digests(self, tickets: list[_Ticket], digests: Sequence[bytes]) -> None:
        for at in range(0, len(digests), MAX_ERASED):
            self._start(tickets, Place.REMOTE, (), digests[at : at + MAX_ERASED])

    def _start(
        self, tickets: list[_Ticket], place: Place, ids: Sequence[int], digests: Sequence[bytes]
    ) -> None:
        op = Erase(self._transfers.next_id(), place, tuple(ids), tuple(digests))
        self._running[op.erase_id] = op
        self._transfers.ops.append(op)
        for ticket in tickets:
            ticket.erasures.add(op.erase_id)

    def _transfer_over(self, op: Transfer) -> None:
        """A transfer has ended, and its blocks are still busy: erase what it left for nobody."""
        waiting = [ticket for ticket in self._tickets if op.transfer_id in ticket.writes]
        if not waiting:
            return
        if op.target is Place.NVME and self._slots is not None:
            self._erase_slots(waiting, self._slots.parked.intersection(op.target_ids))
        else:
            doomed = set().union(*(ticket.doomed for ticket in waiting))
            lost = [name.digest for name in op.identities if name.digest in doomed]
            self._erase_digests(waiting, lost)
        for ticket in waiting:
            ticket.writes.discard(op.transfer_id)
        self._finish()

    def _finish(self) -> None:
        over = [ticket for ticket in self._tickets if not ticket.writes and not ticket.erasures]
        for ticket in over:
            self._tickets.remove(ticket)
            self._events.append(InvalidateEnded(ticket.number, ticket.failed))
