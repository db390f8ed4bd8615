"""What a mover does: copies blocks between the places it has, verifying on the way.

Blocks of a Transfer are carried out in order, up to the first one that is not DONE: residency is
closed under prefixes, so nobody could use what comes behind it. The checksum of a block is taken
when it leaves the gpu. It lies in the table for blocks on cpu, is checked before a block goes from
there to a store and, for all or a sample, when it goes back to the gpu. Stores check what they
read themselves.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.core.tier_ops import Erase, Outcome, Place, Probe, Transfer
from radixkv.pools.checked_copy import Block, checksum_of, copy_with_checksum
from radixkv.pools.mover_ring import Answer, MoverOp, num_blocks
from radixkv.pools.stores import ObjectStore, SlotStore

log = logging.getLogger(__name__)

SAMPLE_ONE_IN = 16  # blocks from cpu to gpu that are verified without `verify_all`
STORE_BATCH = 16  # blocks a store gets at once; a cancellation is seen between batches

DONE = Outcome.DONE  # looking it up costs as much as copying a kilobyte

BeforeBlock = Callable[[MoverOp, int], None]
CancelFlag = Sequence[int] | memoryview  # of one item, which may become 1 at any time


@dataclass(frozen=True)
class MappedPlaces:
    """What this mover has of each place: uint8 [num_blocks + 1, block_bytes], or a store."""

    gpu: npt.NDArray[np.uint8]
    cpu: npt.NDArray[np.uint8] | None = None
    checksums: memoryview | None = None  # of blocks on cpu, by id
    nvme: SlotStore | None = None
    remote: ObjectStore | None = None
    verify_all: bool = False


class MoverWork:
    """Carries out operations, one at a time.

    `before_block(op, index)` is called before each block and once behind the last; it may delay,
    or raise OSError to fail the block. The loops over blocks in memory do little else than copy:
    each copy drives the interpreter out of the core's caches, and bringing it back takes longer
    than running it.
    """

    def __init__(self, places: MappedPlaces, before_block: BeforeBlock | None = None) -> None:
        self._places = places
        self._before_block = before_block
        self._problem = ""

    def carry_out(self, op: MoverOp, is_cancelled: CancelFlag) -> Answer:
        """Do it; failures are results. Mutates the targets, or what is erased."""
        self._problem = ""
        start = time.perf_counter()
        if isinstance(op, Transfer):
            results = self._transfer(op, is_cancelled)
        else:
            results = self._attempt(op, self._erase if isinstance(op, Erase) else self._probe)
        elapsed_s = time.perf_counter() - start
        self._before_end(op)
        return Answer(elapsed_s, results, self._problem)

    def _before_end(self, op: MoverOp) -> None:
        try:
            if self._before_block is not None:
                self._before_block(op, num_blocks(op))
        except OSError as error:
            self._problem = str(error)  # too late to change what was done

    # ---- transfers --------------------------------------------------------------------------

    def _transfer(self, op: Transfer, is_cancelled: CancelFlag) -> bytes:
        """Outcomes; where they end early, the rest was not begun."""
        outcomes = bytearray()
        try:
            if (op.source, op.target) == (Place.GPU, Place.CPU):
                self._to_cpu(op, is_cancelled, outcomes)
            elif (op.source, op.target) == (Place.CPU, Place.GPU):
                self._to_gpu(op, is_cancelled, outcomes)
            else:
                self._move_records(op, is_cancelled, outcomes)
        except Exception as error:
            self._note(op, error)
        return bytes(outcomes).ljust(num_blocks(op), bytes((Outcome.FAILED,)))

    def _to_cpu(self, op: Transfer, is_cancelled: CancelFlag, outcomes: bytearray) -> None:
        gpu, cpu, checksums = self._places.gpu, self._places.cpu, self._places.checksums
        before_block = self._before_block
        assert cpu is not None and checksums is not None
        for source, target in zip(op.source_ids, op.target_ids, strict=True):
            if before_block is not None:
                before_block(op, len(outcomes))
            if is_cancelled[0]:
                return
            checksums[target] = copy_with_checksum(gpu[source], cpu[target])
            outcomes.append(DONE)

    def _to_gpu(self, op: Transfer, is_cancelled: CancelFlag, outcomes: bytearray) -> None:
        gpu, cpu, checksums = self._places.gpu, self._places.cpu, self._places.checksums
        before_block = self._before_block
        assert cpu is not None and checksums is not None
        share = 1.0 if self._places.verify_all else 1 / SAMPLE_ONE_IN
        for source, target in zip(op.source_ids, op.target_ids, strict=True):
            if before_block is not None:
                before_block(op, len(outcomes))
            if is_cancelled[0]:
                return
            if random.random() >= share:
                np.copyto(gpu[target], cpu[source])
            elif copy_with_checksum(cpu[source], gpu[target]) != checksums[source]:
                outcomes.append(self._bad_on_cpu(source))
                return
            outcomes.append(DONE)

    def _move_records(self, op: Transfer, is_cancelled: CancelFlag, outcomes: bytearray) -> None:
        count = num_blocks(op)
        move = self._from_store if op.target is Place.GPU else self._to_store
        for start in range(0, count, STORE_BATCH):
            end = min(start + STORE_BATCH, count)
            ready = self._num_ready(op, start, end)
            if ready == start or is_cancelled[0]:
                return
            outcomes += bytes(move(op, slice(start, ready)))
            if len(outcomes) < end or any(outcomes):
                return

    def _num_ready(self, op: Transfer, start: int, end: int) -> int:
        """How far blocks [start, end) can be moved."""
        if self._before_block is not None:
            for index in range(start, end):
                try:
                    self._before_block(op, index)
                except OSError as error:
                    self._note(op, error)
                    return index
        return end

    def _to_store(self, op: Transfer, some: slice) -> list[Outcome]:
        payloads: list[Block] = []
        checksums: list[int] = []
        refused: list[Outcome] = []
        for source in op.source_ids[some]:
            block, checksum, is_whole = self._leaving(op.source, source)
            if not is_whole:
                refused = [self._bad_on_cpu(source)]
                break
            payloads.append(block)
            checksums.append(checksum)
        if not payloads:
            return refused
        identities = op.identities[some][: len(payloads)]
        whole = (op.namespace, identities, payloads, checksums)
        if op.target is Place.NVME:
            outcomes = self._nvme.write(op.target_ids[some][: len(payloads)], *whole)
        else:
            outcomes = self._remote.write(*whole)
        self._note_store(op.target, outcomes)
        return outcomes + refused

    def _leaving(self, place: Place, source: int) -> tuple[Block, int, bool]:
        """A block on its way to a store: bytes, checksum, whether the two belong together."""
        if place is Place.GPU:
            block = self._places.gpu[source]
            return block, checksum_of(block), True
        assert self._places.cpu is not None and self._places.checksums is not None
        block = self._places.cpu[source]
        checksum = self._places.checksums[source]
        return block, checksum, checksum_of(block) == checksum

    def _from_store(self, op: Transfer, some: slice) -> list[Outcome]:
        into = [self._places.gpu[target] for target in op.target_ids[some]]
        identities = op.identities[some]
        if op.source is Place.NVME:
            outcomes = self._nvme.read(op.source_ids[some], op.namespace, identities, into)
        else:
            outcomes = self._remote.read(op.namespace, identities, into)
        self._note_store(op.source, outcomes)
        return outcomes

    # ---- the rest ---------------------------------------------------------------------------

    def _attempt(self, op: MoverOp, act: Callable[[MoverOp], bytes]) -> bytes:
        try:
            if self._before_block is not None:
                self._before_block(op, 0)
            return act(op)
        except Exception as error:
            self._note(op, error)
            return b""

    def _erase(self, op: MoverOp) -> bytes:
        assert isinstance(op, Erase)
        if op.place is Place.NVME:
            done, store = self._nvme.erase(op.ids), self._nvme.problem
        else:
            done, store = self._remote.remove(op.digests), self._remote.problem
        if not done:
            self._problem = store or "not erased"
        return bytes((done,))

    def _probe(self, op: MoverOp) -> bytes:
        assert isinstance(op, Probe)
        present = self._remote.probe(op.digests)
        if present is None:
            self._problem = self._remote.problem or "no answer"
            return b""
        return bytes(present)

    @property
    def _nvme(self) -> SlotStore:
        assert self._places.nvme is not None
        return self._places.nvme

    @property
    def _remote(self) -> ObjectStore:
        assert self._places.remote is not None
        return self._places.remote

    def _bad_on_cpu(self, block: int) -> Outcome:
        self._problem = f"block {block} on cpu is not what was written there (checksum)"
        log.error("%s", self._problem)
        return Outcome.BAD

    def _note(self, op: MoverOp, error: Exception) -> None:
        log.exception("%s failed", type(op).__name__)
        self._problem = str(error) or type(error).__name__

    def _note_store(self, place: Place, outcomes: Sequence[Outcome]) -> None:
        if outcomes.count(DONE) < len(outcomes):
            store = self._nvme if place is Place.NVME else self._remote
            self._problem = store.problem or "unknown"
