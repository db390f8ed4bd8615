"""HTTP: health, readiness, stats, bounds."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import aiohttp

from radixkv.server.admin import AdminToken
from radixkv.server.http import HttpServer

TOKEN = "a-token-of-some-length"


def with_server(
    check: Callable[[aiohttp.ClientSession, str], Awaitable[None]],
    *,
    ready: bool = True,
    token: AdminToken | None = None,
) -> None:
    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(
            listener, is_ready=lambda: ready, stats=lambda: {"num_leases": 3}, token=token
        )
        await server.start()
        try:
            async with aiohttp.ClientSession() as session:
                await check(session, f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_health_readiness_and_stats() -> None:
    async def check(session: aiohttp.ClientSession, url: str) -> None:
        assert (await session.get(url + "/healthz")).status == 200
        assert (await session.get(url + "/readyz")).status == 200
        reply = await session.get(url + "/stats")
        assert reply.content_type == "application/json"
        assert await reply.json() == {"num_leases": 3}

    with_server(check)


def test_draining_is_healthy_but_not_ready() -> None:
    async def check(session: aiohttp.ClientSession, url: str) -> None:
        assert (await session.get(url + "/healthz")).status == 200
        assert (await session.get(url + "/readyz")).status == 503

    with_server(check, ready=False)


def test_anything_else_is_refused() -> None:
    async def check(session: aiohttp.ClientSession, url: str) -> None:
        assert (await session.get(url + "/")).status == 404
        assert (await session.get(url + "/../../etc/passwd")).status == 404
        assert (await session.post(url + "/stats", data=b"x" * 100_000)).status == 405
        assert (await session.get(url + "/stats?" + "x" * 20_000)).status == 400

    with_server(check)


def test_g2_stats_ask_for_the_token_where_one_is_set() -> None:
    async def check(session: aiohttp.ClientSession, url: str) -> None:
        assert (await session.get(url + "/stats")).status == 401
        wrong = {"Authorization": f"Bearer {TOKEN}x"}
        assert (await session.get(url + "/stats", headers=wrong)).status == 401
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert (await session.get(url + "/stats", headers=right)).status == 200
        assert (await session.get(url + "/healthz")).status == 200

    with_server(check, token=AdminToken(TOKEN))
