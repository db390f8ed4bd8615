"""Writes down: which blocks get a copy in a slower place, and when.

Theory of operation
    A write copies the first blocks of a path that the slower place lacks, so it goes from the root
    outward, while eviction goes from the leaves inward. What starts writes:
    write_back    while a place has too few free or clean blocks (`low` to `high` watermark, and
                  enough for two of the larger Acquires), or an Acquire waits for them, its least
                  recently used unclean branches go down;
    selective     the same, but only for what a later prompt has hit; the rest is dropped;
    write_through everything goes down as soon as it is published.
    What was written to a local place goes to the remote too. At most MAX_IN_FLIGHT blocks of each
    direction are on their way.
    A place is *stuck* if nothing more can go down from it now; then cached blocks may be dropped.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from radixkv.core.identity import identities
from radixkv.core.places import PlaceState
from radixkv.core.tier_ops import BlockIdentity, Outcome, Place
from radixkv.core.transfers import RUN_BLOCKS, Outcomes, Path, can_follow, depth_of
from radixkv.core.tree import Node

if TYPE_CHECKING:
    from radixkv.core.state import State

MAX_IN_FLIGHT = 8 * RUN_BLOCKS  # and no more than an eighth of the place they come from
FORGETTING = 0.99  # of the usual size of an Acquire, per Acquire
MAX_LOOKED_AT = 8  # queued nodes, before one is found that can be written
MAX_QUEUED = 65_536  # nodes waiting to be written; the oldest are forgotten


class Begun(Enum):
    """Whether a write was started."""

    YES = 0
    LATER = 1  # its path is being written, or erased
    NO = 2  # there is no room, or nothing to write


Sent = tuple[Place, Place, int] | tuple[Place, bytes]


class Offload:
    """All writes of a cache."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._index = state.index
        self._transfers = state.transfers
        self._below = state.index.below
        self._through = state.config.write_policy == "write_through"
        self._queues: dict[Place, deque[Node]] = {place: deque() for place in Place}
        self._writing: set[tuple[Node, Place]] = set()
        self._sent: set[Sent] = set()  # blocks on their way to a target
        self._cleaning: set[Place] = set()
        self._stuck: set[Place] = set()
        self._pressed: set[Place] = set()  # where a write found no room
        self._flushing = False
        self.wanted = 0  # gpu blocks that an Acquire waits for
        self._usual = 0.0  # gpu blocks that the larger ones of late Acquires took

    def is_stuck(self, place: Place) -> bool:
        """Whether nothing more can go down from here, so that room must come from dropping."""
        return place in self._stuck

    def flush(self, now_ms: int) -> bool:
        """Let everything go down that a restart could use; whether that is still under way."""
        places = self._index.places
        lasting = Place.NVME if len(places) > Place.NVME else Place.REMOTE
        if lasting is Place.REMOTE and not self._state.config.remote:
            return False
        if self._transfers.health[lasting].writes.is_suspended(now_ms):
            return False
        if not self._flushing:
            self._flushing = True
            self._below = {Place.GPU: lasting}
            if len(places) > Place.CPU and lasting is Place.NVME:
                self._below[Place.CPU] = lasting
            for tree in self._index.trees.values():
                for node in tree.walk():
                    for place in self._below:
                        if node.residency[place] and self._have(node, lasting) < node.num_blocks:
                            self._queues[place].append(node)
        moving = any(self._transfers.in_flight(place, lasting) for place in self._below)
        return moving or any(self._queues[place] for place in self._below)

    def published(self, node: Node) -> None:
        """Blocks up to `node` entered the tree."""
        if self._through:
            self._enqueue(Place.GPU, node)

    def locked_nodes(self) -> list[Node]:
        """Nodes locked by writes; for checks."""
        return [node for node, _ in self._writing]

    def run(self, now_ms: int) -> None:
        """Start what can be started. O(transfers started)."""
        upwards = list(reversed(self._below.items()))
        for _ in upwards:  # a place may find only now that the one below has to make room
            for place, target in upwards:
                moved = self._clean(place, target, now_ms)
                moving = self.is_moving(place) or self.is_moving(target)
                refused = self._transfers.health[target].writes.is_suspended(now_ms)
                waits = moved or (moving and not refused)
                (self._stuck.discard if waits else self._stuck.add)(place)
        if self._state.config.remote and Place.REMOTE not in self._below.values():
            self._feed_remote(now_ms)

    # ---- what goes down ---------------------------------------------------------------------

    def _enqueue(self, place: Place, node: Node) -> None:
        queue = self._queues[place]
        if not queue or queue[-1] is not node:
            queue.append(node)
        if len(queue) > MAX_QUEUED:
            queue.popleft()

    def _clean(self, place: Place, target: Place, now_ms: int) -> bool:
        """Write from one place to the next; False if something should go and nothing can."""
        state = self._index.places[place]
        if self._transfers.health[target].writes.is_suspended(now_ms):
            return False
        limit = min(MAX_IN_FLIGHT, max(state.pool.num_blocks // 8, 1))
        targets = self._targets(place)
        while sum(self._transfers.in_flight(place, below) for below in targets) < limit:
            queue = self._queues[place]
            if queue and self._write_queued(queue, place, target):
                continue
            if not self._wants(state):
                return True
            node = state.unclean.pick()
            if node is None:
                return True
            begun = self._write_down(node, place, target)
            if begun is not Begun.YES:
                return begun is Begun.LATER  # perhaps written from elsewhere
        return True

    def is_moving(self, place: Place) -> bool:
        """Whether blocks are on their way down from here."""
        return any(self._transfers.in_flight(place, target) for target in self._targets(place))

    def _targets(self, place: Place) -> list[Place]:
        """The places below, the next one first."""
        found = []
        while (below := self._below.get(place)) is not None:
            found.append(below)
            place = below
        return found

    def _write_down(self, leaf: Node, source: Place, target: Place) -> Begun:
        """Write to the next place or, if that has no room, past it.

        A cpu tier smaller than the gpu holds the beginnings of what is on the gpu, and giving those
        up for others would bring nothing.
        """
        begun = self._write(leaf, source, target)
        past = self._below.get(target)
        if begun is not Begun.NO or past is None:
            return begun
        return self._write(leaf, source, past)

    def _wants(self, state: PlaceState) -> bool:
        config, place = self._state.config, state.place
        if place in self._pressed or (place is Place.GPU and self.wanted):
            return True  # the least recently used branch is in the way of others, clean or not
        size = state.pool.num_blocks
        ahead = place is Place.GPU and config.high_watermark > 0
        least = min(2 * self._usual, size / 2) if ahead else 0.0
        if state.num_ready < max(config.low_watermark * size, least):
            self._cleaning.add(place)
        elif state.num_ready >= max(config.high_watermark * size, least):
            self._cleaning.discard(place)
        return place in self._cleaning

    def took(self, num_blocks: int) -> None:
        """An Acquire took so many gpu blocks; the next ones should find room for two such."""
        self._usual = max(num_blocks, self._usual * FORGETTING)

    def _write_queued(self, queue: deque[Node], source: Place, target: Place) -> bool:
        """Start the next queued write, if one can be started."""
        for _ in range(min(len(queue), MAX_LOOKED_AT)):
            node = queue.popleft()
            if not node.tokens or node.detached or self._is_down(node, target):
                continue
            begun = self._write_down(node, source, target)
            if begun is Begun.YES:
                queue.appendleft(node)
                return True
            if begun is Begun.LATER:
                queue.append(node)
            elif self._state.config.remote and target is not Place.REMOTE:
                self._enqueue(Place.REMOTE, node)
            # else there is no room or no source: the watermark will see to it
        return False

    def _feed_remote(self, now_ms: int) -> None:
        queue = self._queues[Place.REMOTE]
        if self._transfers.health[Place.REMOTE].writes.is_suspended(now_ms):
            return
        while queue:
            source = Place.GPU if queue[0].residency[Place.GPU] else Place.CPU
            if self._transfers.in_flight(source, Place.REMOTE) >= MAX_IN_FLIGHT:
                return
            if not self._write_queued(queue, source, Place.REMOTE):
                return

    # ---- one write --------------------------------------------------------------------------

    def _have(self, node: Node, target: Place) -> int:
        return node.on_remote if target is Place.REMOTE else len(node.residency[target])

    def _is_down(self, node: Node, target: Place) -> bool:
        """Whether the target, or a place below it, has all of the edge."""
        places = [target, *self._targets(target)]
        return any(self._have(node, place) == node.num_blocks for place in places)

    def _first_missing(self, node: Node, target: Place) -> Node:
        """The first node of the path to `node` that `target` does not have whole."""
        first = step = node
        while step.parent is not None:
            if self._have(step, target) < step.num_blocks:
                first = step
            elif target is not Place.REMOTE:
                break
            step = step.parent
        return first

    def _write(self, leaf: Node, source: Place, target: Place) -> Begun:
        """Start the next write on the path to `leaf`, if that can be now."""
        node = self._first_missing(leaf, target)
        first = self._have(node, target)
        count = min(len(node.residency[source]) - first, RUN_BLOCKS)
        if (node, target) in self._writing:
            return Begun.LATER
        if count <= 0:
            return Begun.NO
        names: tuple[BlockIdentity, ...] = ()
        if target is not Place.CPU:
            names = identities(node, first, count)
            count = len(names)
            if any(self._state.erasing.is_erased(name.digest) for name in names):
                return Begun.LATER
            if not count:
                for step in {node, leaf}:
                    self._index.mark_unstorable(step)
                return Begun.NO
        source_ids = node.residency[source][first : first + count]
        sent = _keys(target, source, source_ids, names)
        if not self._sent.isdisjoint(sent):
            return Begun.LATER  # when the write is over that began before the edge was split
        self._index.lock(node)
        target_ids: tuple[int, ...] = ()
        if target is not Place.REMOTE:
            target_ids = self._room(target, count)
            if not target_ids:
                self._index.unlock(node)
                return Begun.NO
            count = len(target_ids)
        sent = sent[:count]
        self._sent.update(sent)
        self._writing.add((node, target))
        self._transfers.start(
            source, target, source_ids[:count], target_ids, node.tree.namespace, names[:count],
            partial(self._written, node, source, target, depth_of(node) + first, target_ids, sent),
        )  # fmt: skip
        return Begun.YES

    def _room(self, target: Place, count: int) -> tuple[int, ...]:
        """Up to `count` blocks of `target`, without losing what should go further down."""
        state = self._index.places[target]
        may_drop = not state.has_slower or self.is_stuck(target)
        short = count - state.pool.num_free
        if short > 0:
            self._index.evict(target, short, may_drop, spare_copies=True)
        taken = tuple(state.pool.take(min(count, state.pool.num_free)))
        (self._pressed.discard if taken else self._pressed.add)(target)
        return taken

    def _written(
        self, node: Node, source: Place, target: Place, depth: int, ids: tuple[int, ...],
        sent: Sequence[Sent], outcomes: Outcomes,
    ) -> None:  # fmt: skip
        self._writing.discard((node, target))
        self._sent.difference_update(sent)
        path = Path(node)
        kept = 0
        for outcome in outcomes:
            if outcome is not Outcome.DONE:
                break
            step, at = path.find(depth + kept)
            if target is Place.REMOTE:
                if not step.detached and step.on_remote == at:
                    self._index.stored(step, at + 1)
            elif can_follow(step, target, at):
                self._index.gain(step, target, array("i", ids[kept : kept + 1]))
            else:
                break
            kept += 1
        if target is not Place.REMOTE:
            self._index.places[target].pool.settle(ids[:kept], ids[kept:])
        self._index.unlock(node)
        if kept < len(outcomes) and outcomes[kept] is Outcome.BAD:
            self._index.cut(source, *path.find(depth + kept))
        if node.tokens and not node.detached:
            self._index.join_up(node)
            self._go_on(node, target, kept == len(outcomes))

    def _go_on(self, node: Node, target: Place, whole: bool) -> None:
        """What follows a write: the rest of the path, the next place, the remote."""
        if self._through and target in self._below and whole:
            self._enqueue(target, node)
        if target is not Place.REMOTE and self._state.config.remote and whole:
            self._enqueue(Place.REMOTE, node)


def _keys(
    target: Place, source: Place, ids: Sequence[int], names: Sequence[BlockIdentity]
) -> list[Sent]:
    """What tells whether a block is on its way to a target already."""
    if names:
        return [(target, name.digest) for name in names]
    return [(target, source, block) for block in ids]
