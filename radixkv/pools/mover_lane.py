"""The movers of one place and the operations that wait for them.

Theory of operation
    Each lane has processes of its own, so what one place does slowly holds up no other. Operations
    somebody waits for (blocks on their way to the gpu, probes) go before those nobody does, else
    in order. A mover has at most `SLOTS` of them; a mover that is stopped keeps those and no more,
    nobody else is given them. When a mover's exit has been seen, what it had comes back as not
    carried out, and another one is started after a while that doubles while movers end without
    having answered anything. The lane is down from a failed start until one succeeds, if no mover
    is left meanwhile: operations then fail at once instead of waiting for nobody.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from radixkv.core.tier_ops import Place, Probe, Transfer
from radixkv.pools.mover_handle import MoverHandle
from radixkv.pools.mover_process import MoverSettings
from radixkv.pools.mover_ring import Answer, MoverOp

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0

OnEnded = Callable[[MoverOp, Answer | None], None]  # None: a mover had it and has died


class MoverLane:
    """Queues operations for `num_processes` movers with the same settings.

    Its queues have no bound of their own: every Transfer has blocks of its own in flight, and the
    core bounds the rest.
    """

    def __init__(
        self, place: Place, settings: MoverSettings, num_processes: int, on_ended: OnEnded
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._place = place
        self._settings = settings
        self._on_ended = on_ended
        self._urgent: deque[MoverOp] = deque()
        self._others: deque[MoverOp] = deque()
        self._movers: list[MoverHandle] = []
        self._timers: set[asyncio.TimerHandle] = set()
        self._failures = 0  # movers in a row that ended without an answer
        self._is_down = False
        self.num_exits = 0
        self.problem = ""
        for _ in range(num_processes):
            self._start()

    @property
    def pids(self) -> list[int]:
        """Process ids of its movers that have started."""
        return [mover.pid for mover in self._movers if mover.has_started]

    @property
    def num_queued(self) -> int:
        """Operations no mover has been given yet."""
        return len(self._urgent) + len(self._others)

    def submit(self, op: MoverOp) -> None:
        """Queue an operation; `on_ended` may be called before this returns."""
        if self._is_down:
            self._on_ended(op, None)
            return
        (self._urgent if _is_awaited(op) else self._others).append(op)
        self._dispatch()

    def cancel(self, op: MoverOp) -> None:
        """Leave undone what has not begun of a submitted operation."""
        for queue in (self._urgent, self._others):
            if op in queue:
                queue.remove(op)
                self._on_ended(op, None)
                return
        for mover in self._movers:
            mover.cancel(op)

    def begin_close(self) -> None:
        """Let all movers end. Nothing is reported from now on."""
        for timer in self._timers:
            timer.cancel()
        for mover in self._movers:
            mover.begin_close()

    def end_close(self, deadline_s: float) -> None:
        """Return when all have ended, by force from `deadline_s` (monotonic) on."""
        for mover in self._movers:
            mover.end_close(max(0.0, deadline_s - time.monotonic()))

    # ---- operations -------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give out what waits, an operation each before anybody gets a second one."""
        while self._urgent or self._others:
            mover = max(self._movers, key=_num_free, default=None)
            if mover is None or mover.num_free == 0:
                return
            queue = self._urgent or self._others
            if mover.give(queue[0]):
                queue.popleft()

    def _answered(self, op: MoverOp, answer: Answer) -> None:
        self._failures = 0
        self.problem = answer.problem or self.problem
        self._on_ended(op, answer)
        self._dispatch()

    # ---- processes --------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            mover = MoverHandle(self._settings, self._answered, self._changed)
        except OSError as error:
            self._failed_start(str(error))
        else:
            self._movers.append(mover)

    def _changed(self, mover: MoverHandle) -> None:
        if not mover.is_gone:
            self._is_down = False
            self._dispatch()
            return
        self._movers.remove(mover)
        self.num_exits += 1
        for op in mover.ops:
            self._on_ended(op, None)
        if not mover.has_started:
            self._failed_start(mover.problem or "it ended before it was ready")
            return
        log.warning("a mover of %s, process %d, has ended", self._place.name.lower(), mover.pid)
        self._start_later(0 if mover.has_answered else self._failures)

    def _failed_start(self, problem: str) -> None:
        self.problem = problem
        log.error("a mover of %s cannot start: %s", self._place.name.lower(), problem)
        if not self._movers:
            self._is_down = True
            waiting = [*self._urgent, *self._others]
            self._urgent.clear()
            self._others.clear()
            for op in waiting:
                self._on_ended(op, None)
        self._start_later(self._failures)

    def _start_later(self, failures: int) -> None:
        """Start another one, after a while that doubles with each failure."""
        self._failures += 1
        delay_s = min(FIRST_BACKOFF_S * 2 ** min(failures, 10), MAX_BACKOFF_S)

        def start() -> None:
            self._timers.discard(timer)
            self._start()

        timer = self._loop.call_later(delay_s, start)
        self._timers.add(timer)


def _num_free(mover: MoverHandle) -> int:
    return mover.num_free


def _is_awaited(op: MoverOp) -> bool:
    return isinstance(op, Probe) or (isinstance(op, Transfer) and op.target is Place.GPU)
