"""What a request sees: a hit from another process, from the same worker, cold; short sequences.

Two worker processes serve a small random model over one server. Wall times as the engine reports
them, one request at a time.
"""

import json
import subprocess
import sys
from statistics import median
from types import TracebackType
from typing import Any, Self

import numpy as np

from bench.measure import MIN_PAIRS, Row, median_row
from bench.serving_worker import CONFIG
from bench.wire import server_cpu_s
from radixkv_client.tools import Tools
from tests.server_process import ServerProcess

GPU_BLOCKS = 4_000
PROMPT_TOKENS = 2_048
SHORT_TOKENS = 32
SHORT_OUTPUT = 16
SHORT_REQUESTS = 5  # of one measurement


class WorkerProcess:
    """A worker that answers one order at a time. Context manager."""

    def __init__(self, server: ServerProcess) -> None:
        command = [sys.executable, "-m", "bench.serving_worker", str(server.socket_dir)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read()["ready"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def run(self, prompt: list[int], max_tokens: int, contiguous: bool = False) -> dict[str, Any]:
        """Serve one request."""
        order = {"prompt": prompt, "max_tokens": max_tokens, "contiguous": contiguous}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()


def rows(quick: bool = False) -> list[Row]:
    """All rows of this part."""
    random = np.random.default_rng(1)
    with (
        ServerProcess("--prefault", gpu_blocks=GPU_BLOCKS) as server,
        WorkerProcess(server) as first,
        WorkerProcess(server) as second,
    ):
        return hit_rows(server, first, second, random) + short_rows(server, first, random)


def prompt_of(random: np.random.Generator, length: int) -> list[int]:
    """Tokens nobody has asked with before."""
    return random.integers(4, CONFIG.vocab_size, length).tolist()


def hit_rows(
    server: ServerProcess, first: WorkerProcess, second: WorkerProcess, random: np.random.Generator
) -> list[Row]:
    """Cold, then a hit in the same worker and in the other one, in turns."""
    first.run(prompt_of(random, PROMPT_TOKENS), 1)
    second.run(prompt_of(random, PROMPT_TOKENS), 1)
    copied = copied_blocks(server)
    cold, same, other = [], [], []
    for number in range(MIN_PAIRS):
        prompt = prompt_of(random, PROMPT_TOKENS)
        answers = {"cold": first.run(prompt, 1)}
        for name in ("same", "other") if number % 2 else ("other", "same"):
            answers[name] = (first if name == "same" else second).run(prompt, 1)
        check_hit(answers)
        for name, times in (("cold", cold), ("same", same), ("other", other)):
            times.append(answers[name]["ttft_ms"])
    copied = copied_blocks(server) - copied
    differences = [b - a for a, b in zip(same, other, strict=True)]
    ratios = [b / c for b, c in zip(other, cold, strict=True)]
    note = f"TTFT {median(other):.1f} ms, same worker {median(same):.1f} ms"
    return [
        median_row("hit from another process − same worker", differences, "ms", 5.0, note=note),
        Row("KV blocks copied for those hits", copied, "blocks", 0.0),
        median_row(
            "TTFT of that hit ÷ cold, 2k tokens", ratios, "x",
            note=f"{median(other):.0f} ms, cold {median(cold):.0f} ms",
        ),
    ]  # fmt: skip


def check_hit(answers: dict[str, dict[str, Any]]) -> None:
    """The hit is whole, reads the same blocks, and says the same token."""
    usable = (PROMPT_TOKENS - 1) // 16 * 16
    assert answers["cold"]["cached_tokens"] == 0
    for name in ("same", "other"):
        assert answers[name]["cached_tokens"] == usable
        shared = usable // 16
        assert answers[name]["block_ids"][:shared] == answers["cold"]["block_ids"][:shared]
        assert answers[name]["tokens"] == answers["cold"]["tokens"]


def copied_blocks(server: ServerProcess) -> int:
    """Blocks the server has copied so far."""
    with Tools(server.grpc_target) as tools:
        return tools.stats().counters.copied_blocks


def short_rows(
    server: ServerProcess, worker: WorkerProcess, random: np.random.Generator
) -> list[Row]:
    """Requests of less than 64 tokens in all, where there is nothing to share."""
    ratios, extra, cpu = [], [], []
    for number in range(MIN_PAIRS + 1):
        times = {False: 0.0, True: 0.0}
        start = server_cpu_s(server.pid)
        for _ in range(SHORT_REQUESTS):
            prompt = prompt_of(random, SHORT_TOKENS)
            for contiguous in (False, True):
                answer = worker.run(prompt, SHORT_OUTPUT, contiguous)
                times[contiguous] += answer["total_ms"] / SHORT_REQUESTS
        if number:  # the first one warms up
            cpu.append((server_cpu_s(server.pid) - start) * 1000 / SHORT_REQUESTS)
            ratios.append(times[False] / times[True])
            extra.append(times[False] - times[True])
    name = f"{SHORT_TOKENS} + {SHORT_OUTPUT} tokens, engine and service ÷ contiguous cache"
    note = f"{median(extra):+.1f} ms a request; server CPU {median(cpu):.2f} ms"
    return [median_row(name, ratios, "x", note=note)]
