"""Several workers over one real server want the same thing at once (B2, B4, D2, deadlock)."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import pytest

from radixkv.v1 import cache_pb2
from radixkv_client import Client, DeadlineExceeded, Exhausted, Lease, TooLarge
from tests.fault_surroundings import until
from tests.fault_worker import Worker
from tests.fingerprints import BLOCK_SIZE, KV_SPEC, SequenceKV
from tests.server_process import ServerProcess
from tests.session_rig import acquire, code, release

NUM_BLOCKS = 16
NAMESPACE = b"model"
NUM_RACES = 200


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    return tmp_path_factory.mktemp("gate") / "closed"


@pytest.fixture(scope="module")
def server(gate):
    options = ("--check-invariants", "--block-size", str(BLOCK_SIZE))
    server = ServerProcess(*options, gpu_blocks=NUM_BLOCKS, env={"COPY_GATE": str(gate)})
    server.command[2] = "tests.gated_server"
    with server:
        yield server


@pytest.fixture
def connect(server):
    """Makes clients; afterwards nothing may be left."""
    clients = []

    def make(transport: str = "local") -> Client:
        client = Client.connect(
            server.socket_dir, model="model", kv_spec=KV_SPEC, transport=transport, timeout=20.0
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()
    with Client.connect(server.socket_dir, model="model", kv_spec=KV_SPEC) as client:
        until(lambda: client.stats().num_sessions == 1, "all sessions end")
        client.tools.invalidate(everything=True)
        assert client.stats().books == cache_pb2.Books(free=NUM_BLOCKS, total=NUM_BLOCKS)


def kv_of(client, tokens) -> SequenceKV:
    return SequenceKV(client.pool.as_numpy(), NAMESPACE, tokens)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


# ---- B2 ------------------------------------------------------------------------------------


class Racer:
    """One of two workers that miss on the same prompt, compute it and commit at once."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client = client
        self.random = random.Random(seed)

    def acquire(self, prompt: list[int]) -> None:
        self.kv = kv_of(self.client, prompt)
        self.lease = self.client.acquire(prompt)
        assert self.lease.cached_tokens == 0
        self.kv.write(self.lease.block_table, 0, len(prompt))

    def commit(self, barrier: threading.Barrier) -> int:
        barrier.wait(10.0)
        time.sleep(self.random.random() * 0.0005)
        return self.lease.commit(len(self.kv.tokens)).duplicate_blocks

    def check(self) -> None:
        self.kv.check(self.lease.block_table, 0, len(self.kv.tokens))


def test_b2_two_workers_commit_the_same_prefix_at_once(connect):
    racers = [Racer(connect("local"), 1), Racer(connect("grpc"), 2)]
    third, fourth = connect(), connect("grpc")
    barrier = threading.Barrier(3)
    with ThreadPoolExecutor(2) as threads:
        for number in range(NUM_RACES):
            prompt = [1000 * number + i for i in range(5 * BLOCK_SIZE)]
            third.tools.invalidate(everything=True)
            for racer in racers:
                racer.acquire(prompt)
            commits = [threads.submit(racer.commit, barrier) for racer in racers]
            barrier.wait(10.0)
            look_during_race(fourth, prompt)
            assert sorted(done.result(10.0) for done in commits) == [0, 5]
            rest = third.acquire([7] * BLOCK_SIZE * (NUM_BLOCKS - 10))
            kv_of(third, [7] * BLOCK_SIZE * 6).write(rest.block_table, 0, BLOCK_SIZE * 6)
            for racer in racers:
                racer.check()
            rest.release()
            for racer in racers:
                racer.lease.release()
            books = third.stats().books
            assert (books.cached, books.free) == (5, NUM_BLOCKS - 5)
            look_during_race(fourth, prompt, at_least=4 * BLOCK_SIZE)


def look_during_race(client: Client, prompt: list[int], at_least: int = 0) -> None:
    """Nothing is there, or all that may be used, with right bytes."""
    found = client.lookup([*prompt, 1]).cached_tokens
    assert found in (0, len(prompt)) and found >= at_least
    if found:
        with client.acquire([*prompt, 1]) as lease:
            assert lease.cached_tokens == len(prompt)
            kv_of(client, prompt).check(lease.block_table, 0, len(prompt))


# ---- B4 ------------------------------------------------------------------------------------


def test_b4_a_full_pool_is_a_clear_error_within_the_deadline(connect, server):
    holder, asker, other = connect(), connect("grpc"), connect()
    prompt = list(range(BLOCK_SIZE * (NUM_BLOCKS - 1)))
    lease = holder.acquire(prompt, extra_blocks=1)
    kv = kv_of(holder, prompt)
    kv.write(lease.block_table, 0, len(prompt))
    lease.commit(len(prompt))
    waiting = asker.acquire_nowait([9], capacity_wait_ms=500)
    started, used = time.monotonic(), cpu_s(server.pid)
    time.sleep(0.3)
    assert cpu_s(server.pid) - used < 0.1, "the server spins while somebody waits"
    assert urlopen(server.http_url + "/healthz", timeout=5).status == 200
    assert other.lookup([*prompt, 1]).cached_tokens == len(prompt)
    with pytest.raises(Exhausted, match="1 blocks wanted, 0 free"):
        waiting.result()
    assert 0.15 < time.monotonic() - started < 0.9
    with pytest.raises(Exhausted):
        lease.extend(1)
    with pytest.raises(TooLarge, match=f"{NUM_BLOCKS + 1} blocks wanted.*{NUM_BLOCKS}"):
        asker.acquire([9], extra_blocks=NUM_BLOCKS)
    kv.check(lease.block_table, 0, len(prompt))
    assert len(lease.block_table) == NUM_BLOCKS
    lease.release()
    asker.acquire([9]).release()


def test_b4_what_fails_half_way_takes_nothing(connect):
    holder, asker = connect(), connect("grpc")
    with holder.acquire([1] * BLOCK_SIZE * 6) as lease:
        before = asker.stats().books
        assert before.free == 10
        for call in (
            lambda: asker.acquire([2] * BLOCK_SIZE * 12),
            lambda: lease.extend(12),
            lambda: lease.append_blocks(12),
        ):
            with pytest.raises(Exhausted):
                call()
        books = asker.stats().books
        assert books.leased == 6 and books.free + books.reserved == 10


# ---- D2 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["local", "grpc"])
def test_d2_a_thousand_calls_that_nobody_waits_for(connect, server, transport):
    holder, caller = connect(), connect(transport)
    num_threads = threading.active_count()
    before = len(list(Path(f"/proc/{server.pid}/task").iterdir()))
    with holder.acquire([1] * BLOCK_SIZE * NUM_BLOCKS):
        for _ in range(1000):
            with pytest.raises((DeadlineExceeded, Exhausted)):
                caller.acquire([5, 6], capacity_wait_ms=1, timeout=-0.0005)
        started = time.monotonic()
        caller.lookup([5, 6])
        assert time.monotonic() - started < 1.0
        until(lambda: holder.stats().num_waiting == 0, "nobody waits", 1.0)
        assert holder.stats().num_leases == 1
    assert threading.active_count() <= num_threads + 2
    assert len(list(Path(f"/proc/{server.pid}/task").iterdir())) <= before + 2
    with caller.acquire([5, 6]):
        pass


@pytest.mark.parametrize("transport", ["local", "grpc"])
def test_d2_cancelled_between_the_lock_and_the_reply(connect, server, gate, transport):
    """The copy of a partial tail runs: blocks are taken, and there is no answer yet."""
    observer = connect()
    worker = Worker(server.socket_dir, transport, 100).open()
    worker.publish(1, worker.tokens(12))
    gate.touch()
    try:
        sent = worker.send(acquire(2, [*worker.tokens(10), 7, 7], partial_tail=True))
        until(lambda: observer.stats().num_leases == 2, "blocks are taken")
        cancelled = worker.send(release(2))
    finally:
        gate.unlink()
    assert [code(reply) for reply in worker.peer.wait_for([*sent, *cancelled])] == ["OK", "OK"]
    assert observer.stats().num_leases == 1
    worker.bye()


# ---- no deadlock ---------------------------------------------------------------------------


class Greedy(threading.Thread):
    """Holds half of the pool and wants six blocks more; frees the half when asked to."""

    def __init__(self, client: Client, base: int, barrier: threading.Barrier) -> None:
        super().__init__(daemon=True)
        self.client = client
        self.half = list(range(base, base + BLOCK_SIZE * NUM_BLOCKS // 2))
        self.more = list(range(base + 500, base + 500 + BLOCK_SIZE * 6))
        self.barrier = barrier
        self.num_preempted = 0
        self.finished = False

    def run(self) -> None:
        """Give way when pressed, and begin again afterwards."""
        half = self.client.acquire(self.half)
        self.barrier.wait(10.0)
        pending = self.client.acquire_nowait(self.more, capacity_wait_ms=10_000)
        while not pending.done():
            self.client.poll(0.01)
            if self.client.pressure and not half.ended:
                self.num_preempted += 1
                half.release("preempted")
        with pending.result() as more:
            self.compute(more, self.more)
        if half.ended:
            half = self.client.acquire(self.half, resumed=True, capacity_wait_ms=10_000)
        with half:
            self.compute(half, self.half)
        self.finished = True

    def compute(self, lease: Lease, tokens: list[int]) -> None:
        kv = kv_of(self.client, tokens)
        kv.check(lease.block_table, 0, lease.cached_tokens)
        kv.write(lease.block_table, lease.cached_tokens, len(tokens))
        lease.commit(len(tokens))
        kv.check(lease.block_table, 0, len(tokens))


def test_two_workers_that_hold_half_and_want_more_both_finish(connect):
    barrier = threading.Barrier(2)
    workers = [
        Greedy(connect(transport), 1000 * number, barrier)
        for number, transport in enumerate(("local", "grpc"), 1)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(15.0)
    assert all(worker.finished for worker in workers)
    assert 1 <= sum(worker.num_preempted for worker in workers) <= 2
    assert workers[0].client.stats().counters.pressure_events >= 1
