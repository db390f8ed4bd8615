"""The calls of `Cache` about tiers, pins, retention and invalidation, and each place's books."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixkv.core.content import Resolved
from radixkv.core.errors import InvalidArgument
from radixkv.core.health import Health
from radixkv.core.invalidate import Invalidation
from radixkv.core.miss import usable_bytes
from radixkv.core.restore import restore
from radixkv.core.results import (
    AcquireRequest,
    Books,
    CacheConfig,
    ContentRange,
    Invalidated,
    Pinned,
    PrefetchStarted,
    Retention,
)
from radixkv.core.retention import retain
from radixkv.core.state import State
from radixkv.core.tier_ops import Outcome, Place, StoredBlock, TierOp
from radixkv.core.tokens import TOKEN_BYTES, check_tokens


class TierCalls:
    """Part of `Cache`; see there."""

    config: CacheConfig
    _state: State

    # ---- what the runtime reports -----------------------------------------------------------

    def tier_ops(self) -> list[TierOp]:
        """What was decided since the last call, in order; each is to be reported once."""
        ops = self._state.transfers.ops[:]
        self._state.transfers.ops.clear()
        return ops

    def transfer_done(
        self, transfer_id: int, outcomes: Sequence[Outcome], elapsed_s: float, now_ms: int
    ) -> None:
        """A transfer is over; `elapsed_s` is what it took without waiting in queues."""
        self._state.transfers.done(transfer_id, outcomes, elapsed_s, now_ms)

    def erase_done(self, erase_id: int, ok: bool, now_ms: int) -> None:
        """An erasure is over, and durable if `ok`."""
        self._state.erasing.done(erase_id, ok)

    def probe_done(self, probe_id: int, present: Sequence[bool] | None, now_ms: int) -> None:
        """The remote answered which blocks it has; None = it did not answer."""
        self._state.probing.done(probe_id, present, now_ms)

    def restore(self, blocks: Iterable[StoredBlock], now_ms: int) -> int:
        """Take over what nvme holds, before anything else is done; returns the slots in use."""
        assert not self._state.index.trees, "restore comes first"
        used = restore(self._state, blocks)
        self._run_tiers(now_ms)
        return used

    def _run_tiers(self, now_ms: int) -> None:
        """What time alone brings about, and what is to be moved."""
        state = self._state
        state.pins.expire(now_ms)
        Invalidation(state).expire(state.index.expiry.due(now_ms))
        if state.index.tiered:
            state.transfers.health.resume(now_ms)
            state.transfers.look(now_ms)
            state.offload.run(now_ms)

    def _next_tier_ms(self) -> int | None:
        """When `_run_tiers` has something to do by time alone."""
        state = self._state
        heads = [heap[0][0] for heap in (state.pins.times, state.index.expiry.heap) if heap]
        transfers = state.transfers
        for at_ms in (transfers.health.resume_ms(), transfers.look_ms()):
            if at_ms is not None:
                heads.append(at_ms)
        return min(heads, default=None)

    def _has_more(self) -> bool:
        """Whether there are tiers, or anything that ends by time. Cheap: every batch asks."""
        index = self._state.index
        return bool(index.tiered or self._state.pins.times or index.expiry.heap)

    # ---- prefetch, pins, retention ----------------------------------------------------------

    def prefetch(
        self, namespace: bytes, tokens: bytes, contents: tuple[ContentRange, ...],
        placeholder_tokens: frozenset[int], now_ms: int,
    ) -> PrefetchStarted:  # fmt: skip
        """Bring what is cached of a prefix up to the gpu. Its end is a `PrefetchEnded` event."""
        check_tokens(tokens, self.config.max_tokens)
        request = AcquireRequest(tokens, namespace, contents, placeholder_tokens)
        return self._state.prefetches.start(request, now_ms)

    def cancel_prefetch(self, handle: int, now_ms: int) -> bool:
        """End a prefetch; False if it is over."""
        return self._state.prefetches.cancel(handle)

    def pin(
        self, namespace: bytes, tokens: bytes, contents: tuple[ContentRange, ...],
        placeholder_tokens: frozenset[int], ttl_ms: int, now_ms: int,
    ) -> Pinned:  # fmt: skip
        """Keep what is cached of a prefix, wherever it is, for `ttl_ms` (0 = until unpin).

        Raises Exhausted if pins would hold more than `max_pinned` of a place.
        """
        check_tokens(tokens, self.config.max_tokens)
        tree = self._state.index.trees.get(namespace)
        if tree is None:
            return Pinned(0, 0)
        resolved: Resolved = tree.contents.resolve(
            tokens, contents, placeholder_tokens, intern=False
        )
        limit = usable_bytes(
            len(resolved.tokens) + TOKEN_BYTES, resolved.cacheable, self._state.block_bytes
        )
        match = self._state.index.resident(tree.match(resolved.tokens, limit))
        return self._state.pins.add(match, now_ms + ttl_ms if ttl_ms else None)

    def unpin(self, pin_id: int) -> int:
        """Lift a pin; returns 0 if there is none (any more)."""
        return self._state.pins.remove(pin_id)

    def unpin_prefix(self, namespace: bytes, tokens: bytes) -> int:
        """Lift all pins of sequences that begin with `tokens`; returns how many. O(pins)."""
        check_tokens(tokens, self.config.max_tokens)
        tree = self._state.index.trees.get(namespace)
        return 0 if tree is None else self._state.pins.remove_prefix(tree, tokens)

    def retain(self, namespace: bytes, prefix: bytes, retention: Retention, now_ms: int) -> int:
        """Change the retention of all cached blocks of sequences that begin with `prefix`."""
        check_tokens(prefix, self.config.max_tokens)
        tree = self._state.index.trees.get(namespace)
        return 0 if tree is None else retain(self._state.index, tree, prefix, retention, now_ms)

    def invalidate(
        self, namespace: bytes | None, prefix: bytes, dry_run: bool = False, tag: str = "",
        now_ms: int = 0,
    ) -> Invalidated:  # fmt: skip
        """Forget every cached block whose sequence begins with `prefix` (None = all namespaces).

        With a tag, only those that were published under it, and what follows them. Blocks under a
        lease are found by nobody from now on and freed when it ends; nothing that live leases of
        such sequences compute is published any more. If the result has a ticket, an
        `InvalidateEnded` event tells when no restart can bring anything back.
        """
        check_tokens(prefix, self.config.max_tokens)
        if namespace is None and prefix:
            raise InvalidArgument("a prefix needs a namespace")
        return Invalidation(self._state, dry_run).run(namespace, prefix, tag)

    # ---- books ------------------------------------------------------------------------------

    def books(self, place: Place = Place.GPU) -> Books:
        """Blocks of a place by state, O(sessions + blocks in flight)."""
        state = self._state
        there = state.index.places[place]
        loading = len(state.owned_ids(place))
        leased, reserved, copied = there.num_locked, 0, 0
        if place is Place.GPU:
            sessions = state.sessions.values()
            busy = there.pool.busy
            leased += sum(s.private_blocks for s in sessions)
            copied = sum(block in s.reserve for s in sessions for block in busy) if busy else 0
            reserved = sum(len(s.reserve) for s in sessions) - copied
        return Books(
            leased=leased,
            in_flight=len(there.pool.parked) + copied + loading,
            reserved=reserved,
            pinned=there.num_pinned,
            cached=there.num_cached,
            free=there.pool.num_free,
            total=there.pool.num_blocks,
        )

    def places(self) -> list[Place]:
        """Where blocks can be, fastest first; without the remote."""
        return [state.place for state in self._state.index.places if state.pool.num_blocks]

    def health(self, place: Place) -> Health:
        """What is known of a place below the gpu; live."""
        return self._state.transfers.health[place]

    def evicted_from(self, place: Place) -> int:
        """Blocks that left a place for want of room since the start."""
        return self._state.index.places[place].num_evicted

    def move_s(self, source: Place, target: Place) -> float | None:
        """Measured seconds to move one block; None = not measured yet."""
        return self._state.transfers.costs.move_s(source, target)

    def flush(self, now_ms: int) -> bool:
        """Write down all that a restart could use; whether something of it is still under way.

        Call it, and carry out what it decides, until it says no. O(nodes) the first time.
        """
        return self._state.offload.flush(now_ms)

    def namespaces(self) -> dict[bytes, int]:
        """Keys of the namespaces with anything cached or leased, and their blocks. O(nodes)."""
        return {
            key: sum(node.num_blocks for node in tree.walk())
            for key, tree in self._state.index.trees.items()
        }
