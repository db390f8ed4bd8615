"""CopyThread: order, completion, failure, no effect on other blocks."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from radixkv.core.results import CopyOp
from radixkv.pools.arena import MemfdArena
from radixkv.pools.copies import CopyThread

BLOCK = 4096


@pytest.fixture
def arena() -> Iterator[MemfdArena]:
    arena = MemfdArena(16, BLOCK)
    arena.prefault()
    arena.view()[:] = np.arange(17, dtype=np.uint8)[:, None]
    yield arena
    arena.close()


class Results:
    """Collects what the callbacks report."""

    def __init__(self) -> None:
        self.done: list[tuple[int, bool]] = []

    def __call__(self, op: CopyOp, ok: bool) -> None:
        self.done.append((op.copy_id, ok))


def copy(copy_id: int, source: int, target: int) -> CopyOp:
    return CopyOp(copy_id, pool=0, source=source, target=target, num_tokens=1)


def test_copies_run_in_order_and_touch_only_their_target(arena: MemfdArena) -> None:
    results = Results()
    thread = CopyThread(arena)
    thread.submit(copy(1, 3, 4), results)
    thread.submit(copy(2, 4, 5), results)
    thread.close()
    assert results.done == [(1, True), (2, True)]
    expected = list(range(17))
    expected[4] = expected[5] = 3
    assert arena.view()[:, 0].tolist() == expected
    assert (arena.view()[5] == 3).all()


def test_failed_copy_is_reported_and_the_next_one_runs(arena: MemfdArena) -> None:
    def fail_first(op: CopyOp) -> None:
        if op.copy_id == 1:
            raise OSError("injected")

    results = Results()
    thread = CopyThread(arena, before_copy=fail_first)
    thread.submit(copy(1, 3, 4), results)
    thread.submit(copy(2, 3, 5), results)
    thread.close()
    assert results.done == [(1, False), (2, True)]
    assert arena.view()[4, 0] == 4
    assert arena.view()[5, 0] == 3


def test_submit_does_not_wait_for_a_slow_copy(arena: MemfdArena) -> None:
    release = threading.Event()
    results = Results()
    thread = CopyThread(arena, before_copy=lambda op: release.wait(10) and None)
    for target in range(2, 17):
        thread.submit(copy(target, 1, target), results)
    assert results.done == []
    release.set()
    thread.close()
    assert len(results.done) == 15


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0), (1, 1), (17, 1), (1, 17)])
def test_null_block_and_ids_out_of_range_are_programmer_errors(
    arena: MemfdArena, source: int, target: int
) -> None:
    thread = CopyThread(arena)
    with pytest.raises(AssertionError):
        thread.submit(copy(1, source, target), Results())
    thread.close()
