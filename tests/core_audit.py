"""The half of the test rig that carries nothing out: it compares the core with the naive model."""

from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.core.cache import Cache
from radixkv.core.errors import CacheError, Exhausted, TooLarge
from radixkv.core.results import (
    Acquired,
    AcquireRequest,
    CacheConfig,
    CopyOp,
    Pressure,
)
from tests.naive_model import (
    GARBAGE,
    Entry,
    ModelLease,
    NaiveCache,
    PendingCopy,
    atoms_of,
    fingerprints,
    int32,
    ints,
)

SENTINEL = 1_000_000  # a token no test uses: what is asked for goes on behind what is cached


@dataclass
class WaitingAcquire:
    """An Acquire that has no answer yet."""

    session: int
    lease_id: int
    request: AcquireRequest
    since_ms: int

    @property
    def computing_ms(self) -> int:
        """From then on it does not wait for others' computations."""
        return self.since_ms + self.request.wait_ms

    @property
    def deadline_ms(self) -> int:
        """By then it has an answer: room is waited for behind the computation."""
        return self.computing_ms + self.request.capacity_wait_ms


class Audit:
    """A `Cache`, its model and its KV; `settle` proves that they agree."""

    def __init__(self, num_blocks: int = 16, block_size: int = 4, **config: int) -> None:
        self.cache = Cache(CacheConfig(num_blocks=num_blocks, block_size=block_size, **config))
        self.model = NaiveCache(num_blocks, block_size)
        self.block_size = block_size
        self.kv = {block: [GARBAGE] * block_size for block in range(1, num_blocks + 1)}
        self.waiting: dict[tuple[int, int], WaitingAcquire] = {}
        self.answers: dict[tuple[int, int], ModelLease | Exception] = {}
        self.pressure: list[Pressure] = []
        self.now_ms = 0
        self._evicted = 0
        self._youngest_evicted = 0
        self._evicting = False

    def settle(self) -> None:
        """Handle events; assert every invariant, the books, recency order and every KV slot."""
        self._poll()
        self._drop_evicted()
        self.cache.check()
        self._check_books()
        assert self.cache.num_leases == len(self.model.leases)
        assert self.cache.num_waiting == len(self.waiting)
        for entry in self.model.evictable():
            assert entry.maybe_touched >= self._youngest_evicted, "evicted a younger block"
        self._youngest_evicted = 0
        self._evicting = False
        self._check_waiting()
        self._check_kv()

    def _check_books(self) -> None:
        """Equal in every state; a running copy may keep more of the tree than its source."""
        books, expected = self.cache.books(), self.model.books()
        if self.model.copies:
            assert books.free <= expected.free, (books, expected)
            assert books.leased >= expected.leased, (books, expected)
        else:
            assert books == expected, (books, expected)

    def _check_kv(self) -> None:
        size = self.block_size
        for entry in self.model.entries.values():
            assert self.kv[entry.block] == entry.fingerprints, f"wrong bytes in {entry.block}"
        for lease in self.model.leases.values():
            for start in range(0, lease.computed, size):
                end = min(start + size, lease.computed)
                slots = self.kv[lease.table[start // size]][: end - start]
                assert slots == lease.fingerprints[start:end], f"lease {lease.id} reads strays"

    # ---- eviction -------------------------------------------------------------------------

    def is_cached(self, entry: Entry) -> bool:
        """Whether the core still finds this block."""
        tokens, contents = entry.probe
        found = self.cache.lookup(entry.key[0], tokens + int32([SENTINEL]), contents)
        return found.cached_tokens >= len(entry.key[1])

    def _drop_evicted(self) -> None:
        """Find out what the core evicted; it must have been free to go, and nothing above it."""
        count = self.cache.counters.evicted_blocks - self._evicted
        self._evicted += count
        self._evicting |= count > 0
        if not count:
            return
        gone = [entry for entry in self.model.entries.values() if not self.is_cached(entry)]
        assert len(gone) == count, f"{count} evicted, {len(gone)} not found any more"
        leased, in_copy = self.model.leased(), self.model.in_copy()
        for entry in gone:
            assert entry.block not in leased, "evicted a leased block"
            assert entry.block not in in_copy, "evicted a block with a copy in flight"
            self._youngest_evicted = max(self._youngest_evicted, entry.touched)
            del self.model.entries[entry.key]

    # ---- answers --------------------------------------------------------------------------

    def _admit(self, session: int, request: AcquireRequest, got: Acquired) -> ModelLease:
        """Check an Acquire's answer against the model and take the lease into it."""
        self._drop_evicted()
        atoms = atoms_of(ints(request.tokens), request.contents)
        cached, private = self._need(request)
        table = ints(got.block_table)
        hit = len(cached) * self.block_size
        assert got.cached_tokens == hit, f"hit {got.cached_tokens}, the model says {hit}"
        assert len(table) == len(cached) + private and len(set(table)) == len(table)
        assert table[: len(cached)] == [entry.block for entry in cached]
        computing = self.model.being_computed(request.namespace, atoms, hit)
        assert got.being_computed == computing, (got.being_computed, computing)
        self._take_private(table[len(cached) :])
        lease = ModelLease(
            session, got.lease_id, request.namespace, atoms,
            fingerprints(request.namespace, atoms), ints(request.tokens), request.contents,
            told=len(atoms), committed=hit, published=hit, computed=hit,
            table=table, server_table=list(table), locks=cached,
        )  # fmt: skip
        self._check_tail(lease, request, got)
        self.model.leases[session, got.lease_id] = lease
        self.model.touch(cached)
        self._start_copies(got.copies, [lease] * len(got.copies))
        return lease

    def _check_tail(self, lease: ModelLease, request: AcquireRequest, got: Acquired) -> None:
        """A partial tail is the longest there is, unless its source had to make room, and comes
        by exactly one copy."""
        best = self.model.longest_tail(lease.namespace, lease.atoms) if request.partial_tail else 0
        given_up = got.tail_tokens == 0 and self._evicting
        assert got.tail_tokens == best or given_up, f"tail {got.tail_tokens}, the model says {best}"
        assert len(got.copies) == (got.tail_tokens > 0)
        for copy in got.copies:
            assert copy.num_tokens == got.tail_tokens
            assert copy.target == lease.table[len(lease.locks)]
            source = [e for e in self.model.entries.values() if e.block == copy.source]
            self.model.touch(source, certain=False)

    def _take_private(self, blocks: Sequence[int]) -> None:
        """New blocks must be nobody else's; whatever they held is overwritten."""
        tree = {entry.block for entry in self.model.entries.values()}
        used = self.model.leased() | self.model.in_copy() | self.model.reserved() | tree
        assert not used & set(blocks), f"blocks {used & set(blocks)} are in use"
        for block in blocks:
            self.kv[block] = [GARBAGE] * self.block_size

    def _start_copies(self, copies: Sequence[CopyOp], leases: Sequence[ModelLease]) -> None:
        for copy, lease in zip(copies, leases, strict=bool(copies)):
            pending = PendingCopy(copy.source, copy.target, copy.num_tokens, lease)
            self.model.copies[copy.copy_id] = pending
            lease.copies.add(copy.copy_id)

    def _poll(self) -> None:
        for event in self.cache.poll(self.now_ms):
            if isinstance(event, Pressure):
                assert event.num_blocks > 0
                self.pressure.append(event)
                continue
            key = (event.session_id, event.lease_id)
            waiting = self.waiting.pop(key)
            if isinstance(event.result, Acquired):
                self.answers[key] = self._admit(waiting.session, waiting.request, event.result)
            else:
                self.answers[key] = event.result
                late = self.now_ms >= waiting.since_ms + waiting.request.capacity_wait_ms
                assert late or not isinstance(event.result, Exhausted), "gave up too early"

    # ---- refusals and waits ---------------------------------------------------------------

    def _need(self, request: AcquireRequest) -> tuple[list[Entry], int]:
        """The usable match, and how many private blocks are wanted beside it."""
        atoms = atoms_of(ints(request.tokens), request.contents)
        cached = self.model.usable(request.namespace, atoms)
        total = -(-len(atoms) // self.block_size) + request.extra_blocks
        return cached, total - len(cached)

    def _fits(self, session: int, request: AcquireRequest) -> bool:
        """Whether there is room for it now, under the session's cap."""
        cached, need = self._need(request)
        under_cap = self.model.private(session) + need <= self._cap()
        return under_cap and need <= self._room_beside(cached)

    def _cap(self) -> int:
        return self.cache.config.max_private_blocks or self.model.num_blocks

    def _room_beside(self, locked: list[Entry]) -> int:
        """Blocks that are free or could be evicted while `locked` stay."""
        kept = {entry.key for entry in locked}
        return self.cache.books().free + sum(
            entry.key not in kept for entry in self.model.evictable()
        )

    def _check_refusal(self, session: int, request: AcquireRequest, error: CacheError) -> None:
        """A refusal for want of room must be true."""
        cached, need = self._need(request)
        if isinstance(error, TooLarge):
            assert need + len(cached) > self._cap(), f"refused {need} blocks: {error}"
        elif isinstance(error, Exhausted) and not self.waiting:
            assert not self._fits(session, request), f"refused {need} blocks: {error}"

    def _check_waiting(self) -> None:
        """Nobody waits past the deadline, or for a computation that is over. Where all that wait
        for room would fit, so would the first of them: it does not wait."""
        fits = []
        for waiting in self.waiting.values():
            assert self.now_ms < waiting.deadline_ms
            deadline = self.cache.next_deadline_ms()
            assert deadline is not None and deadline <= waiting.deadline_ms
            if self.now_ms >= waiting.computing_ms or not self._computing(waiting.request):
                fits.append(self._fits(waiting.session, waiting.request))
        assert not (fits and all(fits)), "waits beside free room"

    def _computing(self, request: AcquireRequest) -> int:
        atoms = atoms_of(ints(request.tokens), request.contents)
        hit = len(self._need(request)[0]) * self.block_size
        return self.model.being_computed(request.namespace, atoms, hit)
