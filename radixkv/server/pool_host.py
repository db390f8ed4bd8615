"""The gpu pool of this server: its spec once known, its arena, and the thread that copies in it."""

import logging
from collections.abc import Callable

from radixkv.core.errors import FailedPrecondition, TooLarge
from radixkv.core.results import CopyOp
from radixkv.pools.arena import Arena, ArenaError, MemfdArena
from radixkv.pools.copies import CopyThread
from radixkv.pools.layout import KVSpec
from radixkv.server.memory import MemoryBound, check_fit, tightest_bound

log = logging.getLogger(__name__)


class SpecMismatch(FailedPrecondition):
    """The pool is fixed to another geometry; the message names the fields."""


class PoolTooLarge(TooLarge):
    """The pool does not fit this machine's or cgroup's memory.

    `fitting_blocks` is a number of blocks that does fit, 0 if not even one does.
    """

    def __init__(self, message: str, fitting_blocks: int) -> None:
        super().__init__(message)
        self.fitting_blocks = fitting_blocks


class PoolHost:
    """Holds one pool of `num_blocks` blocks. Its arena exists from the first `fix_spec` on.

    Not thread safe: one thread (the event loop) fixes the spec. `memory` says what is available
    and `before_copy` is handed to the copy thread.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefault: bool = False,
        memory: Callable[[], MemoryBound] = tightest_bound,
        before_copy: Callable[[CopyOp], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.spec: KVSpec | None = None
        self.arena: Arena | None = None
        self.copies: CopyThread | None = None
        self._prefault = prefault
        self.memory = memory
        self._before_copy = before_copy

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, 0 while the spec is unknown."""
        return self.spec.block_bytes if self.spec is not None else 0

    def check_spec(self, spec: KVSpec) -> None:
        """Raise `SpecMismatch` or `PoolTooLarge` if this spec cannot use the pool. Read only."""
        if spec.block_size != self.block_size:
            raise SpecMismatch(
                f"kv_spec.block_size is {spec.block_size}, the server's is {self.block_size}: "
                f"use that, or start the server with --block-size {spec.block_size}"
            )
        if self.spec is not None:
            self._check_same_bytes(self.spec, spec)
            return
        fit = check_fit(self.memory(), self.num_blocks, spec.block_bytes, self.block_size)
        if not fit.fits:
            raise PoolTooLarge(fit.message, fit.fitting_blocks)

    def fix_spec(self, spec: KVSpec) -> Arena:
        """The arena for workers of this spec; the first call creates it.

        Later specs share the pool if their block bytes are the same. Raises as `check_spec`, and
        `PoolTooLarge` if the memory is refused by the operating system.
        """
        self.check_spec(spec)
        if self.arena is None:
            ahead = {"ahead_bytes": (self.num_blocks + 1) * spec.block_bytes}
            try:
                self.arena = MemfdArena(
                    self.num_blocks, spec.block_bytes, **(ahead if self._prefault else {})
                )
            except ArenaError as error:
                raise PoolTooLarge(str(error), 0) from None
            self.copies = CopyThread(self.arena, self._before_copy)
            self.spec = spec
            log.info("pool of %d bytes, %s", self.arena.size_bytes, spec)
        return self.arena

    def close(self) -> None:
        """Finish running copies and give the memory back; idempotent."""
        if self.copies is not None:
            self.copies.close()
            self.copies = None
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    @staticmethod
    def _check_same_bytes(fixed: KVSpec, spec: KVSpec) -> None:
        if spec.block_bytes != fixed.block_bytes:
            raise SpecMismatch(
                f"the pool has blocks of {fixed.block_bytes} bytes, this kv_spec makes them "
                f"{spec.block_bytes}: " + ", ".join("kv_spec." + d for d in spec.differences(fixed))
            )
