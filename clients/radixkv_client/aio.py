"""The asyncio client: the same operations as `client`, awaited, for one event loop."""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from radixkv.v1 import session_pb2 as pb
from radixkv_client.aio_lease import AsyncBatch, AsyncLease, AsyncPending
from radixkv_client.aio_transports import AsyncTransport, open_async_transport
from radixkv_client.attach import (
    AttachConnection,
    ConnectionLost,
    HandshakeTimeout,
    Identity,
    make_identity,
    unreachable,
)
from radixkv_client.base import (
    CLOSE_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    AcquireArguments,
    Backoff,
    ClientBase,
    submit_all,
)
from radixkv_client.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    RadixKVError,
    Unavailable,
)
from radixkv_client.lease import LeaseState
from radixkv_client.protocol import Answer, Request
from radixkv_client.spec import KVSpec
from radixkv_client.tokens import TOKEN_BYTES, Tokens, token_bytes
from radixkv_client.values import PLAIN, AcquireOptions


class AsyncClient(ClientBase):
    """A worker's connection to a radixkv-server, for one event loop. Async context manager.

    Operations submitted in one turn of the loop travel in one Step. What is said of Client about
    timeouts, cuts, restarts and forks holds here too.
    """

    _lease_type = AsyncLease

    def __init__(self, identity: Identity, kv_spec: KVSpec, transport: str, timeout: float) -> None:
        super().__init__(identity, kv_spec, transport, timeout)
        self._lock = contextlib.nullcontext()
        self._transport: AsyncTransport | None = None
        self._left: AttachConnection | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._flush_scheduled = False
        self._connect_lock = asyncio.Lock()
        self._backoff = Backoff()

    @classmethod
    async def connect(
        cls,
        socket_dir: str | os.PathLike[str] | None = None,
        *,
        model: str,
        kv_spec: KVSpec,
        transport: str = "local",
        placeholder_tokens: Sequence[int] = (),
        client_name: str = "",
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> Self:
        """Attach, say Hello and map the pool; see Client.connect."""
        identity = make_identity(
            socket_dir, model, kv_spec.to_proto(), placeholder_tokens, client_name
        )
        client = cls(identity, kv_spec, transport, timeout)
        await client._open_session(time.monotonic() + timeout)
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ---- operations -------------------------------------------------------------------------

    async def acquire(
        self, tokens: Tokens, *, timeout: float | None = None, **options: Unpack[AcquireArguments]
    ) -> AsyncLease:
        """Take a lease on the longest cached prefix of a prompt, and blocks for the rest.

        The time the server may wait is added to `timeout`. If that passes, or the task is
        cancelled, the Acquire is cancelled, so that nothing is left behind.
        """
        self.enter()
        encoded = token_bytes(tokens)
        arguments = AcquireOptions(**options) if options else PLAIN
        self.connected.check()
        lease = AsyncLease(self, self.connected, len(encoded) // TOKEN_BYTES)
        seconds = (self.timeout if timeout is None else timeout) + arguments.max_wait_s
        answer = self.submit([lease.acquire_request(encoded, arguments)])[0]
        try:
            return await self.answered(answer, seconds)
        except BaseException:
            self.abandon([lease])
            raise

    def acquire_nowait(self, tokens: Tokens, **options: Unpack[AcquireArguments]) -> AsyncPending:
        """Send an Acquire without waiting; awaiting the Pending gives the lease."""
        batch = self.batch()
        pending: AsyncPending = batch.acquire(tokens, **options)
        batch.send()
        return pending

    def batch(self) -> AsyncBatch:
        """Gather several operations into one Step; see BatchBase."""
        self.enter()
        return AsyncBatch(self)

    async def lookup(
        self, tokens: Tokens, scope: Any = None, *, timeout: float | None = None
    ) -> Any:
        """How much of a prompt is cached; changes nothing, not even recency."""
        return await asyncio.to_thread(
            lambda: self.tools.lookup(
                tokens, scope=scope, model=self.identity.model, timeout=timeout
            )
        )

    async def stats(self, *, timeout: float | None = None) -> Any:
        """The server's StatsReply: books, counters, sizes."""
        return await asyncio.to_thread(lambda: self.tools.stats(timeout=timeout))

    async def sessions(self, *, timeout: float | None = None) -> Any:
        """The server's sessions, as a list of SessionInfo."""
        return await asyncio.to_thread(lambda: self.tools.sessions(timeout=timeout))

    # ---- what leases and batches use --------------------------------------------------------

    def enter(self) -> None:
        """Raise WrongProcess in a forked child, Cancelled after close()."""
        self._check_process()
        self._check_open()

    def submit(self, requests: Sequence[Request]) -> list[Answer]:
        """Send operations at the end of this turn of the loop, or once reconnected."""
        answers = submit_all(self.connected.session, requests)
        self._schedule_flush()
        return answers

    async def call(self, requests: Sequence[Request], timeout: float | None) -> Any:
        """Send operations and return the last one's result; nothing for none."""
        if not requests:
            return None
        return await self.answered(self.submit(requests)[-1], timeout)

    async def answered(self, answer: Answer, timeout: float | None) -> Any:
        """The answer's value or error; DeadlineExceeded if it takes too long."""
        await self.wait(answer, timeout)
        return answer.result()

    async def wait(self, answer: Answer, timeout: float | None) -> None:
        """Return once answered; DeadlineExceeded if that takes too long."""
        if not answer.done:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()

            def wake(_: object) -> None:
                if not future.done():
                    future.set_result(None)

            answer.on_done(wake)
            seconds = self.timeout if timeout is None else timeout
            timer = loop.call_later(seconds, wake, None)
            try:
                await future
            finally:
                timer.cancel()
            if not answer.done:
                raise DeadlineExceeded("no answer in time")

    def abandon(self, leases: Sequence[LeaseState]) -> None:
        """Give back leases whose Acquire or Fork nobody waits for any more; does not wait."""
        with contextlib.suppress(RadixKVError):
            for lease in leases:
                if not lease.ended:
                    lease.connected.session.submit([lease.release_request("aborted")])
            self._schedule_flush()

    # ---- connection -------------------------------------------------------------------------

    async def reconnect(self, timeout: float | None = None) -> bool:
        """After a restart of the server: attach, say Hello anew and map the new pool.

        See Client.reconnect.
        """
        self.enter()
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        async with self._connect_lock:
            if self.connected.session.failure is None:
                return False
            backoff = Backoff()
            while True:
                try:
                    await self._open_session(min(deadline, time.monotonic() + HANDSHAKE_TIMEOUT_S))
                    return True
                except (Unavailable, DeadlineExceeded) as error:
                    backoff.failed(error)
                    if backoff.next_at >= deadline:
                        raise
                    await asyncio.sleep(max(backoff.next_at - time.monotonic(), 0))

    async def close(self) -> None:
        """End the session: its leases end with it. Idempotent; does nothing in a forked child."""
        if self.in_other_process or self._closed:
            return
        self._closed = True
        self._end_session(Cancelled("the client is closed"))
        if self._recovery is not None:
            self._recovery.cancel()
        if self._transport is not None:
            self._transport.send([pb.ClientMessage(bye=pb.Bye()).SerializeToString()])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), CLOSE_TIMEOUT_S)
        self._drop_transport()
        self._close_tools()

    async def _open_session(self, deadline: float) -> None:
        try:
            transport, opened = await open_async_transport(self.transport, self.identity, deadline)
        except ConnectionLost as error:
            raise unreachable(self.identity, error) from error
        except HandshakeTimeout as error:
            raise DeadlineExceeded(f"{self.identity.attach_path}: {error}") from error
        self._establish(opened)
        self._adopt(transport)

    def _adopt(self, transport: AsyncTransport) -> None:
        self._transport = transport
        self._lost.clear()
        transport.start(self._received, self._cut)

    def _received(self, messages: list[pb.ServerMessage]) -> None:
        session = self.connected.session
        try:
            for message in messages:
                session.receive(message)
        except Internal as error:
            self._end_session(error)
        if session.failure is None:
            self._schedule_flush()
        elif not self._closed:
            self._drop_transport()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled and self.connected.session.has_outgoing:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._transport is not None and (messages := self.connected.session.outgoing()):
            self._transport.send(messages)

    def _cut(self, error: Exception) -> None:
        """The connection is lost: begin to recover, unless the session is over."""
        self._lost.set()
        if self._transport is None:
            return
        self._left, self._transport = self._transport.detach(), None
        if isinstance(error, Internal):
            self._end_session(error)
        if self.connected.session.failure is not None:
            self._drop_transport()
            return
        self._backoff.lost()
        self._recovery = asyncio.get_running_loop().create_task(self._recover())

    def _drop_transport(self) -> None:
        if self._transport is not None:
            self._left, self._transport = self._transport.detach(), None
        if self._left is not None:
            self._left.close()
            self._left = None

    async def _recover(self) -> None:
        session = self.connected.session
        while session.failure is None:
            await asyncio.sleep(max(self._backoff.next_at - time.monotonic(), 0))
            deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
            try:
                transport, opened = await open_async_transport(
                    self.transport, self.identity, deadline, self._resume(), self._left
                )
            except (ConnectionLost, HandshakeTimeout) as error:
                if not self._backoff.failed(error):
                    self._end_session(self._lost_for_good(error))
            except RadixKVError as error:
                self._end_session(self._lost_for_good(error))
            else:
                self._left = None
                transport.send(session.resume(opened.hello.last_step))
                self._adopt(transport)
                self._schedule_flush()
                return
        self._drop_transport()
