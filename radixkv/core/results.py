"""What goes into and comes out of the core: frozen values, no behaviour.

Those made once or more per operation are named tuples, since a frozen dataclass of eight fields
takes 1.3 µs to make and a named tuple 0.4.

Tokens are `bytes` of little-endian int32. Block ids are ints >= 1; id 0 is the null block.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class MissKind(Enum):
    """Why a match is not longer; names equal those of `MissReason.Kind` on the wire."""

    NONE = 0
    EMPTY_NAMESPACE = 1
    DIVERGES = 2
    ENDS = 3
    EVICTED = 4
    SHORT = 5
    UNCACHEABLE = 6


class ReleaseReason(Enum):
    """Why a lease ends; names equal those of `ReleaseReason` on the wire."""

    FINISHED = 0
    ABORTED = 1
    PREEMPTED = 2
    CONVERSATION_OVER = 3


class OnboardReason(Enum):
    """Why blocks below the gpu were brought up or not; names equal those on the wire."""

    LOADED = 0
    BEST_EFFORT = 1
    BREAK_EVEN = 2
    TIMEOUT = 3
    FAILED = 4
    NO_ROOM = 5


class Retention(NamedTuple):
    """How long blocks are kept, alike in every place: lower priority goes first; 0 ms = no TTL."""

    priority: int = 0
    ttl_ms: int = 0


@dataclass(frozen=True, slots=True)
class ContentRange:
    """Tokens [start, start + length) stand for one piece of content (an image, say)."""

    start: int
    length: int
    content_id: bytes


class Miss(NamedTuple):
    """The first token that is not cached, why, and what the nearest branch has there."""

    kind: MissKind
    at_token: int = 0
    nearest_tokens: bytes = b""


class LookupResult(NamedTuple):
    """Answer of a pure read; valid only until the next mutating call."""

    cached_tokens: int
    being_computed: int
    miss: Miss


class CopyOp(NamedTuple):
    """Copy the first `num_tokens` tokens of block `source` to block `target` of one pool.

    The runtime performs it and reports `Cache.copy_done(copy_id, ok)`; until then neither block
    is given to anybody else. The reply to the operation that returned it waits for it.
    """

    copy_id: int
    pool: int
    source: int
    target: int
    num_tokens: int


class AcquireRequest(NamedTuple):
    """One Acquire. `tokens` is the whole prompt; waits are in milliseconds, 0 = do not wait."""

    tokens: bytes
    namespace: bytes
    contents: tuple[ContentRange, ...] = ()
    placeholder_tokens: frozenset[int] = frozenset()
    extra_blocks: int = 0
    partial_tail: bool = False
    capacity_wait_ms: int = 0
    wait_ms: int = 0
    resumed: bool = False
    tags: tuple[str, ...] = ()
    retention: Retention | None = None


class Onboarded(NamedTuple):
    """What was done about tokens that lay below the gpu: brought up by place, or left, and why."""

    reason: OnboardReason
    cpu_tokens: int
    nvme_tokens: int
    remote_tokens: int
    left_tokens: int


class Acquired(NamedTuple):
    """A new lease. `block_table` (int32 bytes): cached blocks, then private ones.

    `cached_tokens` counts whole cached blocks; `tail_tokens` more are there once `copies` are done.
    """

    lease_id: int
    block_table: bytes
    cached_tokens: int
    tail_tokens: int
    being_computed: int
    miss: Miss
    waited_ms: int
    copies: tuple[CopyOp, ...] = ()
    onboarding: Onboarded | None = None


class Waiting(NamedTuple):
    """The Acquire waits; its answer comes as an `AcquireAnswered` event from `Cache.poll`."""

    lease_id: int


class Forked(NamedTuple):
    """One private tail block per child (empty tuple if the fork is at a block boundary)."""

    tail_blocks: tuple[int, ...]
    copies: tuple[CopyOp, ...] = ()


class Committed(NamedTuple):
    """Tokens of the lease that are published, and blocks of this commit that the tree had."""

    published_tokens: int
    duplicate_blocks: int


@dataclass(frozen=True, slots=True)
class Invalidated:
    """Blocks of the gpu freed now, and those that live leases keep until they end; those below.

    With a ticket, nothing of it can come back once `InvalidateEnded` tells its end.
    """

    removed_blocks: int
    leased_blocks: int
    cpu_blocks: int = 0
    nvme_blocks: int = 0
    remote_blocks: int = 0
    ticket: int = 0


class InvalidateEnded(NamedTuple):
    """Event: all records of an Invalidate are erased but for `failed_erasures`."""

    ticket: int
    failed_erasures: int


class PrefetchStarted(NamedTuple):
    """Tokens on the gpu and on their way there; why not more. Handle 0: nothing to wait for."""

    handle: int
    cached_tokens: int
    loading_tokens: int
    reason: OnboardReason


class PrefetchEnded(NamedTuple):
    """Event: a prefetch is over."""

    handle: int
    loaded_tokens: int
    failed_tokens: int


class Pinned(NamedTuple):
    """A pin on the leading `pinned_tokens` of what was asked for; 0 tokens: no pin, id 0."""

    pin_id: int
    pinned_tokens: int


class AcquireAnswered(NamedTuple):
    """Event: a waiting Acquire got its answer, a lease or an error."""

    session_id: int
    lease_id: int
    result: "Acquired | Exception"


@dataclass(frozen=True, slots=True)
class Pressure:
    """Event: ask this session to give back `num_blocks`."""

    session_id: int
    num_blocks: int


Event = AcquireAnswered | Pressure | InvalidateEnded | PrefetchEnded


@dataclass(frozen=True, slots=True)
class Books:
    """Blocks of a pool by state; the six states add up to `total`."""

    leased: int
    in_flight: int
    reserved: int
    pinned: int
    cached: int
    free: int
    total: int


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Fixed for the life of a `Cache`. Sizes are in blocks unless named otherwise."""

    num_blocks: int
    block_size: int = 16
    max_private_blocks: int = 0  # of one session, 0 = the whole pool
    max_reserve_blocks: int = 0  # of one session, 0 = an eighth of the pool, at least 1
    max_edge_tokens: int = 4096
    max_evicted_digests: int = 65_536
    max_waiting_acquires: int = 1024  # of one session
    max_leases: int = 16_384  # of one session
    max_tokens: int = 2_097_152  # of one sequence
    eviction: str = "lru"
    cpu_blocks: int = 0
    nvme_blocks: int = 0
    remote: bool = False
    write_policy: str = "write_back"
    low_watermark: float = 0.05  # part of a place that is kept free or clean ...
    high_watermark: float = 0.10  # ... and how much of it, once that was not so
    onboarding: str = "wait"
    onboard_timeout_ms: int = 1000  # for onboarding "timeout"
    eviction_wait_ms: int = 1000  # an Acquire waits so long for copies down before blocks are lost
    break_even: bool = True
    max_pinned: float = 0.5  # part of a place that pins may hold


@dataclass(slots=True)
class Counters:
    """Totals since start; every one only grows. Fields are those of `Counters` on the wire."""

    acquires: int = 0
    resumed_acquires: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    resumed_queried_tokens: int = 0
    resumed_hit_tokens: int = 0
    lookups: int = 0
    commits: int = 0
    committed_blocks: int = 0
    duplicate_blocks: int = 0
    forks: int = 0
    copied_blocks: int = 0
    evicted_blocks: int = 0
    invalidated_blocks: int = 0
    preemptions: int = 0
    exhausted: int = 0
    waits: int = 0
    pressure_events: int = 0
    dropped_blocks: int = 0
    break_even_acquires: int = 0


@dataclass(frozen=True, slots=True)
class SessionUse:
    """What one session holds."""

    num_leases: int
    num_waiting: int
    private_blocks: int
    reserved_blocks: int
    lease_ids: tuple[int, ...] = field(default=())
