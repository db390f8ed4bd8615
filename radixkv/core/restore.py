"""Restore: the tree of what nvme held when the server started.

Records are put under their parents, whatever the order they are found in; one whose parent is not
there could never be hit and is left out, as is a second record of the same block. Their slots stay
free, and are known as stale. Recency is that of the records' sequence numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from radixkv.core.digest import block_digest, root_digest
from radixkv.core.state import State
from radixkv.core.tier_ops import Place, StoredBlock
from radixkv.core.tree import Marks, Node, Tree


@dataclass(slots=True)
class _Branch:
    """A place to go on from: records whose parent is the end of `node`."""

    node: Node
    digest: bytes


def restore(state: State, blocks: Iterable[StoredBlock]) -> int:
    """Fill the (empty) trees; returns the number of slots in use. O(blocks)."""
    if len(state.index.places) <= Place.NVME:
        return 0
    pool = state.index.places[Place.NVME].pool
    assert pool.stale is not None
    children: dict[bytes, dict[bytes, StoredBlock]] = {}
    namespaces = set()
    for block in blocks:
        pool.stale.add(block.slot)
        namespaces.add(block.namespace)
        siblings = children.setdefault(block.identity.parent, {})
        twin = siblings.get(block.identity.digest)
        if twin is None or twin.sequence < block.sequence:
            siblings[block.identity.digest] = block
    used: list[int] = []
    nodes: list[tuple[Node, int]] = []
    for namespace in sorted(namespaces):
        tree = state.index.tree(namespace)
        nodes += _grow(state, tree, children, used)
        if tree.root.children is None:
            del state.index.trees[namespace]
    _date(state, nodes)
    pool.take_these(used)
    pool.stale.difference_update(used)
    return len(used)


def _grow(
    state: State, tree: Tree, children: dict[bytes, dict[bytes, StoredBlock]], used: list[int]
) -> list[tuple[Node, int]]:
    """Build one tree from its root; returns its nodes with their sequence, parents first."""
    built: list[tuple[Node, int]] = []
    todo = [_Branch(tree.root, root_digest(tree.namespace))]
    tree.root.digest = todo[0].digest
    while todo:
        branch = todo.pop()
        for block in children.get(branch.digest, {}).values():
            if block.namespace != tree.namespace or not _is_true(state, block):
                continue
            chain = [block]
            limit = state.index.max_edge_bytes // state.block_bytes
            while len(chain) < limit:
                followers = children.get(chain[-1].identity.digest, {})
                if len(followers) != 1:
                    break
                (follower,) = followers.values()
                same = _marks(follower) == _marks(block)
                if not same or not _is_true(state, follower):
                    break
                chain.append(follower)
            node = _add(state, branch, chain)
            if node is not None:
                used.extend(item.slot for item in chain)
                built.append((node, max(item.sequence for item in chain)))
                todo.append(_Branch(node, chain[-1].identity.digest))
    return built


def _is_true(state: State, block: StoredBlock) -> bool:
    """Whether a record's own digest is that of its parent and tokens."""
    identity = block.identity
    right = block_digest(identity.parent, identity.tokens) == identity.digest
    return right and len(identity.tokens) == state.block_bytes


def _marks(block: StoredBlock) -> Marks:
    identity = block.identity
    return Marks(identity.tags, identity.priority, identity.expires_ms)


def _add(state: State, branch: _Branch, chain: list[StoredBlock]) -> Node | None:
    tree = branch.node.tree
    parts: list[bytes] = []
    for block in chain:
        identity = block.identity
        tokens = identity.tokens
        if identity.contents:
            interned = tree.contents.intern(tokens, identity.contents)
            if interned is None:
                for part in parts:
                    tree.contents.count(part, -1)
                return None
            tree.contents.count(interned, 1)
            tokens = interned
        parts.append(tokens)
    node = tree.add_child(branch.node, b"".join(parts), tree.nowhere())
    node.marks = _marks(chain[0])
    node.digest = branch.digest
    state.index.gain(node, Place.NVME, array("i", (block.slot for block in chain)))
    state.index.expiry.note(node)
    return node


def _date(state: State, nodes: list[tuple[Node, int]]) -> None:
    """Set recency by sequence, a parent never older than its children."""
    newest: dict[Node, int] = {}
    for node, sequence in reversed(nodes):
        newest[node] = max(sequence, newest.get(node, 0))
        parent = node.parent
        assert parent is not None
        newest[parent] = max(newest[node], newest.get(parent, 0))
    ranks = {
        sequence: rank
        for rank, sequence in enumerate(sorted({newest[node] for node, _ in nodes}), start=1)
    }
    for node, _ in nodes:
        node.touched = ranks[newest[node]]
        node.tree.root.touched = len(ranks)
        for place in state.index.places:
            place.discard(node)
        state.index.refresh(node)
    state.index.clock = max(state.index.clock, len(ranks))
