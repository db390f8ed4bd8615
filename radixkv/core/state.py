"""The state that the parts of the cache share, and how leases begin and end in it."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from radixkv.core import flight
from radixkv.core.copies import Copies
from radixkv.core.erasing import Erasing
from radixkv.core.errors import AlreadyExists, Exhausted, InvalidArgument, NotFound, TooLarge
from radixkv.core.lease import Holding, Lease, Session
from radixkv.core.offload import Offload
from radixkv.core.onboard import Onboard
from radixkv.core.pins import Pins
from radixkv.core.prefetch import Prefetches
from radixkv.core.prefix_index import PrefixIndex
from radixkv.core.probing import Probing
from radixkv.core.results import CacheConfig, Counters, Event
from radixkv.core.tier_ops import Place
from radixkv.core.tokens import TOKEN_BYTES
from radixkv.core.transfers import Transfers


class SessionFull(Exhausted):
    """This session's own cap is reached; others are not affected."""


class Unclean(Exhausted):
    """There is room, once copies of cached blocks have gone down."""


class State:
    """Sessions, trees and blocks of one pool; `on_progress` hears of commits and ends of leases."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.block_bytes = config.block_size * TOKEN_BYTES
        self.max_private = config.max_private_blocks or config.num_blocks
        self.max_reserve = config.max_reserve_blocks or max(config.num_blocks // 8, 1)
        self.index = PrefixIndex(config)
        self.gpu = self.index.gpu
        self.copies = Copies(self.index)
        self.transfers = Transfers(self.index)
        self.sessions: dict[int, Session] = {}
        self.events: list[Event] = []
        self.counters = Counters()
        self.offload = Offload(self)
        self.onboard = Onboard(self)
        self.probing = Probing(self.transfers, self.onboard.ended)
        self.prefetches = Prefetches(self)
        self.erasing = Erasing(self.index, self.transfers, self.events)
        self.pins = Pins(self.index, config)
        self.on_progress: Callable[[Lease, bool], None] = lambda lease, ended: None

    def owned_ids(self, place: Place) -> list[int]:
        """Blocks that only a transfer or load has; for books and checks."""
        if place is Place.GPU:
            return self.onboard.target_ids()
        return [
            block
            for running in self.transfers.running.values()
            if running.op.target is place
            for block in running.op.target_ids
        ]

    def session(self, session_id: int) -> Session:
        """The open session of this id; NotFound otherwise."""
        try:
            return self.sessions[session_id]
        except KeyError:
            raise NotFound(f"no session {session_id}") from None

    def lease(self, session_id: int, lease_id: int) -> Lease:
        """A live lease of this session; NotFound otherwise."""
        lease = self.session(session_id).leases.get(lease_id)
        if lease is None:
            raise NotFound(f"no lease {lease_id} in this session")
        return lease

    def check_new_lease(self, session: Session, lease_id: int, count: int = 1) -> None:
        """Raise AlreadyExists or Exhausted if the session cannot have this lease too."""
        if lease_id in session.leases or lease_id in session.waiting:
            raise AlreadyExists(f"lease {lease_id} exists in this session")
        if len(session.leases) + len(session.waiting) + count > self.config.max_leases:
            raise SessionFull(f"a session may have {self.config.max_leases} leases")

    def check_private(self, session: Session, count: int) -> None:
        """Raise if `count` more private blocks break the session's cap, or can never fit."""
        if count > self.max_private:
            raise TooLarge(f"{count} blocks wanted, a session may hold {self.max_private}")
        held = session.private_blocks + len(session.reserve)
        if held + count > self.max_private:
            raise SessionFull(
                f"{count} blocks wanted, this session holds {held} of the"
                f" {self.max_private} it may hold"
            )

    def check_length(self, num_blocks: int) -> None:
        """Raise InvalidArgument if a sequence of so many blocks is longer than any may be."""
        if num_blocks * self.block_size > self.config.max_tokens + self.block_size:
            raise InvalidArgument(f"a sequence may have at most {self.config.max_tokens} tokens")

    def take(self, place: Place, count: int, may_drop: bool = True) -> array:
        """`count` blocks of a place, evicting if need be; Exhausted if there are not as many.

        Without `may_drop` it raises Unclean rather than lose what a slower place should have first.
        """
        state = self.index.places[place]
        short = count - state.pool.num_free
        if short > 0:
            if short > state.num_cached:
                waits = not may_drop and self.offload.is_moving(place)
                raise (Unclean if waits else Exhausted)(state.shortage(count))
            evicted = self.index.evict(place, short, may_drop or not state.has_slower)
            if evicted < short:
                assert not may_drop, "cached blocks that cannot be evicted"
                raise Unclean(state.shortage(count))
        return state.pool.take(count)

    def take_private(self, session: Session, count: int, may_drop: bool = True) -> array:
        """`count` blocks for leases of this session, or Exhausted and no block taken."""
        self.check_private(session, count)
        taken = self.take(Place.GPU, count, may_drop)
        session.private_blocks += count
        return taken

    def free_private(self, session: Session, ids: array | list[int]) -> None:
        """Blocks that a lease of this session owned go back to the pool."""
        session.private_blocks -= len(ids)
        self.gpu.pool.free(ids)

    def end_lease(self, lease: Lease) -> int:
        """Give back all that `lease` holds; returns the tokens of it that stay cached."""
        session = lease.session
        flight.unregister(lease)
        del session.leases[lease.lease_id]
        self.free_private(session, lease.table[lease.committed :])
        for holding in lease.holdings:
            self.drop_holding(session, holding)
        node = lease.node
        kept = lease.published * self.block_size
        if node.detached:
            path = node.tree.path(node)
            kept = sum(len(step.tokens) for step in path if not step.detached) // TOKEN_BYTES
        for content in lease.contents:
            node.tree.contents.refer(content, -1)
        self.index.unlock(node)
        if node.parent is not None:
            self.index.join_up(node)
        self.on_progress(lease, True)
        return kept

    def drop_holding(self, session: Session, holding: Holding) -> None:
        """One lease fewer refers to these blocks."""
        holding.refs -= 1
        if not holding.refs:
            self.free_private(session, holding.blocks)
