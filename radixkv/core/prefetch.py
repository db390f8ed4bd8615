"""Prefetches: bringing a prefix up ahead of its use, and behind the back of a best-effort Acquire.

A prefetch is an Acquire that is never granted: it waits for the same loads and probes, matches anew
after each, and ends when nothing more is to be brought up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.core.below import MAX_LOAD_WAIT_MS, wait_for
from radixkv.core.errors import Exhausted
from radixkv.core.lease import Session, Waiter
from radixkv.core.onboard import Load
from radixkv.core.results import AcquireRequest, OnboardReason, PrefetchEnded, PrefetchStarted
from radixkv.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.core.state import State

MAX_PREFETCHES = 1024  # at once, those of tools
MAX_BACKGROUND = 64  # at once, for best-effort Acquires; more are not begun


class Prefetches:
    """All prefetches of a cache. Their waiters belong to no session."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._nobody = Session(0)
        self._handles: dict[int, Waiter] = {}
        self._background: set[Waiter] = set()

    def start(self, request: AcquireRequest, now_ms: int) -> PrefetchStarted:
        """Begin; the end comes as an event unless the handle is 0. Raises Exhausted."""
        if len(self._handles) >= MAX_PREFETCHES:
            raise Exhausted(f"{MAX_PREFETCHES} prefetches are running")
        handle = self._state.transfers.next_id()
        waiter = Waiter(self._nobody, handle, request, 0, now_ms, 0)
        cached, loading = self._go_on(waiter, now_ms)
        if waiter.load is not None:
            self._handles[handle] = waiter
        return PrefetchStarted(
            handle if waiter.load is not None else 0, cached, loading,
            waiter.reason or OnboardReason.LOADED,
        )  # fmt: skip

    def in_background(self, request: AcquireRequest, now_ms: int) -> None:
        """Begin one that nobody hears of."""
        if len(self._background) >= MAX_BACKGROUND:
            return
        waiter = Waiter(self._nobody, 0, request, 0, now_ms, 0)
        self._go_on(waiter, now_ms)
        if waiter.load is not None:
            self._background.add(waiter)

    def cancel(self, handle: int) -> bool:
        """End it; False if it is over. The event comes all the same."""
        waiter = self._handles.pop(handle, None)
        if waiter is None:
            return False
        self._state.onboard.leave(waiter)
        waiter.done = True
        self._tell(waiter, self._cached_bytes(waiter))
        return True

    def knows(self, waiter: Waiter) -> bool:
        """Whether this is a prefetch, not an Acquire."""
        return waiter.session is self._nobody

    def is_asked_for(self, waiter: Waiter) -> bool:
        """Whether somebody wants this prefetch, whatever it costs."""
        return self.knows(waiter) and waiter.lease_id != 0

    def retry(self, waiter: Waiter, now_ms: int) -> None:
        """What it waited for is over."""
        if waiter.done:
            return
        if now_ms < waiter.since_ms + MAX_LOAD_WAIT_MS:
            self._go_on(waiter, now_ms)
        if waiter.load is not None:
            return
        waiter.done = True
        self._background.discard(waiter)
        if self._handles.pop(waiter.lease_id, None) is not None:
            self._tell(waiter, self._cached_bytes(waiter))

    def waiters(self) -> list[Waiter]:
        """All that wait; for checks."""
        return [*self._handles.values(), *self._background]

    def _go_on(self, waiter: Waiter, now_ms: int) -> tuple[int, int]:
        """Wait for what is next, if anything; tokens on the gpu and in the load."""
        state, request = self._state, waiter.request
        tree = state.index.tree(request.namespace)
        state.index.hold(tree)
        try:
            resolved = tree.contents.resolve(
                request.tokens, request.contents, request.placeholder_tokens, intern=False
            )
            limit = min(len(resolved.tokens), resolved.cacheable * TOKEN_BYTES)
            limit -= limit % state.block_bytes
            match = tree.match(resolved.tokens, limit)
            held = state.index.on_gpu(match).length
            try:
                found = wait_for(state, waiter, match, resolved.tokens, limit, now_ms)
            except Exhausted:
                waiter.reason = OnboardReason.NO_ROOM
                found = None
        finally:
            state.index.let_go(tree)
        if found is None:
            return held // TOKEN_BYTES, 0
        state.onboard.follow(found, waiter)
        loading = len(found.sources) * state.block_size if isinstance(found, Load) else 0
        return held // TOKEN_BYTES, min(loading, (limit - held) // TOKEN_BYTES)

    def _cached_bytes(self, waiter: Waiter) -> tuple[int, int]:
        """Bytes on the gpu, and bytes below it, of what was asked for."""
        request = waiter.request
        tree = self._state.index.trees.get(request.namespace)
        if tree is None:
            return 0, 0
        resolved = tree.contents.resolve(
            request.tokens, request.contents, request.placeholder_tokens, intern=False
        )
        limit = min(len(resolved.tokens), resolved.cacheable * TOKEN_BYTES)
        match = tree.match(resolved.tokens, limit - limit % self._state.block_bytes)
        held = self._state.index.on_gpu(match).length
        return held, match.length - held

    def _tell(self, waiter: Waiter, held_and_left: tuple[int, int]) -> None:
        blocks = sum(behind - first for _, first, behind in waiter.onboarded)
        left = held_and_left[1] // TOKEN_BYTES
        self._state.events.append(
            PrefetchEnded(waiter.lease_id, blocks * self._state.block_size, left)
        )
