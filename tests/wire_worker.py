"""A process of its own with one session, to be killed or stopped; `WorkerProcess` runs it.

It takes one lease, then answers each line on stdin with one on stdout: a Step's statuses.
"""

import subprocess
import sys
import threading
from pathlib import Path

from tests.session_rig import acquire, code, commit, extend, release
from tests.wire_peer import LocalStream, WirePeer


def main(socket_dir: str, transport: str, stop_at: str, num_tokens: int) -> None:
    """Go as far as `stop_at` says, then serve stdin."""
    if stop_at == "attached":
        LocalStream(Path(socket_dir) / "attach.sock").receive()
        print("attached", flush=True)
        sys.stdin.readline()
        return
    peer = WirePeer(Path(socket_dir), transport).open()
    if stop_at == "waiting":
        peer.send(acquire(1, range(num_tokens), capacity_wait_ms=600_000))
    elif stop_at != "hello":
        peer.step(acquire(1, range(num_tokens)), commit(1, num_tokens // 2))
    print(peer.token.hex(), flush=True)
    ops = {
        "extend": lambda: extend(1, 1),
        "commit": lambda: commit(1, num_tokens),
        "release": lambda: release(1),
    }
    for line in sys.stdin:
        print(*(code(reply) for reply in peer.step(ops[line.strip()]())), flush=True)


class WorkerProcess:
    """Starts on entry, is killed on exit. `stop_at`: attached, hello, waiting or leased."""

    def __init__(self, socket_dir: Path, transport: str, stop_at: str, num_tokens: int) -> None:
        self._command = [sys.executable, "-m", "tests.wire_worker", str(socket_dir), transport]
        self._command += [stop_at, str(num_tokens)]

    def __enter__(self) -> "WorkerProcess":
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._watchdog = threading.Timer(60, self.process.kill)
        self._watchdog.start()
        self.first_line = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self.process.kill()
        self.process.communicate()

    def ask(self, line: str) -> str:
        """One Step; its statuses."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        line = self.process.stdout.readline().strip()
        assert line, "the worker process has ended"
        return line


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
