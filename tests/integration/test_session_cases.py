"""Cases B4 and G1 over a real server, and what must never be in its log."""

import os
import struct
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixkv.v1 import cache_pb2
from radixkv.v1 import session_pb2 as pb
from tests.naive_model import ints
from tests.server_process import ServerProcess
from tests.session_rig import acquire, code, commit, extend, refill, release
from tests.wire_peer import WirePeer, unary

NUM_BLOCKS = 16


@pytest.fixture(scope="module")
def server():
    with ServerProcess("--check-invariants", "--block-size", "4", gpu_blocks=NUM_BLOCKS) as server:
        yield server


@pytest.fixture(params=["local", "grpc"])
def transport(request):
    return request.param


@pytest.fixture
def peers(server, transport):
    """Two sessions, ended afterwards, and an empty cache."""
    peers = [WirePeer(server.socket_dir, transport).open() for _ in range(2)]
    yield peers
    for peer in peers:
        peer.finish()
    everything = cache_pb2.InvalidateRequest(everything=True)
    unary(server.ready["grpc"], "Invalidate", everything, cache_pb2.InvalidateReply)
    assert books(server).free == NUM_BLOCKS


def books(server):
    return unary(
        server.ready["grpc"], "Stats", cache_pb2.StatsRequest(), cache_pb2.StatsReply
    ).books


def lookup(channel, tokens, salt=""):
    call = channel.unary_unary(
        "/radixkv.v1.Cache/Lookup",
        request_serializer=cache_pb2.LookupRequest.SerializeToString,
        response_deserializer=cache_pb2.LookupReply.FromString,
    )
    namespace = cache_pb2.NamespaceRef(model_fingerprint="model", scope=pb.Scope(salt=salt))
    data = struct.pack(f"<{len(tokens)}i", *tokens)
    return call(cache_pb2.LookupRequest(namespace=namespace, tokens=data), timeout=5)


def cpu_s(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- B4 ------------------------------------------------------------------------------------


def test_b4_exhausted_within_the_deadline_without_spinning(server, peers):
    """(i): others go on meanwhile, and after one release the same call succeeds."""
    holder, peer = peers
    holder.step(acquire(1, range(60)), acquire(2, range(100, 104)))
    before, started = cpu_s(server.pid), time.monotonic()
    peer.send(acquire(1, range(200, 203), capacity_wait_ms=500))
    with grpc.insecure_channel(server.ready["grpc"]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        assert health.Check(request, timeout=5).status == health_pb2.HealthCheckResponse.SERVING
        assert lookup(channel, range(5)).cached_tokens == 0
        assert time.monotonic() - started < 0.5
    (reply,) = peer.wait_for([1])
    assert code(reply) == "EXHAUSTED" and "1 blocks wanted, 0 free" in reply.status.message
    assert 0.45 < time.monotonic() - started < 1.5
    assert cpu_s(server.pid) - before < 0.3
    holder.step(release(2))
    assert code(peer.step(acquire(1, range(200, 203), capacity_wait_ms=500))[0]) == "OK"


def test_b4_what_fails_takes_nothing(server, peers):
    """(ii) and (iv): free blocks stay free, and a lease keeps what it has."""
    holder, peer = peers
    table = ints(holder.step(acquire(1, range(20)))[0].acquire.block_table)
    peer.step(acquire(1, range(100, 104)))
    assert books(server).free == 10
    assert code(peer.step(acquire(2, range(200, 248)))[0]) == "EXHAUSTED"
    assert code(peer.step(extend(1, 11))[0]) == "EXHAUSTED"
    assert books(server).free == 10
    peer.step(extend(1, 10))
    assert code(holder.step(extend(1, 1))[0]) == "EXHAUSTED"
    (reply,) = holder.step(commit(1, 20))
    assert reply.commit.published_tokens == 20
    holder.step(release(1))
    again = ints(holder.step(acquire(2, range(20)))[0].acquire.block_table)
    assert again[:4] == table[:4]


def test_b4_what_can_never_fit_is_refused_at_once(peers):
    """(v)"""
    started = time.monotonic()
    (reply,) = peers[0].step(acquire(1, range(17 * 4), capacity_wait_ms=60_000))
    assert code(reply) == "TOO_LARGE" and time.monotonic() - started < 5
    assert "17 blocks" in reply.status.message and "16" in reply.status.message


# ---- G1 ------------------------------------------------------------------------------------


def tenant_story(peer, salt, lease_id):
    """What a tenant sees of a prompt: all replies, but for which blocks were free."""
    scope = pb.Scope(salt=salt)
    replies = peer.step(
        acquire(lease_id, range(9), scope=scope), commit(lease_id, 8), release(lease_id),
        acquire(lease_id, range(10), scope=scope, partial_tail=True), release(lease_id),
    )  # fmt: skip
    seen = []
    for reply in replies:
        copy = pb.Reply()
        copy.CopyFrom(reply)
        copy.ClearField("number")
        copy.ClearField("op_id")
        copy.acquire.block_table = bytes(len(copy.acquire.block_table))
        seen.append(copy)
    return seen


def test_g1_a_tenant_sees_the_same_whether_another_had_the_prompt(server, peers):
    one, two = peers
    alone = tenant_story(two, "b", 1)
    everything = cache_pb2.InvalidateRequest(everything=True)
    unary(server.ready["grpc"], "Invalidate", everything, cache_pb2.InvalidateReply)
    first = tenant_story(one, "a", 2)
    assert first[3].acquire.cached_tokens == 8, "a tenant hits its own"
    with grpc.insecure_channel(server.ready["grpc"]) as channel:
        assert lookup(channel, range(9), "a").cached_tokens == 8
        assert lookup(channel, range(9), "b").cached_tokens == 0
        assert lookup(channel, range(9)).cached_tokens == 0
    after = tenant_story(two, "b", 2)
    for reply in (*alone, *after):
        reply.acquire.lease_id = 0
    assert alone == after


def test_g1_timing_tells_nothing(server, peers):
    """Lookups of what another tenant has cached, against what nobody has."""
    cached, absent = range(0, 33), range(5000, 5033)
    peers[0].step(acquire(1, cached, scope=pb.Scope(salt="a")), commit(1, 32), release(1))
    times: dict[bool, list[float]] = {True: [], False: []}
    with grpc.insecure_channel(server.ready["grpc"]) as channel:
        for number in range(2000):
            is_cached = (number // 2 + number) % 2 == 0
            started = time.perf_counter()
            lookup(channel, cached if is_cached else absent, "b")
            times[is_cached].append(time.perf_counter() - started)
    assert 0.4 < area_under_curve(times[True], times[False]) < 0.6


def area_under_curve(ones, zeros):
    """Probability that a value of `ones` is above one of `zeros`."""
    ranked = sorted([(value, 1) for value in ones] + [(value, 0) for value in zeros])
    ranks = sum(rank for rank, (_, is_one) in enumerate(ranked, 1) if is_one)
    return (ranks - len(ones) * (len(ones) + 1) / 2) / (len(ones) * len(zeros))


# ---- the log -------------------------------------------------------------------------------


def test_secrets_are_in_no_log_and_in_no_error(server, peers):
    peer = peers[0]
    secret = "tenant-secret-" + "x" * 300
    replies = peer.step(
        acquire(1, range(5), scope=pb.Scope(salt=secret)),
        acquire(2, range(5), scope=pb.Scope(salt=secret[:30])),
        acquire(2, range(5), scope=pb.Scope(salt=secret[:30])),
        refill(99), release(2),
    )  # fmt: skip
    assert [code(reply) for reply in replies] == [
        "INVALID_ARGUMENT", "OK", "ALREADY_EXISTS", "OK", "OK",
    ]  # fmt: skip
    other = WirePeer(server.socket_dir, peer.transport)
    refused = other.hello(session_token=peer.token)
    other.close()
    text = server.stderr() + str(replies) + str(refused)
    assert "tenant-secret" not in text
    assert peer.token.hex() not in text and repr(peer.token)[2:-1] not in text
