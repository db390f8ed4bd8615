"""One place (gpu, cpu, nvme) as the prefix index sees it: its pool, its frontier, its counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.core.blocks import BlockPool
from radixkv.core.eviction import Lru, Policy, make_policy
from radixkv.core.tier_ops import Place

if TYPE_CHECKING:
    from radixkv.core.tree import Node


class PlaceState:
    """Blocks of the tree in one place. `num_locked + num_pinned + num_cached` are all of them.

    With `has_slower`, a cached block is *clean* if a slower place has it too (the remote counts
    only right below the gpu): dropping it here loses nothing. `clean` and `unclean` order those
    candidates of `policy` that have only such blocks, and the others.
    """

    __slots__ = (
        "place", "has_slower", "pool", "policy", "clean", "unclean", "num_locked", "num_pinned",
        "num_cached", "num_clean", "num_evicted", "num_dropped",
    )  # fmt: skip

    def __init__(self, place: Place, num_blocks: int, eviction: str) -> None:
        self.place = place
        self.has_slower = False
        self.pool = BlockPool(num_blocks, keeps_records=place is Place.NVME)
        self.policy: Policy = make_policy(eviction)
        self.clean = Lru()
        self.unclean = Lru()
        self.num_locked = 0
        self.num_pinned = 0
        self.num_cached = 0
        self.num_clean = 0
        self.num_evicted = 0
        self.num_dropped = 0

    def discard(self, node: Node) -> None:
        """`node` is not a candidate here (any more)."""
        self.policy.discard(node)
        if self.has_slower:
            self.clean.discard(node)
            self.unclean.discard(node)

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free, or evictable."""
        return self.pool.num_free + self.num_cached

    @property
    def num_ready(self) -> int:
        """Blocks that can be had without losing anything."""
        return self.pool.num_free + self.num_clean

    def shortage(self, count: int) -> str:
        """The message of Exhausted: what was wanted, what is there."""
        return (
            f"{count} blocks wanted, {self.pool.num_free} free and {self.num_cached} evictable"
            f" of {self.pool.num_blocks}"
        )
