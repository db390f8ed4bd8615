"""What movers, time and the end of the process do to a cache with tiers, by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from radixkv.core.tier_ops import BlockIdentity, Erase, Outcome, Probe, Transfer
from tests.tier_audit import TierAudit
from tests.tier_places import CPU, GPU, NVME, REMOTE, covers
from tests.tier_truth import KnownBlock

MAX_ROUNDS = 300  # of finishing all there is to do, until nothing is left
MAX_STILL = 3  # polls at one moment until the core is content
NO_FATES: Mapping[int, Outcome] = {}


class TierHands(TierAudit):
    """Operations of the tiers are carried out whole, one by one or all of them."""

    # ---- movers ---------------------------------------------------------------------------

    def report(self, op: Transfer, outcomes: Sequence[Outcome], elapsed_s: float = 0.001) -> None:
        """Tell the core how a transfer ended; its bytes were dealt with before."""
        self.note("ends", op.transfer_id, [outcome.name for outcome in outcomes])
        blocks = self._blocks_of(op)
        self.traffic.end(op)
        if op.source is REMOTE:  # its marks are not known here
            for block, outcome in zip(blocks, outcomes, strict=True):
                if outcome is Outcome.DONE and self.truth.may_be_found(block):
                    sure_until_ms = block.sure_until_ms  # a Commit may have been faster
                    block.alive, block.tags = True, frozenset()
                    self.truth.set_expiry(block, None)
                    block.sure_until_ms = sure_until_ms
        elif op.source is not GPU:
            unread = [b for b, outcome in zip(blocks, outcomes, strict=True) if outcome]
            self.unread(unread)
        self.cache.transfer_done(op.transfer_id, list(outcomes), elapsed_s, self.now_ms)
        self.settle()

    def _blocks_of(self, op: Transfer) -> list[KnownBlock]:
        if op.identities:
            return [self.truth.by_digest[identity.digest] for identity in op.identities]
        if op.source is CPU:
            return [self.cpu_holds[block] for block in op.source_ids]
        return []

    def finish(self, op: Transfer | Erase | Probe, fates: Mapping[int, Outcome] = NO_FATES) -> None:
        """Carry an operation out, but for blocks with another fate, and report it."""
        if isinstance(op, Transfer):
            outcomes = [fates[i] if i in fates else self.copy(op, i) for i in range(num_blocks(op))]
            self.report(op, outcomes)
        elif isinstance(op, Erase):
            self.finish_erase(op, True)
        else:
            self.finish_probe(op, [digest in self.places.remote for digest in op.digests])

    def copy(self, op: Transfer, index: int) -> Outcome:
        """Carry out one block of a transfer."""
        outcome = self.places.copy(op, index, self.now_ms)
        if op.target is CPU and outcome is Outcome.DONE:
            content = self.places.cpu[op.target_ids[index]].content
            self.cpu_holds[op.target_ids[index]] = self.truth.by_content[content]
        return outcome

    def finish_erase(self, op: Erase, ok: bool) -> None:
        """All records of an Erase are gone, or it failed, whatever of it was done."""
        if ok:
            for key in op.ids or op.digests:
                self.places.erase(op.place, key)
        for block in self.truth.by_digest.values():
            if any(covers(digest, block.digest) for digest in op.digests):
                block.leftover = block.digest in self.places.remote  # not removed: found again
        self.note("erase", op.erase_id, "done" if ok else "failed")
        self.traffic.end(op)
        self.cache.erase_done(op.erase_id, ok, self.now_ms)
        self.settle()

    def finish_probe(self, op: Probe, present: Sequence[bool] | None) -> None:
        """The remote says what it has, if anything."""
        self.note("probe", op.probe_id, present)
        self.traffic.end(op)
        self.cache.probe_done(op.probe_id, present, self.now_ms)
        self.settle()

    def finish_copy(self, copy_id: int, ok: bool = True) -> None:
        """A copy within the gpu is made, or fails; the operation behind it is answered."""
        copy = self.copies.pop(copy_id)
        if ok:
            n = copy.num_tokens
            self.places.gpu[copy.target][:n] = self.places.gpu[copy.source][:n]
        self.cache.copy_done(copy_id, ok)
        if copy.lease is not None:
            copy.lease.copies.discard(copy_id)
            copy.lease.computed += copy.num_tokens if ok else 0
        self.settle()

    def finish_copies(self) -> None:
        """All copies within the gpu that are due."""
        for copy_id in list(self.copies):
            self.finish_copy(copy_id)

    def finish_round(self) -> bool:
        """All that is unfinished now, but not what follows from it; whether there was anything."""
        self.new_ops.clear()
        traffic = self.traffic
        ops = [*traffic.transfers.values(), *traffic.erases.values(), *traffic.probes.values()]
        for op in ops:
            self.finish(op)
        self.finish_copies()
        return bool(ops)

    def finish_all(self) -> None:
        """Until the tiers have nothing to do."""
        for _ in range(MAX_ROUNDS):
            if not self.finish_round():
                return
        raise AssertionError("the tiers never come to rest")

    # ---- time -----------------------------------------------------------------------------

    def advance(self, milliseconds: int) -> None:
        """Let time pass, with a poll whenever the core has asked for one."""
        end_ms = self.now_ms + milliseconds
        still = 0
        while (due_ms := self.cache.next_deadline_ms()) is not None and due_ms <= end_ms:
            still = still + 1 if due_ms <= self.now_ms else 0
            assert still < MAX_STILL, "a deadline that does not move"
            self.now_ms = max(due_ms, self.now_ms)
            self.settle()
        self.now_ms = end_ms

    def quiesce(self) -> None:
        """Finish everything and let time pass until nobody waits; nothing is left under way."""
        for _ in range(MAX_ROUNDS):
            if not self.finish_round() and not self.waiting and not self.prefetches:
                break
            self.advance(20)
        assert not len(self.traffic), f"never comes to rest: {self.traffic.transfers}"
        assert not self.waiting and not self.prefetches, (self.waiting, self.prefetches)
        assert all(self.tickets.values()), "an Invalidate never ended"
        for place in self.sizes:
            books = self.books(place)
            assert books.in_flight == 0, (place, books)
            assert books.pinned == 0 or self.pins, (place, books)
            assert books.leased == 0 or self.leases, (place, books)

    # ---- the end of the process -----------------------------------------------------------

    def crash(self, chance: Random | None = None, nvme_blocks: int | None = None) -> int:
        """The process dies, wherever its movers are, and starts again on what nvme holds.

        Returns the number of blocks found; each of them, and nothing else, is found by look-ups.
        """
        self.note("crash")
        if chance is not None:
            self._leave_halfway(chance)
        if nvme_blocks is not None:
            self.config = replace(self.config, nvme_blocks=nvme_blocks)
            kept = {k: v for k, v in self.places.nvme.items() if k <= nvme_blocks}
            self.places.nvme = kept
        records: dict[bytes, list[BlockIdentity]] = {}  # the newest last
        for record in sorted(self.places.readable().values(), key=lambda r: r.sequence):
            records.setdefault(record.identity.digest, []).append(record.identity)
        self.truth.restart(records, set(self.places.remote))
        self.places.lose_memory()
        self.cpu_holds.clear()
        self._fresh()
        whole, lasting = self._whole(records, False), self._whole(records, True)
        found = self.cache.restore(self.places.scan(chance), self.now_ms)
        self.settle()
        assert found in (len(whole), len(lasting)), f"{found} restored of {len(whole)}"
        for block in self.truth.by_digest.values():
            assert self.is_found(block) == (block in lasting), f"{block} after a restart"
        return found

    def _whole(
        self, records: Mapping[bytes, list[BlockIdentity]], lasting: bool
    ) -> set[KnownBlock]:
        """Blocks that have a record, as all above them; `lasting`: none of which has expired."""
        whole: set[KnownBlock] = set()
        for block in sorted(self.truth.by_digest.values(), key=lambda block: len(block.path)):
            if block.digest in records and (block.parent is None or block.parent in whole):
                expires_ms = records[block.digest][-1].expires_ms
                if not lasting or expires_ms is None or self.now_ms < expires_ms:
                    whole.add(block)
        return whole

    def _leave_halfway(self, chance: Random) -> None:
        """What was under way has happened, or not, or half."""
        for op in self.traffic.transfers.values():
            if op.target not in (NVME, REMOTE):
                continue
            for index in range(num_blocks(op)):
                fate = chance.random()
                if fate < 0.5:
                    self.places.copy(op, index, self.now_ms)
                elif fate < 0.7:
                    self.places.spoil(op, index)
        for op in self.traffic.erases.values():
            for key in op.ids or op.digests:
                if chance.random() < 0.5:
                    self.places.erase(op.place, key)


def num_blocks(op: Transfer) -> int:
    """Blocks of a transfer."""
    return max(len(op.source_ids), len(op.target_ids))
