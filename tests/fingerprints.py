"""KV whose every slot tells what it holds, read and written through a mapping of the pool.

The value of a slot is computed from the namespace, all tokens up to and with its position, its
layer, whether it is key or value, and its head; so a stale block, a swapped order, another tenant's
block or a stray write shows as a difference.
"""

import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from radixkv_client import KVSpec

BLOCK_SIZE = 4
NUM_LAYERS = 2
NUM_HEADS = 2
# 8 bytes per token, layer, head and K or V: one fingerprint each.
KV_SPEC = KVSpec(NUM_LAYERS, NUM_HEADS, 8, 8, "int8", BLOCK_SIZE)
_SHAPE = (NUM_LAYERS, 2, NUM_HEADS)
_PLACES = np.arange(1, 1 + NUM_LAYERS * 2 * NUM_HEADS, dtype=np.uint64).reshape(_SHAPE)
_MIX = np.uint64(0x9E3779B97F4A7C15)


class WrongKV(AssertionError):
    """A slot does not hold what was computed for its sequence."""


def fingerprints(namespace: bytes, tokens: Sequence[int]) -> np.ndarray:
    """uint64 [len(tokens), layer, K|V, head]."""
    prefix = xxhash.xxh3_64(namespace)
    hashes = []
    for token in tokens:
        prefix.update(struct.pack("<i", token))
        hashes.append(prefix.intdigest())
    column = np.array(hashes, dtype=np.uint64).reshape(-1, 1, 1, 1)
    return (column ^ (_PLACES * _MIX)) * _MIX


def slots_of(pool: np.ndarray) -> np.ndarray:
    """A pool, uint8 [num_blocks + 1, block_bytes], as uint64 [block, layer, K|V, head, slot]."""
    return pool.view(np.uint64).reshape(-1, *_SHAPE, BLOCK_SIZE)


class SequenceKV:
    """One sequence's KV in a pool: `write` computes it, `check` reads it back."""

    def __init__(self, pool: np.ndarray, namespace: bytes, tokens: Sequence[int]) -> None:
        self._slots = slots_of(pool)
        self.tokens = list(tokens)
        self.values = fingerprints(namespace, self.tokens)

    def _where(self, table: Sequence[int], start: int, stop: int) -> tuple:
        positions = np.arange(start, stop)
        blocks = np.asarray(table, dtype=np.int64)[positions // BLOCK_SIZE]
        assert blocks.all(), "the null block is in a table"
        every = slice(None)
        return blocks, every, every, every, positions % BLOCK_SIZE

    def write(self, table: Sequence[int], start: int, stop: int) -> None:
        """Compute tokens [start, stop)."""
        self._slots[self._where(table, start, stop)] = self.values[start:stop]

    def check(self, table: Sequence[int], start: int, stop: int) -> None:
        """Raise WrongKV unless tokens [start, stop) are there."""
        found = self._slots[self._where(table, start, stop)]
        wrong = np.nonzero((found != self.values[start:stop]).any(axis=(1, 2, 3)))[0]
        if len(wrong):
            at = [start + int(position) for position in wrong]
            blocks = [int(table[position // BLOCK_SIZE]) for position in at]
            raise WrongKV(f"tokens {at} of {len(self.tokens)} are wrong, in blocks {blocks}")
