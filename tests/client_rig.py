"""The shipped client in all its forms behind one blocking interface, and fingerprinted KV."""

import asyncio
import hashlib
import inspect
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy

from radixkv_client import AsyncClient, Client, KVSpec
from radixkv_client.aio_lease import AsyncBatch, AsyncLease, AsyncPending
from radixkv_client.batch import BatchBase

FORMS = [(kind, transport) for kind in ("sync", "async") for transport in ("local", "grpc")]
SPEC = KVSpec(2, 2, 4, 4, "int8", block_size=4)
B = SPEC.block_size
MAX_CALL_S = 60.0


class Blocking:
    """An asyncio object whose coroutines are run to their end, in the loop of another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wrapped: Any) -> None:
        self._loop = loop
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.wrapped, name)
        if not callable(value):
            return self._wrap(value)

        def call(*args: Any, **options: Any) -> Any:
            return self._run(lambda: value(*map(unwrap, args), **options))

        return call

    def __enter__(self) -> "Blocking":
        self._run(self.wrapped.__aenter__)
        return self

    def __exit__(self, *error: Any) -> None:
        self._run(lambda: self.wrapped.__aexit__(*error))

    def _run(self, call: Callable[[], Any]) -> Any:
        async def run() -> Any:
            result = call()
            return await result if inspect.iscoroutine(result) else result

        return self._wrap(asyncio.run_coroutine_threadsafe(run(), self._loop).result(MAX_CALL_S))

    def _wrap(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._wrap(item) for item in value]
        wrappable = (AsyncClient, AsyncLease, AsyncPending, AsyncBatch)
        return Blocking(self._loop, value) if isinstance(value, wrappable) else value


def unwrap(value: Any) -> Any:
    """What a Blocking stands for."""
    return value.wrapped if isinstance(value, Blocking) else value


@contextmanager
def connected(form: tuple[str, str], socket_dir: Path, **options: Any) -> Iterator[Any]:
    """A client of one form; closed at the end."""
    kind, transport = form
    options = {"model": "tiny", "kv_spec": SPEC} | options
    if kind == "sync":
        with Client.connect(socket_dir, transport=transport, **options) as client:
            yield client
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        connecting = AsyncClient.connect(socket_dir, transport=transport, **options)
        client = asyncio.run_coroutine_threadsafe(connecting, loop).result(MAX_CALL_S)
        with Blocking(loop, client) as blocking:
            yield blocking
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(MAX_CALL_S)


def is_batch(value: Any) -> bool:
    """Whether this is a batch of either kind."""
    return isinstance(unwrap(value), BatchBase)


def kv_of(tokens: list[int], position: int) -> numpy.ndarray[Any, Any]:
    """The KV of one token, [layer, K|V, head, dim]: a digest of the whole prefix up to it."""
    prefix = array("i", tokens[: position + 1]).tobytes()
    shape = (SPEC.num_layers, 2, SPEC.num_kv_heads, SPEC.head_dim)
    data = hashlib.shake_128(prefix).digest(int(numpy.prod(shape)))
    return numpy.frombuffer(data, dtype=numpy.uint8).reshape(shape)


def kv_view(client: Any) -> numpy.ndarray[Any, Any]:
    """The pool as [block, layer, K|V, head, token, dim]."""
    pool = client.pool.as_numpy()
    return pool.reshape(
        (len(pool), SPEC.num_layers, 2, SPEC.num_kv_heads, SPEC.block_size, SPEC.head_dim)
    )


def write_kv(client: Any, lease: Any, tokens: list[int], start: int) -> None:
    """What prefill does: the KV of tokens from `start` on, into the lease's blocks."""
    view = kv_view(client)
    for position in range(start, len(tokens)):
        block = lease.block_table[position // B]
        view[block, :, :, :, position % B] = kv_of(tokens, position)


def check_kv(client: Any, lease: Any, tokens: list[int], upto: int) -> None:
    """Assert that the lease's blocks hold exactly the KV of the first `upto` tokens."""
    view = kv_view(client)
    for position in range(upto):
        block = lease.block_table[position // B]
        got = view[block, :, :, :, position % B]
        assert (got == kv_of(tokens, position)).all(), f"wrong KV of token {position}"


def check_idle(client: Any) -> None:
    """Assert that no lease, reserve or waiting Acquire is left; the books add up."""
    stats = client.stats()
    books = stats.books
    assert (stats.num_leases, stats.num_waiting) == (0, 0), stats
    assert (books.leased, books.in_flight, books.pinned) == (0, 0, 0), books
    assert books.cached + books.free + books.reserved == books.total, books
