"""A mooncake_master on loopback."""

import contextlib
import importlib.util
import socket
import subprocess
import time
from pathlib import Path

from radixkv_worker.demo.processes import ChildFailed

MAX_START_S = 20.0
MAX_STOP_S = 5.0
INSTALL = (
    "pip install mooncake-transfer-engine-non-cuda, and on Debian apt-get install libibverbs1 "
    "libnuma1 liburing2 libcurl4"
)


class Master:
    """Started by its constructor; `port` is where clients reach it."""

    def __init__(self, directory: Path) -> None:
        """Raises ChildFailed, naming what to install if Mooncake is missing."""
        found = importlib.util.find_spec("mooncake")
        if found is None or not found.submodule_search_locations:
            raise ChildFailed(f"Mooncake is not installed: {INSTALL}")
        self.port, metrics_port = _free_port(), _free_port()
        command = [
            str(Path(found.submodule_search_locations[0]) / "mooncake_master"),
            "--rpc_address=127.0.0.1", f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1", f"--metrics_port={metrics_port}", "--logtostderr=1",
        ]  # fmt: skip
        self._log = directory / "master.err"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + MAX_START_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self._log.read_text(errors="replace")[-1_000:]
                raise ChildFailed(f"mooncake_master does not serve ({INSTALL})\n{tail}")
            time.sleep(0.05)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; idempotent."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(MAX_STOP_S)
        self._process.kill()
        self._process.wait(MAX_STOP_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
