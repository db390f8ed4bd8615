"""All trees of one pool: locks, recency, eviction, and the count of locked and cached blocks.

Theory of operation
    A node is *locked* while a lease or a copy ends at it or below it, else *cached*. Locks are
    counted where they end; a node passes one lock to its parent while it has any itself, so taking
    a second lease on a locked path costs O(1), and a path is locked exactly from its deepest lock
    to the root. Cached leaves are the policy's candidates.
    Invalidation takes cached nodes out at once; locked ones are *detached*: nobody finds them,
    they are freed with their last lock.
Invariants (check.py): locks = ends here + locked children; an unlocked node has no locked child;
    candidates = unlocked leaves; num_locked and num_cached add up over all nodes.
It must not know: sessions, what a lease may do, time.
"""

from __future__ import annotations

from array import array

from radixkv.core.allocator import BlockAllocator
from radixkv.core.evicted import EvictedDigests
from radixkv.core.eviction import make_policy
from radixkv.core.results import CacheConfig
from radixkv.core.tokens import TOKEN_BYTES
from radixkv.core.tree import GPU, Match, Node, Tree


class PrefixIndex:
    """The trees by namespace, and the blocks in them."""

    def __init__(self, config: CacheConfig, allocator: BlockAllocator) -> None:
        self.block_bytes = config.block_size * TOKEN_BYTES
        self.max_edge_bytes = max(config.max_edge_tokens * TOKEN_BYTES, self.block_bytes)
        self.trees: dict[bytes, Tree] = {}
        self.policy = make_policy(config.eviction)
        self.evicted = EvictedDigests(config.max_evicted_digests)
        self.num_locked = 0
        self.num_cached = 0
        self.num_evicted = 0
        self.detached: set[Node] = set()
        self._allocator = allocator
        self.clock = 0

    def tree(self, namespace: bytes) -> Tree:
        """The tree of a namespace, made if need be; dropped when nothing is in it."""
        tree = self.trees.get(namespace)
        if tree is None:
            tree = self.trees[namespace] = Tree(namespace, self.block_bytes)
        return tree

    def hold(self, tree: Tree) -> None:
        """Keep a tree that may be empty from being dropped. O(1)."""
        tree.root.locks += 1

    def let_go(self, tree: Tree) -> None:
        """Undo one `hold`."""
        tree.root.locks -= 1
        if not tree.root.locks:
            self._drop_if_empty(tree)

    # ---- locks and recency ------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keep the path to `node` from eviction. O(nodes not locked before)."""
        step: Node | None = node
        while step is not None:
            step.locks += 1
            if step.locks > 1:
                return
            count = len(step.residency[GPU])
            self.num_locked += count
            self.num_cached -= count
            if step.entry:
                self.policy.discard(step)
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock(node)`. Detached nodes without locks are freed."""
        step: Node | None = node
        while step is not None:
            assert step.locks > 0
            step.locks -= 1
            if step.locks:
                return
            parent = step.parent
            if step.detached:
                self._free_detached(step)
            else:
                count = len(step.residency[GPU])
                self.num_locked -= count
                self.num_cached += count
                if step.children is None:
                    if parent is None:
                        self._drop_if_empty(step.tree)
                    else:
                        self.policy.add(step)
            step = parent

    def _free_detached(self, node: Node) -> None:
        self.num_locked -= node.num_blocks
        self.detached.discard(node)
        assert node.parent is not None
        siblings = node.parent.children
        if siblings is not None and siblings.get(node.tokens[: self.block_bytes]) is node:
            node.tree.unlink(node)  # unless it was the top of what was invalidated with it
        self._remove_blocks(node, 0)
        node.tree.num_nodes -= 1

    def touch(self, node: Node) -> None:
        """Make the whole path to `node` the most recently used. O(nodes on the path)."""
        self.clock += 1
        clock = self.clock
        step: Node | None = node
        while step is not None:
            step.touched = clock
            step = step.parent
        self.policy.on_touch(node)

    def settle(self, match: Match) -> Node:
        """A node that ends where `match` ends, splitting if need be."""
        node, inside, _ = match
        if inside == len(node.tokens):
            return node
        return node.tree.split(node, inside)

    # ---- growth -----------------------------------------------------------------------------

    def insert(self, start: Node, tokens: bytes, ids: array, own_end: bool) -> tuple[Node, int]:
        """Publish blocks behind `start`; returns (end node, leading blocks the tree had already).

        The tree keeps blocks it has; the caller keeps its own copies of those. The others now
        belong to the tree, unlocked until the caller locks the end node. With `own_end` the caller
        holds the only lock at `start` and a leaf grows in place.
        """
        tree = start.tree
        node, at = start, 0
        while at < len(tokens) and node.children is not None:
            child = node.children.get(tokens[at : at + self.block_bytes])
            if child is None:
                break
            match = tree.match_edge(child, tokens, at)
            at += match
            if match < len(child.tokens):
                node = tree.split(child, match)
                break
            node = child
        duplicates = at // self.block_bytes
        if at < len(tokens):
            grows = own_end and node is start and node.children is None and node.parent is not None
            node = self._append(node, tokens[at:], ids[duplicates:], grows)
        return node, duplicates

    def _append(self, node: Node, tokens: bytes, ids: array, grows: bool) -> Node:
        tree = node.tree
        if len(tree.contents):
            tree.contents.count(tokens, 1)
        at = 0
        if grows:
            at = min(len(tokens), self.max_edge_bytes - len(node.tokens))
            at = max(at - at % self.block_bytes, 0)
            if at:
                node.tokens += tokens[:at]
                node.residency[GPU].extend(ids[: at // self.block_bytes])
                self.num_locked += at // self.block_bytes
                self.policy.on_insert(node)
        while at < len(tokens):
            end = min(len(tokens), at + self.max_edge_bytes)
            end -= (end - at) % self.block_bytes
            part = ids[at // self.block_bytes : end // self.block_bytes]
            if node.entry:
                self.policy.discard(node)
            node = tree.add_child(node, tokens[at:end], (part,))
            self.num_cached += len(part)
            self.policy.on_insert(node)
            self.policy.add(node)
            at = end
        return node

    def join_up(self, node: Node) -> None:
        """Merge an unlocked, unbranched chain of equal recency upwards, up to the edge cap."""
        while (
            (parent := node.parent) is not None
            and parent.parent is not None
            and not node.locks
            and not parent.locks
            and not node.detached
            and parent.children is not None
            and len(parent.children) == 1
            and parent.touched == node.touched
            and len(parent.tokens) + len(node.tokens) <= self.max_edge_bytes
        ):
            node.tree.join(node)

    # ---- removal ----------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        """Free up to `count` cached blocks, deepest of the policy's pick first; returns how many.

        O(log candidates) per leaf that shrinks, O(prefix bytes) per branch.
        """
        freed = 0
        lost: tuple[Node, bytes] | None = None  # a branch's new end, and the block behind it
        while freed < count:
            node = self.policy.pick()
            if node is None:
                break
            if lost is not None and lost[0] is not node:
                self.evicted.add(*lost)
            held = len(node.residency[GPU])
            kept = max(held - (count - freed), 0)
            freed += held - kept
            self.policy.on_evict(node, held - kept)
            at = kept * self.block_bytes
            block = node.tree.contents.canonical(node.tokens[at : at + self.block_bytes])
            if kept:
                lost = node, block
                self._remove_blocks(node, kept)
            else:
                assert node.parent is not None
                lost = node.parent, block
                self._remove_leaf(node)
        if lost is not None:
            self.evicted.add(*lost)
        self.num_cached -= freed
        self.num_evicted += freed
        return freed

    def _remove_leaf(self, node: Node) -> None:
        parent, tree = node.parent, node.tree
        assert parent is not None and node.children is None and not node.locks
        self.policy.discard(node)
        tree.unlink(node)
        tree.num_nodes -= 1
        self._remove_blocks(node, 0)
        if parent.children is None and not parent.locks:
            if parent.parent is None:
                self._drop_if_empty(tree)
            else:
                self.policy.add(parent)

    def _remove_blocks(self, node: Node, kept: int) -> None:
        kept_bytes = kept * self.block_bytes
        for ids in node.residency:
            self._allocator.put(ids[kept:])
            del ids[kept:]
        contents = node.tree.contents
        if len(contents):
            contents.count(node.tokens[kept_bytes:], -1)
        node.tokens = node.tokens[:kept_bytes]

    def _drop_if_empty(self, tree: Tree) -> None:
        if tree.root.children is None and not tree.root.locks:
            self.trees.pop(tree.namespace, None)

    def remove_subtree(self, top: Node) -> tuple[int, int]:
        """Invalidate `top` and all below it: (blocks freed now, blocks detached)."""
        assert top.parent is not None
        subtree, todo = [], [top]
        while todo:
            node = todo.pop()
            subtree.append(node)
            todo.extend(node.children or ())
        removed = detached = 0
        for node in reversed(subtree):
            count = node.num_blocks
            if node.locks:
                node.detached = True
                self.detached.add(node)
                detached += count
            else:
                removed += count
                self.num_cached -= count
                self._remove_leaf(node)
        if top.detached:
            top.tree.unlink(top)
        return removed, detached
