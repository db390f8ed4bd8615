"""Framing: any chopping of the stream gives the same messages, and bad lengths end it."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.v1 import session_pb2
from radixkv.wire import framing
from radixkv.wire.limits import MAX_MESSAGE_BYTES


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def test_a_message_comes_back_as_it_was_sent():
    message = session_pb2.ClientMessage(step=session_pb2.Step(number=7))
    (payload,) = framing.FrameDecoder().feed(framing.encode(message))
    assert session_pb2.ClientMessage.FromString(payload) == message


def test_length_is_little_endian_and_counts_the_payload_only():
    message = session_pb2.ClientMessage(step=session_pb2.Step(number=7))
    encoded = framing.encode(message)
    assert encoded[:4] == len(message.SerializeToString()).to_bytes(4, "little")


@given(
    payloads=st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    chunk_sizes=st.lists(st.integers(1, 50), min_size=1),
)
def test_any_chopping_gives_the_same_frames(payloads, chunk_sizes):
    stream = b"".join(map(frame, payloads))
    decoder = framing.FrameDecoder()
    received, position, turn = [], 0, 0
    while position < len(stream):
        size = chunk_sizes[turn % len(chunk_sizes)]
        received += decoder.feed(stream[position : position + size])
        position, turn = position + size, turn + 1
    assert received == payloads
    assert decoder.num_pending_bytes == 0


def test_a_cut_stream_shows_as_pending_bytes():
    decoder = framing.FrameDecoder()
    assert decoder.feed(frame(b"whole") + frame(b"half")[:-1]) == [b"whole"]
    assert decoder.num_pending_bytes == 7


@pytest.mark.parametrize("length", [0, MAX_MESSAGE_BYTES + 1, 2**32 - 1])
@pytest.mark.parametrize("first", [1, 4])
def test_a_bad_length_is_refused_before_its_bytes_come(length, first):
    header = struct.pack("<I", length)
    decoder = framing.FrameDecoder()
    with pytest.raises(framing.FramingError, match=str(length)):
        decoder.feed(header[:first])
        decoder.feed(header[first:])


def test_a_bad_length_behind_good_frames_is_refused():
    decoder = framing.FrameDecoder(max_bytes=10)
    with pytest.raises(framing.FramingError):
        decoder.feed(frame(b"good") + frame(b"x" * 11))


def test_the_largest_message_passes_and_one_byte_more_does_not():
    message = session_pb2.ClientMessage(step=session_pb2.Step(number=7))
    size = message.ByteSize()
    assert framing.encode(message, max_bytes=size)
    with pytest.raises(framing.FramingError):
        framing.encode(message, max_bytes=size - 1)


def test_an_empty_message_cannot_be_sent():
    with pytest.raises(framing.FramingError):
        framing.encode(session_pb2.ClientMessage())


def test_a_large_frame_in_small_chunks_takes_linear_time():
    """1 MiB in 64-byte chunks: quadratic copying would take minutes."""
    payload = bytes(range(256)) * 4096
    stream = frame(payload)
    decoder = framing.FrameDecoder()
    received = []
    for position in range(0, len(stream), 64):
        received += decoder.feed(stream[position : position + 64])
    assert received == [payload]


@pytest.mark.parametrize("chunk", [1, 7, 64, 10_000])
def test_only_the_first_frame_has_the_smaller_maximum(chunk):
    stream = frame(b"h" * 10) + frame(b"s" * 500) + frame(b"t" * 500)
    decoder = framing.FrameDecoder(max_bytes=500, max_first_bytes=10)
    received = []
    for at in range(0, len(stream), chunk):
        received += decoder.feed(stream[at : at + chunk])
    assert [len(payload) for payload in received] == [10, 500, 500]


@pytest.mark.parametrize("chunk", [1, 10_000])
def test_a_first_frame_above_its_maximum_is_refused_before_its_bytes_come(chunk):
    decoder = framing.FrameDecoder(max_bytes=500, max_first_bytes=10)
    stream = frame(b"h" * 11)
    with pytest.raises(framing.FramingError, match="at most 10"):
        for at in range(0, len(stream), chunk):
            decoder.feed(stream[at : at + chunk])
    assert decoder.num_pending_bytes <= framing.HEADER_BYTES
