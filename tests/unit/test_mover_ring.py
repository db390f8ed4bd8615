"""The messages between server and mover: everything comes through, the largest of each fits."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from radixkv.pools.mover_ring import (
    MAX_ANSWER_BYTES,
    MAX_DIGESTS,
    MAX_PROBLEM_BYTES,
    MAX_TRANSFER_BLOCKS,
    SLOTS,
    Answer,
    RingMemory,
    decode_answer,
    decode_op,
    encode_answer,
    encode_op,
)

U32, U64, I63 = 2**32 - 1, 2**64 - 1, 2**63 - 1
DIGESTS = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
IDS = st.lists(st.integers(0, U32), max_size=5).map(tuple)
PIECES = st.builds(
    ContentPiece,
    st.binary(min_size=1, max_size=MAX_CONTENT_ID_BYTES),
    st.integers(0, U64),
    st.integers(0, U64),
    st.integers(0, 1023),
    st.integers(1, 1024),
)
TAGS = st.text(max_size=12).filter(lambda tag: len(tag.encode()) <= MAX_TAG_BYTES)
IDENTITIES = st.builds(
    BlockIdentity,
    DIGESTS,
    DIGESTS,
    st.binary(max_size=64),
    st.lists(PIECES, max_size=MAX_STORED_CONTENTS).map(tuple),
    st.lists(TAGS, max_size=MAX_TAGS).map(tuple),
    st.integers(-I63, I63),
    st.none() | st.integers(-I63, I63),
)
TRANSFERS = st.builds(
    Transfer,
    st.integers(0, U64),
    st.sampled_from(Place),
    st.sampled_from(Place),
    IDS,
    IDS,
    st.binary(max_size=40),
    st.lists(IDENTITIES, min_size=1, max_size=4).map(tuple),
)
ERASES = st.builds(
    Erase, st.integers(0, U64), st.sampled_from(Place), IDS, st.lists(DIGESTS).map(tuple)
)
PROBES = st.builds(Probe, st.integers(0, U64), st.lists(DIGESTS).map(tuple))


def largest_identity(block_size: int) -> BlockIdentity:
    return BlockIdentity(
        b"d" * DIGEST_BYTES,
        b"p" * DIGEST_BYTES,
        b"t" * 4 * block_size,
        (ContentPiece(b"c" * MAX_CONTENT_ID_BYTES, U64, U64, 1023, 1024),) * MAX_STORED_CONTENTS,
        ("g" * MAX_TAG_BYTES,) * MAX_TAGS,
        I63,
        -I63,
    )


def largest_ops(block_size: int) -> list[Transfer | Erase | Probe]:
    ids = (U32,) * MAX_TRANSFER_BLOCKS
    identities = (largest_identity(block_size),) * MAX_TRANSFER_BLOCKS
    namespace = b"n" * MAX_STORED_NAMESPACE_BYTES
    digests = tuple(number.to_bytes(DIGEST_BYTES, "little") for number in range(MAX_DIGESTS))
    return [
        Transfer(U64, Place.NVME, Place.GPU, ids, ids, namespace, identities),
        Erase(U64, Place.NVME, tuple(range(MAX_DIGESTS)), digests),
        Probe(U64, digests),
    ]


@pytest.fixture(params=[1, 16, 1024])
def ring(request: pytest.FixtureRequest) -> tuple[RingMemory, RingMemory, int]:
    """Both ends and the block size."""
    descriptor = RingMemory.create(request.param)
    ends = RingMemory(descriptor, request.param), RingMemory(descriptor, request.param)
    os.close(descriptor)
    return *ends, request.param


@given(TRANSFERS | ERASES | PROBES)
def test_an_operation_is_read_as_it_was_written(op) -> None:
    decoded = decode_op(encode_op(op) + b"what another operation left behind")
    assert decoded == op and type(decoded) is type(op)


def test_without_identities_the_namespace_is_left_out() -> None:
    op = Transfer(1, Place.GPU, Place.CPU, (1,), (2,), b"n" * 4000, ())
    assert decode_op(encode_op(op)) == op._replace(namespace=b"")


def test_the_largest_operations_fit_every_slot(ring) -> None:
    server, mover, block_size = ring
    for op in largest_ops(block_size):
        for slot in range(SLOTS):
            server.write(slot, op._replace(**{op._fields[0]: slot}))
        for slot in range(SLOTS):
            assert mover.read(slot) == op._replace(**{op._fields[0]: slot})


def test_what_is_too_large_is_a_programmer_error() -> None:
    transfer, erase, probe = largest_ops(16)
    for op in (
        transfer._replace(identities=transfer.identities * 2),
        transfer._replace(namespace=transfer.namespace + b"n"),
        erase._replace(ids=erase.ids * 2),
        probe._replace(digests=probe.digests * 2),
    ):
        with pytest.raises(AssertionError):
            encode_op(op)


def test_cancelling_is_of_one_slot_and_one_operation(ring) -> None:
    server, mover, _ = ring
    op = Transfer(1, Place.GPU, Place.CPU, (1,), (2,), b"", ())
    for slot in range(SLOTS):
        server.write(slot, op)
    server.cancel(1)
    assert [mover.is_cancelled(slot)[0] for slot in range(SLOTS)] == [0, 1]
    assert mover.read(1) == op
    flag = mover.is_cancelled(1)
    server.write(1, op)
    assert not flag[0]


@pytest.mark.parametrize("problem", ["", "no space left on device", "ü" * MAX_PROBLEM_BYTES])
def test_an_answer_is_read_as_it_was_written(problem: str) -> None:
    answer = Answer(1.5, bytes(MAX_DIGESTS), problem)
    message = encode_answer(1, answer)
    assert len(message) <= MAX_ANSWER_BYTES
    assert decode_answer(message) == (1, answer._replace(problem=problem[: MAX_PROBLEM_BYTES // 2]))
