"""The server's end of one mover process: starting it, giving it operations, seeing its exit.

Theory of operation
    States: starting (spawned, has not said that it is ready) -> ready -> ending (its socket ended
    or broke, killed to make sure) -> gone (its exit was seen, reported once). Only a ready mover
    gets operations, at most `SLOTS`; they come back answered, or from `gone`, when no process is
    left that could touch their blocks. An answer that was sent before the exit still counts.
    Everything runs in the event loop, but for a thread that waits for the exit.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from radixkv.pools.mover_process import READY, MoverSettings
from radixkv.pools.mover_ring import (
    MAX_ANSWER_BYTES,
    SLOTS,
    Answer,
    MoverOp,
    RingMemory,
    decode_answer,
)

log = logging.getLogger(__name__)

COMMAND = ("-P", "-m", "radixkv.pools.mover_process")
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process started meanwhile has these blocked for good.

    What is sent to the server's whole group is for the server to act on; it may want to drain.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class MoverHandle:
    """One mover process. `on_answer` and `on_change` (ready or gone) are called in the loop."""

    def __init__(
        self,
        settings: MoverSettings,
        on_answer: Callable[[MoverOp, Answer], None],
        on_change: Callable[["MoverHandle"], None],
    ) -> None:
        """Starts the process; raises OSError if that cannot be done."""
        self._loop = asyncio.get_running_loop()
        self._on_answer = on_answer
        self._on_change = on_change
        self._ops: dict[int, MoverOp] = {}
        self._free = list(range(SLOTS))
        self.is_ready = False
        self.has_started = False
        self.has_answered = False
        self.is_gone = False
        self.problem = ""  # why it did not start
        ring = RingMemory.create(settings.block_size)
        try:
            self._ring = RingMemory(ring, settings.block_size)
            self._process = self._spawn(replace(settings, ring=ring))
        finally:
            os.close(ring)
        self._loop.add_reader(self._socket, self._readable)
        self._waiter = threading.Thread(target=self._wait, name="mover-exit", daemon=True)
        self._waiter.start()

    def _spawn(self, settings: MoverSettings) -> subprocess.Popen[bytes]:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours = (settings.ring, settings.gpu, settings.cpu, settings.checksums, settings.nvme_lock)
        with theirs:
            try:
                with _signals_blocked():
                    process = subprocess.Popen(
                        [sys.executable, *COMMAND, str(theirs.fileno())],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno(), *(fd for fd in ours if fd is not None)],
                        env={**os.environ, **ONE_THREAD},
                    )
                self._socket.setblocking(False)
                self._socket.send(settings.encode())
            except BaseException:
                self._socket.close()
                raise
        return process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ops(self) -> list[MoverOp]:
        """What it has been given and has not answered."""
        return list(self._ops.values())

    @property
    def num_free(self) -> int:
        """Operations it can take now."""
        return len(self._free) if self.is_ready else 0

    def give(self, op: MoverOp) -> bool:
        """Have it carry out an operation; False if it turns out to be dead. Only if `num_free`."""
        assert self.num_free
        slot = self._free[-1]
        self._ring.write(slot, op)
        try:
            self._socket.send(bytes((slot,)))
        except OSError:
            self._end()
            return False
        self._free.pop()
        self._ops[slot] = op
        return True

    def cancel(self, op: MoverOp) -> None:
        """Leave undone what it has not begun of an operation it has."""
        for slot, held in self._ops.items():
            if held is op:
                self._ring.cancel(slot)

    def kill(self) -> None:
        """Make it end at once; its exit is reported as ever."""
        if self._process.returncode is None:  # else somebody else may have its pid
            os.kill(self.pid, signal.SIGKILL)

    def begin_close(self) -> None:
        """Let the process end, after the block it is at. Nothing is reported from now on."""
        self._stop_reading()
        self._on_change = lambda handle: None
        for slot in self._ops:
            self._ring.cancel(slot)
        self._socket.close()

    def end_close(self, timeout_s: float) -> None:
        """Return when the process has ended, by force after `timeout_s`."""
        self._waiter.join(timeout_s)
        if self._waiter.is_alive():
            self.kill()
            self._waiter.join()
        self._process.wait()

    # ---- what comes from it -----------------------------------------------------------------

    def _readable(self) -> bool:
        """Take in one message, or the end; False if there is nothing (more)."""
        try:
            message = self._socket.recv(MAX_ANSWER_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # it ended with operations unread; its last answers come behind this
        if not message:
            self._end()
            return False
        self._heard(message)
        return True

    def _heard(self, message: bytes) -> None:
        if self.has_started:
            slot, answer = decode_answer(message)
            self.has_answered = True
            self._free.append(slot)
            self._on_answer(self._ops.pop(slot), answer)
        elif message == READY:
            self.is_ready = self.has_started = True
            self._on_change(self)
        else:
            self.problem = message.decode(errors="replace")

    def _end(self) -> None:
        self.is_ready = False
        self._stop_reading()
        self.kill()

    def _stop_reading(self) -> None:
        self._loop.remove_reader(self._socket)

    def _wait(self) -> None:
        # It is reaped in the loop only, where `kill` is: its pid names no other process before.
        with contextlib.suppress(ChildProcessError):  # somebody reaps all children of this process
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._gone)

    def _gone(self) -> None:
        """Its exit was seen: it touches nothing any more."""
        self._process.wait()
        if self._socket.fileno() >= 0:
            while self._readable():
                pass  # what it had said before
            self._stop_reading()
            self._socket.close()
        self.is_ready, self.is_gone = False, True
        self._on_change(self)
