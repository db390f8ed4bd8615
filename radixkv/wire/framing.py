"""Messages on a byte stream: a little-endian uint32 length, then that many bytes of protobuf.

No message is empty, and none is longer than the reader's maximum; a peer that says otherwise is
not worth reading on from, so both are errors that end the connection.
"""

import struct
from typing import Protocol

from radixkv.wire.limits import MAX_MESSAGE_BYTES

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size


class Serializable(Protocol):
    """A protobuf message, as far as framing needs to know one."""

    def SerializeToString(self) -> bytes:
        """The message's bytes."""


class FramingError(ValueError):
    """The peer's bytes are not frames, or a message is too large to send."""


def encode(message: Serializable, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """The frame of a protobuf message. Raises FramingError if it is empty or above `max_bytes`."""
    payload = message.SerializeToString()
    _check_length(len(payload), max_bytes)
    return _LENGTH.pack(len(payload)) + payload


class FrameDecoder:
    """Cuts a stream of bytes, however it is chopped up, into the payloads of its frames.

    Keeps at most one unfinished frame: `max_bytes`, the header, and what one `feed` brought. The
    first frame may have at most `max_first_bytes` (None: `max_bytes`), so that a peer who has not
    yet said who it is cannot make the reader keep much.
    After a FramingError the stream has no known position, and the decoder must not be fed again.
    """

    def __init__(
        self, max_bytes: int = MAX_MESSAGE_BYTES, max_first_bytes: int | None = None
    ) -> None:
        self.max_bytes = max_bytes
        self._limit = max_bytes if max_first_bytes is None else max_first_bytes  # of the next one
        self._rest = bytearray()

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of the unfinished frame; not 0 at the end of the stream means it was cut short."""
        return len(self._rest)

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Payloads of the frames that `data` completes, in order; O(bytes).

        Raises FramingError at a length of 0 or above the maximum, before that frame's bytes come.
        """
        size = len(data)
        if not self._rest and size > HEADER_BYTES:
            length: int = _LENGTH.unpack_from(data)[0]
            if length == size - HEADER_BYTES and length <= self._limit:
                self._limit = self.max_bytes
                return [bytes(data[HEADER_BYTES:])]  # nearly always: one frame, whole
        if self._rest:
            self._rest += data
            if len(self._rest) < self._num_wanted_bytes():
                return []
            data, self._rest = self._rest, bytearray()
        return self._cut(memoryview(data))

    def _num_wanted_bytes(self) -> int:
        if len(self._rest) < HEADER_BYTES:
            return HEADER_BYTES
        length: int = _LENGTH.unpack_from(self._rest)[0]
        _check_length(length, self._limit)
        return HEADER_BYTES + length

    def _cut(self, data: memoryview) -> list[bytes]:
        payloads: list[bytes] = []
        position = 0
        while len(data) - position >= HEADER_BYTES:
            length: int = _LENGTH.unpack_from(data, position)[0]
            _check_length(length, self._limit)
            end = position + HEADER_BYTES + length
            if end > len(data):
                break
            payloads.append(bytes(data[position + HEADER_BYTES : end]))
            position = end
            self._limit = self.max_bytes
        self._rest += data[position:]
        return payloads


def _check_length(length: int, max_bytes: int) -> None:
    if length == 0:
        raise FramingError("a message of 0 bytes")
    if length > max_bytes:
        raise FramingError(f"a message of {length} bytes, at most {max_bytes} are allowed")
