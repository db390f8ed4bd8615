"""Peers that are slow, silent or noisy: the server's memory stays bounded, others are served."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from radixkv.v1 import cache_pb2
from radixkv.v1 import session_pb2 as pb
from radixkv.wire import limits
from radixkv.wire.channel import client_options
from radixkv_client import Client, DeadlineExceeded
from tests.fault_surroundings import memory_kib, until
from tests.fault_worker import Worker
from tests.fingerprints import KV_SPEC
from tests.server_process import ServerProcess
from tests.session_rig import acquire, code, commit, release
from tests.wire_peer import Cut, LocalStream, WirePeer, unary

NUM_CONNECTIONS = 400
NUM_SLOW = 20
MAX_GROWTH_KIB = 96 << 10  # 32 MiB unsent for a peer that does not read, and what made it
POOL_BLOCKS = 8192
LEASE_BLOCKS = 4000  # 16 KB of table
OPS_PER_STEP = 40
LAG = 5  # Steps whose replies a peer that does not read does not claim to have seen
PACE_S = 0.005
MAX_STEPS = 1000  # 320 MB of replies
MAX_SERVED_S = 1.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--block-size", "4", gpu_blocks=POOL_BLOCKS) as server:
        yield server


@pytest.fixture
def served(server):
    """Somebody who must be served meanwhile; afterwards memory must not have grown much."""
    worker = Worker(server.socket_dir, "local", 1_000).open()
    before = memory_kib(server.pid)
    check_served(worker)

    def check() -> int:
        check_served(worker)
        grown = memory_kib(server.pid) - before
        assert grown < MAX_GROWTH_KIB, f"{grown} KiB more"
        return grown

    yield check
    check()
    worker.bye()


def check_served(worker: Worker) -> None:
    started = time.monotonic()
    worker.do(acquire(1, worker.tokens(9)), commit(1, 9), release(1))
    assert time.monotonic() - started < MAX_SERVED_S


def num_acquires(server) -> int:
    reply = unary(server.grpc_target, "Stats", cache_pb2.StatsRequest(), cache_pb2.StatsReply)
    return reply.counters.acquires


def attached(server) -> LocalStream:
    """A connection; tried again while the queue of those not accepted yet is full."""
    while True:
        try:
            return LocalStream(server.socket_dir / "attach.sock")
        except BlockingIOError:
            time.sleep(0.001)


def num_descriptors(server) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def greedy_steps(peer: WirePeer) -> Iterator[bytes]:
    """Steps whose replies are hundreds of times as large, acknowledged without being read."""
    while True:
        peer.replies = dict.fromkeys(range(max(len(peer.steps) - LAG, 0) * OPS_PER_STEP))
        acquired = acquire(1, [1], extra_blocks=LEASE_BLOCKS)
        yield peer.make_step(*[acquired, release(1)] * (OPS_PER_STEP // 2))
        time.sleep(PACE_S)


def test_a_peer_sends_steps_and_never_reads(server, served):
    """It is not read from either, once enough waits for it."""
    peer = WirePeer(server.socket_dir, "local", KV_SPEC.to_proto()).open()
    peer.stream.socket.settimeout(1.0)
    with pytest.raises(Cut, match="timed out"):
        for data in greedy_steps(peer):
            peer.stream.send(data)
            assert len(peer.steps) < MAX_STEPS, "the server reads on and on"
    served()
    peer.close()


def test_a_grpc_peer_sends_steps_and_never_reads(server, served):
    peer = WirePeer(server.socket_dir, "local", KV_SPEC.to_proto())
    hello = pb.Hello(
        session_token=peer.token, protocol_version=1, model_fingerprint="model",
        kv_spec=KV_SPEC.to_proto(),
    )  # fmt: skip
    over = threading.Event()

    def messages() -> Iterator[bytes]:
        yield pb.ClientMessage(hello=hello).SerializeToString()
        for data in greedy_steps(peer):
            if over.is_set():
                return
            yield data

    with grpc.insecure_channel(server.grpc_target, options=client_options()) as channel:
        call = channel.stream_stream("/radixkv.v1.Cache/Session")(messages())
        before, done = -1, num_acquires(server)
        while done > before:
            assert done < MAX_STEPS * OPS_PER_STEP, "the server reads on and on"
            time.sleep(0.5)
            before, done = done, num_acquires(server)
        assert done > 100 * OPS_PER_STEP // 2
        served()
        over.set()
        call.cancel()
    peer.close()


def test_steps_beyond_the_window_end_the_session_and_are_not_kept(server, served):
    for _ in range(3):
        peer = WirePeer(server.socket_dir, "local", KV_SPEC.to_proto()).open()
        with contextlib.suppress(Cut):
            for _ in range(500):
                peer.send(*[release(99)] * 100)
        with contextlib.suppress(Cut, TimeoutError, AssertionError):
            peer.ended()
        peer.close()
        served()
    assert served() < 16 << 10


def test_peers_send_a_byte_now_and_then(server, served):
    """The largest length is announced that is allowed; only what comes takes memory."""
    streams = [attached(server) for _ in range(NUM_SLOW)]
    for stream in streams:
        stream.send_raw(limits.MAX_HELLO_BYTES.to_bytes(4, "little"))
    for _ in range(20):
        for stream in streams:
            stream.send_raw(b"\x0a")
        time.sleep(0.02)
    assert served() < 16 << 10
    for stream in streams:
        stream.close()


def test_one_hello_byte_by_byte_is_a_hello(server, served):
    peer = WirePeer(server.socket_dir, "local", KV_SPEC.to_proto())
    hello = pb.Hello(
        session_token=peer.token, protocol_version=1, model_fingerprint="model",
        kv_spec=KV_SPEC.to_proto(),
    )  # fmt: skip
    data = pb.ClientMessage(hello=hello).SerializeToString()
    for byte in len(data).to_bytes(4, "little") + data:
        peer.stream.send_raw(bytes([byte]))
        time.sleep(0.002)
    assert code(peer.stream.receive().hello) == "OK"
    served()
    peer.stream.receive()
    peer.bye()


def test_hundreds_of_connections_that_say_nothing(server, served):
    before = num_descriptors(server)
    streams = [attached(server) for _ in range(NUM_CONNECTIONS)]
    for _ in range(NUM_CONNECTIONS // 2):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(str(server.socket_dir / "grpc.sock"))
        streams.append(raw)
    served()
    for stream in streams:
        stream.close()
    until(lambda: num_descriptors(server) <= before + 2, "the connections are closed")
    assert served() < 32 << 10


def test_a_full_queue_of_connections_is_waited_for(server, served):
    queued = []
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(BlockingIOError):
            while True:
                raw = socket.socket(socket.AF_UNIX)
                raw.setblocking(False)
                raw.connect(server.attach_path)
                queued.append(raw)
        with pytest.raises(DeadlineExceeded):
            connect(server, timeout=0.2)
        resume = threading.Timer(0.2, server.signal, [signal.SIGCONT])
        resume.start()
        connect(server, timeout=10.0).close()
    finally:
        server.signal(signal.SIGCONT)
    for raw in queued:
        raw.close()
    served()


def connect(server, timeout: float) -> Client:
    return Client.connect(server.socket_dir, model="model", kv_spec=KV_SPEC, timeout=timeout)


def test_connections_come_and_go(server, served):
    before = num_descriptors(server)

    def churn() -> None:
        for _ in range(NUM_CONNECTIONS):
            stream = attached(server)
            stream.send_raw(b"\x40\0\0\0\x0a")
            stream.close()

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        served()
        time.sleep(0.02)
    until(lambda: num_descriptors(server) <= before + 2, "the connections are closed")
    assert served() < 16 << 10


@pytest.mark.slow
def test_who_says_nothing_is_sent_away_in_time(server, served):
    streams = [attached(server) for _ in range(NUM_SLOW)]
    started = time.monotonic()
    for stream in streams:
        assert stream.receive().HasField("attached")
    for stream in streams:
        assert "no Hello" in stream.receive(60.0).ended.status.message
        with pytest.raises(Cut):
            stream.receive()
        stream.close()
    assert 25 < time.monotonic() - started < 45
