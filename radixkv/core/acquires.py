"""Acquire: the attempts, and the only waiting there is.

Theory of operation
    An attempt either gives a lease, or finds that another live lease is computing what is missing
    (and the caller wants to wait for that), or that it is on its way from below the gpu, or finds
    no room. A waiter is in one of three places: behind a *leader*, until that lease has committed
    the waiter's goal, has ended, or the wait's deadline passes; behind a *load* or a question to
    the remote, until that is over or the deadline passes; or in the FIFO *room* queue, until it
    fits or its deadline passes. Nowhere does it hold a block, lock or interned content, and each
    attempt matches anew.
    Where there is room but for copies that have yet to go down (Unclean), every Acquire waits in
    the room queue for a while, whether it asked to wait or not; then blocks are dropped for it.
    The room queue is in order of arrival, and no Acquire overtakes those in it that came before.
    Only waiters held up by their own session's cap are passed over, by other sessions, since
    nobody else can help them.
    While the head of the room queue waits, the largest holder is asked for blocks again and again;
    while only sessions' own caps are in the way, the first of those sessions is.
Invariants: a waiter is in `session.waiting` until answered; answered exactly once, by an event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from radixkv.core.attempt import Awaited, attempt
from radixkv.core.below import may_drop, total_blocks
from radixkv.core.errors import CacheError, Cancelled, Exhausted, InvalidArgument, TooLarge
from radixkv.core.flight import Flight
from radixkv.core.lease import Lease, Session, Waiter
from radixkv.core.results import (
    AcquireAnswered,
    Acquired,
    AcquireRequest,
    OnboardReason,
    Pressure,
    Waiting,
)
from radixkv.core.state import SessionFull, State, Unclean
from radixkv.core.tokens import check_length

PRESSURE_INTERVAL_MS = 100
MAX_WAIT_MS = 3_600_000


class Acquires:
    """Attempts and waiters of one cache."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._room: deque[Waiter] = deque()
        self._ready: deque[Waiter] = deque()
        self._deadlines: list[tuple[int, int, Waiter]] = []
        self._serial = 0
        self._pressure_at_ms: int | None = None
        self._failed_at: tuple[int, ...] | None = None
        self._arrivals = 0
        self.num_waiting = 0

    # ---- entry points -----------------------------------------------------------------------

    def start(
        self, session: Session, lease_id: int, request: AcquireRequest, now_ms: int
    ) -> Acquired | Waiting:
        """A new Acquire. Raises what the caller did wrong, TooLarge, or Exhausted."""
        state = self._state
        check_length(request.tokens, state.config.max_tokens)
        if not request.tokens:
            raise InvalidArgument("a prompt needs at least one token")
        state.check_new_lease(session, lease_id)
        self._arrivals += 1
        flight_deadline_ms = now_ms + min(request.wait_ms, MAX_WAIT_MS)
        waiter = Waiter(session, lease_id, request, self._arrivals, now_ms, flight_deadline_ms)
        blocks = total_blocks(state, waiter)
        if blocks > state.config.num_blocks:
            raise TooLarge(f"{blocks} blocks wanted, the pool has {state.config.num_blocks}")
        try:
            self._check_queue(waiter)
            outcome = attempt(state, waiter, now_ms)
        except Exhausted as error:
            if not request.capacity_wait_ms and not isinstance(error, Unclean):
                raise
            self._enlist(waiter)
            self._wait_for_room(waiter, error, now_ms)
            return Waiting(lease_id)
        if isinstance(outcome, Acquired):
            return outcome
        self._enlist(waiter)
        self._await(waiter, outcome)
        return Waiting(lease_id)

    def cancel(self, waiter: Waiter) -> None:
        """Answer a waiter with Cancelled."""
        self._answer(waiter, Cancelled("released while waiting"))

    def on_progress(self, lease: Lease, ended: bool) -> None:
        """`lease` committed or ended: waiters may go on (at the next poll).

        Those behind it, and those behind others that compute what it has just published.
        """
        if not self.num_waiting:
            return
        computes = lease.committed + len(lease.pending) // self._state.block_bytes
        computes = min(computes, lease.cacheable // self._state.block_size)
        self._let_go(lease, lambda goal: ended or lease.committed >= goal or computes < goal)
        if ended or lease.node.detached:
            return
        child = lease.node
        while (node := child.parent) is not None:
            if node.pending is not None:
                for leader in node.pending.get(child.tokens[: self._state.block_bytes], ()):
                    self._let_go(leader, lambda goal: lease.published >= goal)
            child = node

    def _let_go(self, leader: Lease, is_over: Callable[[int], bool]) -> None:
        if not leader.followers:
            return
        gone = [waiter for waiter in leader.followers if is_over(waiter.goal)]
        leader.followers = [waiter for waiter in leader.followers if waiter not in gone]
        for waiter in gone:
            waiter.leader = None
            self._ready.append(waiter)

    def poll(self, now_ms: int) -> None:
        """Let waiters go on that can, and expire those whose time is over."""
        if self._state.onboard.ended:
            self._take_ended()
        elif not self._deadlines and not self._ready:
            return
        self._expire(now_ms)
        while self._ready:
            waiter = self._ready.popleft()
            if not waiter.done:
                self._retry(waiter, now_ms)
        self._serve_room(now_ms)
        head = self._room[0] if self._room else None
        self._state.offload.wanted = total_blocks(self._state, head) if head is not None else 0
        self._press(now_ms)
        if len(self._deadlines) > 4 * self.num_waiting + 64:
            self._deadlines = sorted(entry for entry in self._deadlines if not entry[2].done)

    def next_deadline_ms(self) -> int | None:
        """When poll has something to do by time alone."""
        while self._deadlines and self._deadlines[0][2].done:
            heappop(self._deadlines)
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._pressure_at_ms is not None and self._room:
            times.append(self._pressure_at_ms)
        return min(times) if times else None

    def places(self, waiter: Waiter) -> int:
        """In how many places a waiter waits; for checks."""
        leader = waiter.leader
        behind = leader is not None and waiter in (leader.followers or ())
        behind = behind or waiter.load is not None or waiter in self._state.onboard.ended
        return behind + (waiter in self._room) + (waiter in self._ready)

    # ---- waiting ----------------------------------------------------------------------------

    def _take_ended(self) -> None:
        """Waiters whose load is over go on; prefetches among them at once, elsewhere."""
        ended = self._state.onboard.ended
        self._ready.extend(ended)
        ended.clear()

    def _check_queue(self, waiter: Waiter) -> None:
        """Raise Exhausted if others have to be served first."""
        if self._must_queue(waiter):
            unclean = any(other.drop_at_ms is not None for other in self._room)
            raise (Unclean if unclean else Exhausted)(waiter.shortage)

    def _must_queue(self, waiter: Waiter) -> bool:
        """Whether somebody is in front of `waiter`, who is not in the room queue.

        Behind a waiter that its session's cap holds up, the cap holds up this one of it too.
        """
        waiter.session_full = False
        others = False
        for other in self._room:
            if other.arrival > waiter.arrival:
                break
            if other.session is waiter.session:
                waiter.session_full = other.session_full
                return True
            others = others or not other.session_full
        return others

    def _enlist(self, waiter: Waiter) -> None:
        if len(waiter.session.waiting) >= self._state.config.max_waiting_acquires:
            raise SessionFull(
                f"a session may have {self._state.config.max_waiting_acquires} waiting acquires"
            )
        waiter.session.waiting[waiter.lease_id] = waiter
        self.num_waiting += 1

    def _set_deadline(self, at_ms: int, waiter: Waiter) -> None:
        self._serial += 1
        heappush(self._deadlines, (at_ms, self._serial, waiter))

    def _await(self, waiter: Waiter, found: Awaited) -> None:
        if isinstance(found, Flight):
            self._follow(waiter, found)
            return
        self._state.onboard.follow(found, waiter)
        assert waiter.load_deadline_ms is not None
        self._set_deadline(waiter.load_deadline_ms, waiter)

    def _follow(self, waiter: Waiter, found: Flight) -> None:
        if not waiter.followed:
            waiter.followed = True
            self._state.counters.waits += 1
            self._set_deadline(waiter.flight_deadline_ms, waiter)
        waiter.leader = found.leader
        waiter.goal = found.goal // self._state.block_bytes
        if found.leader.followers is None:
            found.leader.followers = []
        found.leader.followers.append(waiter)

    def _wait_for_room(self, waiter: Waiter, error: Exhausted, now_ms: int) -> None:
        if waiter.room_deadline_ms is None:
            wait_ms = min(waiter.request.capacity_wait_ms, MAX_WAIT_MS)
            waiter.room_deadline_ms = now_ms + wait_ms
            self._set_deadline(waiter.room_deadline_ms, waiter)
        if isinstance(error, Unclean) and waiter.drop_at_ms is None:
            waiter.drop_at_ms = now_ms + self._state.config.eviction_wait_ms
            self._set_deadline(waiter.drop_at_ms, waiter)
            waiter.room_deadline_ms = max(waiter.room_deadline_ms, waiter.drop_at_ms + 1)
            self._set_deadline(waiter.room_deadline_ms, waiter)
        at = len(self._room)
        while at and self._room[at - 1].arrival > waiter.arrival:
            at -= 1  # it waited behind a leader meanwhile
        self._room.insert(at, waiter)
        self._failed_at = None

    def _answer(self, waiter: Waiter, result: Acquired | CacheError) -> None:
        assert not waiter.done
        waiter.done = True
        self.num_waiting -= 1
        del waiter.session.waiting[waiter.lease_id]
        leader = waiter.leader
        if leader is not None and leader.followers:
            leader.followers.remove(waiter)
        self._state.onboard.leave(waiter)
        if waiter in self._room:
            self._room.remove(waiter)
        if isinstance(result, Exhausted):
            self._state.counters.exhausted += 1
        self._state.events.append(
            AcquireAnswered(waiter.session.session_id, waiter.lease_id, result)
        )

    def _expire(self, now_ms: int) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            waiter = heappop(self._deadlines)[2]
            if waiter.done:
                continue
            if waiter.load is not None:
                if (waiter.load_deadline_ms or 0) <= now_ms:
                    self._state.onboard.timed_out(waiter, now_ms)
                    waiter.reason = OnboardReason.TIMEOUT
                    self._ready.append(waiter)
            elif waiter.leader is not None:
                followers = waiter.leader.followers
                if waiter.flight_deadline_ms <= now_ms and followers:
                    followers.remove(waiter)
                    waiter.leader = None
                    self._ready.append(waiter)
            elif waiter in self._room and (waiter.room_deadline_ms or 0) <= now_ms:
                self._answer(waiter, Exhausted(waiter.shortage))

    def _retry(self, waiter: Waiter, now_ms: int) -> None:
        if self._state.prefetches.knows(waiter):
            self._state.prefetches.retry(waiter, now_ms)
            return
        try:
            self._check_queue(waiter)
            outcome = attempt(self._state, waiter, now_ms)
        except Exhausted as error:
            first_unclean = isinstance(error, Unclean) and waiter.drop_at_ms is None
            deadline_ms = waiter.room_deadline_ms or now_ms + waiter.request.capacity_wait_ms
            if now_ms < deadline_ms or first_unclean:
                self._wait_for_room(waiter, error, now_ms)
            else:
                self._answer(waiter, error)
            return
        except CacheError as error:
            self._answer(waiter, error)
            return
        if isinstance(outcome, Acquired):
            self._answer(waiter, outcome)
        else:
            self._await(waiter, outcome)

    def _stamp(self, waiter: Waiter, now_ms: int) -> tuple[int, ...]:
        """While this stays the same, another attempt finds no more room than the last."""
        gpu = self._state.gpu
        drops = may_drop(self._state, waiter, now_ms)
        return id(waiter), gpu.num_available, gpu.num_ready, drops, self._state.index.clock

    def _serve_room(self, now_ms: int) -> None:
        state = self._state
        full: set[Session] = set()
        for waiter in list(self._room):
            if waiter.session in full:
                waiter.session_full = True
                continue
            if self._stamp(waiter, now_ms) == self._failed_at:
                return
            try:
                outcome = attempt(state, waiter, now_ms)
            except SessionFull:
                full.add(waiter.session)
                continue
            except Exhausted as error:
                if isinstance(error, Unclean) and waiter.drop_at_ms is None:
                    self._room.remove(waiter)
                    self._wait_for_room(waiter, error, now_ms)
                self._failed_at = self._stamp(waiter, now_ms)
                return
            except CacheError as error:
                self._answer(waiter, error)
                continue
            if isinstance(outcome, Acquired):
                self._answer(waiter, outcome)
            else:
                self._room.remove(waiter)
                self._await(waiter, outcome)

    def _press(self, now_ms: int) -> None:
        """Ask the largest holder for room; or, if only sessions' own caps are full, such a one."""
        if not self._room:
            self._pressure_at_ms = None
            return
        if self._pressure_at_ms is not None and now_ms < self._pressure_at_ms:
            return
        self._pressure_at_ms = now_ms + PRESSURE_INTERVAL_MS
        state = self._state
        head = next((waiter for waiter in self._room if not waiter.session_full), self._room[0])
        asked, missing = head.session, 1
        if not head.session_full:
            missing = total_blocks(state, head) - state.gpu.num_available
            if missing <= 0 and head.drop_at_ms is not None:
                return  # it waits for copies to go down, which nobody can help
            asked = max(
                state.sessions.values(),
                key=lambda s: (s.private_blocks + len(s.reserve), len(s.leases), -s.session_id),
            )
        state.counters.pressure_events += 1
        state.events.append(Pressure(asked.session_id, max(missing, 1)))
