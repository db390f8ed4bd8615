"""The server killed with SIGKILL, under load, while every operation is unanswered.

Calls fail with Unavailable within a second; workers reconnect to the next server, whose pool is
another one; views of the old one are refused; all of them finish with right bytes.
"""

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from radixkv_client import Client, Unavailable
from tests.bystander import MODEL, NAMESPACE, Rounds
from tests.fault_surroundings import until
from tests.fingerprints import KV_SPEC, SequenceKV
from tests.server_process import ServerProcess

NUM_BLOCKS = 320
FAIL_S = 1.0
NUM_REPEATS = 20


def connect(server, transport):
    return Client.connect(
        server.socket_dir, model=MODEL, kv_spec=KV_SPEC, transport=transport, timeout=20.0
    )


@pytest.fixture
def gate(tmp_path):
    return tmp_path / "closed"


@pytest.fixture
def server(gate):
    options = ("--check-invariants", "--block-size", "4")
    server = ServerProcess(*options, gpu_blocks=NUM_BLOCKS, env={"COPY_GATE": str(gate)})
    server.command[2] = "tests.gated_server"
    with server:
        yield server


def batch(client, lease):
    with client.batch() as gathered:
        pending = gathered.acquire([1, 2, 3])
        gathered.release(lease)
    return pending.result()


# Asked of a lease of ten committed tokens while the server does not answer.
UNANSWERED: dict[str, Callable[[Client, Any], object]] = {
    "acquire cold": lambda client, lease: client.acquire([9, 9, 9]),
    "acquire hit": lambda client, lease: client.acquire(lease.prompt),
    "extend": lambda client, lease: lease.extend(1),
    "append": lambda client, lease: lease.append_blocks(1),
    "trim": lambda client, lease: lease.trim(9),
    "fork": lambda client, lease: lease.fork(2, 10),
    "commit": lambda client, lease: lease.commit(12, [1, 2]),
    "release": lambda client, lease: lease.release(),
    "release with commit": lambda client, lease: lease.release(commit=(12, [1, 2])),
    "batch": batch,
    "lookup": lambda client, lease: client.lookup([1, 2, 3, 4, 5]),
}


def waits_for_computation(client, lease):
    """Another lease of the same worker is computing it."""
    prompt = [token + 500_000 for token in lease.prompt]
    client.acquire(prompt)
    return client.acquire_nowait(prompt, wait_ms=60_000)


def waits_for_room(client, lease):
    return client.acquire_nowait([8] * 4 * (NUM_BLOCKS - 20), capacity_wait_ms=60_000)


def waits_for_copy(client, lease):
    return client.acquire_nowait([*lease.prompt[:6], 7, 7], partial_tail=True)


# Begun while the server still answers; it has them when it dies. The last one fills the queue.
DEFERRED: dict[str, Callable[[Client, Any], Any]] = {
    "waiting for a computation": waits_for_computation,
    "waiting for a copy": waits_for_copy,
    "waiting for room": waits_for_room,
}


class Worker:
    """One client with a lease, brought to a point."""

    def __init__(self, server, name, transport, base):
        self.name = f"{name} over {transport}"
        self.point = name
        self.client = connect(server, transport)
        self.prompt = list(range(base, base + 10))
        self.lease = self.compute()
        self.lease.prompt = self.prompt
        self.pending = None

    def compute(self):
        """A whole prefill: what is there is right, and the rest is written."""
        kv = SequenceKV(self.client.pool.as_numpy(), NAMESPACE, self.prompt)
        lease = self.client.acquire(self.prompt)
        kv.check(lease.block_table, 0, lease.cached_tokens)
        kv.write(lease.block_table, lease.cached_tokens, 10)
        lease.commit(10)
        kv.check(lease.block_table, 0, 10)
        return lease

    def begin(self):
        if self.point in DEFERRED:
            self.pending = DEFERRED[self.point](self.client, self.lease)
            until(self.has_begun, self.name)

    def has_begun(self):
        sessions = self.client.sessions()
        (info,) = [info for info in sessions if info.session_id == self.client.session_id]
        return info.num_waiting or ("copy" in self.point and info.num_leases == 2)

    def call(self):
        """What must fail; returns when it did, on the monotonic clock."""
        with pytest.raises(Unavailable):
            if self.pending is not None:
                self.pending.result()
            else:
                UNANSWERED[self.point](self.client, self.lease)
        return time.monotonic()

    def check_lost(self):
        """Whatever is asked now fails at once; views of the pool are refused."""
        started = time.monotonic()
        for call in (lambda: self.client.acquire([1]), lambda: self.lease.extend(1)):
            with pytest.raises(Unavailable):
                call()
        assert time.monotonic() - started < FAIL_S, self.name

    def finish(self):
        """On the next server."""
        pool, incarnation = self.client.pool, self.client.incarnation
        self.check_lost()
        assert self.client.reconnect(timeout=10.0)
        assert self.client.pool is not pool and self.client.incarnation != incarnation
        with pytest.raises(Unavailable, match="anew"):
            pool.as_numpy()
        with pytest.raises(Unavailable):
            self.lease.extend(1)
        with self.compute():
            pass
        self.client.close()


class Load(threading.Thread):
    """A worker that works on through restarts."""

    def __init__(self, server, transport, seed):
        super().__init__(daemon=True)
        self.client = connect(server, transport)
        self.rounds = Rounds(self.client, seed)
        self.rounds.max_round_s = 30.0
        self.num_restarts = 0
        self.error = None
        self.stop = threading.Event()

    def run(self):
        try:
            while not self.stop.wait(0.002):
                try:
                    self.rounds.round()
                except Unavailable:
                    self.num_restarts += self.client.reconnect(timeout=20.0)
            self.client.close()
        except BaseException as error:
            self.error = error
            raise

    def check_at_work(self):
        before = self.rounds.num_rounds
        until(lambda: self.rounds.num_rounds > before + 3 or self.error, "the load goes on", 10.0)
        assert self.error is None

    def end(self):
        self.stop.set()
        self.join(20.0)
        assert not self.is_alive() and self.error is None


def start_load(server, stack):
    loads = [Load(server, transport, seed) for seed, transport in enumerate(["local", "grpc"])]
    for load in loads:
        load.start()
        stack.callback(load.stop.set)
        load.check_at_work()
    return loads


def check_clean(server):
    with connect(server, "local") as client:
        stats = client.stats()
        assert (stats.num_leases, stats.num_waiting) == (0, 0)
        books = stats.books
        assert books.cached + books.free + books.reserved == NUM_BLOCKS


def test_the_server_is_killed_at_every_point_of_its_workers(server, gate):
    names = [*UNANSWERED, *DEFERRED]
    places = [(name, transport) for name in names for transport in ("local", "grpc")]
    with ExitStack() as stack, ThreadPoolExecutor(len(places)) as threads:
        loads = start_load(server, stack)
        workers = [
            Worker(server, name, transport, 10_000 + 100 * number)
            for number, (name, transport) in enumerate(places)
        ]
        gate.touch()
        for worker in workers:
            worker.begin()
        server.signal(signal.SIGSTOP)
        calls = [threads.submit(worker.call) for worker in workers]
        time.sleep(0.3)
        early = [(w.name, c.exception()) for w, c in zip(workers, calls, strict=True) if c.done()]
        assert not early
        killed_at = time.monotonic()
        server.kill()
        late = [
            (worker.name, call.result(20.0) - killed_at)
            for worker, call in zip(workers, calls, strict=True)
        ]
        assert not [entry for entry in late if entry[1] > FAIL_S], late
        list(threads.map(Worker.check_lost, workers))
        gate.unlink()
        server.restart()
        list(threads.map(Worker.finish, workers))
        for load in loads:
            load.check_at_work()
            load.end()
            assert load.num_restarts == 1
    check_clean(server)


@pytest.mark.slow
def test_the_server_is_killed_again_and_again_under_load(server):
    chance = random.Random(2)
    with ExitStack() as stack:
        loads = start_load(server, stack)
        for _ in range(NUM_REPEATS):
            time.sleep(chance.random() * 0.3)
            server.restart()
            for load in loads:
                load.check_at_work()
        for load in loads:
            load.end()
            assert load.num_restarts == NUM_REPEATS
    check_clean(server)
