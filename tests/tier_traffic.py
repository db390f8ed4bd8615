"""Operations the core has asked for and not heard of yet, and what must never overlap.

Each id of a place has readers and at most one writer among the unfinished operations, never both.
Identities must be those of the blocks they stand for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from radixkv.core.tier_ops import (
    BlockIdentity,
    Cancel,
    Erase,
    Place,
    Probe,
    TierOp,
    Transfer,
)
from tests.tier_places import GPU, HOPS, NVME, REMOTE
from tests.tier_truth import KnownBlock, Truth

MAX_RUN = 32
Where = tuple[Place, int | bytes]


class Traffic:
    """Unfinished transfers, erases and probes by their ids; `cancelled` ones are not ended yet."""

    def __init__(self, sizes: dict[Place, int], has_remote: bool, truth: Truth) -> None:
        self.transfers: dict[int, Transfer] = {}
        self.erases: dict[int, Erase] = {}
        self.probes: dict[int, Probe] = {}
        self.cancelled: set[int] = set()
        self.readers: Counter[Where] = Counter()
        self.writers: set[Where] = set()
        self._sizes = sizes
        self._has_remote = has_remote
        self._truth = truth
        self._used: set[tuple[type, int]] = set()

    def __len__(self) -> int:
        return len(self.transfers) + len(self.erases) + len(self.probes)

    # ---- begin ----------------------------------------------------------------------------

    def begin(self, op: TierOp) -> None:
        """Check a new operation against all unfinished ones, and register it."""
        match op:
            case Transfer():
                self._new_id(op, op.transfer_id)
                self._check(op)
                for source, target in zip(_sources(op), _targets(op), strict=True):
                    assert source not in self.writers, f"{op} reads {source}, being written"
                    self._check_idle(op, target)
                    self.readers[source] += 1
                    self.writers.add(target)
                self.transfers[op.transfer_id] = op
            case Cancel():
                assert op.transfer_id in self.transfers, f"{op}: not an unfinished transfer"
                assert op.transfer_id not in self.cancelled, f"{op}: twice"
                self.cancelled.add(op.transfer_id)
            case Erase():
                self._new_id(op, op.erase_id)
                keys = op.ids if op.place is NVME else op.digests
                assert op.place is NVME or (op.place is REMOTE and keys), op
                assert not (op.digests if op.place is NVME else op.ids), op
                assert len(set(keys)) == len(keys), f"{op}: the same twice"
                for key in keys:
                    self._check_idle(op, (op.place, key))
                    self.writers.add((op.place, key))
                self.erases[op.erase_id] = op
            case Probe():
                self._new_id(op, op.probe_id)
                assert self._has_remote and op.digests, op
                self._check_chain([self._known(digest) for digest in op.digests])
                self.probes[op.probe_id] = op

    def _new_id(self, op: TierOp, number: int) -> None:
        assert (type(op), number) not in self._used, f"{op}: the id was used before"
        self._used.add((type(op), number))

    def _check_idle(self, op: TierOp, where: Where) -> None:
        assert where not in self.writers, f"{op} writes {where}, being written"
        if where[0] is not REMOTE:  # whoever reads a removed object finds nothing
            assert not self.readers[where], f"{op} writes {where}, being read"

    def _check(self, op: Transfer) -> None:
        assert (op.source, op.target) in HOPS, op
        assert len(set(_targets(op))) == len(_targets(op)) <= MAX_RUN, op
        for place, ids in ((op.source, op.source_ids), (op.target, op.target_ids)):
            if place is REMOTE:
                assert self._has_remote and not ids, op
            else:
                assert ids and all(1 <= i <= self._sizes[place] for i in ids), op
        stored = {op.source, op.target} & {NVME, REMOTE}
        assert not op.identities or len(op.identities) == len(_targets(op)), op
        assert bool(op.identities) >= bool(stored), f"{op} needs identities"
        blocks = [self._known(identity.digest) for identity in op.identities]
        self._check_chain(blocks)
        for block, identity in zip(blocks, op.identities, strict=True):
            check_identity(op, block, identity)

    def _known(self, digest: bytes) -> KnownBlock:
        assert digest in self._truth.by_digest, "the digest of a block nobody ever asked for"
        return self._truth.by_digest[digest]

    @staticmethod
    def _check_chain(blocks: list[KnownBlock]) -> None:
        for above, below in zip(blocks, blocks[1:], strict=False):
            assert below.parent is above, f"{below} does not follow {above}"

    # ---- end ------------------------------------------------------------------------------

    def end(self, op: Transfer | Erase | Probe) -> None:
        """The operation is reported to the core."""
        if isinstance(op, Transfer):
            del self.transfers[op.transfer_id]
            self.cancelled.discard(op.transfer_id)
            self.readers.subtract(_sources(op))
            self.readers = +self.readers
            self.writers.difference_update(_targets(op))
        elif isinstance(op, Erase):
            del self.erases[op.erase_id]
            keys = op.ids if op.place is NVME else op.digests
            self.writers.difference_update((op.place, key) for key in keys)
        else:
            del self.probes[op.probe_id]

    # ---- questions ------------------------------------------------------------------------

    def pending(self, source: Place | None = None, target: Place | None = None) -> list[Transfer]:
        """Unfinished transfers from and to these places."""
        return [
            op
            for op in self.transfers.values()
            if source in (None, op.source) and target in (None, op.target)
        ]

    def check_unused(self, blocks: Iterable[int], why: str) -> None:
        """No unfinished transfer reads or writes these gpu blocks."""
        for block in blocks:
            assert (GPU, block) not in self.writers, f"{why}: {block} is a transfer's target"
            assert not self.readers[GPU, block], f"{why}: {block} is a transfer's source"

    def check_settled(self, blocks: Iterable[int], why: str) -> None:
        """No unfinished transfer writes these gpu blocks."""
        for block in blocks:
            assert (GPU, block) not in self.writers, f"{why}: {block} is a transfer's target"

    def digests_to_remote(self) -> set[bytes]:
        """What is being written to the remote, or read from it."""
        return {
            identity.digest
            for op in self.transfers.values()
            if REMOTE in (op.source, op.target)
            for identity in op.identities
        }


def check_identity(op: Transfer, block: KnownBlock, identity: BlockIdentity) -> None:
    """An identity says what its block is."""
    assert op.namespace == block.namespace, f"{op}: {block} is of another namespace"
    assert identity.parent == block.parent_digest, f"{op}: {block} has another parent"
    assert identity.tokens == block.tokens, f"{op}: {block} has other tokens"
    assert tuple(identity.contents) == block.pieces, f"{op}: {block} has other contents"


def _sources(op: Transfer) -> list[Where]:
    if op.source is REMOTE:
        return [(REMOTE, identity.digest) for identity in op.identities]
    return [(op.source, i) for i in op.source_ids]


def _targets(op: Transfer) -> list[Where]:
    if op.target is REMOTE:
        return [(REMOTE, identity.digest) for identity in op.identities]
    return [(op.target, i) for i in op.target_ids]
