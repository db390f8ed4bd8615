"""A worker that keeps the movers busy, until it is killed.

    python -m bench.tiers_worker SOCKET_DIR SEED

It goes round a working set of prompts, several times what the gpu holds, so that nearly every
Acquire waits for blocks from below. Now and then it replaces one by a prompt nobody has asked with
before, whose blocks go down in their turn. It computes nothing.
"""

import sys
from pathlib import Path

import numpy as np

from radixkv_client import Client, KVSpec

SPEC = KVSpec(num_layers=30, num_kv_heads=3, head_dim=64, value_head_dim=64, dtype="bfloat16")
SPEC_NAME = "smollm2-135m"  # the same, 360 KiB a block
MODEL = "bench"
PROMPT_TOKENS = 512
NUM_PROMPTS = 40
FRESH = 0.25  # of the requests are new prompts
CAPACITY_WAIT_MS = 30_000


def prompt_of(random: np.random.Generator, cached_tokens: int) -> bytes:
    """Tokens nobody has asked with before, and one more, which is always computed."""
    return random.integers(0, 50_000, cached_tokens + 1, dtype=np.int32).tobytes()


def serve(client: Client, prompt: bytes) -> None:
    """One request, as a worker with a very fast kernel serves it."""
    with client.acquire(prompt, capacity_wait_ms=CAPACITY_WAIT_MS) as lease:
        lease.commit(len(prompt) // 4)


def main() -> None:
    """Serve for ever."""
    random = np.random.default_rng(int(sys.argv[2]))
    prompts = [prompt_of(random, PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
    with Client.connect(Path(sys.argv[1]), model=MODEL, kv_spec=SPEC) as client:
        while True:
            for index in range(NUM_PROMPTS):
                if random.random() < FRESH:
                    prompts[index] = prompt_of(random, PROMPT_TOKENS)
                serve(client, prompts[index])


if __name__ == "__main__":
    main()
