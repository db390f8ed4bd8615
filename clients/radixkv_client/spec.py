"""KVSpec: how the KV of one block lies in memory, as the client declares it in Hello."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.v1 import session_pb2 as pb
from radixkv.wire.model_config import DTYPE_BYTES, ModelConfigError, kv_geometry
from radixkv_client.errors import InvalidArgument

LAYOUT = "LKHTD"


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Geometry of one block: [layer][K|V][kv head][token][head dim], then scales if quantized.

    `value_head_dim` 0 means no separate values (MLA latent). Sizes count elements, `scale_bytes`
    bytes per block. Raises InvalidArgument naming the field.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: str
    block_size: int = 16
    layout: str = LAYOUT
    scale_bytes: int = 0
    backend: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidArgument(f"kv_spec.dtype {self.dtype!r}: not one of {list(DTYPE_BYTES)}")
        for field in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, field) < 1:
                raise InvalidArgument(f"kv_spec.{field} {getattr(self, field)}: must be positive")
        for field in ("value_head_dim", "scale_bytes"):
            if getattr(self, field) < 0:
                raise InvalidArgument(f"kv_spec.{field} {getattr(self, field)}: is negative")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers and scales together."""
        per_token = (self.head_dim + self.value_head_dim) * DTYPE_BYTES[self.dtype]
        return self.num_layers * self.num_kv_heads * self.block_size * per_token + self.scale_bytes

    def to_proto(self) -> pb.KVSpec:
        """The message that Hello carries."""
        return pb.KVSpec(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
            dtype=self.dtype,
            block_size=self.block_size,
            layout=self.layout,
            scale_bytes=self.scale_bytes,
            backend=self.backend,
            block_bytes=self.block_bytes,
        )

    @classmethod
    def from_proto(cls, spec: pb.KVSpec) -> "KVSpec":
        """From the message; raises InvalidArgument, also if it contradicts itself."""
        made = cls(
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
            spec.value_head_dim,
            spec.dtype,
            spec.block_size,
            spec.layout,
            spec.scale_bytes,
            spec.backend,
        )
        if made.block_bytes != spec.block_bytes:
            raise InvalidArgument(
                f"kv_spec.block_bytes {spec.block_bytes}: the other fields make it"
                f" {made.block_bytes}"
            )
        return made

    @classmethod
    def from_hf_config(
        cls, config: Mapping[str, Any], *, dtype: str = "", block_size: int = 16, backend: str = ""
    ) -> "KVSpec":
        """From a Hugging Face `config.json`; `dtype` overrides the config's.

        Raises InvalidArgument naming the missing key, or the family that has no KV per token.
        """
        try:
            geometry = kv_geometry(config, dtype)
        except ModelConfigError as error:
            raise InvalidArgument(str(error)) from None
        return cls(
            geometry.num_layers,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.value_head_dim,
            geometry.dtype,
            block_size,
            backend=backend,
        )
