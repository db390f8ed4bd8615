"""The gRPC service `radixkv.v1.Cache`: the session over HTTP/2, and unary calls for tools."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from radixkv.core.errors import CacheError
from radixkv.server.admin import AdminToken
from radixkv.server.conversation import (
    CLOSE_TIMEOUT_S,
    HELLO_TIMEOUT_S,
    MAX_UNSENT_BYTES,
    SLOW_READER_TIMEOUT_S,
    Conversation,
)
from radixkv.server.errors import MAX_MESSAGE_CHARS, PermissionDenied
from radixkv.server.operations import fill_miss
from radixkv.server.runtime import Runtime
from radixkv.v1 import cache_pb2

log = logging.getLogger(__name__)

MAX_STREAMS = 1024  # of Session, all clients together

_SERVICE = cache_pb2.DESCRIPTOR.services_by_name["Cache"]
_CODES = {
    "INVALID_ARGUMENT": grpc.StatusCode.INVALID_ARGUMENT,
    "NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "ALREADY_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "TOO_LARGE": grpc.StatusCode.OUT_OF_RANGE,
    "FAILED_PRECONDITION": grpc.StatusCode.FAILED_PRECONDITION,
    "PERMISSION_DENIED": grpc.StatusCode.PERMISSION_DENIED,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "CANCELLED": grpc.StatusCode.CANCELLED,
    "INTERNAL": grpc.StatusCode.INTERNAL,
}
Context = grpc.aio.ServicerContext
Method = Callable[[Any, Context], Awaitable[Any]]


class GrpcLink:
    """The outgoing side of one Session stream. `on_close` is called when the server closes it."""

    transport = "grpc"

    def __init__(self) -> None:
        self.on_close: Callable[[], Any] = lambda: None
        self._queue: deque[bytes] = deque()
        self._num_unsent_bytes = 0
        self._closing = False
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    def send(self, message: bytes) -> None:
        """Queue one serialized ServerMessage; dropped if the stream is closing."""
        if self._closing:
            return
        self._queue.append(message)
        self._num_unsent_bytes += len(message)
        if self._num_unsent_bytes > MAX_UNSENT_BYTES:
            self._has_room.clear()
        self._wake.set()

    def close(self) -> None:
        """End the stream once everything queued has gone out; idempotent."""
        self._closing = True
        self._wake.set()
        self.on_close()

    async def room(self) -> None:
        """Wait while too much is unsent. Raises TimeoutError after SLOW_READER_TIMEOUT_S."""
        if not self._has_room.is_set():
            await asyncio.wait_for(self._has_room.wait(), SLOW_READER_TIMEOUT_S)

    async def write_to(self, context: Context) -> None:
        """Send what is queued until the link is closed."""
        while True:
            while self._queue:
                message = self._queue.popleft()
                await context.write(message)
                self._num_unsent_bytes -= len(message)
                if self._num_unsent_bytes <= MAX_UNSENT_BYTES // 2:
                    self._has_room.set()
            if self._closing:
                return
            self._wake.clear()
            await self._wake.wait()


class CacheService:
    """Handlers of all methods; `token` admits changing calls over TCP, None admits none."""

    def __init__(
        self, runtime: Runtime, token: AdminToken | None, reads_need_token: bool = False
    ) -> None:
        self._runtime = runtime
        self._token = token
        self._reads_need_token = reads_need_token
        self._num_streams = 0

    # ---- the session ------------------------------------------------------------------------

    async def session(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Carry a session until one side ends the stream; that alone only disconnects."""
        if not _is_local(context):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, "sessions are served on the Unix socket only"
            )
        if self._num_streams >= MAX_STREAMS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_STREAMS} sessions are carried already"
            )
        self._num_streams += 1
        link = GrpcLink()
        conversation = Conversation(self._runtime, link, None)
        reader = asyncio.create_task(self._read(requests, link, conversation))
        writer = asyncio.create_task(link.write_to(context))
        link.on_close = reader.cancel
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done() and not writer.done():
                link.close()
                await asyncio.wait({writer}, timeout=CLOSE_TIMEOUT_S)
        finally:
            self._num_streams -= 1
            for task in (reader, writer):
                task.cancel()
                task.add_done_callback(_forget)
            if conversation.session is not None:
                conversation.session.drop_link(link)

    async def _read(
        self, requests: AsyncIterator[bytes], link: GrpcLink, conversation: Conversation
    ) -> None:
        loop = self._runtime.loop
        timer = loop.call_later(HELLO_TIMEOUT_S, _check_hello, conversation)
        try:
            async for data in requests:
                conversation.receive(data)
                self._runtime.settle()
                await link.room()
        except TimeoutError:
            log.warning("a client does not read its stream: disconnected")
        finally:
            timer.cancel()

    # ---- for tools --------------------------------------------------------------------------

    async def lookup(
        self, request: cache_pb2.LookupRequest, context: Context
    ) -> cache_pb2.LookupReply:
        """What an Acquire would find."""
        self._check_may_read(context)
        found = self._runtime.lookup(request)
        reply = cache_pb2.LookupReply(
            cached_tokens=found.cached_tokens, being_computed=found.being_computed
        )
        fill_miss(reply.miss, found.miss)
        if not _is_local(context) and not self._has_token(context):
            reply.miss.ClearField("nearest_tokens")  # tokens of somebody's prompt
        return reply

    async def stats(self, request: cache_pb2.StatsRequest, context: Context) -> Any:
        """Books and counters."""
        self._check_may_read(context)
        return self._runtime.stats()

    async def sessions(self, request: cache_pb2.SessionsRequest, context: Context) -> Any:
        """All sessions."""
        self._check_may_read(context)
        return self._runtime.session_infos()

    def for_tools(self, method: Callable[[Any], Awaitable[Any]]) -> Method:
        """A handler that lets in who may make changing calls."""

        async def call(request: Any, context: Context) -> Any:
            self._check_may_change(context)
            return await method(request)

        return call

    async def kill_session(
        self, request: cache_pb2.KillSessionRequest, context: Context
    ) -> cache_pb2.KillSessionReply:
        """Kill a session's processes, then free what it held."""
        self._check_may_change(context)
        freed = await self._runtime.lifecycle.kill(request.session_id)
        return cache_pb2.KillSessionReply(freed_blocks=freed)

    def _check_may_read(self, context: Context) -> None:
        """As for HTTP /stats: where a token guards the port, reading needs it too."""
        if self._reads_need_token and not _is_local(context) and not self._has_token(context):
            raise PermissionDenied(
                "calls from other machines need the server's admin token as"
                " `authorization: Bearer <token>`"
            )

    def _has_token(self, context: Context) -> bool:
        return self._token is not None and any(
            key == "authorization" and isinstance(value, str) and self._token.allows(value)
            for key, value in context.invocation_metadata() or ()
        )

    def _check_may_change(self, context: Context) -> None:
        if _is_local(context) or self._has_token(context):
            return
        raise PermissionDenied(
            "calls that change or tell of all tenants need, over TCP, the server's admin token"
            " (--admin-token-file) as"
            " `authorization: Bearer <token>`; on the Unix socket they need none"
        )


def add_cache_service(
    server: grpc.aio.Server,
    runtime: Runtime,
    token: AdminToken | None,
    reads_need_token: bool = False,
) -> None:
    """Serve `radixkv.v1.Cache` on `server`; `token` admits changing calls over TCP."""
    service = CacheService(runtime, token, reads_need_token)
    tiers = runtime.tier_calls
    handlers = {
        # Bytes on both sides: messages are made and kept serialized, and checked by Conversation.
        "Session": grpc.stream_stream_rpc_method_handler(service.session),
        "Lookup": _unary(service.lookup, cache_pb2.LookupRequest),
        "Stats": _unary(service.stats, cache_pb2.StatsRequest),
        "Sessions": _unary(service.sessions, cache_pb2.SessionsRequest),
        "KillSession": _unary(service.kill_session, cache_pb2.KillSessionRequest),
    }
    for name, method in (
        ("Invalidate", tiers.invalidate),
        ("Prefetch", tiers.prefetch),
        ("WaitPrefetch", tiers.wait_prefetch),
        ("CancelPrefetch", tiers.cancel_prefetch),
        ("Pin", tiers.pin),
        ("Unpin", tiers.unpin),
        ("Retain", tiers.retain),
        ("Namespaces", tiers.namespaces),
    ):
        request_type = getattr(cache_pb2, f"{name}Request")
        handlers[name] = _unary(service.for_tools(method), request_type)
    for method in _SERVICE.methods:
        if method.name not in handlers:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(_unimplemented)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),)
    )


def _unary(method: Method, request_type: Any) -> Any:
    """A handler that answers the core's errors with their gRPC status."""

    async def handle(data: bytes, context: Context) -> Any:
        try:
            return await method(request_type.FromString(data), context)
        except DecodeError:
            name = request_type.DESCRIPTOR.name
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"this is not a {name}")
        except CacheError as error:
            await context.abort(_CODES[error.code], str(error)[:MAX_MESSAGE_CHARS])
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("a call for tools failed")
            await context.abort(grpc.StatusCode.INTERNAL, "a fault in the server; its log has more")

    return grpc.unary_unary_rpc_method_handler(
        handle, response_serializer=lambda reply: reply.SerializeToString()
    )


async def _unimplemented(request: bytes, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not do that yet")


def _is_local(context: Context) -> bool:
    """Whether the peer came over the Unix socket, which only this user can reach."""
    return context.peer().startswith("unix:")


def _forget(task: asyncio.Task[None]) -> None:
    """A cut stream makes its tasks fail, which is nothing to report."""
    if not task.cancelled() and task.exception() is not None:
        log.debug("a stream was cut: %s", task.exception())


def _check_hello(conversation: Conversation) -> None:
    if conversation.session is None:
        conversation.break_off(f"no Hello within {HELLO_TIMEOUT_S:.0f} s")
