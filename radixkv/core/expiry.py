"""Times to live: when which cached blocks are to be forgotten."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from radixkv.core.tree import Node

SLACK = 1024


class Expiry:
    """A heap of nodes by the end of their time; those that are gone or changed are passed over.

    Whoever makes a node with `expires_ms` notes it here, splits included.
    """

    __slots__ = ("heap", "_kept", "_serial")

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Node]] = []
        self._serial = 0
        self._kept = 0  # entries left by the last clean-up

    def note(self, node: Node) -> None:
        """`node` may have a time to live. O(log nodes)."""
        if node.marks.expires_ms is None:
            return
        self._serial += 1
        heappush(self.heap, (node.marks.expires_ms, self._serial, node))
        if len(self.heap) > 2 * self._kept + SLACK:
            self.heap = [entry for entry in self.heap if _is_true(entry)]
            heapify(self.heap)
            self._kept = len(self.heap)

    def due(self, now_ms: int) -> list[Node]:
        """Nodes whose time is over."""
        found: dict[Node, None] = {}
        while self.heap and self.heap[0][0] <= now_ms:
            entry = heappop(self.heap)
            if _is_true(entry):
                found[entry[2]] = None
        return list(found)


def _is_true(entry: tuple[int, int, Node]) -> bool:
    expires_ms, _, node = entry
    return bool(node.tokens) and not node.detached and node.marks.expires_ms == expires_ms
