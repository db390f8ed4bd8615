"""MemfdArena: memory is there before an id is handed out, for every process that maps it."""

import errno
import fcntl
import mmap
import os
import resource
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from radixkv.pools.arena import ArenaError, MemfdArena

BLOCK = 64 << 10


@pytest.fixture
def arena() -> Iterator[MemfdArena]:
    arena = MemfdArena(100, BLOCK, ahead_bytes=10 * BLOCK)
    yield arena
    arena.close()


def allocated(arena: MemfdArena) -> int:
    return os.fstat(arena.descriptor).st_blocks * 512


def wait_until_ahead(arena: MemfdArena, expected: int) -> None:
    deadline = time.monotonic() + 5
    while arena.allocated_bytes < expected and time.monotonic() < deadline:
        time.sleep(0.005)
    assert arena.allocated_bytes == expected


def test_null_block_is_there_and_size_counts_it(arena: MemfdArena) -> None:
    assert arena.size_bytes == 101 * BLOCK
    assert os.fstat(arena.descriptor).st_size == arena.size_bytes
    assert arena.view().shape == (101, BLOCK)
    assert allocated(arena) >= BLOCK


def test_ensure_allocates_and_the_thread_stays_ahead(arena: MemfdArena) -> None:
    wait_until_ahead(arena, 11 * BLOCK)
    arena.ensure(20)
    assert allocated(arena) >= 21 * BLOCK
    wait_until_ahead(arena, 31 * BLOCK)
    arena.ensure(3)
    assert allocated(arena) == 31 * BLOCK
    arena.ensure(100)
    assert allocated(arena) == arena.size_bytes


def test_prefault_allocates_everything(arena: MemfdArena) -> None:
    arena.prefault()
    assert allocated(arena) == arena.allocated_bytes == arena.size_bytes


def test_concurrent_ensures_end_with_everything_allocated(arena: MemfdArena) -> None:
    threads = [threading.Thread(target=arena.ensure, args=(i,)) for i in range(0, 101, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert allocated(arena) == arena.size_bytes


def test_another_mapping_sees_the_same_bytes(arena: MemfdArena) -> None:
    arena.ensure(7)
    other = mmap.mmap(arena.descriptor, arena.size_bytes)
    arena.view()[7] = 42
    assert other[7 * BLOCK : 8 * BLOCK] == bytes([42]) * BLOCK
    other[7 * BLOCK] = 9
    assert arena.view()[7, 0] == 9


def test_nobody_can_change_the_size(arena: MemfdArena) -> None:
    for size in (0, 2 * arena.size_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_close_is_idempotent_and_leaves_mappings_alone() -> None:
    arena = MemfdArena(4, BLOCK)
    other = mmap.mmap(arena.descriptor, arena.size_bytes)
    view = arena.view()
    view[2] = 5
    arena.close()
    arena.close()
    assert other[2 * BLOCK] == 5
    assert view[2, 0] == 5
    arena.prefault()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_no_memory_is_a_typed_error_with_numbers(
    arena: MemfdArena, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    wait_until_ahead(arena, 11 * BLOCK)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ArenaError, match=r"no memory left.*of 6619136 bytes.*--gpu-blocks"):
        arena.ensure(50)
    monkeypatch.undo()
    arena.ensure(50)
    assert allocated(arena) >= 51 * BLOCK


def test_file_size_limit_is_a_typed_error() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(ArenaError, match="ulimit -f"):
            MemfdArena(1000, BLOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_absurd_sizes_are_a_typed_error() -> None:
    with pytest.raises(ArenaError):
        MemfdArena(1 << 40, 1 << 40)


def test_failed_creation_leaks_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ArenaError):
            MemfdArena(1 << 30, 1 << 40)
    assert len(os.listdir("/proc/self/fd")) == before


def test_view_is_writable_and_rows_are_blocks(arena: MemfdArena) -> None:
    arena.ensure(2)
    arena.view()[1] = 1
    arena.view()[2] = 2
    assert np.array_equal(np.unique(arena.view()[1:3]), [1, 2])
