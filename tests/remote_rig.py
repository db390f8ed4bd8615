"""Blocks for tests of the remote store."""

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from radixkv.core.digest import block_digest, root_digest
from radixkv.core.tier_ops import BlockIdentity, Outcome
from radixkv.pools.remote import RemoteStore

BLOCK_SIZE = 4
BLOCK_BYTES = (1 << 19) + 24  # neither aligned nor small: a half of the buffer holds 15
NAMESPACE = b"namespace"
DONE, FAILED, BAD = Outcome.DONE, Outcome.FAILED, Outcome.BAD


def identity(number: int, namespace: bytes = NAMESPACE) -> BlockIdentity:
    """The first block of sequence `number`."""
    parent = root_digest(namespace)
    tokens = np.full(BLOCK_SIZE, number, "<i4").tobytes()
    return BlockIdentity(block_digest(parent, tokens), parent, tokens, (), ("tag",), 3, 5_000)


def digests(numbers: range) -> list[bytes]:
    """Of these blocks."""
    return [identity(number).digest for number in numbers]


def payload(number: int, num_bytes: int = BLOCK_BYTES) -> npt.NDArray[np.uint8]:
    """Its bytes, which occur in no other block."""
    return np.random.default_rng(number).integers(0, 256, num_bytes, np.uint8)


def open_store(url: str, block_bytes: int = BLOCK_BYTES) -> RemoteStore:
    """A mover's store."""
    return RemoteStore(url, block_bytes, BLOCK_SIZE)


def put(store: RemoteStore, numbers: range, num_bytes: int = BLOCK_BYTES) -> list[Outcome]:
    """Write these blocks."""
    payloads = [payload(number, num_bytes) for number in numbers]
    checksums = [xxh3_64_intdigest(block.data) for block in payloads]
    return store.write(NAMESPACE, [identity(number) for number in numbers], payloads, checksums)


def get(store: RemoteStore, numbers: range, num_bytes: int = BLOCK_BYTES) -> list[Outcome]:
    """Read them back; what is DONE must have exactly the right bytes."""
    into = [np.zeros(num_bytes, np.uint8) for _ in numbers]
    outcomes = store.read(NAMESPACE, [identity(number) for number in numbers], into)
    for number, block, outcome in zip(numbers, into, outcomes, strict=True):
        assert outcome is not DONE or np.array_equal(block, payload(number, num_bytes))
    return outcomes
