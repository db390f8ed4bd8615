"""Large and absurd sizes (D1), peers that do not read, and who may change things (G2)."""

import contextlib
import pickle
import signal
import struct
import threading
import time
from pathlib import Path

import grpc
import pytest

from radixkv.v1 import cache_pb2
from radixkv.v1 import session_pb2 as pb
from radixkv.wire import limits
from tests.server_process import ServerProcess
from tests.session_rig import code, commit, refill, release
from tests.wire_peer import Cut, WirePeer, unary

SPEC = pb.KVSpec(
    num_layers=1, num_kv_heads=1, head_dim=1, value_head_dim=1, dtype="int8", block_size=1,
    layout="LKHTD", block_bytes=2,
)  # fmt: skip
NUM_TOKENS = 1_100_000
MAX_RSS_GROWTH = 200 << 20
TOKEN = "a-token-that-is-long-enough"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Blocks of one token, so that tables are as large as prompts."""
    token_file = tmp_path_factory.mktemp("token") / "token"
    token_file.write_text(TOKEN)
    options = ("--block-size", "1", "--admin-token-file", str(token_file))
    with ServerProcess(*options, gpu_blocks=NUM_TOKENS + 1000) as server:
        yield server


@pytest.fixture(params=["local", "grpc"])
def peer(server, request):
    peer = WirePeer(server.socket_dir, request.param, SPEC).open()
    yield peer
    peer.finish()


def tokens(count, first=0):
    return struct.pack(f"<{count}i", *range(first, first + count))


def acquire(lease_id, data, **fields):
    return pb.Op(acquire=pb.Acquire(lease_id=lease_id, tokens=data, **fields))


def rss(pid):
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) << 10


def test_a_prompt_and_a_table_above_four_mebibytes(server, peer):
    """D1 (i): 1,100,000 tokens in, as many block ids out."""
    prompt = tokens(NUM_TOKENS)
    (reply,) = peer.step(acquire(1, prompt))
    assert code(reply) == "OK" and len(reply.acquire.block_table) == 4 * NUM_TOKENS > 4 << 20
    reply = peer.step(commit(1, NUM_TOKENS), release(1))[1]
    assert reply.release.cached_tokens == NUM_TOKENS
    request = cache_pb2.LookupRequest(namespace={"model_fingerprint": "model"}, tokens=prompt)
    found = unary(server.ready["grpc"], "Lookup", request, cache_pb2.LookupReply)
    assert found.cached_tokens == NUM_TOKENS - 1


def test_more_tokens_than_allowed_are_refused_by_name(server, peer):
    data = bytes(4 * (limits.MAX_TOKENS + 1))
    (reply,) = peer.step(acquire(1, data))
    assert code(reply) == "INVALID_ARGUMENT" and "2097152" in reply.status.message
    request = cache_pb2.LookupRequest(namespace={"model_fingerprint": "model"}, tokens=data)
    with pytest.raises(grpc.RpcError) as error:
        unary(server.ready["grpc"], "Lookup", request, cache_pb2.LookupReply)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert code(peer.step(acquire(1, tokens(5)), release(1))[0]) == "OK"


def test_a_message_above_the_limit_ends_the_stream_and_names_the_limit(peer):
    with contextlib.suppress(Cut):  # the server does not read it to its end
        peer.send(acquire(1, bytes(limits.MAX_MESSAGE_BYTES)))
    if peer.transport == "local":
        assert str(limits.MAX_MESSAGE_BYTES) in peer.ended().message
    else:
        with pytest.raises(Cut, match=str(limits.MAX_MESSAGE_BYTES)):
            peer.read_one()


def test_a_peer_that_reads_nothing_costs_bounded_memory_and_no_time(server, peer):
    """G2 (iv): eight Steps of large tables are kept for it, and no more is begun."""
    other = WirePeer(server.socket_dir, "local", SPEC).open()
    before = rss(server.pid)
    shared = tokens(200_000)
    other.step(acquire(1, shared), commit(1, 200_000))
    peer.attach.socket.settimeout(60)
    sender = threading.Thread(target=send_eight_steps, args=(peer, shared))
    sender.start()
    worst = 0.0
    for _ in range(100):
        started = time.monotonic()
        assert code(other.step(refill(1))[0]) == "OK"
        worst = max(worst, time.monotonic() - started)
    assert worst < 2.0
    assert rss(server.pid) - before < MAX_RSS_GROWTH
    outcomes = {code(reply) for reply in peer.wait_for(range(1, 121))}
    assert outcomes <= {"OK", "EXHAUSTED"}
    sender.join()
    other.bye()


def send_eight_steps(peer, shared):
    for step in range(8):
        peer.send(*[acquire(100 * step + i, shared + tokens(1, i)) for i in range(1, 16)])


def test_fifty_thousand_tokens_are_nothing_special(peer):
    (reply, _) = peer.step(acquire(1, tokens(50_000, 7)), release(1))
    assert code(reply) == "OK"


# ---- administration (G2) -------------------------------------------------------------------


def invalidate(address, **options):
    request = cache_pb2.InvalidateRequest(everything=True, dry_run=True)
    return unary(address, "Invalidate", request, cache_pb2.InvalidateReply, **options)


def refusal(call, *arguments, **options):
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments, **options)
    return error.value.code().name, error.value.details()


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", TOKEN, f"Basic {TOKEN}"])
def test_changes_over_tcp_need_the_token(server, authorization):
    metadata = [("authorization", authorization)] if authorization else []
    for method, request, reply in (
        ("Invalidate", cache_pb2.InvalidateRequest(everything=True), cache_pb2.InvalidateReply),
        ("KillSession", cache_pb2.KillSessionRequest(session_id=1), cache_pb2.KillSessionReply),
    ):
        status, details = refusal(
            unary, server.ready["tools"], method, request, reply, metadata=metadata
        )
        assert status == "PERMISSION_DENIED" and TOKEN not in details


def test_changes_are_allowed_with_the_token_or_on_the_unix_socket(server):
    invalidate(server.ready["grpc"])
    invalidate(server.ready["tools"], metadata=[("authorization", f"Bearer {TOKEN}")])


def test_reading_needs_no_token(server):
    for method in ("Stats", "Sessions"):
        request, reply = (getattr(cache_pb2, method + kind) for kind in ("Request", "Reply"))
        unary(server.ready["tools"], method, request(), reply)


@pytest.mark.parametrize("method", ["Explain"])
def test_what_is_not_there_yet_says_so(server, method):
    request, reply = (getattr(cache_pb2, method + kind) for kind in ("Request", "Reply"))
    assert refusal(unary, server.ready["grpc"], method, request(), reply)[0] == "UNIMPLEMENTED"


@pytest.mark.parametrize("method", ["Lookup", "Stats", "Invalidate", "KillSession", "Session"])
def test_garbage_is_an_invalid_argument(server, method):
    with grpc.insecure_channel(server.ready["grpc"]) as channel:
        name = f"/radixkv.v1.Cache/{method}"
        garbage = pickle.dumps(pytest.fail)
        if method == "Session":
            (data,) = channel.stream_stream(name)(iter([garbage]), timeout=5)
            status = pb.ServerMessage.FromString(data).ended.status
            assert status.code == pb.INVALID_ARGUMENT
            return
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(name)(garbage, timeout=5)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_tools_errors_have_their_status(server, peer):
    address = server.ready["grpc"]
    cases = [
        ("KillSession", cache_pb2.KillSessionRequest(session_id=99), "NOT_FOUND"),
        (
            "Lookup",
            cache_pb2.LookupRequest(namespace={"model_fingerprint": "other"}),
            "NOT_FOUND",
        ),
        ("Lookup", cache_pb2.LookupRequest(tokens=b"123"), "INVALID_ARGUMENT"),
        (
            "Invalidate",
            cache_pb2.InvalidateRequest(everything=True, prefix=b"1234"),
            "INVALID_ARGUMENT",
        ),
    ]
    for method, request, status in cases:
        reply = getattr(cache_pb2, method + "Reply")
        assert refusal(unary, address, method, request, reply)[0] == status


# ---- drain ---------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["local", "grpc"])
def test_a_draining_server_finishes_leases_and_takes_no_new_ones(transport):
    with ServerProcess("--block-size", "1", gpu_blocks=100) as server:
        peer = WirePeer(server.socket_dir, transport, SPEC).open()
        newcomer = WirePeer(server.socket_dir, transport, SPEC)
        peer.step(acquire(1, tokens(80)))
        peer.send(acquire(2, tokens(90, 500), capacity_wait_ms=600_000))
        peer.step(refill(1))
        server.process.send_signal(signal.SIGTERM)
        assert code(peer.wait_for([2])[0]) == "UNAVAILABLE"
        assert code(peer.step(acquire(3, tokens(1)))[0]) == "UNAVAILABLE"
        assert code(newcomer.hello()) == "UNAVAILABLE"
        peer.cut()
        assert peer.resume().status.code == pb.OK
        assert [code(reply) for reply in peer.step(commit(1, 80), release(1))] == ["OK", "OK"]
        assert peer.ended().code == pb.UNAVAILABLE
        assert server.process.wait(10) == 0
        newcomer.close()
        peer.close()
