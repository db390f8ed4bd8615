"""What the nvme store asks of the operating system, in one place where tests put faults."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DIRECT = os.O_DIRECT


class DiskIO:
    """Calls of the operating system, each of which raises OSError as it does."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file of ours; a link in its place is refused, so nothing outside is written."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)

    def allocate(self, descriptor: int, offset: int, length: int) -> None:
        """Make the file that long and have room on the disk for it."""
        os.posix_fallocate(descriptor, offset, length)

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut the file off, durably."""
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file of ours, durably."""
        os.unlink(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """Bytes written; whether they are durable is up to `sync`."""
        return os.pwritev(descriptor, buffers, offset)

    def read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        """Bytes read; fewer at the end of the file."""
        return os.preadv(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        """Make durable what any process has written to the file."""
        os.fdatasync(descriptor)

    def next_data(self, descriptor: int, offset: int) -> int | None:
        """The first byte from `offset` on that was ever written, or None; `offset` if unknown."""
        try:
            return os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            return None if error.errno == errno.ENXIO else offset

    def advise(self, descriptor: int, offset: int, length: int, advice: int) -> None:
        """Say how the system's cache will be used; 0 bytes = to the end of the file."""
        os.posix_fadvise(descriptor, offset, length, advice)
