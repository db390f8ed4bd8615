"""The half of the tier rig that carries nothing out: after every step it proves the core right.

There is no model of what the core keeps where. What is proved: answers hold the right bytes and
nothing that was invalidated or forgotten; no id has two owners; records on nvme and remote are
those that may be there; pins hold; waits are bounded; the books of every place balance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from radixkv.core.cache import Cache
from radixkv.core.results import (
    AcquireAnswered,
    Acquired,
    AcquireRequest,
    Books,
    CacheConfig,
    CopyOp,
    InvalidateEnded,
    PrefetchEnded,
    Pressure,
)
from radixkv.core.tier_ops import Place, TierOp, Transfer
from tests.core_audit import SENTINEL, WaitingAcquire
from tests.naive_model import GARBAGE, ModelLease, PendingCopy, atoms_of, fingerprints, int32, ints
from tests.tier_places import CPU, GPU, NVME, REMOTE, Places
from tests.tier_traffic import Traffic
from tests.tier_truth import KnownBlock, Truth

MAX_OP_MS = 500  # no operation of a tier takes longer: whoever carries them out keeps to it
OPS_IN_A_ROW = 20  # that an Acquire may have to wait for


@dataclass(eq=False)
class TierLease(ModelLease):
    """A lease that says how long what it publishes is kept, and under which tags."""

    tags: tuple[str, ...] = ()
    ttl_ms: int = 0
    asked_ms: int = 0
    chain: list[KnownBlock] = field(default_factory=list)


@dataclass(eq=False)
class PinnedPrefix:
    """What a pin promised: so many blocks of a chain in all, and so many on the gpu."""

    namespace: bytes
    tokens: list[int]
    chain: list[KnownBlock]
    on_gpu: int
    until_ms: int | None

    def begins(self, namespace: bytes, prefix: Sequence[int]) -> bool:
        """Whether what was pinned begins so."""
        return self.namespace == namespace and self.tokens[: len(prefix)] == list(prefix)


class TierAudit:
    """A `Cache` with tiers, the bytes of all places, and what is known to be true of them."""

    def __init__(
        self, num_blocks: int = 16, block_size: int = 4, verify_all: bool = True, **config: object
    ) -> None:
        self.config = CacheConfig(num_blocks, block_size, **config)
        self.block_size = block_size
        self.places = Places(num_blocks, block_size, verify_all)
        self.truth = Truth(block_size)
        self.now_ms = 0
        self.log: deque[tuple] = deque(maxlen=40)
        self._fresh()

    def _fresh(self) -> None:
        """A new process: nothing is leased, waiting or under way."""
        config = self.config
        sizes = {GPU: config.num_blocks, CPU: config.cpu_blocks, NVME: config.nvme_blocks}
        self.sizes = {place: size for place, size in sizes.items() if size}
        self.cache = Cache(config)
        self.traffic = Traffic(self.sizes, config.remote, self.truth)
        self.new_ops: list[TierOp] = []  # whoever carries them out takes them from here
        self.leases: dict[tuple[int, int], TierLease] = {}
        self.reserves: dict[int, list[int]] = {}
        self.copies: dict[int, PendingCopy] = {}
        self.waiting: dict[tuple[int, int], WaitingAcquire] = {}
        self.answers: dict[tuple[int, int], TierLease | Exception] = {}
        self.pressure: list[Pressure] = []
        self.pins: dict[int, PinnedPrefix] = {}
        self.cpu_holds: dict[int, KnownBlock] = {}
        self.prefetches: set[int] = set()  # that have not ended
        self.ended: dict[int, PrefetchEnded] = {}
        self.tickets: dict[int, InvalidateEnded | None] = {}

    # ---- after every step -----------------------------------------------------------------

    def settle(self) -> None:
        """Handle events and new operations; prove everything."""
        self._lapse()
        self._poll()
        for op in self.cache.tier_ops():
            self.traffic.begin(op)
            self._check_op(op)
            self.new_ops.append(op)
        assert not self.cache.tier_ops(), "tier_ops gives the same twice"
        self.cache.check()
        self._check_books()
        self._check_waiting()
        self._check_kv()
        self._check_records()
        self._check_pins()

    def note(self, *what: object) -> None:
        """Remember a step, for the message of a failure."""
        self.log.append((self.now_ms, what))

    def story(self) -> str:
        """The last steps, for the message of a failure."""
        return "\n".join(f"{at_ms:>6} ms  " + " ".join(map(str, what)) for at_ms, what in self.log)

    def books(self, place: Place = GPU) -> Books:
        """The six states of a place."""
        return self.cache.books(place)

    def _check_books(self) -> None:
        assert self.cache.num_leases == len(self.leases)
        assert self.cache.num_waiting == len(self.waiting)
        for place, size in self.sizes.items():
            books = self.books(place)
            parts = books.leased, books.in_flight, books.reserved, books.pinned, books.cached
            assert min(*parts, books.free) >= 0, (place, books)
            assert sum(parts) + books.free == books.total == size, (place, books)
            written = sum(1 for where in self.traffic.writers if where[0] is place)
            assert books.free + written <= size, f"{place}: {books}, {written} being written"
        leased = self.leased()
        assert self.books().leased >= len(leased)
        drawn = {block for lease in self.leases.values() for block in lease.drawn}
        reserved = {block for reserve in self.reserves.values() for block in reserve}
        assert not leased & (reserved - drawn), "a reserved block is leased"

    def _check_kv(self) -> None:
        """Every lease reads what was computed for its sequence."""
        size = self.block_size
        for lease in self.leases.values():
            for start in range(0, lease.computed, size):
                end = min(start + size, lease.computed)
                slots = self.places.gpu[lease.table[start // size]][: end - start]
                assert slots == lease.fingerprints[start:end], f"lease {lease.id} reads strays"

    # ---- operations of tiers --------------------------------------------------------------

    def _check_op(self, op: TierOp) -> None:
        self.note("  wants", op)
        if not isinstance(op, Transfer):
            return
        private = self.private()
        if op.source is GPU:
            assert not private & set(op.source_ids), f"{op} reads private blocks"
        if op.target is GPU:
            touched = set(op.target_ids)
            assert not (private | self.leased()) & touched, f"{op} writes leased blocks"
            assert not touched & self.copied(), f"{op} writes blocks being copied"

    def leased(self) -> set[int]:
        """Blocks of all tables that the server knows."""
        return {block for lease in self.leases.values() for block in lease.server_table}

    def private(self) -> set[int]:
        """Blocks that a worker may write at any time, or has in reserve."""
        found = {block for reserve in self.reserves.values() for block in reserve}
        for lease in self.leases.values():
            found.update(lease.table[lease.committed // self.block_size :])
        return found

    def copied(self) -> set[int]:
        """Blocks of copies within the gpu that are not done."""
        return {block for copy in self.copies.values() for block in (copy.source, copy.target)}

    def _take_private(self, blocks: Sequence[int]) -> None:
        """New blocks must be nobody else's; whatever they held is overwritten."""
        used = self.leased() | self.private() | self.copied()
        assert not used & set(blocks), f"blocks {used & set(blocks)} are in use"
        self.traffic.check_unused(blocks, "given away")
        for block in blocks:
            self.places.gpu[block][:] = [GARBAGE] * self.block_size

    # ---- answers --------------------------------------------------------------------------

    def _admit(self, session: int, request: AcquireRequest, got: Acquired) -> TierLease:
        """Check an Acquire's answer and take the lease into the rig."""
        atoms = atoms_of(ints(request.tokens), request.contents)
        table, size = ints(got.block_table), self.block_size
        hit, chain = got.cached_tokens, self.chain_of(request)
        assert hit % size == 0 and hit < len(atoms), f"hit {hit} of {len(atoms)}"
        assert len(table) == -(-len(atoms) // size) + request.extra_blocks
        assert len(set(table)) == len(table)
        cached = table[: hit // size]
        self.traffic.check_settled(cached, "answered as cached")
        for block, known in zip(cached, chain, strict=False):
            assert tuple(self.places.gpu[block]) == known.content, f"wrong bytes for {known}"
            assert self.truth.may_be_found(known), f"{known} was invalidated or forgotten"
        self._take_private(table[hit // size :])
        lease = TierLease(
            session, got.lease_id, request.namespace, atoms,
            fingerprints(request.namespace, atoms), ints(request.tokens), request.contents,
            told=len(atoms), committed=hit, published=hit, computed=hit,
            table=table, server_table=list(table), tags=request.tags,
            ttl_ms=request.retention.ttl_ms if request.retention else 0,
            asked_ms=self.now_ms - got.waited_ms, chain=chain,
        )  # fmt: skip
        self._check_onboarding(request, got)
        self.leases[session, got.lease_id] = lease
        assert len(got.copies) == (got.tail_tokens > 0)
        self._start_copies(got.copies, [lease] * len(got.copies))
        self.note("  lease", lease.id, "of session", session, "hits", hit, got.onboarding or "")
        return lease

    def _check_onboarding(self, request: AcquireRequest, got: Acquired) -> None:
        load = got.onboarding
        if load is None:
            return
        parts = load.cpu_tokens, load.nvme_tokens, load.remote_tokens
        assert min(*parts, load.left_tokens) >= 0, load
        assert all(part % self.block_size == 0 for part in parts), load
        assert sum(parts) <= got.cached_tokens, (load, got.cached_tokens)
        assert got.cached_tokens + load.left_tokens < len(request.tokens) // 4, load
        assert bool(load.left_tokens) == (load.reason.name != "LOADED"), load

    def chain_of(self, request: AcquireRequest) -> list[KnownBlock]:
        """The whole blocks that a request names."""
        return self.truth.chain(request.namespace, ints(request.tokens), request.contents)

    def _start_copies(self, copies: Sequence[CopyOp], leases: Sequence[TierLease]) -> None:
        for copy, lease in zip(copies, leases, strict=bool(copies)):
            self.traffic.check_settled((copy.source,), "source of a copy")
            pending = PendingCopy(copy.source, copy.target, copy.num_tokens, lease)
            self.copies[copy.copy_id] = pending
            lease.copies.add(copy.copy_id)

    def _poll(self) -> None:
        for event in self.cache.poll(self.now_ms):
            match event:
                case Pressure():
                    assert event.num_blocks > 0
                    self.pressure.append(event)
                case PrefetchEnded():
                    self.prefetches.remove(event.handle)
                    self.ended[event.handle] = event
                    self.note("  prefetch", event)
                case InvalidateEnded():
                    assert self.tickets[event.ticket] is None, "ended twice"
                    self.tickets[event.ticket] = event
                    self.truth.ticket_ended(event.ticket, event.failed_erasures)
                    self.note("  invalidation", event)
                case AcquireAnswered():
                    self._answered(event)

    def _answered(self, event: AcquireAnswered) -> None:
        key = (event.session_id, event.lease_id)
        waiting = self.waiting.pop(key)
        if isinstance(event.result, Acquired):
            self.answers[key] = self._admit(waiting.session, waiting.request, event.result)
        else:
            self.answers[key] = event.result
            self.note("  refused", event.result)

    def bound_ms(self, request: AcquireRequest) -> int:
        """By when a waiting Acquire must be answered."""
        config = self.config
        wait_ms = request.wait_ms + request.capacity_wait_ms + config.eviction_wait_ms
        loads = {
            "best_effort": 0,
            "timeout": config.onboard_timeout_ms,
            "wait": OPS_IN_A_ROW * MAX_OP_MS,
        }
        return wait_ms + loads[config.onboarding]

    def _check_waiting(self) -> None:
        for waiting in self.waiting.values():
            age_ms = self.now_ms - waiting.since_ms
            assert age_ms <= self.bound_ms(waiting.request), f"waits for ever: {waiting}"

    # ---- what may and what must be found --------------------------------------------------

    def is_found(self, block: KnownBlock) -> bool:
        """Whether a prompt that goes on behind this block would find all of it."""
        tokens, contents = block.prompt
        found = self.cache.lookup(block.namespace, int32([*tokens, SENTINEL]), contents)
        return found.cached_tokens >= len(block.path)

    def on_gpu(self, namespace: bytes, tokens: Sequence[int]) -> int:
        """Leading blocks of a text that are on the gpu, read from the tree itself."""
        tree = self.cache._state.index.trees.get(namespace)
        if tree is None:
            return 0
        whole = len(tokens) // self.block_size * tree.block_bytes
        node, inside, _ = tree.match(int32(tokens), whole)
        count = 0
        for step in tree.path(node):
            there = len(step.residency[GPU])
            if step is node:
                there = min(there, inside // tree.block_bytes)
            count += there
        return count

    def _lapse(self) -> None:
        self.silence(self.truth.lapse(self.now_ms, self._offers))

    def _offers(self, block: KnownBlock) -> bool:
        """Whether the remote may give this block to whoever asks, now or soon."""
        record = self.places.remote.get(block.digest)
        expires_ms = record.identity.expires_ms if record is not None else 0
        lasts = expires_ms is None or expires_ms > self.now_ms
        return lasts or block.digest in self.traffic.digests_to_remote()

    def silence(self, gone: Iterable[KnownBlock]) -> None:
        """Leases that lose a published block publish no more."""
        lost = set(map(id, gone))
        for lease in self.leases.values():
            held = lease.chain[: lease.published // self.block_size]
            lease.detached |= any(id(block) in lost for block in held)

    def _check_records(self) -> None:
        """Nothing lies on nvme or remote that was invalidated for good."""
        for place, digests in (
            (NVME, [record.identity.digest for record in self.places.readable().values()]),
            (REMOTE, list(self.places.remote)),
        ):
            for digest in digests:
                block = self.truth.by_digest[digest]
                assert self.truth.may_have_record(block), f"{block} came back to {place.name}"

    def _check_pins(self) -> None:
        for pin_id, pin in list(self.pins.items()):
            if pin.until_ms is not None and pin.until_ms <= self.now_ms:
                del self.pins[pin_id]
                continue
            self.shorten(pin, lambda block: not self.is_sure(block))
            if pin.chain:
                assert self.is_found(pin.chain[-1]), f"pin {pin_id} lost {pin.chain[-1]}"
                there = self.on_gpu(pin.namespace, pin.tokens)
                assert there >= pin.on_gpu, f"pin {pin_id}: {there} < {pin.on_gpu} on gpu"

    def is_sure(self, block: KnownBlock) -> bool:
        """Whether nothing but damage can have taken a block from a pin."""
        until_ms = block.sure_until_ms
        return block.alive and (until_ms is None or self.now_ms < until_ms)

    def shorten(self, pin: PinnedPrefix, is_lost: Callable[[KnownBlock], bool]) -> None:
        """A pin holds no more from the first lost block on."""
        kept = next((i for i, block in enumerate(pin.chain) if is_lost(block)), len(pin.chain))
        del pin.chain[kept:]
        pin.on_gpu = min(pin.on_gpu, kept)

    def unread(self, blocks: Iterable[KnownBlock]) -> None:
        """Blocks that could not be read may be given up, also by pins."""
        lost = set(map(id, blocks))
        for pin in self.pins.values():
            self.shorten(pin, lambda block: id(block) in lost)
