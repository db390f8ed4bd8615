"""The attach socket: brings processes, hands out the pools, carries sessions as framed messages.

Theory of operation of a connection
    accepted -> Attached sent -> (Hello here: carries a session | Hello over gRPC: only stands for
    a process) -> closing -> lost. A connection nobody says Hello with is closed after
    HELLO_TIMEOUT_S. Data is handled where it arrives: bytes in, whole Steps run, one write out.

    A peer that does not read is not read from either once MAX_UNSENT_BYTES wait for it, and is
    cut off after SLOW_READER_TIMEOUT_S; that disconnects, it does not end the session.

    Descriptors travel with a whole frame in one sendmsg on a duplicate of the socket, at a moment
    when the transport has nothing unsent; frames sent meanwhile are held behind it.
"""

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import cast

from radixkv import __version__
from radixkv.server.conversation import (
    CLOSE_TIMEOUT_S,
    HELLO_TIMEOUT_S,
    MAX_UNSENT_BYTES,
    SLOW_READER_TIMEOUT_S,
    Conversation,
)
from radixkv.server.descriptors import DescriptorWatch, raise_descriptor_limit
from radixkv.server.errors import PermissionDenied
from radixkv.server.handshake import pools_message
from radixkv.server.processes import AttachedProcess, peer_of
from radixkv.server.runtime import Runtime
from radixkv.server.sessions import Session, ended
from radixkv.v1 import session_pb2 as pb
from radixkv.wire import limits
from radixkv.wire.framing import FrameDecoder, FramingError

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 2 * limits.MAX_SESSIONS
BACKLOG = 128
MIN_RETRY_S = 0.001  # of sending descriptors
MAX_RETRY_S = 0.1
_LENGTH = struct.Struct("<I")


class AttachConnection(asyncio.Protocol):
    """One connection; both a `Link` and a `Connection` to the sessions."""

    transport = "local"

    def __init__(
        self,
        runtime: Runtime,
        connections: "set[AttachConnection]",
        descriptors: DescriptorWatch,
    ) -> None:
        self.token = b""
        self.process = AttachedProcess(0, None)
        self.session: Session | None = None
        self._runtime = runtime
        self._connections = connections
        self._descriptors = descriptors
        self._decoder = FrameDecoder(max_first_bytes=limits.MAX_HELLO_BYTES)
        self._conversation = Conversation(runtime, self, self)
        self._held: list[bytes] | None = None  # frames behind descriptors that are not sent yet
        self._deaf = False  # closing or closed: nothing is read any more
        self._timer: asyncio.TimerHandle | None = None
        self._stream: asyncio.Transport

    # ---- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the peer, if it may be here."""
        self._stream = cast(asyncio.Transport, transport)
        self._stream.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._connections.add(self)
        try:
            with self._duplicate() as peer:
                uid = peer_of(peer).uid
                self.process = AttachedProcess.behind(peer)
        except OSError as error:
            self._descriptors.report()
            self._dismiss("EXHAUSTED", f"the server has no descriptors left: {error.strerror}")
            return
        if uid != os.geteuid():
            self._turn_away(PermissionDenied.code, f"user {uid} may not attach to this server")
        elif len(self._connections) > MAX_CONNECTIONS:
            self._turn_away("EXHAUSTED", f"{MAX_CONNECTIONS} connections are open")
        else:
            self._greet()

    def data_received(self, data: bytes) -> None:
        """Run every whole message in `data`."""
        if self._deaf:
            return
        try:
            payloads = self._decoder.feed(data)
        except FramingError as error:
            self._conversation.break_off(str(error))
        else:
            for payload in payloads:
                self._conversation.receive(payload)
        self._runtime.settle()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone, whoever closed it."""
        self._deaf = True
        self._stop_timer()
        self._connections.discard(self)
        if self.session is not None:
            self._runtime.lifecycle.disconnected(self.session, self)
            self._runtime.settle()
        else:
            self._runtime.sessions.withdraw(self)
            self.process.close()

    def pause_writing(self) -> None:
        """Too much waits for the peer: read nothing from it until it has read."""
        if not self._stream.is_closing():
            self._stream.pause_reading()
        self._start_timer(SLOW_READER_TIMEOUT_S, self._too_slow)

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self._stop_timer()
        if not self._stream.is_closing():
            self._stream.resume_reading()

    # ---- Link and Connection ----------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """Queue one serialized ServerMessage; dropped if the connection is closing."""
        if self._stream.is_closing():
            return
        frame = _LENGTH.pack(len(message)) + message
        if self._held is not None:
            self._held.append(frame)
        else:
            self._stream.write(frame)

    def close(self) -> None:
        """Close once everything sent has gone out, or CLOSE_TIMEOUT_S is over; idempotent.

        A connection whose end stands for that of its process is only closed on this side.
        """
        self._deaf = True
        if self._stream.is_closing():
            return
        stays = self._stands_for_process()
        if not stays:
            self._start_timer(CLOSE_TIMEOUT_S, self._stream.abort)
        if self._held is not None:
            return  # closed once the descriptors are out
        if stays:
            self._stream.write_eof()
        else:
            self._stream.close()

    def send_pools(self) -> None:
        """Send the pools with their descriptors, behind what was sent before."""
        if self._held is None:  # else they are on their way already
            self._held = []
            message = pools_message(self._runtime.pool_host)
            self._send_descriptors(_LENGTH.pack(len(message)) + message, MIN_RETRY_S)

    def _send_descriptors(self, frame: bytes, retry_s: float) -> None:
        arena = self._runtime.pool_host.arena
        if self._stream.is_closing() or arena is None:
            return
        sent = 0
        if self._stream.get_write_buffer_size() == 0:
            try:
                with self._duplicate() as peer:
                    sent = socket.send_fds(peer, [frame], [arena.descriptor], socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except OSError:
                self._stream.abort()
                return
        if not sent:
            next_s = min(2 * retry_s, MAX_RETRY_S)
            self._runtime.loop.call_later(retry_s, self._send_descriptors, frame, next_s)
            return
        held, self._held = self._held or [], None
        for rest in (frame[sent:], *held):
            if rest:
                self._stream.write(rest)
        if self._deaf:
            self.close()

    # ---- the rest ---------------------------------------------------------------------------

    def _greet(self) -> None:
        self.token = secrets.token_bytes(limits.SESSION_TOKEN_BYTES)
        self._runtime.sessions.offer(self)
        attached = pb.Attached(
            session_token=self.token,
            incarnation=self._runtime.incarnation,
            server_version=__version__,
            grpc_address=self._runtime.grpc_address,
        )
        self.send(pb.ServerMessage(attached=attached).SerializeToString())
        self._start_timer(HELLO_TIMEOUT_S, self._check_claimed)

    def _turn_away(self, code: str, reason: str) -> None:
        log.warning("turned a connection of process %d away: %s", self.process.pid, reason)
        self._dismiss(code, reason)

    def _dismiss(self, code: str, reason: str) -> None:
        self._conversation.over = True
        self.send(ended(code, reason))
        self.close()

    def _check_claimed(self) -> None:
        if self.session is None:
            self._conversation.break_off(f"no Hello within {HELLO_TIMEOUT_S:.0f} s")

    def _too_slow(self) -> None:
        if self._stands_for_process():
            return  # stays unread: closing it would end the session of a living process
        log.warning(
            "process %d has not read %d bytes for %.0f s: disconnected",
            self.process.pid, self._stream.get_write_buffer_size(), SLOW_READER_TIMEOUT_S,
        )  # fmt: skip
        self._stream.abort()

    def _stands_for_process(self) -> bool:
        session = self.session
        return session is not None and not session.ended.is_set() and not self.process.is_observable

    def _duplicate(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self._stream.get_extra_info("socket").fileno()))

    def _start_timer(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self._runtime.loop.call_later(delay_s, callback)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class AttachServer:
    """Listens on the attach socket. The caller holds the lock of its directory, and removes it."""

    def __init__(self, runtime: Runtime, path: Path) -> None:
        self._runtime = runtime
        self._path = path
        self._server: asyncio.Server | None = None
        self._connections: set[AttachConnection] = set()
        self._descriptors = DescriptorWatch()

    async def start(self) -> None:
        """Listen; the socket is for this user only. Raises OSError."""
        raise_descriptor_limit()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self._path))
            os.chmod(self._path, 0o600)
            self._server = await self._runtime.loop.create_unix_server(
                lambda: AttachConnection(
                    self._runtime, self._connections, self._descriptors
                ),
                sock=listener,
                backlog=BACKLOG,
            )
        except BaseException:
            listener.close()
            raise
        self._descriptors.watch(self._runtime.loop, listener.fileno())

    async def stop(self) -> None:
        """End all sessions and connections, within CLOSE_TIMEOUT_S; idempotent."""
        if self._server is None:
            return
        self._descriptors.stop()
        self._server.close()
        self._server = None
        self._runtime.close()
        for connection in list(self._connections):
            connection.close()
        deadline = self._runtime.loop.time() + CLOSE_TIMEOUT_S
        while self._connections and self._runtime.loop.time() < deadline:
            await asyncio.sleep(0.005)
