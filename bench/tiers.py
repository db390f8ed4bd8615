"""The tiers as a whole: what they cost those who do not need them, and what they give who does.

Real servers, movers and workers; the disk is the file system of the current directory. Load is
other workers that are stopped (SIGSTOP) and let go in turns with phases of peace, in one run.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from bench.measure import Row, interval, median_row
from bench.nvme import StoredBlocks, forget_cached
from bench.tiers_core import core_rows
from bench.tiers_worker import (
    CAPACITY_WAIT_MS,
    MODEL,
    PROMPT_TOKENS,
    SPEC,
    SPEC_NAME,
    prompt_of,
    serve,
)
from radixkv.core.namespace import namespace_key
from radixkv.server.specs import load_spec
from radixkv_client import Client
from radixkv_client.tools import Tools
from tests.server_process import ServerProcess

BLOCK_SIZE = 16
GPU_BLOCKS, CPU_BLOCKS, NVME_BLOCKS = 1_000, 1_200, 4_000
WATERMARKS = ("--low-watermark", "25", "--high-watermark", "40")  # room for several requests
NUM_HOT = 8
NUM_WORKERS = 3
PHASES = 8  # of each kind
PHASE_S = 1.0
MAX_WAIT_S = 30.0

LONG_TOKENS = 1_024  # brought up by one Acquire
LONG_PROMPTS = 8
LONG_GPU_BLOCKS = 160  # room for two of them
LONG_ROUNDS = 5

RECORDS = 100_000
CHAIN_BLOCKS = 64
STARTS = 3


def rows(quick: bool = False) -> list[Row]:
    """All rows of this part."""
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-tiers-") as name:
        directory = Path(name)
        found = load_rows(directory / "load", 2 if quick else PHASES)
        for place in ("cpu", "nvme"):
            found.append(onboard_row(place, directory / place, 2 if quick else LONG_ROUNDS))
        found.append(restart_row(directory / "restart", RECORDS // 10 if quick else RECORDS))
    return found + core_rows(quick)


def tiered(directory: Path, *further: str, gpu: int, cpu: int = 0, nvme: int = 0) -> ServerProcess:
    """A server with so many blocks in each place, which always brings up what it has."""
    options = ["--kv-spec", SPEC_NAME, "--prefault", "--no-break-even", "--cpu-blocks", str(cpu)]
    options += further
    if nvme:
        options += ["--nvme-path", str(directory), "--nvme-blocks", str(nvme)]
    return ServerProcess(*options, gpu_blocks=gpu)


def connect(server: ServerProcess) -> Client:
    """A client on the local socket."""
    return Client.connect(server.socket_dir, model=MODEL, kv_spec=SPEC)


# ---- hits while the movers are busy -------------------------------------------------------------


def load_rows(directory: Path, phases: int) -> list[Row]:
    """Acquires of prompts that stay on the gpu, in peace and while other workers' blocks move."""
    idle: list[np.ndarray] = []
    busy: list[np.ndarray] = []
    moved: list[float] = []
    with ExitStack() as stack:
        sizes = {"gpu": GPU_BLOCKS, "cpu": CPU_BLOCKS, "nvme": NVME_BLOCKS}
        server = stack.enter_context(tiered(directory, *WATERMARKS, **sizes))
        client = stack.enter_context(connect(server))
        tools = stack.enter_context(Tools(server.grpc_target))
        hot = pinned_prompts(client, tools)
        load = stack.enter_context(Load(server, tools))
        load.fill()
        for _ in range(phases):
            load.stop()
            idle.append(hit_ms(client, hot))
            load.go()
            before, start = load.moved_blocks(), time.perf_counter()
            busy.append(hit_ms(client, hot))
            seconds = time.perf_counter() - start
            moved.append((load.moved_blocks() - before) * SPEC.block_bytes / seconds / 1e9)
    return _load_rows(idle, busy, f"movers read and write {median(moved):.2f} GB/s")


def _load_rows(idle: list[np.ndarray], busy: list[np.ndarray], note: str) -> list[Row]:
    medians = [[float(np.median(hits[:, 0])) for hits in phases] for phases in (idle, busy)]
    quiet_us, loaded_us = (median(column) * 1000 for column in medians)
    ratios = [loaded / quiet for quiet, loaded in zip(*medians, strict=True)]
    low, high = interval([p99_ms(hits) for hits in busy])
    quiet, loaded = np.concatenate(idle), np.concatenate(busy)
    at_once = loaded[loaded[:, 1] == 0]
    return [
        median_row(
            "Acquire of a hit, movers busy ÷ idle, p50", ratios, "x", 1.3,
            note=f"{loaded_us:.0f} µs, idle {quiet_us:.0f} µs; {note}",
        ),
        Row(
            "Acquire of a hit, movers busy, p99", p99_ms(loaded), "ms", 6.0, low=low, high=high,
            note=f"idle {p99_ms(quiet):.2f} ms; {len(loaded) - len(at_once)} of {len(loaded):,}"
            f" waited for room, p99 of the others {p99_ms(at_once):.2f} ms",
        ),
    ]  # fmt: skip


def p99_ms(hits: np.ndarray) -> float:
    """Of wall times in the first column."""
    return float(np.percentile(hits[:, 0], 99))


def pinned_prompts(client: Client, tools: Tools) -> list[bytes]:
    """Prompts that stay on the gpu whatever the others do."""
    random = np.random.default_rng(0)
    prompts = [prompt_of(random, PROMPT_TOKENS) for _ in range(NUM_HOT)]
    for prompt in prompts:
        serve(client, prompt)
        assert tools.pin(prompt, model=MODEL).pinned_tokens == PROMPT_TOKENS
    return prompts


def hit_ms(client: Client, prompts: list[bytes]) -> np.ndarray:
    """Acquires for the time of a phase: wall time, and how much of it the server waited for room
    for the one token that is not cached. Releases are not timed."""
    hits = []
    until = time.perf_counter() + PHASE_S
    while (start := time.perf_counter()) < until:
        prompt = prompts[len(hits) % len(prompts)]
        lease = client.acquire(prompt, capacity_wait_ms=CAPACITY_WAIT_MS)
        hits.append(((time.perf_counter() - start) * 1000, lease.waited_ms))
        assert lease.cached_tokens == PROMPT_TOKENS and lease.onboarding is None
        lease.release()
    return np.array(hits)


class Load:
    """Workers whose working set is several times the gpu pool. Context manager."""

    def __init__(self, server: ServerProcess, tools: Tools) -> None:
        self._tools = tools
        command = [sys.executable, "-m", "bench.tiers_worker", str(server.socket_dir)]
        self._processes = [
            subprocess.Popen([*command, str(seed)]) for seed in range(1, NUM_WORKERS + 1)
        ]

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def moved_blocks(self) -> int:
        """Blocks that were read from or written to the places below the gpu so far."""
        return sum(tier.read_blocks + tier.written_blocks for tier in self._tools.stats().tiers)

    def fill(self) -> None:
        """Return once the cpu tier is full and blocks come back from nvme."""
        until = time.monotonic() + MAX_WAIT_S
        while True:
            assert time.monotonic() < until, "the tiers do not fill"
            cpu, nvme = self._tools.stats().tiers
            if cpu.books.cached > 0.8 * CPU_BLOCKS and nvme.read_blocks > GPU_BLOCKS:
                return
            time.sleep(0.1)

    def go(self) -> None:
        """Let them work; the first moments are not measured."""
        self._signal(signal.SIGCONT)
        time.sleep(0.2)

    def stop(self) -> None:
        """Stop them, and wait until nothing moves any more."""
        self._signal(signal.SIGSTOP)
        until = time.monotonic() + MAX_WAIT_S
        before = -1
        while (moved := self.moved_blocks()) != before:
            assert time.monotonic() < until, "the movers do not come to rest"
            before = moved
            time.sleep(0.2)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            assert process.poll() is None, "a worker of the load has ended"
            process.send_signal(number)


# ---- bringing a prompt up -----------------------------------------------------------------------


def onboard_row(place: str, directory: Path, rounds: int) -> Row:
    """An Acquire whose blocks are all in one place below the gpu, on an idle server."""
    num_blocks = LONG_PROMPTS * LONG_TOKENS // BLOCK_SIZE + LONG_GPU_BLOCKS
    random = np.random.default_rng(3)
    prompts = [prompt_of(random, LONG_TOKENS) for _ in range(LONG_PROMPTS)]
    times = []
    with (
        tiered(directory, gpu=LONG_GPU_BLOCKS, **{place: num_blocks}) as server,
        connect(server) as client,
    ):
        for _ in range(2):  # compute them all; then have the movers touch all memory
            for prompt in prompts:
                serve(client, prompt)
        for prompt in prompts * rounds:
            start = time.perf_counter()
            lease = client.acquire(prompt)
            times.append((time.perf_counter() - start) * 1000)
            below = lease.onboarding
            assert below is not None and getattr(below, f"{place}_tokens") == LONG_TOKENS, below
            lease.release()
    num_bytes = LONG_TOKENS // BLOCK_SIZE * SPEC.block_bytes
    note = f"{num_bytes / median(times) / 1e6:.2f} GB/s, {num_bytes / 1e6:.1f} MB"
    name = f"Acquire that brings {LONG_TOKENS:,} tokens up from {place}"
    return median_row(name, times, "ms", note=note)


# ---- a warm restart -----------------------------------------------------------------------------


def restart_row(directory: Path, count: int) -> Row:
    """From starting the process to its ready line, with records and without nvme, in turns."""
    spec = small_spec(directory)
    kv_spec = load_spec(spec, BLOCK_SIZE)
    namespace = namespace_key(model=MODEL, kv_spec=kv_spec.encode())
    path = directory / "nvme"
    blocks = StoredBlocks(path, count, kv_spec.block_bytes, namespace, CHAIN_BLOCKS)
    blocks.write()
    blocks.store.close()
    tier = ("--nvme-path", str(path), "--nvme-blocks", str(count))
    differences, without = [], []
    for _ in range(STARTS):
        forget_cached(path)
        warm = start_s(count, "--kv-spec", spec, *tier)
        without.append(start_s(0, "--kv-spec", spec))
        differences.append((warm - without[-1]) * 100_000 / count)
    note = f"{count:,} records, chains of {CHAIN_BLOCKS}; without nvme {median(without):.2f} s"
    return median_row("warm restart, per 100,000 records", differences, "s", note=note)


def small_spec(directory: Path) -> str:
    """A config whose blocks are 4 KiB."""
    directory.mkdir()
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 32, "head_dim": 32}
    (directory / "config.json").write_text(json.dumps(sizes))
    return f"{directory}/config.json:float32"


def start_s(count: int, *options: str) -> float:
    """Seconds until a server is ready that has found so many records."""
    start = time.perf_counter()
    with ServerProcess(*options) as server:
        seconds = time.perf_counter() - start
        with Tools(server.grpc_target) as tools:
            assert sum(tier.books.cached for tier in tools.stats().tiers) == count
    return seconds
