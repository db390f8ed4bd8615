"""Records: how one block lies on nvme and as a remote object. Header, then payload; both padded.

A header says all of what the payload is (namespace, identity), what its bytes must hash to, and
what its own bytes must hash to. So it does not matter in which order the parts of a record reach a
disk, or how many of them: a record counts if both hashes are right, and is a miss otherwise. The
header also carries the slot it was written to (0 = no slot): a record that got elsewhere is none.

Fields, little-endian, in this order: the fixed ones of `_FIXED`; tokens; namespace; per content
piece `_PIECE` and the content id; per tag its length (one byte) and text; zeros.
"""

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from radixkv.core.content import MAX_CONTENT_ID_BYTES
from radixkv.core.tier_ops import (
    DIGEST_BYTES,
    MAX_STORED_CONTENTS,
    MAX_STORED_NAMESPACE_BYTES,
    MAX_TAG_BYTES,
    MAX_TAGS,
    BlockIdentity,
    ContentPiece,
)
from radixkv.core.tokens import TOKEN_BYTES

FORMAT_VERSION = 1
ALIGNMENT = 4096  # of offsets, lengths and memory; every direct I/O we know of accepts it
MAGIC = b"radixkv\0"

# magic, header checksum, layout, slot, sequence, payload checksum, expiry, priority,
# bytes of the namespace, number of pieces and of tags, digest, parent
_FIXED = struct.Struct(f"<8sQQQQQqiHBB{DIGEST_BYTES}s{DIGEST_BYTES}s")
_PIECE = struct.Struct("<BIIII")  # bytes of the content id, content length, offset, start, length
_CHECKSUM_AT = slice(8, 16)
_NO_CHECKSUM = bytes(8)
_NEVER = -(1 << 63)  # unix ms of a record that does not expire
_MAX_VARIABLE_BYTES = (
    MAX_STORED_NAMESPACE_BYTES
    + MAX_STORED_CONTENTS * (_PIECE.size + MAX_CONTENT_ID_BYTES)
    + MAX_TAGS * (1 + MAX_TAG_BYTES)
)


class BadRecord(Exception):
    """What lies there is no record of this layout; `kind` says what it is instead."""

    def __init__(self, kind: str) -> None:
        """`kind`: empty, torn (damaged or half written), foreign, old layout."""
        super().__init__(kind)
        self.kind = kind


def padded(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def header_bytes(block_size: int) -> int:
    """Bytes of a header for blocks of that many tokens."""
    return padded(_FIXED.size + block_size * TOKEN_BYTES + _MAX_VARIABLE_BYTES)


@dataclass(frozen=True)
class RecordLayout:
    """Sizes of the records of one store, for blocks of `block_bytes` and `block_size` tokens."""

    block_bytes: int
    block_size: int

    @cached_property
    def header_bytes(self) -> int:
        """Where the payload starts."""
        return header_bytes(self.block_size)

    @cached_property
    def payload_bytes(self) -> int:
        """The payload with its padding."""
        return padded(self.block_bytes)

    @cached_property
    def record_bytes(self) -> int:
        """Header and payload."""
        return self.header_bytes + self.payload_bytes

    @cached_property
    def fingerprint(self) -> int:
        """64 bits that differ for every other version, block size or number of bytes."""
        return xxh3_64_intdigest(
            struct.pack("<QQQ", FORMAT_VERSION, self.block_bytes, self.block_size)
        )


class Header(NamedTuple):
    """What a header says. `checksum` is xxh3_64 of the payload without its padding."""

    namespace: bytes
    identity: BlockIdentity
    checksum: int
    sequence: int
    slot: int


def same_block(one: BlockIdentity, other: BlockIdentity) -> bool:
    """Whether both name the same block; tags, priority and expiry may have changed since."""
    return one[:4] == other[:4]


def encode_header(
    namespace: bytes,
    identity: BlockIdentity,
    checksum: int,
    sequence: int,
    layout: RecordLayout,
    *,
    slot: int = 0,
    unix_offset_ms: int = 0,
) -> bytes:
    """`layout.header_bytes` bytes. Unix time in ms = `expires_ms` + `unix_offset_ms`. ~4 µs.

    Raises ValueError for what a header has no room for; the core offers none of that.
    """
    _check(namespace, identity, layout)
    expires = _NEVER if identity.expires_ms is None else identity.expires_ms + unix_offset_ms
    try:
        fixed = _FIXED.pack(
            MAGIC, 0, layout.fingerprint, slot, sequence, checksum, expires, identity.priority,
            len(namespace), len(identity.contents), len(identity.tags), identity.digest,
            identity.parent,
        )  # fmt: skip
        parts = [fixed, identity.tokens, namespace]
        for piece in identity.contents:
            parts += (_PIECE.pack(len(piece.content_id), *piece[1:]), piece.content_id)
    except struct.error as error:
        raise ValueError(f"a number has no room in a record: {error}") from None
    for tag in identity.tags:
        text = tag.encode()
        parts += (bytes([len(text)]), text)
    header = bytearray(b"".join(parts).ljust(layout.header_bytes, b"\0"))
    header[_CHECKSUM_AT] = xxh3_64_intdigest(header).to_bytes(8, "little")
    return bytes(header)


def _check(namespace: bytes, identity: BlockIdentity, layout: RecordLayout) -> None:
    for what, size, most in (
        ("namespace", len(namespace), MAX_STORED_NAMESPACE_BYTES),
        ("contents", len(identity.contents), MAX_STORED_CONTENTS),
        ("tags", len(identity.tags), MAX_TAGS),
        *(("content id", len(p.content_id), MAX_CONTENT_ID_BYTES) for p in identity.contents),
        *(("tag", len(tag.encode()), MAX_TAG_BYTES) for tag in identity.tags),
    ):
        if size > most:
            raise ValueError(f"{what}: {size}, a record has room for {most}")
    if len(identity.tokens) != layout.block_size * TOKEN_BYTES:
        raise ValueError(f"{len(identity.tokens)} bytes of tokens, not {layout.block_size} tokens")
    if not len(identity.digest) == len(identity.parent) == DIGEST_BYTES:
        raise ValueError("digests of the wrong length")


def decode_header(
    data: bytes | bytearray | memoryview, layout: RecordLayout, *, unix_offset_ms: int = 0
) -> Header:
    """The header at the start of `data` (at least `layout.header_bytes`). Raises BadRecord. ~4 µs.

    Every length is checked before it is used, also where the checksum is right.
    """
    raw = bytes(data[: layout.header_bytes])
    if len(raw) < layout.header_bytes:
        raise BadRecord("torn" if raw.strip(b"\0") else "empty")
    if not raw.startswith(MAGIC):
        if raw[: len(MAGIC)].strip(b"\0"):
            raise BadRecord("foreign")
        raise BadRecord("torn" if raw.strip(b"\0") else "empty")
    fields = _FIXED.unpack_from(raw)
    if fields[2] != layout.fingerprint:
        raise BadRecord("old layout")
    unsigned = bytearray(raw)
    unsigned[_CHECKSUM_AT] = _NO_CHECKSUM
    if xxh3_64_intdigest(unsigned) != fields[1]:
        raise BadRecord("torn")
    try:
        return _parse(raw, fields, layout, unix_offset_ms)
    except (struct.error, IndexError, UnicodeDecodeError):
        raise BadRecord("torn") from None


def _parse(raw: bytes, fields: tuple, layout: RecordLayout, unix_offset_ms: int) -> Header:
    _, _, _, slot, sequence, checksum, expires, priority = fields[:8]
    namespace_bytes, num_pieces, num_tags, digest, parent = fields[8:]
    tokens_end = _FIXED.size + layout.block_size * TOKEN_BYTES
    at = tokens_end + namespace_bytes
    tokens, namespace = raw[_FIXED.size : tokens_end], raw[tokens_end:at]
    if at > len(raw):
        raise BadRecord("torn")
    pieces = []
    for _ in range(num_pieces):
        id_bytes, *numbers = _PIECE.unpack_from(raw, at)
        at += _PIECE.size
        pieces.append(ContentPiece(_take(raw, at, id_bytes), *numbers))
        at += id_bytes
    tags = []
    for _ in range(num_tags):
        tag = _take(raw, at + 1, raw[at])
        tags.append(tag.decode())
        at += 1 + len(tag)
    expires_ms = None if expires == _NEVER else expires - unix_offset_ms
    identity = BlockIdentity(
        digest, parent, tokens, tuple(pieces), tuple(tags), priority, expires_ms
    )
    return Header(namespace, identity, checksum, sequence, slot)


def _take(raw: bytes, start: int, length: int) -> bytes:
    if start + length > len(raw):
        raise BadRecord("torn")
    return raw[start : start + length]
