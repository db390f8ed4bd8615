"""Processes to be killed and stopped: forked from a server that has everything imported already.

A child runs `target(connection, *args)` and talks over its pipe; what it raises is raised in the
parent that receives from it. Every wait is bounded.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 20.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.fault_worker", "tests.bystander"])


class Died(Exception):
    """The child process has ended."""


class Child:
    """A process; killed on exit of its context."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._connection, theirs = _CONTEXT.Pipe()
        self._stacks = tempfile.NamedTemporaryFile("r", prefix="rkv-stacks-")  # noqa: SIM115
        whole = (theirs, self._stacks.name, target, args)
        self.process = _CONTEXT.Process(target=_main, args=whole, daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, message: Any) -> None:
        """Send without waiting for an answer."""
        self._connection.send(message)

    def hear(self, timeout: float = TIMEOUT_S) -> Any:
        """The next message; raises Died, AssertionError with the child's traceback or on a hang."""
        if not self._connection.poll(timeout):
            raise AssertionError(
                f"process {self.pid} says nothing for {timeout} s:\n{self._where()}"
            )
        try:
            kind, message = self._connection.recv()
        except (EOFError, ConnectionError):
            raise Died(f"process {self.pid}") from None
        assert kind == "said", f"in process {self.pid}:\n{message}"
        return message

    def ask(self, message: Any, timeout: float = TIMEOUT_S) -> Any:
        """Send, and wait for the answer."""
        self.tell(message)
        return self.hear(timeout)

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped, unless it has ended."""
        self._signal(signal.SIGSTOP)
        deadline = time.monotonic() + TIMEOUT_S
        while self._state() not in "TZX":
            assert time.monotonic() < deadline, f"process {self.pid} does not stop"
            time.sleep(0.001)

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, in whatever state it is; waits for nothing."""
        self._signal(signal.SIGKILL)

    def join(self) -> None:
        """Wait for its end."""
        self.process.join(TIMEOUT_S)
        assert self.process.exitcode is not None, f"process {self.pid} does not end"
        self._connection.close()

    def _where(self) -> str:
        """The stacks of its threads, if it runs."""
        self._signal(signal.SIGUSR1)
        time.sleep(0.5)
        return f"state {self._state()}\n{self._stacks.read()}"

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _state(self) -> str:
        """As ps shows it: T stopped, Z or X ended, …"""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return "X"


class Parent:
    """The child's end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, message: Any) -> None:
        """Send a message."""
        self._connection.send(("said", message))

    def hear(self, timeout: float | None = None) -> Any:
        """The next message, None if none came in time."""
        return self._connection.recv() if self._connection.poll(timeout) else None


def _main(
    connection: Connection, stacks: str, target: Callable[..., None], args: tuple
) -> None:
    faulthandler.register(signal.SIGUSR1, open(stacks, "w"))  # noqa: SIM115
    try:
        target(Parent(connection), *args)
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send(("failed", traceback.format_exc()))
        time.sleep(0.1)
    os._exit(0)  # threads of gRPC are not waited for

