"""A real mooncake_master on loopback for tests, and a peer process that holds memory.

    with MasterProcess() as master:
        store = RemoteStore(master.url(), ...)
        master.kill()
        master.restart()  # on the same ports, knowing nothing

Every wait is bounded. What the processes printed goes to a file in a directory of their own.
"""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from urllib.parse import urlencode

import pytest

from radixkv.pools.remote_client import PACKAGE, SYSTEM_PACKAGES

MAX_START_S = 20.0
STARTS = 3  # attempts; another process may take a free port before we do


def why_not() -> str | None:
    """Why these tests cannot run here, naming what to install."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None:
        return f"Mooncake is not installed: pip install {PACKAGE}"
    code = "import mooncake.store"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        return None
    reason = done.stderr.strip().splitlines()[-1:]
    return f"Mooncake needs apt-get install {' '.join(SYSTEM_PACKAGES)}: {reason}"


_REASON = why_not()
needs_mooncake = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class MasterProcess:
    """Starts on entry, ends on exit."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self.directory = Path(tempfile.mkdtemp(prefix="rkv-master-"))
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self._metrics_port = 0

    def __enter__(self) -> "MasterProcess":
        for attempt in range(STARTS):
            self.port, self._metrics_port = free_port(), free_port()
            try:
                self.start()
                return self
            except AssertionError:
                if attempt == STARTS - 1:
                    self.close()
                    raise
        raise AssertionError("unreachable")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def url(self, **parameters: object) -> str:
        """For RemoteStore."""
        query = f"?{urlencode(parameters)}" if parameters else ""
        return f"mooncake://127.0.0.1:{self.port}{query}"

    def start(self) -> None:
        """Start it and wait until its port is open."""
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.submodule_search_locations
        program = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        command = [
            str(program), "--rpc_address=127.0.0.1", f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1", f"--metrics_port={self._metrics_port}",
            "--logtostderr=1", *self._options,
        ]  # fmt: skip
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        deadline = time.monotonic() + MAX_START_S
        while not self._is_open():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, f"no master after {MAX_START_S} s: {self.log()}"
            time.sleep(0.02)

    def _is_open(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def signal(self, number: int) -> None:
        """Send a signal, e.g. SIGSTOP."""
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(MAX_START_S)

    def restart(self) -> None:
        """Start again on the same ports, after `kill`."""
        self.start()

    def close(self) -> None:
        """End it, whatever its state."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def log(self) -> str:
        """What it printed."""
        return (self.directory / "log").read_text(errors="replace")[-2_000:]


class PeerProcess:
    """Another process with a RemoteStore: it puts the blocks with some numbers, then stays.

    See `tests.remote_peer` for what it runs.
    """

    def __init__(self, url: str, block_bytes: int, numbers: range) -> None:
        command = [sys.executable, "-m", "tests.remote_peer", url, str(block_bytes)]
        command += [str(numbers.start), str(numbers.stop)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONHASHSEED": "random"},
            text=True,
        )

    def __enter__(self) -> "PeerProcess":
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line != "ready\n":
            self.close()
            raise AssertionError(f"the peer says {line!r}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def signal(self, number: int) -> None:
        """Send a signal, e.g. SIGSTOP."""
        os.kill(self.process.pid, number)

    def leave(self) -> None:
        """Have it leave the cluster and end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(MAX_START_S) == 0

    def close(self) -> None:
        """End it, whatever its state."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(MAX_START_S)
