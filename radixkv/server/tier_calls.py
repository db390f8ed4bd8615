"""Calls for tools that decide what stays cached and where: prefetch, pin, retain, invalidate.

Theory of operation
    A Prefetch or an Invalidate may go on after the core has begun it. The core then gives a handle
    or a ticket, and later exactly one event, which the runtime hands to `ended`; calls wait for it
    here. Handles, tickets and pin ids are counters, not secrets: who may call at all may end
    anybody's.
    A tool names a model, which may have several KVSpecs, each a namespace of its own. Invalidate,
    Unpin and Retain are for all of them, Prefetch and Pin for the one that has most of the prefix.
    It must not know: streams, who may call.
"""

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from radixkv.core.errors import InvalidArgument, NotFound
from radixkv.core.results import Invalidated, InvalidateEnded, PrefetchEnded
from radixkv.server.errors import Unavailable
from radixkv.server.namespaces import namespace_info
from radixkv.server.operations import contents_of, retention_of, tags_of, ttl_of
from radixkv.v1 import cache_pb2
from radixkv.wire import limits

if TYPE_CHECKING:
    from radixkv.server.runtime import Runtime

log = logging.getLogger(__name__)

MAX_ENDED_PREFETCHES = 4096  # whose result is kept for WaitPrefetch
MAX_ERASE_WAIT_S = 60.0
MAX_NAMESPACES_SHOWN = 8192


class TierCalls:
    """Handlers of one runtime. Methods raise the core's errors."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self._prefetches: dict[int, asyncio.Future[PrefetchEnded]] = {}
        self._ended: dict[int, PrefetchEnded] = {}  # oldest first
        self._erasing: dict[int, asyncio.Future[InvalidateEnded]] = {}

    def ended(self, event: PrefetchEnded | InvalidateEnded) -> None:
        """What a handle or a ticket stands for is over."""
        if isinstance(event, InvalidateEnded):
            self._erasing.pop(event.ticket).set_result(event)
            return
        prefetch = self._prefetches.pop(event.handle, None)
        if prefetch is None:
            return  # one that lost to another KVSpec of its model
        self._ended[event.handle] = event
        if len(self._ended) > MAX_ENDED_PREFETCHES:
            del self._ended[next(iter(self._ended))]
        prefetch.set_result(event)

    # ---- prefetch ---------------------------------------------------------------------------

    async def prefetch(self, request: cache_pb2.PrefetchRequest) -> cache_pb2.PrefetchReply:
        """Begin to bring a prefix up to the gpu. Raises Exhausted while too many are under way."""
        runtime, cache = self._runtime, self._runtime.cache
        if runtime.draining:
            raise Unavailable("the server is draining")
        contents = contents_of(request.contents)
        now_ms = runtime.now_ms()
        begun = [
            cache.prefetch(key, request.tokens, contents, placeholders, now_ms)
            for key, placeholders in list(runtime.models.resolve(request.namespace))
        ]
        best = max(begun, key=lambda started: started.cached_tokens + started.loading_tokens)
        for started in begun:
            if started is not best and started.handle:
                cache.cancel_prefetch(started.handle, now_ms)
        if best.handle:
            self._prefetches[best.handle] = runtime.loop.create_future()
        runtime.settle()
        return cache_pb2.PrefetchReply(
            handle=best.handle,
            cached_tokens=best.cached_tokens,
            loading_tokens=best.loading_tokens,
            reason=best.reason.value,
        )

    async def wait_prefetch(
        self, request: cache_pb2.WaitPrefetchRequest
    ) -> cache_pb2.WaitPrefetchReply:
        """The end of a prefetch, or that it still runs. Raises NotFound."""
        if request.timeout_ms > limits.MAX_WAIT_MS:
            raise InvalidArgument(f"timeout_ms is at most {limits.MAX_WAIT_MS}")
        event = self._ended.get(request.handle)
        if event is None:
            prefetch = self._prefetches.get(request.handle)
            if prefetch is None:
                raise NotFound(f"no prefetch {request.handle}, or it ended long ago")
            await asyncio.wait({prefetch}, timeout=request.timeout_ms / 1000)
            if not prefetch.done():
                return cache_pb2.WaitPrefetchReply(done=False)
            event = prefetch.result()
        return cache_pb2.WaitPrefetchReply(
            done=True, loaded_tokens=event.loaded_tokens, failed_tokens=event.failed_tokens
        )

    async def cancel_prefetch(
        self, request: cache_pb2.CancelPrefetchRequest
    ) -> cache_pb2.CancelPrefetchReply:
        """Stop a prefetch; what it brought up stays."""
        runtime = self._runtime
        cancelled = request.handle in self._prefetches and runtime.cache.cancel_prefetch(
            request.handle, runtime.now_ms()
        )
        runtime.settle()
        return cache_pb2.CancelPrefetchReply(cancelled=cancelled)

    # ---- pins and retention -----------------------------------------------------------------

    async def pin(self, request: cache_pb2.PinRequest) -> cache_pb2.PinReply:
        """Protect the cached part of a prefix from eviction."""
        runtime, cache = self._runtime, self._runtime.cache
        contents = contents_of(request.contents)
        ttl_ms = ttl_of(request.ttl_ms)
        now_ms = runtime.now_ms()
        pins = [
            cache.pin(key, request.tokens, contents, placeholders, ttl_ms, now_ms)
            for key, placeholders in list(runtime.models.resolve(request.namespace))
        ]
        best = max(pins, key=lambda pin: pin.pinned_tokens)
        for pin in pins:
            if pin is not best and pin.pin_id:
                cache.unpin(pin.pin_id)
        runtime.settle()
        return cache_pb2.PinReply(pin_id=best.pin_id, pinned_tokens=best.pinned_tokens)

    async def unpin(self, request: cache_pb2.UnpinRequest) -> cache_pb2.UnpinReply:
        """Lift one pin, or all of sequences that begin with the tokens."""
        runtime, cache = self._runtime, self._runtime.cache
        by_id, by_name = request.pin_id != 0, request.HasField("namespace")
        if by_id == by_name or (by_id and request.tokens):
            raise InvalidArgument("unpin takes a pin_id, or else a namespace and tokens")
        if by_id:
            num_pins = cache.unpin(request.pin_id)
        else:
            keys = [key for key, _ in runtime.models.resolve(request.namespace)]
            num_pins = sum(cache.unpin_prefix(key, request.tokens) for key in keys)
        runtime.settle()
        return cache_pb2.UnpinReply(num_pins=num_pins)

    async def retain(self, request: cache_pb2.RetainRequest) -> cache_pb2.RetainReply:
        """Change how long cached blocks are kept."""
        runtime = self._runtime
        retention = retention_of(request.retention)
        now_ms = runtime.now_ms()
        num_blocks = sum(
            runtime.cache.retain(key, request.prefix, retention, now_ms)
            for key, _ in list(runtime.models.resolve(request.namespace))
        )
        runtime.settle()
        return cache_pb2.RetainReply(num_blocks=num_blocks)

    # ---- invalidate -------------------------------------------------------------------------

    async def invalidate(self, request: cache_pb2.InvalidateRequest) -> cache_pb2.InvalidateReply:
        """Forget cached blocks, and wait until nothing of them can come back after a restart.

        Also waits for erasures of earlier calls, so that asking again after a wait that was given
        up does not answer too soon. Raises Unavailable after MAX_ERASE_WAIT_S.
        """
        runtime = self._runtime
        done = self._invalidate_all(request)
        waiting = () if request.dry_run else tuple(self._erasing.values())
        runtime.settle()
        if waiting:
            await asyncio.wait(waiting, timeout=MAX_ERASE_WAIT_S)
        if not all(erasing.done() for erasing in waiting):
            raise Unavailable(
                f"nobody finds these blocks any more, but after {MAX_ERASE_WAIT_S:.0f} s they are"
                " not erased yet: ask again before a restart"
            )
        reply = cache_pb2.InvalidateReply(
            removed_blocks=sum(part.removed_blocks for part in done),
            leased_blocks=sum(part.leased_blocks for part in done),
            cpu_blocks=sum(part.cpu_blocks for part in done),
            nvme_blocks=sum(part.nvme_blocks for part in done),
            remote_blocks=sum(part.remote_blocks for part in done),
            failed_erasures=sum(erasing.result().failed_erasures for erasing in waiting),
        )
        log.info("invalidated: %s%s", done, " (dry run)" if request.dry_run else "")
        return reply

    def _invalidate_all(self, request: cache_pb2.InvalidateRequest) -> list[Invalidated]:
        """Begin in every namespace that is meant; registers the tickets."""
        runtime, now_ms = self._runtime, self._runtime.now_ms()
        tag = tags_of([request.tag])[0] if request.tag else ""
        named = request.HasField("namespace") or bool(request.prefix)
        if request.everything and (named or tag):
            raise InvalidArgument("everything goes with neither namespace, prefix nor tag")
        keys: list[bytes | None] = [None]
        if not request.everything and (named or not tag):
            keys = [key for key, _ in runtime.models.resolve(request.namespace)]
        done = []
        for key in keys:
            part = runtime.cache.invalidate(key, request.prefix, request.dry_run, tag, now_ms)
            done.append(part)
            if part.ticket:
                self._erasing[part.ticket] = runtime.loop.create_future()
        return done

    # ---- namespaces -------------------------------------------------------------------------

    async def namespaces(self, request: cache_pb2.NamespacesRequest) -> cache_pb2.NamespacesReply:
        """What is cached for whom: the MAX_NAMESPACES_SHOWN with most blocks, most first."""
        by_size = sorted(self._runtime.cache.namespaces().items(), key=lambda item: -item[1])
        reply = cache_pb2.NamespacesReply()
        for key, num_blocks in by_size[:MAX_NAMESPACES_SHOWN]:
            with suppress(InvalidArgument):  # one that another version stored
                reply.namespaces.append(namespace_info(key, num_blocks))
        return reply
