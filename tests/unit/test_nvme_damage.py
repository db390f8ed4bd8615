"""Files damaged while nobody runs, or while somebody does: misses, counted (C5, G2, G3)."""

import os
import pickle
from pathlib import Path

import pytest

from tests.nvme_rig import (
    ALL,
    BAD,
    DONE,
    FAILED,
    FOUR_SEGMENTS,
    NAMESPACE,
    NUM_BLOCKS,
    RECORD_BYTES,
    filled,
    get,
    identity,
    one_file,
    open_store,
    payload,
    put,
)


def after_damage(path: Path, lost: set[int]) -> dict[str, int]:
    """Restart: what is lost is a miss, the rest hits, and the next start has nothing to count."""
    store = open_store(path)
    result = store.scan()
    numbers = {block.slot: block.slot for block in result.blocks}
    bad = {slot for slot, end in zip(numbers, get(store, numbers), strict=True) if end is not DONE}
    assert set(numbers) - bad == set(ALL) - lost
    store.close()
    store = open_store(path)
    assert not store.scan().ignored
    assert put(store, ALL) == get(store, ALL) == [DONE] * NUM_BLOCKS
    store.close()
    return dict(result.ignored)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    data = path.read_bytes()
    overwrite(path, offset, bytes([data[offset] ^ 4]))


def test_c5_cut_to_half(tmp_path):
    path = filled(tmp_path)
    os.truncate(path, path.stat().st_size // 2 + 5000)
    assert after_damage(tmp_path, set(range(11, 21))) == {"torn": 1}


def test_c5_cut_inside_a_payload_with_a_whole_header(tmp_path):
    path = filled(tmp_path)
    os.truncate(path, 3 * RECORD_BYTES + 4096 + 100)
    assert after_damage(tmp_path, set(range(4, 21))) == {"torn": 1}


def test_c5_cut_to_nothing(tmp_path):
    os.truncate(filled(tmp_path), 0)
    assert after_damage(tmp_path, set(ALL)) == {}


def test_c5_a_byte_added(tmp_path):
    with filled(tmp_path).open("ab") as file:
        file.write(b"x")
    assert after_damage(tmp_path, set()) == {"torn": 1}


def test_c5_a_bit_in_the_data(tmp_path):
    path = filled(tmp_path)
    flip(path, 6 * RECORD_BYTES + 4096 + 77)
    assert after_damage(tmp_path, {7}) == {}  # no header says so: the read does


@pytest.mark.parametrize("at, kind", [(2, "foreign"), (12, "torn"), (18, "old layout")])
def test_c5_a_bit_in_the_header(tmp_path, at, kind):
    flip(filled(tmp_path), 6 * RECORD_BYTES + at)
    assert after_damage(tmp_path, {7}) == {kind: 1}


def test_c5_two_slots_swapped(tmp_path):
    path = filled(tmp_path)
    data = path.read_bytes()
    overwrite(path, 0, data[RECORD_BYTES : 2 * RECORD_BYTES] + data[:RECORD_BYTES])
    assert after_damage(tmp_path, {1, 2}) == {"foreign": 2}


def test_c5_two_segments_swapped(tmp_path):
    store = open_store(tmp_path, segment_bytes=FOUR_SEGMENTS)
    put(store, ALL)
    store.close()
    first, second = sorted(tmp_path.glob("*.segment"))[:2]
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    store = open_store(tmp_path, segment_bytes=FOUR_SEGMENTS)
    result = store.scan()
    assert {block.slot for block in result.blocks} == set(range(11, 21))
    assert result.ignored == {"foreign": 10}
    store.close()


def test_c5_swapped_payloads_under_whole_headers(tmp_path):
    path = filled(tmp_path)
    data = path.read_bytes()
    overwrite(path, 4096, data[RECORD_BYTES + 4096 : 2 * RECORD_BYTES])
    assert after_damage(tmp_path, {1}) == {}


def test_damage_while_running_is_bad_not_wrong(tmp_path):
    store = open_store(tmp_path)
    put(store, ALL)
    path = one_file(tmp_path)
    flip(path, 4096)
    flip(path, RECORD_BYTES + 70)
    os.truncate(path, 19 * RECORD_BYTES + 4096)
    assert get(store, ALL) == [BAD, BAD, *[DONE] * 17, BAD]
    store.close()


def test_nothing_read_is_not_what_was_read_before(tmp_path):
    store = open_store(tmp_path)
    put(store, {1: 1})
    into = [payload(0)]
    assert store.read([1], NAMESPACE, [identity(1)], into) == [DONE]
    os.truncate(one_file(tmp_path), 0)
    assert store.read([1], NAMESPACE, [identity(1)], into) == [BAD]
    store.close()


class Marker:
    """Makes a file if it is ever loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_g2_a_serialised_object_is_never_loaded(tmp_path):
    marker = tmp_path / "marker"
    path = filled(tmp_path)
    overwrite(path, 0, pickle.dumps(Marker(marker)))
    overwrite(path, RECORD_BYTES + 64, pickle.dumps(Marker(marker)))
    (tmp_path / "object.pickle").write_bytes(pickle.dumps(Marker(marker)))
    assert after_damage(tmp_path, {1, 2}) == {"foreign": 1, "torn": 1}
    path.write_bytes(pickle.dumps([Marker(marker)] * 5))
    assert after_damage(tmp_path, set(ALL)) == {"torn": 1}
    assert not marker.exists()


def test_g3_links_are_not_followed_and_other_files_not_touched(tmp_path):
    directory, outside = tmp_path / "store", tmp_path / "outside"
    name = filled(directory).name
    outside.write_bytes(b"precious")
    others = {"notes.txt": b"mine", name + ".bak": b"x", "radixkv-v1-b4-n8192-00.segment": b"y"}
    for other, data in others.items():
        (directory / other).write_bytes(data)
    (directory / name).unlink()
    (directory / name).symlink_to(outside)
    store = open_store(directory)
    assert store.usable_blocks == 0 and store.problem
    assert put(store, {1: 1}) == [FAILED] and not store.erase([1])
    store.close()
    assert outside.read_bytes() == b"precious"
    assert {other: (directory / other).read_bytes() for other in others} == others
