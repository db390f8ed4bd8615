"""Copies of blocks with their checksum taken on the way, and the table that keeps checksums of cpu.

The checksum is xxh3_64 of the whole block, of the bytes that arrived: they are still in the cache.
"""

import mmap
import os

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

CHUNK_BYTES = 1 << 20  # still in a core's caches when it is hashed
CHECKSUM_BYTES = 8

Block = npt.NDArray[np.uint8]


def checksum_of(block: Block) -> int:
    """xxh3_64 of a block."""
    return xxh3_64_intdigest(block.data)


def copy_with_checksum(source: Block, target: Block) -> int:
    """Copy a block; the checksum of what `target` holds now."""
    if len(source) <= CHUNK_BYTES:
        np.copyto(target, source)
        return xxh3_64_intdigest(target.data)
    state = xxh3_64()
    for start in range(0, len(source), CHUNK_BYTES):
        chunk = target[start : start + CHUNK_BYTES]
        np.copyto(chunk, source[start : start + CHUNK_BYTES])
        state.update(chunk.data)
    return state.intdigest()


def create_checksum_table(num_blocks: int) -> int:
    """Descriptor of memory for the checksums of cpu blocks 1..num_blocks, zero. Raises OSError."""
    descriptor = os.memfd_create("radixkv-checksums", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, (num_blocks + 1) * CHECKSUM_BYTES)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def map_checksum_table(descriptor: int, num_blocks: int) -> memoryview:
    """Map the table: checksums by block id."""
    return memoryview(mmap.mmap(descriptor, (num_blocks + 1) * CHECKSUM_BYTES)).cast("Q")
