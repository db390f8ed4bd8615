"""Who runs: admission, the step's work, room for it, preemption.

Theory of operation
    Knows: sequences waiting for a lease, those with one, and the client through which leases are
    taken, grown and given back. Must not know: the model, sampling, text, threads.

    Each engine step: collect() takes answered Acquires, relieve() follows the server's Pressure,
    admit() asks for leases in order of arrival without waiting, plan() picks the tokens to compute
    and secures blocks for them. Sequences that generate come first, one token each; what is left
    of the budget goes to prompts in order of arrival, cut into chunks.

    No room for a block: the youngest sequence that does not hold all it needs is preempted, which
    may be the one that asks. A preempted sequence comes back with a lease on every block it can
    still need, so it never asks again and is never preempted again: at most one preemption per
    sequence, and whoever holds a lease like that finishes. A sequence waiting for a lease holds
    nothing, so workers cannot block each other. Pressure never takes a worker's oldest sequence.
    Beams of one request are preempted and resumed together; if they cannot come together again
    within BEAM_ROOM_WAIT_MS they all give up and try again later, at most MAX_BEAM_ATTEMPTS times,
    and not at all if the whole pool is too small for them.

    Invariants: a sequence is in exactly one of queue, acquiring, running; running is ordered by
    age; RUNNING and READY have a lease, ACQUIRING has a pending one, QUEUED neither.
"""

import time
from array import array
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from radixkv_client import Client, Pending
from radixkv_client.errors import (
    Exhausted,
    FailedPrecondition,
    RadixKVError,
    TooLarge,
    Unavailable,
)
from radixkv_client.sync_lease import Batch
from radixkv_worker.needs import blocks_at_least, blocks_to_resume
from radixkv_worker.sequence import Group, Phase, Sequence

BEAM_ROOM_WAIT_MS = 2_000
MAX_BEAM_ATTEMPTS = 32
# For answers that do not wait for anybody: a server that is silent is waited for, one that is gone
# is noticed at once, and closing the client ends the wait.
PATIENCE_S = 3_600.0
DRAIN_RETRY_S = 1.0  # a draining server is asked again after so long


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`token_budget` tokens per step, `max_running` sequences with or about to have a lease.

    `prefix_wait_ms`: how long an Acquire waits for a prefix that is being computed elsewhere.
    `room_wait_ms`: how long one Acquire waits for room. `max_queue_s`: how long a sequence may
    wait for its lease in all, before its request fails.
    """

    token_budget: int = 512
    max_running: int = 32
    prefix_wait_ms: int = 60_000
    room_wait_ms: int = 30_000
    max_queue_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Work:
    """Compute tokens [start, end) of a sequence, for which there are blocks."""

    sequence: Sequence
    start: int
    end: int


class Scheduler:
    """See the module's text. Used by the engine's thread only."""

    def __init__(
        self, client: Client, limits: SchedulerLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._limits = limits
        self._clock = clock
        self.queue: list[Sequence] = []
        self.acquiring: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._commits: list[tuple[Sequence, Pending]] = []
        self._failed: list[tuple[Sequence, RadixKVError]] = []  # for the next collect()

    # ---- admission --------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; raises TooLarge if the pool can never hold it."""
        self._check_room(sequence.group, blocks_at_least)
        insort(self.queue, sequence, key=lambda other: other.order)

    def _check_room(self, group: Group, need: Callable[[Group, int], int]) -> None:
        block_size, total = self._client.block_size, self._client.hello.num_blocks
        if (needed := need(group, block_size)) > total:
            width = group.request.params.beam_width
            what = f"prompt, max_tokens and {width} beams" if width else "prompt and max_tokens"
            raise TooLarge(
                f"{what} need {needed} blocks of {block_size} tokens, the pool has {total}"
            )

    def admit(self) -> None:
        """Ask for leases for as many queued sequences as may run; waits for nothing."""
        now = self._clock()
        for sequence in list(self.queue):
            if len(self.acquiring) + len(self.running) >= self._limits.max_running:
                return
            if sequence.group.not_before_s <= now:
                self._ask(sequence)

    def _ask(self, sequence: Sequence) -> None:
        extra = self._blocks(sequence.group.max_computed) - self._blocks(len(sequence.tokens))
        beams_wait = sequence.group.is_beam and sequence.resumed
        sequence.pending = self._client.acquire_nowait(
            sequence.tokens,
            extra_blocks=extra if sequence.resumed else 0,
            capacity_wait_ms=BEAM_ROOM_WAIT_MS if beams_wait else self._limits.room_wait_ms,
            wait_ms=self._limits.prefix_wait_ms,
            resumed=sequence.resumed,
        )
        sequence.phase = Phase.ACQUIRING
        self.queue.remove(sequence)
        self.acquiring.append(sequence)

    def collect(self) -> list[tuple[Sequence, RadixKVError]]:
        """Take in answered Acquires; returns what failed for good, also in the step before.

        Raises Unavailable if the session is lost.
        """
        self._client.poll()
        failed, self._failed = self._failed, []
        for sequence in [s for s in self.acquiring if s.pending is not None and s.pending.done()]:
            if sequence.phase is not Phase.ACQUIRING:
                continue  # its beam group gave up meanwhile
            self.acquiring.remove(sequence)
            try:
                assert sequence.pending is not None
                sequence.lease = sequence.pending.result()
            except (Exhausted, Unavailable) as error:
                if error_ends_session(self._client, error):
                    self.acquiring.append(sequence)
                    raise
                self._put_off(sequence, error, failed)
            except RadixKVError as error:
                failed.append((sequence, error))
            else:
                self._granted(sequence)
        return failed

    def _granted(self, sequence: Sequence) -> None:
        lease = sequence.held
        sequence.pending = None
        sequence.phase = Phase.RUNNING
        sequence.computed = lease.cached_tokens
        sequence.holds_all = sequence.resumed and not sequence.group.is_beam
        insort(self.running, sequence, key=lambda other: other.order)
        if not sequence.resumed:
            tally = sequence.group.tally
            tally.cached_tokens, tally.being_computed = lease.cached_tokens, lease.being_computed
            tally.waited_ms, tally.miss = lease.waited_ms, lease.miss.kind

    def _put_off(
        self,
        sequence: Sequence,
        error: RadixKVError,
        failed: list[tuple[Sequence, RadixKVError]],
    ) -> None:
        """An Acquire found no room in time, or the server drains: later again, or never."""
        now, group = self._clock(), sequence.group
        resumed = sequence.resumed
        sequence.forget_lease()
        sequence.resumed = resumed
        if isinstance(error, Unavailable):
            group.not_before_s = now + DRAIN_RETRY_S
        if now - sequence.queued_s > self._limits.max_queue_s:
            failed.append((sequence, error))
            return
        insort(self.queue, sequence, key=lambda other: other.order)
        if group.is_beam and len(group.sequences) > 1:
            self._preempt(sequence)
            group.attempts += 1
            # Groups that took each other's room must not try again at the same moment.
            jitter = group.serial * 7919 % 16 + 1
            group.not_before_s = now + 0.02 * jitter * min(group.attempts, 8)
            if group.attempts > MAX_BEAM_ATTEMPTS:
                failed.append((sequence, error))
            try:
                self._check_room(group, blocks_to_resume)
            except TooLarge as never:
                failed.append((sequence, never))

    # ---- the step's work --------------------------------------------------------------------

    def plan(self) -> list[Work]:
        """The tokens to compute now, with blocks for all of them; may preempt."""
        budget = self._limits.token_budget
        works: list[Work] = []
        runnable = [s for s in self.running if s.phase is Phase.RUNNING]
        for sequence in sorted(runnable, key=lambda s: s.num_missing > 1):
            count = min(budget, sequence.num_missing)
            if count and self._secure(sequence, sequence.computed + count):
                works.append(Work(sequence, sequence.computed, sequence.computed + count))
                budget -= count
        return [work for work in works if work.sequence.phase is Phase.RUNNING]

    def _secure(self, sequence: Sequence, upto: int) -> bool:
        """Have blocks for the first `upto` tokens; False if the sequence was preempted."""
        while sequence.phase is Phase.RUNNING:
            missing = self._blocks(upto) - len(sequence.held.block_table)
            if missing <= 0:
                return True
            try:
                self._grow(sequence, missing)
            except Exhausted:
                self._preempt(self._youngest())
            except Unavailable:
                raise
            except RadixKVError as error:
                self._failed.append((sequence, error))
                return False
        return False

    def _grow(self, sequence: Sequence, num_blocks: int) -> None:
        try:
            sequence.held.append_blocks(num_blocks, timeout=PATIENCE_S)
        except Exhausted:
            # The reserve is small in a small pool; ask the pool itself.
            sequence.held.extend(num_blocks, timeout=PATIENCE_S)

    def _youngest(self) -> Sequence:
        return max((s for s in self.running if not s.holds_all), key=lambda s: s.order)

    def relieve(self) -> None:
        """Follow the server's Pressure: preempt the youngest, but never the oldest sequence."""
        wanted = self._client.pressure
        while wanted > 0 and self.running:
            oldest = self.running[0].group
            victims = [s for s in self.running if not s.holds_all and s.group is not oldest]
            if not victims:
                return
            wanted -= self._preempt(max(victims, key=lambda s: s.order))

    def _preempt(self, sequence: Sequence) -> int:
        """Release a sequence, with all beams of its request; returns how many blocks they had."""
        group = sequence.group
        victims = group.sequences if group.is_beam else [sequence]
        num_blocks = 0
        for victim in victims:
            if victim.lease is not None:
                num_blocks += len(victim.lease.block_table)
                self.num_preemptions += 1
                group.tally.preemptions += 1
            if victim.phase is not Phase.QUEUED:
                self.release(victim, "preempted")
                self.requeue(victim)
        return num_blocks

    # ---- ends -------------------------------------------------------------------------------

    def release(self, sequence: Sequence, reason: str) -> None:
        """Give a sequence's lease back, cancel its Acquire, or take it out of the queue."""
        for place in (self.queue, self.acquiring, self.running):
            if sequence in place:
                place.remove(sequence)
        lease = sequence.lease or (sequence.pending.lease if sequence.pending else None)
        if lease is not None and not lease.ended:  # a refused Acquire has ended by itself
            # If the session is lost so is the lease, and the next step finds out.
            with suppress(Unavailable), self._client.batch() as batch:
                batch.release(lease, reason)
        sequence.forget_lease()
        sequence.phase = Phase.FINISHED

    def settle(
        self,
        works: list[Work],
        dropped: list[Sequence],
        forks: list[tuple[Sequence, list[Sequence]]],
        finished: list[Sequence],
    ) -> None:
        """Tell the server what a step has brought, in one message.

        Publishes the full blocks that `works` completed, releases `dropped` beams, branches leases
        for the new sequences of `forks` at the tokens computed so far, and releases `finished`
        sequences. A fork that finds no room leaves its new sequences in the queue. What else is
        refused is for the next collect(). Raises Unavailable if the session is lost.
        """
        for sequence, pending in self._commits:
            with self._failing(sequence):
                pending.result(PATIENCE_S)
        self._commits = []
        ends = set(dropped + finished)
        branching: list[tuple[Sequence, list[Sequence], Pending]] = []
        with self._client.batch() as batch:
            for work in works:
                if work.sequence not in ends and (commit := self._unpublished(work.sequence)):
                    with self._failing(work.sequence):
                        sent = batch.commit(work.sequence.held, *commit)
                        self._commits.append((work.sequence, sent))
            for sequence in dropped:
                batch.release(sequence.held, "finished")
            for parent, children in forks:
                with self._failing(parent):
                    pending = batch.fork(parent.held, len(children), parent.computed)
                    branching.append((parent, children, pending))
            for sequence in finished:
                self._end(batch, sequence)
        for sequence in dropped + finished:
            self.running.remove(sequence)
            sequence.forget_lease()
            sequence.phase = Phase.FINISHED
        for parent, children, pending in branching:
            with self._failing(parent):
                self._branch(parent, children, pending)

    def _end(self, batch: Batch, sequence: Sequence) -> None:
        """Release a finished sequence, with its last blocks if the lease still takes them."""
        try:
            batch.release(sequence.held, "finished", self._unpublished(sequence))
        except FailedPrecondition:
            batch.release(sequence.held, "aborted")

    @contextmanager
    def _failing(self, sequence: Sequence) -> Iterator[None]:
        """A refusal inside fails the sequence's request and nothing else."""
        try:
            yield
        except Unavailable:
            raise
        except RadixKVError as error:
            self._failed.append((sequence, error))

    def _unpublished(self, sequence: Sequence) -> tuple[int, array] | None:
        """Full blocks computed and not committed: where they end, and the tokens to send."""
        lease = sequence.held
        full = sequence.computed // self._client.block_size * self._client.block_size
        if full <= lease.committed_tokens:
            return None
        return full, sequence.tokens[lease.num_tokens : full]

    def _branch(self, parent: Sequence, children: list[Sequence], pending: Pending) -> None:
        try:
            leases = pending.result(PATIENCE_S)
        except (Exhausted, TooLarge):  # TooLarge: more tails at once than the pool has blocks
            for child in children:
                self.requeue(child)
            if parent.group.is_beam:
                self._preempt(parent)
            return
        for child, lease in zip(children, leases, strict=True):
            if child.phase is Phase.QUEUED:  # another fork of its beam group found no room
                with self._client.batch() as batch:
                    batch.release(lease, "preempted")
                continue
            child.lease = lease
            child.computed = lease.cached_tokens
            insort(self.running, child, key=lambda other: other.order)

    def requeue(self, sequence: Sequence) -> None:
        """Queue a sequence again that was released or whose lease is lost."""
        sequence.forget_lease()
        sequence.queued_s = self._clock()
        insort(self.queue, sequence, key=lambda other: other.order)

    def lost_all(self, groups: Iterable[Group]) -> None:
        """The session is lost, and with it every lease: queue all unfinished sequences again."""
        self.queue, self.acquiring, self.running = [], [], []
        self._commits, self._failed = [], []
        for group in groups:
            for sequence in group.sequences:
                if sequence.phase is not Phase.FINISHED:
                    fresh = not sequence.resumed and sequence.lease is None
                    self.requeue(sequence)
                    sequence.resumed = not fresh

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._client.block_size)


def error_ends_session(client: Client, error: RadixKVError) -> bool:
    """Whether Unavailable means that the session is lost, not that the server is draining."""
    return isinstance(error, Unavailable) and client.connected.session.failure is not None
