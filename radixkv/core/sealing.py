"""Commit: seal full blocks, and let the tree have those it may and does not have yet."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from radixkv.core import flight
from radixkv.core.errors import InvalidArgument
from radixkv.core.lease import Holding, Lease
from radixkv.core.results import Committed, ContentRange
from radixkv.core.state import State
from radixkv.core.tokens import TOKEN_BYTES, check_tokens

MIN_TIMED_TOKENS = 64  # fewer say more about the round trip than about the computation


def commit(
    state: State,
    lease: Lease,
    upto: int,
    tokens: bytes,
    blocks: Sequence[int],
    contents: Sequence[ContentRange],
    now_ms: int,
) -> Committed:
    """See Cache.commit."""
    _check(state, lease, upto, tokens, blocks)
    known = lease.committed * state.block_size + len(lease.pending) // TOKEN_BYTES
    table = lease.node.tree.contents
    resolved = table.resolve(tokens, contents, lease.placeholders, intern=True, offset=known)
    flight.unregister(lease)
    lease.contents += resolved.contents
    if lease.cacheable >= known:
        lease.cacheable = resolved.cacheable
    lease.pending += resolved.tokens
    lease.session.reserve.difference_update(blocks)
    lease.session.private_blocks += len(blocks)
    lease.table.extend(blocks)
    before = lease.committed
    duplicates = _seal(state, lease, upto // state.block_size)
    _time_prefill(state, lease, before, now_ms)
    flight.register(lease)
    state.counters.commits += 1
    state.on_progress(lease, False)
    return Committed(lease.published * state.block_size, duplicates)


def _time_prefill(state: State, lease: Lease, before: int, now_ms: int) -> None:
    """Learn from commits of the prompt how fast this worker computes."""
    tokens = (lease.committed - before) * state.block_size
    if not now_ms or not tokens:
        return
    if tokens >= MIN_TIMED_TOKENS and lease.committed * state.block_size <= lease.prompt_tokens:
        state.transfers.costs.prefilled(tokens, (now_ms - lease.timed_ms) / 1000)
    lease.timed_ms = now_ms


def _check(state: State, lease: Lease, upto: int, tokens: bytes, blocks: Sequence[int]) -> None:
    size = state.block_size
    check_tokens(tokens, state.config.max_tokens)
    known = lease.committed * size + (len(lease.pending) + len(tokens)) // TOKEN_BYTES
    room = (len(lease.table) + len(blocks)) * size
    state.check_length(len(lease.table) + len(blocks))
    if not lease.committed * size <= upto <= known <= room:
        raise InvalidArgument(
            f"upto {upto}: {lease.committed * size} tokens are committed, {known} known,"
            f" and the lease has room for {room}"
        )
    reserve = lease.session.reserve
    if len(set(blocks)) != len(blocks) or not reserve.issuperset(blocks):
        raise InvalidArgument("a block is named that is not in this session's reserve")


def _seal(state: State, lease: Lease, full: int) -> int:
    """Seal blocks up to `full`; returns how many of them the tree had already."""
    first = lease.committed
    if full == first:
        return 0
    ids = lease.table[first:full]
    publishable = 0
    if lease.published == first and not lease.node.detached:
        publishable = max(min(full, lease.cacheable // state.block_size) - first, 0)
    duplicates = 0
    if publishable:
        tokens = lease.pending[: publishable * state.block_bytes]
        duplicates = _publish(state, lease, tokens, ids[:publishable])
    kept = ids[:duplicates] + ids[publishable:]
    if kept:
        _hold(lease, kept)
    lease.committed = full
    lease.published += publishable
    lease.pending = lease.pending[(full - first) * state.block_bytes :]
    state.counters.committed_blocks += full - first
    state.counters.duplicate_blocks += duplicates
    return duplicates


def _publish(state: State, lease: Lease, tokens: bytes, ids: array) -> int:
    index, start = state.index, lease.node
    end, duplicates = index.insert(start, tokens, ids, start.locks == 1, lease.marks)
    if end is not start:
        index.lock(end)
        index.unlock(start)
        lease.node = end
    state.copies.publish(ids[duplicates:], end)
    index.touch(end)
    state.offload.published(end)
    lease.session.private_blocks -= len(ids) - duplicates
    return duplicates


def _hold(lease: Lease, blocks: array) -> None:
    """Keep committed blocks that are not the tree's until the lease and its forks end."""
    last = lease.holdings[-1] if lease.holdings else None
    if last is not None and last.refs == 1:
        last.blocks.extend(blocks)
    else:
        lease.holdings.append(Holding(list(blocks)))
