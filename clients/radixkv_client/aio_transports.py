"""How a session's messages travel for the asyncio client; twins of `transports`.

The handshake blocks, so it runs in a thread; then the loop owns the connection.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

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
from radixkv_client.transports import SESSION_METHOD, frames

OnMessages = Callable[[list[pb.ServerMessage]], None]
OnLost = Callable[[Exception], None]
_T = TypeVar("_T")


class AsyncTransport(Protocol):
    """What the asyncio client needs of a connection."""

    def start(self, on_messages: OnMessages, on_lost: OnLost) -> None:
        """Begin to deliver what comes; `on_lost` is called once, when the connection is cut."""

    def send(self, messages: list[bytes]) -> None:
        """Send serialized ClientMessages in order."""

    def detach(self) -> AttachConnection | None:
        """Close all but the attach connection that a resume may use, if there is one."""


class LocalAsyncTransport(asyncio.Protocol):
    """Framed messages on the attach socket."""

    def __init__(self, connection: AttachConnection) -> None:
        self._decoder = connection.decoder
        self._backlog = connection.backlog
        self._on_messages: OnMessages | None = None
        self._on_lost: OnLost | None = None
        self._lost: Exception | None = None
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop has taken the socket over."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        try:
            payloads = self._decoder.feed(data)
        except framing.FramingError as error:
            self._lost = Internal(f"the server sent something else than frames: {error}")
            self._transport.abort()
            return
        self._backlog += [pb.ServerMessage.FromString(payload) for payload in payloads]
        self._deliver()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is over, by whomever."""
        self._lost = self._lost or ConnectionLost(str(error or "the server closed the connection"))
        self._deliver()

    def start(self, on_messages: OnMessages, on_lost: OnLost) -> None:
        """See AsyncTransport."""
        self._on_messages, self._on_lost = on_messages, on_lost
        self._deliver()

    def _deliver(self) -> None:
        if self._on_messages is not None and self._backlog:
            messages, self._backlog = self._backlog, []
            self._on_messages(messages)
        if self._on_lost is not None and self._lost is not None:
            on_lost, self._on_lost = self._on_lost, None
            on_lost(self._lost)

    def send(self, messages: list[bytes]) -> None:
        """See AsyncTransport."""
        self._transport.write(frames(messages))

    def detach(self) -> AttachConnection | None:
        """See AsyncTransport."""
        self._on_messages = self._on_lost = None
        self._transport.abort()
        return None


class GrpcAsyncTransport:
    """The same messages on a stream of Cache.Session, beside an open attach connection."""

    def __init__(self, connection: AttachConnection) -> None:
        import grpc.aio

        from radixkv.wire.channel import client_options

        self._connection = connection
        self._rpc_error = grpc.RpcError
        self._channel = grpc.aio.insecure_channel(
            connection.attached.grpc_address, options=client_options()
        )
        method = self._channel.stream_stream(
            SESSION_METHOD, response_deserializer=pb.ServerMessage.FromString
        )
        self._call = method()
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def say_hello(self, hello: pb.ClientMessage, deadline: float) -> pb.HelloReply:
        """Send Hello and wait for its reply; raises the error it was refused with."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._call.write(hello.SerializeToString())
                message = await self._call.read()
        except TimeoutError as error:
            raise HandshakeTimeout("no answer to Hello in time") from error
        except (self._rpc_error, asyncio.InvalidStateError) as error:
            raise ConnectionLost(str(error)) from error
        if not isinstance(message, pb.ServerMessage):
            raise ConnectionLost("the server ended the stream")
        return accepted(message.hello)

    def start(self, on_messages: OnMessages, on_lost: OnLost) -> None:
        """See AsyncTransport."""
        reader = asyncio.create_task(self._read(on_messages, on_lost))
        self._tasks = [reader, asyncio.create_task(self._write())]

    def send(self, messages: list[bytes]) -> None:
        """See AsyncTransport."""
        for message in messages:
            self._outbox.put_nowait(message)

    def detach(self) -> AttachConnection:
        """See AsyncTransport."""
        for task in self._tasks:
            task.cancel()
        self._call.cancel()
        self._closing = asyncio.ensure_future(self._channel.close())
        return self._connection

    async def _read(self, on_messages: OnMessages, on_lost: OnLost) -> None:
        reason = "the server ended the stream"
        try:
            while isinstance(message := await self._call.read(), pb.ServerMessage):
                on_messages([message])
        except (self._rpc_error, asyncio.InvalidStateError) as error:
            reason = str(error)
        on_lost(ConnectionLost(reason))

    async def _write(self) -> None:
        with contextlib.suppress(self._rpc_error, asyncio.InvalidStateError):  # _read finds out
            while True:
                await self._call.write(await self._outbox.get())


async def open_async_transport(
    kind: str,
    identity: Identity,
    deadline: float,
    resume: Resume | None = None,
    left: AttachConnection | None = None,
) -> tuple[AsyncTransport, Opened]:
    """A finished handshake and the transport that goes on from it, not started yet.

    `left` is what detach() left of an earlier transport; it is used or closed, unless this raises.
    """
    if kind == "local":
        result = await _in_thread(lambda: open_local(identity, deadline, resume), _discard)
        result.connection.socket.setblocking(False)
        local = LocalAsyncTransport(result.connection)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: local, sock=result.connection.socket)
        return local, result
    connection = left
    if connection is None or not connection.still_open():
        connection = await _in_thread(
            lambda: attach(identity, deadline, resume), AttachConnection.close
        )
    transport = GrpcAsyncTransport(connection)
    try:
        hello = identity.hello(connection.attached.session_token, resume)
        reply = await transport.say_hello(hello, deadline)
        finished = await _in_thread(lambda: opened(connection, reply, resume), _discard)
    except BaseException as error:
        if isinstance(error, RadixKVError):
            error = connection.explain(error)
        transport.detach()
        if connection is not left:
            connection.close()
        raise error from None
    if left is not None and left is not connection:
        left.close()
    return transport, finished


async def _in_thread(call: Callable[[], _T], discard: Callable[[_T], None]) -> _T:
    """Run a blocking call; if nobody waits for its result any more, discard that."""
    running = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.add_done_callback(
            lambda done: None if done.cancelled() or done.exception() else discard(done.result())
        )
        raise


def _discard(result: Opened) -> None:
    result.connection.close()
    for descriptor in result.descriptors:
        os.close(descriptor)
