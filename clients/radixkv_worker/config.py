"""The shape of a Llama-family model, from a Hugging Face `config.json`."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "mistral", "smollm2")


class UnsupportedModel(ValueError):
    """The directory holds no model this worker can run; the message names what is wrong."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequencies below the original context are kept, those above divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes count elements. `eos_tokens` end a generation; `rope_scaling` None = none."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    bos_token: int | None = None
    eos_tokens: tuple[int, ...] = ()
    rope_scaling: Llama3Scaling | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"{self.num_heads} heads, {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim {self.head_dim} is odd")

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that `from_hf` reads back."""
        scaling = None
        if self.rope_scaling is not None:
            scaling = {
                "rope_type": "llama3",
                "factor": self.rope_scaling.factor,
                "low_freq_factor": self.rope_scaling.low_freq_factor,
                "high_freq_factor": self.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": self.rope_scaling.original_max_positions,
            }
        return {
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": self.bos_token,
            "eos_token_id": list(self.eos_tokens),
        }

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read a `config.json`; raises UnsupportedModel naming the key."""
        _refuse_unsupported(config)
        num_heads = _integer(config, "num_attention_heads")
        hidden_size = _integer(config, "hidden_size")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        return cls(
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=_integer(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            max_positions=_integer(config, "max_position_embeddings"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            bos_token=config.get("bos_token_id"),
            eos_tokens=_token_ids(config.get("eos_token_id")),
            rope_scaling=_rope_scaling(rope),
        )

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read `config.json` and, for the tokens that end a text, `generation_config.json`."""
        path = directory / "config.json"
        if not path.is_file():
            raise UnsupportedModel(f"{directory} has no config.json")
        config = cls.from_hf(json.loads(path.read_text()))
        path = directory / "generation_config.json"
        if path.is_file():
            eos = _token_ids(json.loads(path.read_text()).get("eos_token_id"))
            config = replace(config, eos_tokens=eos or config.eos_tokens)
        return config

    def identity(self) -> bytes:
        """Canonical bytes of everything that shapes the KV, for the model fingerprint."""
        fields = asdict(self)
        for name in ("bos_token", "eos_tokens", "max_positions"):
            del fields[name]
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    def inverse_frequencies(self) -> list[float]:
        """RoPE: radians per position of each pair of dimensions, scaling applied."""
        half = self.head_dim // 2
        plain = [self.rope_theta ** (-index / half) for index in range(half)]
        return [_scaled(frequency, self.rope_scaling) for frequency in plain]


def _scaled(frequency: float, scaling: Llama3Scaling | None) -> float:
    if scaling is None:
        return frequency
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
    return frequency * (smooth + (1 - smooth) / scaling.factor)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(f"model_type {family!r} is not one of {FAMILIES}")
    for key in ("attention_bias", "mlp_bias", "sliding_window", "quantization_config"):
        if config.get(key):
            raise UnsupportedModel(f"{key} is set; this worker does not do it")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {config['hidden_act']!r} is not 'silu'")


def _rope_scaling(rope: Mapping[str, Any]) -> Llama3Scaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModel(f"rope_scaling of type {kind!r} is neither 'default' nor 'llama3'")
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(rope["original_max_position_embeddings"]),
    )


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"config.json: {key} is {value!r}, must be a positive integer")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
