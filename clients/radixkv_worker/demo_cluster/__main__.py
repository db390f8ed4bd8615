"""Run the demo of two servers; exit code 1 if a check fails or a process dies.

One mooncake_master, two radixkv-servers that know it, a worker under each. The first worker
computes two prompts; the second one is asked the first of them, and the other is attached under the
second server by a client of its own. A third prompt, new to both, shows what it costs otherwise.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from radixkv_client import Client, KVSpec, Onboarding
from radixkv_client.errors import RadixKVError
from radixkv_worker import weights
from radixkv_worker.config import ModelConfig
from radixkv_worker.demo.checks import Check
from radixkv_worker.demo.processes import Child, ChildFailed
from radixkv_worker.demo.runner import Workers
from radixkv_worker.demo.workload import ANSWER_TOKENS, SYSTEM, document
from radixkv_worker.demo_cluster.master import Master
from radixkv_worker.tokenizer import Tokenizer

NUM_SERVERS = 2
BLOCK_SIZE = 16
GPU_BLOCKS = 512
SEGMENT_GIB = 0.5
MAX_WRITE_S = 60.0  # for the blocks of two prompts to reach the remote
FIRST, SECOND, NEW = "harbour", "mill", "depot"  # what the prompts are about
QUESTION = "Where is item 3?"


@dataclass(frozen=True, slots=True)
class Running:
    """What was started, by server."""

    children: list[Child]
    clients: list[Client]
    workers: Workers
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class Result:
    """What came back, and what the second server counted meanwhile."""

    computed: dict[str, Any]
    shared: dict[str, Any]
    new: dict[str, Any]
    onboarding: Onboarding | None
    attached_tokens: int
    hit_tokens: int
    prompt_tokens: int


def main() -> int:
    """The whole demo; returns the exit code."""
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="radixkv-cluster-") as directory:
            passed = asyncio.run(_demo(Path(directory)))
    except (ChildFailed, RadixKVError, aiohttp.ClientError, OSError) as error:
        print(f"\nDEMO FAILED: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    say(f"{'all checks passed' if passed else 'DEMO FAILED'}, {time.monotonic() - started:.0f} s")
    return 0 if passed else 1


def say(line: str) -> None:
    """One line of progress, at once."""
    print(line, flush=True)


async def _demo(directory: Path) -> bool:
    with ExitStack() as stack:
        master = Master(directory)
        stack.callback(master.stop)
        say("unpacking SmolLM2-135M-Instruct (float32) …")
        weights.save(directory / "model")
        url = f"mooncake://127.0.0.1:{master.port}?segment_gib={SEGMENT_GIB}"
        running = _start(directory, url, stack)
        try:
            result = await _run(running)
        finally:
            await running.workers.close()
        for child in running.children:
            child.check()
    found = judge(result)
    say(render(result, found))
    return all(check.holds for check in found)


def _start(directory: Path, url: str, stack: ExitStack) -> Running:
    model = directory / "model"
    children: list[Child] = []

    def child(name: str, module: str, *arguments: str) -> Child:
        started = Child(name, directory, module, arguments)
        stack.callback(started.stop)
        children.append(started)
        return started

    sockets = [str(directory / f"sockets-{number + 1}") for number in range(NUM_SERVERS)]
    options = ["--gpu-blocks", str(GPU_BLOCKS), "--device", "cpu", "--listen", "off"]
    options += ["--http", "off", "--block-size", str(BLOCK_SIZE)]
    options += ["--kv-spec", f"{model / 'config.json'}:float32", "--remote", url]
    options += ["--write-policy", "write_through", "--check-invariants"]
    servers = [
        child(f"server {number + 1}", "radixkv.cli.server", "--socket-dir", path, *options)
        for number, path in enumerate(sockets)
    ]
    for server in servers:
        server.wait_ready()
    engines = [
        child(
            f"worker {number + 1}", "radixkv_worker.cli", "--model", str(model),
            "--socket-dir", path,
        )
        for number, path in enumerate(sockets)
    ]  # fmt: skip
    ready = [engine.wait_ready() for engine in engines]
    say(f"{NUM_SERVERS} radixkv-servers with {url}, a worker under each, ready")
    config = ModelConfig.from_directory(model)
    spec = KVSpec.from_hf_config(config.to_hf(), dtype="float32", block_size=BLOCK_SIZE)
    clients = []
    for path in sockets:
        clients.append(Client.connect(path, model=ready[0]["fingerprint"], kv_spec=spec))
        stack.callback(clients[-1].close)
    workers = Workers([fields["http"] for fields in ready])
    return Running(children, clients, workers, Tokenizer.from_directory(model))


async def _run(running: Running) -> Result:
    prompts = {topic: _prompt(running.tokenizer, topic) for topic in (FIRST, SECOND, NEW)}

    async def ask(worker: int, topic: str) -> dict[str, Any]:
        prompt = prompts[topic]
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        answer = await running.workers.complete(worker, body)
        stats = answer["radixkv"]
        say(
            f"worker {worker + 1}  {topic:<8} {stats['cached_tokens']:4} of {len(prompt):4} "
            f"tokens cached  TTFT {stats['ttft_ms'] / 1e3:5.2f} s"
        )
        return answer

    computed = await ask(0, FIRST)
    await ask(0, SECOND)
    blocks = sum(len(prompts[topic]) // BLOCK_SIZE for topic in (FIRST, SECOND))
    written = await _wait(lambda: remote_tier(running.clients[0]).written_blocks, blocks)
    say(f"server 1 has put {written} blocks into the remote")
    before = remote_tier(running.clients[1]).hit_tokens
    new = await ask(1, NEW)
    shared = await ask(1, FIRST)
    with running.clients[1].acquire(prompts[SECOND]) as lease:
        onboarding, attached = lease.onboarding, lease.cached_tokens
    hits = remote_tier(running.clients[1]).hit_tokens - before
    return Result(computed, shared, new, onboarding, attached, hits, len(prompts[FIRST]))


def _prompt(tokenizer: Tokenizer, topic: str) -> list[int]:
    """It shares no block with those about other topics."""
    return tokenizer.encode_chat(
        [
            {"role": "system", "content": f"{document(topic)}\n\n{SYSTEM}"},
            {"role": "user", "content": QUESTION},
        ]
    )


def remote_tier(client: Client) -> Any:
    """Statistics of the remote under a client's server."""
    return next(tier for tier in client.stats().tiers if tier.name == "remote")


async def _wait(count: Callable[[], int], wanted: int) -> int:
    deadline = time.monotonic() + MAX_WRITE_S
    while (reached := count()) < wanted:
        if time.monotonic() > deadline:
            raise ChildFailed(f"{reached} of {wanted} blocks on the remote after {MAX_WRITE_S} s")
        await asyncio.sleep(0.05)
    return reached


def judge(result: Result) -> list[Check]:
    """What the demo proves."""
    usable = (result.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    cached = result.shared["radixkv"]["cached_tokens"]
    came = result.onboarding.remote_tokens if result.onboarding else 0
    reason = result.onboarding.reason if result.onboarding else "no onboarding"
    tokens = [
        answer["choices"][0]["radixkv"]["tokens"] for answer in (result.computed, result.shared)
    ]
    return [
        Check(
            "the whole prefix is attached under the server that did not compute it",
            cached == usable,
            f"{cached} of {result.prompt_tokens} tokens",
        ),
        Check(
            "the lease says that they came from the remote",
            0 < came == result.attached_tokens and reason == "LOADED",
            f"of {result.attached_tokens} cached tokens {came} are from the remote; {reason}",
        ),
        Check(
            "the server counts the same",
            result.hit_tokens == came + cached,
            f"{result.hit_tokens} tokens of hits from the remote",
        ),
        Check("both workers' answers are equal", tokens[0] == tokens[1], f"{tokens[0]}"),
    ]


def render(result: Result, checks: list[Check]) -> str:
    """Times and checks as text."""
    new, shared = (answer["radixkv"]["ttft_ms"] for answer in (result.new, result.shared))
    lines = ["", "time to first token under server 2"]
    lines.append(f"  new to it, and to the remote    {new:8.0f} ms")
    lines.append(f"  computed under server 1         {shared:8.0f} ms")
    lines.append(f"  attaching is {new / shared:.1f} times as fast as computing")
    lines.append("")
    for check in checks:
        lines.append(f"{'ok    ' if check.holds else 'FAILED'} {check.claim}")
        lines.append(f"       {check.detail}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
