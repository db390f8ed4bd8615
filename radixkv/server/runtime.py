"""The one owner of the cache: runs what sessions ask for, and everything that follows from it.

Theory of operation
    Everything happens in one event loop, in batches: transports hand in operations, then call
    `settle`, which lets waiting Acquires go on, routes their answers, verifies the invariants if
    asked to, and sends every reply that became ready as one message per session. Copies run in
    the pool's thread; their ends come back into the loop and are a batch of their own. A timer
    settles when a deadline of the cache has come.
    It must not know: sockets, gRPC, what a message looks like on a stream.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from dataclasses import asdict

from radixkv import __version__
from radixkv.core.cache import Cache
from radixkv.core.results import (
    AcquireAnswered,
    CacheConfig,
    CopyOp,
    Event,
    InvalidateEnded,
    LookupResult,
    PrefetchEnded,
)
from radixkv.server.backing import Backing
from radixkv.server.lifecycle import Lifecycle
from radixkv.server.namespaces import Models
from radixkv.server.operations import contents_of
from radixkv.server.pool_host import PoolHost
from radixkv.server.session import CopyStarter, Deferred
from radixkv.server.sessions import Session, SessionTable
from radixkv.server.settings import Settings
from radixkv.server.tier_calls import TierCalls
from radixkv.server.tiers import Tiers
from radixkv.v1 import cache_pb2
from radixkv.wire import limits
from radixkv.wire.paths import SocketPaths

log = logging.getLogger(__name__)

EXIT_BROKEN = 70  # an invariant does not hold


class Runtime:
    """One cache, its sessions and its pool. Created and used in the running event loop only."""

    def __init__(
        self,
        config: CacheConfig,
        pool_host: PoolHost,
        settings: Settings,
        tiers: Tiers | None = None,
    ) -> None:
        """Raises OSError if the movers of the tiers cannot be started."""
        self.loop = asyncio.get_running_loop()
        self.cache = Cache(config)
        self.pool_host = pool_host
        self.backing = Backing(pool_host, config.num_blocks)
        self.sessions = SessionTable()
        self.models = Models()
        self.lifecycle = Lifecycle(self, self.sessions, settings.session_alarm)
        self.incarnation = secrets.token_bytes(limits.INCARNATION_BYTES)
        self.grpc_address = SocketPaths(settings.socket_dir).grpc_target
        self.draining = False
        self._check_invariants = settings.check_invariants
        self._started_ms = self.now_ms()
        self._unsent: dict[Session, None] = {}
        self._copies: dict[int, tuple[Session, Deferred]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms: int | None = None
        self.tier_calls = TierCalls(self)
        self._tiers = tiers
        if tiers is not None:
            tiers.start(self)

    @staticmethod
    def now_ms() -> int:
        """Monotonic milliseconds."""
        return time.monotonic_ns() // 1_000_000

    # ---- batches ----------------------------------------------------------------------------

    def wrote(self, session: Session) -> None:
        """This session may have output; the next `settle` sends it."""
        self._unsent[session] = None

    def settle(self) -> None:
        """End a batch; see the module text. O(sessions in it + what the cache has to do)."""
        cache = self.cache
        while (events := cache.poll(self.now_ms())) and self._route(events):
            pass  # operations held behind an answer may have made room for others
        if self._tiers is not None:
            self._tiers.carry_out(cache.tier_ops())
        if self._check_invariants:
            self._verify()
        unsent = self._unsent
        if unsent:
            self._unsent = {}
            for session in unsent:
                session.flush()
        deadline_ms = cache.next_deadline_ms()
        if deadline_ms != self._timer_ms:
            self._set_timer(deadline_ms)

    def _route(self, events: list[Event]) -> bool:
        """Whether an Acquire was among what was handed on."""
        answered = False
        for event in events:
            if isinstance(event, PrefetchEnded | InvalidateEnded):
                self.tier_calls.ended(event)
                continue
            session = self.sessions.get(event.session_id)
            if session is None:
                continue
            if isinstance(event, AcquireAnswered):
                answered = True
                session.protocol.acquire_answered(event.lease_id, event.result)
                self.wrote(session)
            else:
                session.press(event.num_blocks)
        return answered

    def _set_timer(self, deadline_ms: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_ms = None, deadline_ms
        if deadline_ms is not None:
            delay_ms = max(deadline_ms - self.now_ms(), 1)
            self._timer = self.loop.call_later(delay_ms / 1000, self._deadline_came)

    def _deadline_came(self) -> None:
        self._timer, self._timer_ms = None, None
        self.settle()

    def _verify(self) -> None:
        try:
            self.cache.check()
        except AssertionError:
            log.critical("an invariant of the cache does not hold, stopping", exc_info=True)
            logging.shutdown()
            os._exit(EXIT_BROKEN)

    # ---- copies -----------------------------------------------------------------------------

    def start_copies(self, session: Session) -> CopyStarter:
        """What a session's protocol calls to begin copies."""

        def start(deferred: Deferred, copies: tuple[CopyOp, ...]) -> None:
            assert self.pool_host.copies is not None
            for copy in copies:
                self._copies[copy.copy_id] = (session, deferred)
                self.pool_host.copies.submit(copy, self._copied)

        return start

    def _copied(self, copy: CopyOp, ok: bool) -> None:
        """Called in the copying thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
            self.loop.call_soon_threadsafe(self._copy_ended, copy, ok)

    def _copy_ended(self, copy: CopyOp, ok: bool) -> None:
        session, deferred = self._copies.pop(copy.copy_id)
        self.cache.copy_done(copy.copy_id, ok)
        session.protocol.copy_done(deferred, ok)
        self.wrote(session)
        self.settle()

    # ---- drain and end ----------------------------------------------------------------------

    def start_draining(self) -> None:
        """No new lease or session from now on; waiting Acquires are refused too. Idempotent."""
        self.draining = True
        for session in self.sessions:
            session.operations.accepting = False
            session.protocol.cancel_waiting()
        self.settle()

    @property
    def num_leases(self) -> int:
        """Live leases of all sessions."""
        return self.cache.num_leases

    def flush(self) -> bool:
        """Write down all that a restart could use; False once that is done. Call it repeatedly."""
        busy = self._tiers is not None and self.cache.flush(self.now_ms())
        self.settle()
        return busy

    def close(self) -> None:
        """End every session and all timers; idempotent. The pool is the caller's to close."""
        self.lifecycle.close()
        self._unsent.clear()
        self._set_timer(None)

    # ---- for tools --------------------------------------------------------------------------

    def lookup(self, request: cache_pb2.LookupRequest) -> LookupResult:
        """The longest answer over the KVSpecs of the model that is named. Changes nothing."""
        contents = contents_of(request.contents)
        answers = [
            self.cache.lookup(key, request.tokens, contents, placeholders)
            for key, placeholders in self.models.resolve(request.namespace)
        ]
        return max(answers, key=lambda answer: answer.cached_tokens)

    def stats(self) -> cache_pb2.StatsReply:
        """Books, counters and sizes now."""
        cache = self.cache
        return cache_pb2.StatsReply(
            incarnation=self.incarnation,
            server_version=__version__,
            uptime_ms=self.now_ms() - self._started_ms,
            books=cache_pb2.Books(**asdict(cache.books())),
            counters=cache_pb2.Counters(**asdict(cache.counters)),
            num_sessions=len(self.sessions),
            num_leases=cache.num_leases,
            num_waiting=cache.num_waiting,
            num_namespaces=cache.num_namespaces,
            num_nodes=cache.num_nodes,
            block_bytes=self.pool_host.block_bytes,
            block_size=cache.config.block_size,
            draining=self.draining,
            tiers=[] if self._tiers is None else self._tiers.report(cache, self.now_ms()),
        )

    def session_infos(self) -> cache_pb2.SessionsReply:
        """Every session, oldest first."""
        now_ms = self.now_ms()
        reply = cache_pb2.SessionsReply()
        for session in self.sessions:
            use = self.cache.session_use(session.session_id)
            reply.sessions.add(
                session_id=session.session_id,
                pids=[process.pid for process in session.processes],
                client=session.client,
                model_fingerprint=session.model,
                transport="" if session.link is None else session.link.transport,
                num_leases=use.num_leases,
                num_waiting=use.num_waiting,
                private_blocks=use.private_blocks,
                reserved_blocks=use.reserved_blocks,
                age_ms=now_ms - session.opened_ms,
                silent_ms=now_ms - session.heard_ms,
                alarm=session.alarm,
            )
        return reply
