"""Invalidate: forget what is cached for a prefix, a tag, a namespace, or everything, on every tier.

Gpu blocks without a lease are freed at once. Leased ones are detached: nobody finds them, their
leases keep reading them, and they are freed with the last lock. A live lease whose sequence begins
with the prefix (or that carries the tag) publishes nothing any more, so stale KV cannot come back.
Copies below are given up at once; `erasing` sees to what a restart could find.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.core import flight
from radixkv.core.digest import EVERYTHING, all_of, block_digest, root_digest
from radixkv.core.identity import prefix_digests, start_digest
from radixkv.core.lease import Lease
from radixkv.core.results import Invalidated
from radixkv.core.state import State
from radixkv.core.tier_ops import Place
from radixkv.core.tree import GPU, Node, Tree

NEVER = -1  # Lease.cacheable of a lease that must not publish


class Invalidation:
    """One Invalidate on the trees of a cache. O(blocks removed + leases); with a tag, O(nodes)."""

    def __init__(self, state: State, dry_run: bool = False) -> None:
        self._state = state
        self._dry_run = dry_run
        self._blocks = [0, 0, 0]  # by place
        self._leased = 0
        self._remote = 0
        self._slots: list[int] = []
        self._digests: list[bytes] = []

    def run(self, namespace: bytes | None, prefix: bytes, tag: str) -> Invalidated:
        """See Cache.invalidate."""
        trees = self._state.index.trees
        chosen = list(trees.values()) if namespace is None else [trees.get(namespace)]
        if self._state.config.remote and not self._dry_run:
            self._state.probing.forget()
            if not tag:
                self._digests.append(self._named(namespace, prefix))
        for tree in chosen:
            if tree is None:
                continue
            tops = self._tops(tree, prefix)
            if tag:
                tops = _tagged(tops, tag)
            if not self._dry_run:
                self._silence(tree, prefix, tag)
                self._digests += self._state.onboard.doom_remote(tree, prefix, tag)
            for top, at in tops:
                self._take(top, at)
        return self._result()

    def _named(self, namespace: bytes | None, prefix: bytes) -> bytes:
        """What to remove from the remote though no tree knows of it: it may have it by others.

        All of a namespace can be named; of a prefix, its last whole block, without which what
        follows is not found.
        """
        if namespace is None:
            return EVERYTHING
        block = self._state.block_bytes
        digest = root_digest(namespace)
        for at in range(0, len(prefix) - block + 1, block):
            digest = block_digest(digest, prefix[at : at + block])
        return digest if len(prefix) >= block else all_of(digest)

    def expire(self, nodes: Sequence[Node]) -> None:
        """Forget nodes whose time is over, and all that follows them."""
        if not nodes:
            return
        for node in nodes:
            if node.tokens and not node.detached:
                self._take(node, 0)
        self._state.erasing.begin(self._slots, self._digests, told=False)

    def _result(self) -> Invalidated:
        ticket = 0
        if not self._dry_run:
            self._state.counters.invalidated_blocks += self._blocks[GPU] + self._leased
            ticket = self._state.erasing.begin(self._slots, self._digests)
        return Invalidated(
            self._blocks[GPU], self._leased, self._blocks[Place.CPU], self._blocks[Place.NVME],
            self._remote, ticket,
        )  # fmt: skip

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

    def _take(self, top: Node, at: int) -> None:
        """Count, and unless it is a dry run remove, what begins `at` bytes into an edge."""
        index = self._state.index
        if self._dry_run:
            self._count(top, at // top.tree.block_bytes)
            return
        if at:
            index.split(top, at)
        self._state.pins.remove_below(top)
        self._note_records(top)
        counts = index.remove_subtree(top)
        self._leased += counts.pop()
        for place, count in enumerate(counts):
            self._blocks[place] += count

    def _note_records(self, top: Node) -> None:
        """What nvme and the remote have of a subtree."""
        remote = self._state.config.remote
        for node in _subtree(top):
            self._slots.extend(slot for ids in node.residency[Place.NVME :] for slot in ids)
            if remote:
                self._remote += node.on_remote
                self._digests += prefix_digests(node.tree, start_digest(node), node.tokens)

    def _count(self, top: Node, skipped: int) -> None:
        for node in _subtree(top):
            for place, ids in enumerate(node.residency):
                count = max(len(ids) - skipped, 0)
                if place == GPU and node.locks:
                    self._leased += count
                else:
                    self._blocks[place] += count
            self._remote += max(node.on_remote - skipped, 0)
            skipped = 0

    def _silence(self, tree: Tree, prefix: bytes, tag: str) -> None:
        for session in self._state.sessions.values():
            for lease in session.leases.values():
                if lease.node.tree is not tree or lease.node.detached:
                    continue
                if _concerns(tree, lease, prefix, tag):
                    flight.unregister(lease)
                    lease.cacheable = NEVER
                    self._state.on_progress(lease, False)


def _concerns(tree: Tree, lease: Lease, prefix: bytes, tag: str) -> bool:
    if tag:
        marks = [lease.marks, *(node.marks for node in tree.path(lease.node))]
        if not any(tag in mark.tags for mark in marks):
            return False
    return (tree.path_tokens(lease.node) + lease.pending).startswith(prefix)


def _tagged(tops: list[tuple[Node, int]], tag: str) -> list[tuple[Node, int]]:
    """The topmost places at or below `tops` that carry a tag."""
    found = []
    todo = list(tops)
    while todo:
        node, at = todo.pop()
        if tag in node.marks.tags:
            found.append((node, at))
        else:
            todo.extend((child, 0) for child in node.children or ())
    return found


def _subtree(top: Node) -> list[Node]:
    """`top` and all below it, parents first."""
    found, todo = [], [top]
    while todo:
        node = todo.pop()
        found.append(node)
        todo.extend(node.children or ())
    return found
