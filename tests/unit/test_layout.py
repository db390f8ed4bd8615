"""KVSpec: sizes, bounds, comparison, canonical bytes, wire form."""

from dataclasses import replace

import pytest

from radixkv.pools.layout import KVSpec, LayoutError
from radixkv.server.spec_wire import kv_spec_from_proto, kv_spec_to_proto

LLAMA = KVSpec(32, 8, 128, 128, "bfloat16", 16)
MLA = KVSpec(61, 1, 576, 0, "bfloat16", 64)


def test_block_bytes() -> None:
    assert LLAMA.block_bytes == 32 * 8 * 16 * (128 + 128) * 2
    assert MLA.block_bytes == 61 * 64 * 576 * 2
    assert replace(LLAMA, scale_bytes=100).block_bytes == LLAMA.block_bytes + 100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 0),
        ("num_layers", 1 << 31),
        ("num_kv_heads", -1),
        ("head_dim", 0),
        ("head_dim", True),
        ("value_head_dim", -1),
        ("block_size", 0),
        ("block_size", 1 << 20),
        ("scale_bytes", 1 << 60),
        ("dtype", "float64"),
        ("dtype", ""),
        ("layout", "../x"),
        ("backend", "x" * 300),
        ("backend", "a\nb"),
    ],
)
def test_fields_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(LayoutError, match=field):
        replace(LLAMA, **{field: value})


def test_no_values_only_with_one_head() -> None:
    with pytest.raises(LayoutError, match="num_kv_heads"):
        replace(LLAMA, value_head_dim=0)


def test_blocks_too_large_for_anything_are_refused() -> None:
    with pytest.raises(LayoutError, match="block_bytes"):
        KVSpec(1024, 1024, 16_384, 16_384, "float32", 16)


def test_differences_name_the_fields() -> None:
    other = replace(LLAMA, head_dim=64, dtype="float16")
    assert other.differences(LLAMA) == ["head_dim is 64, not 128", "dtype is 'float16', not "
                                        "'bfloat16'"]  # fmt: skip
    assert LLAMA.differences(LLAMA) == []


def test_encoding_is_injective() -> None:
    specs = [
        LLAMA,
        MLA,
        replace(LLAMA, backend="a;b"),
        replace(LLAMA, backend="a"),
        replace(LLAMA, scale_bytes=1),
        replace(LLAMA, num_kv_heads=81),
    ]
    assert len({spec.encode() for spec in specs}) == len(specs)
    assert LLAMA.encode() == replace(LLAMA).encode()


@pytest.mark.parametrize("spec", [LLAMA, MLA, replace(LLAMA, scale_bytes=9, backend="x é")])
def test_wire_round_trip(spec: KVSpec) -> None:
    assert kv_spec_from_proto(kv_spec_to_proto(spec)) == spec


def test_wire_block_bytes_are_checked() -> None:
    message = kv_spec_to_proto(LLAMA)
    message.block_bytes += 1
    with pytest.raises(LayoutError, match="block_bytes"):
        kv_spec_from_proto(message)
