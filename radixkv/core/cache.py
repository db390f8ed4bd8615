"""The cache: every operation a session may ask for, over one pool of blocks.

Theory of operation
    A lease is a sequence: blocks it found in the tree (locked, shared), then blocks of its own.
    Commit seals full blocks and moves them into the tree, where the first copy of a block stays;
    a later copy of the same tokens remains its lease's own until the lease ends. Fork gives new
    leases on the sealed part and copies the unsealed tail at once. Release unlocks the shared
    part, which stays cached, and frees the rest.
    Every operation either happens wholly or raises and changes nothing.
    Copies are returned, never performed; their blocks stay busy until `copy_done`.
It must not know: bytes, sockets, clocks. Time is `now_ms`, milliseconds that never go back.
Books: each block is leased (locked in the tree, by a lease or a running copy, or a lease's own),
    in flight (without owner while a copy runs), reserved by a session, pinned, cached or free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from radixkv.core import check as invariants
from radixkv.core import flight, forking, sealing
from radixkv.core.acquires import Acquires
from radixkv.core.cache_tiers import TierCalls
from radixkv.core.errors import AlreadyExists, Exhausted, InvalidArgument, NotFound
from radixkv.core.lease import Session
from radixkv.core.miss import explain, usable_bytes
from radixkv.core.namespace import namespace_seed
from radixkv.core.results import (
    Acquired,
    AcquireRequest,
    CacheConfig,
    Committed,
    ContentRange,
    Counters,
    Event,
    Forked,
    LookupResult,
    ReleaseReason,
    SessionUse,
    Waiting,
)
from radixkv.core.state import SessionFull, State
from radixkv.core.tier_ops import Place
from radixkv.core.tokens import TOKEN_BYTES, check_length, check_signs


class Cache(TierCalls):
    """One pool's prefix cache. Not thread-safe: one owner calls it. See the module text."""

    def __init__(self, config: CacheConfig) -> None:
        if config.num_blocks < 1 or config.block_size < 1:
            raise InvalidArgument("num_blocks and block_size must be at least 1")
        self.config = config
        self._state = State(config)
        self._acquires = Acquires(self._state)
        self._state.on_progress = self._acquires.on_progress

    # ---- sessions ---------------------------------------------------------------------------

    def open_session(self, session_id: int) -> None:
        """A new session without leases or reserve."""
        if session_id in self._state.sessions:
            raise AlreadyExists(f"session {session_id} exists")
        self._state.sessions[session_id] = Session(session_id)

    def close_session(self, session_id: int, now_ms: int) -> int:
        """End all leases, cancel all waiters, free the reserve. Returns blocks it held alone."""
        state = self._state
        session = state.session(session_id)
        for waiter in list(session.waiting.values()):
            self._acquires.cancel(waiter)
        freed = session.private_blocks + len(session.reserve)
        for lease in list(session.leases.values()):
            state.end_lease(lease)
        assert session.private_blocks == 0
        state.gpu.pool.free(session.reserve)
        del state.sessions[session_id]
        self._acquires.poll(now_ms)
        return freed

    def session_use(self, session_id: int) -> SessionUse:
        """What a session holds now."""
        session = self._state.session(session_id)
        return SessionUse(
            len(session.leases),
            len(session.waiting),
            session.private_blocks,
            len(session.reserve),
            tuple(session.leases),
        )

    # ---- reading ----------------------------------------------------------------------------

    def lookup(
        self,
        namespace: bytes,
        tokens: bytes,
        contents: Sequence[ContentRange] = (),
        placeholder_tokens: frozenset[int] = frozenset(),
    ) -> LookupResult:
        """What an Acquire of `tokens` would find, on any tier. Changes nothing but a counter."""
        state = self._state
        check_length(tokens, state.config.max_tokens)
        tree = state.index.trees.get(namespace)
        found, length = None, 0
        cacheable = len(tokens) // TOKEN_BYTES
        plain = tree is None or not (contents or len(tree.contents))
        if not plain:
            check_signs(tokens)
        if tree is None:
            match = None
            seed = namespace_seed(namespace)
        else:
            seed = tree.seed
            resolved = tree.contents.resolve(tokens, contents, placeholder_tokens, intern=False)
            tokens, cacheable = resolved.tokens, resolved.cacheable
            limit = usable_bytes(len(tokens), cacheable, state.block_bytes)
            match = tree.match(tokens, limit)
            if state.index.tiered:
                match = state.index.resident(match)
            length = match.length
            found = flight.find(match, tokens, limit)
        if plain:
            check_signs(tokens, length)
        state.counters.lookups += 1
        miss = explain(tree, seed, match, tokens, cacheable, state.index.evicted, state.block_bytes)
        computed = 0 if found is None else (found.goal - length) // TOKEN_BYTES
        return LookupResult(length // TOKEN_BYTES, computed, miss)

    # ---- leases -----------------------------------------------------------------------------

    def acquire(
        self, session_id: int, lease_id: int, request: AcquireRequest, now_ms: int
    ) -> Acquired | Waiting:
        """Lock the longest cached prefix of a prompt and take private blocks for the rest.

        Answers Waiting only if the request allows a wait. Raises InvalidArgument, AlreadyExists,
        TooLarge, Exhausted. O(edges on the path + blocks).
        """
        session = self._state.session(session_id)
        try:
            return self._acquires.start(session, lease_id, request, now_ms)
        except Exhausted:
            self._state.counters.exhausted += 1
            raise

    def is_waiting(self, session_id: int, lease_id: int) -> bool:
        """Whether this lease's Acquire waits."""
        return lease_id in self._state.session(session_id).waiting

    def check_extend(self, session_id: int, lease_id: int, num_blocks: int) -> None:
        """Raise what an `extend` would for its arguments or for want of room. Changes nothing."""
        state = self._state
        lease = state.lease(session_id, lease_id)
        if num_blocks < 1:
            raise InvalidArgument(f"num_blocks is {num_blocks}, at least 1 is needed")
        state.check_length(len(lease.table) + num_blocks)
        with self._counting_exhausted():
            state.check_private(lease.session, num_blocks)
            if num_blocks > state.gpu.num_available:
                raise Exhausted(state.gpu.shortage(num_blocks))

    def extend(self, session_id: int, lease_id: int, num_blocks: int) -> tuple[int, ...]:
        """Append private blocks to a lease, at once or not at all; returns their ids."""
        self.check_extend(session_id, lease_id, num_blocks)
        lease = self._state.lease(session_id, lease_id)
        with self._counting_exhausted():
            taken = self._state.take_private(lease.session, num_blocks)
        lease.table.extend(taken)
        return tuple(taken)

    def trim(self, session_id: int, lease_id: int, upto: int) -> tuple[int, ...]:
        """Forget uncommitted tokens from `upto` on; whole blocks go to the session's reserve.

        Returns those blocks; what the reserve cannot hold is freed instead.
        """
        state = self._state
        lease = state.lease(session_id, lease_id)
        size = state.block_size
        if not lease.committed * size <= upto <= len(lease.table) * size:
            raise InvalidArgument(
                f"upto {upto} is not between the {lease.committed * size} committed tokens and"
                f" the {len(lease.table) * size} the lease has room for"
            )
        flight.unregister(lease)
        lease.pending = lease.pending[: (upto - lease.committed * size) * TOKEN_BYTES]
        flight.register(lease)
        keep = -(-upto // size)
        freed = list(lease.table[keep:])
        del lease.table[keep:]
        room = max(state.max_reserve - len(lease.session.reserve), 0)
        kept = [block for block in freed if block not in state.gpu.pool.busy][:room]
        lease.session.private_blocks -= len(freed)
        lease.session.reserve.update(kept)
        state.gpu.pool.free([block for block in freed if block not in lease.session.reserve])
        state.on_progress(lease, False)
        return tuple(kept)

    def fork(
        self, session_id: int, lease_id: int, child_ids: Sequence[int], upto: int, tail_block: int
    ) -> Forked:
        """New leases on the first `upto` tokens of a lease, all or none.

        Every full block up to `upto` must be committed, and no more than those. If a partial block
        remains, `tail_block` names it (in the lease's table, or taken from the reserve) and each
        child gets a private copy. Raises FailedPrecondition, InvalidArgument, Exhausted.
        """
        parent = self._state.lease(session_id, lease_id)
        with self._counting_exhausted():
            return forking.fork(self._state, parent, child_ids, upto, tail_block)

    def commit(
        self,
        session_id: int,
        lease_id: int,
        upto: int,
        tokens: bytes,
        blocks: Sequence[int],
        contents: Sequence[ContentRange] = (),
        now_ms: int = 0,
    ) -> Committed:
        """Publish the full blocks among the first `upto` tokens of a lease.

        `tokens` follow those the lease knows; `blocks` come from the session's reserve and are
        appended to the table. Raises InvalidArgument and changes nothing if anything is off.
        """
        lease = self._state.lease(session_id, lease_id)
        return sealing.commit(self._state, lease, upto, tokens, blocks, contents, now_ms)

    def release(self, session_id: int, lease_id: int, reason: ReleaseReason, now_ms: int) -> int:
        """End a lease, or cancel its waiting Acquire. Returns the tokens that stay cached."""
        state = self._state
        session = state.session(session_id)
        lease = session.leases.get(lease_id)
        if lease is None:
            waiter = session.waiting.get(lease_id)
            if waiter is None:
                raise NotFound(f"no lease {lease_id} in this session")
            self._acquires.cancel(waiter)
            return 0
        if reason is ReleaseReason.PREEMPTED:
            state.counters.preemptions += 1
        return state.end_lease(lease)

    # ---- reserve ----------------------------------------------------------------------------

    def refill(self, session_id: int, num_blocks: int) -> tuple[int, ...]:
        """Bring up to `num_blocks` private blocks into the reserve; Exhausted if none."""
        state = self._state
        session = state.session(session_id)
        if num_blocks < 1:
            raise InvalidArgument(f"num_blocks is {num_blocks}, at least 1 is needed")
        held = session.private_blocks + len(session.reserve)
        room = min(state.max_reserve - len(session.reserve), state.max_private - held)
        count = min(num_blocks, room, state.gpu.num_available)
        if count < 1:
            state.counters.exhausted += 1
            if room < 1:
                raise SessionFull(
                    f"this session holds {len(session.reserve)} reserved of {state.max_reserve}"
                    f" and {held} private blocks of {state.max_private}"
                )
            raise Exhausted(state.gpu.shortage(num_blocks))
        taken = state.take(Place.GPU, count)
        session.reserve.update(taken)
        return tuple(taken)

    def give_back(self, session_id: int, blocks: Sequence[int]) -> None:
        """Return blocks of the reserve to the pool."""
        session = self._state.session(session_id)
        if len(set(blocks)) != len(blocks) or not session.reserve.issuperset(blocks):
            raise InvalidArgument("a block is named that is not in this session's reserve")
        session.reserve.difference_update(blocks)
        self._state.gpu.pool.free(blocks)

    # ---- the rest ---------------------------------------------------------------------------

    def copy_done(self, copy_id: int, ok: bool) -> None:
        """A returned copy has ended. Whoever waits for it learns of `ok` from the runtime."""
        self._state.copies.finish(copy_id)

    def poll(self, now_ms: int) -> list[Event]:
        """Let waiting Acquires go on; returns what happened. Call after each batch."""
        state = self._state
        more = self._has_more()
        if more:
            self._run_tiers(now_ms)
        self._acquires.poll(now_ms)
        if more:
            state.offload.run(now_ms)
        events = state.events[:]
        state.events.clear()
        return events

    def next_deadline_ms(self) -> int | None:
        """When `poll` must be called although nothing else happens; None = never."""
        at_ms = self._acquires.next_deadline_ms()
        more_ms = self._next_tier_ms() if self._has_more() else None
        return at_ms if more_ms is None else more_ms if at_ms is None else min(at_ms, more_ms)

    def check(self) -> None:
        """Verify every invariant, O(everything); raises AssertionError."""
        invariants.check(self._state, self._acquires, self.books())

    @property
    def counters(self) -> Counters:
        """Totals since start (live, not a copy)."""
        self._state.counters.evicted_blocks = self._state.gpu.num_evicted
        self._state.counters.dropped_blocks = self._state.gpu.num_dropped
        return self._state.counters

    @property
    def num_leases(self) -> int:
        """Live leases of all sessions."""
        return sum(len(s.leases) for s in self._state.sessions.values())

    @property
    def num_waiting(self) -> int:
        """Waiting Acquires of all sessions."""
        return self._acquires.num_waiting

    @property
    def num_namespaces(self) -> int:
        """Namespaces with anything cached or leased."""
        return len(self._state.index.trees)

    @property
    def num_nodes(self) -> int:
        """Tree nodes of all namespaces."""
        return sum(tree.num_nodes for tree in self._state.index.trees.values())

    @contextmanager
    def _counting_exhausted(self) -> Iterator[None]:
        try:
            yield
        except Exhausted:
            self._state.counters.exhausted += 1
            raise
