"""Several operations in one Step, and answers that are not waited for."""

from collections.abc import Sequence
from typing import Any, Unpack

from radixkv_client.base import AcquireArguments, ClientBase
from radixkv_client.errors import Cancelled, FailedPrecondition, RadixKVError
from radixkv_client.lease import LeaseState
from radixkv_client.protocol import Answer, Request
from radixkv_client.tokens import TOKEN_BYTES, Tokens, token_bytes
from radixkv_client.values import PLAIN, AcquireOptions, ContentRange


class PendingBase:
    """An operation on its way. `lease` is the lease it takes, or works on.

    The twins add how to wait. An error that nobody looks at is not raised anywhere.
    """

    def __init__(self, client: Any, lease: Any) -> None:
        self.lease = lease
        self._client = client
        self._answer: Answer | None = None

    def done(self) -> bool:
        """Whether the answer is there; does no I/O (poll() does)."""
        return self._answer is not None and self._answer.done

    def _sent(self) -> Answer:
        if self._answer is None:
            raise FailedPrecondition("the batch is sent when its context is left")
        return self._answer


class BatchBase:
    """Gathers operations, in order. They are sent together when the context is left, and not
    waited for. If it is left by an exception, leases it acquired are released behind them.

    An operation may use the lease of an earlier one's Pending before that is answered.
    """

    _pending_type: type[PendingBase]

    def __init__(self, client: ClientBase) -> None:
        self._client = client
        self._connected = client.connected
        self._gathered: list[tuple[list[Request], PendingBase]] = []
        self._events: list[Any] = []
        self._acquired: list[LeaseState] = []

    def acquire(self, tokens: Tokens, **options: Unpack[AcquireArguments]) -> Any:
        """Take a lease; the Pending's result is the lease."""
        encoded = token_bytes(tokens)
        arguments = AcquireOptions(**options) if options else PLAIN
        with self._client._lock:
            lease = self._new_lease(len(encoded) // TOKEN_BYTES)
            pending = self._add(lease, [lease.acquire_request(encoded, arguments)])
            self._acquired.append(lease)
            return pending

    def extend(self, lease: LeaseState, num_blocks: int) -> Any:
        """Add private blocks; result: their ids."""
        with self._client._lock:
            return self._add(lease, lease.extend_requests(num_blocks))

    def trim(self, lease: LeaseState, upto: int) -> Any:
        """Forget uncommitted tokens from `upto` on; result: None."""
        with self._client._lock:
            return self._add(lease, lease.trim_requests(upto))

    def fork(self, lease: LeaseState, num_children: int, upto: int, *, event: Any = None) -> Any:
        """Branch; result: the children, which are also `pending.children`."""
        self._events.append(event)
        with self._client._lock:
            children = lease.new_children(num_children)
            pending = self._add(lease, [lease.fork_request(children, upto)])
            pending.children = children
            self._acquired += children
            return pending

    def commit(
        self,
        lease: LeaseState,
        upto: int,
        tokens: Tokens = b"",
        *,
        contents: Sequence[ContentRange] = (),
        event: Any = None,
    ) -> Any:
        """Publish the full blocks of the first `upto` tokens; result: Committed."""
        encoded = token_bytes(tokens)
        self._events.append(event)
        with self._client._lock:
            return self._add(lease, [lease.commit_request(upto, encoded, contents)])

    def release(
        self,
        lease: LeaseState,
        reason: str = "finished",
        commit: tuple[int, Tokens] | None = None,
        *,
        event: Any = None,
    ) -> Any:
        """Give a lease back; result: the tokens that stay cached."""
        last = None if commit is None else (commit[0], token_bytes(commit[1]))
        self._events.append(event)
        with self._client._lock:
            return self._add(lease, [lease.release_request(reason, last)])

    def _new_lease(self, num_tokens: int) -> LeaseState:
        self._connected.check()
        return self._client._lease_type(self._client, self._connected, num_tokens)

    def _add(self, lease: LeaseState, requests: list[Request]) -> Any:
        pending = self._pending_type(self._client, lease)
        self._gathered.append((requests, pending))
        return pending

    def _release_acquired(self) -> None:
        for lease in self._acquired:
            if not lease.ended:
                self._add(lease, [lease.release_request("aborted")])

    def _requests(self) -> list[Request]:
        return [request for requests, _ in self._gathered for request in requests]

    def _bind(self, answers: list[Answer]) -> None:
        """Give each Pending the answer of its last operation."""
        position = 0
        for requests, pending in self._gathered:
            position += len(requests)
            if requests:
                pending._answer = answers[position - 1]
            else:
                pending._answer = settled(None, None)

    def _fail(self, failure: BaseException) -> None:
        """Nothing was sent: every operation fails."""
        error = failure if isinstance(failure, RadixKVError) else Cancelled("batch was not sent")
        for requests, pending in self._gathered:
            if pending._answer is None:
                for request in requests:
                    request.on_error(error)
                pending._answer = settled(None, error)


def settled(value: Any, error: RadixKVError | None) -> Answer:
    """An answer that is there from the start."""
    answer = Answer()
    answer.settle(value, error)
    return answer
