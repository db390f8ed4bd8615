"""Fork: new leases beside their parent, sharing its sealed blocks, with the tail copied at once.

The copy is eager, so no later write needs to ask whether its block is shared: a block table never
changes under a kernel.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from radixkv.core.errors import FailedPrecondition, InvalidArgument
from radixkv.core.lease import Lease
from radixkv.core.results import Forked
from radixkv.core.state import State
from radixkv.core.tokens import TOKEN_BYTES


def fork(
    state: State, parent: Lease, child_ids: Sequence[int], upto: int, tail_block: int
) -> Forked:
    """See Cache.fork."""
    session = parent.session
    rest = _check(state, parent, upto, tail_block)
    if not child_ids or len(set(child_ids)) != len(child_ids):
        raise InvalidArgument("child ids must be distinct and at least one")
    for child_id in child_ids:
        state.check_new_lease(session, child_id, len(child_ids))
    tails = state.take_private(session, len(child_ids)) if rest else array("i")
    copies = []
    for number, child_id in enumerate(child_ids):
        table = parent.table[: parent.committed]
        if rest:
            table.append(tails[number])
            copies.append(state.copies.start(tail_block, tails[number], rest, None))
        _add_child(state, parent, child_id, table, parent.pending[: rest * TOKEN_BYTES])
    state.counters.forks += len(child_ids)
    state.counters.copied_blocks += len(copies)
    return Forked(tuple(tails), tuple(copies))


def _check(state: State, parent: Lease, upto: int, tail_block: int) -> int:
    full, rest = divmod(upto, state.block_size)
    if upto < 0 or full != parent.committed:
        raise FailedPrecondition(
            f"fork at {upto} tokens, but {parent.committed * state.block_size} are"
            " committed: commit every full block below the fork, and none above it"
        )
    if not rest:
        if tail_block:
            raise InvalidArgument("a fork at a block boundary has no tail block")
        return 0
    in_table = full < len(parent.table) and parent.table[full] == tail_block
    from_reserve = full >= len(parent.table) and tail_block in parent.session.reserve
    if not in_table and not from_reserve:
        raise InvalidArgument(f"block {tail_block} is not this lease's tail")
    return rest


def _add_child(state: State, parent: Lease, child_id: int, table: array, pending: bytes) -> None:
    for holding in parent.holdings:
        holding.refs += 1
    for content in parent.contents:
        parent.node.tree.contents.refer(content, 1)
    parent.session.leases[child_id] = Lease(
        parent.session, child_id, parent.node, table, parent.committed, parent.published,
        pending, parent.cacheable, parent.placeholders, parent.contents,
        list(parent.holdings), marks=parent.marks,
    )  # fmt: skip
    state.index.lock(parent.node)
