"""Calls into a library that may hang: made in a thread that can be left alone with them."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class BoundedCalls:
    """Makes calls one after the other in one daemon thread. For one caller.

    There is never more than this one thread. While a call that nobody waits for any more is still
    under way, `is_busy` says so, and the caller is not to start another.
    """

    def __init__(self, name: str) -> None:
        """`name` is the thread's."""
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._started: list[Future[Any]] = []
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way or waits for its turn."""
        self._started = [future for future in self._started if not future.done()]
        return bool(self._started)

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Have `call` made once those before it have ended."""
        future: Future[T] = Future()
        self._started.append(future)
        self._queue.put((future, call))
        return future

    def call(self, call: Callable[[], T], timeout_s: float) -> T:
        """Make a call and wait for it; raises TimeoutError, or what the call raises."""
        return self.start(call).result(timeout_s)

    def give_up(self) -> None:
        """Drop the calls that have not begun; the one that has is left alone."""
        for future in self._started:
            future.cancel()

    def close(self) -> None:
        """End the thread once the last call has ended; does not wait."""
        self.give_up()
        self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
