"""All trees: how they grow, change shape, and lose blocks; see `residency` for who may lose them.

Invalidation takes unlocked nodes out at once; locked ones are *detached*: nobody finds them, their
gpu blocks are freed with their last lock.
"""

from __future__ import annotations

from array import array

from radixkv.core.residency import Residency
from radixkv.core.tier_ops import Place
from radixkv.core.tree import GPU, NO_MARKS, Marks, Match, Node, Tree


class PrefixIndex(Residency):
    """The trees by namespace, and the blocks in them."""

    def tree(self, namespace: bytes) -> Tree:
        """The tree of a namespace, made if need be; dropped when nothing is in it."""
        tree = self.trees.get(namespace)
        if tree is None:
            tree = Tree(namespace, self.block_bytes, len(self.places))
            self.trees[namespace] = tree
        return tree

    def hold(self, tree: Tree) -> None:
        """Keep a tree that may be empty from being dropped. O(1)."""
        tree.root.locks += 1

    def let_go(self, tree: Tree) -> None:
        """Undo one `hold`."""
        tree.root.locks -= 1
        if not tree.root.locks:
            self._drop_if_empty(tree)

    # ---- shape ------------------------------------------------------------------------------

    def on_gpu(self, match: Match) -> Match:
        """The part of a match whose blocks are on the gpu. O(nodes that are not)."""
        node, inside, length = match
        held = len(node.residency[GPU]) * self.block_bytes
        while held < inside:
            if held or node.parent is None:
                return Match(node, held, length - inside + held)
            length -= inside
            node = node.parent
            inside = len(node.tokens)
            held = len(node.residency[GPU]) * self.block_bytes
        return Match(node, inside, length)

    def resident(self, match: Match) -> Match:
        """The part of a match whose blocks are in any place. O(nodes that are not)."""
        node, inside, length = match
        held = max(map(len, node.residency)) * self.block_bytes
        while held < inside:
            if held or node.parent is None:
                return Match(node, held, length - inside + held)
            length -= inside
            node = node.parent
            inside = len(node.tokens)
            held = max(map(len, node.residency)) * self.block_bytes
        return Match(node, inside, length)

    def settle(self, match: Match) -> Node:
        """A node that ends where `match` ends, splitting if need be."""
        node, inside, _ = match
        if inside == len(node.tokens):
            return node
        return self.split(node, inside)

    def split(self, node: Node, at: int) -> Node:
        """Cut the edge of `node` after `at` bytes; returns the new upper node."""
        upper = node.tree.split(node, at)
        self.expiry.note(upper)
        if self.tiered:
            self.refresh(node)
            self.refresh(upper)
        return upper

    def join_up(self, node: Node) -> None:
        """Merge an unlocked, unbranched chain of equal recency upwards, up to the edge cap."""
        while (
            (parent := node.parent) is not None
            and parent.parent is not None
            and not (node.locks or parent.locks or node.pins or parent.pins or node.detached)
            and parent.children is not None
            and len(parent.children) == 1
            and parent.touched == node.touched
            and parent.marks == node.marks
            and len(parent.tokens) + len(node.tokens) <= self.max_edge_bytes
        ):
            if self.tiered:
                self._not_candidate(parent)
                self._not_candidate(node)
                self._count(parent, -1)
                self._count(node, -1)
            node.tree.join(node)
            if self.tiered:
                self._count(node, 1)
            self.refresh(node)

    # ---- growth -----------------------------------------------------------------------------

    def insert(
        self, start: Node, tokens: bytes, ids: array, own_end: bool, marks: Marks = NO_MARKS
    ) -> tuple[Node, int]:
        """Publish gpu blocks behind `start`; returns (end node, leading blocks that were on gpu).

        The tree keeps blocks it has there; the caller keeps its own copies of those. The others now
        belong to the tree, unlocked until the caller locks the end node. `start` is on the gpu up
        to its end. With `own_end` the caller holds the only lock at `start` and a leaf grows in
        place. Only what is new to every place gets `marks`.
        """
        node, at, duplicates = start, 0, 0
        while at < len(tokens) and node.children is not None:
            child = node.children.get(tokens[at : at + self.block_bytes])
            if child is None:
                break
            match = node.tree.match_edge(child, tokens, at)
            if match < len(child.tokens):
                child = self.split(child, match)
            held = len(child.residency[GPU])
            duplicates += held
            if held < child.num_blocks:
                first = at // self.block_bytes
                self.gain(child, Place.GPU, ids[first + held : first + child.num_blocks])
            at += match
            node = child
        if at < len(tokens):
            grows = own_end and node is start and node.children is None
            grows = grows and node.parent is not None and node.marks == marks
            node = self._append(node, tokens[at:], ids[at // self.block_bytes :], grows, marks)
        return node, duplicates

    def _append(self, node: Node, tokens: bytes, ids: array, grows: bool, marks: Marks) -> Node:
        tree = node.tree
        if len(tree.contents):
            tree.contents.count(tokens, 1)
        at = 0
        if grows:
            at = min(len(tokens), self.max_edge_bytes - len(node.tokens))
            at = max(at - at % self.block_bytes, 0)
            if at:
                node.tokens += tokens[:at]
                self.gain(node, Place.GPU, ids[: at // self.block_bytes])
                self.gpu.policy.on_insert(node)
        while at < len(tokens):
            end = min(len(tokens), at + self.max_edge_bytes)
            end -= (end - at) % self.block_bytes
            node = tree.add_child(node, tokens[at:end], tree.nowhere())
            node.marks = marks
            self.expiry.note(node)
            self.gain(node, Place.GPU, ids[at // self.block_bytes : end // self.block_bytes])
            self.gpu.policy.on_insert(node)
            at = end
        return node

    # ---- removal ----------------------------------------------------------------------------

    def evict(
        self, place: Place, count: int, may_drop: bool = True, spare_copies: bool = False
    ) -> int:
        """Free up to `count` cached blocks, deepest of the policy's pick first; returns how many.

        Without `may_drop` only what has a copy in a slower place goes, least recently used first;
        with `spare_copies` it stops at the first pick whose tail a faster place has too, since
        that would have to come down again. O(log candidates) per node that shrinks, O(prefix
        bytes) per branch.
        """
        state = self.places[place]
        policy = state.policy
        choices = policy if may_drop or not state.has_slower else state.clean
        freed = 0
        lost: tuple[Node, bytes] | None = None  # a branch's new end, and the block behind it
        while freed < count:
            node = choices.pick()
            if node is None:
                break
            held = len(node.residency[place])
            if spare_copies and any(len(ids) >= held for ids in node.residency[:place]):
                break
            if lost is not None and lost[0] is not node:
                self.evicted.add(*lost)
                lost = None
            kept = max(held - (count - freed), 0)
            freed += held - kept
            policy.on_evict(node, held - kept)
            if node in state.unclean:
                state.num_dropped += held - max(kept, self.covered(node, place))
            lost = self.shrink(node, place, kept) or lost
        if lost is not None:
            self.evicted.add(*lost)
        state.num_evicted += freed
        return freed

    def cut(self, place: Place, node: Node, at: int) -> None:
        """Block `at` of the edge is not what it should be in `place`: forget it, and all below."""
        if node.detached or len(node.residency[place]) <= at:
            return
        subtree, todo = [], list(node.children or ())
        while todo:
            step = todo.pop()
            if step.residency[place]:
                subtree.append(step)
                todo.extend(step.children or ())
        for step in reversed(subtree):
            self.shrink(step, place, 0)
        self.shrink(node, place, at)

    def remove_subtree(self, top: Node) -> list[int]:
        """Invalidate `top` and all below it, none of which is pinned.

        Returns the blocks freed now in each place, then the gpu blocks detached.
        """
        assert top.parent is not None
        subtree, todo = [], [top]
        while todo:
            node = todo.pop()
            subtree.append(node)
            todo.extend(node.children or ())
        counts = [0] * (len(self.places) + 1)
        for node in reversed(subtree):
            for place in range(len(self.places) - 1, GPU, -1):
                counts[place] += len(node.residency[place])
                self.shrink(node, Place(place), 0)
            held = len(node.residency[GPU])
            if node.locks:
                counts[-1] += held
            else:
                counts[GPU] += held
                self.shrink(node, Place.GPU, 0)
        if top.locks:
            self._detach(top)
        return counts

    def _detach(self, top: Node) -> None:
        """Nobody finds `top` and what is left below it, all locked, from now on."""
        if top.residency[GPU]:
            self._left(top, Place.GPU)
        top.tree.unlink(top)
        todo = [top]
        while todo:
            node = todo.pop()
            node.detached = True
            self.detached.add(node)
            todo.extend(node.children or ())
