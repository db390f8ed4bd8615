"""Memory for blocks before a worker hears of their ids."""

from radixkv.core.errors import Exhausted
from radixkv.pools.arena import ArenaError
from radixkv.server.pool_host import PoolHost


class Backing:
    """Asks the arena for memory up to the highest block id handed out so far.

    Ids are first handed out in ascending order, so `complete` becomes true at the latest when the
    pool has been full once, and costs nothing from then on. Only used once the pool exists.
    """

    __slots__ = ("_backed", "_handed", "_num_blocks", "_pool_host", "complete")

    def __init__(self, pool_host: PoolHost, num_blocks: int) -> None:
        self._pool_host = pool_host
        self._num_blocks = num_blocks
        self._handed = 0  # highest id the cache has given, also if it was taken back
        self._backed = 0
        self.complete = False

    def back(self, highest: int) -> None:
        """Return once blocks up to id `highest`, just given by the cache, have memory.

        Raises Exhausted; the caller takes the blocks back then.
        """
        if highest > self._handed:
            self._handed = highest
        if highest > self._backed:
            self._ensure(highest)
            self._backed = highest
            self.complete = highest == self._num_blocks

    def prepare(self, count: int) -> None:
        """Make sure that any `count` blocks the cache gives next have memory. Raises Exhausted."""
        self._ensure(min(self._handed + count, self._num_blocks))

    def _ensure(self, highest: int) -> None:
        arena = self._pool_host.arena
        assert arena is not None, "blocks are handed out only after a Hello"
        try:
            arena.ensure(highest)
        except ArenaError as error:
            raise Exhausted(str(error)) from None
