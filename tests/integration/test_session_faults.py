"""Cuts, lost replies, deaths and stops, over a real server (cases D2, D3, D4, D6)."""

import os
import signal
import time

import pytest

from radixkv.v1 import cache_pb2
from radixkv.v1 import session_pb2 as pb
from tests.naive_model import ints
from tests.server_process import ServerProcess
from tests.session_rig import acquire, code, commit, extend, fork, refill, release
from tests.wire_peer import WirePeer, unary
from tests.wire_worker import WorkerProcess

NUM_BLOCKS = 64
DEADLINE_S = 5.0


@pytest.fixture(scope="module")
def server():
    options = ("--check-invariants", "--block-size", "4", "--session-alarm", "0.3")
    with ServerProcess(*options, gpu_blocks=NUM_BLOCKS) as server:
        yield server


@pytest.fixture(params=["local", "grpc"])
def transport(request):
    return request.param


@pytest.fixture(autouse=True)
def everything_is_returned(server):
    yield
    until(lambda: call(server, "Stats").num_sessions == 0)
    invalidate(server)
    assert books(server) == cache_pb2.Books(free=NUM_BLOCKS, total=NUM_BLOCKS)


def call(server, method, **fields):
    request, reply = (getattr(cache_pb2, method + kind) for kind in ("Request", "Reply"))
    return unary(server.ready["grpc"], method, request(**fields), reply)


def books(server):
    return call(server, "Stats").books


def invalidate(server):
    call(server, "Invalidate", everything=True)


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def codes(replies):
    return [code(reply) for reply in replies]


# ---- cuts at every frame boundary ----------------------------------------------------------


class CuttingPeer(WirePeer):
    """Cuts its stream after the frame of number `cut_at` (sent or received), then resumes.

    With `inside`, the frame to send is cut in its middle.
    """

    cut_at = 10**9
    inside = False
    num_frames = 0

    def frame(self) -> None:
        self.num_frames += 1
        if self.num_frames == self.cut_at:
            self.cut()
            assert self.resume().status.code == pb.OK

    def send(self, *ops: pb.Op) -> None:
        data = self.make_step(*ops)
        if self.inside and self.num_frames + 1 == self.cut_at:
            frame = len(data).to_bytes(4, "little") + data
            self.stream.send_raw(frame[: len(frame) // 2])
        else:
            self.stream.send(data)
        self.frame()

    def read_one(self, timeout: float = 10.0) -> None:
        super().read_one(timeout)
        self.frame()


def run_script(server, transport, cut_at, inside=False):
    """Immediate, failing, waiting and copying operations; returns answers and frames used."""
    peer = CuttingPeer(server.socket_dir, transport).open()
    peer.cut_at, peer.inside = cut_at, inside
    first = peer.step(acquire(1, range(6)), commit(1, 4))
    tail = ints(first[0].acquire.block_table)[1]
    peer.send(acquire(4, [*range(3), 9, 9], partial_tail=True))
    peer.send(acquire(2, range(100, 100 + 4 * NUM_BLOCKS - 4), capacity_wait_ms=60_000))
    peer.send(extend(2, 1), release(77))
    peer.send(fork(1, [3], 6, tail), commit(4, 5))
    peer.send(release(3), release(4), release(1))
    peer.wait_for(range(3, peer.num_ops + 1))
    peer.step(release(2), refill(2))
    peer.wait_for(range(1, peer.num_ops + 1))
    answers = {reply.op_id: code(reply) for reply in peer.replies.values()}
    assert sorted(answers) == list(range(1, peer.num_ops + 1))
    num_frames = peer.num_frames
    peer.cut_at = 10**9
    peer.bye()
    invalidate(server)
    return answers, num_frames


@pytest.mark.parametrize(
    ("transport", "inside"), [("local", False), ("local", True), ("grpc", False)]
)
def test_a_cut_at_any_frame_changes_nothing(server, transport, inside):
    """D4: each operation is carried out once, whatever was lost."""
    expected, num_frames = run_script(server, transport, 10**9)
    assert set(expected.values()) == {"OK", "NOT_FOUND"} and num_frames >= 10
    before = call(server, "Stats").counters
    for cut_at in range(1, num_frames + 3):
        answers, _ = run_script(server, transport, cut_at, inside)
        assert answers == expected, cut_at
    after = call(server, "Stats").counters
    assert after.forks - before.forks == num_frames + 2
    assert after.acquires - before.acquires == 3 * (num_frames + 2)


def test_a_reply_from_a_forgotten_session_is_a_clean_error(server, transport):
    """D4: the retry of an operation after its session is gone."""
    peer = WirePeer(server.socket_dir, transport).open()
    peer.step(acquire(1, range(6)))
    peer.bye()
    if transport == "grpc":
        peer.attach = WirePeer(server.socket_dir, "local").attach
    assert code(peer.resume()) == "PERMISSION_DENIED"
    peer.close()


# ---- deaths (D3) ---------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", ["attached", "hello", "waiting", "leased"])
def test_a_killed_worker_loses_only_its_own(server, transport, stop_at):
    peer = WirePeer(server.socket_dir, transport).open()
    peer.step(acquire(1, range(1000, 1010)))
    before = books(server)
    tokens = 4 * NUM_BLOCKS if stop_at == "waiting" else 2 * NUM_BLOCKS
    for _ in range(3):
        with WorkerProcess(server.socket_dir, transport, stop_at, tokens) as worker:
            if stop_at == "leased":
                assert books(server).leased == before.leased + NUM_BLOCKS // 2
            if stop_at == "waiting":
                until(lambda: call(server, "Stats").num_waiting == 1)
            worker.process.kill()
            until(lambda: books(server).leased == before.leased)
        assert codes(peer.step(extend(1, 1), pb.Op(trim=pb.Trim(lease_id=1, upto=10)))) == [
            "OK", "OK",
        ]  # fmt: skip
        reserve = peer.replies[len(peer.replies)].trim.to_reserve
        assert codes(peer.step(pb.Op(give_back=pb.GiveBack(blocks=reserve)))) == ["OK"]
    if stop_at == "leased":
        found = peer.step(acquire(2, range(NUM_BLOCKS + 1)))[0].acquire
        assert found.cached_tokens == NUM_BLOCKS, "what it had committed stays"
    peer.bye()


@pytest.mark.slow
def test_twenty_killed_workers_leave_the_server_as_it_was(server, transport):
    """D3: descriptors and books flat."""
    descriptors = []
    for _ in range(20):
        with WorkerProcess(server.socket_dir, transport, "leased", 2 * NUM_BLOCKS) as worker:
            worker.process.kill()
            until(lambda: books(server).leased == 0)
        descriptors.append(len(os.listdir(f"/proc/{server.pid}/fd")))
    assert descriptors[-1] <= descriptors[2] + 2


def test_a_killed_worker_makes_room_for_a_waiting_one(server, transport):
    peer = WirePeer(server.socket_dir, transport).open()
    with WorkerProcess(server.socket_dir, transport, "leased", 4 * NUM_BLOCKS) as worker:
        peer.send(acquire(1, range(500, 500 + 3 * NUM_BLOCKS), capacity_wait_ms=60_000))
        until(lambda: call(server, "Stats").num_waiting == 1)
        worker.process.kill()
        assert codes(peer.wait_for([1], timeout=DEADLINE_S)) == ["OK"]
    peer.bye()


def test_a_stopped_worker_keeps_its_blocks_and_raises_an_alarm(server, transport):
    """D6: no lease ends by a clock."""
    with WorkerProcess(server.socket_dir, transport, "leased", 2 * NUM_BLOCKS) as worker:
        worker.process.send_signal(signal.SIGSTOP)
        until(lambda: session_of(server, worker).alarm)
        held = session_of(server, worker)
        assert held.num_leases == 1 and held.silent_ms >= 300
        peer = WirePeer(server.socket_dir, transport).open()
        (reply,) = peer.step(acquire(1, range(5000, 5000 + 3 * NUM_BLOCKS), capacity_wait_ms=300))
        assert code(reply) == "EXHAUSTED" and "48 blocks wanted" in reply.status.message
        worker.process.send_signal(signal.SIGCONT)
        assert worker.ask("extend") == "OK"
        until(lambda: not session_of(server, worker).alarm)
        assert worker.ask("commit") == "OK" and worker.ask("release") == "OK"
        peer.bye()
    alarms = [line for line in server.stderr().splitlines() if "is silent for" in line]
    assert sum(f"session {held.session_id} " in line for line in alarms) == 1


def session_of(server, worker):
    (info,) = [
        info for info in call(server, "Sessions").sessions if worker.process.pid in info.pids
    ]
    return info


def test_kill_session_frees_what_a_stopped_worker_holds(server, transport):
    with WorkerProcess(server.socket_dir, transport, "leased", 2 * NUM_BLOCKS) as worker:
        worker.process.send_signal(signal.SIGSTOP)
        session_id = session_of(server, worker).session_id
        reply = call(server, "KillSession", session_id=session_id)
        assert reply.freed_blocks == NUM_BLOCKS // 4, "the other quarter was committed"
        assert worker.process.wait(DEADLINE_S) == -signal.SIGKILL
        assert books(server).leased == 0


def test_a_session_lasts_as_long_as_any_of_its_processes(server):
    with WorkerProcess(server.socket_dir, "local", "leased", 2 * NUM_BLOCKS) as worker:
        peer = WirePeer(server.socket_dir, "local")
        reply = peer.hello(
            session_token=bytes.fromhex(worker.first_line), resume=True, replies_seen=2
        )
        assert reply.status.code == pb.OK and reply.last_step == 1
        assert len(session_of(server, worker).pids) == 2
        worker.process.kill()
        worker.process.wait()
        time.sleep(0.1)
        assert books(server).leased == NUM_BLOCKS // 2
        peer.stream.send(pb.ClientMessage(bye=pb.Bye()).SerializeToString())
        assert peer.ended().code == pb.OK
        peer.close()


# ---- waiting and expired (D2) --------------------------------------------------------------


def test_cancelled_waiting_acquires_leave_nothing(server, transport):
    holder = WirePeer(server.socket_dir, transport).open()
    peer = WirePeer(server.socket_dir, transport).open()
    holder.step(acquire(1, range(4 * NUM_BLOCKS)))
    ids = range(1, 101)
    peer.send(*[acquire(i, range(9000 + i, 9040 + i), capacity_wait_ms=600_000) for i in ids])
    started = time.monotonic()
    assert codes(peer.step(*[release(i) for i in ids])) == ["OK"] * 100
    assert codes(peer.wait_for(ids)) == ["CANCELLED"] * 100
    call(server, "Lookup", namespace={"model_fingerprint": "model"}, tokens=bytes(40))
    assert time.monotonic() - started < 1.0
    assert call(server, "Stats").num_waiting == 0
    peer.bye()
    holder.bye()


def test_a_thousand_waits_of_a_millisecond_leak_nothing(server, transport):
    holder = WirePeer(server.socket_dir, transport).open()
    peer = WirePeer(server.socket_dir, transport).open()
    holder.step(acquire(1, range(4 * NUM_BLOCKS)))
    for _ in range(10):
        replies = peer.step(*[acquire(i, range(9), capacity_wait_ms=1) for i in range(1, 101)])
        assert codes(replies) == ["EXHAUSTED"] * 100
    assert call(server, "Stats").num_waiting == 0
    holder.bye()
    assert codes(peer.step(acquire(1, range(9), capacity_wait_ms=1))) == ["OK"]
    peer.bye()


def test_the_waiting_acquires_of_a_cut_stream_wait_on(server, transport):
    holder = WirePeer(server.socket_dir, transport).open()
    peer = WirePeer(server.socket_dir, transport).open()
    holder.step(acquire(1, range(4 * NUM_BLOCKS)))
    peer.send(acquire(1, range(9), capacity_wait_ms=600_000))
    until(lambda: call(server, "Stats").num_waiting == 1)
    peer.cut()
    holder.bye()
    until(lambda: call(server, "Stats").num_leases == 1)
    assert peer.resume().status.code == pb.OK
    assert codes(peer.wait_for([1])) == ["OK"]
    peer.bye()
