"""The `radixkv` tool against a real server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.v1 import session_pb2 as pb
from tests.raw_session import SPEC, RawSession, tokens
from tests.server_process import ServerProcess, clean_environment

TOKEN = "0123456789abcdef"


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tool; bounded."""
    return subprocess.run(
        [sys.executable, "-m", "radixkv.cli.tool", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env=clean_environment(),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with an admin token that holds 32 cached tokens, 16 of them in a lease."""
    token = tmp_path_factory.mktemp("admin") / "token"
    token.write_text(TOKEN)
    with ServerProcess("--admin-token-file", str(token)) as server:
        yield server


@pytest.fixture(autouse=True)
def session(server: ServerProcess) -> Iterator[RawSession]:
    """A worker that has published the tokens 0..31 and released them."""
    with RawSession(server) as session:
        session.greet()
        session.call(acquire=pb.Acquire(lease_id=1, tokens=tokens(range(40))))
        session.call(commit=pb.Commit(lease_id=1, upto=40))
        session.call(release=pb.Release(lease_id=1))
        yield session
        session.bye()


def at(server: ServerProcess) -> list[str]:
    return ["--socket-dir", str(server.socket_dir)]


def test_stats(server: ServerProcess) -> None:
    shown = tool("stats", *at(server)).stdout
    assert "prefix hit rate" in shown
    stats = json.loads(tool("stats", *at(server), "--json").stdout)
    assert stats["books"]["total"] == 64
    assert stats["books"]["cached"] == 2
    assert stats["num_sessions"] >= 1
    assert len(stats["incarnation"]) == 32


def test_stats_over_tcp(server: ServerProcess) -> None:
    result = tool("stats", "--address", server.tools_target, "--json")
    assert json.loads(result.stdout)["block_bytes"] == SPEC.block_bytes


def test_health(server: ServerProcess) -> None:
    result = tool("health", *at(server))
    assert (result.returncode, result.stdout) == (0, "SERVING\n")


def test_lookup_tells_how_far_a_prompt_is_cached_and_why_not_further(
    server: ServerProcess, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(tokens([*range(20), *[77] * 20]))
    result = tool("lookup", *at(server), "--tokens-file", str(file), "--json")
    found = json.loads(result.stdout)
    assert found["cached_tokens"] == 16
    assert (found["miss"]["kind"], found["miss"]["at_token"]) == ("DIVERGES", 20)
    assert found["miss"]["nearest_tokens"][:3] == [20, 21, 22]
    shown = tool("lookup", *at(server), "--tokens", ",".join(map(str, range(33)))).stdout
    assert "cached 32 of 33 tokens" in shown
    assert "cached 0" in tool("lookup", *at(server), "--tokens", "5,6").stdout


def test_bad_tokens_and_files_are_clear_errors(server: ServerProcess, tmp_path: Path) -> None:
    for arguments in (["--tokens", "1,x"], ["--tokens", "99999999999"], ["--tokens-file", "/nope"]):
        result = tool("lookup", *at(server), *arguments)
        assert result.returncode == 1
        assert result.stderr.startswith("radixkv: ")
        assert result.stderr.count("\n") == 1
    odd = tmp_path / "odd"
    odd.write_bytes(b"12345")
    assert "multiple of 4" in tool("lookup", *at(server), "--tokens-file", str(odd)).stderr


def test_invalidate(server: ServerProcess) -> None:
    shown = tool("invalidate", *at(server), "--model", "model", "--dry-run").stdout
    assert "would free 2 blocks" in shown
    assert "goes with no other" in tool("invalidate", *at(server), "--everything", "--prefix",
                                        "1").stderr  # fmt: skip
    result = tool("invalidate", *at(server), "--everything", "--json")
    done = json.loads(result.stdout)
    assert (done.pop("removed_blocks"), set(done.values())) == (2, {0})
    assert "cached 0" in tool("lookup", *at(server), "--tokens", "0,1,2").stdout


def test_g2_changing_calls_over_tcp_need_the_admin_token(
    server: ServerProcess, tmp_path: Path
) -> None:
    arguments = ["invalidate", "--address", server.tools_target, "--everything"]
    refused = tool(*arguments)
    assert refused.returncode == 1
    assert "PERMISSION_DENIED" in refused.stderr
    token = tmp_path / "token"
    token.write_text(TOKEN[:-1] + "x")
    assert tool(*arguments, "--admin-token-file", str(token)).returncode == 1
    token.write_text(TOKEN)
    accepted = tool(*arguments, "--admin-token-file", str(token))
    assert "freed 2 blocks" in accepted.stdout


def test_sessions_and_kill(server: ServerProcess) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", "from tests.integration.test_tool import hold_lease; import sys;"
         "hold_lease(sys.argv[1])", str(server.directory)],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"holding\n"
        sessions = json.loads(tool("sessions", *at(server), "--json").stdout)["sessions"]
        (mine,) = [entry for entry in sessions if entry["pids"] == [worker.pid]]
        assert mine["num_leases"] == 1
        assert mine["transport"] == "local"
        assert str(worker.pid) in tool("sessions", *at(server)).stdout
        killed = tool("sessions", "kill", str(mine["session_id"]), *at(server))
        assert "ended" in killed.stdout, killed.stderr
        assert worker.wait(10) == -9
    finally:
        worker.kill()
        worker.wait(10)
    again = tool("sessions", "kill", str(mine["session_id"]), *at(server))
    assert (again.returncode, "NOT_FOUND" in again.stderr) == (1, True)
    assert "session id" in tool("sessions", "kill", *at(server)).stderr


def hold_lease(directory: str) -> None:
    """A worker process of its own: takes a lease, says so, and waits to be killed."""
    with RawSession(ServerProcess(directory=Path(directory))) as session:
        session.greet()
        session.call(acquire=pb.Acquire(lease_id=1, tokens=tokens(range(100, 120))))
        print("holding", flush=True)
        session.stream.receive(timeout=60)


def test_no_server_is_a_clear_error(tmp_path: Path) -> None:
    result = tool("stats", "--socket-dir", str(tmp_path))
    assert result.returncode == 1
    for part in ("no server", str(tmp_path), "radixkv-server", "--socket-dir"):
        assert part in result.stderr
    assert result.stderr.count("\n") == 1
    assert "no server" in tool("health", "--address", "127.0.0.1:1").stderr


def test_wrong_usage_is_a_clear_error() -> None:
    for arguments in (
        [], ["fly"], ["lookup"], ["stats", "--jsno"], ["pack"], ["pack", "export", "f"],
        ["pin", "--tokens", "1", "--ttl", "x"], ["unpin", "0"], ["sessions", "kill", "-1"],
    ):  # fmt: skip
        result = tool(*arguments)
        assert result.returncode == 2
        assert result.stderr.startswith("radixkv: ")
