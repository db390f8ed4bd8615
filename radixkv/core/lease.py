"""Leases, what they own, and sessions: plain state, changed only by `cache` and its parts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from radixkv.core.content import Content
from radixkv.core.results import AcquireRequest
from radixkv.core.tree import Node


@dataclass(slots=True, eq=False)
class Holding:
    """Committed blocks that are not the tree's: duplicates, or content that is not cacheable.

    Shared by a lease and its forks, freed when the last of them ends.
    """

    blocks: list[int]
    refs: int = 1


@dataclass(slots=True, eq=False)
class Lease:
    """One sequence of one session.

    table: block ids in order, append-only but for Trim. The first `committed` are sealed; those
    behind them are private. `published` of the committed ones are the path to `node`, which is
    locked. `pending` are the known tokens behind the committed ones. Nothing at or behind token
    `cacheable` may be published.
    """

    session: Session
    lease_id: int
    node: Node
    table: array
    committed: int
    published: int
    pending: bytes
    cacheable: int
    placeholders: frozenset[int] = frozenset()
    contents: tuple[Content, ...] = ()
    holdings: list[Holding] = field(default_factory=list)
    followers: list[Waiter] | None = None
    flight_key: bytes | None = None


@dataclass(slots=True, eq=False)
class Waiter:
    """A waiting Acquire. It holds no block and no lock.

    `arrival` numbers Acquires in the order they came. While `leader` is set it waits for that lease
    to commit `goal` blocks (until `flight_deadline_ms`), else for room (until `room_deadline_ms`).
    """

    session: Session
    lease_id: int
    request: AcquireRequest
    arrival: int
    since_ms: int
    flight_deadline_ms: int
    leader: Lease | None = None
    goal: int = 0
    room_deadline_ms: int | None = None
    followed: bool = False
    session_full: bool = False
    shortage: str = "others are waiting for room"
    done: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """What one worker holds: leases, waiting Acquires, and a reserve of private blocks.

    private_blocks counts the blocks its leases own outside the tree.
    """

    session_id: int
    leases: dict[int, Lease] = field(default_factory=dict)
    waiting: dict[int, Waiter] = field(default_factory=dict)
    reserve: set[int] = field(default_factory=set)
    private_blocks: int = 0
