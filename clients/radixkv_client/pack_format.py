"""The file that a pack is: cached blocks of some prefixes, and everything that says what they are.

    prologue | identity | sequences | tokens | checksums | zeros up to blocks_offset | blocks

The identity is a NamespaceInfo: model, scope and KVSpec. Sequences are whole blocks of tokens; each
has in the file only the blocks behind those that it shares with the sequence before. All of it up
to `blocks_offset` has one checksum, every block its own (xxh3_64). They find damage, not malice.

Nothing in a file is believed: sizes are bounded and compared with the file's before they are used.
"""

import os
import stat
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from google.protobuf.message import DecodeError
from xxhash import xxh3_64, xxh3_64_intdigest

from radixkv.v1 import cache_pb2
from radixkv.wire.limits import MAX_FINGERPRINT_BYTES, MAX_TOKENS, TOKEN_BYTES
from radixkv_client.errors import InvalidArgument
from radixkv_client.spec import KVSpec
from radixkv_client.values import Scope

MAGIC = b"radixkvP"
VERSION = 1
MAX_SEQUENCES = 1024
MAX_IDENTITY_BYTES = 4096
MAX_HEADER_BYTES = 256 << 20
ALIGNMENT = 4096

_PROLOGUE = struct.Struct("<8sIIIIQQ")  # magic, version, identity bytes, sequences, blocks,
_CHECKSUM_AT = _PROLOGUE.size - 8  # … blocks_offset, checksum of the header
_SEQUENCE = struct.Struct("<II")  # blocks, leading ones shared with the sequence before
_CHUNK_BYTES = 1 << 20


class PackError(InvalidArgument):
    """This is no whole and undamaged pack, or none can be made; the message says why."""


@dataclass(frozen=True, slots=True)
class PackSequence:
    """Whole blocks of tokens (int32 bytes), of which the sequence before has the first few."""

    tokens: bytes
    num_shared: int


@dataclass(frozen=True, slots=True)
class PackHeader:
    """What a pack holds; `checksums` are those of its blocks, in the file's order."""

    model: str
    scope: Scope
    kv_spec: KVSpec
    sequences: Sequence[PackSequence]
    checksums: Sequence[int]

    def num_blocks(self, sequence: PackSequence) -> int:
        """Blocks of a sequence, those it shares included."""
        return len(sequence.tokens) // (self.kv_spec.block_size * TOKEN_BYTES)


def header_room(num_sequences: int, num_tokens: int, num_blocks: int) -> int:
    """A blocks_offset that is enough for so much; raises PackError above MAX_HEADER_BYTES."""
    size = _PROLOGUE.size + MAX_IDENTITY_BYTES + num_sequences * _SEQUENCE.size
    size += num_tokens * TOKEN_BYTES + num_blocks * 8
    if num_sequences > MAX_SEQUENCES or size + ALIGNMENT > MAX_HEADER_BYTES:
        raise PackError(
            f"{num_sequences} prefixes of {num_tokens} tokens are too much for one pack: at most"
            f" {MAX_SEQUENCES} and a header of {MAX_HEADER_BYTES} bytes"
        )
    return -(-size // ALIGNMENT) * ALIGNMENT


def encode_header(header: PackHeader, blocks_offset: int) -> bytes:
    """The first `blocks_offset` bytes of the file."""
    info = cache_pb2.NamespaceInfo(kv_spec=header.kv_spec.to_proto())
    info.namespace.model_fingerprint = header.model
    info.namespace.scope.CopyFrom(header.scope.to_proto())
    identity = info.SerializeToString()
    assert len(identity) <= MAX_IDENTITY_BYTES
    prologue = _PROLOGUE.pack(
        MAGIC, VERSION, len(identity), len(header.sequences), len(header.checksums),
        blocks_offset, 0,
    )  # fmt: skip
    parts = [prologue, identity]
    for sequence in header.sequences:
        parts.append(_SEQUENCE.pack(header.num_blocks(sequence), sequence.num_shared))
    parts += [sequence.tokens for sequence in header.sequences]
    parts.append(array("Q", header.checksums).tobytes())
    data = bytearray(b"".join(parts).ljust(blocks_offset, b"\0"))
    assert len(data) == blocks_offset, "header_room was asked for less"
    struct.pack_into("<Q", data, _CHECKSUM_AT, xxh3_64_intdigest(data))
    return bytes(data)


def common_blocks(first: bytes, second: bytes, block_size: int) -> int:
    """How many leading blocks two sequences of tokens have in common."""
    step = block_size * TOKEN_BYTES
    most = min(len(first), len(second)) // step
    for index in range(most):
        at = index * step
        if first[at : at + step] != second[at : at + step]:
            return index
    return most


class PackFile:
    """A pack opened for reading; its header is checked, its blocks are not yet. Context manager."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises PackError, and OSError if the file cannot be read."""
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise PackError("it is not a regular file")
            self.header, self._blocks_offset = self._read_header(status.st_size)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def check_blocks(self) -> None:
        """Read every block; raises PackError for the first one that is damaged."""
        block_bytes = self.header.kv_spec.block_bytes
        buffer = memoryview(bytearray(min(block_bytes, _CHUNK_BYTES)))
        for position in range(len(self.header.checksums)):
            digest = xxh3_64()
            for at in range(0, block_bytes, len(buffer)):
                chunk = buffer[: min(len(buffer), block_bytes - at)]
                self._read(self._blocks_offset + position * block_bytes + at, chunk)
                digest.update(chunk)
            self._check(position, digest.intdigest())

    def read_block(self, position: int, into: memoryview) -> None:
        """Read a block of the file's order, and check what has arrived; raises PackError."""
        self._read(self._blocks_offset + position * self.header.kv_spec.block_bytes, into)
        self._check(position, xxh3_64_intdigest(into))

    def _check(self, position: int, checksum: int) -> None:
        if checksum != self.header.checksums[position]:
            raise PackError(f"block {position} of the file is damaged: its checksum is wrong")

    def _read(self, offset: int, into: memoryview) -> None:
        while len(into):
            count = os.preadv(self._file, [into], offset)
            if not count:
                raise PackError("the file is cut short")
            into = into[count:]
            offset += count

    def _read_header(self, file_bytes: int) -> tuple[PackHeader, int]:
        if file_bytes < _PROLOGUE.size:
            raise PackError("it is not a radixkv pack")
        prologue = bytearray(_PROLOGUE.size)
        self._read(0, memoryview(prologue))
        magic, version, _, _, _, blocks_offset, checksum = _PROLOGUE.unpack(prologue)
        if magic != MAGIC:
            raise PackError("it is not a radixkv pack")
        if version != VERSION:
            raise PackError(f"it has version {version} of the format, this program reads {VERSION}")
        if not _PROLOGUE.size <= blocks_offset <= MAX_HEADER_BYTES:
            raise PackError("its header is damaged")
        if blocks_offset > file_bytes:
            raise PackError("the file is cut short")
        data = bytearray(blocks_offset)
        self._read(0, memoryview(data))
        struct.pack_into("<Q", data, _CHECKSUM_AT, 0)
        if xxh3_64_intdigest(data) != checksum:
            raise PackError("its header is damaged: the checksum is wrong")
        header = decode_header(bytes(data))
        expected = blocks_offset + len(header.checksums) * header.kv_spec.block_bytes
        if file_bytes != expected:
            raise PackError(f"the file has {file_bytes} bytes, its header says {expected}")
        return header, blocks_offset


class _Cursor:
    """Takes a header apart, never beyond its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        """The next `size` bytes; raises PackError if there are fewer."""
        if size > len(self._data) - self._at:
            raise PackError("its header contradicts itself: it ends too early")
        self._at += size
        return self._data[self._at - size : self._at]

    def rest(self) -> bytes:
        """Everything that was not taken."""
        return self._data[self._at :]


def decode_header(data: bytes) -> PackHeader:
    """The header that these bytes, whose checksum is right, stand for; raises PackError."""
    cursor = _Cursor(data)
    prologue = _PROLOGUE.unpack(cursor.take(_PROLOGUE.size))
    _, _, identity_bytes, num_sequences, num_blocks, _, _ = prologue
    if identity_bytes > MAX_IDENTITY_BYTES or not 1 <= num_sequences <= MAX_SEQUENCES:
        raise PackError(f"its header is out of bounds: {num_sequences} sequences")
    try:
        info = cache_pb2.NamespaceInfo.FromString(cursor.take(identity_bytes))
        kv_spec = KVSpec.from_proto(info.kv_spec)
    except DecodeError:
        raise PackError("its identity cannot be read") from None
    except InvalidArgument as error:
        raise PackError(f"its layout makes no sense: {error}") from None
    model = info.namespace.model_fingerprint
    if not 1 <= len(model.encode()) <= MAX_FINGERPRINT_BYTES:
        raise PackError("it names no model")
    sizes = list(_SEQUENCE.iter_unpack(cursor.take(num_sequences * _SEQUENCE.size)))
    sequences = _decode_sequences(cursor, sizes, kv_spec.block_size)
    if num_blocks != sum(count - num_shared for count, num_shared in sizes):
        raise PackError(f"its header contradicts itself: it says {num_blocks} blocks")
    checksums = array("Q", cursor.take(num_blocks * 8))
    if cursor.rest().strip(b"\0"):
        raise PackError("its header contradicts itself: something is behind its end")
    scope = Scope.from_proto(info.namespace.scope)
    return PackHeader(model, scope, kv_spec, sequences, checksums)


def _decode_sequences(
    cursor: _Cursor, sizes: list[tuple[int, int]], block_size: int
) -> list[PackSequence]:
    sequences: list[PackSequence] = []
    before = b""
    for num_blocks, num_shared in sizes:
        if not 1 <= num_blocks <= MAX_TOKENS // block_size or num_shared >= num_blocks:
            raise PackError(f"its header is out of bounds: a sequence of {num_blocks} blocks")
        tokens = cursor.take(num_blocks * block_size * TOKEN_BYTES)
        shared_bytes = num_shared * block_size * TOKEN_BYTES
        if len(before) < shared_bytes or before[:shared_bytes] != tokens[:shared_bytes]:
            raise PackError("its header contradicts itself: sequences share too much")
        if min(array("i", tokens)) < 0:
            raise PackError("its header is out of bounds: a token is negative")
        sequences.append(PackSequence(tokens, num_shared))
        before = tokens
    return sequences
