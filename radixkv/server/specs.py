"""KV specs by name, and from a Hugging Face config.json."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixkv.pools.layout import KVSpec, LayoutError
from radixkv.wire.model_config import DTYPE_BYTES, ModelConfigError, kv_geometry

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
    try:
        geometry = kv_geometry(config, dtype)
        return KVSpec(
            geometry.num_layers,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.value_head_dim,
            geometry.dtype,
            block_size,
        )
    except (ModelConfigError, LayoutError) as error:
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
