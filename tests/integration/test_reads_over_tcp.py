"""Who may read what: on the Unix socket, on loopback, and from beyond it. Case G2."""

from pathlib import Path

import grpc
import pytest

from radixkv.v1 import cache_pb2
from radixkv.v1 import session_pb2 as pb
from tests.integration.test_tool import tool
from tests.raw_session import RawSession, tokens
from tests.server_process import ServerProcess
from tests.wire_peer import unary

TOKEN = "0123456789abcdef"
BEARER = (("authorization", f"Bearer {TOKEN}"),)
PROMPT = tokens([*range(20), *[9] * 20])
READS = {
    "Lookup": (cache_pb2.LookupRequest(tokens=PROMPT), cache_pb2.LookupReply),
    "Stats": (cache_pb2.StatsRequest(), cache_pb2.StatsReply),
    "Sessions": (cache_pb2.SessionsRequest(), cache_pb2.SessionsReply),
}


def cache_a_prompt(session: RawSession) -> None:
    """Tokens 0..39 are cached from here on."""
    session.greet()
    session.call(acquire=pb.Acquire(lease_id=1, tokens=tokens(range(40))))
    session.call(commit=pb.Commit(lease_id=1, upto=40))


def looked_up(target: str, **options: object) -> tuple[int, bytes]:
    """Cached tokens and the nearest branch, for a prompt that leaves the cached one at 20."""
    reply = unary(target, "Lookup", *READS["Lookup"], **options)
    assert reply.miss.at_token == 20
    return reply.cached_tokens, reply.miss.nearest_tokens


def test_reads_from_beyond_loopback_need_the_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    options = ["--admin-token-file", str(file)]
    with ServerProcess(*options, listen="0.0.0.0:0") as server, RawSession(server) as session:
        cache_a_prompt(session)
        target = "127.0.0.1:" + server.tools_target.rpartition(":")[2]
        for name, (request, reply_type) in READS.items():
            with pytest.raises(grpc.RpcError) as caught:
                unary(target, name, request, reply_type)
            assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
            unary(target, name, request, reply_type, metadata=BEARER)
        for address in (["--address", target, *options], ["--socket-dir", str(server.socket_dir)]):
            for command in (["stats"], ["sessions"], ["lookup", "--tokens", "0,1,2,3"]):
                assert tool(*command, *address).returncode == 0
        refused = tool("stats", "--address", target)
        assert refused.returncode == 1 and "PERMISSION_DENIED" in refused.stderr
        nearest = tokens(range(20, 32))
        assert looked_up(target, metadata=BEARER) == (16, nearest)
        assert looked_up(server.grpc_target) == (16, nearest)
        session.bye()


def test_loopback_tells_how_much_is_cached_but_no_tokens() -> None:
    with ServerProcess() as server, RawSession(server) as session:
        cache_a_prompt(session)
        assert looked_up(server.tools_target) == (16, b"")
        assert looked_up(server.grpc_target) == (16, tokens(range(20, 32)))
        for name, (request, reply_type) in READS.items():
            unary(server.tools_target, name, request, reply_type)
        session.bye()
