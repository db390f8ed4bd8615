"""Full and broken disks: outcomes that fail and a problem in words, never an exception (C4)."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nvme_rig import (
    ALL,
    BAD,
    DONE,
    FAILED,
    FOUR_SEGMENTS,
    NUM_BLOCKS,
    RECORD_BYTES,
    FaultyIO,
    filled,
    found,
    get,
    open_store,
    put,
)

MIB = 1 << 20


@pytest.mark.parametrize("segment_bytes", [1 << 30, FOUR_SEGMENTS])
def test_a_disk_with_room_for_a_part(tmp_path, segment_bytes):
    io = FaultyIO()
    io.room = 12 * RECORD_BYTES + 4096
    store = open_store(tmp_path, segment_bytes=segment_bytes, io=io)
    assert store.usable_blocks == 12
    assert store.problem and "No space left" in store.problem and "--nvme-blocks" in store.problem
    expected = [DONE] * 12 + [FAILED] * 8
    assert put(store, ALL) == expected
    assert get(store, ALL) == [DONE] * 12 + [BAD] * 8
    assert store.erase([1, 20])
    store.close()
    store = open_store(tmp_path, segment_bytes=segment_bytes)
    assert found(store) == {slot: slot for slot in range(2, 13)}
    assert store.usable_blocks == NUM_BLOCKS and store.problem is None
    store.close()


def test_a_disk_without_any_room(tmp_path):
    io = FaultyIO()
    io.room = RECORD_BYTES - 4096
    store = open_store(tmp_path, segment_bytes=FOUR_SEGMENTS, io=io)
    assert store.usable_blocks == 0 and not list(tmp_path.glob("*.segment"))
    assert found(store) == {}
    assert put(store, {1: 1}) == [FAILED] and store.problem
    assert get(store, {1: 1}) == [BAD]
    assert store.erase([1])  # there is nothing
    store.close()


def test_growth_without_room_keeps_what_is_there(tmp_path):
    filled(tmp_path)
    io = FaultyIO()
    io.room = 0
    store = open_store(tmp_path, 2 * NUM_BLOCKS, io=io)
    assert store.usable_blocks == NUM_BLOCKS
    assert found(store) == ALL and get(store, ALL) == [DONE] * NUM_BLOCKS
    store.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("direct", [True, False])
def test_c4_one_write_of_five_fails(tmp_path, number, direct):
    io = FaultyIO(direct)
    store = open_store(tmp_path, io=io)
    blocks = {slot: slot for slot in range(1, 6)}
    io.fail("write", number, at=[3])
    outcomes = put(store, blocks)
    assert sorted(outcomes) == [DONE] * 4 + [FAILED]
    assert store.problem and os.strerror(number) in store.problem
    failed = outcomes.index(FAILED) + 1
    assert get(store, blocks) == [BAD if slot == failed else DONE for slot in blocks]
    assert put(store, blocks) == get(store, blocks) == [DONE] * 5
    store.close()


def test_c4_a_short_write_fails(tmp_path):
    io = FaultyIO()
    store = open_store(tmp_path, io=io)
    io.short.add(("write", 0))
    assert put(store, {1: 1}) == [FAILED]
    assert store.problem and "4096 bytes" in store.problem
    assert get(store, {1: 1}) == [BAD]
    store.close()


@pytest.mark.parametrize("kth", range(5))
def test_c4_the_kth_read_fails(tmp_path, kth):
    filled(tmp_path)
    io = FaultyIO()
    store = open_store(tmp_path, io=io)
    io.fail("read", at=[kth])
    outcomes = get(store, {slot: slot for slot in range(1, 6)})
    assert sorted(outcomes) == [DONE] * 4 + [FAILED]
    assert store.problem and "Input/output error" in store.problem
    assert get(store, ALL) == [DONE] * NUM_BLOCKS
    store.close()


def test_buffered_writes_are_not_done_before_they_are_synced(tmp_path):
    io = FaultyIO(direct=False)
    store = open_store(tmp_path, io=io)
    assert not store.direct
    io.fail("sync", at=[0])
    assert put(store, ALL) == [FAILED] * NUM_BLOCKS
    assert put(store, ALL) == [DONE] * NUM_BLOCKS
    store.close()


@pytest.mark.parametrize("call", ["write", "sync"])
def test_an_erase_that_fails_says_so_and_can_be_repeated(tmp_path, call):
    io = FaultyIO()
    store = open_store(tmp_path, io=io)
    put(store, ALL)
    io.fail(call, at=[0])
    assert not store.erase([3, 4]) and store.problem
    assert store.erase([3, 4])
    assert get(store, ALL) == [DONE] * 2 + [BAD] * 2 + [DONE] * 16
    store.close()
    store = open_store(tmp_path)
    assert set(found(store)) == set(ALL) - {3, 4}
    store.close()


def test_an_erase_syncs_every_file(tmp_path):
    io = FaultyIO()
    store = open_store(tmp_path, segment_bytes=FOUR_SEGMENTS, io=io)
    assert put(store, ALL) == [DONE] * NUM_BLOCKS and "sync" not in io.calls
    assert store.erase([1]) and io.calls["sync"] == 4
    assert store.erase([]) and io.calls["sync"] == 8
    io.fail("sync", at=[2])
    assert not store.erase([])
    store.close()


def test_headers_that_cannot_be_read_are_counted_and_erased(tmp_path):
    filled(tmp_path)
    io = FaultyIO()
    io.fail("read", at=[1 + 4, 1 + 9])  # the first read tries direct I/O
    store = open_store(tmp_path, io=io)
    result = store.scan()
    assert {block.slot for block in result.blocks} == set(ALL) - {5, 10}
    assert result.ignored == {"unreadable": 2} and store.problem
    store.close()
    store = open_store(tmp_path)
    assert set(found(store)) == set(ALL) - {5, 10}
    store.close()


@pytest.mark.parametrize("call", ["open", "read", "write", "sync", "allocate"])
def test_a_disk_that_fails_everything_only_fails_outcomes(tmp_path, call):
    filled(tmp_path)
    io = FaultyIO()
    io.fail(call)
    store = open_store(tmp_path, 2 * NUM_BLOCKS, io=io)
    store.scan()
    put(store, ALL)
    get(store, ALL)
    store.erase([1])
    assert store.problem
    io.heal()
    if call == "open":
        assert get(store, {1: 1}) == [FAILED] and not store.erase([1])  # it may be there
    else:
        assert put(store, ALL) == get(store, ALL) == [DONE] * NUM_BLOCKS
    store.close()


# ---- real full disks --------------------------------------------------------------------------


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 8 MiB, where mounting is allowed."""
    where, image = tmp_path / "disk", tmp_path / "image"
    where.mkdir()
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(where)]
    else:
        if not shutil.which("mkfs.ext4"):
            pytest.skip("no mkfs.ext4")
        with image.open("wb") as file:
            file.truncate(8 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
        command = ["mount", "-o", "loop", str(image), str(where)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting {request.param}: {done.stderr.strip()}")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True)


def test_a_really_full_disk(small_disk, capsys):
    num_blocks = 12 * MIB // RECORD_BYTES
    store = open_store(small_disk / "store", num_blocks, segment_bytes=2 * MIB)
    with capsys.disabled():
        print(f"\n{small_disk}: {'direct' if store.direct else 'buffered'}, {store.problem}")
    usable = store.usable_blocks
    assert 0 < usable < num_blocks and store.problem and "No space left" in store.problem
    outcomes = put(store, {slot: slot for slot in range(1, num_blocks + 1)})
    assert outcomes == [DONE] * usable + [FAILED] * (num_blocks - usable)
    store.close()
    store = open_store(small_disk / "store", num_blocks, segment_bytes=2 * MIB)
    numbers = found(store)
    assert len(numbers) == usable and get(store, numbers) == [DONE] * usable
    store.close()
