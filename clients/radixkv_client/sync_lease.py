"""The sync twins of a lease, a pending answer and a batch."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from radixkv_client.base import outcome_unknown, refills, wait_for_event
from radixkv_client.batch import BatchBase, PendingBase
from radixkv_client.errors import RadixKVError, Unavailable
from radixkv_client.lease import LeaseState
from radixkv_client.protocol import Request
from radixkv_client.tokens import Tokens, token_bytes
from radixkv_client.values import Committed, ContentRange

if TYPE_CHECKING:
    from radixkv_client.sync_connection import SyncConnection


class Lease(LeaseState):
    """A lease whose methods wait for the answer. Leaving its context releases it.

    Methods raise FailedPrecondition on a released lease, Unavailable once the server restarted,
    DeadlineExceeded after `timeout` seconds (default: the client's).
    """

    _client: "SyncConnection"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client.in_other_process or self.ended:
            return
        try:
            self.release("finished" if kind is None else "aborted")
        except Unavailable:
            pass  # the session is gone, and the lease with it
        except RadixKVError:
            if kind is None:
                raise

    def extend(self, num_blocks: int, *, timeout: float | None = None) -> list[int]:
        """Add private blocks, at once or not at all; returns their ids. Raises Exhausted."""
        return self._call(lambda: self.extend_requests(num_blocks), timeout).tolist()

    def append_blocks(self, num_blocks: int, *, timeout: float | None = None) -> list[int]:
        """Add private blocks from the reserve; returns their ids. Raises Exhausted.

        No round trip while the reserve has them; else one that brings several. The next commit
        names them to the server.
        """
        client = self._client
        deadline = client.deadline(timeout)
        with client.entered():
            for answer in refills(
                self, num_blocks, lambda refill: client.submit([refill], deadline)[0]
            ):
                client.wait(answer, deadline)
            return self.draw(num_blocks).tolist()

    def trim(self, upto: int, *, timeout: float | None = None) -> None:
        """Forget uncommitted tokens from `upto` on; whole blocks go to the reserve."""
        self._call(lambda: self.trim_requests(upto), timeout)

    def fork(
        self, num_children: int, upto: int, *, event: Any = None, timeout: float | None = None
    ) -> list["Lease"]:
        """Branch at `upto` tokens, whose full blocks are committed and no more than those.

        Children share the full blocks and get a copy of the tail. States that kernels reading or
        writing these blocks have completed; `event` is waited for first.
        """
        wait_for_event(event)
        children: list[Any] = []

        def build() -> list[Request]:
            children.extend(self.new_children(num_children))
            return [self.fork_request(children, upto)]

        try:
            self._call(build, timeout)
        except BaseException as error:
            if outcome_unknown(error):
                self._client.abandon(children)
            raise
        return children

    def commit(
        self,
        upto: int,
        tokens: Tokens = b"",
        *,
        contents: Sequence[ContentRange] = (),
        event: Any = None,
        timeout: float | None = None,
    ) -> Committed:
        """Publish the full blocks of the first `upto` tokens.

        `tokens` go on where `num_tokens` ends; drawn blocks are named by the way. States that the
        kernels that write these blocks have completed; `event` is waited for first.
        """
        encoded = token_bytes(tokens)
        wait_for_event(event)
        return self._call(lambda: [self.commit_request(upto, encoded, contents)], timeout)

    def release(
        self,
        reason: str = "finished",
        commit: tuple[int, Tokens] | None = None,
        *,
        event: Any = None,
        timeout: float | None = None,
    ) -> int:
        """Give the lease back; returns how many of its tokens stay cached. Once only.

        `reason` is "finished", "aborted", "preempted" or "conversation over". `commit`, (upto,
        tokens), is carried out first. States that kernels reading these blocks have completed.
        """
        last = None if commit is None else (commit[0], token_bytes(commit[1]))
        wait_for_event(event)
        return self._call(lambda: [self.release_request(reason, last)], timeout)

    def _call(self, build: Callable[[], list[Request]], timeout: float | None) -> Any:
        client = self._client
        deadline = client.deadline(timeout)
        with client.entered():
            return client.call(build(), deadline)


class Pending(PendingBase):
    """An operation on its way; result() waits for it."""

    def result(self, timeout: float | None = None) -> Any:
        """The operation's result, or its error. DeadlineExceeded leaves it on its way."""
        client = self._client
        answer = self._sent()
        if not answer.done:
            deadline = client.deadline(timeout)
            with client.entered():
                client.wait(answer, deadline)
        return answer.result()

    def cancel(self) -> None:
        """Give the lease of an Acquire back, whatever becomes of it; does not wait."""
        self._client.abandon([self.lease])


class Batch(BatchBase):
    """A context that sends what it gathered when left; see BatchBase."""

    _pending_type = Pending
    _client: Any

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client.in_other_process:
            return
        try:
            for event in self._events:
                wait_for_event(event)
            with self._client.entered():
                if kind is not None:
                    self._release_acquired()
                self._connected.check()
                deadline = time.monotonic() + self._client.timeout
                self._bind(self._client.submit(self._requests(), deadline))
        except BaseException as failure:
            with self._client._lock:
                self._fail(failure)
            if kind is None:
                raise
