"""The nvme store: records of blocks in numbered slots of preallocated files.

Theory of operation
    A slot is a header and a payload, one behind the other (records.py), so a block costs one I/O
    and needs no index on disk: `scan` reads the headers at start. Several blocks of a call are
    under way at once. I/O is direct where the file system allows it.
Durability
    A record counts if both its checksums are right, so it does not matter in which order its parts
    get to the disk. A write that was reported DONE may still be lost with the power; then what the
    slot held before is found again. `erase` ends that: once it returns True, neither what the slots
    held nor anything overwritten before can come back. Without direct I/O a write is synced before
    it is reported, since errors would show only then.
    A write that FAILED leaves the slot with its old record, the new one, or none.
Faults
    A full or broken disk makes outcomes FAILED and sets `problem`; nothing raises after the start.
Processes
    One server owns the directory (`lock_descriptor`, which its movers inherit). Each mover attaches
    to the files by itself; two processes never use one slot at the same time. Sequence numbers come
    from the monotonic clock, which all processes share, plus an offset by which they also rise over
    restarts whatever the wall clock does.
It must not know: trees, tiers, who wants a block and why.
"""

import itertools
import logging
import mmap
import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from radixkv.core.tier_ops import BlockIdentity, Outcome, StoredBlock
from radixkv.pools.nvme_files import SegmentFiles, lock
from radixkv.pools.nvme_io import DiskIO
from radixkv.pools.records import (
    ALIGNMENT,
    BadRecord,
    RecordLayout,
    decode_header,
    encode_header,
    same_block,
)
from radixkv.pools.stores import Payload

log = logging.getLogger(__name__)

SEGMENT_BYTES = 16 << 30
IN_FLIGHT = 8  # requests of one process at once
MAX_RECORD_BYTES = 1 << 30  # Linux moves just under 2 GiB in one call


class NvmeAttachment(NamedTuple):
    """What a mover needs to attach; plain values, to be handed over as text."""

    path: str
    num_blocks: int
    block_bytes: int
    block_size: int
    segment_bytes: int
    unix_offset_ms: int
    sequence_offset: int


@dataclass
class ScanResult:
    """Records found, in order of slots, and how many others there were, by kind.

    Kinds: those of `BadRecord` but "empty"; "unreadable" (the disk failed).
    """

    blocks: list[StoredBlock] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)


class NvmeStore:
    """Slots 1..num_blocks. Methods may be called from any thread; none raises OSError."""

    def __init__(
        self,
        path: Path,
        num_blocks: int,
        block_bytes: int,
        block_size: int,
        *,
        unix_offset_ms: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
        io: DiskIO | None = None,
    ) -> None:
        """Own the directory: make it if need be, remove what is not of this size and geometry.

        Unix time in ms = `expires_ms` + `unix_offset_ms`. Raises `NvmeError` if the directory
        cannot be used at all. A disk too small is no error: see `usable_blocks`.
        """
        attachment = NvmeAttachment(
            str(path), num_blocks, block_bytes, block_size, segment_bytes, unix_offset_ms,
            time.time_ns() - time.monotonic_ns(),
        )  # fmt: skip
        descriptor = lock(Path(path))
        try:
            self._open(attachment, io or DiskIO(), create=True)
        except BaseException:
            os.close(descriptor)
            raise
        self._lock = descriptor

    @classmethod
    def attach(cls, attachment: NvmeAttachment, *, io: DiskIO | None = None) -> "NvmeStore":
        """The store of a mover, which should have inherited the server's `lock_descriptor`."""
        store = cls.__new__(cls)
        store._lock = -1
        store._open(attachment, io or DiskIO(), create=False)
        return store

    def _open(self, attachment: NvmeAttachment, io: DiskIO, create: bool) -> None:
        path, num_blocks, block_bytes, block_size, segment_bytes = attachment[:5]
        self.layout = RecordLayout(block_bytes, block_size)
        assert num_blocks >= 1 and self.layout.record_bytes <= MAX_RECORD_BYTES
        self._attachment = attachment
        self._sequence_offset = attachment.sequence_offset
        self._sequence = 0
        self._io = io
        self._files = SegmentFiles(
            Path(path), num_blocks, self.layout, segment_bytes, io, create=create
        )
        self.problem: str | None = self._files.problem
        self._scratch: queue.SimpleQueue[_Scratch] = queue.SimpleQueue()
        for _ in range(IN_FLIGHT):
            self._scratch.put(_Scratch(self.layout))
        self._threads = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="nvme")
        self._closed = False

    @property
    def attachment(self) -> NvmeAttachment:
        """For `attach`; take it after `scan`, so that sequence numbers go on from what is there."""
        return self._attachment._replace(sequence_offset=self._sequence_offset)

    @property
    def lock_descriptor(self) -> int:
        """Held while the store is used; -1 in a mover. Movers should inherit it."""
        return self._lock

    @property
    def direct(self) -> bool:
        """Whether I/O bypasses the system's cache."""
        return self._files.direct

    @property
    def usable_blocks(self) -> int:
        """Slots 1..usable_blocks have room on the disk; fewer than asked for: see `problem`."""
        return self._files.usable_blocks

    def scan(self) -> ScanResult:
        """All records, by their headers: ~2 s for 100,000. Call it before the first write.

        What is damaged, foreign, misplaced or unreadable is counted and erased, so that it cannot
        turn up later. Payloads are not looked at: `read` finds those that are damaged.
        """
        result = ScanResult(ignored=self._files.ignored.copy())
        namespaces: dict[bytes, bytes] = {}
        wrong = []
        for slot, data in self._files.headers():
            try:
                result.blocks.append(self._stored(slot, data, namespaces))
            except BadRecord as bad:
                if bad.kind != "empty":
                    result.ignored[bad.kind] += 1
                    wrong.append(slot)
        if wrong:
            self.erase(wrong)
        last = max((block.sequence for block in result.blocks), default=0)
        self._sequence_offset = max(self._sequence_offset, last - time.monotonic_ns() + 1)
        if result.ignored:
            log.warning("nvme store %s: ignored %s", self._attachment.path, dict(result.ignored))
        return result

    def _stored(
        self, slot: int, data: memoryview | None, namespaces: dict[bytes, bytes]
    ) -> StoredBlock:
        if data is None:
            self.problem = f"reading the header of slot {slot} failed"
            raise BadRecord("unreadable")
        offset = self._attachment.unix_offset_ms
        header = decode_header(data, self.layout, unix_offset_ms=offset)
        if header.slot != slot:
            raise BadRecord("foreign")
        namespace = namespaces.setdefault(header.namespace, header.namespace)
        return StoredBlock(slot, header.sequence, namespace, header.identity)

    def write(
        self,
        slots: Sequence[int],
        namespace: bytes,
        identities: Sequence[BlockIdentity],
        payloads: Sequence[Payload],
        checksums: Sequence[int],
    ) -> list[Outcome]:
        """Store blocks: DONE or FAILED each. Payloads must not change meanwhile.

        One I/O per block, without a copy if the payload is aligned to 4096 bytes, address and size.
        """
        sequences = [self._next_sequence() for _ in slots]

        def one(index: int, scratch: _Scratch) -> Outcome:
            slot = slots[index]
            header = encode_header(
                namespace, identities[index], checksums[index], sequences[index], self.layout,
                slot=slot, unix_offset_ms=self._attachment.unix_offset_ms,
            )  # fmt: skip
            return self._write(slot, scratch.record(header, payloads[index]))

        outcomes = self._each(len(slots), one, "writing")
        if not self.direct:
            self._sync_written(slots, outcomes)
        return outcomes

    def _next_sequence(self) -> int:
        self._sequence = max(self._sequence + 1, time.monotonic_ns() + self._sequence_offset)
        return self._sequence

    def _write(self, slot: int, buffers: "list[mmap.mmap | Payload]") -> Outcome:
        """Write to the start of a slot."""
        place = self._files.where(slot)
        if place is None:
            self.problem = self._files.problem or f"slot {slot} has no room on the disk"
            return Outcome.FAILED
        written = self._io.write(place[0], buffers, place[1])
        if written != sum(map(len, buffers)):
            self.problem = f"writing slot {slot}: only {written} bytes were written"
            return Outcome.FAILED
        return Outcome.DONE

    def _sync_written(self, slots: Sequence[int], outcomes: list[Outcome]) -> None:
        by_file: dict[int, list[int]] = {}
        for index, slot in enumerate(slots):
            place = self._files.where(slot)
            if place and outcomes[index] is Outcome.DONE:
                by_file.setdefault(place[0], []).append(index)
        for descriptor, indices in by_file.items():
            try:
                self._io.sync(descriptor)
            except OSError as error:
                self._failed("syncing", error)
                for index in indices:
                    outcomes[index] = Outcome.FAILED

    def read(
        self,
        slots: Sequence[int],
        namespace: bytes,
        identities: Sequence[BlockIdentity],
        into: Sequence[Payload],
    ) -> list[Outcome]:
        """Fetch blocks. BAD: not this block, or not its bytes; FAILED: could not be read.

        What `into` holds where the outcome is not DONE is undefined. Tags, priority and expiry of
        an identity need not be those it was written with.
        """

        def one(index: int, scratch: _Scratch) -> Outcome:
            slot = slots[index]
            place = self._files.where(slot)
            if place is None:
                return Outcome.FAILED if self._files.unopened else Outcome.BAD
            target = scratch.payload(into[index])
            got = self._io.read(place[0], [scratch.header, target], place[1])
            if got < self.layout.record_bytes:
                return Outcome.BAD
            try:
                header = decode_header(memoryview(scratch.header), self.layout)
            except BadRecord:
                return Outcome.BAD
            payload = target[: self.layout.block_bytes]
            if (
                header.slot != slot
                or header.namespace != namespace
                or not same_block(header.identity, identities[index])
                or header.checksum != xxh3_64_intdigest(payload.data)
            ):
                return Outcome.BAD
            if target is not into[index]:
                np.copyto(into[index], payload)
            return Outcome.DONE

        return self._each(len(slots), one, "reading")

    def erase(self, slots: Sequence[int]) -> bool:
        """Make records unreadable for good; True once that is durable for all of them.

        A barrier for the whole store, also without slots: whatever any process overwrote or erased
        before cannot come back either. About 0.1 ms per file, several at once.
        """
        zeros = mmap.mmap(-1, self.layout.header_bytes)

        def one(index: int, scratch: _Scratch) -> Outcome:
            if self._files.where(slots[index]) is None:  # no file, no record
                return Outcome.FAILED if self._files.unopened else Outcome.DONE
            return self._write(slots[index], [zeros])

        erased = self._each(len(slots), one, "erasing")
        descriptors = [segment.descriptor for segment in self._files.segments if segment]

        def sync(index: int, scratch: _Scratch) -> Outcome:
            self._io.sync(descriptors[index])
            return Outcome.DONE

        synced = self._each(len(descriptors), sync, "syncing")
        return all(outcome is Outcome.DONE for outcome in erased + synced)

    def close(self) -> None:
        """Give everything back; idempotent. No other call may be under way."""
        if self._closed:
            return
        self._closed = True
        self._threads.shutdown()
        self._files.close()
        if self._lock >= 0:
            os.close(self._lock)

    def _each(
        self, count: int, do: "Callable[[int, _Scratch], Outcome]", what: str
    ) -> list[Outcome]:
        """`do` for 0..count - 1, several at once, this thread being one of those who work."""
        outcomes = [Outcome.FAILED] * count
        indices = itertools.count()

        def work() -> None:
            scratch = self._scratch.get()
            try:
                while (index := next(indices)) < count:
                    try:
                        outcomes[index] = do(index, scratch)
                    except (OSError, ValueError) as error:
                        self._failed(what, error)
            finally:
                self._scratch.put(scratch)

        others = [self._threads.submit(work) for _ in range(min(count, IN_FLIGHT) - 1)]
        work()
        for other in others:
            other.result()
        return outcomes

    def _failed(self, what: str, error: OSError | ValueError) -> None:
        why = error.strerror if isinstance(error, OSError) else None
        problem = f"{what}: {why or error}"
        if problem != self.problem:  # a disk that fails does so often
            log.warning("nvme store %s: %s", self._attachment.path, problem)
        self.problem = problem


class _Scratch:
    """Aligned memory for one request under way."""

    def __init__(self, layout: RecordLayout) -> None:
        self._layout = layout
        self.header = mmap.mmap(-1, layout.header_bytes)
        self._bounce: Payload | None = None

    def payload(self, block: Payload) -> Payload:
        """Where the payload of this block is read to: the block itself if it is aligned."""
        assert block.dtype == np.uint8 and block.shape == (self._layout.block_bytes,)
        address = block.__array_interface__["data"][0]
        if address % ALIGNMENT == 0 and len(block) == self._layout.payload_bytes:
            return block
        if self._bounce is None:
            self._bounce = np.frombuffer(mmap.mmap(-1, self._layout.payload_bytes), np.uint8)
        return self._bounce

    def record(self, header: bytes, block: Payload) -> "list[mmap.mmap | Payload]":
        """The whole record, from aligned memory."""
        self.header[:] = header
        target = self.payload(block)
        if target is not block:
            target[: len(block)] = block
            target[len(block) :] = 0
        return [self.header, target]
