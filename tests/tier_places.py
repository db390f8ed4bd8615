"""Places that hold the bytes of blocks: gpu, cpu, nvme, remote, as movers would find them.

A gpu block is a list of fingerprints, so that workers write it position by position. A cpu block is
its content and the checksum that was taken when it left the gpu. nvme and remote hold records with
identity. Reads verify as movers do; what should verify and does not, though nobody damaged it, is
an AssertionError: the core has mixed up ids.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

from xxhash import xxh3_64_intdigest

from radixkv.core.digest import EVERYTHING, TAG_BYTES, names_many
from radixkv.core.tier_ops import BlockIdentity, Outcome, Place, StoredBlock, Transfer
from tests.naive_model import GARBAGE
from tests.tier_truth import Content

GPU, CPU, NVME, REMOTE = Place.GPU, Place.CPU, Place.NVME, Place.REMOTE
HOPS = {
    (GPU, CPU), (CPU, GPU), (GPU, NVME), (CPU, NVME), (NVME, GPU), (GPU, REMOTE),
    (CPU, REMOTE), (REMOTE, GPU),
}  # fmt: skip


MAX_BAD_READS = 3  # of one block, until it must not be offered any more


def checksum_of(content: Content) -> int:
    """What is taken when a block first leaves the gpu."""
    return xxh3_64_intdigest(b"".join(content))


@dataclass(frozen=True)
class CpuBlock:
    """Bytes on cpu and the entry of the checksum table beside them."""

    content: Content
    checksum: int


@dataclass(frozen=True)
class Record:
    """What lies in a slot of nvme or under a key of the remote. A torn one cannot be read."""

    namespace: bytes
    identity: BlockIdentity
    content: Content
    checksum: int
    sequence: int
    torn: bool = False


class BadRead(Exception):
    """The source is not what it should be."""


def same_block(a: BlockIdentity, b: BlockIdentity) -> bool:
    """Whether two identities are of one block; tags, priority and expiry may have changed."""
    return a[:4] == b[:4]


def covers(digest: bytes, other: bytes) -> bool:
    """Whether an Erase of the first digest removes the second from the remote."""
    tag = b"" if digest == EVERYTHING else digest[:TAG_BYTES]
    return digest == other or (names_many(digest) and other.startswith(tag))


class Places:
    """The bytes of all places, and how one block is copied between two of them."""

    def __init__(self, num_blocks: int, block_size: int, verify_all: bool = True) -> None:
        self.verify_all = verify_all
        self.block_size = block_size
        self.gpu = {block: [GARBAGE] * block_size for block in range(1, num_blocks + 1)}
        self.cpu: dict[int, CpuBlock] = {}
        self.nvme: dict[int, Record] = {}
        self.remote: dict[bytes, Record] = {}
        self.sequence = 0
        self.damaged: set[tuple[Place, int | bytes]] = set()  # by whom tests say so
        self.bad_reads: Counter[tuple[Place, int]] = Counter()  # since it was written

    # ---- one block of a transfer ----------------------------------------------------------

    def copy(self, op: Transfer, index: int, now_ms: int) -> Outcome:
        """Carry out one block of a transfer: DONE, or BAD and the target is as it was."""
        try:
            content, checksum = self._read(op, index, now_ms)
        except BadRead:
            if op.source is not REMOTE:
                where = op.source, op.source_ids[index]
                self.bad_reads[where] += 1
                assert self.bad_reads[where] <= MAX_BAD_READS, f"{where} is offered again and again"
            return Outcome.BAD
        self._write(op, index, content, checksum)
        return Outcome.DONE

    def _read(self, op: Transfer, index: int, now_ms: int) -> tuple[Content, int]:
        if op.source is GPU:
            content = tuple(self.gpu[op.source_ids[index]])
            assert GARBAGE not in content, f"{op}: block {index} was never computed"
            return content, checksum_of(content)
        if op.source is CPU:
            return self._read_cpu(op.source_ids[index], op.target is not GPU)
        if op.source is NVME:
            slot = op.source_ids[index]
            found = self.nvme.get(slot)
            whole = found is not None and self._verifies(op, index, found)
            assert whole or (NVME, slot) in self.damaged, f"slot {slot} is not {op}[{index}]"
        else:
            found = self.remote.get(op.identities[index].digest)
            whole = found is not None and self._verifies(op, index, found)
            expires_ms = found.identity.expires_ms if found is not None else None
            whole = whole and (expires_ms is None or now_ms < expires_ms)
        if found is None or not whole:
            raise BadRead
        return found.content, found.checksum

    def _read_cpu(self, block: int, verify: bool) -> tuple[Content, int]:
        found = self.cpu[block]
        if (verify or self.verify_all) and checksum_of(found.content) != found.checksum:
            assert (CPU, block) in self.damaged, f"cpu block {block} was never written whole"
            raise BadRead
        return found.content, found.checksum

    def _verifies(self, op: Transfer, index: int, found: Record) -> bool:
        same = found.namespace == op.namespace and same_block(found.identity, op.identities[index])
        return same and not found.torn and checksum_of(found.content) == found.checksum

    def _write(self, op: Transfer, index: int, content: Content, checksum: int) -> None:
        if op.target is not REMOTE:
            del self.bad_reads[op.target, op.target_ids[index]]
        if op.target is GPU:
            self.gpu[op.target_ids[index]][:] = content
        elif op.target is CPU:
            self.cpu[op.target_ids[index]] = CpuBlock(content, checksum)
            self.damaged.discard((CPU, op.target_ids[index]))
        else:
            self.sequence += 1
            identity = op.identities[index]
            record = Record(op.namespace, identity, content, checksum, self.sequence)
            if op.target is NVME:
                self.nvme[op.target_ids[index]] = record
                self.damaged.discard((NVME, op.target_ids[index]))
            else:
                self.remote[identity.digest] = record

    def spoil(self, op: Transfer, index: int) -> None:
        """A write that failed half-way: the target holds neither the old nor the new bytes."""
        rubbish = (GARBAGE,) * self.block_size
        if op.target is GPU:
            self.gpu[op.target_ids[index]][:] = rubbish
        elif op.target is CPU:
            self.cpu[op.target_ids[index]] = CpuBlock(rubbish, 0)
        elif op.target is NVME:
            self.nvme.pop(op.target_ids[index], None)

    # ---- what befalls a place -------------------------------------------------------------

    def flip(self, place: Place, key: int | bytes) -> None:
        """Flip a bit of the payload in a cpu block, an nvme slot or a remote object."""
        found = self._of(place)[key]
        rotten = (bytes([found.content[0][0] ^ 1]) + found.content[0][1:], *found.content[1:])
        self._of(place)[key] = replace(found, content=rotten)
        self.damaged.add((place, key))

    def tear(self, slot: int) -> None:
        """The header of a slot becomes unreadable."""
        self.nvme[slot] = replace(self.nvme[slot], torn=True)
        self.damaged.add((NVME, slot))

    def lose(self, place: Place, key: int | bytes) -> None:
        """A record disappears: an evicted object, a lost write."""
        del self._of(place)[key]
        self.damaged.add((place, key))

    def rot(self, place: Place, chance: Random) -> None:
        """Something of `place` is damaged."""
        held = self._of(place)
        if not held:
            return
        key = chance.choice(sorted(held))
        if place is REMOTE and chance.random() < 0.5:
            self.lose(place, key)
        elif place is NVME and chance.random() < 0.3:
            self.tear(key)
        else:
            self.flip(place, key)

    def _of(self, place: Place) -> dict:
        return {CPU: self.cpu, NVME: self.nvme, REMOTE: self.remote}[place]

    def erase(self, place: Place, key: int | bytes) -> None:
        """Make a record unreadable; on the remote a digest may name many."""
        held = self._of(place)
        for found in [k for k in held if k == key or place is REMOTE and covers(key, k)]:
            del held[found]

    # ---- a restart ------------------------------------------------------------------------

    def readable(self) -> dict[int, Record]:
        """What a scan of nvme finds: headers that can be read, by slot."""
        return {slot: record for slot, record in self.nvme.items() if not record.torn}

    def scan(self, chance: Random | None = None) -> list[StoredBlock]:
        """As the store reports it at start, in no particular order."""
        found = [
            StoredBlock(slot, record.sequence, record.namespace, record.identity)
            for slot, record in self.readable().items()
        ]
        if chance is not None:
            chance.shuffle(found)
        return found

    def lose_memory(self) -> None:
        """The process died: gpu and cpu are empty."""
        for slots in self.gpu.values():
            slots[:] = [GARBAGE] * self.block_size
        self.cpu.clear()
        self.damaged = {(place, key) for place, key in self.damaged if place in (NVME, REMOTE)}
