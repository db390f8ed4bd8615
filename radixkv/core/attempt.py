"""One attempt at an Acquire: match, lock, take room. It gives a lease or changes nothing."""

from __future__ import annotations

from array import array

from radixkv.core import flight
from radixkv.core.below import may_drop, onboarded, total_blocks, wait_for
from radixkv.core.content import Content
from radixkv.core.errors import CacheError, Exhausted
from radixkv.core.flight import Flight
from radixkv.core.lease import Lease, Waiter
from radixkv.core.miss import explain, usable_bytes
from radixkv.core.onboard import Load
from radixkv.core.probing import Question
from radixkv.core.results import Acquired, AcquireRequest, CopyOp, OnboardReason, Retention
from radixkv.core.state import SessionFull, State
from radixkv.core.tokens import TOKEN_BYTES, check_signs
from radixkv.core.tree import GPU, Marks, Match, Nearest, Node, Tree

Awaited = Flight | Load | Question


def attempt(state: State, waiter: Waiter, now_ms: int) -> Acquired | Awaited:
    """A lease, or what to wait for. On Exhausted no lease and no load has begun."""
    request, index = waiter.request, state.index
    tree = index.tree(request.namespace)
    index.hold(tree)
    contents: tuple[Content, ...] = ()
    try:
        tokens = request.tokens
        cacheable = len(tokens) // TOKEN_BYTES
        plain = not (request.contents or request.placeholder_tokens or len(tree.contents))
        if not plain:
            check_signs(tokens)
            resolved = tree.contents.resolve(
                tokens, request.contents, request.placeholder_tokens, intern=True
            )
            contents, tokens, cacheable = resolved.contents, resolved.tokens, resolved.cacheable
        outcome = _decide(state, waiter, tree, tokens, cacheable, plain, contents, now_ms)
        if isinstance(outcome, Acquired):
            contents = ()  # the lease's now
    except CacheError as error:
        waiter.session_full = isinstance(error, SessionFull)
        waiter.shortage = str(error)
        raise
    finally:
        for content in contents:
            tree.contents.refer(content, -1)
        index.let_go(tree)
    return outcome


def _decide(
    state: State, waiter: Waiter, tree: Tree, tokens: bytes, cacheable: int, plain: bool,
    contents: tuple[Content, ...], now_ms: int,
) -> Acquired | Awaited:  # fmt: skip
    index = state.index
    limit = usable_bytes(len(tokens), cacheable, state.block_bytes)
    match = tree.match(tokens, limit)
    if plain:
        check_signs(tokens, match.length)
    cached = match.length
    if index.tiered:
        awaited = _below(state, waiter, match, tokens, limit, now_ms)
        if awaited is not None:
            return awaited
        match = tree.match(tokens, limit)
        cached = match.length
        match = index.on_gpu(match)
    found = flight.find(match, tokens, limit)
    if found is not None and now_ms < waiter.flight_deadline_ms:
        return found
    computed = 0 if found is None else (found.goal - match.length) // TOKEN_BYTES
    lease = Lease(
        waiter.session, waiter.lease_id, tree.root, array("i"), 0, 0, b"",
        cacheable, waiter.request.placeholder_tokens, contents,
    )  # fmt: skip
    granted = _grant(state, lease, waiter, tokens, match, computed, now_ms)
    if cached > match.length or waiter.onboarded:
        left = (cached - match.length) // TOKEN_BYTES
        granted = granted._replace(
            onboarding=onboarded(state, waiter, granted.cached_tokens, left)
        )
    return granted


def _below(
    state: State, waiter: Waiter, match: Match, tokens: bytes, limit: int, now_ms: int
) -> Load | Question | None:
    """What is to be waited for from below the gpu; with `best_effort` it is only started."""
    if state.config.onboarding != "best_effort":
        return wait_for(state, waiter, match, tokens, limit, now_ms)
    if waiter.reason is None:
        waiter.reason = OnboardReason.BEST_EFFORT
        if state.config.remote or state.index.on_gpu(match).length < match.length:
            state.prefetches.in_background(waiter.request, now_ms)
    return None


def _grant(
    state: State,
    lease: Lease,
    waiter: Waiter,
    tokens: bytes,
    match: Match,
    computed: int,
    now_ms: int,
) -> Acquired:
    index, request = state.index, waiter.request
    session, tree = waiter.session, match.node.tree
    node = index.settle(match)
    at = match.length
    match = Match(node, len(node.tokens), at)
    miss = explain(
        tree, tree.seed, match, tokens, lease.cacheable, index.evicted, state.block_bytes
    )
    index.lock(node)
    try:
        need = total_blocks(state, waiter) - at // state.block_bytes
        taken, copies = _take(state, waiter, need, match, tokens, lease.cacheable, now_ms)
    except CacheError:
        index.unlock(node)
        raise
    if index.tiered:
        state.offload.took(need)
    tail = copies[0].num_tokens if copies else 0
    index.touch(node, hit=True)
    lease.node = node
    lease.timed_ms, lease.prompt_tokens = now_ms, len(tokens) // TOKEN_BYTES
    if request.tags or request.retention is not None:
        lease.marks = marks_of(request, now_ms)
    lease.table = _path_blocks(node)
    lease.committed = lease.published = len(lease.table)
    lease.table.extend(taken)
    lease.pending = tokens[at:]
    session.leases[lease.lease_id] = lease
    flight.register(lease)
    _count(state, request, (at // TOKEN_BYTES) + tail)
    return Acquired(
        lease.lease_id, lease.table.tobytes(), at // TOKEN_BYTES, tail, computed, miss,
        now_ms - waiter.since_ms, copies,
    )  # fmt: skip


def _take(
    state: State, waiter: Waiter, need: int, match: Match, tokens: bytes, cacheable: int,
    now_ms: int,
) -> tuple[array, tuple[CopyOp, ...]]:  # fmt: skip
    """Private blocks, and the copy of a partial tail into the first of them.

    The tail's source is locked from here until the copy is done. If that is what makes the
    pool too small, there is no tail.
    """
    session = waiter.session
    drop = not state.index.tiered or may_drop(state, waiter, now_ms)
    found = _tail(match, tokens, cacheable) if waiter.request.partial_tail else None
    if found is None:
        return state.take_private(session, need, drop), ()
    nearest, tail = found
    state.index.lock(nearest.node)
    try:
        taken = state.take_private(session, need, drop)
        source = nearest.node.residency[GPU][nearest.block_index]
        copy = state.copies.start(source, taken[0], tail, nearest.node)
    except Exhausted:
        taken = None
    finally:
        state.index.unlock(nearest.node)
    if taken is None:
        return state.take_private(session, need, drop), ()
    state.counters.copied_blocks += 1
    return taken, (copy,)


def _tail(match: Match, tokens: bytes, cacheable: int) -> tuple[Nearest, int] | None:
    """The block to copy a partial tail from, and its number of tokens."""
    nearest = match.node.tree.nearest(match, tokens)
    if nearest is None or nearest.block_index >= len(nearest.node.residency[GPU]):
        return None
    at = match.length // TOKEN_BYTES
    room = min(len(tokens) // TOKEN_BYTES - 1, cacheable) - at
    tail = min(nearest.shared // TOKEN_BYTES, room)
    return (nearest, tail) if tail > 0 else None


def marks_of(request: AcquireRequest, now_ms: int) -> Marks:
    """What this Acquire says of the blocks its lease will publish."""
    kept = request.retention or Retention()
    expires_ms = now_ms + kept.ttl_ms if kept.ttl_ms else None
    return Marks(tuple(sorted(set(request.tags))), kept.priority, expires_ms)


def _count(state: State, request: AcquireRequest, hit_tokens: int) -> None:
    counters = state.counters
    queried = len(request.tokens) // TOKEN_BYTES
    if request.resumed:
        counters.resumed_acquires += 1
        counters.resumed_queried_tokens += queried
        counters.resumed_hit_tokens += hit_tokens
    else:
        counters.acquires += 1
        counters.queried_tokens += queried
        counters.hit_tokens += hit_tokens


def _path_blocks(node: Node) -> array:
    parts = []
    step = node
    while step.parent is not None:
        parts.append(step.residency[GPU])
        step = step.parent
    table = array("i")
    for ids in reversed(parts):
        table.extend(ids)
    return table
