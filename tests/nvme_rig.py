"""Blocks for tests of the nvme store, and disks that fail on purpose."""

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from radixkv.core.digest import block_digest, root_digest
from radixkv.core.tier_ops import BlockIdentity, Outcome
from radixkv.pools.nvme import NvmeStore
from radixkv.pools.nvme_io import DIRECT, DiskIO

BLOCK_BYTES = 8192
BLOCK_SIZE = 4
RECORD_BYTES = 4096 + BLOCK_BYTES
NAMESPACE = b"namespace"
NUM_BLOCKS = 20
FOUR_SEGMENTS = 5 * RECORD_BYTES
ALL = {slot: slot for slot in range(1, NUM_BLOCKS + 1)}
DONE, FAILED, BAD = Outcome.DONE, Outcome.FAILED, Outcome.BAD


def identity(number: int, namespace: bytes = NAMESPACE) -> BlockIdentity:
    """The first block of sequence `number`."""
    parent = root_digest(namespace)
    tokens = np.full(BLOCK_SIZE, number, "<i4").tobytes()
    return BlockIdentity(block_digest(parent, tokens), parent, tokens)


def payload(number: int, num_bytes: int = BLOCK_BYTES) -> npt.NDArray[np.uint8]:
    """Its bytes, which occur in no other block; aligned as in an arena."""
    block = empty(num_bytes)
    block[:] = np.random.default_rng(number).integers(0, 256, num_bytes, np.uint8)
    return block


def empty(num_bytes: int = BLOCK_BYTES) -> npt.NDArray[np.uint8]:
    """An aligned block of zeros."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def put(store: NvmeStore, numbers: dict[int, int]) -> list[Outcome]:
    """Write block `number` to each slot."""
    payloads = [payload(number, store.layout.block_bytes) for number in numbers.values()]
    return store.write(
        list(numbers),
        NAMESPACE,
        [identity(number) for number in numbers.values()],
        payloads,
        [xxh3_64_intdigest(block.data) for block in payloads],
    )


def get(store: NvmeStore, numbers: dict[int, int]) -> list[Outcome]:
    """Read them back; what is DONE must have exactly the right bytes."""
    size = store.layout.block_bytes
    into = [empty(size) for _ in numbers]
    names = [identity(number) for number in numbers.values()]
    outcomes = store.read(list(numbers), NAMESPACE, names, into)
    for number, block, outcome in zip(numbers.values(), into, outcomes, strict=True):
        assert outcome is not DONE or np.array_equal(block, payload(number, size))
    return outcomes


def open_store(
    path: Path,
    num_blocks: int = NUM_BLOCKS,
    block_bytes: int = BLOCK_BYTES,
    block_size: int = BLOCK_SIZE,
    segment_bytes: int = 1 << 30,
    io: DiskIO | None = None,
) -> NvmeStore:
    """A server's store."""
    return NvmeStore(path, num_blocks, block_bytes, block_size, segment_bytes=segment_bytes, io=io)


def found(store: NvmeStore) -> dict[int, int]:
    """Numbers of the blocks by slot, after a check of all else."""
    result = store.scan()
    numbers = {}
    for block in result.blocks:
        numbers[block.slot] = int(np.frombuffer(block.identity.tokens, "<i4")[0])
        assert block.identity == identity(numbers[block.slot])
        assert block.namespace == NAMESPACE
    return numbers


def filled(path: Path) -> Path:
    """Block n in each slot n, and nobody running; returns the file."""
    store = open_store(path)
    assert put(store, ALL) == [DONE] * NUM_BLOCKS
    store.close()
    return one_file(path)


def one_file(directory: Path) -> Path:
    """The only segment there is."""
    (path,) = directory.glob("*.segment")
    return path


class FaultyIO(DiskIO):
    """Fails where it is told to: errors by (call, how many of these calls came before)."""

    def __init__(self, direct: bool = True) -> None:
        self.direct = direct
        self.room: int | None = None  # bytes that can be allocated
        self.errors: dict[tuple[str, int], int] = {}
        self.short: set[tuple[str, int]] = set()
        self.calls: dict[str, int] = {}

    def fail(self, call: str, number: int = errno.EIO, at: Sequence[int] = range(10_000)) -> None:
        """Let the given ones of the calls from now on fail."""
        first = self.calls.get(call, 0)
        self.errors |= {(call, first + index): number for index in at}

    def heal(self) -> None:
        """No more faults."""
        self.errors.clear()
        self.room = None

    def _count(self, call: str) -> int:
        number = self.calls.get(call, 0)
        self.calls[call] = number + 1
        if error := self.errors.get((call, number)):
            raise OSError(error, os.strerror(error))
        return number

    def open(self, path: Path, flags: int) -> int:
        """Direct I/O may be refused, as some file systems do."""
        if flags & DIRECT and not self.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._count("open")
        return super().open(path, flags)

    def allocate(self, descriptor: int, offset: int, length: int) -> None:
        """Allocates what there is room for, then fails, as file systems do."""
        self._count("allocate")
        if self.room is not None:
            super().allocate(descriptor, offset, min(length, max(self.room, 1)))
            if length > self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= length
        else:
            super().allocate(descriptor, offset, length)

    def write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """May write only a part."""
        number = self._count("write")
        if ("write", number) in self.short:
            return super().write(descriptor, [memoryview(buffers[0])], offset)
        return super().write(descriptor, buffers, offset)

    def read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """May fail."""
        self._count("read")
        return super().read(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        """May fail."""
        self._count("sync")
        super().sync(descriptor)
