"""What the sync and the asyncio client have in common: everything that waits for nothing.

Theory of operation of a connection
    connected --cut--> lost --resumed--> connected
    lost --nobody listens for RESUME_WINDOW_S, another incarnation, or resume refused--> dead
    dead --reconnect()--> connected, with a new session, new pool mapping and no leases
    In `lost`, operations may be submitted and wait. On the way to `dead` everything unanswered
    fails with Unavailable, the leases are lost and the pool mapping is closed.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypedDict

from radixkv.v1 import session_pb2 as pb
from radixkv_client.attach import (
    ConnectionLost,
    HandshakeTimeout,
    Identity,
    Opened,
    Resume,
    restarted,
)
from radixkv_client.connected import Connected
from radixkv_client.errors import (
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    InvalidArgument,
    NotFound,
    RadixKVError,
    Unavailable,
    WrongProcess,
)
from radixkv_client.lease import LeaseState
from radixkv_client.pool import PoolMapping
from radixkv_client.protocol import Answer, Request, Session
from radixkv_client.spec import KVSpec
from radixkv_client.values import ContentRange, Retention, Scope, whole_number

DEFAULT_TIMEOUT_S = 30.0
HANDSHAKE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0  # how long close() waits for the server to say that the session is over
RESUME_WINDOW_S = 0.3  # how long nobody may listen before a session counts as lost
FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
TRANSPORTS = ("local", "grpc")


class AcquireArguments(TypedDict, total=False):
    """Keywords of acquire beside the tokens.

    scope: adapter and tenant salt. contents: which tokens stand for images and the like.
    extra_blocks: private blocks beyond those the prompt needs. partial_tail: also copy the longest
    token match inside one more block. capacity_wait_ms, wait_ms: how long the server may wait for
    room, or for another lease's computation. resumed: after a preemption, kept out of the hit rate.
    tags: marks on what the lease publishes, for Tools.invalidate. retention: of what it publishes.
    """

    scope: Scope | None
    contents: Sequence[ContentRange]
    extra_blocks: int
    partial_tail: bool
    capacity_wait_ms: int
    wait_ms: int
    resumed: bool
    tags: Sequence[str]
    retention: Retention | None


class Backoff:
    """When to try again after a cut, and when to stop."""

    def __init__(self) -> None:
        self.next_at = 0.0
        self._lost_since = 0.0
        self._delay = FIRST_BACKOFF_S

    def lost(self) -> None:
        """The connection was cut. Try at once, unless the last cut is not long ago."""
        now = time.monotonic()
        if now - self._lost_since > MAX_BACKOFF_S:
            self._delay = FIRST_BACKOFF_S
            self.next_at = now
        else:
            self._postpone(now)
        self._lost_since = now

    def failed(self, error: Exception) -> bool:
        """An attempt failed; False if nobody has listened for RESUME_WINDOW_S."""
        now = time.monotonic()
        if isinstance(error, HandshakeTimeout):
            self._lost_since = now  # somebody listens
        self._postpone(now)
        return now - self._lost_since < RESUME_WINDOW_S

    def _postpone(self, now: float) -> None:
        self.next_at = now + self._delay
        self._delay = min(2 * self._delay, MAX_BACKOFF_S)


class ClientBase:
    """Identity, the connection's state, and what can be read from it.

    `_lock` guards the session and everything that leases of it believe.
    """

    _lock: AbstractContextManager[Any]
    _lease_type: type[LeaseState]

    def __init__(self, identity: Identity, kv_spec: KVSpec, transport: str, timeout: float) -> None:
        if transport not in TRANSPORTS:
            raise InvalidArgument(f"transport {transport!r}: not one of {list(TRANSPORTS)}")
        self.identity = identity
        self.kv_spec = kv_spec
        self.transport = transport
        self.timeout = timeout
        self._pid = os.getpid()
        self._connected: Connected | None = None
        self._grpc_address = ""
        self._closed = False
        self._tools: Any = None

    @property
    def connected(self) -> Connected:
        """The latest session; raises Unavailable before the first."""
        if self._connected is None:
            raise Unavailable("not connected yet")
        return self._connected

    @property
    def hello(self) -> pb.HelloReply:
        """What the server said about itself: limits, block size, pool geometry, capabilities."""
        return self.connected.hello

    @property
    def incarnation(self) -> bytes:
        """Which run of the server this client is, or was last, connected to."""
        return self.connected.hello.incarnation

    @property
    def session_id(self) -> int:
        """The session's number, as `radixkv sessions` shows it."""
        return self.connected.hello.session_id

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.connected.block_size

    @property
    def pool(self) -> PoolMapping:
        """The mapped pool; after a restart of the server and reconnect() another one."""
        return self.connected.pool

    @property
    def grpc_address(self) -> str:
        """Where the server's gRPC is, for tools."""
        return self._grpc_address

    @property
    def tools(self) -> Any:
        """Blocking unary calls on the server's gRPC socket; imports grpc."""
        self._check_process()
        if self._tools is None:
            from radixkv_client.tools import Tools

            model = self.identity.model
            self._tools = Tools(self.grpc_address, timeout=self.timeout, model=model)
        return self._tools

    def _close_tools(self) -> None:
        if self._tools is not None:
            self._tools.close()

    @property
    def pressure(self) -> int:
        """Blocks that others wait for and that this worker should free; reading resets it.

        The client has already returned what its reserve had.
        """
        connected = self.connected
        pressure, connected.pressure = connected.pressure, 0
        return pressure

    def _check_process(self) -> None:
        if self.in_other_process:
            raise WrongProcess(
                f"this client was created in process {self._pid}; connect anew in {os.getpid()}"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise Cancelled("the client is closed")

    @property
    def in_other_process(self) -> bool:
        """Whether this is a forked child, which must leave the parent's session alone."""
        return self._pid != os.getpid()

    def _establish(self, opened: Opened) -> None:
        """Map the pool and begin with a new session."""
        try:
            pool = PoolMapping(opened.descriptors[0], opened.pools.pools[0], self.kv_spec)
        finally:
            for descriptor in opened.descriptors:
                os.close(descriptor)
        self._grpc_address = opened.connection.attached.grpc_address
        self._connected = Connected(opened.token, opened.hello, pool)

    def _resume(self) -> Resume:
        connected = self.connected
        return Resume(connected.token, self.incarnation, connected.session.replies_seen)

    def _end_session(self, error: RadixKVError) -> None:
        """Fail everything of the session; its pool is nobody's any more."""
        if self._connected is not None:
            self._connected.session.fail(error)
            self._connected.pool.close()

    def _lost_for_good(self, error: Exception) -> RadixKVError:
        """What a session that cannot be resumed fails with."""
        if isinstance(error, ConnectionLost):
            return Unavailable(
                f"the server is gone ({error}): all leases are lost; drop views, "
                "then call reconnect()"
            )
        if isinstance(error, NotFound):
            return restarted()
        if isinstance(error, Unavailable):
            return error
        return Unavailable(f"the session cannot go on: {error}")


def refills(
    lease: LeaseState, num_blocks: int, submit: Callable[[Request], Answer]
) -> Iterator[Answer]:
    """Answers to wait for, one after the other, until so many blocks can be drawn for a lease.

    Several, because another thread or task may draw what a Refill brought. Only one Refill is under
    way at a time, so that together they never ask for more than the reserve may hold. Raises
    Exhausted, and InvalidArgument for a number below 1.
    """
    num_blocks = whole_number("num_blocks", num_blocks, 1)
    connected, reserve = lease.connected, lease.connected.reserve
    lease.check_drawable()
    while reserve.num_free < num_blocks:
        answer = connected.refilling
        if answer is not None and not answer.done:
            yield answer
        else:
            size = reserve.refill_size(num_blocks)
            if not size:
                raise Exhausted(
                    f"{num_blocks} blocks wanted: the reserve may hold {reserve.max_blocks}, "
                    f"{reserve.num_drawn} are drawn; commit, which names them, or extend"
                )
            answer = connected.refilling = submit(connected.refill_request(size))
            yield answer
            if not answer.result():
                raise Exhausted(
                    f"{num_blocks} blocks wanted, {reserve.num_free} are in the reserve and the "
                    "pool has no more for it"
                )
        lease.check_drawable()


def outcome_unknown(error: BaseException) -> bool:
    """Whether the operation may still be carried out: its time was over, or it was interrupted."""
    return isinstance(error, DeadlineExceeded) or not isinstance(error, RadixKVError)


def wait_for_event(event: Any) -> None:
    """Return once the kernels behind `event` have completed.

    `event` is None, has `synchronize()` (a torch.cuda.Event), or is called.
    """
    if event is not None:
        (event.synchronize if hasattr(event, "synchronize") else event)()


def submit_all(session: Session, requests: Sequence[Request]) -> list[Answer]:
    """Submit operations that were built; if they are refused here, what building did is undone."""
    try:
        return session.submit(requests)
    except RadixKVError as error:
        for request in requests:
            request.on_error(error)
        raise
