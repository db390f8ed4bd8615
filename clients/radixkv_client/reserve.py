"""The client's side of the session's reserve: private blocks that leases draw without a round trip.

The server counts a block as reserved until a Commit names it, so a block that a lease has drawn
still counts here. States of a block: free (here) -> drawn (by a lease, not named) -> named (gone).
"""

from array import array
from collections.abc import Iterable

REFILL_BLOCKS = 32


class Reserve:
    """Blocks of one session's reserve. Not thread-safe; the client holds a lock."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._free = array("i")
        self._num_drawn = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be drawn now."""
        return len(self._free)

    @property
    def num_drawn(self) -> int:
        """Blocks that leases have drawn and no Commit has named."""
        return self._num_drawn

    def add(self, blocks: array) -> int:
        """Blocks that came from the server: a Refill, or whole blocks that a Trim freed."""
        self._free.extend(blocks)
        return len(blocks)

    def draw(self, num_blocks: int) -> array:
        """Take blocks for a lease; the newest first, whose memory is warm."""
        assert 0 < num_blocks <= len(self._free), "draw more than is free"
        drawn = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        self._num_drawn += num_blocks
        return drawn

    def put_back(self, blocks: Iterable[int]) -> None:
        """Blocks that a lease drew and did not name."""
        before = len(self._free)
        self._free.extend(blocks)
        self._num_drawn -= len(self._free) - before
        assert self._num_drawn >= 0, "more blocks put back than drawn"

    def named(self, num_blocks: int) -> None:
        """A Commit names so many drawn blocks; the server takes them out of the reserve."""
        self._num_drawn -= num_blocks
        assert self._num_drawn >= 0, "more blocks named than drawn"

    def refused(self, num_blocks: int) -> None:
        """The Commit that named so many blocks was refused; they are drawn as before."""
        self._num_drawn += num_blocks

    def refill_size(self, num_wanted: int) -> int:
        """Blocks to ask for so that `num_wanted` can be drawn, 0 if the reserve is too small."""
        room = self.max_blocks - len(self._free) - self._num_drawn
        missing = num_wanted - len(self._free)
        bulk = min(REFILL_BLOCKS, self.max_blocks // 4)
        return min(max(missing, bulk), room) if missing <= room else 0

    def withdraw(self, num_blocks: int) -> array:
        """Take up to so many free blocks out, to give them back to the server."""
        count = min(num_blocks, len(self._free))
        withdrawn = self._free[:count]
        del self._free[:count]
        return withdrawn
