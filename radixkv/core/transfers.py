"""The tier state machine: transfers between places, from their start to what they change.

Theory of operation
    A transfer copies a run of blocks of one path. `offload` starts writes (down), `onboard` loads
    (up); each locks the deepest node it concerns, so nothing on the path is evicted anywhere while
    it runs. Target blocks are nobody's but the transfer's until it is reported done; then, in
    order, they become resident where the path still is as it was, and are freed otherwise. A
    failure at the k-th block ends the run there, since residency has no holes. Blocks are found
    again by their depth on the path, as nodes may have been split meanwhile.
    Every transfer is reported exactly once, whatever happens: done, failed, or after a Cancel.
    Only then are its blocks free for others, so a late copy never lands in somebody else's block.

Who may touch a block while a transfer runs

    block                        | read by         | written by  | evicted | freed, reused
    -----------------------------|-----------------|-------------|---------|--------------------
    source, in the tree          | leases, movers  | nobody      | no      | no: locked and busy
    source, invalidated since    | leases with it, | nobody      | -       | when those and the
                                 | this mover      |             |         | transfer are over
    target (in no tree yet)      | nobody          | this mover  | -       | after its report, if
                                 |                 |             |         | it is not resident
    slot being erased            | nobody          | the erasure | -       | after its report

    Operations that find a block being loaded wait for that load; a second one is not started.

It must not know: why a transfer was started (its owner does), bytes, sockets, clocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from radixkv.core.costs import Costs
from radixkv.core.health import Direction, Healths
from radixkv.core.prefix_index import PrefixIndex
from radixkv.core.tier_ops import BlockIdentity, Cancel, Outcome, Place, TierOp, Transfer
from radixkv.core.tree import Node

RUN_BLOCKS = 32  # of one transfer
STALL_MS = 5_000  # a transfer of one run should never take so long
LOOK_INTERVAL_MS = 1_000

Outcomes = Sequence[Outcome]


@dataclass(slots=True)
class _Running:
    op: Transfer
    on_done: Callable[[Outcomes], None]
    seen_ms: int | None = None  # when it was first looked at


@dataclass(slots=True)
class Transfers:
    """Transfers in flight. `ops` collects what the runtime shall do."""

    index: PrefixIndex
    ops: list[TierOp] = field(default_factory=list)
    costs: Costs = field(default_factory=Costs)
    running: dict[int, _Running] = field(default_factory=dict)
    health: Healths = field(default_factory=Healths)
    _cancelled: set[int] = field(default_factory=set)
    _look_ms: int = 0
    before_release: Callable[[Transfer], None] = lambda op: None
    _in_flight: dict[tuple[Place, Place], int] = field(default_factory=dict)
    _next_id: int = 1

    def next_id(self) -> int:
        """A fresh id for an operation."""
        self._next_id += 1
        return self._next_id - 1

    def in_flight(self, source: Place, target: Place) -> int:
        """Blocks on their way."""
        return self._in_flight.get((source, target), 0)

    def start(
        self,
        source: Place,
        target: Place,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        namespace: bytes,
        identities: tuple[BlockIdentity, ...],
        on_done: Callable[[Outcomes], None],
    ) -> int:
        """Begin a transfer; `on_done(outcomes)` decides about its blocks when it is over."""
        op = Transfer(
            self.next_id(), source, target, tuple(source_ids), tuple(target_ids), namespace,
            identities,
        )  # fmt: skip
        self.running[op.transfer_id] = _Running(op, on_done)
        self._hold(op, 1)
        self.ops.append(op)
        return op.transfer_id

    def done(self, transfer_id: int, outcomes: Outcomes, elapsed_s: float, now_ms: int) -> None:
        """A transfer is over, one outcome per block."""
        running = self.running.pop(transfer_id)
        op = running.op
        assert len(outcomes) == num_blocks(op), "one outcome per block"
        self._judge(op, outcomes, elapsed_s, now_ms)
        running.on_done(outcomes)
        self.before_release(op)
        self._hold(op, -1)

    def _hold(self, op: Transfer, sign: int) -> None:
        key = (op.source, op.target)
        self._in_flight[key] = self.in_flight(*key) + sign * num_blocks(op)
        for place, ids in ((op.source, op.source_ids), (op.target, op.target_ids)):
            if ids:
                pool = self.index.places[place].pool
                (pool.hold if sign > 0 else pool.let_go)(ids)

    def look(self, now_ms: int) -> None:
        """Find transfers that take far too long. O(transfers), now and then."""
        if now_ms < self._look_ms:
            return
        self._look_ms = now_ms + LOOK_INTERVAL_MS
        for running in self.running.values():
            if running.seen_ms is None:
                running.seen_ms = now_ms
            elif now_ms - running.seen_ms >= STALL_MS:
                self._way(running.op).stalled(now_ms)

    def look_ms(self) -> int | None:
        """When `look` has something to do."""
        return self._look_ms if self.running else None

    def _way(self, op: Transfer) -> Direction:
        up = op.target is Place.GPU
        return self.health[op.source].reads if up else self.health[op.target].writes

    def cancel(self, transfer_id: int) -> None:
        """Nobody needs a transfer any more. It is reported all the same."""
        self._cancelled.add(transfer_id)
        self.ops.append(Cancel(transfer_id))

    def _judge(self, op: Transfer, outcomes: Outcomes, elapsed_s: float, now_ms: int) -> None:
        good = sum(outcome is Outcome.DONE for outcome in outcomes)
        failed = sum(outcome is Outcome.FAILED for outcome in outcomes)
        way = self._way(op)
        way.done_blocks += good
        self.health[op.source].bad_blocks += len(outcomes) - good - failed
        if good == len(outcomes):
            self.costs.moved(op.source, op.target, good, elapsed_s)
        if op.transfer_id in self._cancelled:
            self._cancelled.discard(op.transfer_id)
            return
        way.failed_blocks += failed
        if outcomes[0] is Outcome.FAILED:  # what follows a block that failed is given up
            way.failed(now_ms)
        else:
            way.worked()


def num_blocks(op: Transfer) -> int:
    """Blocks of a transfer."""
    return len(op.source_ids or op.target_ids)


class Path:
    """The nodes down to one, by the depth of their blocks. Valid until the next mutation."""

    __slots__ = ("_nodes", "_starts")

    def __init__(self, node: Node) -> None:
        self._nodes = node.tree.path(node)
        self._starts: list[int] = []
        depth = 0
        for step in self._nodes:
            self._starts.append(depth)
            depth += step.num_blocks

    def find(self, depth: int) -> tuple[Node, int]:
        """The node with the block at this depth, and the block's index in its edge."""
        at = bisect_right(self._starts, depth) - 1
        return self._nodes[at], depth - self._starts[at]


def depth_of(node: Node) -> int:
    """Blocks in front of the edge. O(nodes on the path)."""
    depth = 0
    step = node.parent
    while step is not None:
        depth += step.num_blocks
        step = step.parent
    return depth


def can_follow(node: Node, place: Place, index: int) -> bool:
    """Whether block `index` of the edge may become resident next in `place`."""
    if node.detached or len(node.residency[place]) != index:
        return False
    parent = node.parent
    assert parent is not None
    return parent.parent is None or len(parent.residency[place]) == parent.num_blocks
