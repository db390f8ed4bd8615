"""Movers with arenas around them, driven from outside the event loop; blocks with known bytes."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import uvloop

from radixkv.core.tier_ops import (
    DIGEST_BYTES,
    BlockIdentity,
    Erase,
    Outcome,
    Place,
    TierOp,
    Transfer,
)
from radixkv.pools.arena import MemfdArena
from radixkv.pools.mover_faults import FAULTS_VARIABLE
from radixkv.pools.movers import MoverPlaces, Movers, OpEnded, TransferEnded
from radixkv.pools.nvme import NvmeStore

GPU, CPU, NVME, REMOTE = Place.GPU, Place.CPU, Place.NVME, Place.REMOTE
DONE, FAILED, BAD = Outcome.DONE, Outcome.FAILED, Outcome.BAD
NAMESPACE = b"model=tiny;"
BLOCK_SIZE = 16
BLOCK_BYTES = 8192
TIMEOUT_S = 10.0


def pattern(seed: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """The bytes of the block with this number."""
    return np.random.default_rng(seed).integers(0, 256, block_bytes, dtype=np.uint8)


def identity(number: int) -> BlockIdentity:
    """The identity of the block with this number, the one before being its parent."""
    digest, parent = (value.to_bytes(DIGEST_BYTES, "little") for value in (number, number - 1))
    return BlockIdentity(digest, parent, np.full(BLOCK_SIZE, number, np.int32).tobytes())


def transfer(
    transfer_id: int, source: Place, target: Place, sources: range, targets: range, first: int = 1
) -> Transfer:
    """Blocks `first`, `first` + 1, … of one sequence, with identities where they are needed."""
    count = max(len(sources), len(targets))
    stored = NVME in (source, target) or REMOTE in (source, target)
    identities = tuple(identity(first + index) for index in range(count)) if stored else ()
    ids = (tuple(sources), tuple(targets))
    return Transfer(transfer_id, source, target, *ids, NAMESPACE, identities)


class MoverRig:
    """A context. `faults` are lines for `mover_faults`, effective at once when set."""

    def __init__(
        self,
        tmp_path: Path,
        *,
        num_blocks: int = 64,
        block_bytes: int = BLOCK_BYTES,
        num_processes: int = 1,
        verify_all: bool = True,
        nvme_blocks: int = 0,
        remote_url: str | None = None,
    ) -> None:
        self._faults = tmp_path / "faults"
        self._loop = uvloop.new_event_loop()
        self.ended: dict[int, OpEnded] = {}
        self.gpu = MemfdArena(num_blocks, block_bytes)
        self.cpu = MemfdArena(num_blocks, block_bytes)
        for arena in (self.gpu, self.cpu):
            arena.prefault()
        self.nvme = None
        if nvme_blocks:
            path = tmp_path / "nvme"
            path.mkdir(exist_ok=True)
            self.nvme = NvmeStore(path, nvme_blocks, block_bytes, BLOCK_SIZE, segment_bytes=1 << 20)
            self.nvme.scan()
        places = MoverPlaces(self.gpu, BLOCK_SIZE, self.cpu, self.nvme, remote_url, verify_all)
        os.environ[FAULTS_VARIABLE] = str(self._faults)
        self.movers = self._loop.run_until_complete(self._start(places, num_processes))

    async def _start(self, places: MoverPlaces, num_processes: int) -> Movers:
        return Movers(places, self._note, num_processes=num_processes)

    def _note(self, ended: list[OpEnded]) -> None:
        assert ended
        for one in ended:
            assert one[0] not in self.ended, f"{one} ended twice"
            self.ended[one[0]] = one

    def __enter__(self) -> "MoverRig":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()
        for arena in (self.gpu, self.cpu):
            arena.close()
        if self.nvme is not None:
            self.nvme.close()

    def close(self) -> None:
        """End the movers and the loop; idempotent."""
        os.environ.pop(FAULTS_VARIABLE, None)
        self.movers.close()
        self._loop.close()

    def faults(self, *lines: str) -> None:
        """What befalls movers from now on."""
        fresh = self._faults.with_suffix(".new")
        fresh.write_text("\n".join(lines))
        fresh.replace(self._faults)

    def fill(self, blocks: range, first: int = 1) -> None:
        """Blocks `first`, … of the sequence are in these gpu blocks."""
        for index, block in enumerate(blocks):
            self.gpu.view()[block] = pattern(first + index, self.gpu.block_bytes)

    def holds(self, arena: MemfdArena, blocks: range, first: int = 1) -> list[bool]:
        """Whether these blocks are `first`, … of the sequence."""
        view = arena.view()
        return [
            bool((view[block] == pattern(first + index, arena.block_bytes)).all())
            for index, block in enumerate(blocks)
        ]

    def submit(self, *ops: TierOp) -> None:
        """Hand operations to the movers."""
        for op in ops:
            self.movers.submit(op)

    def until(self, condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
        """Let the loop run until it is so."""

        async def wait() -> None:
            deadline = time.monotonic() + timeout_s
            while not condition():
                assert time.monotonic() < deadline, f"not within {timeout_s} s; {self.ended}"
                await asyncio.sleep(0.002)

        self._loop.run_until_complete(wait())

    def run_for(self, seconds: float) -> None:
        """Let the loop run."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end)

    def end_of(self, op_id: int) -> OpEnded:
        """Wait for the end of an operation."""
        self.until(lambda: op_id in self.ended)
        return self.ended[op_id]

    def outcomes(self, op: Transfer) -> tuple[Outcome, ...]:
        """Have a transfer carried out."""
        self.submit(op)
        return self.outcomes_of(op.transfer_id)

    def outcomes_of(self, transfer_id: int) -> tuple[Outcome, ...]:
        """Wait for the end of a transfer."""
        ended = self.end_of(transfer_id)
        assert isinstance(ended, TransferEnded)
        return ended.outcomes

    def erase(self, erase_id: int, slots: range) -> bool:
        """Have nvme slots erased."""
        self.submit(Erase(erase_id, NVME, tuple(slots), ()))
        return bool(self.end_of(erase_id)[1])

    def pids(self, place: Place = CPU) -> list[int]:
        """Movers of a place."""
        return self.movers.pids()[place]
