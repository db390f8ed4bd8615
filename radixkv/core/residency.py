"""Which blocks are where: locks, pins and recency of nodes, and the count of blocks in each place.

Theory of operation
    A node is *locked* while a lease, copy or transfer ends at it or below it; else *pinned* while a
    pin does; else *cached*. Locks are counted where they end; a node passes one lock to its parent
    while it has any itself, so taking a second lease on a locked path costs O(1), and a path is
    locked exactly from its deepest lock to the root. Pins work alike.
    In each place, cached nodes without a child there are the policy's candidates (eviction.py).
    A node whose blocks are in no place is removed, and an edge ends with its last resident block;
    locked and pinned ones are trimmed when they are neither any more.
    Detached nodes (invalidated while locked) are freed with their last lock.
Invariants (check.py): locks = ends here + locked children; an unlocked node has no locked child;
    candidates as above; the counts of each place add up over all nodes; residency is prefix-closed.
It must not know: sessions, what a lease may do, time.
"""

from __future__ import annotations

from array import array

from radixkv.core.evicted import EvictedDigests
from radixkv.core.expiry import Expiry
from radixkv.core.places import PlaceState
from radixkv.core.results import CacheConfig
from radixkv.core.tier_ops import Place
from radixkv.core.tokens import TOKEN_BYTES
from radixkv.core.tree import GPU, Node, Tree


class Residency:
    """The trees by namespace, and what is kept about their nodes in each place."""

    def __init__(self, config: CacheConfig) -> None:
        self.block_bytes = config.block_size * TOKEN_BYTES
        self.max_edge_bytes = max(config.max_edge_tokens * TOKEN_BYTES, self.block_bytes)
        self.trees: dict[bytes, Tree] = {}
        sizes: tuple[int, ...] = (config.num_blocks, config.cpu_blocks, config.nvme_blocks)
        while len(sizes) > 1 and not sizes[-1]:
            sizes = sizes[:-1]
        self.places = tuple(
            PlaceState(place, size, config.eviction)
            for place, size in zip(Place, sizes, strict=False)
        )
        self.gpu = self.places[GPU]
        self.evicted = EvictedDigests(config.max_evicted_digests)
        self.detached: set[Node] = set()
        self.expiry = Expiry()
        self.clock = 0
        self._selective = config.write_policy == "selective"
        self.tiered = len(sizes) > 1 or config.remote
        real = [state for state in self.places if state.pool.num_blocks]
        self.below = {up.place: down.place for up, down in zip(real, real[1:], strict=False)}
        if config.remote and not self.below:
            self.below[Place.GPU] = Place.REMOTE
        for place in self.below:
            self.places[place].has_slower = True

    # ---- locks, pins and recency ------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keep the path to `node` from eviction. O(nodes not locked before).

        Without tiers and pins, which is where every microsecond of a hit is looked at, the counts
        are kept inline, here and in `unlock`.
        """
        step: Node | None = node
        gpu, tiered = self.gpu, self.tiered
        while step is not None:
            if step.locks:
                step.locks += 1
                return
            step.locks = 1
            if tiered or step.pins:
                self._lock_counts(step, 1)
            else:
                count = len(step.residency[GPU])
                gpu.num_locked += count
                gpu.num_cached -= count
                gpu.policy.discard(step)
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock(node)`. Detached nodes without locks are freed."""
        step: Node | None = node
        gpu, tiered = self.gpu, self.tiered
        while step is not None:
            assert step.locks > 0
            if step.locks > 1:
                step.locks -= 1
                return
            parent = step.parent
            step.locks = 0
            if tiered or step.pins:
                self._lock_counts(step, -1)
            else:
                count = len(step.residency[GPU])
                gpu.num_locked -= count
                gpu.num_cached += count
            if step.detached:
                self._free_detached(step)
            elif parent is None:
                self._drop_if_empty(step.tree)
            elif tiered or step.pins:
                self._settle_down(step)
            elif step.children is None:
                gpu.policy.add(step)
            step = parent

    def _lock_counts(self, node: Node, sign: int) -> None:
        """The blocks of `node` become locked (1), or cached or pinned again (-1)."""
        for state, ids in zip(self.places, node.residency, strict=True):
            if ids:
                count = sign * len(ids)
                state.num_locked += count
                if node.pins:
                    state.num_pinned -= count
                else:
                    state.num_cached -= count
                    if state.has_slower:
                        covered = self.covered(node, state.place)
                        state.num_clean -= sign * min(len(ids), covered)
                if sign > 0:
                    state.discard(node)

    def pin(self, node: Node) -> None:
        """Keep the path to `node` where it is, also without a lease. O(nodes not pinned before)."""
        step: Node | None = node
        while step is not None:
            if step.pins:
                step.pins += 1
                return
            self._count(step, -1)
            step.pins = 1
            self._count(step, 1)
            self._not_candidate(step)
            step = step.parent

    def unpin(self, node: Node) -> None:
        """Undo one `pin(node)`."""
        step: Node | None = node
        while step is not None:
            assert step.pins > 0
            if step.pins > 1:
                step.pins -= 1
                return
            parent = step.parent
            self._count(step, -1)
            step.pins = 0
            self._count(step, 1)
            if parent is not None:
                self._settle_down(step)
            step = parent

    def _settle_down(self, node: Node) -> None:
        """`node` is not locked any more, or not pinned: it may be neither."""
        if not node.locks and not node.pins:
            self._trim(node)
            if node.tokens:
                self.refresh(node)

    def touch(self, node: Node, hit: bool = False) -> None:
        """Make the whole path to `node` the most recently used. O(nodes on the path)."""
        self.clock += 1
        clock = self.clock
        step: Node | None = node
        while step is not None:
            step.touched = clock
            if hit:
                step.reused = True
            step = step.parent
        self.gpu.policy.on_touch(node)

    # ---- blocks come and go -----------------------------------------------------------------

    def gain(self, node: Node, place: Place, ids: array) -> None:
        """The next blocks of the edge are in `place` too; all before them are, up to the root."""
        held = node.residency[place]
        assert len(held) + len(ids) <= node.num_blocks
        first = not held and len(ids) > 0
        if self.tiered or node.pins:
            self._count(node, -1)
            held.extend(ids)
            self._count(node, 1)
        else:
            held.extend(ids)
            if node.locks:
                self.gpu.num_locked += len(ids)
            else:
                self.gpu.num_cached += len(ids)
        parent = node.parent
        if first and parent is not None and not node.detached:
            assert parent.children is not None
            parent.children.resident[place] += 1
            if parent.parent is not None:
                self.places[place].discard(parent)
        self.refresh(node)

    def shrink(self, node: Node, place: Place, kept: int) -> tuple[Node, bytes] | None:
        """Keep only the leading `kept` blocks of an edge in `place`; no child has any there.

        If that takes blocks from the tree, returns where the branch ends now, and the (canonical)
        tokens of the first block behind it.
        """
        ids = node.residency[place]
        gone = ids[kept:]
        if self.tiered:
            self._count(node, -1)
        else:  # what is locked or pinned does not shrink on the gpu
            self.gpu.num_cached -= len(gone)
        del ids[kept:]
        self.places[place].pool.free(gone)
        if not kept and gone and not node.detached:
            self._left(node, place)
        lost = None if node.locks or node.pins else self._trim(node)
        if node.tokens and self.tiered:
            self._count(node, 1)
            self.refresh(node)
        return lost

    def _left(self, node: Node, place: Place) -> None:
        """`node` has no block in `place` any more: its parent may have become a candidate."""
        parent = node.parent
        assert parent is not None and parent.children is not None
        parent.children.resident[place] -= 1
        if not parent.children.resident[place] and parent.parent is not None:
            self.refresh(parent)

    def _trim(self, node: Node) -> tuple[Node, bytes] | None:
        """End the edge with its last resident block; without one, remove the (childless) node."""
        kept = max(map(len, node.residency)) if self.tiered else len(node.residency[GPU])
        at = kept * self.block_bytes
        if at == len(node.tokens):
            return None
        tree, parent = node.tree, node.parent
        assert parent is not None and node.children is None
        block = tree.contents.canonical(node.tokens[at : at + self.block_bytes])
        if not kept:
            self._not_candidate(node)
            tree.unlink(node)
            tree.num_nodes -= 1
        self._forget_contents(node, at)
        node.tokens = node.tokens[:at]
        node.on_remote = min(node.on_remote, kept)
        if kept:
            return node, block
        if parent.parent is None:
            self._drop_if_empty(tree)
        elif not self.tiered:  # else it was looked at when its child left the place
            self.refresh(parent)
        return parent, block

    def _forget_contents(self, node: Node, at: int) -> None:
        contents = node.tree.contents
        if len(contents):
            contents.count(node.tokens[at:], -1)

    def _free_detached(self, node: Node) -> None:
        self._count(node, -1)
        self.detached.discard(node)
        assert node.parent is not None
        siblings = node.parent.children
        if siblings is not None and siblings.get(node.tokens[: self.block_bytes]) is node:
            node.tree.unlink(node)  # unless it was the top of what was invalidated with it
        for state, ids in zip(self.places, node.residency, strict=True):
            state.pool.free(ids)
            del ids[:]
        self._forget_contents(node, 0)
        node.tokens = b""
        node.tree.num_nodes -= 1

    def _drop_if_empty(self, tree: Tree) -> None:
        if tree.root.children is None and not tree.root.locks:
            self.trees.pop(tree.namespace, None)

    # ---- counts and candidates --------------------------------------------------------------

    def _count(self, node: Node, sign: int) -> None:
        """Add the blocks of `node` to the counts of each place, or (-1) take them out."""
        locks, pins = node.locks, node.pins
        for state, ids in zip(self.places, node.residency, strict=True):
            count = len(ids)
            if not count:
                continue
            count *= sign
            if locks:
                state.num_locked += count
            elif pins:
                state.num_pinned += count
            else:
                state.num_cached += count
                if state.has_slower:
                    covered = self.covered(node, state.place)
                    state.num_clean += sign * min(len(ids), covered)

    def covered(self, node: Node, place: Place) -> int:
        """Leading blocks of the edge that a slower place has too, or that none will get."""
        below = self.below.get(place)
        if self._selective and not node.reused or node.unstorable and below is not Place.CPU:
            return len(node.residency[place])
        if below is Place.REMOTE:
            return node.on_remote
        return max(map(len, node.residency[place + 1 :]), default=0)

    def stored(self, node: Node, count: int) -> None:
        """The leading `count` blocks of the edge are on the remote."""
        self._count(node, -1)
        node.on_remote = count
        self._count(node, 1)
        self.refresh(node)

    def mark_unstorable(self, node: Node) -> None:
        """No record can hold the identities of this node's blocks, so they go down no further."""
        self._count(node, -1)
        node.unstorable = True
        self._count(node, 1)
        self.refresh(node)

    def refresh(self, node: Node) -> None:
        """Make `node` a candidate wherever it is one now, and nowhere else. O(log candidates)."""
        if node.locks or node.pins or node.detached or node.parent is None:
            self._not_candidate(node)
            return
        if not self.tiered:
            if node.children is None and node.residency[GPU]:
                self.gpu.policy.add(node)
            return
        resident = None if node.children is None else node.children.resident
        for state, ids in zip(self.places, node.residency, strict=True):
            place = state.place
            if ids and (resident is None or not resident[place]):
                state.policy.add(node)
                if state.has_slower:
                    unclean = self.covered(node, place) < len(ids)
                    (state.unclean if unclean else state.clean).add(node)
                    (state.clean if unclean else state.unclean).discard(node)
            else:
                state.discard(node)

    def _not_candidate(self, node: Node) -> None:
        if not self.tiered:
            self.gpu.policy.discard(node)
            return
        for state in self.places:
            state.discard(node)
