"""Calls about what stays cached, over a scripted cache: who is asked, who waits for what."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.core.errors import InvalidArgument, NotFound
from radixkv.core.results import (
    Invalidated,
    InvalidateEnded,
    OnboardReason,
    Pinned,
    PrefetchEnded,
    PrefetchStarted,
    Retention,
)
from radixkv.pools.layout import KVSpec
from radixkv.server import tier_calls
from radixkv.server.errors import Unavailable
from radixkv.server.namespaces import Models
from radixkv.server.tier_calls import TierCalls
from radixkv.v1 import cache_pb2
from radixkv.v1 import session_pb2 as pb
from tests.naive_model import int32

ONE = KVSpec(2, 2, 4, 4, "int8", 4).encode()
TWO = KVSpec(2, 2, 4, 4, "int8", 4, backend="other").encode()
TOKENS = int32(range(9))


class ScriptedCache:
    """Answers what it was told to, in order, and writes down what it was asked."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.asked.append((name, arguments))
            return self.answers[name].pop(0)

        return call

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of the calls of this name."""
        return [arguments for asked, arguments in self.asked if asked == name]


class Rig:
    """A runtime reduced to what TierCalls uses, with one model of two KVSpecs and one of one."""

    def __init__(self, **answers: list[Any]) -> None:
        self.cache = ScriptedCache(**answers)
        self.models = Models()
        self.keys = [self.models.add("two", spec, frozenset()).base for spec in (ONE, TWO)]
        self.models.add("one", ONE, frozenset({7}))
        self.num_settled = 0
        self.runtime: Any = SimpleNamespace(
            cache=self.cache,
            models=self.models,
            loop=asyncio.get_running_loop(),
            draining=False,
            now_ms=lambda: 1000,
            settle=self.settle,
        )
        self.calls = TierCalls(self.runtime)

    def settle(self) -> None:
        self.num_settled += 1


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


def ref(model: str = "two") -> cache_pb2.NamespaceRef:
    return cache_pb2.NamespaceRef(model_fingerprint=model)


def started(handle: int, cached: int = 0, loading: int = 0) -> PrefetchStarted:
    return PrefetchStarted(handle, cached, loading, OnboardReason.NO_ROOM)


def test_a_prefetch_is_for_the_kv_spec_that_has_most_and_is_waited_for() -> None:
    async def test() -> None:
        rig = Rig(prefetch=[started(1, 4, 4), started(2, 0, 12)], cancel_prefetch=[True])
        request = cache_pb2.PrefetchRequest(namespace=ref(), tokens=TOKENS)
        reply = await rig.calls.prefetch(request)
        assert (reply.handle, reply.loading_tokens) == (2, 12)
        assert reply.reason == pb.Onboarding.NO_ROOM
        assert rig.cache.of("cancel_prefetch") == [(1, 1000)]
        assert [arguments[0] for arguments in rig.cache.of("prefetch")] == rig.keys
        wait = cache_pb2.WaitPrefetchRequest(handle=2, timeout_ms=5000)
        now = cache_pb2.WaitPrefetchRequest(handle=2)
        assert not (await rig.calls.wait_prefetch(now)).done
        waiting = [asyncio.create_task(rig.calls.wait_prefetch(wait)) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        rig.calls.ended(PrefetchEnded(1, 0, 0))
        rig.calls.ended(PrefetchEnded(2, 8, 4))
        done = cache_pb2.WaitPrefetchReply(done=True, loaded_tokens=8, failed_tokens=4)
        assert await waiting[1] == done
        assert await rig.calls.wait_prefetch(now) == done, "also for one who asks later"
        cancel = cache_pb2.CancelPrefetchRequest(handle=2)
        assert not (await rig.calls.cancel_prefetch(cancel)).cancelled

    run(test)


def test_what_is_kept_of_prefetches_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_calls, "MAX_ENDED_PREFETCHES", 1)

    async def test() -> None:
        rig = Rig(prefetch=[started(1, 0, 4), started(2, 0, 4), started(0, 8)])
        request = cache_pb2.PrefetchRequest(namespace=ref("one"), tokens=TOKENS)
        for handle in (1, 2):
            await rig.calls.prefetch(request)
            rig.calls.ended(PrefetchEnded(handle, 4, 0))
        assert (await rig.calls.prefetch(request)).handle == 0, "nothing to wait for"
        for handle in (0, 1, 99):
            with pytest.raises(NotFound):
                await rig.calls.wait_prefetch(cache_pb2.WaitPrefetchRequest(handle=handle))
        with pytest.raises(InvalidArgument):
            await rig.calls.wait_prefetch(cache_pb2.WaitPrefetchRequest(timeout_ms=2**32 - 1))
        rig.runtime.draining = True
        with pytest.raises(Unavailable):
            await rig.calls.prefetch(request)

    run(test)


def test_a_pin_is_for_the_kv_spec_that_has_most() -> None:
    async def test() -> None:
        rig = Rig(pin=[Pinned(5, 8), Pinned(6, 4)], unpin=[1])
        request = cache_pb2.PinRequest(namespace=ref(), tokens=TOKENS, ttl_ms=9)
        reply = await rig.calls.pin(request)
        assert (reply.pin_id, reply.pinned_tokens) == (5, 8)
        assert rig.cache.of("unpin") == [(6,)]
        assert rig.cache.of("pin")[0] == (rig.keys[0], TOKENS, (), frozenset(), 9, 1000)

    run(test)


def test_unpin_takes_an_id_or_a_name() -> None:
    async def test() -> None:
        rig = Rig(unpin=[1], unpin_prefix=[2, 3])
        by_id = cache_pb2.UnpinRequest(pin_id=4)
        assert (await rig.calls.unpin(by_id)).num_pins == 1
        by_name = cache_pb2.UnpinRequest(namespace=ref(), tokens=TOKENS)
        assert (await rig.calls.unpin(by_name)).num_pins == 5
        for bad in (
            cache_pb2.UnpinRequest(),
            cache_pb2.UnpinRequest(tokens=TOKENS),
            cache_pb2.UnpinRequest(pin_id=4, tokens=TOKENS),
            cache_pb2.UnpinRequest(pin_id=4, namespace=ref()),
        ):
            with pytest.raises(InvalidArgument):
                await rig.calls.unpin(bad)

    run(test)


def test_retention_is_checked_and_is_for_all_kv_specs() -> None:
    async def test() -> None:
        rig = Rig(retain=[3, 4])
        request = cache_pb2.RetainRequest(
            namespace=ref(), prefix=TOKENS, retention=pb.Retention(priority=-5, ttl_ms=60)
        )
        assert (await rig.calls.retain(request)).num_blocks == 7
        assert rig.cache.of("retain")[1] == (rig.keys[1], TOKENS, Retention(-5, 60), 1000)
        request.retention.priority = 101
        with pytest.raises(InvalidArgument):
            await rig.calls.retain(request)

    run(test)


def test_invalidate_is_answered_once_all_is_erased() -> None:
    async def test() -> None:
        rig = Rig(invalidate=[Invalidated(1, 2, 3, 4, 5, 10), Invalidated(1, 0, 0, 1, 0, 11),
                              Invalidated(0, 0)])  # fmt: skip
        request = cache_pb2.InvalidateRequest(namespace=ref(), prefix=TOKENS, tag="t")
        first = asyncio.create_task(rig.calls.invalidate(request))
        await asyncio.sleep(0)
        request.namespace.model_fingerprint = "one"
        second = asyncio.create_task(rig.calls.invalidate(request))
        rig.calls.ended(InvalidateEnded(10, 0))
        await asyncio.sleep(0.01)
        assert not first.done()
        assert not second.done(), "finds nothing any more, and still must not answer too soon"
        rig.calls.ended(InvalidateEnded(11, 7))
        assert await first == cache_pb2.InvalidateReply(
            removed_blocks=2, leased_blocks=2, cpu_blocks=3, nvme_blocks=5, remote_blocks=5,
            failed_erasures=7,
        )  # fmt: skip
        assert await second == cache_pb2.InvalidateReply(failed_erasures=7)
        assert rig.cache.of("invalidate")[0] == (rig.keys[0], TOKENS, False, "t", 1000)

    run(test)


def test_an_invalidate_that_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_calls, "MAX_ERASE_WAIT_S", 0.01)

    async def test() -> None:
        rig = Rig(invalidate=[Invalidated(1, 0, 0, 4, 0, 10), Invalidated(0, 0)])
        with pytest.raises(Unavailable, match="not erased yet"):
            await rig.calls.invalidate(cache_pb2.InvalidateRequest(everything=True))
        dry = cache_pb2.InvalidateRequest(everything=True, dry_run=True)
        assert await rig.calls.invalidate(dry) == cache_pb2.InvalidateReply()
        rig.calls.ended(InvalidateEnded(10, 0))

    run(test)


def test_what_an_invalidate_may_name() -> None:
    async def test() -> None:
        rig = Rig(invalidate=[Invalidated(0, 0)] * 3)
        await rig.calls.invalidate(cache_pb2.InvalidateRequest(everything=True))
        await rig.calls.invalidate(cache_pb2.InvalidateRequest(tag="t"))
        await rig.calls.invalidate(cache_pb2.InvalidateRequest(namespace=ref("one"), tag="t"))
        asked = [(key, tag) for key, _, _, tag, _ in rig.cache.of("invalidate")]
        one = rig.models.add("one", ONE, frozenset({7})).base
        assert asked == [(None, ""), (None, "t"), (one, "t")]
        for bad in (
            cache_pb2.InvalidateRequest(everything=True, tag="t"),
            cache_pb2.InvalidateRequest(everything=True, prefix=TOKENS),
            cache_pb2.InvalidateRequest(everything=True, namespace=ref()),
            cache_pb2.InvalidateRequest(tag="a\nb"),
            cache_pb2.InvalidateRequest(tag="x" * 65),
        ):
            with pytest.raises(InvalidArgument):
                await rig.calls.invalidate(bad)

    run(test)


def test_namespaces_are_told_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        rig = Rig()
        sizes = {rig.keys[0]: 3, rig.keys[1]: 5, b"of another version": 9}
        rig.cache.answers["namespaces"] = [sizes, sizes]
        found = (await rig.calls.namespaces(cache_pb2.NamespacesRequest())).namespaces
        assert [(info.num_blocks, info.kv_spec.backend) for info in found] == [
            (5, "other"),
            (3, ""),
        ]
        monkeypatch.setattr(tier_calls, "MAX_NAMESPACES_SHOWN", 2)
        found = (await rig.calls.namespaces(cache_pb2.NamespacesRequest())).namespaces
        assert len(found) == 1

    run(test)
