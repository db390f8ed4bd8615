"""What the server and one mover say to each other: operations through memory, answers by socket.

The memory has `SLOTS` slots, one operation each: a word that cancels it, then the encoded
operation. The server writes a slot and sends its number over the socket; the mover answers with
one message, and the slot is the server's again. The messages order the accesses to memory. An
operation can be large (identities of 32 blocks), its answer is small.

Both ends are one release of this package; a message that does not fit its limits is an error.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from radixkv.core.content import MAX_CONTENT_ID_BYTES
from radixkv.core.tier_ops import (
    DIGEST_BYTES,
    MAX_STORED_CONTENTS,
    MAX_STORED_NAMESPACE_BYTES,
    MAX_TAG_BYTES,
    MAX_TAGS,
    BlockIdentity,
    ContentPiece,
    Erase,
    Place,
    Probe,
    Transfer,
)

SLOTS = 2  # one operation is carried out, the next one lies ready
MAX_TRANSFER_BLOCKS = 32
MAX_DIGESTS = 4096  # of one Erase (or slots of it) or Probe
MAX_PROBLEM_BYTES = 500
MAX_ANSWER_BYTES = 64 + MAX_DIGESTS + MAX_PROBLEM_BYTES

MoverOp = Transfer | Erase | Probe

_CANCEL = struct.Struct("<Q")
_TRANSFER = struct.Struct("<BBBHHHHQ")  # kind, source, target, 3 counts, namespace bytes, id
_ERASE = struct.Struct("<BBIIQ")  # kind, place, 2 counts, id
_PROBE = struct.Struct("<BIQ")  # kind, count, id
# digest, parent, priority, expires_ms, whether it does, tokens bytes, contents, tags
_IDENTITY = struct.Struct(f"<{DIGEST_BYTES}s{DIGEST_BYTES}sqq?HBB")
_PIECE = struct.Struct("<BQQHH")  # content id bytes, content length, offset, start, length
_ANSWER = struct.Struct("<BdH")  # slot, elapsed seconds, results

_KIND_TRANSFER, _KIND_ERASE, _KIND_PROBE = range(1, 4)


def num_blocks(op: MoverOp) -> int:
    """Blocks of a Transfer; other operations are carried out as one."""
    if not isinstance(op, Transfer):
        return 1
    return max(len(op.source_ids), len(op.target_ids), len(op.identities))


class Answer(NamedTuple):
    """How an operation ended: a result per block, slot or digest, and what went wrong if it did.

    Results are outcomes of a Transfer; of an Erase a single one, 1 = done; of a Probe 1 = there,
    empty = nobody could say.
    """

    elapsed_s: float
    results: bytes
    problem: str = ""


def max_op_bytes(block_size: int) -> int:
    """The largest operation when blocks have `block_size` tokens."""
    content = _PIECE.size + MAX_CONTENT_ID_BYTES
    identity = _IDENTITY.size + 4 * block_size
    identity += MAX_STORED_CONTENTS * content + MAX_TAGS * (1 + MAX_TAG_BYTES)
    transfer = _TRANSFER.size + MAX_STORED_NAMESPACE_BYTES
    transfer += MAX_TRANSFER_BLOCKS * (4 + 4 + identity)
    digests = _ERASE.size + MAX_DIGESTS * (4 + DIGEST_BYTES)
    return max(transfer, digests)


def _slot_bytes(block_size: int) -> int:
    return _CANCEL.size + (max_op_bytes(block_size) + 7) // 8 * 8


class RingMemory:
    """The slots, mapped. The server creates the memory; a mover maps it by descriptor."""

    def __init__(self, descriptor: int, block_size: int) -> None:
        self._op_bytes = max_op_bytes(block_size)
        self._slot_bytes = _slot_bytes(block_size)
        self._memory = mmap.mmap(descriptor, SLOTS * self._slot_bytes)
        self._view = memoryview(self._memory)

    @staticmethod
    def create(block_size: int) -> int:
        """Descriptor of fresh memory for the slots, all of it allocated. Raises OSError."""
        descriptor = os.memfd_create("radixkv-mover", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, SLOTS * _slot_bytes(block_size))
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, slot: int, op: MoverOp) -> None:
        """Put an operation, not cancelled, into a slot the mover does not look at."""
        data = encode_op(op)
        assert len(data) <= self._op_bytes, f"{len(data)} bytes: {op}"
        start = slot * self._slot_bytes
        self._memory[start : start + _CANCEL.size + len(data)] = bytes(_CANCEL.size) + data

    def read(self, slot: int) -> MoverOp:
        """The operation in a slot."""
        start = slot * self._slot_bytes + _CANCEL.size
        return decode_op(self._memory[start : start + self._op_bytes])

    def cancel(self, slot: int) -> None:
        """Ask the mover to leave undone what it has not begun of this slot's operation."""
        self._memory[slot * self._slot_bytes] = 1

    def is_cancelled(self, slot: int) -> memoryview:
        """A byte that tells whether that was asked, 0 or 1, now and whenever it is read."""
        start = slot * self._slot_bytes
        return self._view[start : start + 1]


# ---- operations -------------------------------------------------------------------------------


def encode_op(op: MoverOp) -> bytes:
    """An operation as bytes."""
    if isinstance(op, Transfer):
        return _encode_transfer(op)
    assert len(op.digests) <= MAX_DIGESTS, op
    if isinstance(op, Erase):
        assert len(op.ids) <= MAX_DIGESTS, op
        counts = (len(op.ids), len(op.digests))
        header = _ERASE.pack(_KIND_ERASE, op.place, *counts, op.erase_id)
        return header + _pack_ids(op.ids) + b"".join(op.digests)
    return _PROBE.pack(_KIND_PROBE, len(op.digests), op.probe_id) + b"".join(op.digests)


def decode_op(data: bytes) -> MoverOp:
    """The operation at the start of `data`."""
    kind = data[0]
    if kind == _KIND_TRANSFER:
        return _decode_transfer(data)
    if kind == _KIND_ERASE:
        _, place, num_ids, num_digests, erase_id = _ERASE.unpack_from(data)
        ids, offset = _unpack_ids(data, _ERASE.size, num_ids)
        return Erase(erase_id, Place(place), ids, _unpack_digests(data, offset, num_digests))
    assert kind == _KIND_PROBE, kind
    _, num_digests, probe_id = _PROBE.unpack_from(data)
    return Probe(probe_id, _unpack_digests(data, _PROBE.size, num_digests))


def _encode_transfer(op: Transfer) -> bytes:
    counts = (len(op.source_ids), len(op.target_ids), len(op.identities))
    assert 1 <= num_blocks(op) <= MAX_TRANSFER_BLOCKS, op
    namespace = op.namespace if op.identities else b""
    assert len(namespace) <= MAX_STORED_NAMESPACE_BYTES, op
    kinds = (_KIND_TRANSFER, op.source, op.target)
    parts = [
        _TRANSFER.pack(*kinds, *counts, len(namespace), op.transfer_id),
        _pack_ids(op.source_ids),
        _pack_ids(op.target_ids),
        namespace,
    ]
    for identity in op.identities:
        _encode_identity(identity, parts)
    return b"".join(parts)


def _decode_transfer(data: bytes) -> Transfer:
    _, source, target, *counts, namespace_bytes, transfer_id = _TRANSFER.unpack_from(data)
    source_ids, offset = _unpack_ids(data, _TRANSFER.size, counts[0])
    target_ids, offset = _unpack_ids(data, offset, counts[1])
    namespace = data[offset : offset + namespace_bytes]
    offset += namespace_bytes
    identities = []
    for _ in range(counts[2]):
        identity, offset = _decode_identity(data, offset)
        identities.append(identity)
    places = (Place(source), Place(target))
    return Transfer(transfer_id, *places, source_ids, target_ids, namespace, tuple(identities))


def _encode_identity(identity: BlockIdentity, parts: list[bytes]) -> None:
    digest, parent, tokens, contents, tags, priority, expires_ms = identity
    assert len(contents) <= MAX_STORED_CONTENTS and len(tags) <= MAX_TAGS, identity
    expires = (expires_ms or 0, expires_ms is not None)
    counts = (len(tokens), len(contents), len(tags))
    parts.append(_IDENTITY.pack(digest, parent, priority, *expires, *counts))
    parts.append(tokens)
    for content_id, length, offset, start, count in contents:
        assert len(content_id) <= MAX_CONTENT_ID_BYTES, identity
        parts.append(_PIECE.pack(len(content_id), length, offset, start, count))
        parts.append(content_id)
    for tag in tags:
        text = tag.encode()
        assert len(text) <= MAX_TAG_BYTES, identity
        parts.append(bytes((len(text),)) + text)


def _decode_identity(data: bytes, offset: int) -> tuple[BlockIdentity, int]:
    digest, parent, priority, expires_ms, expires, tokens_bytes, num_contents, num_tags = (
        _IDENTITY.unpack_from(data, offset)
    )
    offset += _IDENTITY.size
    tokens = data[offset : offset + tokens_bytes]
    offset += tokens_bytes
    contents = []
    for _ in range(num_contents):
        id_bytes, *numbers = _PIECE.unpack_from(data, offset)
        offset += _PIECE.size + id_bytes
        contents.append(ContentPiece(data[offset - id_bytes : offset], *numbers))
    tags = []
    for _ in range(num_tags):
        end = offset + 1 + data[offset]
        tags.append(data[offset + 1 : end].decode())
        offset = end
    expiry = expires_ms if expires else None
    whole = (tuple(contents), tuple(tags), priority, expiry)
    return BlockIdentity(digest, parent, tokens, *whole), offset


def _pack_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def _unpack_ids(data: bytes, offset: int, count: int) -> tuple[tuple[int, ...], int]:
    return struct.unpack_from(f"<{count}I", data, offset), offset + 4 * count


def _unpack_digests(data: bytes, offset: int, count: int) -> tuple[bytes, ...]:
    ends = range(offset + DIGEST_BYTES, offset + DIGEST_BYTES * (count + 1), DIGEST_BYTES)
    return tuple(data[end - DIGEST_BYTES : end] for end in ends)


# ---- answers ----------------------------------------------------------------------------------


def encode_answer(slot: int, answer: Answer) -> bytes:
    """The message with which a mover gives a slot back."""
    problem = answer.problem.encode()[:MAX_PROBLEM_BYTES]
    return _ANSWER.pack(slot, answer.elapsed_s, len(answer.results)) + answer.results + problem


def decode_answer(data: bytes) -> tuple[int, Answer]:
    """Slot and answer of such a message."""
    slot, elapsed_s, count = _ANSWER.unpack_from(data)
    end = _ANSWER.size + count
    problem = data[end:].decode(errors="replace")
    return slot, Answer(elapsed_s, data[_ANSWER.size : end], problem)
