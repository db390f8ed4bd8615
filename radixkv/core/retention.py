"""Retention: changing, after the fact, how long cached blocks are kept."""

from __future__ import annotations

from radixkv.core.prefix_index import PrefixIndex
from radixkv.core.results import Retention
from radixkv.core.tree import Node, Tree


def retain(index: PrefixIndex, tree: Tree, prefix: bytes, retention: Retention, now_ms: int) -> int:
    """Give all blocks behind whole blocks of `prefix`, and its own, a retention. O(nodes below).

    Returns the number of blocks. Blocks only part of which `prefix` names count as named.
    """
    block = tree.block_bytes
    whole = -(-len(prefix) // block) * block
    expires_ms = now_ms + retention.ttl_ms if retention.ttl_ms else None
    count = 0
    for top in _tops(index, tree, prefix, whole):
        todo = [top]
        while todo:
            node = todo.pop()
            todo.extend(node.children or ())
            node.marks = node.marks._replace(priority=retention.priority, expires_ms=expires_ms)
            for state in index.places:  # their order depends on the priority
                state.discard(node)
            index.refresh(node)
            index.expiry.note(node)
            count += max(map(len, node.residency))
    return count


def _tops(index: PrefixIndex, tree: Tree, prefix: bytes, whole: int) -> list[Node]:
    """Nodes that begin with the last block which `prefix` names."""
    if not prefix:
        return list(tree.root.children or ())
    start = whole - tree.block_bytes
    match = tree.match(prefix, start)
    if match.length < start:
        return []
    node = index.settle(match)
    rest = prefix[start:]
    return [child for child in node.children or () if child.tokens.startswith(rest)]
