"""A real radixkv-server process for tests, in a directory of its own and on free ports.

    with ServerProcess(gpu_blocks=64) as server:
        client = Client.connect(server.socket_dir, ...)
        server.kill()
        server.restart()

Every wait is bounded. What the server printed is in `server.stdout()` and `server.stderr()`.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

MAX_START_S = 30.0
MAX_STOP_S = 20.0


class ServerFailed(AssertionError):
    """The server ended before it was ready, or did not become ready or end in time."""


class ServerProcess:
    """Starts on entry, ends on exit. `options` are further command line options."""

    def __init__(
        self,
        *options: str,
        gpu_blocks: int | None = 64,
        listen: str = "127.0.0.1:0",
        http: str = "127.0.0.1:0",
        env: dict[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self._owns_directory = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="rkv-"))
        self.socket_dir = self.directory / "sockets"
        self.command = [sys.executable, "-m", "radixkv.cli.server"]
        self.command += ["--socket-dir", str(self.socket_dir), "--listen", listen, "--http", http]
        if gpu_blocks is not None:
            self.command += ["--gpu-blocks", str(gpu_blocks)]
        self.command += options
        self.env = clean_environment() | (env or {})
        self.ready: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ServerProcess":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            sys.stderr.write(f"--- stderr of radixkv-server\n{self.stderr()}")
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self.process is not None, "the server was not started"
        return self.process.pid

    @property
    def attach_path(self) -> str:
        """Path of the attach socket, from the ready line."""
        return self.ready["attach"]

    @property
    def grpc_target(self) -> str:
        """gRPC target of the Unix socket, from the ready line."""
        return self.ready["grpc"]

    @property
    def tools_target(self) -> str:
        """gRPC target of the TCP port for tools, from the ready line."""
        return self.ready["tools"]

    @property
    def http_url(self) -> str:
        """URL of the HTTP server without a trailing slash."""
        return "http://" + self.ready["http"]

    def spawn(self) -> None:
        """Start the process without waiting for its ready line."""
        assert self.process is None or self.process.poll() is not None, "still running"
        self.ready = {}
        with open(self._log("stdout"), "wb") as out, open(self._log("stderr"), "wb") as err:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=self.env
            )

    def start(self, timeout_s: float = MAX_START_S) -> None:
        """Start the process and wait for its ready line; raises `ServerFailed`."""
        self.spawn()
        deadline = time.monotonic() + timeout_s
        while not self._read_ready_line():
            assert self.process is not None
            if self.process.poll() is not None:
                raise ServerFailed(f"exit code {self.process.returncode}: {self.stderr()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"not ready after {timeout_s} s: {self.stderr()}")
            time.sleep(0.01)

    def _read_ready_line(self) -> bool:
        for line in self.stdout().splitlines(keepends=True):
            if " ready: " in line and line.endswith("\n"):
                fields = line.split(" ready: ", 1)[1].split()
                self.ready = dict(field.split("=", 1) for field in fields)
                return True
        return False

    def wait(self, timeout_s: float = MAX_STOP_S) -> int:
        """Wait until the process ends by itself; returns its exit code."""
        assert self.process is not None, "the server was not started"
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"still running after {timeout_s} s: {self.stderr()}") from None

    def signal(self, number: int) -> None:
        """Send a signal, e.g. SIGSTOP."""
        os.kill(self.pid, number)

    def stop(self, timeout_s: float = MAX_STOP_S) -> int:
        """SIGTERM, wait for the drain; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL: sockets and lock file stay behind, as after a crash."""
        assert self.process is not None, "the server was not started"
        self.process.kill()
        self.process.wait(MAX_STOP_S)

    def restart(self, timeout_s: float = MAX_START_S) -> None:
        """Start again in the same directory, ending a process that still runs by SIGKILL."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.start(timeout_s)

    def close(self) -> None:
        """End the process if it runs and remove the directory."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(MAX_STOP_S)
        if self._owns_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def stdout(self) -> str:
        """What the server printed on stdout so far."""
        return self._read_log("stdout")

    def stderr(self) -> str:
        """What the server printed on stderr so far."""
        return self._read_log("stderr")

    def _log(self, stream: str) -> Path:
        return self.directory / f"server.{stream}"

    def _read_log(self, stream: str) -> str:
        path = self._log(stream)
        return path.read_text(errors="replace") if path.exists() else ""


def clean_environment() -> dict[str, str]:
    """The environment without settings of a developer's own server."""
    return {key: value for key, value in os.environ.items() if not key.startswith("RADIXKV_")}


def run_server(
    *options: str, env: dict[str, str] | None = None, timeout_s: float = MAX_START_S
) -> subprocess.CompletedProcess[str]:
    """Run a server that is expected to end by itself (bad options, --version, …)."""
    return subprocess.run(
        [sys.executable, "-m", "radixkv.cli.server", *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=clean_environment() | (env or {}),
        timeout=timeout_s,
    )
