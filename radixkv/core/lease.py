"""Leases, what they own, and sessions: plain state, changed only by `cache` and its parts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radixkv.core.content import Content
from radixkv.core.results import AcquireRequest, OnboardReason
from radixkv.core.tier_ops import Place
from radixkv.core.tree import NO_MARKS, Marks, Node

if TYPE_CHECKING:
    from radixkv.core.onboard import Load
    from radixkv.core.probing import Question


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
    `cacheable` may be published. What it publishes gets `marks`. Until its first `prompt_tokens`
    are committed, the time since `timed_ms` tells how fast its worker computes.
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
    marks: Marks = NO_MARKS
    prompt_tokens: int = 0
    timed_ms: int = 0


@dataclass(slots=True, eq=False)
class Waiter:
    """A waiting Acquire. It holds no block and no lock.

    `arrival` numbers Acquires in the order they came. While `leader` is set it waits for that lease
    to commit `goal` blocks (until `flight_deadline_ms`); while `load` is, for blocks on their way
    to the gpu, or for the remote's answer (until `load_deadline_ms`); else for room (until
    `room_deadline_ms`; from `drop_at_ms` on by dropping what has no copy below).

    held_before: bytes of its prompt on the gpu when it last waited for blocks from below, -1 =
    never; remote_before: the same for the remote. onboarded: runs of blocks brought up for it, as
    (place, first, behind the last). on_remote: what the remote has of it, once it was asked.
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
    load: Load | Question | None = None
    load_deadline_ms: int | None = None
    drop_at_ms: int | None = None
    held_before: int = -1
    remote_before: int = -1
    onboarded: tuple[tuple[Place, int, int], ...] = ()
    on_remote: tuple[bytes, ...] | None = None
    reason: OnboardReason | None = None


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
