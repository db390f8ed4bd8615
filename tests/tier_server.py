"""A real server with tiers, and workers whose every block tells what it holds."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixkv_client import Client
from tests.fingerprints import BLOCK_SIZE, KV_SPEC, NUM_HEADS, NUM_LAYERS, SequenceKV
from tests.server_process import ServerProcess

MODEL = "tiny"


def spec_options(directory: Path) -> list[str]:
    """Options that fix the pool to KV_SPEC."""
    config = directory / "config.json"
    config.write_text(
        json.dumps(
            {
                "num_hidden_layers": NUM_LAYERS,
                "num_attention_heads": NUM_HEADS,
                "num_key_value_heads": NUM_HEADS,
                "hidden_size": NUM_HEADS * KV_SPEC.head_dim,
                "head_dim": KV_SPEC.head_dim,
            }
        )
    )
    return ["--kv-spec", f"{config}:{KV_SPEC.dtype}", "--block-size", str(BLOCK_SIZE)]


def tiered_server(directory: Path, gpu: int, cpu: int = 0, nvme: int = 0, *options: str) -> Any:
    """A server whose tiers have so many blocks; nvme in `directory`. Checks its invariants."""
    chosen = spec_options(directory) + ["--check-invariants", *options]
    if cpu:
        chosen += ["--cpu-blocks", str(cpu)]
    if nvme:
        chosen += ["--nvme-path", str(directory / "nvme"), "--nvme-blocks", str(nvme)]
    return ServerProcess(*chosen, gpu_blocks=gpu)


def connect(server: ServerProcess, **options: Any) -> Client:
    """A worker of the tiny model."""
    return Client.connect(server.socket_dir, model=MODEL, kv_spec=KV_SPEC, **options)


class TierWorker:
    """Serves prompts through one client: checks every cached token, computes the rest."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.cached_tokens = 0
        self.queried_tokens = 0
        self.from_below = 0

    def serve(self, prompt: Sequence[int], **options: Any) -> int:
        """One request; returns the cached tokens."""
        options = {"capacity_wait_ms": 30_000, "timeout": 60.0} | options
        with self.client.acquire(list(prompt), **options) as lease:
            cached: int = lease.cached_tokens
            kv = SequenceKV(self.client.pool.as_numpy(), MODEL.encode(), prompt)
            table = list(lease.block_table)
            kv.check(table, 0, cached)
            kv.write(table, cached, len(prompt))
            lease.commit(len(prompt))
            kv.check(table, 0, len(prompt))
            below = lease.onboarding
            if below is not None:
                self.from_below += below.cpu_tokens + below.nvme_tokens + below.remote_tokens
        self.cached_tokens += cached
        self.queried_tokens += len(prompt)
        return cached


def prompts(count: int, blocks: int, seed: int = 1) -> list[list[int]]:
    """Prompts of so many blocks and a token; every second shares its first half with another."""
    chance = random.Random(seed)
    length = blocks * BLOCK_SIZE + 1
    made: list[list[int]] = []
    for number in range(count):
        prompt = [chance.randrange(50_000) for _ in range(length)]
        if number % 2 and made:
            half = length // 2
            prompt[:half] = chance.choice(made)[:half]
        made.append(prompt)
    return made
