"""Copies of blocks inside one pool, carried out in order by one thread.

A copy moves the whole block: its layout is opaque here, and the tokens behind the first
`num_tokens` of the target are never read. numpy releases the GIL while it copies.
"""

import logging
import queue
import threading
from collections.abc import Callable

import numpy as np

from radixkv.core.results import CopyOp
from radixkv.pools.arena import Arena

log = logging.getLogger(__name__)

DoneCallback = Callable[[CopyOp, bool], None]


class CopyThread:
    """Carries out copies within `arena`. Holds at most one copy per block of the pool.

    `before_copy(op)` is called first in the copy thread and may delay it or raise to fail it.
    """

    def __init__(self, arena: Arena, before_copy: Callable[[CopyOp], None] | None = None) -> None:
        self._arena = arena
        self._before_copy = before_copy
        # Each copy has a target block of its own, so a pool can never have more copies in flight.
        self._queue: queue.Queue[tuple[CopyOp, DoneCallback] | None] = queue.Queue(
            arena.num_blocks + 1
        )
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()

    def submit(self, op: CopyOp, done: DoneCallback) -> None:
        """Queue a copy; never blocks. `done(op, ok)` is called later, in the copy thread."""
        assert 0 < op.source <= self._arena.num_blocks, op
        assert 0 < op.target <= self._arena.num_blocks and op.target != op.source, op
        self._queue.put_nowait((op, done))

    def close(self) -> None:
        """Finish the queued copies and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            op, done = item
            done(op, self._copy(op))

    def _copy(self, op: CopyOp) -> bool:
        try:
            if self._before_copy is not None:
                self._before_copy(op)
            self._arena.ensure(max(op.source, op.target))
            blocks = self._arena.view()
            np.copyto(blocks[op.target], blocks[op.source])
        except Exception:
            log.exception("copy of block %d to %d failed", op.source, op.target)
            return False
        return True
