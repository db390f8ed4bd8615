"""What a mover does with stores that fail and lie, in this process; memory in test_movers."""

from collections.abc import Sequence

import numpy as np
import pytest

from radixkv.core.tier_ops import BlockIdentity, Erase, Outcome, Place, Probe, Transfer
from radixkv.pools.checked_copy import CHUNK_BYTES, checksum_of, copy_with_checksum
from radixkv.pools.mover_work import STORE_BATCH, MappedPlaces, MoverWork
from radixkv.pools.stores import Payload
from tests.mover_rig import (
    BAD,
    CPU,
    DONE,
    FAILED,
    GPU,
    NAMESPACE,
    NVME,
    REMOTE,
    identity,
    pattern,
    transfer,
)

NUM_BLOCKS = 40
BLOCK_BYTES = 1000


class FakeStore:
    """A remote, and nvme if slots come first; remembers what was written."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.held: dict[bytes, tuple[bytes, int]] = {}
        self.failing: set[bytes] = set()
        self.calls: list[int] = []

    def write(
        self,
        namespace: bytes,
        identities: Sequence[BlockIdentity],
        payloads: Sequence[Payload],
        checksums: Sequence[int],
    ) -> list[Outcome]:
        assert namespace == NAMESPACE
        self.calls.append(len(identities))
        outcomes = []
        for who, payload, checksum in zip(identities, payloads, checksums, strict=True):
            assert checksum == checksum_of(payload)
            outcomes.append(self._outcome(who.digest))
            if outcomes[-1] is DONE:
                self.held[who.digest] = bytes(payload), checksum
        return outcomes

    def read(
        self, namespace: bytes, identities: Sequence[BlockIdentity], into: Sequence[Payload]
    ) -> list[Outcome]:
        self.calls.append(len(identities))
        for who, payload in zip(identities, into, strict=True):
            payload[:] = np.frombuffer(self.held[who.digest][0], np.uint8)
        return [self._outcome(who.digest) for who in identities]

    def _outcome(self, digest: bytes) -> Outcome:
        if digest not in self.failing:
            return DONE
        self.problem = "the disk is on fire"
        return FAILED

    def probe(self, digests: Sequence[bytes]) -> list[bool] | None:
        return None if self.failing else [digest in self.held for digest in digests]

    def remove(self, digests: Sequence[bytes]) -> bool:
        if self.failing:
            raise OSError("no answer")
        return True

    def close(self) -> None:
        raise AssertionError("not the work's to close")


class FakeSlots(FakeStore):
    """The same behind slots."""

    def write(self, slots, *whole):  # type: ignore[override]
        assert len(slots) == len(whole[1])
        return super().write(*whole)

    def read(self, slots, *whole):  # type: ignore[override]
        assert len(slots) == len(whole[1])
        return super().read(*whole)

    def erase(self, slots: Sequence[int]) -> bool:
        return self.remove([])


class Flag:
    """Becomes 1 when it has been looked at so many times."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def __getitem__(self, index: int) -> int:
        self.looks -= 1
        return int(self.looks < 0)


class Bench:
    """A MoverWork over arrays and fakes."""

    def __init__(self) -> None:
        shape = (NUM_BLOCKS + 1, BLOCK_BYTES)
        self.gpu, self.cpu = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
        self.checksums = memoryview(bytearray(8 * NUM_BLOCKS + 8)).cast("Q")
        self.stores = {NVME: FakeSlots(), REMOTE: FakeStore()}
        for block in range(1, NUM_BLOCKS + 1):
            self.gpu[block] = pattern(block, BLOCK_BYTES)
        places = MappedPlaces(
            self.gpu, self.cpu, self.checksums, self.stores[NVME], self.stores[REMOTE], True
        )
        self.failing_index = -1
        self.work = MoverWork(places, self._before_block)

    def _before_block(self, op: object, index: int) -> None:
        if index == self.failing_index:
            raise OSError("a fault injected by a test")

    def run(self, op: Transfer, cancelled_after: int = 10**9) -> tuple[tuple[int, ...], str]:
        answer = self.work.carry_out(op, Flag(cancelled_after))  # type: ignore[arg-type]
        return tuple(answer.results), answer.problem


@pytest.fixture
def bench() -> Bench:
    return Bench()


def stored(source: Place, target: Place, count: int) -> Transfer:
    ids = range(1, count + 1)
    empty = range(0)
    sources = empty if source is REMOTE else ids
    return transfer(7, source, target, sources, empty if target is REMOTE else ids)


def to_cpu(count: int) -> Transfer:
    return transfer(6, GPU, CPU, range(1, count + 1), range(1, count + 1))


@pytest.mark.parametrize("store", [NVME, REMOTE])
@pytest.mark.parametrize("source", [GPU, CPU])
def test_blocks_come_back_from_a_store_as_they_left(bench, store, source) -> None:
    count = 2 * STORE_BATCH
    before = bench.gpu.copy()
    bench.run(to_cpu(count))
    assert bench.run(stored(source, store, count)) == ((DONE,) * count, "")
    bench.gpu[:] = 0
    assert bench.run(stored(store, GPU, count)) == ((DONE,) * count, "")
    assert (bench.gpu[1 : count + 1] == before[1 : count + 1]).all()
    assert (bench.gpu[count + 1 :] == 0).all()
    assert bench.stores[store].calls == [STORE_BATCH] * 4


@pytest.mark.parametrize("store", [NVME, REMOTE])
def test_c4_a_failing_block_ends_the_transfer_and_says_why(bench, store) -> None:
    bench.stores[store].failing.add(identity(4).digest)
    outcomes, problem = bench.run(stored(GPU, store, STORE_BATCH + 3))
    assert outcomes == (DONE,) * 3 + (FAILED,) + (DONE,) * (STORE_BATCH - 4) + (FAILED,) * 3
    assert problem == "the disk is on fire"
    assert bench.stores[store].calls == [STORE_BATCH]


@pytest.mark.parametrize("store", [NVME, REMOTE])
def test_what_rots_on_cpu_reaches_no_store(bench, store) -> None:
    bench.run(to_cpu(6))
    bench.cpu[4, 17] ^= 1
    outcomes, problem = bench.run(stored(CPU, store, 6))
    assert outcomes == (DONE,) * 3 + (BAD,) + (FAILED,) * 2
    assert "block 4 on cpu" in problem
    assert sorted(bench.stores[store].held) == [identity(number).digest for number in (1, 2, 3)]
    bench.cpu[1, 0] ^= 1
    assert bench.run(stored(CPU, store, 6))[0] == (BAD,) + (FAILED,) * 5


def test_a_cancelled_transfer_does_not_begin_what_it_has_not_begun(bench) -> None:
    assert bench.run(to_cpu(5), cancelled_after=2) == ((DONE,) * 2 + (FAILED,) * 3, "")
    assert (bench.cpu[3:] == 0).all()
    many = 2 * STORE_BATCH
    outcomes, problem = bench.run(stored(GPU, NVME, many), cancelled_after=1)
    assert outcomes == (DONE,) * STORE_BATCH + (FAILED,) * STORE_BATCH and problem == ""
    assert bench.stores[NVME].calls == [STORE_BATCH]


def test_a_fault_before_a_block_leaves_the_blocks_before_it_done(bench) -> None:
    bench.failing_index = 2
    for op in (to_cpu(5), stored(GPU, NVME, 5), stored(GPU, REMOTE, 5)):
        assert bench.run(op) == ((DONE,) * 2 + (FAILED,) * 3, "a fault injected by a test")


def test_an_unexpected_error_is_a_failure_not_the_end(bench) -> None:
    assert bench.run(stored(REMOTE, GPU, 3)) == ((FAILED,) * 3, repr(identity(1).digest))
    assert bench.run(to_cpu(3))[0] == (DONE,) * 3


def test_probes_and_erasures(bench) -> None:
    bench.run(stored(GPU, REMOTE, 2))
    digests = tuple(identity(number).digest for number in (1, 2, 3))
    assert bench.run(Probe(1, digests)) == ((1, 1, 0), "")
    assert bench.run(Erase(1, REMOTE, (), digests)) == ((1,), "")
    assert bench.run(Erase(1, NVME, (1, 2), ())) == ((1,), "")
    for store in bench.stores.values():
        store.failing.add(b"")
    assert bench.run(Probe(1, digests)) == ((), "no answer")
    assert bench.run(Erase(1, REMOTE, (), digests)) == ((), "no answer")
    assert bench.run(Erase(1, NVME, (1, 2), ())) == ((), "no answer")


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 5])
def test_a_checked_copy_is_a_copy_with_the_checksum_of_the_whole(size: int) -> None:
    source, target = pattern(1, size), np.zeros(size, np.uint8)
    assert copy_with_checksum(source, target) == checksum_of(source)
    assert (source == target).all()
