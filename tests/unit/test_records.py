"""Headers of records: what goes in comes out, and nothing else is taken for one."""

import pickle
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from radixkv.core.tier_ops import (
    MAX_STORED_CONTENTS,
    MAX_STORED_NAMESPACE_BYTES,
    MAX_TAGS,
    BlockIdentity,
    ContentPiece,
)
from radixkv.pools.records import (
    BadRecord,
    RecordLayout,
    decode_header,
    encode_header,
    header_bytes,
    same_block,
)

LAYOUT = RecordLayout(360 << 10, 16)
PLAIN = BlockIdentity(b"d" * 16, b"p" * 16, bytes(range(64)))
FULL = PLAIN._replace(
    contents=(ContentPiece(b"c" * 64, 2**32 - 1, 1, 2, 3),) * MAX_STORED_CONTENTS,
    tags=("é" * 32,) * MAX_TAGS,
    priority=-5,
    expires_ms=123_456,
)
LONG = b"n" * MAX_STORED_NAMESPACE_BYTES

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
PIECES = st.builds(ContentPiece, st.binary(max_size=64), U32, U32, U32, U32)
TAGS = st.text(max_size=16)
IDENTITIES = st.builds(
    BlockIdentity,
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=64, max_size=64),
    st.lists(PIECES, max_size=MAX_STORED_CONTENTS).map(tuple),
    st.lists(TAGS, max_size=MAX_TAGS).map(tuple),
    st.integers(-(2**31), 2**31 - 1),
    st.none() | st.integers(-(2**40), 2**40),
)


def kind_of(data: bytes, layout: RecordLayout = LAYOUT) -> str:
    with pytest.raises(BadRecord) as bad:
        decode_header(data, layout)
    return bad.value.kind


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=MAX_STORED_NAMESPACE_BYTES), IDENTITIES, U64, U64, U64)
def test_what_goes_in_comes_out(namespace, identity, checksum, sequence, slot):
    data = encode_header(namespace, identity, checksum, sequence, LAYOUT, slot=slot)
    assert len(data) == LAYOUT.header_bytes
    assert decode_header(data, LAYOUT) == (namespace, identity, checksum, sequence, slot)


@pytest.mark.parametrize("block_size", [1, 16, 128, 129, 256, 1024])
def test_the_largest_identity_has_room_at_any_block_size(block_size):
    layout = RecordLayout(4096, block_size)
    identity = FULL._replace(tokens=b"\xff" * 4 * block_size)
    data = encode_header(LONG, identity, 1, 2, layout)
    assert decode_header(data, layout).identity == identity
    assert header_bytes(block_size) % 4096 == 0
    assert block_size > 128 or header_bytes(block_size) == 4096


def test_expiry_is_on_the_clock_of_the_reader():
    data = encode_header(LONG, FULL, 1, 2, LAYOUT, unix_offset_ms=1_000_000)
    assert decode_header(data, LAYOUT, unix_offset_ms=1_100_000).identity.expires_ms == 23_456
    assert decode_header(data, LAYOUT).identity.expires_ms == 1_123_456


@pytest.mark.parametrize(
    "namespace, identity",
    [
        (LONG + b"n", PLAIN),
        (b"", PLAIN._replace(tokens=bytes(60))),
        (b"", PLAIN._replace(digest=bytes(15))),
        (b"", PLAIN._replace(contents=FULL.contents * 2)),
        (b"", PLAIN._replace(contents=(ContentPiece(b"c" * 65, 1, 1, 1, 1),))),
        (b"", PLAIN._replace(contents=(ContentPiece(b"c", 2**32, 1, 1, 1),))),
        (b"", PLAIN._replace(tags=("t",) * (MAX_TAGS + 1))),
        (b"", PLAIN._replace(tags=("é" * 33,))),
        (b"", PLAIN._replace(priority=2**31)),
    ],
)
def test_what_has_no_room_is_refused(namespace, identity):
    with pytest.raises(ValueError):
        encode_header(namespace, identity, 1, 2, LAYOUT)


def test_every_flipped_bit_is_found():
    data = bytearray(encode_header(b"name", FULL, 1, 2, LAYOUT, slot=3))
    kinds = set()
    for position in range(len(data)):
        data[position] ^= 1 << position % 8
        kinds.add(kind_of(bytes(data)))
        data[position] ^= 1 << position % 8
    assert kinds == {"torn", "foreign", "old layout"}
    decode_header(data, LAYOUT)


def test_every_tear_is_found():
    old = encode_header(LONG, FULL, 1, 2, LAYOUT)
    new = encode_header(LONG[::-1][:-1] + b"m", PLAIN, 3, 4, LAYOUT)
    for at in range(512, 2048, 512):
        assert kind_of(new[:at] + old[at:]) == "torn"
        assert kind_of(old[:at] + new[at:]) == "torn"
        assert kind_of(bytes(at) + old[at:]) == "torn"
        assert kind_of(new[:at] + bytes(4096 - at)) == "torn"


def test_other_things_are_named():
    assert kind_of(bytes(LAYOUT.header_bytes)) == "empty"
    assert kind_of(b"") == kind_of(bytes(100)) == "empty"
    assert kind_of(encode_header(b"n", PLAIN, 1, 2, LAYOUT)[:4095]) == "torn"
    assert kind_of(b"PNG" * 4096) == "foreign"
    assert kind_of(pickle.dumps(list(range(5000)))) == "foreign"


@pytest.mark.parametrize(
    "other", [RecordLayout((360 << 10) + 1, 16), RecordLayout(720 << 10, 16), RecordLayout(1, 16)]
)
def test_records_of_another_layout_are_named(other):
    assert kind_of(encode_header(b"n", PLAIN, 1, 2, other)) == "old layout"


def test_a_right_checksum_does_not_make_lengths_trusted():
    """Fields of the header are set to everything that could lead outside it, and signed again."""
    good = encode_header(LONG, FULL, 1, 2, LAYOUT)
    counts = 60  # of namespace bytes, pieces, tags
    assert struct.unpack_from("<HBB", good, counts) == (2048, 4, 8)
    for namespace_bytes in (0, 2048, 4000, 65535):
        for pieces in (0, 4, 255):
            for tags in (0, 8, 255):
                forged = bytearray(good)
                struct.pack_into("<HBB", forged, counts, namespace_bytes, pieces, tags)
                forged[8:16] = bytes(8)
                forged[8:16] = xxh3_64_intdigest(bytes(forged)).to_bytes(8, "little")
                try:
                    header = decode_header(bytes(forged), LAYOUT)
                except BadRecord as bad:
                    assert bad.kind == "torn"
                else:
                    assert len(header.namespace) == namespace_bytes


def test_the_same_block_may_have_other_tags():
    assert same_block(PLAIN, PLAIN._replace(tags=("a",), priority=3, expires_ms=4))
    assert not same_block(PLAIN, FULL)
    assert not same_block(PLAIN, PLAIN._replace(parent=b"q" * 16))
    assert not same_block(PLAIN, PLAIN._replace(tokens=bytes(64)))
