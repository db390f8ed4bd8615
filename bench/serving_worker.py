"""One worker process of the serving bench: requests as JSON lines on stdin, answers on stdout.

    python -m bench.serving_worker SOCKET_DIR

{"prompt": [...], "max_tokens": n} runs in the engine over the shared pool; with "contiguous": true
the same model runs over a contiguous cache of its own instead, with no service at all.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from radixkv_worker import weights
from radixkv_worker.model import Model
from radixkv_worker.reference import greedy
from tests.worker_rig import TINY, Worker, tiny_tensors, tiny_tokenizer

CONFIG = replace(
    TINY, vocab_size=4_096, hidden_size=576, intermediate_size=1_536, num_layers=6, num_heads=9,
    num_kv_heads=3, head_dim=64,
)  # fmt: skip


def load() -> weights.LoadedModel:
    """SmolLM2-135M's width with fewer layers and random weights."""
    tensors = tiny_tensors(CONFIG)
    fingerprint = weights.fingerprint(CONFIG, tensors)
    return weights.LoadedModel("bench", Model(CONFIG, tensors), tiny_tokenizer(), fingerprint)


def answer(worker: Worker, model: Model, order: dict[str, Any]) -> dict[str, Any]:
    """Carry out one order."""
    prompt, max_tokens = tuple(order["prompt"]), order["max_tokens"]
    if order.get("contiguous"):
        start = time.perf_counter()
        tokens = greedy(model, prompt, max_tokens)
        return {"total_ms": (time.perf_counter() - start) * 1000, "tokens": tokens}
    result = worker.run(prompt, max_tokens=max_tokens)
    stats = result.stats
    return {
        "total_ms": stats.total_ms,
        "ttft_ms": stats.ttft_ms,
        "cached_tokens": stats.cached_tokens,
        "block_ids": list(stats.block_ids),
        "tokens": result.tokens(),
    }


def main() -> None:
    """Answer until stdin ends."""
    torch.set_num_threads(1)
    loaded = load()
    with Worker(Path(sys.argv[1]), loaded) as worker:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(worker, loaded.model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
