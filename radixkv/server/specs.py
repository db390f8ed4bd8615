"""KV specs by name, and from a Hugging Face config.json.

Sliding-window layers are stored in full. Models whose state is not a KV per token (state-space,
recurrent, linear attention) cannot be cached by prefix blocks and are refused by name.
"""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixkv.pools.layout import DTYPE_BYTES, KVSpec, LayoutError

MAX_CONFIG_BYTES = 4 << 20

# name: (layers, kv heads, head dim, value head dim); all bfloat16 unless a :DTYPE is given
BUILT_IN: dict[str, tuple[int, int, int, int]] = {
    "deepseek-v3": (61, 1, 576, 0),
    "gemma-2-9b": (42, 8, 256, 256),
    "llama-3-70b": (80, 8, 128, 128),
    "llama-3-8b": (32, 8, 128, 128),
    "llama-3.2-1b": (16, 8, 64, 64),
    "llama-3.2-3b": (28, 8, 128, 128),
    "mistral-7b": (32, 8, 128, 128),
    "mixtral-8x7b": (32, 8, 128, 128),
    "phi-4": (40, 10, 128, 128),
    "qwen2.5-0.5b": (24, 2, 64, 64),
    "qwen2.5-7b": (28, 4, 128, 128),
    "qwen2.5-72b": (80, 8, 128, 128),
    "qwen3-8b": (36, 8, 128, 128),
    "smollm2-135m": (30, 3, 64, 64),
}

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


class SpecError(ValueError):
    """No KVSpec can be made of this; the message says what is wrong and where."""


def load_spec(text: str, block_size: int) -> KVSpec:
    """The spec of "NAME[:DTYPE]" or "PATH/config.json[:DTYPE]"; raises `SpecError`."""
    name, colon, dtype = text.rpartition(":")
    if not colon or (dtype not in DTYPE_BYTES and Path(text).exists()):
        name, dtype = text, ""
    elif dtype not in DTYPE_BYTES:
        raise SpecError(f"kv_spec {text}: dtype must be one of {', '.join(DTYPE_BYTES)}")
    if name.lower() in BUILT_IN:
        geometry = BUILT_IN[name.lower()]
        try:
            return KVSpec(*geometry, dtype=dtype or "bfloat16", block_size=block_size)
        except LayoutError as error:
            raise SpecError(f"kv_spec {name}: {error}") from None
    if "/" not in name and not name.endswith(".json") and not Path(name).exists():
        close = difflib.get_close_matches(name.lower(), BUILT_IN, n=1)
        hint = f"did you mean {close[0]}?" if close else f"built-in are {', '.join(BUILT_IN)}"
        raise SpecError(f"kv_spec {name} is neither a built-in name nor a file; {hint}")
    path = Path(name)
    return spec_from_config(
        _read(path / "config.json" if path.is_dir() else path), block_size, dtype=dtype, where=name
    )


def spec_from_config(
    config: Mapping[str, Any], block_size: int, *, dtype: str = "", where: str = "config.json"
) -> KVSpec:
    """The spec of a Hugging Face model config; `dtype` overrides its own. Raises `SpecError`."""
    inner = config.get("text_config")
    merged = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
    try:
        _refuse_unsuitable(merged)
        kv_heads, head_dim, value_head_dim = _geometry(merged)
        return KVSpec(
            _integer(merged, *_NAMES["layers"]),
            kv_heads,
            head_dim,
            value_head_dim,
            dtype or _dtype(merged),
            block_size,
        )
    except (SpecError, LayoutError) as error:
        raise SpecError(f"kv_spec {where}: {error}") from None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise SpecError(f"kv_spec {path} is larger than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(text)
    except OSError as error:
        raise SpecError(f"kv_spec {path}: cannot read it: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"kv_spec {path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise SpecError(f"kv_spec {path} must hold a JSON object")
    return config


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
        raise SpecError(
            f"model type {model_type!r} cannot be cached by prefix blocks: {reason}; "
            "only attention models with a KV per token can"
        )
    if config.get("is_encoder_decoder"):
        raise SpecError(f"model type {model_type!r} is an encoder-decoder, not supported")
    if "block_configs" in config:
        raise SpecError(f"model type {model_type!r} has layers of different geometry")


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
            raise SpecError(f"hidden size {hidden} is not a multiple of {heads} heads")
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
            raise SpecError(f"{name} must be a positive whole number, not {str(value)[:60]}")
        return value
    raise SpecError(f"{names[0]} is missing")


def _dtype(config: Mapping[str, Any]) -> str:
    value = config.get("torch_dtype") or config.get("dtype")
    if value is None or value == "auto":
        raise SpecError(f"torch_dtype is missing: add one, e.g. :{next(iter(DTYPE_BYTES))}")
    name = str(value).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise SpecError(f"torch_dtype {name[:40]!r} is not one of {', '.join(DTYPE_BYTES)}")
    return name
