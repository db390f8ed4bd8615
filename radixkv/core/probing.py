"""Probes: asking the remote which blocks it has behind what is cached here.

One question per Acquire, of all its missing blocks; equal questions share one probe. Content has no
name before its prompt holds its interned ids, so blocks behind the first content are not asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from radixkv.core.identity import end_digest, prefix_digests
from radixkv.core.lease import Waiter
from radixkv.core.tier_ops import BlockIdentity, Place, Probe
from radixkv.core.tokens import TOKEN_BYTES
from radixkv.core.transfers import Transfers
from radixkv.core.tree import Node

MAX_PROBED_BLOCKS = 2048


@dataclass(slots=True, eq=False)
class Question:
    """A probe under way, and who waits for its answer."""

    digests: tuple[bytes, ...]
    waiters: list[Waiter] = field(default_factory=list)
    is_stale: bool = False  # something was invalidated after it was asked


class Probing:
    """All probes of a cache."""

    def __init__(self, transfers: Transfers, ended: list[Waiter]) -> None:
        self._transfers = transfers
        self._ended = ended
        self._asked: dict[int, Question] = {}
        self._by_digests: dict[tuple[bytes, ...], Question] = {}

    def ask(self, node: Node, tokens: bytes) -> Question | None:
        """Which of the blocks `tokens` behind the end of `node` the remote has; None: no block."""
        limit = _nameable(tokens, node.tree.block_bytes)
        if not limit:
            return None
        digests = tuple(prefix_digests(node.tree, end_digest(node), tokens[:limit]))
        question = self._by_digests.get(digests)
        if question is None:
            question = Question(digests)
            probe_id = self._transfers.next_id()
            self._asked[probe_id] = self._by_digests[digests] = question
            self._transfers.ops.append(Probe(probe_id, digests))
        return question

    def done(self, probe_id: int, present: Sequence[bool] | None, now_ms: int) -> None:
        """The remote answered, or (None) did not: that counts as having nothing."""
        question = self._asked.pop(probe_id)
        if not question.is_stale:
            del self._by_digests[question.digests]
        reads = self._transfers.health[Place.REMOTE].reads
        if present is None:
            reads.failed(now_ms)
        else:
            reads.worked()
        count = 0
        for there in present or ():
            if not there or question.is_stale:
                break
            count += 1
        for waiter in question.waiters:
            waiter.on_remote = question.digests[:count]
            waiter.load = None
            self._ended.append(waiter)
        question.waiters.clear()


    def forget(self) -> None:
        """Answers to what was asked until now are too old to act on."""
        for question in self._by_digests.values():
            question.is_stale = True
        self._by_digests.clear()


def names_of(node: Node, tokens: bytes, digests: Sequence[bytes]) -> list[BlockIdentity]:
    """Identities of the leading blocks of `tokens` behind `node` that `digests` name."""
    block = node.tree.block_bytes
    wanted = set(digests)
    names: list[BlockIdentity] = []
    if not wanted:
        return names
    parent = end_digest(node)
    limit = _nameable(tokens, block)
    for at, digest in enumerate(prefix_digests(node.tree, parent, tokens[:limit])):
        if digest not in wanted:
            break
        names.append(BlockIdentity(digest, parent, tokens[at * block : (at + 1) * block]))
        parent = digest
    return names


def _nameable(tokens: bytes, block: int) -> int:
    """Bytes (whole blocks) of `tokens` to ask for: no content, and not too many."""
    limit = min(len(tokens) - len(tokens) % block, MAX_PROBED_BLOCKS * block)
    signs = tokens[TOKEN_BYTES - 1 : limit : TOKEN_BYTES]
    if signs.isascii():
        return limit
    first = next(at for at, sign in enumerate(signs) if sign >= 128)
    return first * TOKEN_BYTES // block * block
