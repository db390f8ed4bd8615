"""What is around a worker at a fault: the server, bystanders, and who waits for whom."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from radixkv.v1 import cache_pb2
from radixkv_client.tools import Tools
from tests.bystander import Bystanders
from tests.fault_worker import LEADER_TOKENS, WAIT_MS, Worker
from tests.naive_model import ints
from tests.server_process import ServerProcess
from tests.session_rig import acquire, commit

END_S = 1.0  # how soon what a dead worker held is free


def until(condition: Callable[[], object], what: str, timeout: float = 5.0) -> None:
    """Wait; fails with `what`."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.003)


def memory_kib(pid: int) -> int:
    """Resident memory of a process without what it shares with others, in KiB."""
    fields = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = value
    return int(fields["RssAnon"].split()[0])


class Site:
    """A server with bystanders, and what can be asked of it."""

    def __init__(self, server: ServerProcess, gate: Path) -> None:
        self.server = server
        self.gate = gate
        self.tools = Tools(server.grpc_target, timeout=5.0)
        self.bystanders = Bystanders(server.socket_dir)
        self.num_victims = 0

    def close(self) -> None:
        """End the bystanders; the server is the caller's."""
        self.bystanders.close()
        self.tools.close()

    def next_base(self) -> int:
        """The first of 10,000 tokens that no victim used."""
        self.num_victims += 1
        return 1_000_000 + 10_000 * self.num_victims

    def session_of(self, pid: int) -> cache_pb2.SessionInfo | None:
        """The session of a process."""
        found = [info for info in self.tools.sessions() if pid in info.pids]
        return found[0] if found else None

    def num_waiting(self, pid: int) -> int:
        """Waiting Acquires of a process."""
        info = self.session_of(pid)
        return 0 if info is None else info.num_waiting

    def progress(self, timeout: float = 2.0) -> None:
        """Every bystander goes on working."""
        before = self.bystanders.rounds()
        until(
            lambda: all(
                now > then + 1 for now, then in zip(self.bystanders.rounds(), before, strict=True)
            ),
            "bystanders go on",
            timeout,
        )

    def check_books(self) -> None:
        """Soon, with the bystanders paused, everything but their reserve is free or cached."""
        self.bystanders.pause()
        try:
            until(self._is_clean, "nobody else holds anything", END_S)
        finally:
            self.bystanders.resume()

    def _is_clean(self) -> bool:
        stats, sessions = self.tools.stats(), self.tools.sessions()
        reserved = sum(info.reserved_blocks for info in sessions)
        books = stats.books
        free = books.total - reserved - books.cached
        wanted = cache_pb2.Books(
            reserved=reserved, cached=books.cached, free=free, total=books.total
        )
        left = (stats.num_leases, stats.num_waiting)
        num_bystanders = len(self.bystanders.children)
        return books == wanted and left == (0, 0) and len(sessions) == num_bystanders


class Surroundings:
    """Nothing special around the worker: what a test does before, at and after a fault."""

    def __init__(self, site: Site, base: int) -> None:
        self.site = site
        self.base = base

    def at_point(self, pid: int) -> None:
        """The worker, process `pid`, has come to the point."""

    def killed(self) -> None:
        """The worker is dead and its session is gone."""

    def stopped(self) -> None:
        """The worker is stopped, and will go on after this."""

    def close(self) -> None:
        """Leave nothing behind."""

    def _peer(self) -> Worker:
        return Worker(self.site.server.socket_dir, "local", self.base).open()


class Gated(Surroundings):
    """Copies do not end until the worker was dealt with."""

    def __init__(self, site: Site, base: int) -> None:
        super().__init__(site, base)
        site.gate.touch()

    def at_point(self, pid: int) -> None:
        """The server has got the operation that copies."""

        def begun() -> bool:
            info = self.site.session_of(pid)
            return info is not None and info.num_leases >= 2

        until(begun, "copies begin")

    def killed(self) -> None:
        """Blocks that a running copy uses are nobody's yet."""
        assert self.site.tools.stats().books.in_flight > 0
        self.close()

    def stopped(self) -> None:
        """The copies end meanwhile."""
        self.close()

    def close(self) -> None:
        """Let the copies end."""
        self.site.gate.unlink(missing_ok=True)


class Full(Surroundings):
    """No block is to be had until `close`."""

    def __init__(self, site: Site, base: int) -> None:
        super().__init__(site, base)
        site.bystanders.pause()
        self._holder = self._peer()
        books = site.tools.stats().books
        blocks = books.free + books.cached
        self._holder.do(acquire(1, self._holder.tokens(4 * blocks)))

    def at_point(self, pid: int) -> None:
        """The worker waits."""
        self._pid = pid
        until(lambda: self.site.tools.stats().num_waiting == 1, "it waits")

    def killed(self) -> None:
        """A dead worker waits for nothing."""
        assert self.site.tools.stats().num_waiting == 0
        self.close()

    def stopped(self) -> None:
        """The stopped one gets what it waits for; the others, behind it, get theirs."""
        self.close()
        until(lambda: self.site.num_waiting(self._pid) == 0, "it is answered")
        info = self.site.session_of(self._pid)
        assert info is not None and info.num_leases == 1

    def close(self) -> None:
        """Give everything back."""
        if self._holder is not None:
            holder, self._holder = self._holder, None
            holder.bye()
            self.site.bystanders.resume()


class Leader(Surroundings):
    """A lease here is computing what the worker waits for."""

    def __init__(self, site: Site, base: int) -> None:
        super().__init__(site, base)
        self._peer_ = self._peer()
        self._kv = self._peer_.kv(self._peer_.tokens(LEADER_TOKENS, -1000) + [5])
        (reply,) = self._peer_.do(acquire(1, self._kv.tokens, capacity_wait_ms=WAIT_MS))
        self._table = self._peer_.compute(self._kv, reply)

    def at_point(self, pid: int) -> None:
        """The worker waits."""
        until(lambda: self.site.num_waiting(pid) == 1, "it waits")

    def killed(self) -> None:
        """The leader's own work is not touched."""
        self._finish()

    def stopped(self) -> None:
        """The follower need not be there when its leader commits."""
        self._finish()

    def _finish(self) -> None:
        self._peer_.do(commit(1, len(self._kv.tokens)))
        self._kv.check(self._table, 0, len(self._kv.tokens))
        self._peer_.bye()


class Follower(Surroundings):
    """An Acquire here, in another process, waits for what the worker is computing."""

    STOPPED_WAIT_MS = 300

    def at_point(self, pid: int) -> None:
        """Begin to wait."""
        self._peer_ = self._peer()
        self._kv = self._peer_.kv(self._peer_.tokens(LEADER_TOKENS, -1000) + [6])
        (self._short,) = self._peer_.send(
            acquire(1, self._kv.tokens, wait_ms=self.STOPPED_WAIT_MS, capacity_wait_ms=WAIT_MS)
        )
        (self._long,) = self._peer_.send(
            acquire(2, self._kv.tokens, wait_ms=WAIT_MS, capacity_wait_ms=WAIT_MS)
        )
        until(lambda: self.site.num_waiting(os.getpid()) == 2, "both wait")

    def killed(self) -> None:
        """The leader's end lets one of them go on; the other follows that one."""
        self._compute()
        self._finish()

    def stopped(self) -> None:
        """Nobody waits for a stopped leader beyond the deadline, nor when another has done it."""
        started = time.monotonic()
        (reply,) = self._peer_.get([self._short])
        assert time.monotonic() - started < self.STOPPED_WAIT_MS / 1000 + END_S
        assert reply.acquire.being_computed == LEADER_TOKENS
        self._compute()
        self._finish()

    def _compute(self) -> None:
        (first,) = self._peer_.get([self._short])
        self._table = self._peer_.compute(self._kv, first)
        self._peer_.do(commit(1, len(self._kv.tokens)))

    def _finish(self) -> None:
        (second,) = self._peer_.get([self._long])
        assert second.acquire.cached_tokens == LEADER_TOKENS
        self._kv.check(ints(second.acquire.block_table), 0, LEADER_TOKENS)
        self._kv.check(self._table, 0, len(self._kv.tokens))
        self._peer_.bye()


AROUND: dict[str, type[Surroundings]] = {
    "tail": Gated, "fork": Gated, "room": Full, "follow": Leader, "lead": Follower,
}  # fmt: skip


@contextmanager
def surroundings(site: Site, script: str, base: int) -> Iterator[Surroundings]:
    """What this script needs around it."""
    around = AROUND.get(script, Surroundings)(site, base)
    try:
        yield around
    finally:
        around.close()
