"""Pins: cached prefixes that stay where they are until Unpin, or until their time is over."""

from __future__ import annotations

from heapq import heappop, heappush

from radixkv.core.errors import Exhausted
from radixkv.core.prefix_index import PrefixIndex
from radixkv.core.results import CacheConfig, Pinned
from radixkv.core.tokens import TOKEN_BYTES
from radixkv.core.transfers import depth_of
from radixkv.core.tree import Match, Node, Tree

MAX_PINS = 65_536


class Pins:
    """All pins of a cache."""

    def __init__(self, index: PrefixIndex, config: CacheConfig) -> None:
        self._index = index
        self._max_part = config.max_pinned
        self._pins: dict[int, Node] = {}
        self.times: list[tuple[int, int]] = []  # (until_ms, pin id), a heap
        self._next_id = 1

    def add(self, match: Match, until_ms: int | None) -> Pinned:
        """Pin the path of a match. Raises Exhausted if pins would hold too much of a place."""
        if len(self._pins) >= MAX_PINS:
            raise Exhausted(f"there are {MAX_PINS} pins")
        node = self._index.settle(match)
        if node.parent is None:
            return Pinned(0, 0)
        path = node.tree.path(node)
        for state in self._index.places:
            more = sum(len(step.residency[state.place]) for step in path if not step.pins)
            held = state.num_pinned + more
            allowed = int(self._max_part * state.pool.num_blocks)
            if held > allowed and more:
                raise Exhausted(
                    f"pins would hold {held} of {state.pool.num_blocks} {state.place.name.lower()}"
                    f" blocks, at most {allowed} are allowed (--max-pinned)"
                )
        self._index.pin(node)
        pin_id = self._next_id
        self._next_id += 1
        self._pins[pin_id] = node
        if until_ms is not None:
            heappush(self.times, (until_ms, pin_id))
        blocks = depth_of(node) + node.num_blocks
        return Pinned(pin_id, blocks * self._index.block_bytes // TOKEN_BYTES)

    def remove(self, pin_id: int) -> int:
        """Lift a pin; 0 if there is none (any more)."""
        node = self._pins.pop(pin_id, None)
        if node is None:
            return 0
        self._index.unpin(node)
        return 1

    def remove_prefix(self, tree: Tree, prefix: bytes) -> int:
        """Lift the pins of sequences that begin with `prefix`. O(all pins)."""
        lifted = [
            pin_id
            for pin_id, node in self._pins.items()
            if node.tree is tree and tree.path_tokens(node).startswith(prefix)
        ]
        return sum(self.remove(pin_id) for pin_id in lifted)

    def remove_below(self, top: Node) -> None:
        """Shorten the pins at and below a node that is invalidated to its parent. O(all pins)."""
        for pin_id, node in list(self._pins.items()):
            step: Node | None = node
            while step is not None and step is not top:
                step = step.parent
            if step is top and top.parent is not None:
                self._index.pin(top.parent)
                self._index.unpin(node)
                self._pins[pin_id] = top.parent

    def expire(self, now_ms: int) -> None:
        """Lift the pins whose time is over."""
        while self.times and self.times[0][0] <= now_ms:
            self.remove(heappop(self.times)[1])

    def nodes(self) -> list[Node]:
        """Where pins end; for checks."""
        return list(self._pins.values())
