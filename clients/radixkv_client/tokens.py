"""Token ids in whatever form the caller has them -> little-endian int32 bytes.

No per-element Python work for arrays; one pass of C code for lists. Ids are integers in
[0, 2**31). Booleans and floats are refused, because `True`, `1` and `1.0` must not be three
spellings of one cached prefix.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Any

from radixkv_client.errors import InvalidArgument

if sys.byteorder != "little":
    raise ImportError("radixkv_client needs a little-endian machine")

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**31 - 1

Tokens = Any  # bytes, array, numpy or torch vector, or sequence of int


def token_bytes(tokens: Tokens) -> bytes:
    """Little-endian int32 bytes of token ids.

    What is int32 already is taken as it is, and the server refuses negative ids. Accepts `array`,
    numpy and torch vectors of any integer type, and sequences of int. Raises InvalidArgument.
    """
    if isinstance(tokens, bytes):
        if len(tokens) % TOKEN_BYTES:
            raise InvalidArgument(f"tokens: {len(tokens)} bytes are not a multiple of 4")
        return tokens
    if isinstance(tokens, (bytearray, memoryview)):
        return token_bytes(bytes(tokens))
    if isinstance(tokens, str):
        raise InvalidArgument("tokens: a string is not a sequence of token ids")
    if isinstance(tokens, array):
        return _from_array(tokens)
    if type(tokens).__module__.partition(".")[0] == "torch":
        tokens = tokens.detach().cpu().numpy()
    if hasattr(tokens, "__array_interface__"):
        return _from_numpy(tokens)
    return _from_sequence(tokens)


def block_ids(encoded: bytes) -> array:
    """Block ids (or tokens) from int32 bytes, as a new `array('i')`."""
    ids = array("i")
    ids.frombytes(encoded)
    return ids


def _from_array(tokens: array) -> bytes:
    if tokens.typecode not in "bBhHiIlLqQ":
        raise InvalidArgument(f"tokens: array of type {tokens.typecode!r}, not of integers")
    return tokens.tobytes() if tokens.typecode == "i" else _checked(tokens)


def _from_numpy(tokens: Any) -> bytes:
    if tokens.ndim != 1:
        raise InvalidArgument(f"tokens: shape {tokens.shape}, not a vector")
    if tokens.dtype.kind not in "iu":
        raise InvalidArgument(f"tokens: dtype {tokens.dtype}, not an integer type")
    if tokens.size and tokens.dtype.str != "<i4":
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest > MAX_TOKEN_ID:
            raise InvalidArgument(f"tokens: ids from {lowest} to {highest} exceed [0, 2**31)")
    encoded: bytes = tokens.astype("<i4", copy=False).tobytes()
    return encoded


def _from_sequence(tokens: Any) -> bytes:
    tokens = tokens if isinstance(tokens, (list, tuple)) else list(tokens)
    for kind in set(map(type, tokens)):
        if kind is bool or not hasattr(kind, "__index__") or kind.__name__ in ("bool", "bool_"):
            raise InvalidArgument(f"tokens: {kind.__name__} is not a token id")
    return _checked(tokens)


def _checked(tokens: Sequence[int]) -> bytes:
    lowest, highest = min(tokens, default=0), max(tokens, default=0)
    if lowest < 0 or highest > MAX_TOKEN_ID:
        raise InvalidArgument(f"tokens: ids from {lowest} to {highest} exceed [0, 2**31)")
    return array("i", tokens).tobytes()
