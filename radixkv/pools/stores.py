"""What a mover needs of a place that keeps records instead of memory: nvme and remote.

Both take blocks of one sequence in order, keep what each block is beside its bytes, and answer
with one outcome per block. A payload is a uint8 array of `block_bytes`, a block of an arena this
process maps. No method raises for what happens to storage or network: that is an outcome, and
`problem` says it for people. Calls come from one thread of a process, one at a time; every call
ends within a time the store bounds.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from radixkv.core.tier_ops import BlockIdentity, Outcome

Payload = npt.NDArray[np.uint8]


class SlotStore(Protocol):
    """nvme: records in slots whose ids the core gives out."""

    problem: str | None  # the last thing that went wrong

    def write(
        self,
        slots: Sequence[int],
        namespace: bytes,
        identities: Sequence[BlockIdentity],
        payloads: Sequence[Payload],
        checksums: Sequence[int],
    ) -> list[Outcome]:
        """Store blocks: DONE or FAILED each; then the slot has its old record, the new or none."""
        ...

    def read(
        self,
        slots: Sequence[int],
        namespace: bytes,
        identities: Sequence[BlockIdentity],
        into: Sequence[Payload],
    ) -> list[Outcome]:
        """Fetch blocks. BAD: not this block, or not its bytes; FAILED: could not be read.

        What `into` holds where the outcome is not DONE is undefined.
        """
        ...

    def erase(self, slots: Sequence[int]) -> bool:
        """Make records unreadable for good. True once that is durable for all of them."""
        ...

    def close(self) -> None:
        """Give everything back; idempotent."""
        ...


class ObjectStore(Protocol):
    """remote: records under the digests of their blocks, put and evicted by others as well."""

    problem: str | None  # the last thing that went wrong

    def write(
        self,
        namespace: bytes,
        identities: Sequence[BlockIdentity],
        payloads: Sequence[Payload],
        checksums: Sequence[int],
    ) -> list[Outcome]:
        """Store blocks: DONE (also if it was there) or FAILED each."""
        ...

    def read(
        self, namespace: bytes, identities: Sequence[BlockIdentity], into: Sequence[Payload]
    ) -> list[Outcome]:
        """Fetch blocks. BAD: absent, not this block, or not its bytes; FAILED: no answer.

        What `into` holds where the outcome is not DONE is undefined.
        """
        ...

    def probe(self, digests: Sequence[bytes]) -> list[bool] | None:
        """Which of these are there now; None if nobody answered."""
        ...

    def remove(self, digests: Sequence[bytes]) -> bool:
        """Remove objects. True once none of them can be read any more."""
        ...

    def close(self) -> None:
        """Leave; idempotent."""
        ...
