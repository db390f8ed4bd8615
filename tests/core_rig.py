"""The real core beside the naive model and fingerprinted KV, compared after every operation.

A `Rig` offers the operations a worker has. Each one is carried out by `Cache`, then by the model;
answers, books, what was evicted and every KV slot of every live lease must agree.
"""

from collections.abc import Sequence

from radixkv.core.errors import CacheError, Cancelled, Exhausted
from radixkv.core.results import (
    AcquireRequest,
    ContentRange,
    Invalidated,
    ReleaseReason,
    Waiting,
)
from tests.core_audit import Audit, WaitingAcquire
from tests.naive_model import ModelLease, int32

NAMESPACE = b"namespace"


class Rig(Audit):
    """One cache under test. Sessions are ints, opened by `open`."""

    next_lease = 1

    # ---- sessions -------------------------------------------------------------------------

    def open(self, session: int) -> int:
        """Open a session."""
        self.cache.open_session(session)
        self.model.reserves[session] = []
        return session

    def close(self, session: int) -> int:
        """End a session with all it holds, as when its process dies."""
        freed = self.cache.close_session(session, self.now_ms)
        for lease in self.leases(session):
            self.model.forget(lease)
        del self.model.reserves[session]
        self.settle()
        assert not [key for key in self.waiting if key[0] == session], "its waiting ones cancelled"
        return freed

    def leases(self, session: int | None = None) -> list[ModelLease]:
        """Live leases, in the order they were made."""
        return [x for x in self.model.leases.values() if session in (None, x.session)]

    # ---- acquire --------------------------------------------------------------------------

    def acquire(
        self,
        session: int,
        tokens: Sequence[int],
        namespace: bytes = NAMESPACE,
        contents: tuple[ContentRange, ...] = (),
        lease_id: int = 0,
        **options: object,
    ) -> ModelLease | WaitingAcquire:
        """Acquire; returns the lease, or the waiting one. Errors pass through, checked."""
        if not lease_id:
            lease_id, self.next_lease = self.next_lease, self.next_lease + 1
        request = AcquireRequest(int32(tokens), namespace, contents, **options)
        before = self.cache.counters.evicted_blocks
        try:
            result = self.cache.acquire(session, lease_id, request, self.now_ms)
        except CacheError as error:
            self._check_refusal(session, request, error)
            assert self.cache.counters.evicted_blocks == before, "evicted for nothing"
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

    def lease(self, session: int, tokens: Sequence[int], **options: object) -> ModelLease:
        """An Acquire that must be answered at once."""
        lease = self.acquire(session, tokens, **options)  # type: ignore[arg-type]
        assert isinstance(lease, ModelLease)
        return lease

    # ---- a worker's operations on a lease -------------------------------------------------

    def compute(self, lease: ModelLease, upto: int | None = None) -> ModelLease:
        """The worker's kernel writes the KV of positions up to `upto` (all by default)."""
        upto = len(lease.atoms) if upto is None else upto
        assert not lease.copies, "the server has not answered yet"
        shared = {entry.block for entry in self.model.entries.values()}
        for position in range(lease.computed, upto):
            block = lease.table[position // self.block_size]
            assert block not in shared, "a worker never writes a shared block"
            self.kv[block][position % self.block_size] = lease.fingerprints[position]
        lease.computed = max(lease.computed, upto)
        return lease

    def commit(self, lease: ModelLease, upto: int | None = None) -> int:
        """Publish what is computed up to `upto`; returns the number of duplicates."""
        upto = lease.computed if upto is None else upto
        tokens = int32(lease.tokens[lease.told : max(upto, lease.told)])
        drawn = tuple(lease.drawn)
        done = self.cache.commit(lease.session, lease.id, upto, tokens, drawn)
        lease.told = max(lease.told, upto)
        self._join(lease, drawn)
        duplicates = self.model.publish(lease, upto)
        assert done.published_tokens == lease.published, (done, lease.published)
        assert done.duplicate_blocks == duplicates, (done, duplicates)
        self.settle()
        return duplicates

    def _join(self, lease: ModelLease, drawn: Sequence[int]) -> None:
        """Drawn blocks move from the session's reserve to the lease's table."""
        lease.server_table += drawn
        for block in drawn:
            self.model.reserves[lease.session].remove(block)

    def extend(self, lease: ModelLease, num_blocks: int) -> None:
        """More private blocks from the server."""
        assert not lease.drawn
        room = self._room_beside([])
        try:
            blocks = self.cache.extend(lease.session, lease.id, num_blocks)
        except Exhausted:
            over_cap = self.model.private(lease.session) + num_blocks > self._cap()
            assert num_blocks > room or over_cap or self.waiting
            self.settle()
            raise
        assert len(blocks) == num_blocks
        self._drop_evicted()
        self._take_private(blocks)
        lease.table += blocks
        lease.server_table += blocks
        self.settle()

    def trim(self, lease: ModelLease, upto: int) -> None:
        """Forget uncommitted tokens; drawn blocks stay in the reserve, others go there if it has
        room and no copy reads them."""
        keep = -(-upto // self.block_size)
        config = self.cache.config
        limit = config.max_reserve_blocks or max(config.num_blocks // 8, 1)
        room = limit - len(self.model.reserves[lease.session])
        busy = self.model.in_copy()
        expected = [block for block in lease.server_table[keep:] if block not in busy][:room]
        blocks: tuple[int, ...] = ()
        if upto <= len(lease.server_table) * self.block_size:
            blocks = self.cache.trim(lease.session, lease.id, upto)
        assert list(blocks) == expected, (blocks, expected)
        del lease.table[keep:], lease.server_table[keep:]
        del lease.atoms[upto:], lease.tokens[upto:], lease.fingerprints[upto:]
        lease.told, lease.computed = min(lease.told, upto), min(lease.computed, upto)
        self.model.reserves[lease.session] += blocks
        self.settle()

    def fork(self, lease: ModelLease, num_children: int, upto: int) -> list[ModelLease]:
        """Children that share the full blocks and get a copy each of the tail."""
        full = upto // self.block_size
        tail = lease.table[full] if upto % self.block_size else 0
        ids = tuple(range(self.next_lease, self.next_lease + num_children))
        self.next_lease += num_children
        done = self.cache.fork(lease.session, lease.id, ids, upto, tail)
        self._drop_evicted()
        assert len(done.tail_blocks) == len(done.copies) == (num_children if tail else 0)
        self._take_private(done.tail_blocks)
        children = []
        for i, child_id in enumerate(ids):
            table = lease.table[:full] + list(done.tail_blocks[i : i + 1])
            child = ModelLease(
                lease.session, child_id, lease.namespace, lease.atoms[:upto],
                lease.fingerprints[:upto], lease.tokens[:upto], lease.contents,
                told=min(lease.told, upto), committed=lease.committed,
                published=lease.published, computed=full * self.block_size,
                table=table, server_table=list(table), locks=list(lease.locks),
                detached=lease.detached,
            )  # fmt: skip
            self.model.leases[lease.session, child_id] = child
            children.append(child)
        for copy in done.copies:
            assert copy.source == tail and copy.num_tokens == upto % self.block_size
        self._start_copies(done.copies, children)
        self.settle()
        return children

    def release(self, lease: ModelLease, reason: ReleaseReason = ReleaseReason.FINISHED) -> int:
        """Give the lease back; returns the tokens that stay cached."""
        cached = self.cache.release(lease.session, lease.id, reason, self.now_ms)
        matched = len(self.model.match(lease.namespace, lease.atoms)) * self.block_size
        least = 0 if lease.detached else min(lease.committed, matched)
        assert least <= cached <= matched
        self.model.forget(lease)
        self.settle()
        return cached

    def cancel(self, waiting: WaitingAcquire) -> None:
        """Release a waiting Acquire: its answer is Cancelled."""
        session, lease_id = waiting.session, waiting.lease_id
        self.cache.release(session, lease_id, ReleaseReason.ABORTED, self.now_ms)
        self.settle()
        assert isinstance(self.answers[session, lease_id], Cancelled)

    # ---- reserve --------------------------------------------------------------------------

    def refill(self, session: int, num_blocks: int) -> None:
        """Bring up to `num_blocks` blocks into the session's reserve."""
        blocks = self.cache.refill(session, num_blocks)
        assert len(blocks) <= num_blocks
        self._drop_evicted()
        self._take_private(blocks)
        self.model.reserves[session] += blocks
        self.settle()

    def undrawn(self, session: int) -> list[int]:
        """Blocks of the reserve that no lease has drawn."""
        drawn = {block for lease in self.leases(session) for block in lease.drawn}
        return [block for block in self.model.reserves[session] if block not in drawn]

    def draw(self, lease: ModelLease) -> bool:
        """Append a block of the reserve to the lease's table, without asking the server."""
        spare = self.undrawn(lease.session)
        lease.table += spare[:1]
        return bool(spare)

    def give_back(self, session: int, blocks: Sequence[int]) -> None:
        """Return blocks of the reserve to the pool."""
        self.cache.give_back(session, tuple(blocks))
        for block in blocks:
            self.model.reserves[session].remove(block)
        self.settle()

    # ---- the server's side ----------------------------------------------------------------

    def finish_copy(self, copy_id: int, ok: bool = True) -> None:
        """A mover carries out a copy, or fails to; the operation behind it is answered."""
        copy = self.model.copies.pop(copy_id)
        if ok:
            n = copy.num_tokens
            self.kv[copy.target][:n] = self.kv[copy.source][:n]
        self.cache.copy_done(copy_id, ok)
        if copy.lease is not None:
            copy.lease.copies.discard(copy_id)
            copy.lease.computed += copy.num_tokens if ok else 0
        self.settle()

    def finish_copies(self, ok: bool = True) -> None:
        """All copies that are due."""
        for copy_id in list(self.model.copies):
            self.finish_copy(copy_id, ok)

    def advance(self, milliseconds: int) -> None:
        """Let time pass, with a poll whenever the core has asked for one."""
        end_ms = self.now_ms + milliseconds
        while (due_ms := self.cache.next_deadline_ms()) is not None and due_ms < end_ms:
            assert due_ms > self.now_ms, "a deadline that does not move"
            self.now_ms = due_ms
            self.settle()
        self.now_ms = end_ms
        self.settle()

    def invalidate(self, namespace: bytes | None, prefix: Sequence[int] = ()) -> Invalidated:
        """Nobody finds these blocks from now on."""
        head = tuple(prefix)
        entries = self.model.entries
        gone = [
            entry
            for (space, path), entry in entries.items()
            if namespace in (None, space) and path[: len(head)] == head
        ]
        dry = self.cache.invalidate(namespace, int32(prefix), dry_run=True)
        done = self.cache.invalidate(namespace, int32(prefix))
        assert dry == done and done.removed_blocks + done.leased_blocks == len(gone)
        for entry in gone:
            del entries[entry.key]
        for lease in self.leases():
            known = tuple(lease.atoms[: lease.told])
            lease.detached |= namespace in (None, lease.namespace) and known[: len(head)] == head
        self.settle()
        return done

    def lookup(self, tokens: Sequence[int], namespace: bytes = NAMESPACE) -> int:
        """Tokens of this prompt that are cached and usable; the model must agree."""
        found = self.cache.lookup(namespace, int32(tokens)).cached_tokens
        assert found == len(self.model.usable(namespace, tokens)) * self.block_size
        return found

    def cache_prompt(self, session: int, tokens: Sequence[int], **options: object) -> None:
        """Acquire, compute, commit and release a prompt."""
        lease = self.lease(session, tokens, **options)
        self.finish_copies()
        self.compute(lease)
        self.commit(lease)
        self.release(lease)
