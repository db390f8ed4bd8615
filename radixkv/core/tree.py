"""The radix tree of one namespace: path-compressed, block-aligned edges over exact tokens.

What it knows: which blocks hold the KV of which token prefix, in each place. What it must not know:
pools' free blocks, leases, time, eviction. Those belong to `prefix_index`, which owns all trees.

An edge is `bytes` of int32 tokens, a whole number of blocks, at most `max_edge_bytes` long where
it grows. A match reads only; `split` and `join` change the shape, never what is cached.

Residency is prefix-closed in every place: where a block is, its parent is too. So a node has, per
place, the ids of the *leading* blocks of its edge, and a node whose part is shorter than its edge
has no child there.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from radixkv.core.children import Children
from radixkv.core.content import ContentTable
from radixkv.core.namespace import namespace_seed
from radixkv.core.tier_ops import Place
from radixkv.core.tokens import common_length

if TYPE_CHECKING:
    from radixkv.core.lease import Lease

GPU, CPU, NVME = Place.GPU, Place.CPU, Place.NVME
Residency = tuple[array, ...]


class Marks(NamedTuple):
    """What was said about blocks when they were published, or later by Retain."""

    tags: tuple[str, ...] = ()
    priority: int = 0
    expires_ms: int | None = None


NO_MARKS = Marks()


class Node:
    """An edge and the node at its end.

    tokens: the edge; residency: per place the ids of the leading blocks that are there.
    on_remote: leading blocks that were written to the remote (it may have dropped them since).
    locks: leases, copies and transfers that end here, plus children with locks; while > 0 nothing
    is evicted. pins: the same for pins.
    touched: recency, shared by all blocks of the node. reused: a later prompt hit it.
    unstorable: a record cannot hold the identity of some block.
    digest: of the prefix up to the start of the edge, once it was needed.
    pending: uncommitted prompts that go on from here, by their next block (single flight).
    detached: invalidated while locked; found by nobody, freed with the last lock.
    """

    __slots__ = (
        "tokens", "residency", "on_remote", "parent", "children", "tree", "locks", "pins",
        "touched", "reused", "unstorable", "digest", "marks", "pending", "detached",
    )  # fmt: skip

    def __init__(
        self, tree: Tree, parent: Node | None, tokens: bytes, residency: Residency
    ) -> None:
        self.tree = tree
        self.parent = parent
        self.tokens = tokens
        self.residency = residency
        self.children: Children | None = None
        self.on_remote = 0
        self.locks = 0
        self.pins = 0
        self.touched = 0
        self.reused = False
        self.unstorable = False
        self.digest: bytes | None = None
        self.marks = NO_MARKS
        self.pending: dict[bytes, list[Lease]] | None = None
        self.detached = False

    @property
    def num_blocks(self) -> int:
        """Blocks of the edge."""
        return len(self.tokens) // self.tree.block_bytes


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

    __slots__ = (
        "namespace", "seed", "block_bytes", "num_places", "root", "num_nodes", "num_pending",
        "contents",
    )  # fmt: skip

    def __init__(self, namespace: bytes, block_bytes: int, num_places: int) -> None:
        self.namespace = namespace
        self.seed = namespace_seed(namespace)
        self.block_bytes = block_bytes
        self.num_places = num_places
        self.root = Node(self, None, b"", self.nowhere())
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

    def nowhere(self) -> Residency:
        """No block in any place."""
        return tuple(array("i") for _ in range(self.num_places))

    def add_child(self, parent: Node, tokens: bytes, residency: Residency) -> Node:
        """A new leaf under `parent`; no child with that first block exists."""
        node = Node(self, parent, tokens, residency)
        if parent.children is None:
            parent.children = Children(self.num_places)
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
        upper.touched, upper.reused, upper.marks = node.touched, node.reused, node.marks
        upper.unstorable = node.unstorable
        upper.digest, node.digest = node.digest, None
        upper.on_remote = min(node.on_remote, blocks)
        node.on_remote -= upper.on_remote
        upper.locks = 1 if node.locks else 0
        upper.pins = 1 if node.pins else 0
        parent.children.put(node.tokens[: self.block_bytes], upper)
        node.tokens = node.tokens[at:]
        node.residency = tuple(ids[blocks:] for ids in node.residency)
        node.parent = upper
        upper.children = children = Children(self.num_places)
        children.put(node.tokens[: self.block_bytes], node)
        children.resident = [1 if ids else 0 for ids in node.residency]
        self.num_nodes += 1
        return upper

    def join(self, node: Node) -> None:
        """Let `node`, the only child of its parent, take over the parent's edge.

        The parent is no node any more: without tokens, like every node that was removed.
        """
        parent = node.parent
        assert parent is not None and parent.parent is not None and parent.children is not None
        assert len(parent.children) == 1 and not parent.locks and not node.locks
        blocks = parent.num_blocks
        node.on_remote = blocks + node.on_remote if parent.on_remote == blocks else parent.on_remote
        node.digest = parent.digest
        node.reused = node.reused and parent.reused
        node.unstorable = node.unstorable or parent.unstorable
        node.tokens = parent.tokens + node.tokens
        node.residency = tuple(
            above + below for above, below in zip(parent.residency, node.residency, strict=True)
        )
        node.parent = parent.parent
        parent.tokens = b""
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
