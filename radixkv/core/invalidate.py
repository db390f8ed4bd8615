"""Invalidate: forget what is cached for a prefix, a namespace, or everything.

Blocks without a lease are freed at once. Leased ones are detached: nobody finds them, their leases
keep reading them, and they are freed with the last lock. A live lease whose sequence begins with
the prefix publishes nothing any more, so stale KV cannot come back.
"""

from __future__ import annotations

from radixkv.core import flight
from radixkv.core.results import Invalidated
from radixkv.core.state import State
from radixkv.core.tree import Node, Tree

NEVER = -1  # Lease.cacheable of a lease that must not publish


class Invalidation:
    """One Invalidate on the trees of a cache. O(blocks removed + leases)."""

    def __init__(self, state: State) -> None:
        self._state = state

    def run(self, namespace: bytes | None, prefix: bytes, dry_run: bool) -> Invalidated:
        """See Cache.invalidate."""
        trees = self._state.index.trees
        chosen = list(trees.values()) if namespace is None else [trees.get(namespace)]
        removed = detached = 0
        for tree in chosen:
            if tree is None:
                continue
            if not dry_run:
                self._silence(tree, prefix)
            for top, at in self._tops(tree, prefix):
                counts = _count(top, at) if dry_run else self._remove(top, at)
                removed += counts[0]
                detached += counts[1]
        if not dry_run:
            self._state.counters.invalidated_blocks += removed + detached
        return Invalidated(removed, detached)

    def _tops(self, tree: Tree, prefix: bytes) -> list[tuple[Node, int]]:
        """Nodes and byte offsets in their edges from where on everything begins with `prefix`."""
        if not prefix:
            return [(node, 0) for node in tree.root.children or ()]
        block = tree.block_bytes
        whole = (len(prefix) - 1) // block * block
        node, inside, at = tree.match(prefix, whole)
        if at < whole:
            return []
        rest = prefix[whole:]
        if inside < len(node.tokens):
            return [(node, inside)] if node.tokens.startswith(rest, inside) else []
        return [(child, 0) for child in node.children or () if child.tokens.startswith(rest)]

    def _remove(self, top: Node, at: int) -> tuple[int, int]:
        if at:
            top.tree.split(top, at)
        return self._state.index.remove_subtree(top)

    def _silence(self, tree: Tree, prefix: bytes) -> None:
        for session in self._state.sessions.values():
            for lease in session.leases.values():
                if lease.node.tree is not tree or lease.node.detached:
                    continue
                if (tree.path_tokens(lease.node) + lease.pending).startswith(prefix):
                    flight.unregister(lease)
                    lease.cacheable = NEVER
                    self._state.on_progress(lease, False)


def _count(top: Node, at: int) -> tuple[int, int]:
    counts = [0, 0]
    skipped = at // top.tree.block_bytes
    todo = [top]
    while todo:
        node = todo.pop()
        counts[1 if node.locks else 0] += node.num_blocks - skipped
        skipped = 0
        todo.extend(node.children or ())
    return counts[0], counts[1]
