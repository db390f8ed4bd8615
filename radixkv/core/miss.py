"""Why a match is not longer: the reason that replies and tools give."""

from __future__ import annotations

from radixkv.core.evicted import EvictedDigests
from radixkv.core.results import Miss, MissKind
from radixkv.core.tokens import TOKEN_BYTES
from radixkv.core.tree import Match, Tree

NEAREST_BYTES = 16 * TOKEN_BYTES
NOTHING = Miss(MissKind.NONE)


def usable_bytes(num_bytes: int, cacheable: int, block_bytes: int) -> int:
    """Bytes of a prompt that a hit may cover: whole blocks, at most length - 1 tokens."""
    limit = min(num_bytes - TOKEN_BYTES, cacheable * TOKEN_BYTES)
    return max(limit - limit % block_bytes, 0)


def explain(
    tree: Tree | None, seed: int, match: Match | None, tokens: bytes, cacheable: int,
    evicted: EvictedDigests, block_bytes: int,
) -> Miss:  # fmt: skip
    """The reason why `match` (None: no tree) of `tokens` ended. Reads only."""
    at = match.length if match is not None else 0
    num_tokens = len(tokens) // TOKEN_BYTES
    whole = usable_bytes(len(tokens), num_tokens, block_bytes)
    if at == whole:
        return NOTHING if whole else Miss(MissKind.SHORT)
    if cacheable < num_tokens and at == usable_bytes(len(tokens), cacheable, block_bytes):
        return Miss(MissKind.UNCACHEABLE, cacheable)
    prefix = tokens[: at + block_bytes]
    if evicted.has(tree.contents.canonical(prefix) if tree is not None else prefix, seed):
        return Miss(MissKind.EVICTED, at // TOKEN_BYTES)
    if tree is None or match is None or tree.root.children is None:
        return Miss(MissKind.EMPTY_NAMESPACE)
    nearest = tree.nearest(match, tokens)
    if nearest is None:
        return Miss(MissKind.ENDS, at // TOKEN_BYTES)
    if nearest.shared >= block_bytes:
        return Miss(MissKind.EVICTED, at // TOKEN_BYTES)  # from the gpu, not from below it
    shared = nearest.shared - nearest.shared % TOKEN_BYTES
    start = nearest.block_index * block_bytes + shared
    return Miss(
        MissKind.DIVERGES,
        (at + shared) // TOKEN_BYTES,
        nearest.node.tokens[start : start + NEAREST_BYTES],
    )
