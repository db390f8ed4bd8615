"""A tiny random Llama and engines over a real pool, for tests of the reference worker."""

import queue
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from tokenizers import pre_tokenizers

from radixkv_client import Client
from radixkv_worker import cli, reference, weights
from radixkv_worker.config import Llama3Scaling, ModelConfig
from radixkv_worker.engine import Engine
from radixkv_worker.model import Model, tensor_shapes
from radixkv_worker.request import Delta, Done, Event, Failed, Request, RequestStats, SamplingParams
from radixkv_worker.sampling import Sampler
from radixkv_worker.scheduler import SchedulerLimits
from radixkv_worker.tokenizer import Tokenizer, byte_level_bpe

MAX_WAIT_S = 60.0
EOS = 0
CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

TINY = ModelConfig(
    vocab_size=260,
    hidden_size=48,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_positions=4096,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_embeddings=True,
    bos_token=None,
    eos_tokens=(EOS,),
    rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 512),
)


def tiny_tensors(config: ModelConfig = TINY, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights, large enough that the next token depends on the whole context."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        tensors[name] = values * 0.1 + 1 if "norm" in name else values * 0.3
    return tensors


def tiny_tokenizer() -> Tokenizer:
    """One token per byte, and some special ones."""
    special = ["<eos>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = byte_level_bpe([*special, *alphabet], [], special, single_digits=False)
    return Tokenizer(bpe, CHATML, {"bos_token": "", "eos_token": "<eos>"})


def tiny_model(seed: int = 0) -> weights.LoadedModel:
    """A model ready to run."""
    tensors = tiny_tensors(seed=seed)
    return weights.LoadedModel(
        "tiny", Model(TINY, tensors), tiny_tokenizer(), weights.fingerprint(TINY, tensors)
    )


def tiny_directory(directory: Path) -> Path:
    """The same model as a safetensors directory."""
    weights.write_directory(directory, TINY, tiny_tensors())
    tiny_tokenizer().save(directory)
    return directory


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Tokens that are neither special nor the end token."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(4, TINY.vocab_size, (length,), generator=generator).tolist())


@dataclass
class Result:
    """Collects one request's events; filled from the engine's thread."""

    events: "queue.SimpleQueue[Event]" = field(default_factory=queue.SimpleQueue)
    deltas: list[Delta] = field(default_factory=list)
    end: Done | Failed | None = None

    def wait(self, timeout_s: float = MAX_WAIT_S) -> "Result":
        """Wait for the last event."""
        deadline = time.monotonic() + timeout_s
        while self.end is None:
            self.next(max(0.0, deadline - time.monotonic()))
        return self

    def next(self, timeout_s: float = MAX_WAIT_S) -> Event:
        """Wait for one event; raises queue.Empty."""
        event = self.events.get(timeout=timeout_s)
        if isinstance(event, Delta):
            self.deltas.append(event)
        else:
            self.end = event
        return event

    def tokens(self, index: int = 0) -> list[int]:
        """All tokens of one sample."""
        return [token for d in self.deltas if d.index == index for token in d.tokens]

    def text(self, index: int = 0) -> str:
        """All text of one sample."""
        return "".join(d.text for d in self.deltas if d.index == index)

    @property
    def stats(self) -> RequestStats:
        """Statistics of a request that went well."""
        assert isinstance(self.end, Done), self.end
        return self.end.stats


class Worker:
    """An engine of its own session, as a worker process has; in this process for speed."""

    def __init__(
        self,
        socket_dir: Path,
        loaded: weights.LoadedModel,
        *,
        transport: str = "local",
        limits: SchedulerLimits | None = None,
        max_requests: int = 256,
    ) -> None:
        client = cli.connect(loaded, str(socket_dir), transport)
        self.engine = Engine(loaded, client, limits, max_requests)
        self._count = 0

    def __enter__(self) -> "Worker":
        self.engine.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.engine.stop()

    def submit(self, prompt: tuple[int, ...], **params: object) -> Result:
        """Queue a request; greedy and without an end token unless `params` say otherwise."""
        self._count += 1
        settings = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
        result = Result()
        request = Request(
            f"request-{self._count}", prompt, SamplingParams(**settings), time.monotonic()
        )
        self.engine.submit(request, result.events.put)
        return result

    def run(self, prompt: tuple[int, ...], **params: object) -> Result:
        """Submit and wait."""
        return self.submit(prompt, **params).wait()


def expected(loaded: weights.LoadedModel, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """The greedy answer without any cached prefix."""
    return reference.greedy(loaded.model, prompt, max_tokens)


def sampled(
    loaded: weights.LoadedModel, prompt: tuple[int, ...], params: SamplingParams, index: int
) -> list[int]:
    """One sample without any cached prefix."""
    sampler = Sampler(params, index)
    cache = reference.ContiguousCache(loaded.model, len(prompt) + params.max_tokens)
    tokens = [sampler.choose(cache.append(prompt))]
    while len(tokens) < params.max_tokens:
        tokens.append(sampler.choose(cache.append(tokens[-1:])))
    return tokens


def assert_idle(client: Client) -> None:
    """No lease is left, and the books balance."""
    stats = client.stats()
    books = stats.books
    assert (stats.num_leases, stats.num_waiting, books.leased, books.in_flight) == (0, 0, 0, 0)
    assert books.reserved + books.pinned + books.cached + books.free == books.total
