"""Room: taking blocks from the pool, giving them back, and copies in flight.

A block that a copy reads or writes is *busy*. A busy block that loses its owner is parked in
flight and becomes free when its last copy is done.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from radixkv.core.allocator import BlockAllocator
from radixkv.core.errors import Exhausted
from radixkv.core.prefix_index import PrefixIndex
from radixkv.core.results import CopyOp
from radixkv.core.tree import GPU, Node


@dataclass(slots=True)
class _Copy:
    op: CopyOp
    nodes: list[Node]


class BlockPool:
    """Blocks of one pool outside and inside the tree."""

    def __init__(self, allocator: BlockAllocator, index: PrefixIndex) -> None:
        self.parked: set[int] = set()
        self.busy: dict[int, int] = {}
        self._allocator = allocator
        self._index = index
        self._copies: dict[int, _Copy] = {}
        self._next_copy = 1

    @property
    def num_free(self) -> int:
        """Free blocks, without eviction."""
        return self._allocator.num_free

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free, or evictable."""
        return self._allocator.num_free + self._index.num_cached

    def take(self, count: int) -> array:
        """`count` blocks, evicting if need be. Raises Exhausted and changes nothing otherwise."""
        allocator = self._allocator
        short = count - allocator.num_free
        if short > 0:
            if short > self._index.num_cached:
                raise Exhausted(self.shortage(count))
            evicted = self._index.evict(short)
            assert evicted == short, "cached blocks that cannot be evicted"
        return allocator.take(count)

    def shortage(self, count: int) -> str:
        """The message of Exhausted: what was wanted, what is there."""
        return (
            f"{count} blocks wanted, {self._allocator.num_free} free and"
            f" {self._index.num_cached} evictable of {self._allocator.num_blocks}"
        )

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back; busy ones when their copies are done."""
        busy = self.busy
        if not busy:
            self._allocator.put(ids)
            return
        for block in ids:
            if block in busy:
                self.parked.add(block)
            else:
                self._allocator.put((block,))

    def start_copy(self, source: int, target: int, num_tokens: int, node: Node | None) -> CopyOp:
        """Begin a copy; with `node`, the tree node of `source` is locked until it is done."""
        op = CopyOp(self._next_copy, GPU, source, target, num_tokens)
        self._next_copy += 1
        copy = self._copies[op.copy_id] = _Copy(op, [])
        for block in (source, target):
            self.busy[block] = self.busy.get(block, 0) + 1
        if node is not None:
            self._lock_for(copy, node)
        return op

    def publish(self, ids: Iterable[int], node: Node) -> None:
        """These blocks now belong to the path of `node`: copies of busy ones lock it too."""
        if not self.busy:
            return
        published = self.busy.keys() & set(ids)
        for copy in self._copies.values():
            if published & {copy.op.source, copy.op.target}:
                self._lock_for(copy, node)

    def _lock_for(self, copy: _Copy, node: Node) -> None:
        copy.nodes.append(node)
        self._index.lock(node)

    def finish_copy(self, copy_id: int) -> None:
        """The copy ended, well or not."""
        copy = self._copies.pop(copy_id)
        for block in (copy.op.source, copy.op.target):
            self.busy[block] -= 1
            if not self.busy[block]:
                del self.busy[block]
                if block in self.parked:
                    self.parked.discard(block)
                    self._allocator.put((block,))
        for node in copy.nodes:
            self._index.unlock(node)

    def copy_locks(self) -> list[Node]:
        """Nodes locked by copies; for checks."""
        return [node for copy in self._copies.values() for node in copy.nodes]
