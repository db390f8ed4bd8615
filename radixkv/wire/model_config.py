"""The KV geometry of a Hugging Face model config, for the server and for its clients.

Sliding-window layers are stored in full. Models whose state is not a KV per token (state-space,
recurrent, linear attention) cannot be cached by prefix blocks and are refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "int8": 1}

# Families whose layers (all or some) keep a recurrent state instead of keys and values.
RECURRENT_TYPES = (
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
    "mamba", "mamba2", "minimax", "nemotron_h", "plamo2", "qwen3_next", "recurrent_gemma", "retnet",
    "rwkv", "xlstm", "zamba", "zamba2",
)  # fmt: skip
RECURRENT_KEYS = (
    "ssm_cfg", "ssm_state_size", "mamba_d_state", "mamba_n_heads", "state_size", "lru_width",
    "linear_attn_config", "linear_num_key_heads", "linear_num_value_heads", "conv_L_cache",
)  # fmt: skip
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
LAYER_TYPE_KEYS = ("layer_types", "layers_block_type", "block_types")

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
}


class ModelConfigError(ValueError):
    """No KV geometry can be made of this; the message names the key or the family."""


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What a model's attention layers store per token; `value_head_dim` 0 = no values (MLA)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: str


def kv_geometry(config: Mapping[str, Any], dtype: str = "") -> KVGeometry:
    """The geometry of a config.json; `dtype` overrides its own. Raises ModelConfigError."""
    inner = config.get("text_config")
    merged = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
    _refuse_unsuitable(merged)
    kv_heads, head_dim, value_head_dim = _geometry(merged)
    num_layers = _integer(merged, *_NAMES["layers"])
    return KVGeometry(num_layers, kv_heads, head_dim, value_head_dim, dtype or _dtype(merged))


def _refuse_unsuitable(config: Mapping[str, Any]) -> None:
    model_type = str(config.get("model_type", ""))[:80]
    kinds = [kind for key in LAYER_TYPE_KEYS for kind in _list(config.get(key))]
    others = [str(kind)[:40] for kind in kinds if kind not in ATTENTION_LAYERS]
    keys = [key for key in RECURRENT_KEYS if config.get(key)]
    reason = ""
    if others:
        reason = f"it has {others[0]!r} layers"
    elif not kinds and (model_type in RECURRENT_TYPES or model_type.startswith("rwkv")):
        reason = "it keeps a recurrent state"
    elif not kinds and keys:
        reason = f"{keys[0]} means state-space, recurrent or linear-attention layers"
    if reason:
        raise ModelConfigError(
            f"model type {model_type!r} cannot be cached by prefix blocks: {reason}; "
            "only attention models with a KV per token can"
        )
    if config.get("is_encoder_decoder"):
        raise ModelConfigError(f"model type {model_type!r} is an encoder-decoder, not supported")
    if "block_configs" in config:
        raise ModelConfigError(f"model type {model_type!r} has layers of different geometry")


def _geometry(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """KV heads, head dim of keys, head dim of values."""
    if config.get("kv_lora_rank"):  # MLA: one latent and the rotary part, no values
        return 1, _integer(config, "kv_lora_rank") + _integer(config, "qk_rope_head_dim"), 0
    heads = _integer(config, *_NAMES["heads"])
    if config.get("head_dim"):
        head_dim = _integer(config, "head_dim")
    else:
        hidden = _integer(config, *_NAMES["hidden"])
        if hidden % heads:
            raise ModelConfigError(f"hidden size {hidden} is not a multiple of {heads} heads")
        head_dim = hidden // heads
    value_head_dim = _integer(config, "v_head_dim") if config.get("v_head_dim") else head_dim
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1, head_dim, value_head_dim
    if any(config.get(name) is not None for name in _NAMES["kv_heads"]):
        return _integer(config, *_NAMES["kv_heads"]), head_dim, value_head_dim
    return heads, head_dim, value_head_dim


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _integer(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelConfigError(f"{name} must be a positive whole number, not {str(value)[:60]}")
        return value
    raise ModelConfigError(f"{names[0]} is missing")


def _dtype(config: Mapping[str, Any]) -> str:
    value = config.get("torch_dtype") or config.get("dtype")
    if value is None or value == "auto":
        raise ModelConfigError(f"torch_dtype is missing: add one, e.g. :{next(iter(DTYPE_BYTES))}")
    name = str(value).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelConfigError(f"torch_dtype {name[:40]!r} is not one of {', '.join(DTYPE_BYTES)}")
    return name
