"""Weights of a Llama-family model: a safetensors directory, or SmolLM2-135M from its package.

A directory holds config.json, *.safetensors, tokenizer.json and, for chat, tokenizer_config.json
with `chat_template`; all as Hugging Face lays them out. Nothing is cached on disk; `save` writes
such a directory where the caller wants one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixkv_worker import gguf_model
from radixkv_worker.config import ModelConfig, UnsupportedModel
from radixkv_worker.model import Model, tensor_shapes
from radixkv_worker.tokenizer import Tokenizer

SMOLLM2 = "smollm2-135m"
_UNUSED = ("rotary_emb.inv_freq",)  # in old checkpoints; the model computes them


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `fingerprint` names its config and weights, whatever it is called."""

    name: str
    model: Model
    tokenizer: Tokenizer
    fingerprint: str


def load(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load a directory, or "smollm2-135m"; raises UnsupportedModel naming what is missing."""
    if name == SMOLLM2:
        reader = gguf_model.open_package()
        config, tokenizer = gguf_model.config(reader), gguf_model.tokenizer(reader)
        tensors = gguf_model.tensors(reader, config, dtype)
    else:
        directory = Path(name)
        config = ModelConfig.from_directory(directory)
        tokenizer = Tokenizer.from_directory(directory)
        tensors = _read_tensors(directory, config, dtype)
    return LoadedModel(
        name=name,
        model=Model(config, tensors),
        tokenizer=tokenizer,
        fingerprint=fingerprint(config, tensors),
    )


def save(directory: Path, model_name: str = SMOLLM2, dtype: torch.dtype = torch.float32) -> None:
    """Write a packaged model as a directory, so that several processes load it fast."""
    if model_name != SMOLLM2:
        raise UnsupportedModel(f"{model_name!r} is not a packaged model ({SMOLLM2!r} is)")
    reader = gguf_model.open_package()
    config = gguf_model.config(reader)
    tensors = gguf_model.tensors(reader, config, dtype)
    write_directory(directory, config, tensors)
    gguf_model.tokenizer(reader).save(directory)


def write_directory(directory: Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors; the tokenizer's files are the caller's."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_hf(), indent=1))
    save_file(dict(tensors), directory / "model.safetensors")


def fingerprint(config: ModelConfig, tensors: Mapping[str, Tensor]) -> str:
    """Hash of everything that shapes the KV: 32 hexadecimal digits. Reads all weights once."""
    digest = xxhash.xxh3_128(config.identity())
    for name in tensor_shapes(config):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_tensors(directory: Path, config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(f"{directory} has no *.safetensors")
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= load_file(path)
    shapes = tensor_shapes(config)
    for name in [name for name in tensors if name.endswith(_UNUSED)]:
        del tensors[name]
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)
    if odd := sorted(set(tensors) ^ set(shapes)):
        raise UnsupportedModel(f"{directory}: missing or unknown weights {odd[:4]}, {len(odd)} all")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise UnsupportedModel(f"{name} is {tuple(tensors[name].shape)}, expected {shape}")
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}
