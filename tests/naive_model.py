"""A model of the cache written to be obviously right, and KV whose every slot tells what it holds.

A token is an *atom*: its int, or (content id, offset) where it stands for a piece of content. What
is cached is a dict from (namespace, all atoms up to a block's end) to that block. There is no tree,
no node and no edge, so nothing can be split or merged wrongly.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from radixkv.core.results import Books, ContentRange

Atom = int | tuple[bytes, int]
Key = tuple[bytes, tuple[Atom, ...]]
GARBAGE = b"garbage"


def int32(tokens: Iterable[int]) -> bytes:
    """Tokens as the core takes them: little-endian int32."""
    return b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)


def ints(data: bytes) -> list[int]:
    """The inverse of `int32`."""
    return [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]


def atoms_of(tokens: Sequence[int], contents: Sequence[ContentRange] = ()) -> list[Atom]:
    """What each token of a sequence really stands for."""
    atoms: list[Atom] = list(tokens)
    for content in contents:
        for offset in range(content.length):
            atoms[content.start + offset] = (content.content_id, offset)
    return atoms


def fingerprints(namespace: bytes, atoms: Iterable[Atom], before: bytes = b"") -> list[bytes]:
    """One value per position, computed from the namespace and all atoms up to it."""
    out = []
    last = before or blake2b(namespace, digest_size=8).digest()
    for atom in atoms:
        last = blake2b(last + repr(atom).encode(), digest_size=8).digest()
        out.append(last)
    return out


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """How many leading elements are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


@dataclass(eq=False)
class Entry:
    """One cached block. It was touched at `touched` for certain, and perhaps later."""

    key: Key
    block: int
    fingerprints: list[bytes]
    probe: tuple[bytes, tuple[ContentRange, ...]]
    touched: int
    maybe_touched: int


@dataclass(eq=False)
class ModelLease:
    """A lease as its worker sees it; `told` and `server_table` are what the server knows."""

    session: int
    id: int
    namespace: bytes
    atoms: list[Atom]
    fingerprints: list[bytes]
    tokens: list[int]
    contents: tuple[ContentRange, ...]
    told: int
    committed: int
    published: int
    computed: int
    table: list[int]
    server_table: list[int]
    locks: list[Entry] = field(default_factory=list)
    copies: set[int] = field(default_factory=set)
    detached: bool = False  # invalidated: it publishes nothing any more

    def append(self, token: int) -> None:
        """The worker adds one token to the sequence."""
        last = self.fingerprints[-1] if self.fingerprints else b""
        self.fingerprints += fingerprints(self.namespace, [token], last)
        self.atoms.append(token)
        self.tokens.append(token)

    @property
    def drawn(self) -> list[int]:
        """Blocks taken from the reserve that the server has not heard of."""
        return self.table[len(self.server_table) :]


@dataclass(frozen=True)
class PendingCopy:
    """A copy the server still has to make, and the lease that waits for it (None once released)."""

    source: int
    target: int
    num_tokens: int
    lease: ModelLease | None


class NaiveCache:
    """What should be where; every question is answered by looking at everything."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.entries: dict[Key, Entry] = {}
        self.leases: dict[tuple[int, int], ModelLease] = {}
        self.reserves: dict[int, list[int]] = {}
        self.copies: dict[int, PendingCopy] = {}
        self.clock = 0

    # ---- what is cached -------------------------------------------------------------------

    def match(self, namespace: bytes, atoms: Sequence[Atom]) -> list[Entry]:
        """The longest cached run of whole blocks from the start."""
        found = []
        for end in range(self.block_size, len(atoms) + 1, self.block_size):
            entry = self.entries.get((namespace, tuple(atoms[:end])))
            if entry is None:
                break
            found.append(entry)
        return found

    def usable(self, namespace: bytes, atoms: Sequence[Atom]) -> list[Entry]:
        """The part of the match that leaves at least one token to compute."""
        return self.match(namespace, atoms[:-1])

    def longest_tail(self, namespace: bytes, atoms: Sequence[Atom]) -> int:
        """Tokens that agree inside one more block behind the usable match."""
        start = len(self.usable(namespace, atoms)) * self.block_size
        rest = atoms[start:-1]
        before = tuple(atoms[:start])
        best = 0
        for space, path in self.entries:
            longer = len(path) == start + self.block_size
            if space == namespace and longer and path[:start] == before:
                best = max(best, common_length(rest, path[start:]))
        return best

    def being_computed(self, namespace: bytes, atoms: Sequence[Atom], cached: int) -> int:
        """Tokens behind `cached` that a live lease was asked to compute and has not committed."""
        best = cached
        for lease in self.leases.values():
            if lease.namespace == namespace and not lease.detached:
                common = common_length(lease.atoms[: lease.told], atoms[:-1])
                best = max(best, common - common % self.block_size)
        return best - cached

    # ---- where the blocks are -------------------------------------------------------------

    def leased(self) -> set[int]:
        """Blocks in a table the server knows, or of a tree path that a lease locks."""
        blocks: set[int] = set()
        for lease in self.leases.values():
            blocks.update(lease.server_table)
            blocks.update(entry.block for entry in lease.locks)
        return blocks

    def in_copy(self) -> set[int]:
        """Sources and targets of copies that are not done."""
        return {b for copy in self.copies.values() for b in (copy.source, copy.target)}

    def reserved(self) -> set[int]:
        """Blocks of all sessions' reserves, drawn or not."""
        return {block for reserve in self.reserves.values() for block in reserve}

    def private(self, session: int) -> int:
        """Blocks that only this session can use: in its leases' tables, or in its reserve."""
        tree = {entry.block for entry in self.entries.values()}
        mine = set(self.reserves[session])
        for lease in self.leases.values():
            if lease.session == session:
                mine.update(lease.server_table)
        return len(mine - tree)

    def books(self) -> Books:
        """The six states; asserts that no block is in two places that exclude each other."""
        leased, reserved = self.leased(), self.reserved()
        tree = {entry.block for entry in self.entries.values()}
        assert len(tree) == len(self.entries), "one block under two prefixes"
        assert sum(map(len, self.reserves.values())) == len(reserved), "block in two reserves"
        assert not reserved & (tree | leased), "reserved block in use"
        in_flight = self.in_copy() - leased
        cached = tree - leased - in_flight
        reserved -= in_flight
        free = self.num_blocks - len(leased) - len(in_flight) - len(reserved) - len(cached)
        return Books(
            len(leased), len(in_flight), len(reserved), 0, len(cached), free, self.num_blocks
        )

    def evictable(self) -> list[Entry]:
        """Entries that nothing keeps: no leased or copied block at or below them, and none that
        is copied above them (a copy may keep more than its source)."""
        leased, copied = self.leased(), self.in_copy()
        kept = {key for key, entry in self.entries.items() if entry.block in leased | copied}
        for space, path in list(kept):
            kept.update((space, path[:end]) for end in range(len(path)))
        sources = [key for key, entry in self.entries.items() if entry.block in copied]
        return [
            entry
            for (space, path), entry in self.entries.items()
            if (space, path) not in kept
            and not any(space == s and path[: len(p)] == p for s, p in sources)
        ]

    # ---- changes --------------------------------------------------------------------------

    def tick(self) -> int:
        """A new moment of the recency clock."""
        self.clock += 1
        return self.clock

    def touch(self, entries: Iterable[Entry], certain: bool = True) -> None:
        """Refresh recency; not `certain` where the rules leave it open."""
        now = self.tick()
        for entry in entries:
            entry.maybe_touched = now
            if certain:
                entry.touched = now

    def publish(self, lease: ModelLease, upto: int) -> int:
        """Insert the full blocks below `upto`; returns how many new ones the tree already had."""
        duplicates = 0
        size = self.block_size
        full = upto - upto % size
        lease.committed = max(lease.committed, full)
        if lease.detached:
            return 0
        path = []
        for end in range(size, upto + 1, size):
            key = (lease.namespace, tuple(lease.atoms[:end]))
            block = lease.table[end // size - 1]
            entry = self.entries.get(key)
            if entry is None:
                probe = (int32(lease.tokens), lease.contents)
                entry = Entry(key, block, lease.fingerprints[end - size : end], probe, 0, 0)
                self.entries[key] = entry
            elif end > lease.published and entry.block != block:
                duplicates += 1
            path.append(entry)
        self.touch(path, certain=full > lease.published)
        lease.locks = path
        lease.published = lease.committed
        return duplicates

    def forget(self, lease: ModelLease) -> None:
        """The lease ends; its path may count as touched by that."""
        del self.leases[lease.session, lease.id]
        self.touch([e for e in lease.locks if e.key in self.entries], certain=False)
        for copy_id in lease.copies:
            copy = self.copies[copy_id]
            self.copies[copy_id] = PendingCopy(copy.source, copy.target, copy.num_tokens, None)
