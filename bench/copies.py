"""How fast movers copy blocks between gpu and cpu, against processes that only copy.

As many processes as there are movers copy the same blocks of the same arenas, with numpy and
nothing else, in turns with the movers. What leaves the gpu always gets a checksum; on the way back
a sample of blocks is verified, or every block. All processes have touched all memory before.

    python -m bench.copies SOCKET_FD GPU_FD CPU_FD NUM_BLOCKS BLOCK_BYTES    (a plain copier)
"""

import asyncio
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import uvloop

from bench.measure import MIN_PAIRS, QUICK_PAIRS, Row, median_row
from radixkv.core.tier_ops import Outcome, Place, Transfer
from radixkv.pools.arena import MemfdArena
from radixkv.pools.mover_process import map_arena
from radixkv.pools.movers import MoverPlaces, Movers, OpEnded

RUN = 32  # blocks of one transfer
BYTES = 1 << 30  # of one measurement, about
PROCESSES = 2
NICENESS = 10
WARM_UPS = 3
BLOCK_SIZE = 16
SIZES = {360 << 10: "360 KiB", 2 << 20: "2 MiB"}


@dataclass(frozen=True)
class Hop:
    """A way, and how much of plain copying is aimed at."""

    name: str
    source: Place
    target: Place
    verify_all: bool
    limit: float


HOPS = (
    Hop("gpu to cpu, with checksum", Place.GPU, Place.CPU, False, 0.75),
    Hop("cpu to gpu, a sample verified", Place.CPU, Place.GPU, False, 0.95),
    Hop("cpu to gpu, all verified", Place.CPU, Place.GPU, True, 0.75),
)


def rows(quick: bool = False) -> list[Row]:
    """All rows of this part."""
    found = []
    for block_bytes in SIZES:
        for verify_all in (False, True):
            hops = [hop for hop in HOPS if hop.verify_all is verify_all]
            found += uvloop.run(_measure(block_bytes, hops, quick))
    return found


async def _measure(block_bytes: int, hops: Sequence[Hop], quick: bool) -> list[Row]:
    pairs = QUICK_PAIRS if quick else MIN_PAIRS
    num_runs = (BYTES // 4 if quick else BYTES) // block_bytes // RUN // PROCESSES * PROCESSES
    arenas = [MemfdArena(num_runs * RUN, block_bytes) for _ in range(2)]
    for arena in arenas:
        arena.prefault()
    ours = OurMovers(*arenas, hops[0].verify_all)
    theirs = PlainCopiers(*arenas)
    random = np.random.default_rng(1)
    ids = [(random.permutation(num_runs * RUN) + 1).astype(np.uint32) for _ in range(2)]
    found = []
    await ours.copy(HOPS[0], *ids)  # now all of cpu has checksums
    for hop in hops:
        for _ in range(WARM_UPS):
            await ours.copy(hop, *ids), theirs.copy(hop, *ids)
        cpu_s = time.thread_time()
        for _ in range(pairs):
            await ours.copy(hop, *ids)
        cpu_us = (time.thread_time() - cpu_s) / pairs / num_runs * 1e6
        both = [(await ours.copy(hop, *ids), theirs.copy(hop, *ids)) for _ in range(pairs)]
        size = num_runs * RUN * block_bytes / 1e9
        mine, other = (size * pairs / sum(column) for column in zip(*both, strict=True))
        name = f"{hop.name}, {SIZES[block_bytes]} blocks ÷ plain copies"
        note = f"{mine:.1f} GB/s, plain {other:.1f}; server's CPU {cpu_us:.0f} µs a transfer"
        ratios = [their_s / our_s for our_s, their_s in both]
        found.append(median_row(name, ratios, "x", hop.limit, at_least=True, note=note))
    ours.movers.close()
    theirs.close()
    for arena in arenas:
        arena.close()
    return found


class OurMovers:
    """Movers, driven as the server does."""

    def __init__(self, gpu: MemfdArena, cpu: MemfdArena, verify_all: bool) -> None:
        places = MoverPlaces(gpu, BLOCK_SIZE, cpu, verify_all=verify_all)
        self.movers = Movers(places, self._note, num_processes=PROCESSES, niceness=NICENESS)
        self._left = 0
        self._all_done = True
        self._all_ended = asyncio.Event()

    def _note(self, ended: list[OpEnded]) -> None:
        self._all_done &= all(outcome is Outcome.DONE for end in ended for outcome in end[1])
        self._left -= len(ended)
        if not self._left:
            self._all_ended.set()

    async def copy(self, hop: Hop, gpu_ids: np.ndarray, cpu_ids: np.ndarray) -> float:
        """Seconds to copy all blocks."""
        sides = (gpu_ids, cpu_ids) if hop.source is Place.GPU else (cpu_ids, gpu_ids)
        sources, targets = (side.tolist() for side in sides)
        ops = [
            Transfer(
                at, hop.source, hop.target,
                tuple(sources[at : at + RUN]), tuple(targets[at : at + RUN]), b"", (),
            )
            for at in range(0, len(sources), RUN)
        ]  # fmt: skip
        self._left = len(ops)
        self._all_ended.clear()
        start = time.perf_counter()
        for op in ops:
            self.movers.submit(op)
        await self._all_ended.wait()
        seconds = time.perf_counter() - start
        assert self._all_done
        return seconds


class PlainCopiers:
    """Processes that copy their share of the blocks when told to."""

    def __init__(self, gpu: MemfdArena, cpu: MemfdArena) -> None:
        self._sockets, self._processes = [], []
        for _ in range(PROCESSES):
            mine, theirs = socket.socketpair()
            passed = [theirs.fileno(), gpu.descriptor, cpu.descriptor]
            numbers = [*passed, gpu.num_blocks, gpu.block_bytes]
            command = [sys.executable, "-m", "bench.copies", *map(str, numbers)]
            self._processes.append(subprocess.Popen(command, pass_fds=passed))
            self._sockets.append(mine)
            theirs.close()

    def copy(self, hop: Hop, gpu_ids: np.ndarray, cpu_ids: np.ndarray) -> float:
        """Seconds to copy all blocks; the ids are sent before."""
        shares = [np.array_split(ids, PROCESSES) for ids in (gpu_ids, cpu_ids)]
        for connection, *share in zip(self._sockets, *shares, strict=True):
            header = struct.pack("<BI", hop.source is Place.GPU, len(share[0]))
            connection.sendall(header + share[0].tobytes() + share[1].tobytes())
            assert connection.recv(1)
        start = time.perf_counter()
        for connection in self._sockets:
            connection.sendall(b"g")
        for connection in self._sockets:
            assert connection.recv(1)
        return time.perf_counter() - start

    def close(self) -> None:
        """End them."""
        for connection, process in zip(self._sockets, self._processes, strict=True):
            connection.close()
            process.wait()


def plain_copier(arguments: list[int]) -> None:
    """One of them, until its socket ends."""
    os.nice(NICENESS)
    descriptor, gpu_fd, cpu_fd, num_blocks, block_bytes = arguments
    gpu, cpu = (map_arena(number, num_blocks, block_bytes) for number in (gpu_fd, cpu_fd))
    with socket.socket(fileno=descriptor) as connection:
        while len(header := connection.recv(5, socket.MSG_WAITALL)) == 5:
            from_gpu, count = struct.unpack("<BI", header)
            ids = np.frombuffer(connection.recv(8 * count, socket.MSG_WAITALL), np.uint32)
            pairs = list(zip(ids[:count].tolist(), ids[count:].tolist(), strict=True))
            connection.sendall(b"r")
            connection.recv(1)
            for at_gpu, at_cpu in pairs:
                if from_gpu:
                    np.copyto(cpu[at_cpu], gpu[at_gpu])
                else:
                    np.copyto(gpu[at_gpu], cpu[at_cpu])
            connection.sendall(b"d")


if __name__ == "__main__":
    plain_copier([int(argument) for argument in sys.argv[1:]])
