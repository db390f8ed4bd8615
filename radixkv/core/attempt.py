"""One attempt at an Acquire: match, lock, take room. It gives a lease or changes nothing."""

from __future__ import annotations

from array import array

from radixkv.core import flight
from radixkv.core.content import Content
from radixkv.core.errors import CacheError, Exhausted
from radixkv.core.flight import Flight
from radixkv.core.lease import Lease, Session, Waiter
from radixkv.core.miss import explain, usable_bytes
from radixkv.core.results import Acquired, AcquireRequest, CopyOp
from radixkv.core.state import SessionFull, State
from radixkv.core.tokens import TOKEN_BYTES, check_signs
from radixkv.core.tree import GPU, Match, Nearest, Node


def total_blocks(state: State, request: AcquireRequest) -> int:
    """Blocks of the whole sequence that an Acquire asks for, cached ones included."""
    return -(-len(request.tokens) // state.block_bytes) + request.extra_blocks


def attempt(state: State, waiter: Waiter, now_ms: int) -> Acquired | Flight:
    """A lease, or the flight to wait for. On Exhausted nothing has changed."""
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
        limit = usable_bytes(len(tokens), cacheable, state.block_bytes)
        match = tree.match(tokens, limit)
        if plain:
            check_signs(tokens, match.length)
        found = flight.find(match, tokens, limit)
        if found is not None and now_ms < waiter.flight_deadline_ms:
            outcome: Acquired | Flight = found
        else:
            computed = 0 if found is None else (found.goal - match.length) // TOKEN_BYTES
            lease = Lease(
                waiter.session, waiter.lease_id, tree.root, array("i"), 0, 0, b"",
                cacheable, request.placeholder_tokens, contents,
            )  # fmt: skip
            outcome = _grant(state, lease, waiter, tokens, match, computed, now_ms)
            contents = ()
    except CacheError as error:
        waiter.session_full = isinstance(error, SessionFull)
        waiter.shortage = str(error)
        raise
    finally:
        for content in contents:
            tree.contents.refer(content, -1)
        index.let_go(tree)
    return outcome


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
        need = total_blocks(state, request) - at // state.block_bytes
        taken, copies = _take(state, session, need, match, tokens, lease.cacheable, request)
    except CacheError:
        index.unlock(node)
        raise
    tail = copies[0].num_tokens if copies else 0
    index.touch(node)
    lease.node = node
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
    state: State, session: Session, need: int, match: Match, tokens: bytes, cacheable: int,
    request: AcquireRequest,
) -> tuple[array, tuple[CopyOp, ...]]:  # fmt: skip
    """Private blocks, and the copy of a partial tail into the first of them.

    The tail's source is locked from here until the copy is done. If that is what makes the
    pool too small, there is no tail.
    """
    found = _tail(match, tokens, cacheable) if request.partial_tail else None
    if found is None:
        return state.take_private(session, need), ()
    nearest, tail = found
    state.index.lock(nearest.node)
    try:
        taken = state.take_private(session, need)
        source = nearest.node.residency[GPU][nearest.block_index]
        copy = state.pool.start_copy(source, taken[0], tail, nearest.node)
    except Exhausted:
        taken = None
    finally:
        state.index.unlock(nearest.node)
    if taken is None:
        return state.take_private(session, need), ()
    state.counters.copied_blocks += 1
    return taken, (copy,)


def _tail(match: Match, tokens: bytes, cacheable: int) -> tuple[Nearest, int] | None:
    """The block to copy a partial tail from, and its number of tokens."""
    nearest = match.node.tree.nearest(match, tokens)
    if nearest is None:
        return None
    at = match.length // TOKEN_BYTES
    room = min(len(tokens) // TOKEN_BYTES - 1, cacheable) - at
    tail = min(nearest.shared // TOKEN_BYTES, room)
    return (nearest, tail) if tail > 0 else None


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
