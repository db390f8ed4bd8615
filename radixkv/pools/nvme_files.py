"""The files of an nvme store: which there are, how long, who owns them, where a slot lies.

Slots 1..num_blocks lie one behind the other in segments of equally many. A file's name says the
format, the block size and the bytes of a block, so files of another geometry are known by name and
removed by the next server. Nothing else in the directory is touched, and no name comes from a user.
A segment is as long as it has room: one that could not be allocated is shorter, or is not there.
"""

import errno
import fcntl
import logging
import mmap
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from radixkv.pools.nvme_io import DIRECT, DiskIO
from radixkv.pools.records import ALIGNMENT, FORMAT_VERSION, MAGIC, RecordLayout

log = logging.getLogger(__name__)

LOCK_NAME = "radixkv.lock"
LOCK_WAIT_S = 2.0  # a killed server's movers may need a moment to end
ALLOCATE_BYTES = 256 << 20  # at once; less when the disk is nearly full
READ_AHEAD = 256  # headers
_NAME = re.compile(r"radixkv-v(\d{1,9})-b(\d{1,9})-n(\d{1,12})-(\d{6})\.segment")


class NvmeError(Exception):
    """The directory cannot be used at all; the message says why and what to do."""


@dataclass(frozen=True)
class Segment:
    """An open file, `num_slots` of whose slots have room."""

    descriptor: int
    num_slots: int


def segment_name(layout: RecordLayout, index: int) -> str:
    """The name of the file with the slots from index * slots per segment on."""
    return (
        f"radixkv-v{FORMAT_VERSION}-b{layout.block_size}-n{layout.block_bytes}-{index:06}.segment"
    )


def lock(directory: Path) -> int:
    """Become the only server on this directory, until the last copy of the descriptor is closed.

    Movers inherit it: no other server starts while one of them could still write. Raises NvmeError.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = DiskIO().open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise NvmeError(f"cannot use {directory} (--nvme-path): {error.strerror}") from None
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                why = (
                    "another server uses it" if error.errno == errno.EWOULDBLOCK else error.strerror
                )
                raise NvmeError(f"{directory}: {why}; set another --nvme-path") from None
        time.sleep(0.02)


class SegmentFiles:
    """Opened by the server with `create=True`, which first makes the files what they should be."""

    def __init__(
        self,
        directory: Path,
        num_blocks: int,
        layout: RecordLayout,
        segment_bytes: int,
        io: DiskIO,
        *,
        create: bool,
    ) -> None:
        """Does not raise for files that cannot be used: their slots are not there."""
        self._directory, self._layout, self._io = directory, layout, io
        self._num_blocks = num_blocks
        self.slots_per_segment = max(segment_bytes // layout.record_bytes, 1)
        self.direct = True
        self.problem: str | None = None
        self._full = False
        self.unopened = False  # a file is there but could not be opened
        self.ignored: Counter[str] = Counter()
        self.segments: list[Segment | None] = []
        if create:
            self._remove_others()
        for index in range(-(-num_blocks // self.slots_per_segment)):
            self.segments.append(self._segment(index, create))

    @property
    def usable_blocks(self) -> int:
        """Slots 1..usable_blocks have room."""
        usable = 0
        for segment in self.segments:
            usable += segment.num_slots if segment else 0
            if segment is None or segment.num_slots < self.slots_per_segment:
                break
        return usable

    def where(self, slot: int) -> tuple[int, int] | None:
        """Descriptor and offset of a slot; None if it has no room."""
        assert 1 <= slot <= self._num_blocks, slot
        index, position = divmod(slot - 1, self.slots_per_segment)
        segment = self.segments[index]
        if segment is None or position >= segment.num_slots:
            return None
        return segment.descriptor, position * self._layout.record_bytes

    def headers(self) -> Iterator[tuple[int, memoryview | None]]:
        """(slot, header) of all slots ever written, in order; None where it cannot be read.

        A header is valid until the next one is asked for.
        """
        for index, segment in enumerate(self.segments):
            if segment is None:
                continue
            first = index * self.slots_per_segment + 1
            try:
                found = _read_headers(self._io, self._path(index), self._layout, segment.num_slots)
                for position, header in found:
                    yield first + position, header
            except OSError as error:
                self._failed(f"scan of {self._path(index).name}", error)

    def close(self) -> None:
        """Close all files."""
        for segment in self.segments:
            if segment:
                os.close(segment.descriptor)
        self.segments = []

    # ---- making the files what they should be -----------------------------------------------

    def _path(self, index: int) -> Path:
        return self._directory / segment_name(self._layout, index)

    def _remove_others(self) -> None:
        """Remove segments of another geometry, and those behind the last slot."""
        count = -(-self._num_blocks // self.slots_per_segment)
        ours = {self._path(index).name for index in range(count)}
        prefix = segment_name(self._layout, 0)[: -len("000000.segment")]
        for path in sorted(self._directory.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is None or path.name in ours:
                continue
            try:
                if not path.name.startswith(prefix):
                    self.ignored["old layout"] += self._count_records(path, *match.groups()[:3])
                self._io.remove(path)
                log.info("removed %s: not part of what is configured", path)
            except OSError as error:
                self._failed(f"removing {path.name}", error)

    def _count_records(self, path: Path, version: str, block_size: str, block_bytes: str) -> int:
        """How many records a segment of another geometry holds; 1 if nobody can say."""
        if int(version) != FORMAT_VERSION or not stat.S_ISREG(path.lstat().st_mode):
            return 1
        layout = RecordLayout(int(block_bytes), int(block_size))
        num_slots = path.lstat().st_size // layout.record_bytes
        headers = _read_headers(self._io, path, layout, num_slots)
        return sum(header is not None and header[: len(MAGIC)] == MAGIC for _, header in headers)

    def _segment(self, index: int, create: bool) -> Segment | None:
        path = self._path(index)
        num_slots = min(self._num_blocks - index * self.slots_per_segment, self.slots_per_segment)
        try:
            if create:
                self._prepare(path, num_slots)
            return self._open(path, num_slots)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.unopened = True
            self._failed(f"opening {path.name}", error)
            return None

    def _prepare(self, path: Path, num_slots: int) -> None:
        """Make the file as long as its slots, or remove it if there is room for none."""
        descriptor = self._io.open(path, os.O_RDWR | os.O_CREAT)
        try:
            size = os.fstat(descriptor).st_size
            record = self._layout.record_bytes
            wanted = num_slots * record
            have = min(size // record * record, wanted)
            if size % record:
                self.ignored["torn"] += 1  # what is left of a record, or something added
            if size > have:
                self._io.truncate(descriptor, have)
            have = self._allocate(descriptor, have, wanted)
        finally:
            os.close(descriptor)
        if not have:
            self._io.remove(path)

    def _allocate(self, descriptor: int, have: int, wanted: int) -> int:
        """Lengthen the file by whole slots while there is room; returns its length."""
        record = self._layout.record_bytes
        slots = max(ALLOCATE_BYTES // record, 1)
        while have < wanted and not self._full:
            step = min(slots * record, wanted - have)
            try:
                self._io.allocate(descriptor, have, step)
                have += step
            except OSError as error:
                self._io.truncate(descriptor, have)
                slots = step // record // 2
                if not slots:
                    self._full = True
                    self._failed("allocating room (set a smaller --nvme-blocks)", error)
        return have

    def _open(self, path: Path, num_slots: int) -> Segment:
        descriptor = self._io.open(path, os.O_RDWR)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(0, "not a regular file")
            if self.direct:
                descriptor = self._switch_to_direct(descriptor, path)
        except OSError:
            os.close(descriptor)
            raise
        return Segment(descriptor, min(found.st_size // self._layout.record_bytes, num_slots))

    def _switch_to_direct(self, descriptor: int, path: Path) -> int:
        """A descriptor for direct I/O in place of this one; the same where that does not work."""
        direct = -1
        try:
            direct = self._io.open(path, os.O_RDWR | DIRECT)
            with mmap.mmap(-1, ALIGNMENT) as aligned:
                self._io.read(direct, [aligned], 0)
        except OSError as error:
            log.info("no direct I/O on %s: %s", path, error.strerror)
            self.direct = False
            if direct >= 0:
                os.close(direct)
            return descriptor
        os.close(descriptor)
        return direct

    def _failed(self, what: str, error: OSError) -> None:
        self.problem = f"{what}: {error.strerror or error}"
        log.warning("nvme store %s: %s", self._directory, self.problem)


def _read_headers(
    io: DiskIO, path: Path, layout: RecordLayout, num_slots: int
) -> Iterator[tuple[int, memoryview | None]]:
    """(position, header) of all slots of a file ever written; None where it cannot be read.

    While one batch is looked at, the system reads the next one into its cache, all of it at once.
    """
    descriptor = io.open(path, os.O_RDONLY)
    try:
        io.advise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        written = _written(io, descriptor, layout.record_bytes, num_slots)
        buffer = memoryview(bytearray(layout.header_bytes))
        batch = _ahead(io, descriptor, layout, written)
        while batch:
            following = _ahead(io, descriptor, layout, written)
            for position in batch:
                try:
                    got = io.read(descriptor, [buffer], position * layout.record_bytes)
                    yield position, buffer[:got]
                except OSError:
                    yield position, None
            start, end = batch[0] * layout.record_bytes, (batch[-1] + 1) * layout.record_bytes
            io.advise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
            batch = following
    finally:
        os.close(descriptor)


def _written(io: DiskIO, descriptor: int, record_bytes: int, num_slots: int) -> Iterator[int]:
    """Positions of the slots that hold data: never written ones of a new store are skipped."""
    position = 0
    while position < num_slots:
        data = io.next_data(descriptor, position * record_bytes)
        if data is None:
            return
        position = max(position, data // record_bytes)
        if position < num_slots:
            yield position
        position += 1


def _ahead(io: DiskIO, descriptor: int, layout: RecordLayout, written: Iterator[int]) -> list[int]:
    """The next positions, whose headers begin to be read."""
    batch = list(islice(written, READ_AHEAD))
    for position in batch:
        io.advise(
            descriptor,
            position * layout.record_bytes,
            layout.header_bytes,
            os.POSIX_FADV_WILLNEED,
        )
    return batch
