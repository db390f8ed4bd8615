"""Loads: bringing blocks up to the gpu.

Theory of operation
    An Acquire or Prefetch whose prompt is cached below the gpu starts a load, or finds one that
    brings its next block already, and waits for it like for anything else: it holds nothing, and
    when the load is over it matches anew. So a load that fails, or whose blocks are gone again,
    costs time, never correctness. Each goes on waiting only while its part on the gpu grows
    (below.py).
    A load takes all its gpu blocks when it starts, locks its path, and keeps its sources from being
    reused. It runs in transfers of one source place each, a few at a time; what arrives becomes
    resident in order of depth. The first failure ends it; a bad source is cut from its place.
    What the remote has (probing.py) enters the tree behind the match as it arrives.
    A load that nobody waits for any more starts no further transfer.
Break-even: of the blocks below, the leading ones are brought up that measured bandwidth brings
faster than measured prefill would compute them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from radixkv.core.errors import Exhausted
from radixkv.core.identity import identities
from radixkv.core.lease import Waiter
from radixkv.core.tier_ops import BlockIdentity, Outcome, Place
from radixkv.core.transfers import RUN_BLOCKS, Outcomes, Path, can_follow
from radixkv.core.tree import GPU, Match, Node, Tree

if TYPE_CHECKING:
    from radixkv.core.probing import Question
    from radixkv.core.state import State

MAX_RUNS = 4  # transfers of one load in flight


class Source(NamedTuple):
    """A block below the gpu: its place and id there (nvme slot), or its identity (remote)."""

    place: Place
    block_id: int
    identity: BlockIdentity | None = None


@dataclass(slots=True, eq=False)
class Run:
    """One transfer of a load: blocks [first, first + len(ids)) counted from the load's start."""

    first: int
    ids: tuple[int, ...]
    transfer_id: int = 0
    outcomes: Outcomes | None = None


@dataclass(slots=True, eq=False)
class Load:
    """Blocks on their way up to the path of `node`, the first at `depth` blocks from the root.

    `ids` are their gpu blocks. `started` of them are in a transfer or behind one; `arrived` are in
    the tree. `waiters` hear of its end.
    """

    node: Node
    depth: int
    sources: Sequence[Source]
    ids: tuple[int, ...]
    waiters: list[Waiter] = field(default_factory=list)
    started: int = 0
    arrived: int = 0
    runs: deque[Run] = field(default_factory=deque)
    stopped: bool = False
    doomed: bool = False  # invalidated: what still arrives is not let in
    loaded: list[tuple[Place, int, int]] = field(default_factory=list)


class Onboard:
    """All loads of a cache."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._index = state.index
        self._transfers = state.transfers
        self._loading: dict[tuple[Place, int | bytes], Load] = {}
        self.loads: set[Load] = set()
        self.ended: list[Waiter] = []  # waiters whose load is over

    # ---- what is below ----------------------------------------------------------------------

    def sources(self, match: Match, held: Match, now_ms: int) -> list[Source]:
        """Where the blocks of a match behind its part on the gpu are, up to the first hole."""
        found: list[Source] = []
        block = self._index.block_bytes
        path = match.node.tree.path(match.node)
        if held.node in path:
            path = path[path.index(held.node) :]
        usable = [
            place.place
            for place in self._index.places[1:]
            if not self._transfers.health[place.place].reads.is_suspended(now_ms)
        ]
        for node in path:
            first = held.inside // block if node is held.node else 0
            stop = match.inside // block if node is match.node else node.num_blocks
            for at in range(first, stop):
                places = (place for place in usable if len(node.residency[place]) > at)
                place = next(places, None)
                if place is None:
                    return found
                found.append(Source(place, node.residency[place][at]))
        return found

    def worthwhile(self, sources: Sequence[Source]) -> int:
        """How many leading blocks are brought up faster than computed again."""
        if not self._state.config.break_even:
            return len(sources)
        best = count = 0
        gain_s = best_s = 0.0
        for place, group in groupby(sources, key=lambda source: source.place):
            size = len(list(group))
            queued = self._transfers.in_flight(place, Place.GPU)
            gain_s += self._state.transfers.costs.gain_s(
                place, size, self._state.block_size, queued
            )
            count += size
            if gain_s >= best_s:
                best, best_s = count, gain_s
        return best

    # ---- starting ---------------------------------------------------------------------------

    def find(self, source: Source) -> Load | None:
        """The load that brings this block already."""
        return self._loading.get(_key(source))

    def start(self, node: Node, depth: int, sources: Sequence[Source], may_drop: bool) -> Load:
        """Bring up blocks of the path of `node` (or behind it, from the remote) from `depth` on.

        All blocks in front of them are on the gpu. Raises Exhausted (Unclean) for want of room.
        """
        self._index.lock(node)
        try:
            ids = self._state.take(Place.GPU, len(sources), may_drop)
        except Exhausted:
            self._index.unlock(node)
            raise
        load = Load(node, depth, sources, tuple(ids))
        self.loads.add(load)
        for source in sources:
            self._loading[_key(source)] = load
            if source.identity is None:
                self._index.places[source.place].pool.hold((source.block_id,))
        self._pump(load)
        return load

    # ---- running ----------------------------------------------------------------------------

    def _pump(self, load: Load) -> None:
        """Start transfers while few are in flight."""
        while (
            not load.stopped
            and load.started < len(load.sources)
            and sum(run.outcomes is None for run in load.runs) < MAX_RUNS
        ):
            count, names = self._next_run(load)
            assert count, "a stored block that cannot be named"
            sources = load.sources[load.started : load.started + count]
            place = sources[0].place
            run = Run(load.started, load.ids[load.started : load.started + count])
            load.runs.append(run)
            load.started += count
            source_ids = () if place is Place.REMOTE else [source.block_id for source in sources]
            run.transfer_id = self._transfers.start(
                place, Place.GPU, source_ids, run.ids, load.node.tree.namespace, names,
                partial(self._arrived, load, run),
            )  # fmt: skip

    def _next_run(self, load: Load) -> tuple[int, tuple[BlockIdentity, ...]]:
        """Blocks of the next transfer and, unless they come from cpu, their identities."""
        first = load.started
        place = load.sources[first].place
        stop = first + 1
        limit = min(first + RUN_BLOCKS, len(load.sources))
        while stop < limit and load.sources[stop].place is place:
            stop += 1
        if place is Place.REMOTE:
            names = tuple(source.identity for source in load.sources[first:stop])
            return stop - first, names  # type: ignore[return-value]
        node, at = Path(load.node).find(load.depth + first)
        count = min(stop - first, node.num_blocks - at)
        if place is Place.CPU:
            return count, ()
        found = identities(node, at, count)
        return len(found), found

    def _arrived(self, load: Load, run: Run, outcomes: Outcomes) -> None:
        run.outcomes = outcomes
        while load.runs and load.runs[0].outcomes is not None:
            self._admit(load, load.runs.popleft())
        self._pump(load)
        if not load.runs and (load.stopped or load.started == len(load.sources)):
            self._end(load)

    def _admit(self, load: Load, run: Run) -> None:
        """Make resident what arrived in order; the rest of the load is given up if some failed."""
        assert run.outcomes is not None
        sources = load.sources[run.first : run.first + len(run.ids)]
        good = 0
        if run.first == load.arrived:
            while good < len(run.ids) and run.outcomes[good] is Outcome.DONE:
                good += 1
            attach = self._attach_remote if sources[0].identity else self._attach
            good = attach(load, run, good)
            first = load.depth + load.arrived
            load.arrived += good
            load.loaded.append((sources[0].place, first, first + good))
        self._state.gpu.pool.free(run.ids[good:])
        self._let_go(sources)
        if good < len(run.ids):
            self._stop(load)
            bad = run.outcomes[good] is Outcome.BAD and sources[good].identity is None
            if bad and run.first + good == load.arrived:
                node, at = Path(load.node).find(load.depth + load.arrived)
                self._index.cut(sources[good].place, node, at)

    def _attach(self, load: Load, run: Run, good: int) -> int:
        path = Path(load.node)
        for at in range(good):
            node, index = path.find(load.depth + run.first + at)
            if index < len(node.residency[GPU]) and not node.detached:
                self._state.gpu.pool.free(run.ids[at : at + 1])  # a Commit was faster
            elif can_follow(node, Place.GPU, index):
                self._index.gain(node, Place.GPU, array("i", run.ids[at : at + 1]))
            else:
                return at
        return good

    def _attach_remote(self, load: Load, run: Run, good: int) -> int:
        start = load.node
        if start.detached or load.doomed or not good:
            return 0
        names = [source.identity for source in load.sources[run.first : run.first + good]]
        tokens = b"".join(name.tokens for name in names if name is not None)
        end, duplicates = self._index.insert(start, tokens, array("i", run.ids[:good]), False)
        self._state.gpu.pool.free(run.ids[:duplicates])
        self._index.lock(end)
        self._index.unlock(start)
        load.node = step = end
        while step is not start:
            self._index.stored(step, step.num_blocks)
            assert step.parent is not None
            step = step.parent
        self._index.touch(end)
        return good

    def doom_remote(self, tree: Tree, prefix: bytes, tag: str) -> list[bytes]:
        """Give up what comes from the remote for sequences that are invalidated; their digests."""
        doomed: list[bytes] = []
        for load in self.loads:
            names = [source.identity for source in load.sources if source.identity is not None]
            if not names or load.node.tree is not tree:
                continue
            path = tree.path(load.node)
            tokens = tree.path_tokens(load.node) + b"".join(name.tokens for name in names)
            tagged = not tag or any(tag in node.marks.tags for node in path)
            if tagged and tokens.startswith(prefix):
                load.doomed = True
                doomed += [name.digest for name in names]
                self._stop(load)
        return doomed

    def _stop(self, load: Load) -> None:
        if not load.stopped:
            load.stopped = True
            for run in load.runs:
                if run.outcomes is None:
                    self._transfers.cancel(run.transfer_id)

    def _let_go(self, sources: Sequence[Source]) -> None:
        for source in sources:
            self._loading.pop(_key(source), None)
            if source.identity is None:
                self._index.places[source.place].pool.let_go((source.block_id,))

    def _end(self, load: Load) -> None:
        self._state.gpu.pool.free(load.ids[load.started :])
        self._let_go(load.sources[load.started :])
        self.loads.discard(load)
        node = load.node
        if not node.detached:
            self._index.touch(node)
        self._index.unlock(node)
        if node.tokens and not node.detached and node.parent is not None:
            self._index.join_up(node)
        for waiter in load.waiters:
            waiter.onboarded += tuple(load.loaded)
            self._free(waiter)
        load.waiters.clear()

    # ---- waiters ----------------------------------------------------------------------------

    def follow(self, load: Load | Question, waiter: Waiter) -> None:
        """`waiter` goes on when the load is over."""
        waiter.load = load
        load.waiters.append(waiter)

    def leave(self, waiter: Waiter) -> None:
        """`waiter` waits no longer; a load that nobody waits for goes no further."""
        load = waiter.load
        if load is None:
            return
        waiter.load = None
        load.waiters.remove(waiter)
        if isinstance(load, Load) and not load.waiters and load in self.loads:
            self._stop(load)

    def timed_out(self, waiter: Waiter, now_ms: int) -> None:
        """`waiter` has waited long enough; where its blocks come from is too slow for it."""
        load = waiter.load
        place = load.sources[load.arrived].place if isinstance(load, Load) else Place.REMOTE
        self._transfers.health[place].reads.failed(now_ms)
        self.leave(waiter)

    def _free(self, waiter: Waiter) -> None:
        waiter.load = None
        self.ended.append(waiter)

    def target_ids(self) -> list[int]:
        """Gpu blocks that loads hold and that are in nobody else's hands; for books and checks."""
        found: list[int] = []
        for load in self.loads:
            found.extend(load.ids[load.started :])
            for run in load.runs:
                found.extend(run.ids)
        return found


def _key(source: Source) -> tuple[Place, int | bytes]:
    if source.identity is not None:
        return source.place, source.identity.digest
    return source.place, source.block_id
