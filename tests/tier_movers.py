"""Movers, disks and a remote that are slow, fail, lie and rot, in virtual time and from a seed.

Each operation is a life of its own (a generator that yields milliseconds), so they overlap and end
in any order. None takes longer than MAX_OP_MS, cancelled or not: the core may count on that.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from random import Random

from radixkv.core.tier_ops import Cancel, Erase, Outcome, Place, Probe, TierOp, Transfer
from tests.tier_audit import MAX_OP_MS
from tests.tier_hands import num_blocks
from tests.tier_places import CPU, NVME, REMOTE
from tests.tier_rig import TierRig

Life = Generator[int, None, None]


@dataclass(frozen=True)
class Faults:
    """How often what goes wrong: of blocks, transfers, erases and probes each; rot per step."""

    block: float = 0.0  # one block fails; its target may be untouched, spoiled or written
    death: float = 0.0  # the mover dies: nothing of it counts, whatever was done
    late: float = 0.0
    rot: float = 0.0  # something that lies below is damaged
    erase: float = 0.0
    lie: float = 0.0  # the remote says yes to all
    deaf: float = 0.0  # the remote does not answer
    full: float = 0.0  # for a while, nothing can be written to some place


NONE = Faults()
SLOW = Faults(late=0.3)
NASTY = Faults(block=0.06, death=0.06, late=0.15, rot=0.15, erase=0.1, lie=0.15, deaf=0.1, full=0.1)


class Movers:
    """Carries out what a rig's core wants."""

    def __init__(self, rig: TierRig, chance: Random, faults: Faults) -> None:
        self.rig, self.chance, self.faults = rig, chance, faults
        self.full: set[Place] = set()

    def hits(self, probability: float) -> bool:
        """Whether chance wants it."""
        return self.chance.random() < probability

    def lives(self) -> list[Life]:
        """Operations that nobody carries out yet."""
        ops, self.rig.new_ops = self.rig.new_ops, []
        return [self.life(op) for op in ops if not isinstance(op, Cancel)]

    def life(self, op: TierOp) -> Life:
        """One operation, from its start to its report."""
        match op:
            case Transfer():
                return self.transfer(op)
            case Erase():
                return self.erase(op)
            case Probe():
                return self.probe(op)
        raise AssertionError(op)

    def delay(self) -> int:
        """A part of an operation: short, or now and then long."""
        if self.hits(self.faults.late):
            return self.chance.randint(20, MAX_OP_MS // 3 - 10)
        return self.chance.randint(0, 8)

    # ---- operations -----------------------------------------------------------------------

    def transfer(self, op: Transfer) -> Life:
        """Block after block, then the report."""
        rig, began_ms = self.rig, self.rig.now_ms
        yield self.delay()
        pause = self.chance.randrange(num_blocks(op)) if self.hits(0.3) else -1
        outcomes = []
        for index in range(num_blocks(op)):
            if index == pause:
                yield self.delay()
            outcomes.append(self.block(op, index))
        if self.hits(self.faults.death):
            outcomes = [Outcome.FAILED] * len(outcomes)
        yield self.delay()
        rig.report(op, outcomes, (rig.now_ms - began_ms + 1) / 1000)

    def block(self, op: Transfer, index: int) -> Outcome:
        """The fate of one block."""
        rig = self.rig
        if op.transfer_id in rig.traffic.cancelled and self.hits(0.7):
            return Outcome.FAILED
        if op.target in self.full:
            return Outcome.FAILED
        if not self.hits(self.faults.block):
            return rig.copy(op, index)
        fate = self.chance.random()
        if fate < 0.3:
            rig.copy(op, index)
        elif fate < 0.6:
            rig.places.spoil(op, index)
        return Outcome.FAILED

    def erase(self, op: Erase) -> Life:
        """Record after record; or it fails somewhere."""
        yield self.delay()
        failed = self.hits(self.faults.erase)
        for key in op.ids or op.digests:
            if not failed or self.hits(0.5):
                self.rig.places.erase(op.place, key)
        yield self.delay()
        self.rig.finish_erase(op, not failed)

    def probe(self, op: Probe) -> Life:
        """What the remote has; it may have changed when this is read."""
        yield self.delay()
        present: list[bool] | None = [digest in self.rig.places.remote for digest in op.digests]
        if self.hits(self.faults.deaf):
            present = None
        elif self.hits(self.faults.lie):
            present = [True] * len(op.digests)
        yield self.delay()
        self.rig.finish_probe(op, present)

    # ---- places ---------------------------------------------------------------------------

    def surroundings(self) -> Life:
        """Copies within the gpu, bits that rot, disks that are full."""
        rig = self.rig
        while True:
            yield self.chance.randint(4, 20)
            if rig.copies:
                rig.finish_copy(self.chance.choice(list(rig.copies)), not self.hits(0.1))
            if self.hits(self.faults.rot):
                rotten = [NVME, REMOTE, CPU] if rig.places.verify_all else [NVME, REMOTE]
                rig.places.rot(self.chance.choice(rotten), self.chance)
            if self.full:
                self.full = self.full if self.hits(0.9) else set()
            elif self.hits(self.faults.full):
                self.full = {self.chance.choice([CPU, NVME, REMOTE])}
                rig.note("full:", *self.full)
