"""The sync client: a session over the local socket or gRPC, for any number of threads."""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from radixkv.v1 import session_pb2 as pb
from radixkv_client.attach import ConnectionLost, Identity, make_identity
from radixkv_client.base import (
    CLOSE_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    AcquireArguments,
    Backoff,
)
from radixkv_client.errors import Cancelled, DeadlineExceeded, RadixKVError, Unavailable
from radixkv_client.spec import KVSpec
from radixkv_client.sync_connection import SyncConnection
from radixkv_client.sync_lease import Batch, Lease, Pending
from radixkv_client.tokens import TOKEN_BYTES, Tokens, token_bytes
from radixkv_client.values import PLAIN, AcquireOptions


class Client(SyncConnection):
    """A worker's connection to a radixkv-server. Context manager; safe for several threads.

    Every blocking call takes `timeout` in seconds (default: the client's) and raises
    DeadlineExceeded after it. A cut connection is resumed within the calls; after a restart of the
    server they raise Unavailable until reconnect(). In a forked child they raise WrongProcess.
    """

    _lease_type = Lease

    def __init__(self, identity: Identity, kv_spec: KVSpec, transport: str, timeout: float) -> None:
        super().__init__(identity, kv_spec, transport, timeout)
        self._connect_lock = threading.Lock()

    @classmethod
    def connect(
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
        """Attach, say Hello and map the pool. `model` identifies the weights.

        Raises Unavailable if no server is there, DeadlineExceeded if it does not answer, and what
        it refuses Hello with.
        """
        identity = make_identity(
            socket_dir, model, kv_spec.to_proto(), placeholder_tokens, client_name
        )
        client = cls(identity, kv_spec, transport, timeout)
        client._open_session(time.monotonic() + timeout)
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- operations -------------------------------------------------------------------------

    def acquire(
        self, tokens: Tokens, *, timeout: float | None = None, **options: Unpack[AcquireArguments]
    ) -> Lease:
        """Take a lease on the longest cached prefix of a prompt, and blocks for the rest.

        The time the server may wait is added to `timeout`. If that passes, or the wait is
        interrupted, the Acquire is cancelled, so that nothing is left behind.
        """
        encoded = token_bytes(tokens)
        arguments = AcquireOptions(**options) if options else PLAIN
        deadline = self.deadline(timeout) + arguments.max_wait_s
        with self.entered():
            self.connected.check()
            lease = Lease(self, self.connected, len(encoded) // TOKEN_BYTES)
            request = lease.acquire_request(encoded, arguments)
            answer = self.submit([request], deadline)[0]
            try:
                self.wait(answer, deadline)
            except BaseException:
                self.abandon_locked([lease])
                raise
        return answer.result()

    def acquire_nowait(self, tokens: Tokens, **options: Unpack[AcquireArguments]) -> Pending:
        """Send an Acquire without waiting; the Pending's result is the lease."""
        with self.batch() as batch:
            return batch.acquire(tokens, **options)

    def batch(self) -> Batch:
        """Gather several operations into one Step; see BatchBase."""
        self._check_process()
        return Batch(self)

    def poll(self, timeout: float = 0.0) -> None:
        """Take in what has arrived, waiting up to `timeout` seconds for the first of it.

        Raises Unavailable once the session is lost.
        """
        with self.entered():
            self.connected.check()
            if not self._reading:
                self._pump(time.monotonic() + timeout)
            self.connected.check()

    def lookup(self, tokens: Tokens, scope: Any = None, *, timeout: float | None = None) -> Any:
        """How much of a prompt is cached; changes nothing, not even recency."""
        return self.tools.lookup(tokens, scope=scope, model=self.identity.model, timeout=timeout)

    def stats(self, *, timeout: float | None = None) -> Any:
        """The server's StatsReply: books, counters, sizes."""
        return self.tools.stats(timeout=timeout)

    def sessions(self, *, timeout: float | None = None) -> Any:
        """The server's sessions, as a list of SessionInfo."""
        return self.tools.sessions(timeout=timeout)

    # ---- connection -------------------------------------------------------------------------

    def reconnect(self, timeout: float | None = None) -> bool:
        """After a restart of the server: attach, say Hello anew and map the new pool.

        Tries until `timeout`; drop the views of the old pool before. False, and nothing done, if
        the session lives (a mere cut is resumed by itself).
        """
        self._check_process()
        self._check_open()
        deadline = self.deadline(timeout)
        with self._connect_lock:
            if self.connected.session.failure is None:
                return False
            backoff = Backoff()
            while True:
                try:
                    self._open_session(min(deadline, time.monotonic() + HANDSHAKE_TIMEOUT_S))
                    return True
                except (Unavailable, DeadlineExceeded) as error:
                    backoff.failed(error)
                    if backoff.next_at >= deadline:
                        raise
                    time.sleep(max(backoff.next_at - time.monotonic(), 0))

    def close(self) -> None:
        """End the session: its leases end with it. Idempotent; does nothing in a forked child."""
        if self.in_other_process or self._closed:
            return
        with self._lock:
            self._closed = True
            self._end_session(Cancelled("the client is closed"))
            if self._transport is not None:
                bye = pb.ClientMessage(bye=pb.Bye()).SerializeToString()
                with contextlib.suppress(ConnectionLost, RadixKVError):
                    self._transport.send([bye])
                    self._drain(time.monotonic() + CLOSE_TIMEOUT_S)
            if self._transport is not None:
                self._drop_transport()
        self._close_tools()

    def _drain(self, deadline: float) -> None:
        """Read until the server has closed its end, which says that the session is over."""
        while self._transport is not None and time.monotonic() < deadline:
            self._pump(deadline)
