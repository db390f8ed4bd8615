"""What the core asks of the tiers, and what they tell it: values, no behaviour.

The core decides and returns these; the runtime has them carried out and reports each exactly once
(`Cache.transfer_done`, `erase_done`, `probe_done`), in any order, also after a Cancel.
"""

from enum import IntEnum
from typing import NamedTuple

DIGEST_BYTES = 16
MAX_STORED_NAMESPACE_BYTES = 2048  # longer namespaces stay on gpu and cpu
MAX_STORED_CONTENTS = 4  # pieces of content in one block; blocks with more stay on gpu and cpu
MAX_TAGS = 8
MAX_TAG_BYTES = 64


class Place(IntEnum):
    """Where a block can be. Those below REMOTE are residency: indices into `Node.residency`."""

    GPU = 0
    CPU = 1
    NVME = 2
    REMOTE = 3


class Outcome(IntEnum):
    """How the transfer of one block ended."""

    DONE = 0
    FAILED = 1  # not carried out: an error, a cancellation, a mover's death; the source may be good
    BAD = 2  # the source is not there or not what it should be: it must not be offered again


class ContentPiece(NamedTuple):
    """Tokens [start, start + length) of a block are [offset, offset + length) of a content."""

    content_id: bytes
    content_length: int
    offset: int
    start: int
    length: int


class BlockIdentity(NamedTuple):
    """What a block is, wherever it lies; records on nvme and remote carry it.

    `digest` stands for the namespace and all tokens up to the end of the block, `parent` for those
    up to its start. `tokens` (int32 bytes) has values derived from content id and offset where
    content is. `expires_ms` is on the clock of `now_ms`; None = never.
    """

    digest: bytes
    parent: bytes
    tokens: bytes
    contents: tuple[ContentPiece, ...] = ()
    tags: tuple[str, ...] = ()
    priority: int = 0
    expires_ms: int | None = None


class Transfer(NamedTuple):
    """Copy consecutive blocks of one sequence from one place to another, in order.

    Ids are block ids (slots on nvme), empty for REMOTE. `identities` (one per block) are there if
    NVME or REMOTE is involved: a write stores them, a read verifies them.
    """

    transfer_id: int
    source: Place
    target: Place
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    namespace: bytes
    identities: tuple[BlockIdentity, ...]


class Cancel(NamedTuple):
    """Nobody waits for this transfer any more: blocks not yet begun may be reported FAILED."""

    transfer_id: int


class Erase(NamedTuple):
    """Make records unreadable for good: slots of NVME, or digests on REMOTE. Durable when done.

    A digest may name all objects of a namespace, or everything (`digest.names_many`). Without slots
    an Erase of NVME is a barrier for what was overwritten before.
    """

    erase_id: int
    place: Place
    ids: tuple[int, ...]
    digests: tuple[bytes, ...]


class Probe(NamedTuple):
    """Which of these blocks, in order, the remote has."""

    probe_id: int
    digests: tuple[bytes, ...]


TierOp = Transfer | Cancel | Erase | Probe


class StoredBlock(NamedTuple):
    """A record found on nvme at start. Later `sequence` numbers were written later."""

    slot: int
    sequence: int
    namespace: bytes
    identity: BlockIdentity
