"""File descriptors of the server process: how many it may have, and a word when they run out."""

import asyncio
import logging
import os
import resource
import time

log = logging.getLogger(__name__)

MAX_DESCRIPTORS = 65_536  # what the soft limit is raised to, if the hard one allows
CHECK_S = 5.0
REPORT_INTERVAL_S = 60.0


def raise_descriptor_limit() -> None:
    """Let this process have enough descriptors: each attached process takes two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class DescriptorWatch:
    """Logs that descriptors have run out, once in REPORT_INTERVAL_S.

    The event loop and gRPC drop a connection that they have no descriptor for without a word, so
    it is also looked at every CHECK_S whether there is one left.
    """

    def __init__(self) -> None:
        self._reported_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def report(self) -> None:
        """Somebody got no descriptor."""
        now = time.monotonic()
        if self._reported_at is None or now - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_at = now
            log.warning(
                "out of descriptors (limit %d): connections are turned away; raise `ulimit -n`",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )

    def watch(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        """Look now and every CHECK_S whether `descriptor`, an open one, can be duplicated."""
        try:
            os.close(os.dup(descriptor))
        except OSError:
            self.report()
        self._timer = loop.call_later(CHECK_S, self.watch, loop, descriptor)

    def stop(self) -> None:
        """Look no more; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
