"""What blocks there are, what each of them must hold, and which of them may be found.

A `KnownBlock` is one block of a sequence in one namespace: its digest, its identity, its bytes (one
fingerprint per position). There is no tree and no residency here: whether a block *may* be found is
only a matter of what was published, invalidated and forgotten since. Where it lies, and whether it
was evicted, the core alone knows. Digests are derived here a second time, from the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush

from xxhash import xxh3_64_intdigest

from radixkv.core.results import ContentRange
from radixkv.core.tier_ops import BlockIdentity, ContentPiece
from tests.naive_model import Atom, atoms_of, fingerprints, int32

NEVER = 2**62  # ms
Content = tuple[bytes, ...]  # of a block: a fingerprint per position


def root_digest(namespace: bytes) -> bytes:
    """The start of a namespace's digest chain."""
    return blake2b(namespace, digest_size=16, person=b"radixkv-root").digest()


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """The digest of a block with these canonical tokens behind `parent`."""
    return parent[:6] + blake2b(parent + tokens, digest_size=10, person=b"radixkv-block").digest()


def canonical(atom: Atom) -> int:
    """A token as digests and records have it: derived from id and offset where content is."""
    if isinstance(atom, int):
        return atom
    content_id, offset = atom
    mixed = (xxh3_64_intdigest(content_id) + offset * 0x9E3779B97F4A7C15) % 2**64
    mixed ^= mixed >> 32
    return -1 - (mixed & 0x7FFFFFFF)


@dataclass(eq=False, slots=True)
class KnownBlock:
    """A block that some prompt consists of.

    alive: published, and not invalidated or forgotten since: it may be found until `expires_ms`,
    and nothing but damage may take it away from a pin until `sure_until_ms`. tags: those of all who
    published it; any_tags: of any. lapsed: forgotten by time; old records may still be about.
    ticket: of the Invalidate whose erasures are not done. excused: an erasure failed or its end was
    never seen. leftover: the remote had it, and the core could not know.
    """

    namespace: bytes
    path: tuple[Atom, ...]
    parent: KnownBlock | None
    digest: bytes
    parent_digest: bytes
    tokens: bytes
    pieces: tuple[ContentPiece, ...]
    content: Content
    prompt: tuple[list[int], tuple[ContentRange, ...]]  # the first one that asked for it
    following: dict[tuple[Atom, ...], KnownBlock] = field(default_factory=dict)
    alive: bool = False
    expires_ms: int | None = None
    sure_until_ms: int | None = None
    tags: frozenset[str] = frozenset()
    any_tags: frozenset[str] = frozenset()
    lapsed: bool = False
    ticket: int = 0
    excused: bool = False
    leftover: bool = False

    def __repr__(self) -> str:
        return f"<{self.namespace.decode()} {list(self.path)}>"

    def subtree(self) -> list[KnownBlock]:
        """This block and all that follow it."""
        found = [self]
        for block in found:
            found.extend(block.following.values())
        return found


class Truth:
    """All blocks ever asked for, by digest and by sequence."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.by_digest: dict[bytes, KnownBlock] = {}
        self.by_content: dict[Content, KnownBlock] = {}
        self._roots: dict[bytes, dict[tuple[Atom, ...], KnownBlock]] = {}
        self._expiries: list[tuple[int, int, KnownBlock]] = []
        self._serial = 0
        self.open_tickets: set[int] = set()

    # ---- what blocks are ------------------------------------------------------------------

    def chain(
        self, namespace: bytes, tokens: Sequence[int], contents: Sequence[ContentRange] = ()
    ) -> list[KnownBlock]:
        """The whole blocks of a sequence, in order."""
        atoms = atoms_of(tokens, contents)
        prompt = list(tokens), tuple(contents)
        following = self._roots.setdefault(namespace, {})
        found: list[KnownBlock] = []
        for start in range(0, len(atoms) - self.block_size + 1, self.block_size):
            piece = tuple(atoms[start : start + self.block_size])
            block = following.get(piece)
            if block is None:
                parent = found[-1] if found else None
                block = self._new(namespace, parent, piece, prompt, start)
                following[piece] = block
            found.append(block)
            following = block.following
        return found

    def _new(
        self, namespace: bytes, parent: KnownBlock | None, piece: tuple[Atom, ...],
        prompt: tuple[list[int], tuple[ContentRange, ...]], start: int,
    ) -> KnownBlock:  # fmt: skip
        above = parent.digest if parent else root_digest(namespace)
        tokens = int32(map(canonical, piece))
        before = parent.content[-1] if parent else b""
        block = KnownBlock(
            namespace, (parent.path if parent else ()) + piece, parent,
            block_digest(above, tokens), above, tokens, self._pieces(prompt[1], start),
            tuple(fingerprints(namespace, piece, before)), prompt,
        )  # fmt: skip
        assert block.digest not in self.by_digest and block.content not in self.by_content
        self.by_digest[block.digest] = self.by_content[block.content] = block
        return block

    def _pieces(self, contents: Sequence[ContentRange], start: int) -> tuple[ContentPiece, ...]:
        """Those parts of contents that lie in the block at `start`."""
        found = []
        for content in contents:
            first = max(content.start, start)
            end = min(content.start + content.length, start + self.block_size)
            if first < end:
                offset = first - content.start
                found.append(
                    ContentPiece(
                        content.content_id, content.length, offset, first - start, end - first
                    )
                )
        return tuple(found)

    # ---- what may be found ----------------------------------------------------------------

    def may_be_found(self, block: KnownBlock) -> bool:
        """Whether nothing forbids to find this block now. Time is dealt with by `lapse`."""
        return block.alive or block.leftover

    def publish(
        self, blocks: Iterable[KnownBlock], tags: Iterable[str], lasts_ms: tuple[int, int] | None
    ) -> None:
        """A lease has published these, to last until some time between two.

        Where they were published before, the laxer marks hold.
        """
        for block in blocks:
            sooner, later = lasts_ms or (None, None)
            if block.alive:
                both = block.expires_ms is not None and later is not None
                later = max(block.expires_ms or 0, later or 0) if both else None
                sooner = min(block.sure_until_ms or NEVER, sooner or NEVER)
                block.tags &= frozenset(tags)
            else:
                block.alive, block.lapsed = True, False
                block.tags, block.any_tags = frozenset(tags), frozenset()
            block.any_tags |= frozenset(tags)
            self.set_expiry(block, later)
            block.sure_until_ms = sooner

    def set_expiry(self, block: KnownBlock, expires_ms: int | None) -> None:
        """From `expires_ms` on the block must not be found; None = it may be for ever."""
        block.expires_ms = block.sure_until_ms = expires_ms
        if expires_ms is not None:
            self._serial += 1
            heappush(self._expiries, (expires_ms, self._serial, block))

    def lapse(self, now_ms: int, offers: Callable[[KnownBlock], bool]) -> list[KnownBlock]:
        """Forget what is over, and all that follows it; returns that. The remote may `offer` it."""
        gone: list[KnownBlock] = []
        while self._expiries and self._expiries[0][0] <= now_ms:
            top = heappop(self._expiries)[2]
            if top.alive and top.expires_ms is not None and top.expires_ms <= now_ms:
                gone += [block for block in top.subtree() if block.alive]
                for block in top.subtree():
                    if block.alive:
                        block.alive, block.lapsed = False, True
                        block.leftover |= offers(block)
        return gone

    def scope(
        self, namespace: bytes | None, prefix: tuple[Atom, ...], tag: str = ""
    ) -> list[KnownBlock]:
        """Blocks that an Invalidate of this must make unfindable."""
        inside = [
            block
            for block in self.by_digest.values()
            if namespace in (None, block.namespace) and block.path[: len(prefix)] == prefix
        ]
        if not tag:
            return inside
        tops = [block for block in inside if block.alive and tag in block.tags]
        return list({id(block): block for top in tops for block in top.subtree()}.values())

    def kill(self, blocks: Iterable[KnownBlock], ticket: int) -> None:
        """These were invalidated; until the ticket's end erasures may be outstanding."""
        for block in blocks:
            block.alive = block.lapsed = False
            block.ticket = ticket or block.ticket
        if ticket:
            self.open_tickets.add(ticket)

    def ticket_ended(self, ticket: int, failed_erasures: int) -> None:
        """The erasures of an Invalidate are over."""
        self.open_tickets.remove(ticket)
        if failed_erasures:
            for block in self.by_digest.values():
                block.excused |= block.ticket == ticket

    def may_have_record(self, block: KnownBlock) -> bool:
        """Whether a readable record of this block may lie on nvme or remote."""
        waits = block.ticket in self.open_tickets
        return block.alive or block.lapsed or block.excused or block.leftover or waits

    def restart(self, records: dict[bytes, list[BlockIdentity]], remote: set[bytes]) -> None:
        """All is gone but these records (by digest) and the remote."""
        for block in self.by_digest.values():
            block.excused |= block.ticket in self.open_tickets
            kept = records.get(block.digest, [])
            assert self.may_have_record(block) or not kept, f"{block} is on nvme"
            block.leftover |= block.digest in remote and self.may_have_record(block)
            block.alive, block.lapsed = bool(kept), False
            if kept:
                tags = [frozenset(record.tags) for record in kept]
                block.tags, block.any_tags = tags[0].intersection(*tags), tags[0].union(*tags)
                expiries = [r.expires_ms for r in kept if r.expires_ms is not None]
                self.set_expiry(block, max(expiries) if len(expiries) == len(kept) else None)
                block.sure_until_ms = min(expiries) if expiries else None
        self.open_tickets.clear()
