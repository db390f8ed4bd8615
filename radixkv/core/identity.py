"""What records say of blocks: the identities of blocks that go to nvme or remote."""

from __future__ import annotations

from radixkv.core.digest import block_digest, root_digest
from radixkv.core.tier_ops import (
    MAX_STORED_CONTENTS,
    MAX_STORED_NAMESPACE_BYTES,
    BlockIdentity,
)
from radixkv.core.tree import Node, Tree


def start_digest(node: Node) -> bytes:
    """The digest of the prefix up to the start of the edge; kept in the nodes."""
    todo = []
    step = node
    while step.digest is None and step.parent is not None:
        todo.append(step)
        step = step.parent
    if step.digest is None:
        step.digest = root_digest(step.tree.namespace)
    for lower in reversed(todo):
        assert lower.parent is not None and lower.parent.digest is not None
        lower.digest = _chain(lower.tree, lower.parent.digest, lower.parent.tokens)[-1]
    assert node.digest is not None
    return node.digest


def end_digest(node: Node) -> bytes:
    """The digest of the prefix up to the end of the edge. O(blocks of the edge)."""
    return _chain(node.tree, start_digest(node), node.tokens)[-1]


def prefix_digests(tree: Tree, parent: bytes, tokens: bytes) -> list[bytes]:
    """Digests of the prefixes that end with each block of `tokens`, which follow `parent`."""
    return _chain(tree, parent, tokens)[1:]


def _chain(tree: Tree, digest: bytes, tokens: bytes) -> list[bytes]:
    """`digest`, and those behind each block of `tokens`."""
    block = tree.block_bytes
    digests = [digest]
    canonical = tree.contents.canonical(tokens)
    for at in range(0, len(canonical), block):
        digest = block_digest(digest, canonical[at : at + block])
        digests.append(digest)
    return digests


def identities(node: Node, first: int, count: int) -> tuple[BlockIdentity, ...]:
    """Of blocks [first, first + count) of an edge; fewer, if a record cannot hold the next one."""
    tree, block = node.tree, node.tree.block_bytes
    if len(tree.namespace) > MAX_STORED_NAMESPACE_BYTES:
        return ()
    stop = (first + count) * block
    digests = _chain(tree, start_digest(node), node.tokens[:stop])
    canonical = tree.contents.canonical(node.tokens[first * block : stop])
    found = []
    for at in range(first, first + count):
        contents = tree.contents.pieces(node.tokens[at * block : (at + 1) * block])
        if len(contents) > MAX_STORED_CONTENTS:
            break
        own = canonical[(at - first) * block : (at - first + 1) * block]
        found.append(BlockIdentity(digests[at + 1], digests[at], own, contents, *node.marks))
    return tuple(found)
