"""The format of packs: what is written is read back, and nothing else is."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from radixkv.v1 import cache_pb2
from radixkv_client import pack_format
from radixkv_client.errors import InvalidArgument
from radixkv_client.pack import _replacing, _whole_blocks
from radixkv_client.pack_format import (
    MAX_HEADER_BYTES,
    PackError,
    PackFile,
    PackHeader,
    PackSequence,
    common_blocks,
    encode_header,
    header_room,
)
from radixkv_client.spec import KVSpec
from radixkv_client.values import Scope
from tests.naive_model import int32

SPEC = KVSpec(2, 2, 4, 4, "int8", block_size=4, backend="test")
SCOPE = Scope("ada", "2", "tenant")
SEQUENCES = [PackSequence(int32(range(12)), 0), PackSequence(int32([0, 1, 2, 3, 9, 9, 9, 9]), 1)]
BLOCKS = [bytes([number]) * SPEC.block_bytes for number in range(4)]
Change = Callable[[bytearray], None]


def header(**changes: object) -> PackHeader:
    fields: dict[str, object] = {
        "model": "model",
        "scope": SCOPE,
        "kv_spec": SPEC,
        "sequences": SEQUENCES,
        "checksums": [xxh3_64_intdigest(block) for block in BLOCKS],
    }
    return PackHeader(**(fields | changes))  # type: ignore[arg-type]


def pack_bytes(made: PackHeader | None = None) -> bytes:
    """A whole pack with three blocks of the first sequence and one of the second."""
    return encode_header(made or header(), header_room(2, 20, 4)) + b"".join(BLOCKS)


def sealed(data: bytearray) -> bytes:
    """With a right checksum of the header, as one who forges packs would have it."""
    (blocks_offset,) = struct.unpack_from("<Q", data, 24)
    struct.pack_into("<Q", data, 32, 0)
    struct.pack_into("<Q", data, 32, xxh3_64_intdigest(data[:blocks_offset]))
    return bytes(data)


def open_pack(path: Path, data: bytes) -> PackFile:
    path.write_bytes(data)
    return PackFile(path)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    with open_pack(tmp_path / "pack", pack_bytes()) as pack:
        got, wanted = pack.header, header()
        assert (got.model, got.scope, got.kv_spec) == (wanted.model, wanted.scope, wanted.kv_spec)
        assert list(got.sequences) == SEQUENCES
        assert [got.num_blocks(sequence) for sequence in got.sequences] == [3, 2]
        pack.check_blocks()
        into = bytearray(SPEC.block_bytes)
        for position in (3, 0, 2, 1):
            pack.read_block(position, memoryview(into))
            assert into == BLOCKS[position]


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    data = pack_bytes()
    blocks_offset = header_room(2, 20, 4)
    within = [*range(0, 700, 3), blocks_offset - 1, *range(blocks_offset, len(data), 61)]
    for at in within:
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8
        with pytest.raises(PackError), open_pack(tmp_path / "pack", broken) as pack:
            pack.check_blocks()


def test_a_damaged_block_is_noticed_where_it_has_arrived(tmp_path: Path) -> None:
    broken = bytearray(pack_bytes())
    broken[-1] ^= 1
    with open_pack(tmp_path / "pack", broken) as pack:
        into = memoryview(bytearray(SPEC.block_bytes))
        pack.read_block(0, into)
        with pytest.raises(PackError, match="block 3 of the file is damaged"):
            pack.read_block(3, into)


@pytest.mark.parametrize("size", [0, 1, 39, 40, 100, 4096, -1, -100, "more"])
def test_a_file_of_another_length_is_refused(tmp_path: Path, size: int | str) -> None:
    data = pack_bytes()
    with pytest.raises(PackError, match="cut short|not a radixkv pack|the file has"):
        open_pack(tmp_path / "pack", data + b"x" if size == "more" else data[:size])


def test_a_file_that_is_cut_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    with open_pack(tmp_path / "pack", pack_bytes()) as pack:
        os.truncate(tmp_path / "pack", header_room(2, 20, 4) + 10)
        with pytest.raises(PackError, match="cut short"):
            pack.check_blocks()


def test_what_is_no_pack_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"\x80\x04" * 100, os.urandom(5000), bytes(5000)):
        with pytest.raises(PackError, match="not a radixkv pack"):
            open_pack(tmp_path / "pack", data)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(PackError, match="not a regular file"):
            PackFile(path)
    with pytest.raises(OSError):
        PackFile(tmp_path / "absent")


def set_field(offset: int, form: str, value: int) -> Change:
    return lambda data: struct.pack_into(form, data, offset, value)


FORGED: dict[str, tuple[Change, str]] = {
    "version": (set_field(8, "<I", 2), "version 2 of the format"),
    "huge identity": (set_field(12, "<I", 2**32 - 1), "out of bounds"),
    "short identity": (set_field(12, "<I", 3), "cannot be read|no sense|out of bounds"),
    "no sequences": (set_field(16, "<I", 0), "out of bounds"),
    "many sequences": (set_field(16, "<I", 2**32 - 1), "out of bounds"),
    "more sequences": (set_field(16, "<I", 1000), "out of bounds|contradicts itself"),
    "many blocks": (set_field(20, "<I", 2**32 - 1), "contradicts itself"),
    "fewer blocks": (set_field(20, "<I", 3), "contradicts itself"),
}


@pytest.mark.parametrize("name", FORGED)
def test_sizes_in_the_file_are_not_believed(tmp_path: Path, name: str) -> None:
    change, words = FORGED[name]
    data = bytearray(pack_bytes())
    change(data)
    with pytest.raises(PackError, match=words):
        open_pack(tmp_path / "pack", sealed(data))


@pytest.mark.parametrize(
    "blocks_offset", [0, 39, MAX_HEADER_BYTES + 1, MAX_HEADER_BYTES, 2**64 - 1]
)
def test_a_header_of_any_size_is_not_read(tmp_path: Path, blocks_offset: int) -> None:
    data = bytearray(pack_bytes())
    struct.pack_into("<Q", data, 24, blocks_offset)
    with pytest.raises(PackError, match="damaged|cut short"):
        open_pack(tmp_path / "pack", bytes(data))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": ""}, "no model"),
        ({"model": "x" * 300}, "no model"),
        ({"sequences": [SEQUENCES[0], PackSequence(int32(range(4)), 1)]}, "out of bounds"),
        ({"sequences": [SEQUENCES[0], PackSequence(int32(range(4, 12)), 1)]}, "share too much"),
        ({"sequences": [PackSequence(int32(range(8)), 1), SEQUENCES[0]]}, "share too much"),
        ({"sequences": [PackSequence(b"", 0), SEQUENCES[0]]}, "out of bounds"),
        ({"sequences": [PackSequence(int32([-1] * 12), 0), SEQUENCES[1]]}, "share|negative"),
        ({"sequences": SEQUENCES[:1]}, "contradicts itself"),
        ({"checksums": [1, 2, 3]}, "contradicts itself"),
    ],
)
def test_headers_that_contradict_themselves_are_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(PackError, match=words):
        open_pack(tmp_path / "pack", pack_bytes(header(**changes)))


def test_a_layout_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    for change in ({"dtype": "float3"}, {"block_bytes": 7}, {"num_layers": 0}, {"head_dim": 2**31}):
        info = cache_pb2.NamespaceInfo(kv_spec=SPEC.to_proto())
        info.namespace.model_fingerprint = "model"
        for name, value in change.items():
            setattr(info.kv_spec, name, value)
        data = bytearray(pack_bytes())
        identity = info.SerializeToString()
        struct.pack_into("<I", data, 12, len(identity))
        data[40 : 40 + len(identity)] = identity
        with pytest.raises(PackError, match="makes no sense"):
            open_pack(tmp_path / "pack", sealed(data))


def test_a_pack_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PackError, match="too much for one pack"):
        header_room(1025, 100, 100)
    with pytest.raises(PackError, match="too much for one pack"):
        header_room(1, MAX_HEADER_BYTES // 4, 1)
    assert header_room(1, 4, 1) % pack_format.ALIGNMENT == 0


def test_prefixes_are_cut_to_blocks_and_each_is_there_once() -> None:
    numbers = [range(3), range(9), range(8), range(13), [0, 1, 2, 3, 9, 9, 9, 9], range(8)]
    assert _whole_blocks([int32(tokens) for tokens in numbers], 4) == [
        int32(range(12)), int32([0, 1, 2, 3, 9, 9, 9, 9]),
    ]  # fmt: skip
    with pytest.raises(InvalidArgument, match="whole block"):
        _whole_blocks([int32(range(3))], 4)
    assert common_blocks(int32(range(12)), int32(range(10)), 4) == 2
    assert common_blocks(int32(range(12)), int32([0, 1, 2, 4]), 4) == 0
    assert common_blocks(b"", int32(range(12)), 4) == 0


def test_a_file_is_replaced_wholly_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    path.write_bytes(b"before")
    path.chmod(0o644)
    with pytest.raises(RuntimeError), _replacing(path) as file:
        os.write(file, b"half")
        raise RuntimeError
    assert path.read_bytes() == b"before"
    with _replacing(path) as file:
        os.write(file, b"after")
    assert path.read_bytes() == b"after"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["pack"]
