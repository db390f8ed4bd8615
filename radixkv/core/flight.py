"""Single flight: which live lease is computing what a new prompt needs.

A lease that has full blocks of its prompt uncommitted is listed at the node where it ends, under
its next block's tokens. A new prompt passes those nodes on its way; what it shares with a listed
prompt beyond its own match is being computed already.
"""

from __future__ import annotations

from typing import NamedTuple

from radixkv.core.lease import Lease
from radixkv.core.tokens import common_length
from radixkv.core.tree import Match

MAX_CANDIDATES = 8  # leases looked at per node; more with the same next block are the same prompt


class Flight(NamedTuple):
    """The lease that extends a match furthest; it will have `goal` bytes when it is done."""

    leader: Lease
    goal: int


def register(lease: Lease) -> None:
    """List `lease` if it has at least one publishable full block uncommitted."""
    assert lease.flight_key is None
    tree = lease.node.tree
    block = tree.block_bytes
    if len(lease.pending) < block or lease.node.detached:
        return
    if lease.cacheable * 4 < (lease.committed + 1) * block or lease.published != lease.committed:
        return
    key = lease.pending[:block]
    if lease.node.pending is None:
        lease.node.pending = {}
    lease.node.pending.setdefault(key, []).append(lease)
    lease.flight_key = key
    tree.num_pending += 1


def unregister(lease: Lease) -> None:
    """Take `lease` off the list, if it is on it."""
    key = lease.flight_key
    if key is None:
        return
    pending = lease.node.pending
    assert pending is not None
    pending[key].remove(lease)
    if not pending[key]:
        del pending[key]
        if not pending:
            lease.node.pending = None
    lease.flight_key = None
    lease.node.tree.num_pending -= 1


def find(match: Match, tokens: bytes, limit: int) -> Flight | None:
    """Who computes what follows `match` within tokens[:limit] (bytes). Reads only.

    O(nodes on the path) when any lease of the namespace has something pending, else O(1).
    """
    node, inside, at = match
    tree = node.tree
    if not tree.num_pending:
        return None
    block = tree.block_bytes
    best: Flight | None = None
    if inside < len(node.tokens):
        assert node.parent is not None
        node, at = node.parent, at - inside
    while node is not None:
        if node.pending is not None:
            for lease in node.pending.get(tokens[at : at + block], ())[:MAX_CANDIDATES]:
                bound = min(limit, lease.cacheable * 4) - at
                shared = common_length(lease.pending, tokens, at, bound)
                goal = at + shared - shared % block
                if goal > match.length and (best is None or goal > best.goal):
                    best = Flight(lease, goal)
        at -= len(node.tokens)
        node = node.parent  # type: ignore[assignment]
    return best
