"""Sessions over a real server, by raw messages, on both transports."""

import pickle
import random
import struct

import grpc
import pytest

from radixkv.v1 import cache_pb2
from radixkv.v1 import session_pb2 as pb
from tests.naive_model import ints
from tests.server_process import ServerProcess
from tests.session_rig import acquire, code, commit, extend, fork, refill, release
from tests.wire_peer import SPEC, Cut, LocalStream, WirePeer, unary

NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--check-invariants", "--block-size", "4", gpu_blocks=NUM_BLOCKS) as server:
        yield server


@pytest.fixture(params=["local", "grpc"])
def transport(request):
    return request.param


@pytest.fixture
def connect(server, transport):
    """Makes peers, and ends their sessions."""
    peers = []

    def make() -> WirePeer:
        peers.append(WirePeer(server.socket_dir, transport))
        return peers[-1]

    yield make
    for peer in peers:
        peer.finish()
    everything = cache_pb2.InvalidateRequest(everything=True)
    unary(server.ready["grpc"], "Invalidate", everything, cache_pb2.InvalidateReply)
    assert stats(server).books == cache_pb2.Books(free=NUM_BLOCKS, total=NUM_BLOCKS)


def stats(server) -> cache_pb2.StatsReply:
    """Over gRPC, as tools ask."""
    return unary(server.ready["grpc"], "Stats", cache_pb2.StatsRequest(), cache_pb2.StatsReply)


def codes(replies):
    return [code(reply) for reply in replies]


# ---- the ordinary life of a session --------------------------------------------------------


def test_a_session_from_hello_to_bye(connect, server):
    peer = connect().open()
    replies = peer.step(acquire(1, range(10)), commit(1, 8), refill(2), extend(1, 1))
    assert codes(replies) == ["OK"] * 4
    tail = ints(replies[0].acquire.block_table)[2]
    replies = peer.step(fork(1, [2, 3], 10, tail), release(2), release(3), extend(1, 1))
    assert codes(replies) == ["OK"] * 4
    assert peer.step(acquire(4, range(10)))[0].acquire.cached_tokens == 8
    sessions = unary(
        server.ready["grpc"], "Sessions", cache_pb2.SessionsRequest(), cache_pb2.SessionsReply
    ).sessions
    (info,) = [info for info in sessions if info.session_id == peer.session_id]
    assert info.transport == peer.transport and info.num_leases == 2 and info.reserved_blocks == 2
    peer.bye()
    assert stats(server).books.cached >= 2


def test_two_sessions_share_a_prefix_and_tools_see_it(connect, server):
    one, two = connect().open(), connect().open()
    table = ints(one.step(acquire(1, range(500, 512)), commit(1, 12))[0].acquire.block_table)
    reply = two.step(acquire(1, range(500, 513)))[0].acquire
    assert reply.cached_tokens == 12 and ints(reply.block_table)[:3] == table
    request = cache_pb2.LookupRequest(
        namespace={"model_fingerprint": "model"}, tokens=struct.pack("<13i", *range(500, 513))
    )
    for address in (server.ready["grpc"], server.ready["tools"]):
        found = unary(address, "Lookup", request, cache_pb2.LookupReply)
        assert found.cached_tokens == 12


def test_a_session_outlives_its_stream(connect):
    peer = connect().open()
    peer.step(acquire(1, range(10)))
    peer.cut()
    assert peer.resume().last_step == 1
    assert codes(peer.step(commit(1, 8), release(1))) == ["OK", "OK"]


def test_an_answer_that_becomes_ready_meanwhile_is_waiting(connect, server):
    holder, peer = connect().open(), connect().open()
    assert codes(holder.step(acquire(1, range(NUM_BLOCKS * 4)))) == ["OK"]
    peer.send(acquire(1, range(8), capacity_wait_ms=60_000), commit(1, 8))
    while not stats(server).num_waiting:
        pass
    peer.cut()
    holder.step(release(1))
    peer.resume()
    assert codes(peer.wait_for([1, 2])) == ["OK", "OK"]


def test_pressure_reaches_the_largest_holder(connect):
    holder, peer = connect().open(), connect().open()
    holder.step(acquire(1, range(NUM_BLOCKS * 4)))
    peer.send(acquire(1, range(8), capacity_wait_ms=60_000))
    while not holder.messages:
        holder.read_one()
    assert holder.messages[0].pressure.num_blocks == 2
    holder.step(release(1, reason=pb.PREEMPTED))
    assert codes(peer.wait_for([1])) == ["OK"]


# ---- Hello ---------------------------------------------------------------------------------


def spec(**changes):
    copy = pb.KVSpec()
    copy.CopyFrom(SPEC)
    for name, value in changes.items():
        setattr(copy, name, value)
    return copy


BAD_HELLOS = {
    "version": ({"protocol_version": 2}, "INVALID_ARGUMENT", "protocol_version is 2"),
    "token": ({"session_token": bytes(16)}, "PERMISSION_DENIED", "session token"),
    "token size": ({"session_token": b"x"}, "INVALID_ARGUMENT", "16 bytes"),
    "no model": ({"model_fingerprint": ""}, "INVALID_ARGUMENT", "model_fingerprint"),
    "long model": ({"model_fingerprint": "m" * 257}, "INVALID_ARGUMENT", "model_fingerprint"),
    "no spec": ({"kv_spec": None}, "INVALID_ARGUMENT", "kv_spec"),
    "spec sum": ({"kv_spec": spec(block_bytes=9)}, "INVALID_ARGUMENT", "kv_spec.block_bytes"),
    "dtype": ({"kv_spec": spec(dtype="int4")}, "INVALID_ARGUMENT", "kv_spec.dtype"),
    "layout": ({"kv_spec": spec(layout="TDHKL")}, "INVALID_ARGUMENT", "kv_spec.layout"),
    "zero layers": ({"kv_spec": spec(num_layers=0)}, "INVALID_ARGUMENT", "kv_spec.num_layers"),
    "huge layers": (
        {"kv_spec": spec(num_layers=2**32 - 1)}, "INVALID_ARGUMENT", "kv_spec.num_layers",
    ),
    "block size": (
        {"kv_spec": spec(block_size=8, block_bytes=16)}, "FAILED_PRECONDITION", "block_size",
    ),
    "geometry": (
        {"kv_spec": spec(num_layers=2, block_bytes=16)}, "FAILED_PRECONDITION", "num_layers",
    ),
    "placeholders": ({"placeholder_tokens": [-1]}, "INVALID_ARGUMENT", "placeholder_tokens"),
    "many placeholders": ({"placeholder_tokens": range(65)}, "INVALID_ARGUMENT", "65 entries"),
    "resume of nothing": ({"resume": True}, "PERMISSION_DENIED", "belongs to no session"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_HELLOS)
def test_a_refused_hello_says_why_and_closes(connect, name):
    changes, status, words = BAD_HELLOS[name]
    connect().open().bye()  # the spec is fixed by now
    peer = connect()
    reply = peer.hello(**changes)
    assert (code(reply), words in reply.status.message) == (status, True), reply
    assert reply.kv_spec == SPEC and not reply.session_id
    with pytest.raises(Cut):
        peer.stream.receive()


def test_a_session_token_works_once(connect):
    peer = connect().open()
    other = connect()
    assert code(other.hello(session_token=peer.token)) == "PERMISSION_DENIED"


def test_a_resume_must_fit_the_session(connect):
    peer = connect().open()
    peer.step(refill(1), refill(1))
    for changes, words in (
        ({"model_fingerprint": "other"}, "model_fingerprint"),
        ({"kv_spec": spec(backend="other")}, "kv_spec"),
        ({"replies_seen": 3}, "replies_seen"),
    ):
        other = connect()
        fields = {"session_token": peer.token, "resume": True, "replies_seen": 2} | changes
        reply = other.hello(**fields)
        assert reply.status.code != pb.OK and words in reply.status.message
    assert codes(peer.step(refill(1))) == ["OK"]


def test_the_newest_hello_carries_the_session(connect):
    peer = connect().open()
    peer.step(refill(1))
    old, peer.stream = peer.stream, None
    attach = peer.attach
    assert peer.resume().status.code == pb.OK
    with pytest.raises(Cut):
        old.receive()
    assert codes(peer.step(refill(1))) == ["OK"]
    attach.close()


def test_a_session_changes_its_transport(connect, server):
    peer = connect().open()
    peer.step(acquire(1, range(10)))
    for transport in ("grpc", "local", "grpc"):
        peer.transport = transport
        assert peer.resume().status.code == pb.OK
        assert codes(peer.step(refill(1))) == ["OK"]


# ---- broken protocol -----------------------------------------------------------------------

BAD_STREAMS = {
    "step before Hello": (False, pb.ClientMessage(step=pb.Step(number=1)).SerializeToString()),
    "bye before Hello": (False, pb.ClientMessage(bye=pb.Bye()).SerializeToString()),
    "garbage before Hello": (False, b"GET / HTTP/1.1\r\n\r\n"),
    "pickle before Hello": (False, pickle.dumps(random.Random)),
    "no message": (False, b"\x7a\x00"),
    "garbage": (True, b"\xff" * 40),
    "Hello again": (True, pb.ClientMessage(hello=pb.Hello()).SerializeToString()),
    "a gap": (True, pb.ClientMessage(step=pb.Step(number=2)).SerializeToString()),
    "step 0": (True, pb.ClientMessage(step=pb.Step()).SerializeToString()),
    "too many operations": (
        True, pb.ClientMessage(step=pb.Step(number=1, ops=[pb.Op()] * 1025)).SerializeToString(),
    ),
    "replies from the future": (
        True, pb.ClientMessage(step=pb.Step(number=1, replies_seen=9)).SerializeToString(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_who_breaks_the_protocol_is_told_and_hurts_nobody(connect, server, name):
    greeted, data = BAD_STREAMS[name]
    good = connect().open()
    assert codes(good.step(acquire(1, range(10)))) == ["OK"]
    bad = connect()
    if greeted:
        bad.open()
    bad.stream.send(data)
    status = bad.ended()
    assert status.code == pb.INVALID_ARGUMENT and status.message
    if greeted:
        assert code(bad.resume()) == "FAILED_PRECONDITION"
    assert codes(good.step(commit(1, 8), release(1))) == ["OK", "OK"]


@pytest.mark.parametrize("header", [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x01\0\0\1"])
def test_a_frame_of_an_impossible_length_ends_the_connection(server, header):
    stream = LocalStream(server.socket_dir / "attach.sock")
    stream.receive()
    stream.send_raw(header + b"x" * 100)
    status = stream.receive().ended.status
    assert status.code == pb.INVALID_ARGUMENT and "bytes" in status.message
    with pytest.raises(Cut):
        stream.receive()
    stream.close()


def test_a_window_of_eight_steps_is_enforced(connect):
    peer = connect().open()
    for _ in range(9):
        peer.send(extend(1, 1))
        peer.num_ops = 0  # the peer does not look at replies
    assert "more than 8 Steps" in peer.ended().message


def test_sessions_are_not_served_over_tcp(server):
    with grpc.insecure_channel(server.ready["tools"]) as channel:
        call = channel.stream_stream("/radixkv.v1.Cache/Session")(iter([b""]), timeout=5)
        with pytest.raises(grpc.RpcError) as error:
            next(call)
    assert error.value.code() == grpc.StatusCode.PERMISSION_DENIED
