"""The worker's model: config, weights, forward pass, and independence of rows."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixkv_client import KVSpec
from radixkv_worker import reference, weights
from radixkv_worker.config import Llama3Scaling, ModelConfig, UnsupportedModel
from radixkv_worker.gguf_model import _unpermute
from radixkv_worker.paged import PagedCache
from tests.same_bits import require_row_independence
from tests.worker_rig import TINY, random_prompt, tiny_directory, tiny_model, tiny_tensors


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def test_config_survives_a_round_trip() -> None:
    assert ModelConfig.from_hf(TINY.to_hf()) == TINY


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"attention_bias": True}, "attention_bias"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"num_key_value_heads": 4}, "KV heads"),
    ],
)
def test_unsupported_configs_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_hf(TINY.to_hf() | change)


def test_llama3_rope_scaling() -> None:
    """Published rule: short wavelengths are kept, long ones divided, smooth between."""
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 512)
    config = ModelConfig.from_hf(TINY.to_hf() | {"head_dim": 64})
    for index, value in enumerate(config.inverse_frequencies()):
        plain = config.rope_theta ** (-2 * index / 64)
        wavelength = 2 * math.pi / plain
        if wavelength < 512 / 4:
            want = plain
        elif wavelength > 512 / 1:
            want = plain / 8
        else:
            smooth = (512 / wavelength - 1) / (4 - 1)
            want = (1 - smooth) * plain / 8 + smooth * plain
        assert value == pytest.approx(want, rel=1e-12), index
    assert config.rope_scaling == scaling


def test_forward_equals_a_plain_one() -> None:
    """Against a forward pass written out token by token in float64."""
    loaded = tiny_model()
    prompt = random_prompt(30)
    logits = reference.ContiguousCache(loaded.model, 30).append(prompt)
    want = plain_logits(prompt)
    torch.testing.assert_close(logits.double(), want, atol=2e-4, rtol=1e-4)


def plain_logits(tokens: tuple[int, ...]) -> torch.Tensor:
    w = {name: tensor.double() for name, tensor in tiny_tensors().items()}
    frequencies = torch.tensor(TINY.inverse_frequencies(), dtype=torch.float64)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean() + TINY.rms_norm_eps).sqrt() * weight

    def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
        half = TINY.head_dim // 2
        turned = torch.view_as_complex(torch.stack((x[:, :half], x[:, half:]), -1))
        turned = turned * torch.polar(torch.ones(half, dtype=torch.float64), position * frequencies)
        return torch.cat((turned.real, turned.imag), -1)

    caches: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(TINY.num_layers)]
    for position, token in enumerate(tokens):
        x = w["model.embed_tokens.weight"][token]
        for layer, cache in enumerate(caches):
            p = f"model.layers.{layer}."
            h = norm(x, w[p + "input_layernorm.weight"])
            q, k, v = (
                (w[f"{p}self_attn.{name}_proj.weight"] @ h).view(-1, TINY.head_dim)
                for name in "qkv"
            )
            cache.append((rotate(k, position), v))
            heads = []
            for head, query in enumerate(rotate(q, position)):
                kv_head = head // (TINY.num_heads // TINY.num_kv_heads)
                scores = torch.stack([query @ key[kv_head] for key, _ in cache])
                shares = (scores * TINY.head_dim**-0.5).softmax(0)
                values = torch.stack([value[kv_head] for _, value in cache])
                heads.append(shares @ values)
            x = x + w[p + "self_attn.o_proj.weight"] @ torch.cat(heads)
            h = norm(x, w[p + "post_attention_layernorm.weight"])
            gate, up = w[p + "mlp.gate_proj.weight"] @ h, w[p + "mlp.up_proj.weight"] @ h
            x = x + w[p + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
    return w["model.embed_tokens.weight"] @ norm(x, w["model.norm.weight"])


def test_rows_have_the_same_bits_in_any_batch() -> None:
    require_row_independence()
    model = tiny_model().model
    tokens, positions = torch.tensor(random_prompt(40)), torch.arange(40)

    def nothing(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q * 0.5 + k.repeat_interleave(3, 1)

    whole = model.forward(tokens, positions, nothing, torch.arange(40))
    for start, end in ((0, 1), (1, 2), (5, 8), (0, 16), (17, 40)):
        part = model.forward(
            tokens[start:end], positions[start:end], nothing, torch.arange(end - start)
        )
        assert torch.equal(part, whole[start:end])


class LocalPool:
    """A pool of this process with the views that a mapped one has, full of rubbish."""

    def __init__(self, num_blocks: int) -> None:
        self.kv_spec = KVSpec(TINY.num_layers, TINY.num_kv_heads, TINY.head_dim, 16, "float32")
        shape = (num_blocks + 1, TINY.num_layers, 2, TINY.num_kv_heads, 16, TINY.head_dim)
        self.blocks = torch.full(shape, math.nan)

    def torch_view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.blocks[:, layer, 0], self.blocks[:, layer, 1]


@pytest.mark.parametrize("cuts", [[64], [48, 64, 69], [1, 2, 3, 40], list(range(1, 70))])
def test_kv_and_logits_have_the_same_bits_wherever_the_prefix_is_cut(cuts: list[int]) -> None:
    """So a hit, a chunk or a resumed sequence cannot change an answer in float32."""
    require_row_independence()
    model, tokens = tiny_model().model, torch.tensor(random_prompt(70))
    results = []
    for edges, table in (([0, 70], [3, 1, 5, 2, 4]), ([0, *cuts, 70], [2, 5, 1, 3, 4])):
        pool = LocalPool(5)
        cache = PagedCache(pool, TINY.num_layers)
        logits = []
        for start, end in itertools.pairwise(edges):
            attention = cache.attention([table], [(start, end)])
            rows = torch.arange(end - start)
            logits.append(
                model.forward(tokens[start:end], torch.arange(start, end), attention, rows)
            )
        kv = pool.blocks[table].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[..., :70, :]
        results.append((torch.cat(logits), kv))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_directory_gives_the_same_model(tmp_path: Path) -> None:
    loaded, built = weights.load(str(tiny_directory(tmp_path))), tiny_model()
    assert loaded.fingerprint == built.fingerprint
    assert loaded.model.config == TINY
    prompt = random_prompt(12)
    assert reference.greedy(loaded.model, prompt, 5) == reference.greedy(built.model, prompt, 5)
    text = "Hällo 🎉\n"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.tokenizer.encode_chat(messages) == built.tokenizer.encode_chat(messages)


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    tiny_directory(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    assert weights.load(str(tmp_path)).model.config.eos_tokens == (3, 7)


def test_fingerprint_follows_weights_config_and_dtype() -> None:
    base = weights.fingerprint(TINY, tiny_tensors())
    assert base == weights.fingerprint(TINY, tiny_tensors())
    assert base != weights.fingerprint(TINY, tiny_tensors(seed=1))
    wide = {name: tensor.bfloat16() for name, tensor in tiny_tensors().items()}
    assert base != weights.fingerprint(TINY, wide)
    other = ModelConfig.from_hf(TINY.to_hf() | {"rope_theta": 5e5})
    assert base != weights.fingerprint(other, tiny_tensors())
    renamed = ModelConfig.from_hf(TINY.to_hf() | {"eos_token_id": 5})
    assert base == weights.fingerprint(renamed, tiny_tensors())


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_directories_are_refused(tmp_path: Path, missing: str) -> None:
    tiny_directory(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(UnsupportedModel, match=missing.replace("model", "")):
        weights.load(str(tmp_path))


def test_wrong_weights_are_refused(tmp_path: Path) -> None:
    tiny_directory(tmp_path)
    path = tmp_path / "model.safetensors"
    good = load_file(path)
    save_file({**good, "model.layers.0.self_attn.q_proj.bias": torch.zeros(1)}, path)
    with pytest.raises(UnsupportedModel, match="bias"):
        weights.load(str(tmp_path))
    save_file({**good, "model.norm.weight": torch.zeros(3)}, path)
    with pytest.raises(UnsupportedModel, match="model.norm.weight"):
        weights.load(str(tmp_path))
    # Old checkpoints carry these; they mean nothing here.
    save_file({**good, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, path)
    assert weights.load(str(tmp_path)).fingerprint == tiny_model().fingerprint


def test_gguf_row_order_is_undone() -> None:
    weight = torch.arange(2 * 8 * 3.0).view(16, 3)
    interleaved = weight.view(2, 2, 4, 3).transpose(1, 2).reshape(16, 3)
    assert torch.equal(_unpermute(interleaved, 2), weight)
