"""The eviction frontier of a place and the policies that order it.

Only a node without locks and pins, and without a child in the same place, may lose blocks there,
from its tail, so what is resident is always a usable prefix. Those nodes are the candidates. The
prefix index tells a policy when a node becomes a candidate (`add`) or stops being one (`discard`),
and what happens to nodes (`on_insert`, `on_touch`, `on_evict`); `pick` names the candidate to
shrink next.

Candidates are never touched: a touch comes with a lock, and a lock discards.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

from radixkv.core.errors import InvalidArgument

if TYPE_CHECKING:
    from radixkv.core.tree import Node


class Policy(Protocol):
    """Orders the candidates of one place."""

    def __contains__(self, node: Node) -> bool:
        """Whether `node` is a candidate."""

    def add(self, node: Node) -> None:
        """`node` is a candidate; it may have been one before."""

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
    """Lowest priority first, then least recently touched: a lazy heap, O(log n) per candidate.

    `_serials` holds the serial number of each candidate's live heap entry; others are stale. Stale
    entries never outnumber live ones by more than SLACK.
    """

    SLACK = 64
    __slots__ = ("_heap", "_serial", "_serials")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Node]] = []
        self._serial = 0
        self._serials: dict[Node, int] = {}

    def __len__(self) -> int:
        return len(self._serials)

    def __contains__(self, node: Node) -> bool:
        return node in self._serials

    def add(self, node: Node) -> None:
        """See Policy."""
        serials = self._serials
        if node in serials:
            return
        self._serial += 1
        serials[node] = self._serial
        heappush(self._heap, (node.marks.priority, node.touched, self._serial, node))
        if len(self._heap) > 2 * len(serials) + self.SLACK:
            self._heap = [entry for entry in self._heap if serials.get(entry[3]) == entry[2]]
            heapify(self._heap)

    def discard(self, node: Node) -> None:
        """See Policy."""
        self._serials.pop(node, None)

    def pick(self) -> Node | None:
        """See Policy."""
        heap = self._heap
        while heap:
            _, _, serial, node = heap[0]
            if self._serials.get(node) == serial:
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
