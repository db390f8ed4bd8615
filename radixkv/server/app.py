"""The server process: start-up order, readiness, drain.

States: starting -> serving -> draining -> stopped. While starting, everything that can be refused
is refused before anything is served: memory, lock, sockets and ports, in this order. The first
SIGTERM or SIGINT starts the drain: no new Acquire, everything else goes on until no lease is left
or the time is over. The second one stops at once.
"""

import asyncio
import logging
import signal

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from radixkv import __version__
from radixkv.pools.arena import ArenaError
from radixkv.server.admin import AdminToken
from radixkv.server.attach import AttachServer
from radixkv.server.environment import freeze_loaded_objects
from radixkv.server.grpc_service import add_cache_service
from radixkv.server.http import HttpServer
from radixkv.server.pool_host import PoolHost, PoolTooLarge
from radixkv.server.runtime import Runtime
from radixkv.server.settings import Address, Settings
from radixkv.server.sockets import (
    SocketDir,
    StartError,
    bind_tcp,
    check_tcp_free,
    private_umask,
)
from radixkv.server.specs import load_spec
from radixkv.server.tiers import Tiers
from radixkv.v1 import cache_pb2
from radixkv.wire.channel import server_options
from radixkv.wire.plain import as_plain

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_CANNOT_START = 1
EXIT_LEASES_LOST = 3  # stopped while leases were held

CACHE_SERVICE = cache_pb2.DESCRIPTOR.services_by_name["Cache"].full_name
DRAIN_POLL_S = 0.02
GRPC_STOP_GRACE_S = 0.5


class Signals:
    """Counts SIGTERM and SIGINT: the first asks for a drain, the second for the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.drain = asyncio.Event()
        self.stop_now = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.stop_now if self.drain.is_set() else self.drain).set()


class App:
    """One server. `start` and `stop` run in the event loop, which owns everything in here."""

    def __init__(
        self,
        settings: Settings,
        pool_host: PoolHost,
        sockets: SocketDir,
        token: AdminToken | None,
        tiers: Tiers | None,
    ) -> None:
        self._settings = settings
        self._tiers = tiers
        self._pool_host = pool_host
        self._sockets = sockets
        self._token = token
        self._health = HealthServicer()
        self._grpc: grpc.aio.Server | None = None
        self._http: HttpServer | None = None
        self._attach: AttachServer | None = None
        self._draining = False
        self.runtime: Runtime | None = None
        self.tools_address = "off"
        self.http_address = "off"

    def bind(self) -> None:
        """Make the runtime and take all addresses; raises `StartError`. Serves nothing yet."""
        settings = self._settings
        config = settings.cache_config()
        if self._tiers is not None:
            config = self._tiers.fit(config)
        try:
            self.runtime = Runtime(config, self._pool_host, settings, self._tiers)
        except OSError as error:
            raise StartError(f"the movers of the tiers cannot start: {error}") from None
        self._bind_http()
        self._bind_grpc()

    async def start(self) -> None:
        """Serve on what `bind` took."""
        assert self._grpc is not None and self.runtime is not None
        await self._grpc.start()
        self._attach = AttachServer(self.runtime, self._sockets.paths.attach)
        with private_umask():
            await self._attach.start()
        if self._http is not None:
            await self._http.start()
        for service in ("", CACHE_SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def ready_line(self) -> str:
        """The line that says where everything is."""
        settings = self._settings
        nvme_blocks = self._tiers.nvme_blocks if self._tiers is not None else 0
        return (
            f"radixkv-server {__version__} ready: attach={self._sockets.paths.attach} "
            f"grpc={self._sockets.paths.grpc_target} tools={self.tools_address} "
            f"http={self.http_address} device=cpu gpu_blocks={settings.gpu_blocks} "
            f"cpu_blocks={settings.cpu_blocks} nvme_blocks={nvme_blocks} "
            f"remote={settings.remote or 'off'} "
            f"block_size={settings.block_size} kv_spec={settings.kv_spec or 'unset'}"
        )

    async def drain(self, stop_now: asyncio.Event) -> int:
        """Wait until no lease is left, `drain_timeout` is over or `stop_now`; the exit code."""
        assert self.runtime is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.drain_timeout
        self._draining = True
        await self._health.enter_graceful_shutdown()
        self.runtime.start_draining()
        log.info("draining: %d leases", self.runtime.num_leases)
        while self.runtime.num_leases and loop.time() < deadline and not stop_now.is_set():
            await asyncio.sleep(DRAIN_POLL_S)
        while self.runtime.flush() and loop.time() < deadline and not stop_now.is_set():
            await asyncio.sleep(DRAIN_POLL_S)
        if self.runtime.num_leases:
            log.warning("stopping with %d leases", self.runtime.num_leases)
            return EXIT_LEASES_LOST
        return EXIT_OK

    async def stop(self) -> None:
        """Tell every session, close everything; also after a `start` that failed half-way."""
        if self.runtime is not None:
            self.runtime.close()
        if self._attach is not None:
            await self._attach.stop()
        if self._grpc is not None:
            await self._grpc.stop(GRPC_STOP_GRACE_S)
        if self._http is not None:
            await self._http.stop()
        if self._tiers is not None:
            self._tiers.close()
        # Copies that still run report to this loop, so they must end before it does.
        await asyncio.to_thread(self._pool_host.close)

    def _bind_http(self) -> None:
        address = self._settings.http
        if address is None:
            return
        runtime = self.runtime
        assert runtime is not None
        listener = bind_tcp(address, "HTTP (healthz, readyz, stats)", "--http")
        self._http = HttpServer(
            listener,
            is_ready=lambda: not self._draining,
            stats=lambda: as_plain(runtime.stats()),
            token=None if address.is_loopback else self._token,
        )
        self.http_address = str(Address(address.host, listener.getsockname()[1]))

    def _bind_grpc(self) -> None:
        assert self.runtime is not None
        self._grpc = server = grpc.aio.server(options=server_options())
        address = self._settings.listen
        beyond = address is not None and not address.is_loopback
        add_cache_service(server, self.runtime, self._token, reads_need_token=beyond)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (
            CACHE_SERVICE,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        )
        reflection.enable_server_reflection(names, server)
        with private_umask():
            self._sockets.bind_grpc(lambda target: _add_port(server, target, "--socket-dir"))
        if address is not None:
            check_tcp_free(address, "gRPC for tools", "--listen")
            port = _add_port(server, str(address), "--listen")
            self.tools_address = str(Address(address.host, port))


def _add_port(server: grpc.aio.Server, target: str, option: str) -> int:
    try:
        return server.add_insecure_port(target)
    except RuntimeError:
        raise StartError(f"gRPC cannot listen on {target}: set another {option}") from None


def run(settings: Settings) -> int:
    """Run a server until it is told to stop; returns the exit code.

    Raises `StartError`, `SpecError`, `TokenError`, `PoolTooLarge` or `ArenaError` if it cannot
    start; nothing is left behind then.
    """
    token = AdminToken.read(settings.admin_token_file) if settings.admin_token_file else None
    pool_host = PoolHost(settings.gpu_blocks, settings.block_size, prefault=settings.prefault)
    spec = load_spec(settings.kv_spec, settings.block_size) if settings.kv_spec else None
    if spec is not None:
        pool_host.check_spec(spec)
    sockets = SocketDir(settings.socket_dir)
    tiers = None
    try:
        if spec is not None:
            pool_host.fix_spec(spec)
        if settings.has_tiers:
            tiers = Tiers(settings, pool_host)
        app = App(settings, pool_host, sockets, token, tiers)
        return uvloop.run(_serve(app, pool_host, settings))
    finally:
        sockets.close()
        if tiers is not None:
            tiers.close()
        pool_host.close()


async def _serve(app: App, pool_host: PoolHost, settings: Settings) -> int:
    signals = Signals(asyncio.get_running_loop())
    try:
        app.bind()
        if settings.prefault and pool_host.arena is not None:
            await _prefault(pool_host, signals)
        if signals.drain.is_set():
            return EXIT_OK
        await app.start()
        freeze_loaded_objects()
        print(app.ready_line(), flush=True)
        await signals.drain.wait()
        return await app.drain(signals.stop_now)
    finally:
        await app.stop()


async def _prefault(pool_host: PoolHost, signals: Signals) -> None:
    """Allocate the whole pool in a thread; a signal ends the wait by closing the arena."""
    assert pool_host.arena is not None
    work = asyncio.create_task(asyncio.to_thread(pool_host.arena.prefault))
    stop = asyncio.create_task(signals.drain.wait())
    await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
    if stop.done():
        pool_host.arena.close()
    stop.cancel()
    try:
        await work
    except ArenaError as error:
        raise PoolTooLarge(str(error), 0) from None
