"""Copies within the gpu pool: forked tails and partial tails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from radixkv.core.prefix_index import PrefixIndex
from radixkv.core.results import CopyOp
from radixkv.core.tree import GPU, Node


@dataclass(slots=True)
class _Copy:
    op: CopyOp
    nodes: list[Node]


class Copies:
    """Copies in flight. Their blocks are busy, and where the tree has them, locked."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._pool = index.gpu.pool
        self._copies: dict[int, _Copy] = {}
        self._next_copy = 1

    def start(self, source: int, target: int, num_tokens: int, node: Node | None) -> CopyOp:
        """Begin a copy; with `node`, the tree node of `source` is locked until it is done."""
        op = CopyOp(self._next_copy, GPU, source, target, num_tokens)
        self._next_copy += 1
        copy = self._copies[op.copy_id] = _Copy(op, [])
        self._pool.hold((source, target))
        if node is not None:
            self._lock_for(copy, node)
        return op

    def publish(self, ids: Iterable[int], node: Node) -> None:
        """These blocks now belong to the path of `node`: copies of busy ones lock it too."""
        if not self._copies:
            return
        published = set(ids)
        for copy in self._copies.values():
            if published & {copy.op.source, copy.op.target}:
                self._lock_for(copy, node)

    def _lock_for(self, copy: _Copy, node: Node) -> None:
        copy.nodes.append(node)
        self._index.lock(node)

    def finish(self, copy_id: int) -> None:
        """The copy ended, well or not."""
        copy = self._copies.pop(copy_id)
        self._pool.let_go((copy.op.source, copy.op.target))
        for node in copy.nodes:
            self._index.unlock(node)

    def locked_nodes(self) -> list[Node]:
        """Nodes locked by copies; for checks."""
        return [node for copy in self._copies.values() for node in copy.nodes]
