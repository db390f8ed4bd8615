"""How fast the nvme store moves blocks, against `dd` with direct I/O, and how fast it starts.

Both work on files that are allocated and were written before, on the file system of the current
directory, in turns. The store moves runs of 32 blocks, as movers do; its reads verify each header
and payload. Scans are of records with a 4 KiB payload (a stride of 8 KiB), found by a new store
object after the system's cache of the files was dropped.
"""

import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from bench.measure import MIN_PAIRS, QUICK_PAIRS, Row, median_row
from radixkv.core.digest import block_digest, root_digest
from radixkv.core.tier_ops import BlockIdentity, Outcome
from radixkv.pools.nvme import NvmeStore

BLOCK_SIZE = 16
RUN = 32  # blocks of one call
RUNS = {2 << 20: 4, 360 << 10: 22}  # block bytes: runs of one measurement, about 256 MiB
SCANNED = 100_000
SCANS = 7
NAMESPACE = b"bench" * 20


def rows(quick: bool = False) -> list[Row]:
    """All rows of this part."""
    num_pairs = QUICK_PAIRS if quick else MIN_PAIRS
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-nvme-") as name:
        found = []
        for block_bytes, runs in RUNS.items():
            found += throughput_rows(Path(name) / str(block_bytes), block_bytes, runs, num_pairs)
        found.append(scan_row(Path(name) / "scan", SCANNED // 10 if quick else SCANNED))
        return found


def throughput_rows(directory: Path, block_bytes: int, runs: int, num_pairs: int) -> list[Row]:
    """Writes and reads of the store ÷ those of dd."""
    blocks = StoredBlocks(directory, runs * RUN, block_bytes)
    dd = Dd(directory / "dd", block_bytes, runs * RUN)
    mode = "direct" if blocks.store.direct else "buffered"
    found = []
    for name, ours, theirs in (
        ("write", blocks.write, dd.write),
        ("read", blocks.read, dd.read),
    ):
        ours(), theirs()
        both = [(ours(), theirs()) for _ in range(num_pairs)]
        ratios = [other / mine for mine, other in both]
        size = runs * RUN * block_bytes
        mine, other = (size * num_pairs / sum(column) / 1e9 for column in zip(*both, strict=True))
        note = f"{mine:.2f} GB/s ({mode}), dd {other:.2f} GB/s"
        title = f"nvme {name}, {block_bytes >> 10:,} KiB blocks ÷ dd"
        found.append(median_row(title, ratios, "x", 0.9, at_least=True, note=note))
    blocks.store.close()
    dd.path.unlink()
    return found


class StoredBlocks:
    """A store and one run of payloads, aligned as those of an arena are."""

    def __init__(
        self, directory: Path, num_blocks: int, block_bytes: int, namespace: bytes = NAMESPACE,
        chain_blocks: int | None = None,
    ) -> None:  # fmt: skip
        """Blocks of one sequence, or of several of `chain_blocks` each."""
        self.store = NvmeStore(directory, num_blocks, block_bytes, BLOCK_SIZE)
        self.num_blocks, self.namespace = num_blocks, namespace
        self.identities = identities(num_blocks, namespace, chain_blocks or num_blocks)
        memory = np.frombuffer(mmap.mmap(-1, RUN * block_bytes), np.uint8)
        self.payloads = list(memory.reshape(RUN, block_bytes))
        memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
        self.checksums = [xxh3_64_intdigest(payload.data) for payload in self.payloads]

    def write(self) -> float:
        """Seconds to write all blocks."""
        return self._all(
            lambda slots, names: self.store.write(
                slots, self.namespace, names, self.payloads[: len(slots)], self.checksums
            )
        )

    def read(self) -> float:
        """Seconds to read all blocks."""
        return self._all(
            lambda slots, names: self.store.read(
                slots, self.namespace, names, self.payloads[: len(slots)]
            )
        )

    def _all(self, call: Callable[[range, list[BlockIdentity]], list[Outcome]]) -> float:
        start = time.perf_counter()
        for first in range(0, self.num_blocks, RUN):
            end = min(first + RUN, self.num_blocks)
            outcomes = call(range(first + 1, end + 1), self.identities[first:end])
            assert set(outcomes) == {Outcome.DONE}, self.store.problem
        return time.perf_counter() - start


def identities(count: int, namespace: bytes, chain_blocks: int) -> list[BlockIdentity]:
    """The blocks of sequences of that length."""
    found: list[BlockIdentity] = []
    for index in range(count):
        parent = found[-1].digest if index % chain_blocks else root_digest(namespace)
        tokens = np.full(BLOCK_SIZE, index, "<i4").tobytes()
        found.append(BlockIdentity(block_digest(parent, tokens), parent, tokens))
    return found


class Dd:
    """dd, with a file of its own."""

    def __init__(self, path: Path, block_bytes: int, count: int) -> None:
        self.path = path
        self._sizes = [f"bs={block_bytes}", f"count={count}"]

    def write(self) -> float:
        """Seconds to write the file."""
        return self._run("if=/dev/zero", f"of={self.path}", "oflag=direct", "conv=notrunc")

    def read(self) -> float:
        """Seconds to read it."""
        return self._run(f"if={self.path}", "of=/dev/null", "iflag=direct")

    def _run(self, *arguments: str) -> float:
        """The time that dd says it took, without its start."""
        done = subprocess.run(
            ["dd", *self._sizes, *arguments],
            env=os.environ | {"LC_ALL": "C"}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return float(done.stderr.rsplit("copied, ", 1)[1].split(" s", 1)[0])


def forget_cached(directory: Path) -> None:
    """Have the system drop what it caches of these files, as after a reboot."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def scan_row(directory: Path, count: int) -> Row:
    """Seconds until the records of a full store are known."""
    blocks = StoredBlocks(directory, count, 4096)
    blocks.write()
    attachment = blocks.store.attachment
    blocks.store.close()
    values = []
    for _ in range(SCANS):
        forget_cached(directory)
        store = NvmeStore.attach(attachment)
        start = time.perf_counter()
        assert len(store.scan().blocks) == count
        values.append((time.perf_counter() - start) * 100_000 / count)
        store.close()
    note = f"{count:,} records with a payload of 4 KiB"
    return median_row("nvme scan at start, per 100,000 records", values, "s", note=note)
