"""The places below the gpu of this server, and who carries out what the core decides about them.

Theory of operation
    `Tiers()` makes everything before the server listens: the cpu arena, the nvme store and what it
    finds there. `start` starts the movers, in the event loop. From then on the runtime hands over
    the core's operations at the end of each batch (`carry_out`); their ends come back into the loop
    and are a batch of their own. Memory of target blocks is made sure of here, since the mover that
    touches it first must not be the one it is charged to.
    A tier that fails is the core's to leave alone for a while; here its last problem is kept for
    people, and logged when it changes.
"""

import logging
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from radixkv.core.cache import Cache
from radixkv.core.errors import Exhausted
from radixkv.core.results import CacheConfig
from radixkv.core.tier_ops import Outcome, Place, StoredBlock, TierOp, Transfer
from radixkv.pools.arena import ArenaError, MemfdArena
from radixkv.pools.movers import (
    EraseEnded,
    MoverPlaces,
    Movers,
    OpEnded,
    ProbeEnded,
    TransferEnded,
)
from radixkv.pools.nvme import NvmeStore
from radixkv.server.memory import check_fit, format_bytes
from radixkv.server.pool_host import PoolHost, PoolTooLarge
from radixkv.server.settings import Settings
from radixkv.v1 import cache_pb2

if TYPE_CHECKING:
    from radixkv.server.runtime import Runtime

log = logging.getLogger(__name__)


class Tiers:
    """What lies below the gpu pool of `pool_host`, whose spec is fixed."""

    def __init__(self, settings: Settings, pool_host: PoolHost) -> None:
        """Open all of it. Raises PoolTooLarge, ArenaError, NvmeError."""
        assert pool_host.arena is not None, "tiers need the spec"
        self._settings = settings
        self._pool_host = pool_host
        self._runtime: Runtime | None = None
        self._movers: Movers | None = None
        self._cpu: MemfdArena | None = None
        self._nvme: NvmeStore | None = None
        self._problems: dict[Place, str] = {}
        self._found: list[StoredBlock] = []
        self._ignored = 0
        try:
            self._open_cpu()
            self._open_nvme()
        except BaseException:
            self.close()
            raise

    def _open_cpu(self) -> None:
        settings, host = self._settings, self._pool_host
        if not settings.cpu_blocks:
            return
        both = settings.gpu_blocks + settings.cpu_blocks
        fit = check_fit(host.memory(), both, host.block_bytes, host.block_size)
        if not fit.fits:
            room = max(fit.fitting_blocks - settings.gpu_blocks, 0)
            raise PoolTooLarge(
                f"{settings.gpu_blocks} gpu blocks and {settings.cpu_blocks} cpu blocks, all in"
                f" host memory, need {format_bytes((both + 2) * host.block_bytes)}, and"
                f" {fit.fitting_blocks} fit: --cpu-blocks {room}",
                fit.fitting_blocks,
            )
        self._cpu = MemfdArena(settings.cpu_blocks, host.block_bytes)

    def _open_nvme(self) -> None:
        settings, host = self._settings, self._pool_host
        if settings.nvme_path is None:
            return
        began_s = time.monotonic()
        self._nvme = store = NvmeStore(
            settings.nvme_path, settings.nvme_blocks, host.block_bytes, host.block_size,
            unix_offset_ms=(time.time_ns() - time.monotonic_ns()) // 1_000_000,
        )  # fmt: skip
        found = store.scan()
        self._found = found.blocks
        self._ignored = found.ignored.total()
        log.info(
            "nvme: %d records found, %d ignored%s, in %.1f s; %s",
            len(found.blocks), self._ignored, f" {dict(found.ignored)}" if found.ignored else "",
            time.monotonic() - began_s, "direct I/O" if store.direct else "buffered I/O",
        )  # fmt: skip
        if store.usable_blocks < settings.nvme_blocks:
            log.warning(
                "nvme: only %d of %d blocks have room: %s",
                store.usable_blocks, settings.nvme_blocks, store.problem,
            )  # fmt: skip
            self._problems[Place.NVME] = store.problem or "there is no room"

    def fit(self, config: CacheConfig) -> CacheConfig:
        """The core's configuration with what there really is."""
        return replace(config, nvme_blocks=self.nvme_blocks)

    @property
    def nvme_blocks(self) -> int:
        """Slots there is room for on the disk."""
        return 0 if self._nvme is None else self._nvme.usable_blocks

    def start(self, runtime: "Runtime") -> None:
        """Give the core what was found, and start the movers. Raises OSError."""
        self._runtime = runtime
        used = runtime.cache.restore(self._found, runtime.now_ms())
        if self._found:
            log.info("nvme: %d of %d records are in use", used, len(self._found))
            runtime.models.add_restored(runtime.cache.namespaces())
        self._ignored += len(self._found) - used
        self._found = []
        assert self._pool_host.arena is not None
        self._movers = Movers(
            MoverPlaces(
                gpu=self._pool_host.arena,
                block_size=self._pool_host.block_size,
                cpu=self._cpu,
                nvme=self._nvme,
                remote_url=self._settings.remote,
                verify_all=self._settings.verify == "all",
            ),
            self._ended,
            num_processes=self._settings.movers,
        )

    def carry_out(self, ops: list[TierOp]) -> None:
        """Begin what the core has decided; never blocks on a copy."""
        if self._movers is None:
            return
        refused: list[OpEnded] = []
        for op in ops:
            if isinstance(op, Transfer) and not self._has_memory(op):
                failed = (Outcome.FAILED,) * len(op.target_ids)
                refused.append(TransferEnded(op.transfer_id, failed, 0.0))
            else:
                self._movers.submit(op)
        if refused:
            assert self._runtime is not None
            self._runtime.loop.call_soon(self._ended, refused)

    def _has_memory(self, op: Transfer) -> bool:
        """Make sure of the memory that a mover will write to."""
        assert self._runtime is not None
        try:
            if op.target is Place.GPU:
                self._runtime.backing.back(max(op.target_ids))
            elif op.target is Place.CPU:
                assert self._cpu is not None
                self._cpu.ensure(max(op.target_ids))
        except (Exhausted, ArenaError) as error:
            self._note(op.target, str(error))
            return False
        return True

    def _ended(self, ended: list[OpEnded]) -> None:
        runtime = self._runtime
        if runtime is None or self._movers is None:
            return
        cache, now_ms = runtime.cache, runtime.now_ms()
        for end in ended:
            if isinstance(end, TransferEnded):
                cache.transfer_done(end.transfer_id, end.outcomes, end.elapsed_s, now_ms)
            elif isinstance(end, EraseEnded):
                cache.erase_done(end.erase_id, end.ok, now_ms)
            else:
                assert isinstance(end, ProbeEnded)
                cache.probe_done(end.probe_id, end.present, now_ms)
        for place, problem in self._movers.problems().items():
            self._note(place, problem)
        runtime.settle()

    def _note(self, place: Place, problem: str) -> None:
        if self._problems.get(place) != problem:
            self._problems[place] = problem
            log.warning("%s tier: %s", place.name.lower(), problem)

    def report(self, cache: Cache, now_ms: int) -> list[cache_pb2.Tier]:
        """Each tier as tools see it, fastest first."""
        places = [place for place in cache.places() if place is not Place.GPU]
        if self._nvme is not None and not self.nvme_blocks:
            places.append(Place.NVME)  # it has no room at all, and says so
        if self._settings.remote is not None:
            places.append(Place.REMOTE)
        return [self._report(cache, place, now_ms) for place in places]

    def _report(self, cache: Cache, place: Place, now_ms: int) -> cache_pb2.Tier:
        health = cache.health(place)
        block_bytes = self._pool_host.block_bytes
        read_s = cache.move_s(place, Place.GPU)
        write_s = min(
            (seconds for source in Place if (seconds := cache.move_s(source, place)) is not None),
            default=None,
        )
        problem = self._problems.get(place, "")
        if health.is_degraded(now_ms) and not problem:
            problem = "its operations take far too long"
        tier = cache_pb2.Tier(
            name=place.name.lower(),
            state=cache_pb2.Tier.DEGRADED if health.is_degraded(now_ms) else cache_pb2.Tier.OK,
            problem=problem,
            read_blocks=health.reads.done_blocks,
            written_blocks=health.writes.done_blocks,
            failed_reads=health.reads.failed_blocks,
            failed_writes=health.writes.failed_blocks,
            bad_blocks=health.bad_blocks,
            hit_tokens=health.hit_tokens,
            read_bytes_per_second=block_bytes / read_s if read_s else 0.0,
            write_bytes_per_second=block_bytes / write_s if write_s else 0.0,
        )
        if place is Place.NVME and not self.nvme_blocks:
            tier.state = cache_pb2.Tier.DEGRADED
        elif place is not Place.REMOTE:
            books = cache.books(place)
            tier.books.CopyFrom(cache_pb2.Books(**asdict(books)))
            tier.evicted_blocks = cache.evicted_from(place)
        if place is Place.NVME:
            tier.ignored_records = self._ignored
        return tier

    def close(self) -> None:
        """End the movers and give everything back; idempotent."""
        if self._movers is not None:
            self._movers.close()
            self._movers = None
        if self._nvme is not None:
            self._nvme.close()
            self._nvme = None
        if self._cpu is not None:
            self._cpu.close()
            self._cpu = None
