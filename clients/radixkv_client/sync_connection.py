"""The sync client's I/O: one lock, one reader at a time, and recovery from a cut.

There is no thread in here. Whoever waits for an answer first reads for everybody (`_reading`); the
others wait until it has let go. Nobody holds the lock while the connection is waited for.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from radixkv_client.attach import (
    AttachConnection,
    ConnectionLost,
    HandshakeTimeout,
    Identity,
    unreachable,
)
from radixkv_client.base import HANDSHAKE_TIMEOUT_S, Backoff, ClientBase, submit_all
from radixkv_client.errors import DeadlineExceeded, Internal, RadixKVError
from radixkv_client.lease import LeaseState
from radixkv_client.protocol import Answer, Request
from radixkv_client.spec import KVSpec
from radixkv_client.transports import Transport, open_transport

MIN_HANDSHAKE_S = 0.25  # given to a handshake even by a caller that has no time left
_FLUSH_SLICE_S = 0.05


class SyncConnection(ClientBase):
    """A session over a Transport. Methods marked (locked) are called with `_lock` held."""

    def __init__(self, identity: Identity, kv_spec: KVSpec, transport: str, timeout: float) -> None:
        super().__init__(identity, kv_spec, transport, timeout)
        self._lock: threading.Lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._reading = False
        self._transport: Transport | None = None
        self._left: AttachConnection | None = None  # of a transport that was cut
        self._backoff = Backoff()

    def deadline(self, timeout: float | None) -> float:
        """The time on the monotonic clock when a call is over."""
        return time.monotonic() + (self.timeout if timeout is None else timeout)

    def entered(self) -> threading.Lock:
        """The lock to hold; raises in the wrong process and after close()."""
        self._check_process()
        self._check_open()
        return self._lock

    def submit(self, requests: Sequence[Request], deadline: float) -> list[Answer]:
        """(locked) Send operations, or queue them while the connection is lost."""
        session = self.connected.session
        answers = submit_all(session, requests)
        self._send()
        if session.window_is_full and not self._reading:
            self._pump(0)  # an acknowledgement may have come that nobody has read
        while self._transport is not None and not self._transport.flush(0):
            if time.monotonic() >= deadline:
                break
            self._push(deadline)
        return answers

    def _push(self, deadline: float) -> None:
        """(locked) Wait for room to send in, reading meanwhile so that the server can go on."""
        if not self._reading:
            self._pump(deadline)
            return
        transport = self._transport
        assert transport is not None
        self._lock.release()
        try:
            with suppress(ConnectionLost):  # the reader finds out
                transport.flush(_FLUSH_SLICE_S)
        finally:
            self._lock.acquire()

    def wait(self, answer: Answer, deadline: float) -> None:
        """(locked) Return once answered; DeadlineExceeded if that takes too long."""
        while not answer.done:
            if time.monotonic() >= deadline:
                raise DeadlineExceeded("no answer in time")
            self._pump(deadline)

    def call(self, requests: Sequence[Request], deadline: float) -> Any:
        """(locked) Send operations and return the last one's result; nothing for none."""
        if not requests:
            return None
        answer = self.submit(requests, deadline)[-1]
        self.wait(answer, deadline)
        return answer.result()

    def abandon(self, leases: Sequence[LeaseState]) -> None:
        """Give back leases whose Acquire or Fork nobody waits for any more; does not wait."""
        with self._lock:
            self.abandon_locked(leases)

    def abandon_locked(self, leases: Sequence[LeaseState]) -> None:
        """(locked) The same."""
        with suppress(RadixKVError):
            for lease in leases:
                if not lease.ended:
                    lease.connected.session.submit([lease.release_request("aborted")])
            self._send()

    def _pump(self, deadline: float) -> None:
        """(locked) One round: read what has come, reconnect, or wait for whoever does that."""
        if self._reading:
            self._changed.wait(max(deadline - time.monotonic(), 0))
            return
        self._reading = True
        try:
            if self._transport is None:
                self._recover(deadline)
            else:
                self._read(self._transport, max(deadline - time.monotonic(), 0))
        finally:
            self._reading = False
            self._changed.notify_all()

    def _read(self, transport: Transport, timeout: float) -> None:
        messages = []
        failure: Exception | None = None
        self._lock.release()
        try:
            messages = transport.receive(timeout)
        except (ConnectionLost, Internal) as error:
            failure = error
        finally:
            self._lock.acquire()
        if transport is not self._transport:
            return  # closed meanwhile, or of a session before reconnect()
        session = self.connected.session
        try:
            for message in messages:
                session.receive(message)
        except Internal as error:
            failure = error
        if isinstance(failure, Internal):
            self._end_session(failure)
        if session.failure is not None:
            self._drop_transport()
        elif failure is not None:
            self._cut()
        elif messages:
            self._send()

    def _send(self) -> None:
        """(locked) Send what the session has to send and the window allows."""
        if self._transport is None:
            return
        if messages := self.connected.session.outgoing():
            try:
                self._transport.send(messages)
            except ConnectionLost:
                self._cut()  # the session keeps them for the resume

    def _cut(self) -> None:
        """(locked) The connection is lost; the next _pump begins to recover."""
        if self._transport is not None:
            self._left = self._transport.detach()
            self._transport = None
            self._backoff.lost()

    def _drop_transport(self) -> None:
        """(locked) Close the connection for good."""
        self._cut()
        if self._left is not None:
            self._left.close()
            self._left = None

    def _recover(self, deadline: float) -> None:
        """(locked, reading) One attempt to resume, when its time has come."""
        session = self.connected.session
        if session.failure is not None:
            return
        now = time.monotonic()
        resume, left = self._resume(), self._left
        limit = min(max(deadline, now + MIN_HANDSHAKE_S), now + HANDSHAKE_TIMEOUT_S)
        self._lock.release()
        try:
            time.sleep(max(min(self._backoff.next_at, deadline) - now, 0))
            if time.monotonic() < self._backoff.next_at:
                return
            transport, opened = open_transport(self.transport, self.identity, limit, resume, left)
        except (ConnectionLost, HandshakeTimeout) as error:
            failure: Exception | None = error
        except RadixKVError as error:
            failure = error
        else:
            failure = None
        finally:
            self._lock.acquire()
        if failure is None and session.failure is not None:
            transport.close()  # the client was closed meanwhile
        elif failure is None:
            self._transport, self._left = transport, None
            self._resumed(session.resume(opened.hello.last_step))
        elif isinstance(failure, RadixKVError) or not self._backoff.failed(failure):
            self._end_session(self._lost_for_good(failure))
            self._drop_transport()

    def _resumed(self, messages: list[bytes]) -> None:
        assert self._transport is not None
        try:
            self._transport.send(messages)
        except ConnectionLost:
            self._cut()
        self._send()

    def _open_session(self, deadline: float) -> None:
        """A new session; raises Unavailable, DeadlineExceeded, or why Hello was refused."""
        try:
            transport, opened = open_transport(self.transport, self.identity, deadline)
        except ConnectionLost as error:
            raise unreachable(self.identity, error) from error
        except HandshakeTimeout as error:
            raise DeadlineExceeded(f"{self.identity.attach_path}: {error}") from error
        with self._lock:
            self._establish(opened)
            self._transport = transport
