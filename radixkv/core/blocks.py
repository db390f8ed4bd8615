"""The blocks of one place that are outside the tree, and those that copies or transfers use.

A block that a copy, transfer or erasure reads or writes is *busy*. A busy block that loses its
owner is parked in flight and becomes free when the last of them is over.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from radixkv.core.allocator import BlockAllocator, SlotAllocator


class BlockPool:
    """Free, busy and parked blocks of one place. Every method is O(blocks named).

    `stale` (nvme) are the slots that may hold a record which the tree does not know; a restart
    would find it. `doomed` are busy slots to erase before they become free: `on_free` hears of them
    instead, `on_kept` of those that became part of the tree.
    """

    __slots__ = ("_allocator", "busy", "doomed", "on_free", "on_kept", "parked", "stale")

    def __init__(self, num_blocks: int, keeps_records: bool = False) -> None:
        self._allocator = (SlotAllocator if keeps_records else BlockAllocator)(num_blocks)
        self.busy: dict[int, int] = {}
        self.parked: set[int] = set()
        self.stale: set[int] | None = set() if keeps_records else None
        self.doomed: set[int] = set()
        self.on_free: Callable[[list[int]], None] = lambda ids: None
        self.on_kept: Callable[[list[int]], None] = lambda ids: None

    @property
    def num_blocks(self) -> int:
        """All of them, wherever they are."""
        return self._allocator.num_blocks

    @property
    def num_free(self) -> int:
        """Free blocks, without eviction."""
        return self._allocator.num_free

    def take(self, count: int) -> array:
        """`count` free blocks; the caller has checked `num_free`."""
        return self._allocator.take(count)

    def take_these(self, ids: Iterable[int]) -> None:
        """Remove just these from the free ones. O(blocks of the pool); for a restart."""
        self._allocator.remove(ids)

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back; busy ones when they are no longer."""
        busy = self.busy
        if not busy and self.stale is None:
            self._allocator.put(ids)
            return
        for block in ids:
            if block in busy:
                self.parked.add(block)
            else:
                self._put(block)

    def hold(self, ids: Iterable[int]) -> None:
        """Something begins to read or write these blocks."""
        busy = self.busy
        for block in ids:
            busy[block] = busy.get(block, 0) + 1

    def let_go(self, ids: Iterable[int]) -> None:
        """Undo one `hold`."""
        doomed = []
        for block in ids:
            self.busy[block] -= 1
            if self.busy[block]:
                continue
            del self.busy[block]
            if block in self.doomed and block in self.parked:
                doomed.append(block)
            elif block in self.parked:
                self.parked.discard(block)
                self._put(block)
        if doomed:
            self.doomed.difference_update(doomed)
            self.on_free(doomed)

    def withdraw(self, ids: Iterable[int]) -> list[int]:
        """Take those of these blocks that are free, as parked and busy ones. O(free blocks)."""
        chosen = sorted(set(ids).intersection(self._allocator.free_ids()))
        if chosen:
            self._allocator.remove(chosen)
            self.park(chosen)
        return chosen

    def park(self, ids: Iterable[int]) -> None:
        """Hold blocks that nobody owns."""
        self.parked.update(ids)
        self.hold(ids)

    def settle(self, kept: Sequence[int], freed: Iterable[int]) -> None:
        """A transfer into these blocks is over: some belong to the tree now, the rest to nobody."""
        if self.stale is not None:
            self.stale.difference_update(kept)
            spared = [block for block in kept if block in self.doomed]
            self.doomed.difference_update(spared)
            self.on_kept(spared)
        self.free(freed)

    def _put(self, block: int) -> None:
        self._allocator.put((block,))
        if self.stale is not None:
            self.stale.add(block)

    def free_ids(self) -> list[int]:
        """A copy of the free ids, O(pool); for checks."""
        return self._allocator.free_ids()
