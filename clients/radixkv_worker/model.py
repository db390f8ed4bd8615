"""A Llama-family forward pass over a ragged batch of tokens.

The model does not know where KV lives: the caller's `attention` gets the new tokens' queries, keys
and values of each layer, keeps the latter two where it likes, and answers.

Rows are independent bit for bit in float32: a token's logits do not depend on which other tokens
are in the batch, for batches are padded to MIN_ROWS rows (see radixkv_kernels.attention).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, pad, silu

from radixkv_kernels import MIN_ROWS
from radixkv_worker.config import ModelConfig

# (layer, queries [tokens, heads, head dim], keys and values [tokens, kv heads, head dim])
# -> [tokens, heads, head dim]
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [out, in]; `qkv` and `gate_up` are several matrices on top of each other."""

    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """Weights and the forward pass. Not changed by use, so threads may share it."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        """`tensors` by their Hugging Face names, all of one float dtype."""
        self.config = config
        self.embedding = tensors["model.embed_tokens.weight"]
        self.norm = tensors["model.norm.weight"]
        self.head = self.embedding if config.tie_embeddings else tensors["lm_head.weight"]
        self.layers = [_layer_weights(tensors, layer) for layer in range(config.num_layers)]
        self.dtype = self.embedding.dtype
        self._frequencies = torch.tensor(config.inverse_frequencies(), dtype=torch.float64)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention, logit_rows: Tensor
    ) -> Tensor:
        """One step. tokens, positions int64 [tokens]: ids and places in their sequences.

        Returns float32 logits [len(logit_rows), vocabulary] of the named rows of the batch.
        """
        config, count = self.config, len(tokens)
        missing = max(0, MIN_ROWS - count)
        hidden = embedding(pad(tokens, (0, missing)), self.embedding)
        cos, sin = self._rotation(positions)
        widths = [config.num_heads * config.head_dim, *2 * [config.num_kv_heads * config.head_dim]]
        for index, layer in enumerate(self.layers):
            normed = _rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
            parts = linear(normed, layer.qkv)[:count].split(widths, dim=1)
            q, k, v = (part.unflatten(1, (-1, config.head_dim)) for part in parts)
            attended = attention(index, _rotate(q, cos, sin), _rotate(k, cos, sin), v)
            hidden = hidden + linear(pad(attended.flatten(1), (0, 0, 0, missing)), layer.output)
            normed = _rms_norm(hidden, layer.mlp_norm, config.rms_norm_eps)
            gate, up = linear(normed, layer.gate_up).chunk(2, dim=1)
            hidden = hidden + linear(silu(gate) * up, layer.down)
        rows = pad(hidden[logit_rows], (0, 0, 0, max(0, MIN_ROWS - len(logit_rows))))
        logits = linear(_rms_norm(rows, self.norm, config.rms_norm_eps), self.head)
        return logits[: len(logit_rows)].float()

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.to(torch.float64)[:, None, None] * self._frequencies
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def _layer_weights(tensors: Mapping[str, Tensor], layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    attention = [tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    mlp = [tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    return LayerWeights(
        input_norm=tensors[f"{prefix}input_layernorm.weight"],
        qkv=torch.cat(attention),
        output=tensors[f"{prefix}self_attn.o_proj.weight"],
        mlp_norm=tensors[f"{prefix}post_attention_layernorm.weight"],
        gate_up=torch.cat(mlp),
        down=tensors[f"{prefix}mlp.down_proj.weight"],
    )


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights, as Hugging Face names them, in canonical order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in (
                ("input_layernorm", (hidden,)),
                ("self_attn.q_proj", (heads, hidden)),
                ("self_attn.k_proj", (kv_heads, hidden)),
                ("self_attn.v_proj", (kv_heads, hidden)),
                ("self_attn.o_proj", (hidden, heads)),
                ("post_attention_layernorm", (hidden,)),
                ("mlp.gate_proj", (inner, hidden)),
                ("mlp.up_proj", (inner, hidden)),
                ("mlp.down_proj", (hidden, inner)),
            )
        }
    return shapes
