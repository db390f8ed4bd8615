"""KV specs by built-in name and from Hugging Face configs."""

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.pools.layout import KVSpec
from radixkv.server.specs import BUILT_IN, SpecError, load_spec, spec_from_config
from radixkv.wire.model_config import RECURRENT_TYPES

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_spec_is_valid(name: str) -> None:
    assert load_spec(name, 16).block_bytes > 0
    assert load_spec(name.upper() + ":float32", 32).dtype == "float32"


def test_config_gives_the_same_as_the_built_in_name(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert load_spec(str(path), 16) == load_spec("llama-3-8b", 16)
    assert load_spec(str(tmp_path), 16) == load_spec("llama-3-8b", 16)
    assert load_spec(f"{path}:fp8_e4m3", 16).dtype == "fp8_e4m3"


def test_latent_attention() -> None:
    config = LLAMA | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert spec_from_config(config, 16) == KVSpec(32, 1, 576, 0, "bfloat16", 16)


def test_heads_and_dims_as_various_models_write_them() -> None:
    no_groups = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert spec_from_config(no_groups, 16).num_kv_heads == 32
    assert spec_from_config(LLAMA | {"head_dim": 256}, 16).head_dim == 256
    assert spec_from_config(LLAMA | {"v_head_dim": 64}, 16).value_head_dim == 64
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "dtype": "torch.float16"}
    assert spec_from_config(gpt2, 16) == KVSpec(12, 12, 64, 64, "float16", 16)
    falcon = gpt2 | {"multi_query": True, "num_kv_heads": 71}
    assert spec_from_config(falcon, 16).num_kv_heads == 1


def test_text_part_of_a_multimodal_config() -> None:
    config = {"model_type": "llava", "torch_dtype": "float16", "text_config": LLAMA}
    assert spec_from_config(config, 16).dtype == "bfloat16"


def test_sliding_window_models_are_stored_in_full() -> None:
    config = LLAMA | {"layer_types": ["sliding_attention", "full_attention"] * 16}
    assert spec_from_config(config, 16).num_layers == 32


@pytest.mark.parametrize("model_type", [*RECURRENT_TYPES, "rwkv6"])
def test_recurrent_models_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(SpecError, match=model_type):
        spec_from_config(LLAMA | {"model_type": model_type}, 16)


@pytest.mark.parametrize(
    "extra",
    [
        {"layer_types": ["full_attention", "linear_attention"]},
        {"layers_block_type": ["mamba", "attention"]},
        {"mamba_d_state": 16},
        {"linear_attn_config": {"kda_layers": [1]}},
    ],
)
def test_recurrent_layers_are_found_in_unknown_models(extra: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="'brand_new' cannot be cached"):
        spec_from_config(LLAMA | {"model_type": "brand_new"} | extra, 16)


def test_hybrid_family_with_attention_layers_only_is_accepted() -> None:
    config = LLAMA | {"model_type": "granitemoehybrid", "layer_types": ["attention"] * 32}
    assert spec_from_config(config | {"mamba_d_state": 256}, 16).num_layers == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers must be a positive whole number"),
        ({"num_key_value_heads": [8, 4]}, "num_key_value_heads must be"),
        ({"hidden_size": 4097}, "not a multiple"),
        ({"num_attention_heads": 0}, "num_attention_heads must be"),
        ({"torch_dtype": None}, "torch_dtype is missing.*:float32"),
        ({"torch_dtype": "float8_weird"}, "float8_weird"),
        ({"num_hidden_layers": 10**12}, "num_layers"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"block_configs": []}, "different geometry"),
    ],
)
def test_configs_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec_from_config(LLAMA | change, 16)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 200_000, "{}"])
def test_malformed_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(SpecError, match="kv_spec .*config.json"):
        load_spec(str(path), 16)


def test_binary_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not valid JSON"):
        load_spec(str(path), 16)
    with pytest.raises(SpecError, match="cannot read"):
        load_spec(str(tmp_path / "absent.json"), 16)
    with pytest.raises(SpecError, match="larger than"):
        load_spec("/dev/zero", 16)


def test_unknown_names_come_with_a_hint() -> None:
    with pytest.raises(SpecError, match="did you mean llama-3-8b"):
        load_spec("llama3-8b", 16)
    with pytest.raises(SpecError, match="built-in are"):
        load_spec("zzz", 16)
    with pytest.raises(SpecError, match="dtype must be one of"):
        load_spec("llama-3-8b:float64", 16)
