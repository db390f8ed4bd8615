"""The worker's HTTP side: one asyncio loop in the main thread, the engine in another."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

import xxhash
from aiohttp import web

from radixkv_worker import http_api
from radixkv_worker.engine import Engine, Overloaded
from radixkv_worker.request import BadRequest, Delta, Done, Event, Failed

MAX_BODY_BYTES = 16 << 20
RETRY_AFTER_S = "1"
_STATUS = {"TOO_LARGE": 400, "INVALID_ARGUMENT": 400, "INTERNAL": 500}


class Api:
    """Routes and handlers over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def application(self) -> web.Application:
        """The application to serve; its runner should cancel handlers of callers that left."""
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_post("/v1/completions", self._completions)
        application.router.add_post("/v1/chat/completions", self._chat)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/healthz", self._health)
        application.router.add_get("/stats", self._stats)
        application.router.add_get("/debug/blocks/{block_id:[0-9]{1,10}}", self._block)
        return application

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._call(http, chat=False)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._call(http, chat=True)

    async def _models(self, http: web.Request) -> web.Response:
        name = self._engine.loaded.name
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"}]})

    async def _health(self, http: web.Request) -> web.Response:
        failure = self._engine.failure
        if failure is not None:
            return web.json_response({"status": "failed", "error": str(failure)}, status=503)
        connected = self._engine.stats().connected
        return web.json_response({"status": "ok", "connected": connected})

    async def _stats(self, http: web.Request) -> web.Response:
        stats = asdict(self._engine.stats())
        stats["recent"] = [{"id": name, **values} for name, values in stats["recent"]]
        return web.json_response(stats)

    async def _block(self, http: web.Request) -> web.Response:
        """Digest of one block of the pool, as this process's mapping shows it now."""
        block_id, pool = int(http.match_info["block_id"]), self._engine.client.pool
        if not 1 <= block_id <= pool.num_blocks:
            return _refusal(404, f"blocks have ids 1 to {pool.num_blocks}", "not_found")
        digest = xxhash.xxh3_128_hexdigest(pool.as_numpy()[block_id])
        return web.json_response({"block_id": block_id, "xxh3": digest})

    async def _call(self, http: web.Request, *, chat: bool) -> web.StreamResponse:
        loaded = self._engine.loaded
        try:
            body = http_api.decode(await http.read(), http.charset)
            call = await asyncio.to_thread(  # a long prompt takes seconds to encode
                http_api.parse,
                body,
                chat=chat,
                tokenizer=loaded.tokenizer,
                context=loaded.model.config.max_positions,
                model=loaded.name,
            )
            events = self._submit(call)
        except BadRequest as error:
            return _refusal(400, str(error), "invalid_request_error")
        except Overloaded as error:
            return _refusal(503, str(error), "overloaded")
        async with contextlib.aclosing(events):
            if call.stream:
                return await _stream(http, call, events)
            return await _answer(call, events)

    def _submit(self, call: http_api.Call) -> AsyncGenerator[Event, None]:
        """Events of a request up to its last; closing it early cancels the request."""
        loop = asyncio.get_running_loop()
        # Holds at most the request's own tokens, of which there are n * max_tokens.
        arrived: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(arrived.put_nowait, event)

        self._engine.submit(call.request, sink)

        async def events() -> AsyncGenerator[Event, None]:
            finished = False
            try:
                while not finished:
                    event = await arrived.get()
                    finished = isinstance(event, Done | Failed)
                    yield event
            finally:
                if not finished:
                    self._engine.cancel(call.request.request_id)

        return events()


async def _answer(call: http_api.Call, events: AsyncGenerator[Event, None]) -> web.Response:
    deltas: list[Delta] = []
    async for event in events:
        if isinstance(event, Failed):
            return _refusal(_STATUS.get(event.code, 503), event.message, event.code.lower())
        if isinstance(event, Done):
            body = http_api.envelope(call, http_api.full_choices(call, deltas), chunk=False)
            body |= _last(call, event)
            return web.json_response(body)
        deltas.append(event)
    raise AssertionError("events end with Done or Failed")


async def _stream(
    http: web.Request, call: http_api.Call, events: AsyncGenerator[Event, None]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    with contextlib.suppress(ConnectionResetError):  # the caller left; closing events cancels
        async for event in events:
            if isinstance(event, Failed):
                body: dict[str, Any] = http_api.error_body(event.message, event.code.lower())
            elif isinstance(event, Done):
                body = http_api.envelope(call, [], chunk=True) | _last(call, event)
            else:
                choice = http_api.chunk_choice(call, event)
                body = http_api.envelope(call, [choice], chunk=True)
            await response.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
    return response


def _last(call: http_api.Call, done: Done) -> dict[str, Any]:
    extra: dict[str, Any] = {"usage": http_api.usage(done.stats)}
    if call.debug:
        extra["radixkv"] = http_api.debug_stats(done.stats)
    return extra


def _refusal(status: int, message: str, kind: str) -> web.Response:
    headers = {"Retry-After": RETRY_AFTER_S} if status == 503 else {}
    return web.json_response(http_api.error_body(message, kind), status=status, headers=headers)
