"""What the core itself takes for tiers, as they grow: CPU time and memory, with no bytes moved.

Whatever the core wants moved is reported done at once, so all that is measured is its deciding.
"""

import gc
import tracemalloc

import numpy as np

from bench.measure import Row, compare, ratio_row
from radixkv.core.cache import Cache
from radixkv.core.results import (
    AcquireAnswered,
    Acquired,
    AcquireRequest,
    CacheConfig,
    ReleaseReason,
)
from radixkv.core.tier_ops import Outcome, Place, Transfer

BLOCK_SIZE = 16
NAMESPACE = b"bench"
GPU_BLOCKS = 2_000
TIER_BLOCKS = (10_000, 100_000)  # of cpu and of nvme
PROMPT_BLOCKS = 32
WAIT_MS = 1_000
TURNS = 50  # of one measurement


def core_rows(quick: bool = False) -> list[Row]:
    """All rows of the core."""
    small, big = (size // 4 if quick else size for size in TIER_BLOCKS)
    return [growth_row(small, big), bytes_row(small)]


class ChurningCache:
    """A cache whose every turn asks with a new prompt and with one from below the gpu."""

    def __init__(self, tier_blocks: int) -> None:
        config = CacheConfig(
            GPU_BLOCKS, BLOCK_SIZE, cpu_blocks=tier_blocks, nvme_blocks=tier_blocks,
            write_policy="write_back", break_even=False,
        )  # fmt: skip
        self.cache = Cache(config)
        self.cache.open_session(1)
        self._random = np.random.default_rng(1)
        self._prompts: list[bytes] = []
        while not self.cache.evicted_from(Place.NVME):  # until all of it is full
            self._serve(self._new_prompt())
        self._num_known = tier_blocks // PROMPT_BLOCKS  # surely still there, and not on the gpu

    def turn(self) -> None:
        """Two requests."""
        self._serve(self._new_prompt())
        newest = len(self._prompts) - GPU_BLOCKS // PROMPT_BLOCKS
        self._serve(self._prompts[self._random.integers(newest - self._num_known, newest)])

    def _new_prompt(self) -> bytes:
        tokens = self._random.integers(0, 50_000, PROMPT_BLOCKS * BLOCK_SIZE + 1, dtype=np.int32)
        self._prompts.append(tokens.tobytes())
        return self._prompts[-1]

    def _serve(self, prompt: bytes) -> None:
        """Acquire, Commit and Release, with all that the tiers have to do for it."""
        cache = self.cache
        request = AcquireRequest(prompt, NAMESPACE, capacity_wait_ms=WAIT_MS)
        got = cache.acquire(1, 1, request, 0)
        while not isinstance(got, Acquired):
            answers = [event for event in self._move() if isinstance(event, AcquireAnswered)]
            got = answers[0].result if answers else got
        cache.commit(1, 1, len(prompt) // 4, b"", ())
        cache.release(1, 1, ReleaseReason.FINISHED, 0)
        self._move()

    def _move(self) -> list[object]:
        """One batch of the runtime: what was wanted is done, and what that brings about."""
        events: list[object] = [*self.cache.poll(0)]
        while ops := self.cache.tier_ops():
            for op in ops:
                assert isinstance(op, Transfer), op
                done = [Outcome.DONE] * len(op.target_ids)
                self.cache.transfer_done(op.transfer_id, done, 0.001, 0)
            events += self.cache.poll(0)
        return events


def growth_row(few: int, many: int) -> Row:
    """The same requests, with ten times the blocks below."""
    small, big = ChurningCache(few), ChurningCache(many)
    gc.freeze()
    ratio = compare(big.turn, small.turn, repeats=(TURNS, TURNS))
    gc.unfreeze()
    name = f"Acquire + Commit + Release, tiers of {many:,} ÷ {few:,} blocks"
    return ratio_row(name, ratio, 1.5, "with fewer")


def bytes_row(tier_blocks: int) -> Row:
    """Index memory of full tiers, per block of the tree, wherever its copies are."""
    gc.collect()
    tracemalloc.start()
    cache = ChurningCache(tier_blocks).cache
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    blocks = cache.namespaces()[NAMESPACE]
    copies = sum(cache.books(place).cached for place in cache.places())
    note = f"{blocks:,} blocks with {copies:,} copies in three places; 64 bytes are its tokens"
    return Row("index bytes per block, three places", used / blocks, "bytes", note=note)
