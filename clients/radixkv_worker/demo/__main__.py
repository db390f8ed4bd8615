"""Run the demo; exit code 1 if a check fails or a process dies."""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from radixkv_client import Client, KVSpec
from radixkv_client.errors import RadixKVError
from radixkv_worker import weights
from radixkv_worker.config import ModelConfig
from radixkv_worker.demo import checks, table
from radixkv_worker.demo.processes import Child, ChildFailed
from radixkv_worker.demo.runner import SEED, Answered, Workers, run_waves
from radixkv_worker.demo.workload import ANSWER_TOKENS, LONG_TOKENS, WAVES, long_prompt
from radixkv_worker.tokenizer import Tokenizer

NUM_WORKERS = 2
BLOCK_SIZE = 16
PREFIX_WAIT_MS = 600_000  # a busy machine must not turn a wait into a second prefill
LONGEST_PROMPT = 1_024  # of the workload, the long one aside; sizes the pool
MAX_ANSWER_S = 300.0  # without a cache, on a busy machine


@dataclass(frozen=True, slots=True)
class Running:
    """The server and workers of the demo, and where its files are."""

    directory: Path
    model_directory: Path
    children: list[Child]
    workers: Workers
    client: Client
    tokenizer: Tokenizer
    config: ModelConfig


def main() -> int:
    """The whole demo; returns the exit code."""
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="radixkv-demo-") as directory:
            passed = asyncio.run(_demo(Path(directory)))
    except (ChildFailed, RadixKVError, aiohttp.ClientError, OSError) as error:
        print(f"\nDEMO FAILED: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    say(f"{'all checks passed' if passed else 'DEMO FAILED'}, {time.monotonic() - started:.0f} s")
    return 0 if passed else 1


def say(line: str) -> None:
    """One line of progress, at once."""
    print(line, flush=True)


def num_blocks() -> int:
    """Blocks that hold every sequence of the demo, even if nothing were shared."""
    samples = sum(ask.n for wave in WAVES for ask in wave)
    per_sample = -(-(LONGEST_PROMPT + ANSWER_TOKENS) // BLOCK_SIZE)
    return samples * per_sample + 2 * NUM_WORKERS * -(-2 * LONG_TOKENS // BLOCK_SIZE)


async def _demo(directory: Path) -> bool:
    say("unpacking SmolLM2-135M-Instruct (float32) …")
    model_directory = directory / "model"
    weights.save(model_directory)
    with ExitStack() as stack:
        running = _start(directory, model_directory, stack)
        try:
            return await _measure(running)
        finally:
            await running.workers.close()


def _start(directory: Path, model_directory: Path, stack: ExitStack) -> Running:
    sockets = str(directory / "sockets")
    children: list[Child] = []

    def child(name: str, module: str, *arguments: str) -> Child:
        started = Child(name, directory, module, arguments)
        stack.callback(started.stop)
        children.append(started)
        return started

    options = ["--socket-dir", sockets, "--gpu-blocks", str(num_blocks()), "--device", "cpu"]
    options += ["--block-size", str(BLOCK_SIZE), "--listen", "off", "--http", "off"]
    server = child("server", "radixkv.cli.server", *options, "--check-invariants")
    server.wait_ready()
    options = ["--model", str(model_directory), "--socket-dir", sockets]
    options += ["--prefix-wait-ms", str(PREFIX_WAIT_MS)]
    names = [f"worker {number + 1}" for number in range(NUM_WORKERS)]
    engines = [child(name, "radixkv_worker.cli", *options) for name in names]
    ready = [engine.wait_ready() for engine in engines]
    say(f"radixkv-server with {num_blocks()} blocks, {NUM_WORKERS} workers ready")
    config = ModelConfig.from_directory(model_directory)
    spec = KVSpec.from_hf_config(config.to_hf(), dtype="float32", block_size=BLOCK_SIZE)
    client = Client.connect(sockets, model=ready[0]["fingerprint"], kv_spec=spec)
    stack.callback(client.close)
    workers = Workers([fields["http"] for fields in ready])
    tokenizer = Tokenizer.from_directory(model_directory)
    return Running(directory, model_directory, children, workers, client, tokenizer, config)


async def _measure(running: Running) -> bool:
    answered = await run_waves(
        running.workers, running.tokenizer, running.config.eos_tokens[0], say
    )
    stats = running.client.stats()
    counted = checks.count_naively(answered, NUM_WORKERS, BLOCK_SIZE)
    found = checks.check_counts(answered, counted, stats)
    found.append(checks.check_copies(answered, stats, BLOCK_SIZE))
    found.append(checks.check_tables(answered, BLOCK_SIZE))
    found.append(await checks.check_mappings(running.workers, running.client))
    say(f"the same {LONG_TOKENS:,}-token prompt to both workers at once …")
    long_answers = await _both_at_once(running)
    waits = running.client.stats().counters.waits - stats.counters.waits
    found.append(checks.check_single_flight(long_answers, waits, BLOCK_SIZE))
    for child in running.children:
        child.check()
    found.append(await _check_answers(running, answered, long_answers[0]))
    say(table.render(answered, counted, stats, found))
    return all(check.holds for check in found)


async def _both_at_once(running: Running) -> list[dict[str, Any]]:
    body = {"prompt": long_prompt(running.tokenizer), "max_tokens": ANSWER_TOKENS, "temperature": 0}
    jobs = (running.workers.complete(number, body) for number in range(NUM_WORKERS))
    return list(await asyncio.gather(*jobs))


async def _check_answers(
    running: Running, answered: Sequence[Answered], long_answer: dict[str, Any]
) -> checks.Check:
    """Compute every answer again without any cache, in as many processes as there are workers."""
    jobs = [_job(a.prompt, a.ask.temperature, a.ask.n) for a in answered]
    jobs.append(_job(long_prompt(running.tokenizer), 0.0, 1))
    names = [a.ask.name for a in answered] + ["the long prompt"]
    got = [a.samples for a in answered]
    got.append([long_answer["choices"][0]["radixkv"]["tokens"]])
    say(f"computing all {len(jobs)} answers again without a cache …")
    uncached: dict[int, Any] = {}

    async def compute(number: int) -> None:
        # Every second job each; the long one is last, so that it is not waited for alone.
        share = list(range(number, len(jobs), NUM_WORKERS))
        answers = _uncached(running, number, [jobs[index] for index in share])
        async with contextlib.aclosing(answers):
            for index in share:
                uncached[index] = await anext(answers)
                verdict = "equal" if uncached[index] == got[index] else "DIFFERENT"
                say(f"[{len(uncached):2}/{len(jobs)}] {names[index]:<15} {verdict}")

    await asyncio.gather(*map(compute, range(NUM_WORKERS)))
    return checks.check_answers(names, got, [uncached[index] for index in range(len(jobs))])


def _job(prompt: list[int], temperature: float, n: int) -> dict[str, Any]:
    return {
        "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": temperature,
        "seed": SEED, "n": n,
    }  # fmt: skip


async def _uncached(
    running: Running, number: int, jobs: list[dict[str, Any]]
) -> AsyncGenerator[list[list[int]], None]:
    """The answers to `jobs` in order, from a process that has no cache."""
    path = running.directory / f"jobs-{number}"
    path.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    module = "radixkv_worker.demo.uncached"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, str(running.model_directory), str(path),
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        for _ in jobs:
            line = await asyncio.wait_for(process.stdout.readline(), MAX_ANSWER_S)
            if not line:
                raise ChildFailed(f"{module} ended with {await process.wait()}")
            yield json.loads(line)
    except TimeoutError:
        raise ChildFailed(f"no answer without a cache within {MAX_ANSWER_S} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


if __name__ == "__main__":
    sys.exit(main())
