"""The nvme store on a real file system: round trips, sizes, geometry, ownership."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from radixkv.pools import nvme_files
from radixkv.pools.nvme import IN_FLIGHT, NvmeAttachment, NvmeStore
from radixkv.pools.nvme_files import LOCK_NAME, NvmeError
from tests.nvme_rig import (
    ALL,
    BAD,
    BLOCK_BYTES,
    BLOCK_SIZE,
    DONE,
    FOUR_SEGMENTS,
    NAMESPACE,
    NUM_BLOCKS,
    RECORD_BYTES,
    FaultyIO,
    filled,
    found,
    get,
    identity,
    one_file,
    open_store,
    payload,
    put,
)


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_files, "LOCK_WAIT_S", 0.1)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("segment_bytes", [1 << 30, FOUR_SEGMENTS])
def test_round_trip_and_restart(tmp_path, direct, segment_bytes):
    for start in range(3):
        store = open_store(tmp_path, segment_bytes=segment_bytes, io=FaultyIO(direct))
        assert not (store.direct and not direct)
        assert found(store) == (ALL if start else {})
        assert put(store, ALL) == get(store, ALL) == [DONE] * NUM_BLOCKS
        assert store.problem is None
        store.close()
        store.close()
    assert len(list(tmp_path.glob("*.segment"))) == (1 if segment_bytes > FOUR_SEGMENTS else 4)


@pytest.mark.parametrize("block_bytes", [1, 511, 4095, 4096, 4097, 100_000])
def test_any_number_of_bytes(tmp_path, block_bytes):
    store = open_store(tmp_path, block_bytes=block_bytes)
    for _ in range(2):  # the second time through memory that was used before
        assert put(store, ALL) == get(store, ALL) == [DONE] * NUM_BLOCKS
    store.close()
    padding = -block_bytes % 4096
    assert one_file(tmp_path).read_bytes().endswith(bytes(padding))


def test_memory_need_not_be_aligned(tmp_path):
    store = open_store(tmp_path)
    arena = np.zeros(BLOCK_BYTES * 2, np.uint8)
    start = 100 - arena.ctypes.data % 100 + 1
    block, into = payload(1), arena[start : start + BLOCK_BYTES]
    into[:] = block
    name, checksum = [identity(1)], [xxh3_64_intdigest(block.data)]
    assert store.write([1], NAMESPACE, name, [into], checksum) == [DONE]
    into[:] = 0
    assert store.read([1], NAMESPACE, name, [into]) == [DONE]
    assert np.array_equal(into, block)
    store.close()


def test_a_read_wants_just_this_block(tmp_path):
    store = open_store(tmp_path)
    assert put(store, {1: 1}) == [DONE]
    into = [payload(0)]
    other = identity(1)._replace(tags=("later",), priority=7, expires_ms=1)
    assert store.read([1], NAMESPACE, [other], into) == [DONE]
    assert store.read([1], b"another", [identity(1)], into) == [BAD]
    assert store.read([1], NAMESPACE, [identity(2)], into) == [BAD]
    assert store.read([2], NAMESPACE, [identity(1)], into) == [BAD]
    parent = identity(1)._replace(parent=bytes(16))
    assert store.read([1], NAMESPACE, [parent], into) == [BAD]
    store.close()


def test_expiry_tags_and_priority_survive_a_restart_on_another_clock(tmp_path):
    name = identity(1)._replace(tags=("a", "é"), priority=3, expires_ms=5_000)
    store = NvmeStore(tmp_path, 4, BLOCK_BYTES, BLOCK_SIZE, unix_offset_ms=10**12)
    block = payload(1)
    assert store.write([2], NAMESPACE, [name], [block], [xxh3_64_intdigest(block.data)]) == [DONE]
    store.close()
    store = NvmeStore(tmp_path, 4, BLOCK_BYTES, BLOCK_SIZE, unix_offset_ms=10**12 + 4_000)
    (stored,) = store.scan().blocks
    assert stored.identity == name._replace(expires_ms=1_000)
    store.close()


def test_sequence_numbers_rise_over_restarts_movers_and_a_clock_set_back(tmp_path, monkeypatch):
    sequences = []
    for number in range(4):
        store = open_store(tmp_path)
        store.scan()
        movers = [NvmeStore.attach(store.attachment) for _ in range(2)]
        for writer in (*movers, store, movers[0]):
            put(writer, {1: number, 2: number})
            by_slot = {block.slot: block.sequence for block in store.scan().blocks}
            sequences += [by_slot[1], by_slot[2]]
        for writer in (*movers, store):
            writer.close()
        monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert sequences == sorted(set(sequences))


# ---- sizes and geometry (cases.md C6, A7, E4) -------------------------------------------------


def used_bytes(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.glob("*.segment"))


@pytest.mark.parametrize("segment_bytes", [1 << 30, FOUR_SEGMENTS])
def test_c6_the_limit_is_what_is_allocated_and_shrinks_before_use(tmp_path, segment_bytes):
    for num_blocks in (20, 20, 7, 5, 1, 12):
        store = open_store(tmp_path, num_blocks, segment_bytes=segment_bytes)
        assert store.usable_blocks == num_blocks
        expected = num_blocks * RECORD_BYTES
        assert expected <= used_bytes(tmp_path) <= expected + 8 * 4096
        kept = found(store)
        assert kept == {slot: slot for slot in kept}
        everything = {slot: slot for slot in range(1, num_blocks + 1)}
        assert put(store, everything) == [DONE] * num_blocks
        store.close()
    assert set(kept) == {1}


def test_old_blocks_hit_after_growth(tmp_path):
    filled(tmp_path)
    store = open_store(tmp_path, 50)
    assert found(store) == ALL and get(store, ALL) == [DONE] * NUM_BLOCKS
    assert put(store, {50: 50}) == get(store, {50: 50}) == [DONE]
    store.close()


@pytest.mark.parametrize(
    "block_bytes, block_size", [(BLOCK_BYTES, 8), (BLOCK_BYTES // 2, BLOCK_SIZE), (8191, 4)]
)
def test_a7_another_geometry_finds_nothing_and_says_how_much(tmp_path, block_bytes, block_size):
    old = filled(tmp_path)
    store = open_store(tmp_path, NUM_BLOCKS, block_bytes, block_size)
    result = store.scan()
    assert not result.blocks and result.ignored == {"old layout": NUM_BLOCKS}
    assert not old.exists()
    store.close()
    store = open_store(tmp_path)
    assert not store.scan().blocks
    store.close()


def test_a7_segments_of_another_format_are_removed(tmp_path):
    tmp_path.joinpath("radixkv-v99-b4-n8192-000000.segment").write_bytes(b"radixkv\0" * 9)
    store = open_store(tmp_path)
    assert store.scan().ignored == {"old layout": 1}
    store.close()
    assert {path.name for path in tmp_path.iterdir()} == {one_file(tmp_path).name, LOCK_NAME}


def test_a7_a_renamed_segment_is_not_believed(tmp_path):
    old = filled(tmp_path)
    old.rename(tmp_path / old.name.replace("-b4-", "-b8-"))
    store = open_store(tmp_path, block_size=8)
    result = store.scan()
    assert not result.blocks and result.ignored == {"old layout": NUM_BLOCKS}
    store.close()


# ---- who may use it ---------------------------------------------------------------------------


def test_one_directory_has_one_server(tmp_path):
    store = open_store(tmp_path)
    with pytest.raises(NvmeError, match="another server uses it"):
        open_store(tmp_path)
    inherited = os.dup(store.lock_descriptor)
    store.close()
    with pytest.raises(NvmeError):  # a mover of the old server still lives
        open_store(tmp_path)
    os.close(inherited)
    open_store(tmp_path).close()


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NvmeError, match="--nvme-path"):
            open_store(path)


WRITER = """
import json, sys
from radixkv.pools.nvme import NvmeAttachment, NvmeStore
from tests.nvme_rig import (
    ALL,
    BAD,
    BLOCK_BYTES,
    BLOCK_SIZE,
    DONE,
    FOUR_SEGMENTS,
    FaultyIO,
    NAMESPACE,
    NUM_BLOCKS,
    RECORD_BYTES,
    filled,
    found,
    get,
    identity,
    one_file,
    open_store,
    payload,
    put,
)
store = NvmeStore.attach(NvmeAttachment(*json.loads(sys.argv[1])))
slots = json.loads(sys.argv[2])
number = 0
while True:
    outcomes = put(store, {slot: number * 100 + slot for slot in slots})
    assert set(outcomes) == {0}, outcomes
    print(number, flush=True)
    number += 1
"""


def start_writer(attachment: NvmeAttachment, slots: list[int]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, json.dumps(attachment), json.dumps(slots)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def writers() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_c5_two_movers_killed_while_they_write(tmp_path, writers, kills):
    random = np.random.default_rng(kills)
    for _ in range(kills):
        store = open_store(tmp_path)
        store.scan()
        halves = [list(range(1, 11)), list(range(11, 21))]
        started = [start_writer(store.attachment, slots) for slots in halves]
        writers += started
        for process in started:
            assert process.stdout and process.stdout.readline()
        time.sleep(random.uniform(0, 0.05))
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.wait()
        store.close()
        store = open_store(tmp_path)
        numbers = found(store)
        assert all(number % 100 == slot for slot, number in numbers.items())
        assert get(store, numbers).count(DONE) >= NUM_BLOCKS - 2 * IN_FLIGHT
        store.close()
