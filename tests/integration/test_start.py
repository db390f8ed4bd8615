"""Starting a real server: addresses, sockets, sizes. Cases H1, H2, H3, G2."""

import mmap
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from radixkv import __version__
from radixkv.v1 import cache_pb2
from radixkv.v1 import session_pb2 as pb
from tests.raw_session import RawSession
from tests.server_process import ServerProcess, run_server
from tests.wire_peer import Cut, unary

MAX_REFUSAL_S = 5.0
# 127.0.0.1, the same inside IPv6, ::1; as /proc/net/tcp writes them
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.fixture
def taken_port():
    """A TCP port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def refused(tmp_path: Path, *options: str) -> str:
    """Start a server that must refuse within MAX_REFUSAL_S; returns its one line on stderr."""
    start = time.monotonic()
    defaults = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    result = run_server("--socket-dir", str(tmp_path / "sockets"), *defaults, *options)
    assert result.returncode != 0
    assert "ready" not in result.stdout
    assert time.monotonic() - start < MAX_REFUSAL_S
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("radixkv-server: ")]
    assert len(lines) == 1, result.stderr
    for name in ("attach.sock", "grpc.sock"):
        assert not (tmp_path / "sockets" / name).exists()
    return lines[0]


def listening_addresses(pid: int) -> set[str]:
    """Local addresses (hex, as in /proc/net/tcp) of TCP sockets that a process listens on."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if match := re.fullmatch(r"socket:\[(\d+)]", os.readlink(entry)):
            inodes.add(match[1])
    addresses = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.add(fields[1].split(":")[0])
    return addresses


def test_ready_line_says_where_everything_is() -> None:
    with ServerProcess(gpu_blocks=100) as server:
        line = server.stdout()
        assert line.startswith(f"radixkv-server {__version__} ready: ")
        assert line.count("\n") == 1
        assert server.ready["gpu_blocks"] == "100"
        assert server.ready["device"] == "cpu"
        assert server.ready["block_size"] == "16"
        assert server.ready["kv_spec"] == "unset"
        assert Path(server.attach_path).is_socket()
        assert Path(server.grpc_target.removeprefix("unix:")).is_socket()
        for path in ("/healthz", "/readyz", "/stats"):
            with urllib.request.urlopen(server.http_url + path, timeout=5) as reply:
                assert reply.status == 200
        assert server.stop() == 0
        assert not Path(server.attach_path).exists()


def test_version_help_and_printed_config() -> None:
    assert run_server("--version").stdout == f"radixkv-server {__version__}\n"
    text = run_server("--help").stdout
    assert "--gpu-blocks" in text
    assert "--admin-token-file" in text
    printed = run_server("--print-config", "--gpu-blocks", "7").stdout
    assert "gpu_blocks = 7  # flag --gpu-blocks" in printed


def test_settings_that_matter_are_in_the_environment_and_the_users_stay() -> None:
    with ServerProcess(env={"MALLOC_MMAP_THRESHOLD_": "1234567"}) as server:
        environ = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
        assert b"MALLOC_MMAP_THRESHOLD_=1234567" in environ
        assert b"MALLOC_TRIM_THRESHOLD_=268435456" in environ
        assert any(entry.startswith(b"GRPC_EXPERIMENTS=") for entry in environ)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_an_idle_server_at_once(number: int) -> None:
    with ServerProcess() as server:
        start = time.monotonic()
        server.signal(number)
        assert server.wait() == 0
        assert time.monotonic() - start < 5
        assert "Traceback" not in server.stderr()


def test_h1_the_whole_pool_is_there_when_prefaulted() -> None:
    with ServerProcess("--kv-spec", "smollm2-135m", "--prefault", gpu_blocks=200) as server:
        links = [entry for entry in Path(f"/proc/{server.pid}/fd").iterdir()
                 if "memfd:radixkv-pool" in os.readlink(entry)]  # fmt: skip
        descriptor = os.open(links[0], os.O_RDWR)
        try:
            info = os.fstat(descriptor)
            assert info.st_size == 201 * 30 * 3 * 16 * 128 * 2
            assert info.st_blocks * 512 >= info.st_size
            with mmap.mmap(descriptor, info.st_size) as pool:
                for offset in range(0, info.st_size, mmap.PAGESIZE):
                    pool[offset] = 1
            assert os.fstat(descriptor).st_blocks == info.st_blocks
        finally:
            os.close(descriptor)


@pytest.mark.parametrize(("option", "purpose"), [("--listen", "gRPC"), ("--http", "HTTP")])
def test_h2_taken_port(tmp_path: Path, taken_port: int, option: str, purpose: str) -> None:
    address = f"127.0.0.1:{taken_port}"
    message = refused(tmp_path, "--gpu-blocks", "9", option, address)
    for part in (str(taken_port), purpose, option, "taken"):
        assert part in message


def test_h2_second_server_on_the_same_rpc_port_fails(tmp_path: Path) -> None:
    with ServerProcess() as server:
        message = refused(tmp_path, "--gpu-blocks", "9", "--listen", server.tools_target)
        assert "--listen" in message
        assert server.process is not None
        assert server.process.poll() is None


def test_h2_two_servers_run_side_by_side() -> None:
    with ServerProcess() as first, ServerProcess() as second:
        assert first.tools_target != second.tools_target
        assert first.attach_path != second.attach_path


def test_h2_second_server_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    with ServerProcess(directory=tmp_path) as server:
        options = ["--socket-dir", str(server.socket_dir), "--listen", "off", "--http", "off"]
        result = run_server("--gpu-blocks", "9", *options)
        assert result.returncode == 1
        assert f"process {server.pid}" in result.stderr
        assert "--socket-dir" in result.stderr
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(server.attach_path)


def test_h2_sockets_of_a_killed_server_are_replaced() -> None:
    with ServerProcess() as server:
        server.kill()
        assert Path(server.attach_path).exists()
        server.restart()
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(server.attach_path)


def test_h2_a_server_whose_directory_was_taken_over_leaves_the_others_sockets(
    tmp_path: Path,
) -> None:
    with ServerProcess(directory=tmp_path) as first:
        shutil.rmtree(first.socket_dir)
        with ServerProcess(directory=tmp_path) as second:
            names = sorted(os.listdir(second.socket_dir))
            assert names == ["attach.sock", "grpc.sock", "lock"]
            assert first.stop() == 0
            assert sorted(os.listdir(second.socket_dir)) == names
            unary(second.grpc_target, "Stats", cache_pb2.StatsRequest(), cache_pb2.StatsReply)
            with RawSession(second) as session:
                assert session.greet().status.code == pb.OK
                session.bye()
            assert second.stop() == 0
            assert os.listdir(second.socket_dir) == ["lock"]


def test_h2_socket_of_a_live_stranger_is_not_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    directory.mkdir(mode=0o700)
    path = directory / "attach.sock"
    options = ["--socket-dir", str(directory), "--listen", "off", "--http", "off"]
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(path))
        stranger.listen()
        result = run_server("--gpu-blocks", "9", *options)
    assert result.returncode == 1
    assert str(path) in result.stderr
    assert path.exists()


def test_h2_anything_else_in_the_way_is_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    directory.mkdir(mode=0o700)
    (directory / "grpc.sock").write_text("precious")
    options = ["--socket-dir", str(directory), "--listen", "off", "--http", "off"]
    result = run_server("--gpu-blocks", "9", *options)
    assert result.returncode == 1
    assert "grpc.sock" in result.stderr
    assert (directory / "grpc.sock").read_text() == "precious"


def test_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "sockets"
    directory.mkdir()
    directory.chmod(0o777)
    assert "--socket-dir" in refused(tmp_path, "--gpu-blocks", "9")


def test_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    assert "--socket-dir" in refused(tmp_path, "--gpu-blocks", "9", "--socket-dir", str(long))


@pytest.mark.parametrize("value", ["0", "-3", "lots", "1e9", "99999999999999999999"])
def test_h3_counts_that_make_no_sense(tmp_path: Path, value: str) -> None:
    assert "gpu_blocks" in refused(tmp_path, f"--gpu-blocks={value}")


def test_h3_pool_above_memory_names_what_fits_and_that_works(tmp_path: Path) -> None:
    message = refused(tmp_path, "--gpu-blocks", "9000000", "--kv-spec", "llama-3-70b")
    assert "host memory" in message
    match = re.search(r"--gpu-blocks (\d+)$", message)
    assert match, message
    with ServerProcess("--kv-spec", "llama-3-70b", gpu_blocks=int(match[1])) as server:
        assert server.ready["gpu_blocks"] == match[1]


def test_h3_pool_above_memory_is_refused_at_hello_with_the_number_that_fits() -> None:
    """The spec is unknown at the start here; the server goes on for those who fit."""
    huge = pb.KVSpec(
        num_layers=100,
        num_kv_heads=100,
        head_dim=128,
        value_head_dim=128,
        dtype="float32",
        block_size=16,
        layout="LKHTD",
        block_bytes=100 * 100 * 256 * 16 * 4,
    )
    with ServerProcess(gpu_blocks=1_000_000) as server:
        with RawSession(server) as session:
            status = session.greet(huge).status
            assert status.code == pb.TOO_LARGE
            assert "host memory" in status.message
            assert "--gpu-blocks" in status.message
            with pytest.raises(Cut):
                session.stream.receive()
        with RawSession(server) as session:
            assert session.greet().status.code == pb.OK


def test_bad_options_are_refused_by_name(tmp_path: Path) -> None:
    assert "--gpu-blocks" in refused(tmp_path, "--gpu-blok", "9")
    assert "llama-3-8b" in refused(tmp_path, "--gpu-blocks", "9", "--kv-spec", "llama-3-8")
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "mamba"}')
    assert "mamba" in refused(tmp_path, "--gpu-blocks", "9", "--kv-spec", str(config))


def test_g2_defaults_listen_on_loopback_and_unix_only() -> None:
    with ServerProcess() as server:
        addresses = listening_addresses(server.pid)
        assert addresses
        assert addresses <= LOOPBACK
        assert Path(server.attach_path).stat().st_mode & 0o077 == 0
        assert Path(server.grpc_target.removeprefix("unix:")).stat().st_mode & 0o077 == 0
        assert server.socket_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("option", ["--listen", "--http"])
def test_g2_other_addresses_need_a_token(tmp_path: Path, option: str) -> None:
    message = refused(tmp_path, "--gpu-blocks", "9", option, "0.0.0.0:0")
    assert "--admin-token-file" in message
    token = tmp_path / "token"
    token.write_text("short")
    options = ["--gpu-blocks", "9", option, "0.0.0.0:0", "--admin-token-file", str(token)]
    assert "admin_token_file" in refused(tmp_path, *options)
    token.write_text("long-enough-to-be-a-token")
    with ServerProcess(option, "0.0.0.0:0", "--admin-token-file", str(token)) as server:
        assert not listening_addresses(server.pid) <= LOOPBACK


def test_g2_serialised_objects_are_never_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    # protocol 0 of a serialised object whose loading would run `touch marker`
    payload = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    with ServerProcess() as server:
        ports = [server.ready["tools"], server.ready["http"]]
        for address in ports:
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                _send_and_drain(connection, payload)
        for path in (server.attach_path, server.grpc_target.removeprefix("unix:")):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect(path)
                _send_and_drain(connection, len(payload).to_bytes(4, "little") + payload)
        assert not marker.exists()
        with urllib.request.urlopen(server.http_url + "/readyz", timeout=5) as reply:
            assert reply.status == 200
    subprocess.run(["sh", "-c", f"touch {marker}"], check=True)
    assert marker.exists()


def _send_and_drain(connection: socket.socket, payload: bytes) -> None:
    """Send, then read until the server has answered and closed (or is silent)."""
    connection.sendall(payload)
    connection.shutdown(socket.SHUT_WR)
    try:
        while connection.recv(65536):
            pass
    except (ConnectionError, TimeoutError):
        pass
