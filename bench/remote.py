"""How fast the remote store moves blocks, against the calls of Mooncake's own client.

One master, and a peer process that holds all the memory, so every byte goes over loopback TCP. Both
sides put and get the same 64 records; the client's lie ready in a registered buffer and are moved
by one call, unverified. The store makes headers, passes its buffer, and verifies what it reads.
What is put is removed again in between, untimed.
"""

import mmap
import time

import numpy as np
from xxhash import xxh3_64_intdigest

from bench.measure import MIN_PAIRS, QUICK_PAIRS, Row, median_row
from radixkv.core.digest import block_digest, root_digest
from radixkv.core.tier_ops import BlockIdentity, Outcome
from radixkv.pools.records import RecordLayout
from radixkv.pools.remote import RemoteStore
from radixkv.pools.remote_client import MooncakeClient
from radixkv.pools.remote_url import parse_remote_url
from tests.mooncake_master import MasterProcess, PeerProcess, why_not

BLOCK_SIZE = 16
BLOCK_BYTES = (2 << 20, 360 << 10)
NUM_BLOCKS = 64
NAMESPACE = b"bench" * 20
LIMIT = 0.9


def rows(quick: bool = False) -> list[Row]:
    """All rows of this part."""
    if reason := why_not():
        return [Row("remote put and get ÷ Mooncake's client", None, note=reason)]
    num_pairs = QUICK_PAIRS if quick else MIN_PAIRS
    found = []
    with MasterProcess() as master, PeerProcess(master.url(segment_gib=1), 4096, range(0)):
        for block_bytes in BLOCK_BYTES:
            found += throughput_rows(master.url(segment_gib=0), block_bytes, num_pairs)
    return found


def throughput_rows(url: str, block_bytes: int, num_pairs: int) -> list[Row]:
    """Put and get of the store ÷ those of the client."""
    ours, theirs = StoreCalls(url, block_bytes), ClientCalls(url, block_bytes)
    times: dict[str, list[tuple[float, float]]] = {"put": [], "get": []}
    for pair in range(num_pairs + 1):
        both = {
            "put": (ours.put(), theirs.put()),
            "get": (ours.get(), theirs.get()),
        }
        ours.remove(), theirs.remove()
        if pair:  # the first one only warms up
            for name, seconds in both.items():
                times[name].append(seconds)
    ours.store.close()
    theirs.client.close()
    found = []
    for name, pairs in times.items():
        ratios = [other / mine for mine, other in pairs]
        size = NUM_BLOCKS * block_bytes * len(pairs)
        mine, other = (size / sum(column) / 1e9 for column in zip(*pairs, strict=True))
        note = f"{mine:.2f} GB/s, client {other:.2f} GB/s"
        title = f"remote {name}, {block_bytes >> 10:,} KiB blocks ÷ Mooncake's client"
        found.append(median_row(title, ratios, "x", LIMIT, at_least=True, note=note))
    return found


class StoreCalls:
    """RemoteStore with blocks as in an arena."""

    def __init__(self, url: str, block_bytes: int) -> None:
        self.store = RemoteStore(url, block_bytes, BLOCK_SIZE)
        memory = np.frombuffer(mmap.mmap(-1, NUM_BLOCKS * block_bytes), np.uint8)
        memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
        self.blocks = list(memory.reshape(NUM_BLOCKS, block_bytes))
        self.checksums = [xxh3_64_intdigest(block.data) for block in self.blocks]
        self.identities = []
        parent = root_digest(NAMESPACE)
        for index in range(NUM_BLOCKS):
            tokens = np.full(BLOCK_SIZE, index, "<i4").tobytes()
            self.identities.append(BlockIdentity(block_digest(parent, tokens), parent, tokens))
            parent = self.identities[-1].digest

    def put(self) -> float:
        """Seconds to put all blocks."""
        start = time.perf_counter()
        outcomes = self.store.write(NAMESPACE, self.identities, self.blocks, self.checksums)
        took = time.perf_counter() - start
        assert set(outcomes) == {Outcome.DONE}, self.store.problem
        return took

    def get(self) -> float:
        """Seconds to get and verify all blocks."""
        start = time.perf_counter()
        outcomes = self.store.read(NAMESPACE, self.identities, self.blocks)
        took = time.perf_counter() - start
        assert set(outcomes) == {Outcome.DONE}, self.store.problem
        return took

    def remove(self) -> None:
        """Remove what was put."""
        assert self.store.remove([identity.digest for identity in self.identities])


class ClientCalls:
    """Mooncake's client with records in a buffer of its own."""

    def __init__(self, url: str, block_bytes: int) -> None:
        self.size = RecordLayout(block_bytes, BLOCK_SIZE).record_bytes
        memory = np.frombuffer(mmap.mmap(-1, NUM_BLOCKS * self.size), np.uint8)
        memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
        self.memory = memory
        self.client = MooncakeClient(parse_remote_url(url), memory.ctypes.data, len(memory))
        self.client.connect()
        self.keys = [f"bench/{index}" for index in range(NUM_BLOCKS)]
        self.addresses = [memory.ctypes.data + index * self.size for index in range(NUM_BLOCKS)]

    def put(self) -> float:
        """Seconds to put all records."""
        start = time.perf_counter()
        codes = self.client.put(self.keys, self.addresses, self.size)
        took = time.perf_counter() - start
        assert set(codes) == {0}, codes
        return took

    def get(self) -> float:
        """Seconds to get all records."""
        start = time.perf_counter()
        codes = self.client.get(self.keys, self.addresses, self.size)
        took = time.perf_counter() - start
        assert set(codes) == {self.size}, codes
        return took

    def remove(self) -> None:
        """Remove what was put."""
        self.client.remove(self.keys, [])
