"""How a session's messages travel for the sync client: framed on the attach socket, or by gRPC.

A transport lives until its connection is cut; the client then opens another one and resumes.
`send` may be called while another thread is in `receive`. The socket's transport has no thread.
"""

import contextlib
import queue
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from radixkv.v1 import session_pb2 as pb
from radixkv.wire import framing
from radixkv_client.attach import (
    AttachConnection,
    ConnectionLost,
    HandshakeTimeout,
    Identity,
    Opened,
    Resume,
    accepted,
    attach,
    open_local,
    opened,
)
from radixkv_client.errors import Internal, RadixKVError

SESSION_METHOD = "/radixkv.v1.Cache/Session"
MAX_INBOX_MESSAGES = 1024  # received by gRPC and not read yet; then its thread stops reading
_HEADER_BYTES = framing.HEADER_BYTES
_RECEIVE_BYTES = 262_144
_SEND_BUFFER_BYTES = 2**22  # wanted; the kernel cuts it to net.core.wmem_max
_CLOSE_POLL_S = 0.1


class Transport(Protocol):
    """What the client needs of a connection. Methods raise ConnectionLost once it is cut."""

    def send(self, messages: list[bytes]) -> None:
        """Send serialized ClientMessages in order; what does not fit is kept for `flush`."""

    def flush(self, timeout: float) -> bool:
        """Send what was kept, waiting up to `timeout` seconds; True if nothing is left."""

    def receive(self, timeout: float) -> list[pb.ServerMessage]:
        """What has come, waiting up to `timeout` seconds for the first; also flushes."""

    def close(self) -> None:
        """Close the connection, which also wakes a `receive` in another thread."""

    def detach(self) -> AttachConnection | None:
        """Close all but the attach connection that a resume may use, if there is one."""


class LocalTransport:
    """Framed messages on the attach socket: one system call to send, two to receive."""

    def __init__(self, connection: AttachConnection) -> None:
        self._socket = connection.socket
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._decoder = connection.decoder
        self._backlog = connection.backlog
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._unsent = bytearray()
        self._send_lock = threading.Lock()
        self._readable = self._poller(select.POLLIN)
        self._writable = self._poller(select.POLLOUT)
        self._either = self._poller(select.POLLIN | select.POLLOUT)

    def _poller(self, events: int) -> Any:
        poller = select.poll()
        poller.register(self._socket, events)
        return poller

    def send(self, messages: list[bytes]) -> None:
        """See Transport."""
        data = frames(messages)
        with self._send_lock:
            sent = 0 if self._unsent else self._send_some(data)
            if sent < len(data):
                self._unsent += data[sent:]

    def flush(self, timeout: float) -> bool:
        """See Transport."""
        if self._unsent and self._writable.poll(timeout * 1000):
            self._send_unsent()
        return not self._unsent

    def receive(self, timeout: float) -> list[pb.ServerMessage]:
        """See Transport."""
        if self._backlog:
            messages, self._backlog = self._backlog, []
            return messages
        events = (self._either if self._unsent else self._readable).poll(timeout * 1000)
        if not events:
            return []
        if events[0][1] & select.POLLOUT:
            self._send_unsent()
        return self._receive_some() if events[0][1] != select.POLLOUT else []

    def close(self) -> None:
        """See Transport."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def detach(self) -> AttachConnection | None:
        """See Transport."""
        self.close()
        return None

    def _send_some(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def _send_unsent(self) -> None:
        with self._send_lock:
            del self._unsent[: self._send_some(self._unsent)]

    def _receive_some(self) -> list[pb.ServerMessage]:
        try:
            count = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not count:
            raise ConnectionLost("the server closed the connection")
        try:
            payloads = self._decoder.feed(self._buffer[:count])
        except framing.FramingError as error:
            raise Internal(f"the server sent something else than frames: {error}") from error
        return [pb.ServerMessage.FromString(payload) for payload in payloads]


class GrpcTransport:
    """The same messages on a stream of Cache.Session, read by one thread into a bounded inbox.

    The attach connection stays open beside it and says that the process lives.
    """

    def __init__(self, connection: AttachConnection) -> None:
        import grpc

        from radixkv.wire.channel import client_options

        self.connection = connection
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._inbox: queue.Queue[pb.ServerMessage | None] = queue.Queue(MAX_INBOX_MESSAGES)
        self._lost = "the server ended the stream"
        self._ended = False
        self._closed = False
        self._channel = grpc.insecure_channel(
            connection.attached.grpc_address, options=client_options()
        )
        method = self._channel.stream_stream(
            SESSION_METHOD, response_deserializer=pb.ServerMessage.FromString
        )
        self._stream = method(self._requests())
        threading.Thread(target=self._read, args=(grpc.RpcError,), daemon=True).start()

    def say_hello(self, hello: pb.ClientMessage, deadline: float) -> pb.HelloReply:
        """Send Hello and wait for its reply; raises the error it was refused with."""
        self._outbox.put(hello.SerializeToString())
        message = self._get(deadline - time.monotonic())
        if message is None:
            raise HandshakeTimeout("no answer to Hello in time")
        return accepted(message.hello)

    def send(self, messages: list[bytes]) -> None:
        """See Transport; gRPC's own thread sends."""
        if self._ended:
            raise ConnectionLost(self._lost)
        for message in messages:
            self._outbox.put(message)

    def flush(self, timeout: float) -> bool:
        """See Transport; gRPC keeps by itself what does not fit."""
        return True

    def receive(self, timeout: float) -> list[pb.ServerMessage]:
        """See Transport."""
        first = self._get(timeout)
        if first is None:
            return []
        messages = [first]
        while not self._inbox.empty():
            if (message := self._inbox.get_nowait()) is None:
                self._ended = True
                break
            messages.append(message)
        return messages

    def close(self) -> None:
        """See Transport."""
        self.detach().close()

    def detach(self) -> AttachConnection:
        """See Transport."""
        self._closed = True
        self._outbox.put(None)
        self._stream.cancel()
        self._channel.close()
        return self.connection

    def _get(self, timeout: float) -> pb.ServerMessage | None:
        """The next message, None if none comes in time; ConnectionLost behind the last."""
        try:
            if self._ended:
                raise ConnectionLost(self._lost)
            message = self._inbox.get(timeout > 0, timeout if timeout > 0 else None)
        except queue.Empty:
            return None
        if message is None:
            self._ended = True
            raise ConnectionLost(self._lost)
        return message

    def _requests(self) -> Iterator[bytes]:
        while (message := self._outbox.get()) is not None:
            yield message

    def _read(self, rpc_error: type[Exception]) -> None:
        try:
            for message in self._stream:
                self._put(message)
        except rpc_error as error:
            self._lost = str(error.details() if hasattr(error, "details") else error)
        self._put(None)

    def _put(self, message: pb.ServerMessage | None) -> None:
        while not self._closed:
            with contextlib.suppress(queue.Full):
                self._inbox.put(message, timeout=_CLOSE_POLL_S)
                return
        with contextlib.suppress(queue.Full):
            self._inbox.put_nowait(message)


def frames(messages: list[bytes]) -> bytes:
    """Serialized messages as one run of frames."""
    return b"".join([len(part).to_bytes(_HEADER_BYTES, "little") + part for part in messages])


def open_transport(
    kind: str,
    identity: Identity,
    deadline: float,
    resume: Resume | None = None,
    left: AttachConnection | None = None,
) -> tuple[Transport, Opened]:
    """A finished handshake and the transport that goes on from it.

    `left` is what detach() left of an earlier transport; it is used or closed, unless this raises.
    """
    if kind == "local":
        result = open_local(identity, deadline, resume)
        return LocalTransport(result.connection), result
    connection = left
    if connection is None or not connection.still_open():
        connection = attach(identity, deadline, resume)
    transport = GrpcTransport(connection)
    try:
        hello = identity.hello(connection.attached.session_token, resume)
        result = opened(connection, transport.say_hello(hello, deadline), resume)
    except BaseException as error:
        if isinstance(error, RadixKVError):
            error = connection.explain(error)
        transport.detach()
        if connection is not left:
            connection.close()
        raise error from None
    if left is not None and left is not connection:
        left.close()
    return transport, result
