"""HTTP for people and probes: /healthz, /readyz, /stats. Read only."""

import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from radixkv.server.admin import AdminToken

MAX_BODY_BYTES = 1024
MAX_HEADER_BYTES = 8190
KEEPALIVE_TIMEOUT_S = 15.0
SHUTDOWN_TIMEOUT_S = 1.0


class HttpServer:
    """Serves on a socket that is already bound.

    `is_ready()` decides /readyz; `stats()` returns what /stats shows as JSON. With `token`,
    /stats asks for `Authorization: Bearer <token>`.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        is_ready: Callable[[], bool],
        stats: Callable[[], Mapping[str, Any]],
        token: AdminToken | None = None,
    ) -> None:
        self._listener = listener
        self._is_ready = is_ready
        self._stats = stats
        self._token = token
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/stats", self._show_stats)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        )

    async def start(self) -> None:
        """Begin to accept connections."""
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener).start()

    async def stop(self) -> None:
        """Close the listener and all connections within `SHUTDOWN_TIMEOUT_S`."""
        await self._runner.cleanup()

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        if self._is_ready():
            return web.Response(text="ready\n")
        return web.Response(text="draining\n", status=503)

    async def _show_stats(self, request: web.Request) -> web.Response:
        if self._token is not None and not self._token.allows(
            request.headers.get("Authorization", "")
        ):
            return web.Response(
                text="admin token wanted\n", status=401, headers={"WWW-Authenticate": "Bearer"}
            )
        text = json.dumps(self._stats(), indent=2) + "\n"
        return web.Response(text=text, content_type="application/json")
