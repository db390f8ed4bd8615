"""Which process is behind an attach connection, and when it is gone.

A pidfd names one process for ever, whatever becomes of its pid; it is readable once the process
has exited. Where the kernel has none, the end of the connection stands for the end of the process.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from radixkv.core.errors import FailedPrecondition

log = logging.getLogger(__name__)

SO_PEERPIDFD = 77  # Linux 6.5; not in the socket module yet
_CREDENTIALS = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class Peer:
    """Who connected: process id (0 if it is not visible from here) and user id."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """Credentials of the process that connected a Unix socket."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return Peer(pid, uid)


def open_pidfd(connection: socket.socket, pid: int) -> int | None:
    """A pidfd of the process that connected, or None where there is no such thing.

    The kernel's own answer cannot be wrong; opening by pid, on older kernels, can in theory hit a
    process that got the pid meanwhile. The caller closes it.
    """
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    if pid > 0 and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None


class AttachedProcess:
    """One process that may hold a mapping of the pools.

    States: new -> watched (its exit is reported, once) -> closed. Without a pidfd nothing is
    reported, and whoever holds the connection must report its end.
    """

    __slots__ = ("_loop", "is_observable", "pid", "pidfd")

    def __init__(self, pid: int, pidfd: int | None) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.is_observable = pidfd is not None  # also once closed
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def behind(cls, connection: socket.socket) -> "AttachedProcess":
        """The process at the other end of a Unix socket."""
        pid = peer_of(connection).pid
        return cls(pid, open_pidfd(connection, pid))

    def watch(
        self, loop: asyncio.AbstractEventLoop, on_exit: Callable[["AttachedProcess"], None]
    ) -> None:
        """Call `on_exit(self)` in the loop when the process has exited."""
        if self.pidfd is not None:
            self._loop = loop
            loop.add_reader(self.pidfd, self._exited, on_exit)

    def _exited(self, on_exit: Callable[["AttachedProcess"], None]) -> None:
        self._unwatch()
        on_exit(self)

    def kill(self) -> None:
        """Send SIGKILL. Raises FailedPrecondition if that cannot hit the right process for sure."""
        if self.pid == os.getpid():
            raise FailedPrecondition(f"process {self.pid} is the server itself")
        if self.pidfd is None:
            raise FailedPrecondition(
                f"this kernel gives no handle of process {self.pid}: kill it yourself"
            )
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching and forget the process; idempotent."""
        self._unwatch()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def _unwatch(self) -> None:
        if self._loop is not None and self.pidfd is not None:
            self._loop.remove_reader(self.pidfd)
        self._loop = None
