"""KVSpec: how the KV of one block lies in memory, as the client declares it in Hello."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixkv.v1 import session_pb2 as pb
from radixkv_client.errors import InvalidArgument

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "int8": 1}
LAYOUT = "LKHTD"
# Families whose state is not a KV per token, so that no prefix of blocks can stand for it.
_STATE_SPACE = ("mamba", "mamba2", "falcon_mamba", "jamba", "rwkv", "zamba", "zamba2", "bamba")


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
    def from_hf_config(
        cls, config: Mapping[str, Any], *, dtype: str = "", block_size: int = 16, backend: str = ""
    ) -> "KVSpec":
        """From a Hugging Face `config.json`; `dtype` overrides the config's.

        Raises InvalidArgument naming the missing key, or the family that has no KV per token.
        """
        config = config.get("text_config", config)
        family = str(config.get("model_type", ""))
        if family in _STATE_SPACE:
            raise InvalidArgument(f"model_type {family!r}: state-space models have no KV per token")
        dtype = dtype or str(config.get("dtype") or config.get("torch_dtype") or "")
        dtype = dtype.removeprefix("torch.")
        if not dtype:
            raise InvalidArgument("config.json has no torch_dtype; pass dtype")
        num_heads = _required(config, "num_attention_heads")
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        if config.get("kv_lora_rank"):
            num_kv_heads = 1
            head_dim = int(config["kv_lora_rank"]) + _required(config, "qk_rope_head_dim")
            value_head_dim = 0
        else:
            head_dim = int(config.get("head_dim") or _required(config, "hidden_size") // num_heads)
            value_head_dim = head_dim
        return cls(
            num_layers=_required(config, "num_hidden_layers"),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            dtype=dtype,
            block_size=block_size,
            backend=backend,
        )


def _required(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument(f"config.json: {key} is {value!r}, must be a positive integer")
    return value
