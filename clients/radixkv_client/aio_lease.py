"""The asyncio twins of a lease, a pending answer and a batch."""

import asyncio
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from radixkv_client.base import outcome_unknown, refills, wait_for_event
from radixkv_client.batch import BatchBase, PendingBase
from radixkv_client.errors import RadixKVError, Unavailable
from radixkv_client.lease import LeaseState
from radixkv_client.tokens import Tokens, token_bytes
from radixkv_client.values import Committed, ContentRange

if TYPE_CHECKING:
    from radixkv_client.aio import AsyncClient


class AsyncLease(LeaseState):
    """A lease whose methods are awaited; see Lease for what they do and raise."""

    _client: "AsyncClient"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client.in_other_process or self.ended:
            return
        try:
            await self.release("finished" if kind is None else "aborted")
        except Unavailable:
            pass  # the session is gone, and the lease with it
        except RadixKVError:
            if kind is None:
                raise

    async def extend(self, num_blocks: int, *, timeout: float | None = None) -> list[int]:
        """Add private blocks, at once or not at all; returns their ids. Raises Exhausted."""
        self._client.enter()
        return (await self._client.call(self.extend_requests(num_blocks), timeout)).tolist()

    async def append_blocks(self, num_blocks: int, *, timeout: float | None = None) -> list[int]:
        """Add private blocks from the reserve; returns their ids. Raises Exhausted."""
        self._client.enter()
        for answer in refills(self, num_blocks, lambda refill: self._client.submit([refill])[0]):
            await self._client.wait(answer, timeout)
        return self.draw(num_blocks).tolist()

    async def trim(self, upto: int, *, timeout: float | None = None) -> None:
        """Forget uncommitted tokens from `upto` on; whole blocks go to the reserve."""
        self._client.enter()
        await self._client.call(self.trim_requests(upto), timeout)

    async def fork(
        self, num_children: int, upto: int, *, event: Any = None, timeout: float | None = None
    ) -> list["AsyncLease"]:
        """Branch at `upto` tokens, whose full blocks are committed and no more than those."""
        self._client.enter()
        await wait_for_event_async(event)
        children = self.new_children(num_children)
        try:
            await self._client.call([self.fork_request(children, upto)], timeout)
        except BaseException as error:
            if outcome_unknown(error):
                self._client.abandon(children)
            raise
        return children

    async def commit(
        self,
        upto: int,
        tokens: Tokens = b"",
        *,
        contents: Sequence[ContentRange] = (),
        event: Any = None,
        timeout: float | None = None,
    ) -> Committed:
        """Publish the full blocks of the first `upto` tokens; `tokens` go on at `num_tokens`."""
        self._client.enter()
        encoded = token_bytes(tokens)
        await wait_for_event_async(event)
        return await self._client.call([self.commit_request(upto, encoded, contents)], timeout)

    async def release(
        self,
        reason: str = "finished",
        commit: tuple[int, Tokens] | None = None,
        *,
        event: Any = None,
        timeout: float | None = None,
    ) -> int:
        """Give the lease back; returns how many of its tokens stay cached. Once only."""
        self._client.enter()
        last = None if commit is None else (commit[0], token_bytes(commit[1]))
        await wait_for_event_async(event)
        return await self._client.call([self.release_request(reason, last)], timeout)


class AsyncPending(PendingBase):
    """An operation on its way; await it for the result."""

    def __await__(self) -> Generator[Any, None, Any]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> Any:
        """The operation's result, or its error. DeadlineExceeded leaves it on its way."""
        self._client.enter()
        return await self._client.answered(self._sent(), timeout)

    def cancel(self) -> None:
        """Give the lease of an Acquire back, whatever becomes of it; does not wait."""
        self._client.abandon([self.lease])


class AsyncBatch(BatchBase):
    """An async context that sends what it gathered when left; see BatchBase."""

    _pending_type = AsyncPending
    _client: Any

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client.in_other_process:
            return
        try:
            for event in self._events:
                await wait_for_event_async(event)
            self.send(aborted=kind is not None)
        except BaseException as failure:
            self._fail(failure)
            if kind is None:
                raise

    def send(self, aborted: bool = False) -> None:
        """Send what was gathered; the context does it when left, after all events."""
        self._client.enter()
        if aborted:
            self._release_acquired()
        self._connected.check()
        self._bind(self._client.submit(self._requests()))


async def wait_for_event_async(event: Any) -> None:
    """wait_for_event in a thread, since it blocks."""
    if event is not None:
        await asyncio.to_thread(wait_for_event, event)
