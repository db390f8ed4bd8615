"""Which block ids of a pool are free: a stack, or for slots of nvme a queue.

Never used ids are handed out in ascending order, and only when no freed id is left, so that an
arena needs memory only up to the highest id ever handed out. Id 0, the null block, is not here.
"""

from array import array
from collections.abc import Iterable


class BlockAllocator:
    """A stack of free block ids 1 … num_blocks. Every method is O(number of ids moved)."""

    __slots__ = ("_free", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self._free = array("i", range(num_blocks, 0, -1))

    @property
    def num_free(self) -> int:
        """Free ids."""
        return len(self._free)

    def take(self, count: int) -> array:
        """Remove `count` free ids and return them; the caller has checked `num_free`."""
        free = self._free
        assert 0 <= count <= len(free), "taking more blocks than are free"
        if count == 0:
            return array("i")
        taken = free[-count:]
        del free[-count:]
        taken.reverse()
        return taken

    def remove(self, ids: Iterable[int]) -> None:
        """Take just these ids, which are free. O(all free ids)."""
        gone = set(ids)
        kept = array("i", (block for block in self._free if block not in gone))
        assert len(kept) + len(gone) == len(self._free), "taking a block that is not free"
        self._free = kept

    def put(self, ids: Iterable[int]) -> None:
        """Give ids back. The caller owns them; `check()` of the cache finds a double free."""
        self._free.extend(ids)

    def free_ids(self) -> list[int]:
        """A copy of the free ids, O(pool); for checks."""
        return list(self._free)


class SlotAllocator(BlockAllocator):
    """The same as a queue: what was freed last is taken last, so a bad slot is not met at once."""

    __slots__ = ("_head",)

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free.reverse()
        self._head = 0

    @property
    def num_free(self) -> int:
        """Free ids."""
        return len(self._free) - self._head

    def take(self, count: int) -> array:
        """Remove `count` free ids and return them; the caller has checked `num_free`."""
        assert 0 <= count <= self.num_free, "taking more slots than are free"
        taken = self._free[self._head : self._head + count]
        self._head += count
        if self._head > len(self._free) // 2:
            del self._free[: self._head]
            self._head = 0
        return taken

    def remove(self, ids: Iterable[int]) -> None:
        """Take just these ids, which are free. O(all free ids)."""
        del self._free[: self._head]
        self._head = 0
        super().remove(ids)

    def free_ids(self) -> list[int]:
        """A copy of the free ids, O(pool); for checks."""
        return list(self._free[self._head :])
