"""The children of a tree node, ordered by their first block's token bytes.

Order matters: in byte order the neighbours of a missing key share the longest part of it, which
gives the partial tail and the place of divergence for one bisect.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sortedcontainers import SortedDict

if TYPE_CHECKING:
    from radixkv.core.tree import Node

SMALL = 64


class Children:
    """Maps a first block (bytes) to a node. A bisected list up to SMALL, a sorted dict above.

    `resident` counts, per place, the children that have blocks there; the prefix index keeps it.
    """

    __slots__ = ("_keys", "_nodes", "_large", "resident")

    def __init__(self, num_places: int) -> None:
        self.resident = [0] * num_places
        self._keys: list[bytes] = []
        self._nodes: list[Node] = []
        self._large: SortedDict | None = None

    def __len__(self) -> int:
        return len(self._keys) if self._large is None else len(self._large)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes if self._large is None else list(self._large.values()))

    def get(self, key: bytes) -> Node | None:
        """The child whose first block is `key`; O(log n) comparisons or one dict probe."""
        if self._large is not None:
            return self._large.get(key)
        keys = self._keys
        index = bisect_left(keys, key)
        if index < len(keys) and keys[index] == key:
            return self._nodes[index]
        return None

    def put(self, key: bytes, node: Node) -> None:
        """Add a child, or replace the one under the same key."""
        if self._large is not None:
            self._large[key] = node
            return
        index = bisect_left(self._keys, key)
        if index < len(self._keys) and self._keys[index] == key:
            self._nodes[index] = node
            return
        self._keys.insert(index, key)
        self._nodes.insert(index, node)
        if len(self._keys) > SMALL:
            self._large = SortedDict(zip(self._keys, self._nodes, strict=True))
            self._keys, self._nodes = [], []

    def remove(self, key: bytes) -> None:
        """Remove the child under `key`, which exists."""
        if self._large is not None:
            del self._large[key]
            if len(self._large) <= SMALL // 2:
                self._keys = list(self._large.keys())
                self._nodes = list(self._large.values())
                self._large = None
            return
        index = bisect_left(self._keys, key)
        assert self._keys[index] == key
        del self._keys[index]
        del self._nodes[index]

    def neighbours(self, key: bytes) -> list[Node]:
        """The children right before and at or after `key` in byte order (0 to 2 nodes)."""
        if self._large is not None:
            keys = self._large.keys()
            index = self._large.bisect_left(key)
            return [self._large[keys[i]] for i in (index - 1, index) if 0 <= i < len(keys)]
        index = bisect_left(self._keys, key)
        return self._nodes[max(index - 1, 0) : index + 1]
