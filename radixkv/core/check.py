"""Every invariant of the core, verified from scratch in O(everything).

Tests call it after each operation; `radixkv-server --check-invariants` runs it live.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from radixkv.core.blocks import BlockPool
from radixkv.core.results import Books
from radixkv.core.tier_ops import Place
from radixkv.core.tree import GPU, Node

if TYPE_CHECKING:
    from radixkv.core.acquires import Acquires
    from radixkv.core.lease import Lease
    from radixkv.core.state import State


def check(state: State, acquires: Acquires, books: Books) -> None:
    """Raise AssertionError if anything is inconsistent. Changes nothing."""
    nodes = _nodes(state)
    _check_shape(state, nodes)
    _check_locks(state, nodes)
    _check_pins(state, nodes)
    _check_candidates(state, nodes)
    _check_counts(state, nodes)
    _check_blocks(state, nodes)
    _check_leases(state)
    _check_contents(state, nodes)
    _check_waiters(state, acquires)
    parts = (books.leased, books.in_flight, books.reserved, books.pinned, books.cached, books.free)
    assert min(parts) >= 0 and sum(parts) == books.total, f"books do not balance: {books}"


def _nodes(state: State) -> list[Node]:
    found = [node for tree in state.index.trees.values() for node in tree.walk()]
    return found + list(state.index.detached)


def _all_leases(state: State) -> list[Lease]:
    return [lease for session in state.sessions.values() for lease in session.leases.values()]


def _check_shape(state: State, nodes: list[Node]) -> None:
    block = state.block_bytes
    for node in nodes:
        assert node.num_blocks > 0 and len(node.tokens) % block == 0, "ragged edge"
        assert len(node.tokens) <= state.index.max_edge_bytes or node.num_blocks == 1, "long edge"
        assert node.parent is not None
        assert node.children is None or len(node.children), "empty children"
        longest = max(map(len, node.residency))
        assert longest == node.num_blocks or node.locks or node.pins, "an edge without blocks"
        assert longest <= node.num_blocks, "more blocks than tokens"
        for child in node.children or ():
            assert child.parent is node and child.detached == node.detached, "wrong parent"
        if not node.detached:
            assert node.parent.children is not None
            assert node.parent.children.get(node.tokens[:block]) is node, "wrong key"
            assert node.touched <= node.parent.touched, "child more recent than its parent"
    for tree in state.index.trees.values():
        detached = sum(node.tree is tree for node in state.index.detached)
        assert tree.num_nodes == len(tree.walk()) + detached, "node count"
        assert tree.root.children is not None or tree.root.locks, "empty tree kept"


def _check_locks(state: State, nodes: list[Node]) -> None:
    ends = Counter(id(lease.node) for lease in _all_leases(state))
    ends.update(id(node) for node in state.copies.locked_nodes())
    ends.update(id(node) for node in state.offload.locked_nodes())
    ends.update(id(load.node) for load in state.onboard.loads)
    roots = [tree.root for tree in state.index.trees.values()]
    locked_children = Counter(id(node.parent) for node in nodes if node.locks)
    for node in nodes + roots:
        expected = ends[id(node)] + locked_children[id(node)]
        assert node.locks == expected, f"{node.locks} locks, {expected} expected"
        assert not node.detached or node.locks, "detached node without locks"
    known = {id(node) for node in nodes + roots}
    assert known.issuperset(ends), "a lease ends at a node that is gone"


def _check_pins(state: State, nodes: list[Node]) -> None:
    ends = Counter(id(node) for node in state.pins.nodes())
    roots = [tree.root for tree in state.index.trees.values()]
    pinned_children = Counter(id(node.parent) for node in nodes if node.pins)
    for node in nodes + roots:
        assert node.pins == ends[id(node)] + pinned_children[id(node)], "count of pins"


def _check_candidates(state: State, nodes: list[Node]) -> None:
    for place in state.index.places:
        at = place.place
        for node in nodes:
            below = [child for child in node.children or () if child.residency[at]]
            if node.children is not None and not node.detached:
                assert node.children.resident[at] == len(below), "count of resident children"
            assert not below or len(node.residency[at]) == node.num_blocks, "a hole in a prefix"
            free = not (node.locks or node.pins or node.detached)
            candidate = bool(free and node.residency[at] and not below)
            assert (node in place.policy) == candidate, "eviction frontier is wrong"
            unclean = state.index.covered(node, at) < len(node.residency[at])
            known = (node in place.clean, node in place.unclean)
            listed = place.has_slower and candidate
            assert known == (listed and not unclean, listed and unclean), "clean or not"


def _check_counts(state: State, nodes: list[Node]) -> None:
    for place in state.index.places:
        locked = pinned = cached = clean = 0
        for node in nodes:
            count = len(node.residency[place.place])
            if node.locks:
                locked += count
            elif node.pins:
                pinned += count
            else:
                cached += count
                if place.has_slower:
                    clean += min(count, state.index.covered(node, place.place))
        counted = (place.num_locked, place.num_pinned, place.num_cached, place.num_clean)
        assert counted == (locked, pinned, cached, clean), f"counts of {place.place.name}"


def _check_blocks(state: State, nodes: list[Node]) -> None:
    owners: Counter[int] = Counter()
    for node in nodes:
        owners.update(node.residency[GPU])
    for session in state.sessions.values():
        holdings = {id(h): h for lease in session.leases.values() for h in lease.holdings}
        refs = Counter(id(h) for lease in session.leases.values() for h in lease.holdings)
        own = [block for h in holdings.values() for block in h.blocks]
        assert all(refs[key] == h.refs for key, h in holdings.items()), "holding references"
        for lease in session.leases.values():
            own.extend(lease.table[lease.committed :])
        assert len(own) == session.private_blocks, "private blocks of a session"
        held = session.private_blocks + len(session.reserve)
        assert held <= state.max_private, "session over its cap"
        owners.update(own)
        owners.update(session.reserve)
    owners.update(state.owned_ids(Place.GPU))
    _check_owners(state.gpu.pool, owners)
    for place in state.index.places[1:]:
        owners = Counter(block for node in nodes for block in node.residency[place.place])
        owners.update(state.owned_ids(place.place))
        _check_owners(place.pool, owners)


def _check_owners(pool: BlockPool, owners: Counter[int]) -> None:
    """`owners` are the blocks in the tree or in somebody's hands."""
    owners.update(pool.parked)
    owners.update(pool.free_ids())
    assert all(count == 1 for count in owners.values()), "a block in two states"
    assert set(owners) == set(range(1, pool.num_blocks + 1)), "a block in no state"
    assert not set(pool.free_ids()).intersection(pool.busy), "a free block is busy"


def _check_leases(state: State) -> None:
    for lease in _all_leases(state):
        tree = lease.node.tree
        assert lease.session.leases[lease.lease_id] is lease
        assert lease.published <= lease.committed <= len(lease.table)
        path = [block for node in tree.path(lease.node) for block in node.residency[GPU]]
        assert len(path) == lease.published, "a lease does not end where its node does"
        held = {block for holding in lease.holdings for block in holding.blocks}
        for position, block in enumerate(lease.table[: lease.committed]):
            mine = position < lease.published and path[position] == block
            assert mine or block in held, "a sealed block that nobody keeps"
        room = (len(lease.table) - lease.committed) * state.block_bytes
        assert len(lease.pending) <= room, "more known tokens than room"
        if lease.flight_key is not None:
            assert lease.node.pending is not None
            assert lease in lease.node.pending[lease.flight_key], "flight list"
            assert lease.pending.startswith(lease.flight_key)
    for tree in state.index.trees.values():
        listed = sum(
            len(leases)
            for node in [tree.root, *tree.walk()]
            for leases in (node.pending or {}).values()
        )
        listed += sum(
            len(leases)
            for node in state.index.detached
            if node.tree is tree
            for leases in (node.pending or {}).values()
        )
        assert tree.num_pending == listed, "flight count"


def _check_contents(state: State, nodes: list[Node]) -> None:
    for tree in state.index.trees.values():
        if not len(tree.contents):
            assert all(not _negatives(node) for node in nodes if node.tree is tree)
            continue
        expected: Counter[bytes] = Counter()
        for node in nodes:
            if node.tree is tree:
                expected.update(tree.contents.owner(token) for token in _negatives(node))
        for lease in _all_leases(state):
            if lease.node.tree is tree:
                expected.update(content.content_id for content in lease.contents)
        assert dict(expected) == tree.contents.references(), "content references"


def _negatives(node: Node) -> list[int]:
    return [token for token in memoryview(node.tokens).cast("i") if token < 0]


def _check_waiters(state: State, acquires: Acquires) -> None:
    waiters = [w for session in state.sessions.values() for w in session.waiting.values()]
    assert len(waiters) == acquires.num_waiting, "waiter count"
    for waiter in waiters:
        assert not waiter.done and waiter.lease_id not in waiter.session.leases
        places = acquires.places(waiter)
        assert places == 1, f"a waiter is in {places} places"
