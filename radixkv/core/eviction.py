"""The eviction frontier and the policies that order it.

Only a leaf without locks may lose blocks, from its tail, so what is cached is always a usable
prefix. Those leaves are the candidates. The prefix index tells a policy when a node becomes a
candidate (`add`) or stops being one (`discard`), and what happens to nodes (`on_insert`,
`on_touch`, `on_evict`); `pick` names the candidate to shrink next.

Candidates are never touched: a touch comes with a lock, and a lock discards.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

from radixkv.core.errors import InvalidArgument

if TYPE_CHECKING:
    from radixkv.core.tree import Node


class Policy(Protocol):
    """Orders the candidates of one pool."""

    def add(self, node: Node) -> None:
        """`node` became an unlocked leaf."""

    def discard(self, node: Node) -> None:
        """`node` is not a candidate (any more); it may never have been one."""

    def pick(self) -> Node | None:
        """The candidate whose tail goes next; it stays a candidate. None if there is none."""

    def on_insert(self, node: Node) -> None:
        """Blocks at the end of `node` entered the tree."""

    def on_touch(self, node: Node) -> None:
        """The path down to `node` was used; all its nodes share the touch time."""

    def on_evict(self, node: Node, num_blocks: int) -> None:
        """`node` lost its last `num_blocks` blocks."""


class Lru:
    """Least recently touched leaf first: a lazy heap, O(log n) amortized per candidate.

    `node.entry` holds the serial number of the node's live heap entry; others are stale. Stale
    entries never outnumber live ones by more than SLACK.
    """

    SLACK = 64
    __slots__ = ("_heap", "_serial", "_live")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._serial = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def add(self, node: Node) -> None:
        """See Policy."""
        if node.entry:
            return
        self._serial += 1
        node.entry = self._serial
        self._live += 1
        heappush(self._heap, (node.touched, self._serial, node))
        if len(self._heap) > 2 * self._live + self.SLACK:
            self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
            heapify(self._heap)

    def discard(self, node: Node) -> None:
        """See Policy."""
        if node.entry:
            node.entry = 0
            self._live -= 1

    def pick(self) -> Node | None:
        """See Policy."""
        heap = self._heap
        while heap:
            _, serial, node = heap[0]
            if node.entry == serial:
                return node
            heappop(heap)
        return None

    def on_insert(self, node: Node) -> None:
        """See Policy; recency needs no more than the order."""

    def on_touch(self, node: Node) -> None:
        """See Policy."""

    def on_evict(self, node: Node, num_blocks: int) -> None:
        """See Policy."""


POLICIES = {"lru": Lru}


def make_policy(name: str) -> Policy:
    """A fresh policy by name; InvalidArgument names the known ones."""
    if name not in POLICIES:
        raise InvalidArgument(f"unknown eviction policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]()
