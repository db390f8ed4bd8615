"""Content (images, audio) inside prompts: placeholders become interned negative tokens.

All images expand to the same placeholder tokens, so tokens alone would confuse them. Before a
match, the tokens of a content range are replaced by negative int32, one per (content id, offset).
Text before an image is still shared, and the same image at the same place is too.

Ids are reference counted by token: each negative token in the tree counts one, and each lease that
names the content counts one. When ids run out, or a range contradicts what is known of its content,
the sequence is *not cacheable* from there on. Falling back to "no content" would mix up images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sortedcontainers import SortedDict
from xxhash import xxh3_64_intdigest

from radixkv.core.errors import InvalidArgument
from radixkv.core.results import ContentRange
from radixkv.core.tier_ops import ContentPiece
from radixkv.core.tokens import TOKEN_BYTES

MAX_CONTENT_ID_BYTES = 64
MAX_IDS = 2**31 - 1


@dataclass(slots=True, eq=False)
class Content:
    """One interned content: token for offset i is -(first + i); `refs` as the module says."""

    content_id: bytes
    first: int
    length: int
    refs: int = 0


@dataclass(frozen=True, slots=True)
class Resolved:
    """Tokens with interned content; cacheable up to `cacheable` tokens; contents it names."""

    tokens: bytes
    cacheable: int
    contents: tuple[Content, ...]


class ContentTable:
    """Interned contents of one namespace."""

    __slots__ = ("_by_id", "_by_first", "_free", "_next", "_max_ids")

    def __init__(self, max_ids: int = MAX_IDS) -> None:
        self._by_id: dict[bytes, Content] = {}
        self._by_first: SortedDict = SortedDict()
        self._free: SortedDict = SortedDict()
        self._next = 1
        self._max_ids = max_ids

    def __len__(self) -> int:
        return len(self._by_id)

    def resolve(
        self,
        tokens: bytes,
        contents: Sequence[ContentRange],
        placeholders: frozenset[int],
        intern: bool,
        offset: int = 0,
    ) -> Resolved:
        """Replace content ranges of `tokens`, whose first token has index `offset`.

        With `intern` unknown contents get ids (each returned content has one reference more);
        without, they only end what can match. Raises InvalidArgument for ranges that overlap, are
        out of order or out of bounds, and for bad content ids.
        """
        num_tokens = len(tokens) // TOKEN_BYTES
        cacheable = offset + num_tokens
        if not contents and not placeholders:
            return Resolved(tokens, cacheable, ())
        values = np.frombuffer(tokens, "<i4").copy()
        covered = np.zeros(num_tokens, bool)
        found: list[Content] = []
        _check_ranges(contents, offset, num_tokens)
        for item in contents:
            start = item.start - offset
            end = start + item.length
            covered[start:end] = True
            if cacheable < item.start:
                continue
            content = self._content(item, intern)
            if content is None:
                cacheable = item.start
                continue
            found.append(content)
            values[start:end] = -np.arange(content.first, content.first + item.length)
        if placeholders:
            bare = np.isin(values, np.fromiter(placeholders, np.int64)) & ~covered
            if bare.any():
                cacheable = min(cacheable, offset + int(bare.argmax()))
        if intern:
            for content in found:
                content.refs += 1
        return Resolved(values.tobytes(), cacheable, tuple(found))

    def _content(self, item: ContentRange, intern: bool) -> Content | None:
        content = self._by_id.get(item.content_id)
        if content is not None:
            return content if content.length == item.length else None
        first = self._allocate(item.length) if intern else None
        if first is None:
            return None
        content = Content(item.content_id, first, item.length)
        self._by_id[item.content_id] = content
        self._by_first[first] = content
        return content

    def _allocate(self, length: int) -> int | None:
        if self._next + length - 1 <= self._max_ids:
            first = self._next
            self._next += length
            return first
        for first, room in self._free.items():
            if room >= length:
                del self._free[first]
                if room > length:
                    self._free[first + length] = room - length
                return first
        return None

    def count(self, tokens: bytes, change: int) -> None:
        """Blocks with these tokens enter (+1) or leave (-1) the tree."""
        values = np.frombuffer(tokens, "<i4")
        negative = -values[values < 0]
        if not negative.size:
            return
        firsts = np.fromiter(self._by_first.keys(), np.int64, len(self._by_first))
        owners, counts = np.unique(
            np.searchsorted(firsts, negative, side="right") - 1, return_counts=True
        )
        for owner, number in zip(owners.tolist(), counts.tolist(), strict=True):
            self.refer(self._by_first[int(firsts[owner])], change * number)

    def refer(self, content: Content, change: int) -> None:
        """Change the number of references; the last one frees the ids."""
        content.refs += change
        assert content.refs >= 0
        if content.refs:
            return
        del self._by_id[content.content_id]
        del self._by_first[content.first]
        if not self._by_id:
            self._next = 1
            self._free.clear()
        else:
            self._release(content.first, content.length)

    def _release(self, first: int, length: int) -> None:
        index = self._free.bisect_left(first)
        if index < len(self._free) and self._free.keys()[index] == first + length:
            length += self._free.pop(first + length)
        if index > 0:
            before = self._free.keys()[index - 1]
            if before + self._free[before] == first:
                self._free[before] += length
                return
        self._free[first] = length

    def canonical(self, tokens: bytes) -> bytes:
        """`tokens` with interned ids replaced by values derived from content id and offset.

        Digests are taken of these, so that they mean the same after ids were reused.
        """
        if not self._by_id:
            return tokens
        values = np.frombuffer(tokens, "<i4").copy()
        where = np.flatnonzero(values < 0)
        if not where.size:
            return tokens
        ids = -values[where].astype(np.int64)
        firsts = np.fromiter(self._by_first.keys(), np.int64, len(self._by_first))
        owners, inverse = np.unique(
            np.searchsorted(firsts, ids, side="right") - 1, return_inverse=True
        )
        firsts = firsts[owners]
        seeds = np.array(
            [xxh3_64_intdigest(self._by_first[first].content_id) for first in firsts.tolist()],
            np.uint64,
        )
        offsets = (ids - firsts[inverse]).astype(np.uint64)
        mixed = seeds[inverse] + offsets * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
        values[where] = -1 - (mixed & np.uint64(0x7FFFFFFF)).astype(np.int64)
        return values.tobytes()

    def pieces(self, tokens: bytes) -> tuple[ContentPiece, ...]:
        """The runs of interned ids in `tokens`, as what a record says of them."""
        if not self._by_id:
            return ()
        values = np.frombuffer(tokens, "<i4")
        found: list[ContentPiece] = []
        for start in np.flatnonzero(values < 0).tolist():
            token_id = -int(values[start])
            content = self._by_first.peekitem(self._by_first.bisect_right(token_id) - 1)[1]
            offset = token_id - content.first
            last = found[-1] if found else None
            if last is not None and (last.content_id, last.offset + last.length) == (
                content.content_id, offset,
            ) and last.start + last.length == start:  # fmt: skip
                found[-1] = last._replace(length=last.length + 1)
            else:
                found.append(ContentPiece(content.content_id, content.length, offset, start, 1))
        return tuple(found)

    def intern(self, tokens: bytes, pieces: Sequence[ContentPiece]) -> bytes | None:
        """`tokens` of a record with this table's ids where its content is; None if it cannot be.

        The contents have no reference yet: count the tokens at once.
        """
        values = np.frombuffer(tokens, "<i4").copy()
        for piece in pieces:
            item = ContentRange(0, piece.content_length, piece.content_id)
            content = self._content(item, intern=True)
            if content is None:
                for other in pieces:  # those just interned have no reference
                    known = self._by_id.get(other.content_id)
                    if known is not None and not known.refs:
                        self.refer(known, 0)
                return None
            first = content.first + piece.offset
            values[piece.start : piece.start + piece.length] = -np.arange(
                first, first + piece.length
            )
        return values.tobytes()

    def references(self) -> dict[bytes, int]:
        """References by content id; for checks."""
        return {content.content_id: content.refs for content in self._by_id.values()}

    def owner(self, token: int) -> bytes:
        """Content id of an interned (negative) token; for checks."""
        at = self._by_first.bisect_right(-token) - 1
        return self._by_first.peekitem(at)[1].content_id


def _check_ranges(contents: Sequence[ContentRange], offset: int, num_tokens: int) -> None:
    end = offset
    for item in contents:
        if not 1 <= len(item.content_id) <= MAX_CONTENT_ID_BYTES:
            raise InvalidArgument(f"content id must have 1 to {MAX_CONTENT_ID_BYTES} bytes")
        start, end_before, end = item.start, end, item.start + item.length
        if item.length < 1 or start < end_before or end > offset + num_tokens:
            raise InvalidArgument(
                f"content range [{start}, {end}) is empty, out of order, overlapping or out of"
                " bounds"
            )
