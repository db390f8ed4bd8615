"""How the KV of one block lies in memory, as a value that is compared and never interpreted.

The server needs only `block_bytes`; the other fields keep apart models whose bytes must not mix.
"""

import re
from dataclasses import dataclass, fields
from typing import Any

from radixkv.wire.limits import MAX_BLOCK_SIZE
from radixkv.wire.model_config import DTYPE_BYTES

LAYOUTS = ("LKHTD",)
MAX_LAYERS = 1024
MAX_KV_HEADS = 1024
MAX_HEAD_DIM = 16_384
MAX_SCALE_BYTES = 1 << 30
MAX_BACKEND_CHARS = 200
MAX_BLOCK_BYTES = 1 << 32
MAX_NUMBER_CHARS = 20


class LayoutError(ValueError):
    """A KVSpec whose fields are out of range or contradict each other; the message names one."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Geometry of one block, all layers together. Raises `LayoutError` when built from bad values.

    `layout` "LKHTD" is [layer][K|V][kv head][token][head dim]; `scale_bytes` is a plane behind it.
    `value_head_dim` 0 means no separate values (MLA: one latent kv head).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: str
    block_size: int
    layout: str = "LKHTD"
    scale_bytes: int = 0
    backend: str = ""

    def __post_init__(self) -> None:
        _check_range("num_layers", self.num_layers, 1, MAX_LAYERS)
        _check_range("num_kv_heads", self.num_kv_heads, 1, MAX_KV_HEADS)
        _check_range("head_dim", self.head_dim, 1, MAX_HEAD_DIM)
        _check_range("value_head_dim", self.value_head_dim, 0, MAX_HEAD_DIM)
        _check_range("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        _check_range("scale_bytes", self.scale_bytes, 0, MAX_SCALE_BYTES)
        _check_choice("dtype", self.dtype, tuple(DTYPE_BYTES))
        _check_choice("layout", self.layout, LAYOUTS)
        if len(self.backend) > MAX_BACKEND_CHARS or not self.backend.isprintable():
            raise LayoutError(
                f"kv_spec.backend must be at most {MAX_BACKEND_CHARS} printable characters"
            )
        if self.value_head_dim == 0 and self.num_kv_heads != 1:
            raise LayoutError(
                "kv_spec.num_kv_heads must be 1 when value_head_dim is 0 (MLA latent), "
                f"not {self.num_kv_heads}"
            )
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise LayoutError(
                f"kv_spec.block_bytes is {self.block_bytes}, at most {MAX_BLOCK_BYTES} are allowed"
            )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, keys and values, and the plane of scales."""
        row = (self.head_dim + self.value_head_dim) * DTYPE_BYTES[self.dtype]
        rows = self.num_layers * self.num_kv_heads * self.block_size
        return rows * row + self.scale_bytes

    def differences(self, other: "KVSpec") -> list[str]:
        """Fields in which two specs differ, as "head_dim is 64, not 128" (ours first)."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return [
            f"{name} is {mine!r}, not {theirs!r}" for name, mine, theirs in pairs if mine != theirs
        ]

    def encode(self) -> bytes:
        """Canonical bytes for the namespace: equal exactly when the specs are equal."""
        parts = []
        for field in fields(self):
            value = str(getattr(self, field.name)).encode()
            parts.append(b"%s=%d:%s;" % (field.name.encode(), len(value), value))
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> "KVSpec":
        """The spec that `encode` gives exactly these bytes for; raises `LayoutError`."""
        values: dict[str, Any] = {}
        at = 0
        for field in fields(cls):
            header = re.compile(rb"%s=(\d{1,4}):" % field.name.encode()).match(data, at)
            if header is None:
                raise LayoutError(f"encoded KVSpec has no {field.name} at byte {at}")
            start = header.end()
            text = data[start : start + int(header[1])].decode(errors="replace")
            values[field.name] = _number(field.name, text) if field.type is int else text
            at = start + int(header[1]) + 1
        spec = cls(**values)
        if spec.encode() != data:
            raise LayoutError("encoded KVSpec is not in its canonical form")
        return spec


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_NUMBER_CHARS):
        raise LayoutError(f"kv_spec.{name} must be a whole number, not {text[:20]!r}")
    return int(text)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise LayoutError(f"kv_spec.{name} must be a whole number {low}–{high}, not {value!r}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise LayoutError(f"kv_spec.{name} must be one of {', '.join(choices)}, not {value!r}")
