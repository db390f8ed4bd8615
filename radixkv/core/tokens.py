"""Token sequences as `bytes` of little-endian int32, and how to compare them.

Comparisons are memcmp on slices: see docs/architecture.md for why no list is ever made.
"""

import numpy as np

from radixkv.core.errors import InvalidArgument

TOKEN_BYTES = 4
_FEW_BYTES = 2048 * TOKEN_BYTES  # where numpy begins to win


def common_length(edge: bytes, tokens: bytes, start: int, limit: int) -> int:
    """How many bytes `edge` shares with tokens[start : start + limit]; O(bytes), no Python loop."""
    low, high = 0, min(len(edge), limit, len(tokens) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if edge[low:middle] == tokens[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def check_length(tokens: bytes, max_tokens: int) -> None:
    """Raise InvalidArgument unless `tokens` are whole int32 and not too many. O(1)."""
    if len(tokens) % TOKEN_BYTES:
        raise InvalidArgument(f"tokens are {len(tokens)} bytes, not a multiple of {TOKEN_BYTES}")
    if len(tokens) > max_tokens * TOKEN_BYTES:
        raise InvalidArgument(
            f"{len(tokens) // TOKEN_BYTES} tokens, at most {max_tokens} are allowed"
        )


def check_signs(tokens: bytes, start: int = 0) -> None:
    """Raise InvalidArgument if a token at or behind byte `start` is negative.

    O(tokens looked at): a strided slice of the sign bytes for few, numpy for many. What equals the
    edge of a tree without content needs no look, since nothing negative got in there.
    """
    if len(tokens) - start <= _FEW_BYTES:
        negative = not tokens[start + 3 :: TOKEN_BYTES].isascii()
    else:
        negative = np.frombuffer(tokens, "<i4", offset=start).min() < 0
    if negative:
        raise InvalidArgument("negative token id")


def check_tokens(tokens: bytes, max_tokens: int) -> None:
    """Both checks."""
    check_length(tokens, max_tokens)
    check_signs(tokens)
