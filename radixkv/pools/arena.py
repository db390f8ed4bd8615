"""Arenas: where the bytes of a pool are, as a descriptor that other processes can map.

Theory of operation of `MemfdArena`: the file has its full size from the start, its memory has not.
A page that nobody has touched is allocated by the first toucher, is charged to *its* cgroup and
kills it with SIGBUS when there is none; so the server allocates every block's pages itself before
it hands the block's id out. Ids are handed out in ascending order at first, hence one high-water
mark says what is there. A thread keeps up to `AHEAD_BYTES` allocated in front of that mark.
States: growing (thread runs) -> complete (everything allocated) or closed. Invariant:
0 <= allocated_bytes <= size_bytes, and it only grows.
"""

import errno
import fcntl
import mmap
import os
import threading
from typing import Protocol

import numpy as np
import numpy.typing as npt

AHEAD_BYTES = 256 << 20
CHUNK_BYTES = 16 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_EXPLANATIONS = {
    errno.ENOSPC: "there is no memory left",
    errno.ENOMEM: "there is no memory left",
    errno.EFBIG: "it exceeds the largest file size allowed (ulimit -f)",
    errno.EMFILE: "too many files are open (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine",
}


class ArenaError(Exception):
    """The arena cannot have the memory it needs; the message gives the numbers."""

    code = "EXHAUSTED"


class Arena(Protocol):
    """Memory of one pool: blocks 0..num_blocks, id 0 being the null block."""

    kind: str
    device: str
    num_blocks: int
    block_bytes: int

    @property
    def size_bytes(self) -> int:
        """(num_blocks + 1) * block_bytes."""
        ...

    @property
    def descriptor(self) -> int:
        """File descriptor to pass to workers; valid until `close`."""
        ...

    def ensure(self, max_block_id: int) -> None:
        """Return once the memory of blocks 0..max_block_id is really there; raises `ArenaError`.

        Thread safe, O(1) when it already is.
        """
        ...

    def prefault(self) -> None:
        """Allocate everything now; raises `ArenaError`. Returns early if closed meanwhile."""
        ...

    def view(self) -> npt.NDArray[np.uint8]:
        """The server's own mapping, uint8 [num_blocks + 1, block_bytes]."""
        ...

    def close(self) -> None:
        """Give everything back; idempotent. Workers' mappings stay valid, views as well."""
        ...


class MemfdArena:
    """An anonymous, sealed memory file (device cpu)."""

    kind = "memfd"
    device = "cpu"

    def __init__(self, num_blocks: int, block_bytes: int, ahead_bytes: int = AHEAD_BYTES) -> None:
        """Raises `ArenaError` if the file cannot be made or its first block has no memory."""
        assert num_blocks >= 1 and block_bytes >= 1
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._ahead_bytes = ahead_bytes
        self._allocated_bytes = 0
        self._wanted_bytes = 0
        self._closed = False
        self._grow = threading.Lock()
        self._wake = threading.Event()
        self._descriptor = self._create()
        try:
            self._view = self._map()
            self.ensure(0)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._thread = threading.Thread(target=self._run_ahead, name="arena", daemon=True)
        self._thread.start()

    @property
    def size_bytes(self) -> int:
        """(num_blocks + 1) * block_bytes."""
        return (self.num_blocks + 1) * self.block_bytes

    @property
    def descriptor(self) -> int:
        """File descriptor to pass to workers; valid until `close`."""
        return self._descriptor

    @property
    def allocated_bytes(self) -> int:
        """Bytes from the start of the file whose memory is there."""
        return self._allocated_bytes

    def ensure(self, max_block_id: int) -> None:
        """Return once the memory of blocks 0..max_block_id is really there; raises `ArenaError`."""
        assert 0 <= max_block_id <= self.num_blocks and not self._closed
        need = (max_block_id + 1) * self.block_bytes
        if need > self._wanted_bytes:
            self._wanted_bytes = need
            self._wake.set()
        while self._allocated_bytes < need and not self._closed:
            self._allocate_chunk(need)

    def prefault(self) -> None:
        """Allocate everything now; raises `ArenaError`. Returns early if closed meanwhile."""
        while self._allocated_bytes < self.size_bytes and not self._closed:
            self._allocate_chunk(self.size_bytes)

    def view(self) -> npt.NDArray[np.uint8]:
        """The server's own mapping, uint8 [num_blocks + 1, block_bytes]."""
        return self._view

    def close(self) -> None:
        """Give everything back; idempotent. Workers' mappings and views stay valid."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self._thread.join()
        with self._grow:
            os.close(self._descriptor)
        self._view = np.empty((0, self.block_bytes), np.uint8)

    def _create(self) -> int:
        descriptor = -1
        try:
            descriptor = os.memfd_create("radixkv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, self.size_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        except (OSError, OverflowError) as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise self._error(error) from None
        return descriptor

    def _map(self) -> npt.NDArray[np.uint8]:
        try:
            mapping = mmap.mmap(self._descriptor, self.size_bytes)
        except (OSError, OverflowError) as error:
            raise self._error(error) from None
        return np.frombuffer(mapping, np.uint8).reshape(self.num_blocks + 1, self.block_bytes)

    def _allocate_chunk(self, upto: int) -> None:
        """Allocate at most CHUNK_BYTES more, not beyond `upto`. Mutates the high-water mark."""
        with self._grow:
            start = self._allocated_bytes
            length = min(CHUNK_BYTES, upto - start)
            if self._closed or length <= 0:
                return
            try:
                os.posix_fallocate(self._descriptor, start, length)
            except OSError as error:
                raise self._error(error) from None
            self._allocated_bytes = start + length

    def _run_ahead(self) -> None:
        while self._allocated_bytes < self.size_bytes:
            target = min(self._wanted_bytes + self._ahead_bytes, self.size_bytes)
            try:
                while self._allocated_bytes < target and not self._closed:
                    self._allocate_chunk(target)
            except ArenaError:
                pass  # whoever needs the block is told by its own `ensure`
            self._wake.wait()
            self._wake.clear()
            if self._closed:
                return

    def _error(self, error: OSError | OverflowError) -> ArenaError:
        number = error.errno if isinstance(error, OSError) else errno.EFBIG
        why = _EXPLANATIONS.get(number or 0, str(error))
        return ArenaError(
            f"host memory for the pool: {why}; {self._allocated_bytes} of {self.size_bytes} bytes "
            f"({self.num_blocks} blocks of {self.block_bytes} bytes) are allocated: "
            "set a smaller --gpu-blocks"
        )
