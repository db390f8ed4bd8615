"""Child processes that print one ready line, with fields name=value, when they serve."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MAX_READY_S = 120.0
MAX_STOP_S = 20.0
_TAIL_CHARS = 2_000


class ChildFailed(Exception):
    """A child ended, or was not ready in time; the message has the end of what it printed."""


class Child:
    """A Python module run as a process of its own; output goes to files in `directory`."""

    def __init__(self, name: str, directory: Path, module: str, arguments: Sequence[str]) -> None:
        self.name = name
        self._out = directory / f"{name}.out"
        self._err = directory / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def wait_ready(self, timeout_s: float = MAX_READY_S) -> dict[str, str]:
        """Fields of the ready line; raises ChildFailed."""
        deadline = time.monotonic() + timeout_s
        while True:
            for line in self._out.read_text(errors="replace").splitlines(keepends=True):
                if " ready: " in line and line.endswith("\n"):
                    fields = line.split(" ready: ", 1)[1].split()
                    return dict(field.split("=", 1) for field in fields)
            if self.process.poll() is not None:
                raise ChildFailed(f"{self.name} ended with {self.process.returncode}{self.tail()}")
            if time.monotonic() > deadline:
                raise ChildFailed(f"{self.name} is not ready after {timeout_s} s{self.tail()}")
            time.sleep(0.02)

    def check(self) -> None:
        """Raise ChildFailed if the process has ended."""
        if self.process.poll() is not None:
            raise ChildFailed(f"{self.name} ended with {self.process.returncode}{self.tail()}")

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(MAX_STOP_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(MAX_STOP_S)

    def tail(self) -> str:
        """The end of what it printed on stderr."""
        return "\n" + self._err.read_text(errors="replace")[-_TAIL_CHARS:]
