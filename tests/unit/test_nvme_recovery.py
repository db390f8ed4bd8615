"""Power failures: whatever part of the unsynced writes reached the disk, no wrong block comes back.

A workload of writes, overwrites and erasures is recorded sector by sector. After each event the
power may fail; then each sector holds what it had at the last sync of its file, or any of what was
written to it since, whatever its neighbours hold. That covers every order and every subset. Each
such disk is recovered by the product: records found must have exactly the bytes of a block that was
written, and no block that was gone when an erase was reported may be there.
"""

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from radixkv.core.tier_ops import BlockIdentity
from radixkv.pools.nvme import NvmeStore
from tests.nvme_rig import BLOCK_SIZE, DONE, FaultyIO, empty, identity, one_file

SECTOR = 512
BLOCK_BYTES = 2 * SECTOR  # a payload of two sectors that differ, and padding
RECORD_BYTES = 4096 + 4096
NAMESPACE = b"n" * 700  # so that headers differ in more than one sector
Block = tuple[int, int]  # (number, version): the same tokens may be computed twice


def name_of(number: int) -> BlockIdentity:
    """Tags differ, and come last: headers of two blocks differ in their first and second sector."""
    return identity(number, NAMESPACE)._replace(tags=(f"{number:060}",) * 2)


@functools.cache
def bytes_of(block: Block) -> Any:
    data = empty(BLOCK_BYTES)
    data[:] = np.random.default_rng(block).integers(0, 256, BLOCK_BYTES, np.uint8)
    return data


@dataclass
class Written:
    """So much was written at this offset."""

    offset: int
    data: bytes


@dataclass
class Erased:
    """An erase was reported: blocks not in these slots are gone for good."""

    left: dict[int, Block]


class Synced:
    """The file was synced."""


@dataclass
class RecordingIO(FaultyIO):
    """Notes what is written, and when it is synced. There is one file."""

    direct: bool = True
    events: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.direct)

    def write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """Noted before the write is over: the power may fail within it."""
        self.events.append(Written(offset, b"".join(map(bytes, buffers))))
        return super().write(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        """What was written before is on the disk now."""
        super().sync(descriptor)
        self.events.append(Synced())


class Workload:
    """Runs operations on a store and records what they do to the disk."""

    def __init__(self, directory: Path, num_slots: int, direct: bool) -> None:
        self.io = RecordingIO(direct)
        self.store = NvmeStore(directory, num_slots, BLOCK_BYTES, BLOCK_SIZE, io=self.io)
        assert self.store.layout.record_bytes == RECORD_BYTES
        self.held: dict[int, Block] = {}
        self.blocks: set[Block] = set()

    def write(self, held: dict[int, Block]) -> None:
        payloads = [bytes_of(block) for block in held.values()]
        self.blocks |= set(held.values())
        outcomes = self.store.write(
            list(held), NAMESPACE, [name_of(number) for number, _ in held.values()], payloads,
            [xxh3_64_intdigest(data.data) for data in payloads],
        )  # fmt: skip
        assert outcomes == [DONE] * len(held)
        self.held |= held

    def erase(self, *slots: int) -> None:
        assert self.store.erase(slots)
        for slot in slots:
            self.held.pop(slot, None)
        self.io.events.append(Erased(dict(self.held)))

    def run(self, operations: Sequence[Any]) -> None:
        for operation in operations:
            if isinstance(operation, dict):
                self.write(operation)
            else:
                self.erase(*operation)
        self.store.close()


class Disk:
    """What sectors can hold if the power fails now, and which blocks must not be found."""

    def __init__(self, num_slots: int) -> None:
        zero = bytes(SECTOR)
        self.sectors = [[zero] for _ in range(num_slots * RECORD_BYTES // SECTOR)]

    def apply(self, event: Any) -> None:
        if isinstance(event, Written):
            for at in range(0, len(event.data), SECTOR):
                versions = self.sectors[(event.offset + at) // SECTOR]
                data = event.data[at : at + SECTOR]
                if data in versions:
                    versions.remove(data)
                versions.append(data)  # the latest comes last: that is what a sync keeps
        elif isinstance(event, Synced):
            self.sectors = [versions[-1:] for versions in self.sectors]

    def images(self) -> Iterator[bytes]:
        """All disks there can be."""
        return map(b"".join, itertools.product(*self.sectors))

    def num_images(self) -> int:
        product = 1
        for versions in self.sectors:
            product *= len(versions)
        return product

    def image(self, random: np.random.Generator) -> bytes:
        """One of them; often all sectors of one age, else chosen one by one."""
        if random.random() < 0.2:
            age = int(random.integers(3))
            return b"".join(versions[max(-1 - age, -len(versions))] for versions in self.sectors)
        return b"".join(versions[random.integers(len(versions))] for versions in self.sectors)


class Recovery:
    """Puts an image on the real disk, starts a store there and checks all it finds."""

    def __init__(self, directory: Path, workload: Workload) -> None:
        self._descriptor = os.open(one_file(directory), os.O_RDWR)
        self._attachment = workload.store.attachment
        self._names = {name_of(number).digest: number for number, _ in workload.blocks}
        self.num_found = self.num_bad = 0

    def check(self, image: bytes, allowed: set[Block]) -> None:
        os.pwrite(self._descriptor, image, 0)
        store = NvmeStore.attach(self._attachment, io=FaultyIO(direct=False))
        try:
            for stored in store.scan().blocks:
                number = self._names[stored.identity.digest]
                assert stored.identity == name_of(number) and stored.namespace == NAMESPACE
                into = empty(BLOCK_BYTES)
                if store.read([stored.slot], NAMESPACE, [stored.identity], [into]) != [DONE]:
                    self.num_bad += 1
                    continue
                self.num_found += 1
                blocks = [block for block in allowed if np.array_equal(bytes_of(block), into)]
                assert [number] == [block[0] for block in blocks], (stored.slot, number)
        finally:
            store.close()


def failures(workload: Workload, num_slots: int) -> Iterator[tuple[Disk, set[Block]]]:
    """After each event: the disk, and the blocks that may be found."""
    disk = Disk(num_slots)
    allowed = set(workload.blocks)
    yield disk, allowed
    for position, event in enumerate(workload.io.events):
        disk.apply(event)
        if isinstance(event, Erased):
            allowed = set(event.left.values()) | blocks_written(workload, position)
        yield disk, allowed


def blocks_written(workload: Workload, after: int) -> set[Block]:
    """Blocks whose records are written after that event."""
    data = b"".join(e.data for e in workload.io.events[after:] if isinstance(e, Written))
    return {block for block in workload.blocks if bytes_of(block).tobytes() in data}


A, B, C, B2 = (1, 0), (2, 0), (3, 0), (2, 1)
SMALL: dict[str, list[Any]] = {
    "write, overwrite": [{1: A}, {1: B}],
    "write, erase": [{1: A}, [1]],
    "write, erase, write": [{1: A}, [1], {1: B}],
    "overwrite, erase": [{1: A}, {1: B}, [1], {1: C}],
    "computed twice": [{1: B}, {1: B2}, [1], {1: B}],
    "erased twice": [{1: A}, [1], [1], {1: A}],
    "two slots": [{1: A, 2: B}, [1]],
    "moved, then erased": [{1: A}, {1: B}, {2: A}, [2]],
}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("title", SMALL)
def test_every_order_and_subset_of_a_small_workload(tmp_path, title, direct):
    num_slots = 1 + any(2 in op for op in SMALL[title])
    workload = Workload(tmp_path, num_slots, direct)
    workload.run(SMALL[title])
    recovery = Recovery(tmp_path, workload)
    seen: set[tuple[bytes, frozenset[Block]]] = set()
    for disk, allowed in failures(workload, num_slots):
        assert disk.num_images() <= 20_000
        for image in disk.images():
            if (image, frozenset(allowed)) not in seen:
                seen.add((image, frozenset(allowed)))
                recovery.check(image, allowed)
    assert recovery.num_found and (recovery.num_bad or not direct)
    print(f"{title}: {len(seen)} disks, {recovery.num_found} found, {recovery.num_bad} torn")


def random_operations(random: np.random.Generator, num_slots: int, count: int) -> list[Any]:
    """Writes of one to three slots, and one erase in five."""
    operations: list[Any] = []
    for _ in range(count):
        slots = random.choice(np.arange(1, num_slots + 1), random.integers(1, 4), replace=False)
        if random.random() < 0.2:
            operations.append([int(slot) for slot in slots])
        else:
            operations.append(
                {int(slot): (int(random.integers(10)), len(operations)) for slot in slots}
            )
    return operations


@pytest.mark.parametrize("samples", [400, pytest.param(5_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", range(3))
def test_a_sample_of_a_larger_workload(tmp_path, seed, samples):
    random = np.random.default_rng(seed)
    num_slots = 5
    workload = Workload(tmp_path, num_slots, direct=True)
    workload.run(random_operations(random, num_slots, 40))
    recovery = Recovery(tmp_path, workload)
    each = -(-samples // len(workload.io.events))
    for disk, allowed in failures(workload, num_slots):
        for _ in range(each):
            recovery.check(disk.image(random), allowed)
    assert recovery.num_found > samples // 4 and recovery.num_bad > samples // 4


def test_the_model_finds_an_erase_that_is_not_synced(tmp_path):
    """Control: without its sync, the same workload must be caught."""
    workload = Workload(tmp_path, 1, direct=True)
    workload.run(SMALL["write, erase"])
    workload.io.events = [e for e in workload.io.events if not isinstance(e, Synced)]
    recovery = Recovery(tmp_path, workload)
    with pytest.raises(AssertionError):
        for disk, allowed in failures(workload, 1):
            for image in disk.images():
                recovery.check(image, allowed)
