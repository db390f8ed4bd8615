"""What an Acquire or Prefetch does about blocks that are not on the gpu but below it.

The decision is made anew at each attempt: what to wait for, or, if nothing (more) is to be brought
up, why. `Waiter.reason` is final once it is set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from radixkv.core.errors import Exhausted
from radixkv.core.lease import Waiter
from radixkv.core.onboard import Load, Source
from radixkv.core.probing import Question, names_of
from radixkv.core.results import Onboarded, OnboardReason
from radixkv.core.tier_ops import Place
from radixkv.core.tree import Match, Node

if TYPE_CHECKING:
    from radixkv.core.state import State

MAX_LOAD_WAIT_MS = 10_000  # also where onboarding waits without a timeout of its own


def wait_for(
    state: State, waiter: Waiter, match: Match, tokens: bytes, limit: int, now_ms: int
) -> Load | Question | None:
    """What brings more of tokens[:limit] to the gpu and is to be waited for; None: nothing.

    Starts loads and probes, and may split edges: `match` is not valid any more. Raises Exhausted
    if there is no room for what an Acquire needs in all.
    """
    if waiter.reason is not None:
        return None
    held = state.index.on_gpu(match)
    if held.length < match.length:
        found: Load | Question | None = _from_below(state, waiter, match, held, now_ms)
    else:
        found = _from_remote(state, waiter, match, tokens, limit, now_ms)
    if found is not None:
        if held.length < match.length:
            waiter.held_before = held.length
        elif isinstance(found, Load):
            waiter.remote_before = held.length
        if waiter.load_deadline_ms is None:
            config = state.config
            timeout = config.onboarding == "timeout"
            waiter.load_deadline_ms = now_ms + (
                config.onboard_timeout_ms if timeout else MAX_LOAD_WAIT_MS
            )
    return found


def _from_below(
    state: State, waiter: Waiter, match: Match, held: Match, now_ms: int
) -> Load | None:
    sources = state.onboard.sources(match, held, now_ms)
    depth = held.length // state.index.block_bytes
    grown = held.length > waiter.held_before
    return _load(state, waiter, match.node, depth, grown, sources, now_ms)


def _from_remote(
    state: State, waiter: Waiter, match: Match, tokens: bytes, limit: int, now_ms: int
) -> Load | Question | None:
    suspended = state.transfers.health[Place.REMOTE].reads.is_suspended(now_ms)
    if not state.config.remote or match.length >= limit or suspended:
        return None
    node = state.index.settle(match)
    rest = tokens[match.length : limit]
    if waiter.on_remote is None:
        return state.probing.ask(node, rest)
    names = list(
        takewhile(
            lambda name: not state.erasing.is_erased(name.digest),
            names_of(node, rest, waiter.on_remote),
        )
    )
    if not names:
        return None
    sources = [Source(Place.REMOTE, 0, name) for name in names]
    depth = match.length // state.index.block_bytes
    grown = match.length > waiter.remote_before
    return _load(state, waiter, node, depth, grown, sources, now_ms)


def _load(
    state: State, waiter: Waiter, node: Node, depth: int, grown: bool,
    sources: Sequence[Source], now_ms: int,
) -> Load | None:  # fmt: skip
    """A load of the sources that pay, new or running; None with a reason if there is none."""
    if not sources:
        waiter.reason = OnboardReason.FAILED
        return None
    load = state.onboard.find(sources[0])
    if load is not None:
        return load
    if not grown:
        waiter.reason = OnboardReason.FAILED  # the last load brought nothing
        return None
    asked_for = state.prefetches.is_asked_for(waiter)
    count = len(sources) if asked_for else state.onboard.worthwhile(sources)
    if not count:
        waiter.reason = OnboardReason.BREAK_EVEN
        state.counters.break_even_acquires += 1
        return None
    _check_room(state, waiter, depth)
    return state.onboard.start(node, depth, sources[:count], may_drop(state, waiter, now_ms))


def _check_room(state: State, waiter: Waiter, depth: int) -> None:
    """A load is of use only if there will be room for the rest too."""
    need = total_blocks(state, waiter) - depth
    if need > state.gpu.num_available:
        raise Exhausted(state.gpu.shortage(need))


def total_blocks(state: State, waiter: Waiter) -> int:
    """Blocks of the whole sequence that an Acquire asks for, cached ones included."""
    request = waiter.request
    return -(-len(request.tokens) // state.block_bytes) + request.extra_blocks


def may_drop(state: State, waiter: Waiter, now_ms: int) -> bool:
    """Whether blocks may be evicted that should have a copy below first."""
    if state.offload.is_stuck(Place.GPU):
        return True
    return waiter.drop_at_ms is not None and now_ms >= waiter.drop_at_ms


def onboarded(state: State, waiter: Waiter, cached_tokens: int, left: int) -> Onboarded | None:
    """What the reply says of `cached_tokens`, and of `left` behind them; None if none lay below."""
    cached = cached_tokens // state.block_size
    came_from = {
        block: place
        for place, first, behind in waiter.onboarded  # again, if it was evicted meanwhile
        for block in range(first, min(behind, cached))
    }
    if not left and not came_from:
        return None
    blocks = Counter(came_from.values())
    tokens = {place: number * state.block_size for place, number in blocks.items()}
    for place, number in tokens.items():
        state.transfers.health[place].hit_tokens += number
    reason = waiter.reason or OnboardReason.FAILED if left else OnboardReason.LOADED
    return Onboarded(
        reason, tokens.get(Place.CPU, 0), tokens.get(Place.NVME, 0),
        tokens.get(Place.REMOTE, 0), left,
    )  # fmt: skip
