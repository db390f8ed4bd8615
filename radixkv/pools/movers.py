"""Movers: the processes that copy blocks between places, as the server sees them.

Every copy, checksum and disk or network access of a tier is made by a mover process (see
`mover_process`); the server only writes down what is to be done and reads how it went. Copies
within memory, nvme and remote have processes of their own (see `mover_lane`).
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from radixkv.core.tier_ops import Cancel, Erase, Outcome, Place, TierOp, Transfer
from radixkv.pools.arena import Arena
from radixkv.pools.checked_copy import create_checksum_table
from radixkv.pools.mover_lane import MoverLane
from radixkv.pools.mover_process import MoverSettings
from radixkv.pools.mover_ring import Answer, MoverOp, num_blocks
from radixkv.pools.nvme import NvmeStore

CLOSE_TIMEOUT_S = 3.0  # for a mover to end by itself; leaving the remote takes over a second
_OUTCOMES = tuple(Outcome)


class TransferEnded(NamedTuple):
    """An outcome per block, and how long a mover worked on it (0 if none got round to it)."""

    transfer_id: int
    outcomes: tuple[Outcome, ...]
    elapsed_s: float


class EraseEnded(NamedTuple):
    """Whether everything that was named is unreadable for good."""

    erase_id: int
    ok: bool


class ProbeEnded(NamedTuple):
    """Which digests are there; None if nobody could say."""

    probe_id: int
    present: tuple[bool, ...] | None


OpEnded = TransferEnded | EraseEnded | ProbeEnded


@dataclass(frozen=True)
class MoverPlaces:
    """The places there are. All stay the caller's, and open until the movers are closed.

    Scan nvme first, see `NvmeStore.attachment`.
    """

    gpu: Arena
    block_size: int
    cpu: Arena | None = None
    nvme: NvmeStore | None = None
    remote_url: str | None = None
    verify_all: bool = False  # every block from cpu to gpu, not a sample


class Movers:
    """Carries out the tier operations of a core. Used in the running event loop only.

    `on_ended` is called in the loop, never from within `submit`, with what has ended since; each
    operation but Cancel ends exactly once. The target blocks must have memory (`Arena.ensure`).
    `num_processes` serve memory and as many nvme; one serves the remote.
    """

    def __init__(
        self,
        places: MoverPlaces,
        on_ended: Callable[[list[OpEnded]], None],
        *,
        num_processes: int = 2,
        niceness: int = 10,
    ) -> None:
        """Starts the processes without waiting for them. Raises OSError."""
        self._loop = asyncio.get_running_loop()
        self._on_ended = on_ended
        self._ended: list[OpEnded] = []
        self._transfers: dict[int, tuple[MoverLane, Transfer]] = {}
        self._lanes: dict[Place, MoverLane] = {}
        self._is_closed = False
        self._checksums = (
            None if places.cpu is None else create_checksum_table(places.cpu.num_blocks)
        )
        base = _settings(places, self._checksums, niceness)
        if places.cpu is not None:
            self._add_lane(Place.CPU, base, num_processes)
        if places.nvme is not None:
            nvme, lock = places.nvme.attachment, places.nvme.lock_descriptor
            self._add_lane(Place.NVME, replace(base, nvme=nvme, nvme_lock=lock), num_processes)
        if places.remote_url is not None:
            self._add_lane(Place.REMOTE, replace(base, remote_url=places.remote_url), 1)

    def submit(self, op: TierOp) -> None:
        """Begin an operation, or cancel one that may have ended. Never blocks."""
        assert not self._is_closed
        if isinstance(op, Cancel):
            if op.transfer_id in self._transfers:
                lane, transfer = self._transfers[op.transfer_id]
                lane.cancel(transfer)
            return
        lane = self._lanes[_place_of(op)]
        if isinstance(op, Transfer):
            self._transfers[op.transfer_id] = (lane, op)
        lane.submit(op)

    def pids(self) -> dict[Place, list[int]]:
        """Process ids of started movers, by the place they serve (CPU: copies in memory)."""
        return {place: lane.pids for place, lane in self._lanes.items()}

    def num_queued(self) -> dict[Place, int]:
        """Operations that wait for a mover."""
        return {place: lane.num_queued for place, lane in self._lanes.items()}

    def num_exits(self) -> dict[Place, int]:
        """Movers that ended though nobody asked them to, so far."""
        return {place: lane.num_exits for place, lane in self._lanes.items()}

    def problems(self) -> dict[Place, str]:
        """The last thing that went wrong in each place, for people."""
        return {place: lane.problem for place, lane in self._lanes.items() if lane.problem}

    def close(self) -> None:
        """End all movers, by force after CLOSE_TIMEOUT_S; nothing ends any more. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for lane in self._lanes.values():
            lane.begin_close()
        for lane in self._lanes.values():
            lane.end_close(deadline_s)
        if self._checksums is not None:
            os.close(self._checksums)

    def _add_lane(self, place: Place, settings: MoverSettings, num_processes: int) -> None:
        self._lanes[place] = MoverLane(place, settings, num_processes, self._op_ended)

    def _op_ended(self, op: MoverOp, answer: Answer | None) -> None:
        if not self._ended:
            self._loop.call_soon(self._report)
        if isinstance(op, Transfer):
            del self._transfers[op.transfer_id]
        self._ended.append(_ended(op, answer))

    def _report(self) -> None:
        ended, self._ended = self._ended, []
        if not self._is_closed:
            self._on_ended(ended)


def _ended(op: MoverOp, answer: Answer | None) -> OpEnded:
    if isinstance(op, Transfer):
        if answer is None:
            return TransferEnded(op.transfer_id, (Outcome.FAILED,) * num_blocks(op), 0.0)
        results = answer.results
        if any(results):
            outcomes = tuple([_OUTCOMES[result] for result in results])
        else:
            outcomes = (Outcome.DONE,) * len(results)
        return TransferEnded(op.transfer_id, outcomes, answer.elapsed_s)
    if isinstance(op, Erase):
        return EraseEnded(op.erase_id, answer is not None and answer.results == b"\1")
    present = tuple(map(bool, answer.results)) if answer is not None and answer.results else None
    return ProbeEnded(op.probe_id, present)


def _place_of(op: MoverOp) -> Place:
    """The place whose movers carry this out: the slowest one involved."""
    if isinstance(op, Transfer):
        return max(op.source, op.target)
    return op.place if isinstance(op, Erase) else Place.REMOTE


def _settings(places: MoverPlaces, checksums: int | None, niceness: int) -> MoverSettings:
    """What all movers have to do with."""
    return MoverSettings(
        server_pid=os.getpid(),
        niceness=niceness,
        ring=-1,  # each its own
        block_bytes=places.gpu.block_bytes,
        block_size=places.block_size,
        gpu=places.gpu.descriptor,
        gpu_blocks=places.gpu.num_blocks,
        cpu=None if places.cpu is None else places.cpu.descriptor,
        cpu_blocks=0 if places.cpu is None else places.cpu.num_blocks,
        checksums=checksums,
        verify_all=places.verify_all,
    )
