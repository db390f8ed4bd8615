"""The radix tree of one namespace: path-compressed, block-aligned edges over exact tokens.

What it knows: which blocks hold the KV of which token prefix. What it must not know: pools' free
blocks, leases, time, eviction. Those belong to `prefix_index`, which owns all trees.

An edge is `bytes` of int32 tokens, a whole number of blocks, at most `max_edge_bytes` long where
it grows. A match reads only; `split` and `join` change the shape, never what is cached.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from radixkv.core.children import Children
from radixkv.core.content import ContentTable
from radixkv.core.namespace import namespace_seed
from radixkv.core.tokens import common_length

if TYPE_CHECKING:
    from radixkv.core.lease import Lease

GPU = 0  # index into Node.residency: one (KV group, pool) for now


class Node:
    """An edge and the node at its end.

    tokens: the edge; residency: per (KV group, pool) the block id of each block of the edge.
    locks: leases and copies that end here, plus children with locks; while > 0 nothing is evicted.
    touched: recency, shared by all blocks of the node. entry: mark of the eviction frontier.
    pending: uncommitted prompts that go on from here, by their next block (single flight).
    detached: invalidated while locked; found by nobody, freed with the last lock.
    """

    __slots__ = (
        "tokens", "residency", "parent", "children", "tree",
        "locks", "touched", "entry", "pending", "detached",
    )  # fmt: skip

    def __init__(
        self, tree: Tree, parent: Node | None, tokens: bytes, residency: tuple[array, ...]
    ) -> None:
        self.tree = tree
        self.parent = parent
        self.tokens = tokens
        self.residency = residency
        self.children: Children | None = None
        self.locks = 0
        self.touched = 0
        self.entry = 0
        self.pending: dict[bytes, list[Lease]] | None = None
        self.detached = False

    @property
    def num_blocks(self) -> int:
        """Blocks of the edge."""
        return len(self.residency[GPU])


class Match(NamedTuple):
    """Where a match ended: `inside` bytes into the edge of `node`, `length` bytes in all."""

    node: Node
    inside: int
    length: int


class Nearest(NamedTuple):
    """The block behind a match that shares most with the query: `shared` bytes of it."""

    node: Node
    block_index: int
    shared: int


class Tree:
    """The tree of one namespace. The root has no tokens and is never evicted."""

    __slots__ = ("namespace", "seed", "block_bytes", "root", "num_nodes", "num_pending", "contents")

    def __init__(self, namespace: bytes, block_bytes: int) -> None:
        self.namespace = namespace
        self.seed = namespace_seed(namespace)
        self.block_bytes = block_bytes
        self.root = Node(self, None, b"", (array("i"),))
        self.num_nodes = 0
        self.num_pending = 0
        self.contents = ContentTable()

    def match(self, tokens: bytes, limit: int) -> Match:
        """The longest cached prefix within tokens[:limit] (bytes, whole blocks). Reads only.

        O(edges on the path) memcmps. Valid until the next mutation of this tree.
        """
        block = self.block_bytes
        node, at = self.root, 0
        while at < limit:
            children = node.children
            child = children.get(tokens[at : at + block]) if children is not None else None
            if child is None:
                break
            edge = child.tokens
            end = at + len(edge)
            if end <= limit and tokens.startswith(edge, at):
                node, at = child, end
                continue
            shared = common_length(edge, tokens, at, limit - at)
            shared -= shared % block
            return Match(child, shared, at + shared)
        return Match(node, len(node.tokens), at)

    def match_edge(self, node: Node, tokens: bytes, at: int) -> int:
        """Bytes (whole blocks) of the edge of `node` that tokens[at:] starts with."""
        if tokens.startswith(node.tokens, at):
            return len(node.tokens)
        shared = common_length(node.tokens, tokens, at, len(tokens) - at)
        return shared - shared % self.block_bytes

    def nearest(self, match: Match, tokens: bytes) -> Nearest | None:
        """The block right behind `match` that shares the longest part with `tokens`, if any."""
        node, inside, at = match
        block = self.block_bytes
        if inside < len(node.tokens):
            edge = node.tokens[inside : inside + block]
            return Nearest(node, inside // block, common_length(edge, tokens, at, block))
        if node.children is None:
            return None
        best = None
        for child in node.children.neighbours(tokens[at : at + block]):
            shared = common_length(child.tokens[:block], tokens, at, block)
            if best is None or shared > best.shared:
                best = Nearest(child, 0, shared)
        return best

    def add_child(self, parent: Node, tokens: bytes, residency: tuple[array, ...]) -> Node:
        """A new leaf under `parent`; no child with that first block exists."""
        node = Node(self, parent, tokens, residency)
        if parent.children is None:
            parent.children = Children()
        parent.children.put(tokens[: self.block_bytes], node)
        self.num_nodes += 1
        return node

    def split(self, node: Node, at: int) -> Node:
        """Cut the edge of `node` after `at` bytes; returns the new upper node.

        `node` stays the lower part, so whatever ends at it (leases, copies) still does.
        """
        assert 0 < at < len(node.tokens) and at % self.block_bytes == 0
        blocks = at // self.block_bytes
        parent = node.parent
        assert parent is not None and parent.children is not None and not node.detached
        upper = Node(self, parent, node.tokens[:at], tuple(ids[:blocks] for ids in node.residency))
        upper.touched = node.touched
        upper.locks = 1 if node.locks else 0
        parent.children.put(node.tokens[: self.block_bytes], upper)
        node.tokens = node.tokens[at:]
        node.residency = tuple(ids[blocks:] for ids in node.residency)
        node.parent = upper
        upper.children = Children()
        upper.children.put(node.tokens[: self.block_bytes], node)
        self.num_nodes += 1
        return upper

    def join(self, node: Node) -> None:
        """Let `node`, the only child of its parent, take over the parent's edge."""
        parent = node.parent
        assert parent is not None and parent.parent is not None and parent.children is not None
        assert len(parent.children) == 1 and not parent.locks and not node.locks
        node.tokens = parent.tokens + node.tokens
        node.residency = tuple(
            above + below for above, below in zip(parent.residency, node.residency, strict=True)
        )
        node.parent = parent.parent
        assert node.parent.children is not None
        node.parent.children.put(node.tokens[: self.block_bytes], node)
        self.num_nodes -= 1

    def unlink(self, node: Node) -> None:
        """Take `node` out of its parent's children."""
        parent = node.parent
        assert parent is not None and parent.children is not None
        parent.children.remove(node.tokens[: self.block_bytes])
        if not len(parent.children):
            parent.children = None

    def path(self, node: Node) -> list[Node]:
        """Nodes from below the root down to `node`."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def path_tokens(self, node: Node) -> bytes:
        """All tokens from the root to the end of `node`."""
        return b"".join(step.tokens for step in self.path(node))

    def walk(self) -> list[Node]:
        """Every node but the root, parents before children; O(nodes)."""
        found, todo = [], [self.root]
        while todo:
            node = todo.pop()
            children = list(node.children) if node.children is not None else []
            found.extend(children)
            todo.extend(children)
        return found
