"""What a round trip and a batch cost on the wire, against an echo and ZeroMQ with msgspec.

Server, peers and this client are separate processes; times are wall times of this client unless a
row says CPU. Every Acquire is a full hit of 1,024 tokens, so the numbers are the service's own.

Where there are two cores, servers and peers are held on one and this client on the other. Left to
the scheduler, the two ends of an echo share a core and never pay for waking the other one, while
ends that compute longer are moved apart and do: the ratio would be one of placements.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from bench.measure import MIN_PAIRS, Row, interval, median_row
from bench.wire_peers import EchoClient, Peer, ZmqClient
from radixkv.v1 import session_pb2 as pb
from radixkv_client import Client, KVSpec
from tests.server_process import ServerProcess

PROMPT_TOKENS = 1_024
MISS_TOKENS = 2_048
NUM_PROMPTS = 32
GPU_BLOCKS = 40_000
CALLS = 100  # of a batch of round trips
PAIRS_PER_STEP = 32
STEPS_IN_FLIGHT = 6
STEPS = 60  # of one throughput measurement
MISSES = 40  # of one CPU measurement
CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, CLIENT_CORE = 0, 1
SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=16, value_head_dim=16, dtype="float32")


def rows(quick: bool = False) -> list[Row]:
    """All rows of this part."""
    with ServerProcess("--prefault", gpu_blocks=GPU_BLOCKS) as server, cores_apart():
        hold_on(server.pid, SERVER_CORE)
        found = []
        for transport in ("local", "grpc"):
            with connect(server, transport) as client:
                prompts = cached_prompts(client)
                if transport == "local":
                    found += latency_rows(client, prompts)
                    found.append(miss_row(server, client))
                else:
                    found += grpc_latency_row(client, prompts)
                found.append(throughput_row(server, client, prompts, transport))
        return found


@contextmanager
def cores_apart() -> Iterator[None]:
    """Hold this process on its core meanwhile."""
    before = os.sched_getaffinity(0)
    hold_on(os.getpid(), CLIENT_CORE)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def hold_on(pid: int, position: int) -> None:
    """Hold all threads of a process on one of the cores we may use, if there are two."""
    if len(CORES) >= 2:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {CORES[position]})


def connect(server: ServerProcess, transport: str) -> Client:
    """A client of the server under test."""
    return Client.connect(server.socket_dir, model="bench", kv_spec=SPEC, transport=transport)


def cached_prompts(client: Client) -> list[bytes]:
    """Prompts that are cached but for their last token."""
    random = np.random.default_rng(1)
    prompts = []
    for _ in range(NUM_PROMPTS):
        tokens = random.integers(0, 50_000, PROMPT_TOKENS + 1, dtype=np.int32).tobytes()
        with client.acquire(tokens) as lease:
            lease.commit(PROMPT_TOKENS)
        prompts.append(tokens)
    return prompts


def message_sizes(tokens: bytes) -> tuple[int, int]:
    """Bytes of an Acquire's Step and of its reply, without the frame's length."""
    step = pb.Step(number=1, ops=[pb.Op(op_id=1, acquire=pb.Acquire(lease_id=1, tokens=tokens))])
    acquire = pb.AcquireReply(
        lease_id=1, block_table=bytes(len(tokens) // 16), cached_tokens=PROMPT_TOKENS
    )
    reply = pb.Replies(replies=[pb.Reply(number=1, op_id=1, acquire=acquire)], last_step=1)
    return (
        pb.ClientMessage(step=step).ByteSize(),
        pb.ServerMessage(replies=reply).ByteSize(),
    )


class AcquireCalls:
    """Acquires through the client library, one prompt after the other; releases are not timed."""

    def __init__(self, client: Client, prompts: list[bytes]) -> None:
        self._client, self._prompts, self._next = client, prompts, 0

    def batch_us(self) -> float:
        """Median wall time of CALLS Acquires."""
        times = []
        for _ in range(CALLS):
            self._next = (self._next + 1) % len(self._prompts)
            start = time.perf_counter()
            lease = self._client.acquire(self._prompts[self._next])
            times.append(time.perf_counter() - start)
            assert lease.cached_tokens == PROMPT_TOKENS
            lease.release()
        return median(times) * 1e6


def batch_us(call: Callable[[], None]) -> float:
    """Median wall time of CALLS round trips with a peer."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times) * 1e6


def latency_rows(client: Client, prompts: list[bytes]) -> list[Row]:
    """Acquire on the local socket ÷ each peer, interleaved."""
    request_bytes, reply_bytes = message_sizes(prompts[0])
    table_bytes = len(prompts[0]) // 16
    acquires = AcquireCalls(client, prompts)
    found = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for kind, label, limit, size in (
            ("echo", "bare framed asyncio echo", 1.5, reply_bytes),
            ("zmq", "ZeroMQ + msgspec (event loop)", 0.5, table_bytes),
            ("zmq-sync", "ZeroMQ + msgspec (blocking loop)", None, table_bytes),
        ):
            path = directory / kind
            try:
                with Peer(kind, path, size) as process:
                    hold_on(process.pid, SERVER_CORE)
                    peer = (
                        EchoClient(path, request_bytes, reply_bytes)
                        if kind == "echo"
                        else ZmqClient(path, prompts[0])
                    )
                    found.append(_latency_row(acquires, peer.call, label, limit))
                    peer.close()
            except ImportError as error:
                found.append(Row(f"Acquire, local socket ÷ {label}", None, note=str(error)))
    return found


def _latency_row(
    acquires: AcquireCalls, call: Callable[[], None], label: str, limit: float | None
) -> Row:
    acquires.batch_us()
    batch_us(call)
    both = [(acquires.batch_us(), batch_us(call)) for _ in range(MIN_PAIRS)]
    mine, other = (median(column) for column in zip(*both, strict=True))
    note = f"{mine:.0f} µs, peer {other:.0f} µs (wall, 1,024 tokens)"
    ratios = [a / b for a, b in both]
    return median_row(f"Acquire, local socket ÷ {label}", ratios, "x", limit, note=note)


def grpc_latency_row(client: Client, prompts: list[bytes]) -> list[Row]:
    """Beside it: the same through gRPC."""
    acquires = AcquireCalls(client, prompts)
    acquires.batch_us()
    values = [acquires.batch_us() for _ in range(MIN_PAIRS)]
    return [median_row("Acquire, gRPC", values, "µs", note="wall, 1,024 tokens")]


def throughput_row(
    server: ServerProcess, client: Client, prompts: list[bytes], transport: str
) -> Row:
    """Acquire + Release pairs a second, 32 pairs in a Step, several Steps under way."""
    pairs_per_second(client, prompts)
    start = server_cpu_s(server.pid), time.process_time()
    values = [pairs_per_second(client, prompts) for _ in range(MIN_PAIRS)]
    end = server_cpu_s(server.pid), time.process_time()
    pairs = MIN_PAIRS * STEPS * PAIRS_PER_STEP
    cpu = [(b - a) / pairs * 1e6 for a, b in zip(start, end, strict=True)]
    limit = 20_000.0 if transport == "local" else None
    name = f"batched Acquire + Release, 1k tokens, {'local socket' if limit else 'gRPC'}"
    note = f"CPU a pair: server {cpu[0]:.0f} µs, client {cpu[1]:.0f} µs"
    return median_row(name, values, "pairs/s", limit, at_least=True, note=note)


def pairs_per_second(client: Client, prompts: list[bytes]) -> float:
    """One measurement over STEPS Steps."""
    under_way = []
    start = time.perf_counter()
    for _ in range(STEPS):
        with client.batch() as batch:
            for prompt in prompts[:PAIRS_PER_STEP]:
                last = batch.release(batch.acquire(prompt).lease)
        under_way.append(last)
        if len(under_way) == STEPS_IN_FLIGHT:
            under_way.pop(0).result()
    for pending in under_way:
        pending.result()
    return STEPS * PAIRS_PER_STEP / (time.perf_counter() - start)


def server_cpu_s(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def miss_row(server: ServerProcess, client: Client) -> Row:
    """What a request costs that finds nothing: Acquire, Commit, Release; CPU of both ends."""
    random = np.random.default_rng(2)
    values = []
    own = []
    for _ in range(MIN_PAIRS):
        prompts = random.integers(0, 50_000, (MISSES, MISS_TOKENS), dtype=np.int32)
        start, own_start = server_cpu_s(server.pid), time.process_time()
        for prompt in prompts:
            lease = client.acquire(prompt)
            assert lease.cached_tokens == 0
            lease.release(commit=(MISS_TOKENS, b""))
        own.append((time.process_time() - own_start) / MISSES * 1000)
        values.append((server_cpu_s(server.pid) - start) / MISSES * 1000 + own[-1])
    low, high = interval(values)
    note = f"server and client; client alone {median(own):.2f} ms"
    return Row("CPU of a miss, 2k-token request", median(values), "ms", 1.0, False, low, high, note)
