"""The engine: one thread that takes requests, runs steps, and hands out tokens.

A step: take in requests, cancellations and answered Acquires; one forward pass over the tokens the
scheduler picked; choose tokens; tell the server in one message; hand out. Nothing in a step waits
for a lease. When the server is lost, every sequence goes back to the queue, the views of the old
pool are dropped, and the thread connects again until it succeeds; requests then go on where they
were, computing again what the new server does not have.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from radixkv_client import Client
from radixkv_client.errors import DeadlineExceeded, RadixKVError, Unavailable
from radixkv_worker.generation import Generation
from radixkv_worker.paged import PagedCache
from radixkv_worker.request import (
    BadRequest,
    Done,
    Event,
    Failed,
    Request,
    RequestStats,
)
from radixkv_worker.scheduler import Scheduler, SchedulerLimits, Work
from radixkv_worker.sequence import Group
from radixkv_worker.weights import LoadedModel

MAX_RECENT = 256  # finished requests that `stats` tells about
RECONNECT_SLICE_S = 1.0
IDLE_WAIT_S = 0.02  # how often an idle engine looks at the session
LEASE_WAIT_S = 0.001  # the same while a lease is awaited


class Overloaded(Exception):
    """Too many requests are waiting; try later."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since start, and requests in each place now. `recent`: (id, stats), oldest first."""

    num_queued: int
    num_acquiring: int
    num_running: int
    num_steps: int
    computed_tokens: int
    preemptions: int
    reconnects: int
    connected: bool
    recent: tuple[tuple[str, RequestStats], ...]


class Engine:
    """Runs a model over the pool of a connected client, in a thread of its own."""

    def __init__(
        self,
        loaded: LoadedModel,
        client: Client,
        limits: SchedulerLimits | None = None,
        max_requests: int = 256,
    ) -> None:
        """`max_requests` may be unfinished at once; `client` is the engine's from now on."""
        self.loaded = loaded
        self.client = client
        self.failure: Exception | None = None
        self._max_requests = max_requests
        self._scheduler = Scheduler(client, limits or SchedulerLimits())
        self._generation = Generation(loaded)
        self._cache: PagedCache | None = None
        # Bounded by max_requests, and one cancellation of each.
        self._inbox: queue.SimpleQueue[Group | str] = queue.SimpleQueue()
        self._open: dict[str, Group] = {}
        self._lock = threading.Lock()
        self._serial = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._recent: deque[tuple[str, RequestStats]] = deque(maxlen=MAX_RECENT)
        self._num_steps = self._computed_tokens = self._reconnects = 0
        self._connected = True

    # ---- for other threads ------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait(self) -> None:
        """Wait until the thread has ended: after stop(), or by a failure."""
        self._thread.join()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread and the session; unfinished requests fail."""
        self._stopping.set()
        self._thread.join(timeout)
        self.client.close()

    def submit(self, request: Request, sink: Callable[[Event], None]) -> None:
        """Queue a request; `sink` is called with its events, from the engine's thread.

        The last event is Done or Failed. Raises BadRequest, or Overloaded above `max_requests`.
        """
        config = self.loaded.model.config
        if not request.prompt:
            raise BadRequest("the prompt is empty")
        if not all(0 <= token < config.vocab_size for token in request.prompt):
            raise BadRequest(f"the prompt has tokens outside [0, {config.vocab_size})")
        longest = len(request.prompt) + request.params.max_tokens
        if longest > config.max_positions:
            raise BadRequest(f"prompt and max_tokens are {longest} tokens, the model takes "
                             f"{config.max_positions}")  # fmt: skip
        with self._lock:
            if self.failure is not None:
                raise Overloaded(f"the engine has failed: {self.failure}")
            if len(self._open) >= self._max_requests:
                raise Overloaded(f"{self._max_requests} requests are unfinished")
            if request.request_id in self._open:
                raise BadRequest(f"request id {request.request_id!r} is in use")
            self._serial += 1
            group = Group(request, self._serial, sink)
            self._open[request.request_id] = group
        self._inbox.put(group)

    def cancel(self, request_id: str) -> None:
        """Stop a request, if it is unfinished; it gets no further events."""
        self._inbox.put(request_id)

    def stats(self) -> EngineStats:
        """A snapshot."""
        scheduler = self._scheduler
        return EngineStats(
            num_queued=len(scheduler.queue),
            num_acquiring=len(scheduler.acquiring),
            num_running=len(scheduler.running),
            num_steps=self._num_steps,
            computed_tokens=self._computed_tokens,
            preemptions=scheduler.num_preemptions,
            reconnects=self._reconnects,
            connected=self._connected,
            recent=tuple(self._recent),
        )

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._serve()
                except Unavailable:
                    self._reconnect()
            self._fail_all("UNAVAILABLE", "the worker is stopping", True)
        except Exception as error:  # a bug: nobody may wait for ever because of it
            self.failure = error
            self._fail_all("INTERNAL", f"{type(error).__name__}: {error}", False)
            raise

    def _serve(self) -> None:
        """Steps until told to stop; raises Unavailable when the session is lost."""
        self._cache = PagedCache(self.client.pool, self.loaded.model.config.num_layers)
        while not self._stopping.is_set():
            if not self._step():
                self._take_one(LEASE_WAIT_S if self._scheduler.acquiring else IDLE_WAIT_S)

    def _step(self) -> bool:
        """One step; False if there was nothing to compute."""
        with suppress(queue.Empty):
            while True:
                self._take(self._inbox.get_nowait())
        for sequence, error in self._scheduler.collect():
            self._fail(sequence.group, error.code, str(error), error.retryable)
        self._scheduler.relieve()
        self._scheduler.admit()
        works = self._scheduler.plan()
        if not works:
            return False
        complete = [work for work in works if work.end == len(work.sequence.tokens)]
        logits = self._forward(works)
        for work in works:
            work.sequence.computed = work.end
            work.sequence.group.tally.computed_tokens += work.end - work.start
            self._computed_tokens += work.end - work.start
        self._num_steps += 1
        outcome = self._generation.choose([work.sequence for work in complete], logits)
        try:
            self._scheduler.settle(works, outcome.dropped, outcome.forks, outcome.finished)
        finally:  # what was chosen counts, also if the server is lost now
            for group, delta in outcome.deltas:
                group.sink(delta)
            for group in outcome.done:
                self._finish(group)
        return True

    def _forward(self, works: list[Work]) -> torch.Tensor:
        """Logits of the works that reach the end of their sequence, in order."""
        assert self._cache is not None
        tokens: list[int] = []
        positions, rows, count = [], [], 0
        for work in works:
            tokens += work.sequence.tokens[work.start : work.end]
            positions.append(torch.arange(work.start, work.end))
            count += work.end - work.start
            if work.end == len(work.sequence.tokens):
                rows.append(count - 1)
        tables = [work.sequence.held.block_table for work in works]
        attention = self._cache.attention(tables, [(work.start, work.end) for work in works])
        return self.loaded.model.forward(
            torch.tensor(tokens), torch.cat(positions), attention, torch.tensor(rows).long()
        )

    def _take_one(self, timeout: float) -> None:
        with suppress(queue.Empty):
            self._take(self._inbox.get(timeout=timeout))

    def _take(self, item: Group | str) -> None:
        if isinstance(item, str):
            group = self._open.get(item)
            if group is not None:
                self._close(group, "aborted")
            return
        try:
            self._scheduler.submit(self._generation.begin(item))
        except RadixKVError as error:
            self._fail(item, error.code, str(error), error.retryable)

    # ---- ends of requests -------------------------------------------------------------------

    def _finish(self, group: Group) -> None:
        stats = request_stats(group)
        self._recent.append((group.request.request_id, stats))
        with self._lock:
            self._open.pop(group.request.request_id, None)
        group.sink(Done(stats))

    def _fail(self, group: Group, code: str, message: str, retryable: bool) -> None:
        if self._close(group, "aborted"):
            group.sink(Failed(code, message, retryable))

    def _close(self, group: Group, reason: str) -> bool:
        """Drop a request with all it holds; False if it was finished already."""
        with self._lock:
            if self._open.pop(group.request.request_id, None) is None:
                return False
        for sequence in group.sequences:
            self._scheduler.release(sequence, reason)
        return True

    def _fail_all(self, code: str, message: str, retryable: bool) -> None:
        with self._lock:
            groups = list(self._open.values())
            self._open.clear()
        for group in groups:
            group.sink(Failed(code, message, retryable))

    # ---- the server is gone -----------------------------------------------------------------

    def _reconnect(self) -> None:
        """Queue everything, drop the old pool's views, and connect until it succeeds."""
        self._connected = False
        with self._lock:
            groups = list(self._open.values())
        self._scheduler.lost_all(groups)
        self._cache = None
        while not self._stopping.is_set():
            with suppress(Unavailable, DeadlineExceeded):
                self.client.reconnect(timeout=RECONNECT_SLICE_S)
                self._connected = True
                self._reconnects += 1
                return


def request_stats(group: Group) -> RequestStats:
    """What a finished request's tally says."""
    now, request, tally = time.monotonic(), group.request, group.tally
    first = tally.first_token_s if tally.first_token_s is not None else now
    return RequestStats(
        prompt_tokens=len(request.prompt),
        generated_tokens=tally.generated_tokens,
        cached_tokens=tally.cached_tokens,
        being_computed=tally.being_computed,
        computed_tokens=tally.computed_tokens,
        waited_ms=tally.waited_ms,
        miss=tally.miss,
        ttft_ms=(first - request.arrived_s) * 1e3,
        total_ms=(now - request.arrived_s) * 1e3,
        preemptions=tally.preemptions,
        block_ids=tally.block_ids,
    )
