"""A bounded memory of what was evicted, to tell "evicted" from "never computed".

One 64-bit digest per branch that a series of evictions shortens, of the whole prefix up to and
including the first evicted block. That is enough: evictions go from the tail inward, so the block
right behind a match is the first of some series. A digest collision can only make a miss reason
wrong, never a hit.
"""

from collections import OrderedDict

from xxhash import xxh3_64_intdigest

from radixkv.core.tree import Node


class EvictedDigests:
    """Insertion-ordered set of at most `capacity` digests; the oldest are forgotten."""

    __slots__ = ("_digests", "_capacity")

    def __init__(self, capacity: int) -> None:
        self._digests: OrderedDict[int, None] = OrderedDict()
        self._capacity = capacity

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, end: Node, lost: bytes) -> None:
        """Behind `end`, the block with the canonical tokens `lost` went. O(prefix bytes)."""
        if not self._capacity:
            return
        tree = end.tree
        prefix = tree.contents.canonical(tree.path_tokens(end)) + lost
        self._digests[xxh3_64_intdigest(prefix, tree.seed)] = None
        if len(self._digests) > self._capacity:
            self._digests.popitem(last=False)

    def has(self, prefix: bytes, seed: int) -> bool:
        """Whether this prefix (canonical token bytes, whole blocks) was evicted. O(bytes)."""
        return bool(self._digests) and xxh3_64_intdigest(prefix, seed) in self._digests
