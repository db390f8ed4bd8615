"""Token sequences as `bytes` of little-endian int32, and how to compare them.

Comparisons are memcmp on slices: see docs/architecture.md for why no list is ever made.
"""

from radixkv.core.errors import InvalidArgument

TOKEN_BYTES = 4


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


def check_tokens(tokens: bytes, max_tokens: int) -> None:
    """Raise InvalidArgument unless `tokens` are whole, non-negative int32 and not too many."""
    if len(tokens) % TOKEN_BYTES:
        raise InvalidArgument(f"tokens are {len(tokens)} bytes, not a multiple of {TOKEN_BYTES}")
    if len(tokens) > max_tokens * TOKEN_BYTES:
        raise InvalidArgument(
            f"{len(tokens) // TOKEN_BYTES} tokens, at most {max_tokens} are allowed"
        )
    if not tokens[3::TOKEN_BYTES].isascii():  # the sign bit of every token
        raise InvalidArgument("negative token id")
