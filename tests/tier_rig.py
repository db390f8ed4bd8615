"""A cache with tiers under test: what workers, tools and movers do to it, checked after each step.

A `TierRig` carries every operation out on the core and on the bytes of all places; `settle` (see
tier_audit) then proves that they agree. Operations of the tiers wait in `traffic` until somebody
finishes them: a story by hand (tier_hands), or a simulation with faults (tier_movers).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from radixkv.core.errors import CacheError, Cancelled
from radixkv.core.results import (
    AcquireRequest,
    ContentRange,
    Invalidated,
    Pinned,
    PrefetchStarted,
    ReleaseReason,
    Retention,
    Waiting,
)
from tests.core_audit import WaitingAcquire
from tests.naive_model import int32
from tests.tier_audit import PinnedPrefix, TierLease
from tests.tier_hands import MAX_ROUNDS, TierHands
from tests.tier_truth import KnownBlock

NAMESPACE = b"namespace"


class TierRig(TierHands):
    """Sessions are ints, opened by `open`."""

    next_lease = 1

    # ---- sessions -------------------------------------------------------------------------

    def open(self, session: int) -> int:
        """Open a session."""
        self.cache.open_session(session)
        self.reserves[session] = []
        return session

    def close(self, session: int) -> None:
        """End a session with all it holds, as when its process dies."""
        self.note("session", session, "dies")
        self.cache.close_session(session, self.now_ms)
        for lease in self.leases_of(session):
            self._forget(lease)
        del self.reserves[session]
        self.settle()
        assert not [key for key in self.waiting if key[0] == session], "its waiting ones cancelled"

    def leases_of(self, session: int | None = None) -> list[TierLease]:
        """Live leases, in the order they were made."""
        return [x for x in self.leases.values() if session in (None, x.session)]

    # ---- acquire --------------------------------------------------------------------------

    def acquire(
        self,
        session: int,
        tokens: Sequence[int],
        namespace: bytes = NAMESPACE,
        contents: tuple[ContentRange, ...] = (),
        **options: object,
    ) -> TierLease | WaitingAcquire:
        """Acquire; returns the lease, or the waiting one. Errors pass through."""
        lease_id, self.next_lease = self.next_lease, self.next_lease + 1
        request = AcquireRequest(int32(tokens), namespace, contents, **options)
        self.note("session", session, "acquires", lease_id, list(tokens), contents or "", options)
        self.chain_of(request)
        try:
            result = self.cache.acquire(session, lease_id, request, self.now_ms)
        except CacheError as error:
            self.note("  refused", error)
            self.settle()
            raise
        if isinstance(result, Waiting):
            waiting = WaitingAcquire(session, lease_id, request, self.now_ms)
            self.waiting[session, lease_id] = waiting
            self.settle()
            return waiting
        lease = self._admit(session, request, result)
        self.settle()
        return lease

    def answer(self, waiting: WaitingAcquire) -> TierLease | Exception | None:
        """What a waiting Acquire was answered, once it was; asked for only once."""
        return self.answers.pop((waiting.session, waiting.lease_id), None)

    def lease(self, session: int, tokens: Sequence[int], **options: object) -> TierLease:
        """An Acquire, with all that the tiers have to do for it done at once."""
        got = self.acquire(session, tokens, **options)  # type: ignore[arg-type]
        if isinstance(got, TierLease):
            return got
        for _ in range(MAX_ROUNDS):
            answer = self.answer(got)
            if isinstance(answer, Exception):
                raise answer
            if answer is not None:
                return answer
            if not self.finish_round():
                self.advance(max((self.cache.next_deadline_ms() or 0) - self.now_ms, 1))
        raise AssertionError(f"no answer to {got}")

    # ---- a worker's operations on a lease -------------------------------------------------

    def compute(self, lease: TierLease, upto: int | None = None) -> TierLease:
        """The worker's kernel writes the KV of positions up to `upto` (all by default)."""
        upto = len(lease.atoms) if upto is None else upto
        assert not lease.copies, "the server has not answered yet"
        size = self.block_size
        touched = sorted({lease.table[p // size] for p in range(lease.computed, upto)})
        self.traffic.check_unused(touched, "computed")
        for position in range(lease.computed, upto):
            slots = self.places.gpu[lease.table[position // size]]
            slots[position % size] = lease.fingerprints[position]
        lease.computed = max(lease.computed, upto)
        return lease

    def commit(self, lease: TierLease, upto: int | None = None) -> int:
        """Publish what is computed up to `upto`; returns the number of duplicates."""
        upto = lease.computed if upto is None else upto
        tokens = int32(lease.tokens[lease.told : max(upto, lease.told)])
        drawn = tuple(lease.drawn)
        self.note("session", lease.session, "commits", lease.id, "upto", upto)
        done = self.cache.commit(lease.session, lease.id, upto, tokens, drawn)
        lease.told = max(lease.told, upto)
        lease.server_table += drawn
        for block in drawn:
            self.reserves[lease.session].remove(block)
        lease.committed = upto - upto % self.block_size
        self._published(lease, done.published_tokens)
        self.settle()
        return done.duplicate_blocks

    def _published(self, lease: TierLease, published: int) -> None:
        before, lease.published = lease.published, published
        assert before <= published <= lease.committed
        if published == before:
            return
        assert not lease.detached, f"{lease.id} publishes behind what was invalidated"
        lease.chain = self.truth.chain(lease.namespace, lease.tokens, lease.contents)
        fresh = lease.chain[before // self.block_size : published // self.block_size]
        lasts_ms = lease.asked_ms + lease.ttl_ms, self.now_ms + lease.ttl_ms
        self.truth.publish(fresh, lease.tags, lasts_ms if lease.ttl_ms else None)

    def extend(self, lease: TierLease, num_blocks: int) -> None:
        """More private blocks from the server."""
        assert not lease.drawn
        try:
            blocks = self.cache.extend(lease.session, lease.id, num_blocks)
        except CacheError:
            self.settle()
            raise
        assert len(blocks) == num_blocks
        self._take_private(blocks)
        lease.table += blocks
        lease.server_table += blocks
        self.settle()

    def fork(self, lease: TierLease, num_children: int, upto: int) -> list[TierLease]:
        """Children that share the full blocks and get a copy each of the tail."""
        full = upto // self.block_size
        tail = lease.table[full] if upto % self.block_size else 0
        ids = tuple(range(self.next_lease, self.next_lease + num_children))
        self.next_lease += num_children
        self.note("session", lease.session, "forks", lease.id, "to", ids)
        done = self.cache.fork(lease.session, lease.id, ids, upto, tail)
        self._take_private(done.tail_blocks)
        children = []
        for i, child_id in enumerate(ids):
            table = lease.table[:full] + list(done.tail_blocks[i : i + 1])
            child = TierLease(
                lease.session, child_id, lease.namespace, lease.atoms[:upto],
                lease.fingerprints[:upto], lease.tokens[:upto], lease.contents,
                told=min(lease.told, upto), committed=lease.committed,
                published=lease.published, computed=full * self.block_size,
                table=table, server_table=list(table), detached=lease.detached,
                tags=lease.tags, ttl_ms=lease.ttl_ms,
                asked_ms=lease.asked_ms, chain=lease.chain[:full],
            )  # fmt: skip
            self.leases[lease.session, child_id] = child
            children.append(child)
        self._start_copies(done.copies, children)
        self.settle()
        return children

    def release(self, lease: TierLease, reason: ReleaseReason = ReleaseReason.FINISHED) -> int:
        """Give the lease back; returns the tokens that stay cached."""
        self.note("session", lease.session, "releases", lease.id)
        kept = self.cache.release(lease.session, lease.id, reason, self.now_ms)
        assert kept <= lease.committed
        self._forget(lease)
        self.settle()
        return kept

    def cancel(self, waiting: WaitingAcquire) -> None:
        """Release a waiting Acquire: its answer is Cancelled."""
        session, lease_id = waiting.session, waiting.lease_id
        self.note("session", session, "cancels", lease_id)
        self.cache.release(session, lease_id, ReleaseReason.ABORTED, self.now_ms)
        self.settle()
        assert isinstance(self.answer(waiting), Cancelled)

    def _forget(self, lease: TierLease) -> None:
        del self.leases[lease.session, lease.id]
        for copy_id in lease.copies:
            self.copies[copy_id] = replace(self.copies[copy_id], lease=None)

    def cache_prompt(self, session: int, tokens: Sequence[int], **options: object) -> None:
        """Acquire, compute, commit and release a prompt."""
        lease = self.lease(session, tokens, **options)
        self.finish_copies()
        self.compute(lease)
        self.commit(lease)
        self.release(lease)

    # ---- reserve --------------------------------------------------------------------------

    def refill(self, session: int, num_blocks: int) -> None:
        """Bring up to `num_blocks` blocks into the session's reserve."""
        blocks = self.cache.refill(session, num_blocks)
        self._take_private(blocks)
        self.reserves[session] += blocks
        self.settle()

    def draw(self, lease: TierLease) -> bool:
        """Append a block of the reserve to the lease's table, without asking the server."""
        drawn = {block for other in self.leases_of(lease.session) for block in other.drawn}
        spare = [block for block in self.reserves[lease.session] if block not in drawn]
        lease.table += spare[:1]
        return bool(spare)

    # ---- tools ----------------------------------------------------------------------------

    def lookup(
        self,
        tokens: Sequence[int],
        namespace: bytes = NAMESPACE,
        contents: tuple[ContentRange, ...] = (),
    ) -> int:
        """Tokens of this prompt that are cached, wherever; none of them may be forbidden."""
        chain = self.truth.chain(namespace, tokens, contents)
        before = [self.books(place) for place in self.sizes]
        found = self.cache.lookup(namespace, int32(tokens), contents).cached_tokens
        assert found % self.block_size == 0 and found < max(len(tokens), 1)
        for block in chain[: found // self.block_size]:
            assert self.truth.may_be_found(block), f"{block} was invalidated or forgotten"
        assert before == [self.books(place) for place in self.sizes], "a look-up changed something"
        assert not self.cache.tier_ops(), "a look-up wants something"
        return found

    def prefetch(self, tokens: Sequence[int], namespace: bytes = NAMESPACE) -> PrefetchStarted:
        """Bring a text up to the gpu ahead of its use."""
        self.truth.chain(namespace, tokens)
        self.note("prefetch", list(tokens))
        got = self.cache.prefetch(namespace, int32(tokens), (), frozenset(), self.now_ms)
        self.note("  ", got)
        assert got.cached_tokens + got.loading_tokens <= len(tokens)
        if got.handle:
            assert got.handle not in self.ended
            self.prefetches.add(got.handle)
        self.settle()
        return got

    def cancel_prefetch(self, handle: int) -> bool:
        """Nobody wants it any more; its end is told at once."""
        self.note("cancel prefetch", handle)
        cancelled = self.cache.cancel_prefetch(handle, self.now_ms)
        assert cancelled == (handle in self.prefetches), "cancelled, or ended before"
        self.settle()
        assert handle in self.ended
        return cancelled

    def pin(self, tokens: Sequence[int], ttl_ms: int = 0, namespace: bytes = NAMESPACE) -> Pinned:
        """Pin what is cached of a text."""
        on_gpu = self.on_gpu(namespace, tokens)
        self.note("pin", list(tokens), ttl_ms)
        got = self.cache.pin(namespace, int32(tokens), (), frozenset(), ttl_ms, self.now_ms)
        self.note("  ", got)
        blocks = got.pinned_tokens // self.block_size
        chain = self.truth.chain(namespace, tokens)[:blocks]
        until_ms = self.now_ms + ttl_ms if ttl_ms else None
        assert bool(got.pin_id) == bool(chain)
        if chain:
            self.pins[got.pin_id] = PinnedPrefix(
                namespace, list(tokens), chain, min(on_gpu, blocks), until_ms
            )
        self.settle()
        return got

    def unpin(self, pin_id: int) -> int:
        """Lift a pin; returns how many there were: none if its time was over."""
        self.note("unpin", pin_id)
        count = self.cache.unpin(pin_id)
        assert count == (self.pins.pop(pin_id, None) is not None)
        self.settle()
        return count

    def unpin_prefix(self, prefix: Sequence[int], namespace: bytes = NAMESPACE) -> None:
        """Lift all pins of sequences that begin so; those that lost that beginning may stay."""
        self.note("unpin prefix", list(prefix))
        count = self.cache.unpin_prefix(namespace, int32(prefix))
        begin = [pin for pin in self.pins.items() if pin[1].begins(namespace, prefix)]
        sure = [pin for pin in begin if len(pin[1].chain) * self.block_size >= max(len(prefix), 1)]
        assert len(sure) <= count <= len(begin), f"{len(sure)} <= {count} <= {len(begin)}"
        for pin_id, _ in begin:
            del self.pins[pin_id]
            self.cache.unpin(pin_id)
        self.settle()

    def retain(self, prefix: Sequence[int], retention: Retention, namespace: bytes = NAMESPACE):
        """Change the retention of what is cached behind a prefix."""
        self.note("retain", list(prefix), retention)
        known = filter(self.truth.may_be_found, self.truth.scope(namespace, tuple(prefix)))
        cached = [block for block in known if self.is_found(block)]
        count = self.cache.retain(namespace, int32(prefix), retention, self.now_ms)
        assert count == len(cached), f"{count} blocks retained, {len(cached)} are cached"
        for block in cached:
            expires_ms = self.now_ms + retention.ttl_ms if retention.ttl_ms else None
            self.truth.set_expiry(block, expires_ms)
        self.settle()
        return count

    def invalidate(
        self, namespace: bytes | None = NAMESPACE, prefix: Sequence[int] = (), tag: str = ""
    ) -> Invalidated:
        """Nobody finds these blocks from now on; with a ticket, nor after a restart once ended."""
        head = tuple(prefix)
        gone = self.truth.scope(namespace, head, tag)
        self._leave_to_remote(gone, head, tag)
        self.note("invalidate", namespace, head, tag)
        arguments = (namespace, int32(prefix))
        dry = self.cache.invalidate(*arguments, dry_run=True, tag=tag, now_ms=self.now_ms)
        done = self.cache.invalidate(*arguments, tag=tag, now_ms=self.now_ms)
        self.note("  ", done)
        assert not dry.ticket
        for name in ("removed_blocks", "leased_blocks", "cpu_blocks", "nvme_blocks"):
            assert getattr(dry, name) == getattr(done, name), (name, dry, done)
        if done.ticket:
            self.tickets[done.ticket] = None
        self._lift_pins(namespace, head, tag)
        self.truth.kill(gone, done.ticket)
        self.silence(gone)
        for lease in self.leases_of():
            told = tuple(lease.atoms[: lease.told])
            inside = namespace in (None, lease.namespace) and told[: len(head)] == head
            lease.detached |= inside and (not tag or tag in lease.tags)
        self.settle()
        return done

    def _lift_pins(self, namespace: bytes | None, head: tuple[int, ...], tag: str) -> None:
        for pin in self.pins.values():
            for block in list(pin.chain):
                inside = namespace in (None, block.namespace) and block.path[: len(head)] == head
                if inside and (not tag or tag in block.any_tags):
                    self.shorten(pin, lambda other, lost=block: other is lost)

    def _leave_to_remote(self, gone: Iterable[KnownBlock], head: tuple[int, ...], tag: str) -> None:
        """What only the remote has is not known to the core, and may be found there again.

        But all of a namespace can be named, and the last whole block of a prefix.
        """
        known = self.traffic.digests_to_remote()
        whole = head[: len(head) - len(head) % self.block_size]
        for block in gone:
            named = not tag and (not whole or block.path == whole)
            on_remote = block.digest in self.places.remote and block.digest not in known
            block.leftover = on_remote and not named and not self.is_found(block)
