"""Unary calls for tools and for what a worker asks beside its session. Imports grpc."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from radixkv.v1 import cache_pb2, cache_pb2_grpc
from radixkv.v1 import session_pb2 as pb
from radixkv.wire.channel import client_options
from radixkv_client.errors import DeadlineExceeded, RadixKVError, error_named
from radixkv_client.spec import KVSpec
from radixkv_client.tokens import Tokens, token_bytes
from radixkv_client.values import (
    ContentRange,
    Miss,
    Retention,
    Scope,
    contents_to_proto,
)

DEFAULT_TIMEOUT_S = 30.0
ANSWER_MARGIN_S = 5.0  # given to the answer of a call that waits in the server
_CODES = {"RESOURCE_EXHAUSTED": "EXHAUSTED", "OUT_OF_RANGE": "TOO_LARGE"}


@dataclass(frozen=True, slots=True)
class Lookup:
    """How much of a prompt is cached now, how much behind it is being computed, why not more."""

    cached_tokens: int
    being_computed: int
    miss: Miss


@dataclass(frozen=True, slots=True)
class Invalidated:
    """Blocks of the gpu freed now, those that live leases keep until they end, and those below.

    Of `failed_erasures` of them a restart may find something again.
    """

    removed_blocks: int
    leased_blocks: int
    cpu_blocks: int = 0
    nvme_blocks: int = 0
    remote_blocks: int = 0
    failed_erasures: int = 0


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pin on the leading `pinned_tokens` of a prefix; id 0 if there was nothing to pin."""

    pin_id: int
    pinned_tokens: int


@dataclass(frozen=True, slots=True)
class Prefetched:
    """How a prefetch ended."""

    loaded_tokens: int
    failed_tokens: int


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace with anything cached; `kv_spec` is None if it is of another version."""

    model: str
    scope: Scope
    kv_spec: KVSpec | None
    num_blocks: int


class Prefetch:
    """A prefix on its way up to the gpu. It goes on if nobody waits for it.

    `cached_tokens` were there, `loading_tokens` are on their way; `reason`, a name of
    `Onboarding.Reason`, says why not more are.
    """

    def __init__(self, tools: "Tools", reply: cache_pb2.PrefetchReply) -> None:
        self.handle: int = reply.handle
        self.cached_tokens: int = reply.cached_tokens
        self.loading_tokens: int = reply.loading_tokens
        self.reason = pb.Onboarding.Reason.Name(reply.reason)
        self._tools = tools

    def wait(self, timeout: float | None = None) -> Prefetched:
        """Return once it has ended; DeadlineExceeded if that takes too long."""
        if not self.handle:
            return Prefetched(0, 0)
        ended = self._tools.wait_prefetch(self.handle, timeout)
        if ended is None:
            raise DeadlineExceeded(f"prefetch {self.handle} still runs")
        return ended

    def cancel(self, timeout: float | None = None) -> bool:
        """Stop it; what it brought up stays. False if it had ended."""
        return self.handle != 0 and self._tools.cancel_prefetch(self.handle, timeout=timeout)


class Tools:
    """A channel to a server's unary calls. Context manager; safe for several threads.

    `address` is a gRPC target: the Unix socket, or the TCP port for tools, where changing calls
    need `admin_token`. Calls raise this package's errors, DeadlineExceeded after `timeout` seconds.
    `model` is the one that calls which name none are about, if more than one is known.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        admin_token: str = "",
        model: str = "",
    ) -> None:
        self.timeout = timeout
        self._model = model
        self._metadata = [("authorization", f"Bearer {admin_token}")] if admin_token else []
        self._channel = grpc.insecure_channel(address, options=client_options())
        self._stub = cache_pb2_grpc.CacheStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; idempotent."""
        self._channel.close()

    def lookup(
        self,
        tokens: Tokens,
        *,
        scope: Scope | None = None,
        contents: Sequence[ContentRange] = (),
        model: str = "",
        timeout: float | None = None,
    ) -> Lookup:
        """How much of a prompt is cached; changes nothing, not even recency."""
        request = cache_pb2.LookupRequest(
            namespace=_namespace(model or self._model, scope),
            tokens=token_bytes(tokens),
            contents=contents_to_proto(contents),
        )
        reply = self._call(self._stub.Lookup, request, timeout)
        return Lookup(reply.cached_tokens, reply.being_computed, Miss.from_proto(reply.miss))

    def stats(self, *, timeout: float | None = None) -> cache_pb2.StatsReply:
        """Books, counters and sizes of the server."""
        return self._call(self._stub.Stats, cache_pb2.StatsRequest(), timeout)

    def sessions(self, *, timeout: float | None = None) -> list[cache_pb2.SessionInfo]:
        """The server's sessions."""
        return list(self._call(self._stub.Sessions, cache_pb2.SessionsRequest(), timeout).sessions)

    def invalidate(
        self,
        prefix: Tokens = b"",
        *,
        scope: Scope | None = None,
        model: str = "",
        tag: str = "",
        everything: bool = False,
        dry_run: bool = False,
        timeout: float | None = None,
    ) -> Invalidated:
        """Forget every cached block whose sequence begins with `prefix`; all of a namespace
        without one; all namespaces with `everything`. `tag`: only blocks published under it and
        what follows them; alone, in all namespaces. `dry_run` only counts.

        Returns once none of it can come back, not even after a restart.
        """
        request = cache_pb2.InvalidateRequest(
            prefix=token_bytes(prefix), tag=tag, everything=everything, dry_run=dry_run
        )
        if not everything and not (tag and not prefix and not model and scope is None):
            request.namespace.CopyFrom(_namespace(model or self._model, scope))
        reply = self._call(self._stub.Invalidate, request, timeout)
        return Invalidated(
            reply.removed_blocks,
            reply.leased_blocks,
            reply.cpu_blocks,
            reply.nvme_blocks,
            reply.remote_blocks,
            reply.failed_erasures,
        )

    # ---- what stays cached, and where -------------------------------------------------------

    def prefetch(
        self,
        tokens: Tokens,
        *,
        scope: Scope | None = None,
        contents: Sequence[ContentRange] = (),
        model: str = "",
        timeout: float | None = None,
    ) -> Prefetch:
        """Begin to bring a prefix up to the gpu, ahead of its use."""
        request = cache_pb2.PrefetchRequest(
            namespace=_namespace(model or self._model, scope),
            tokens=token_bytes(tokens),
            contents=contents_to_proto(contents),
        )
        return Prefetch(self, self._call(self._stub.Prefetch, request, timeout))

    def wait_prefetch(self, handle: int, timeout: float | None = None) -> Prefetched | None:
        """How a prefetch ended; None if it still runs after `timeout`."""
        seconds = self.timeout if timeout is None else timeout
        timeout_ms = max(round(seconds * 1000), 0)
        request = cache_pb2.WaitPrefetchRequest(handle=handle, timeout_ms=timeout_ms)
        reply = self._call(self._stub.WaitPrefetch, request, seconds + ANSWER_MARGIN_S)
        return Prefetched(reply.loaded_tokens, reply.failed_tokens) if reply.done else None

    def cancel_prefetch(self, handle: int, *, timeout: float | None = None) -> bool:
        """Stop a prefetch; False if it had ended."""
        request = cache_pb2.CancelPrefetchRequest(handle=handle)
        return self._call(self._stub.CancelPrefetch, request, timeout).cancelled

    def pin(
        self,
        tokens: Tokens,
        *,
        scope: Scope | None = None,
        contents: Sequence[ContentRange] = (),
        model: str = "",
        ttl_ms: int = 0,
        timeout: float | None = None,
    ) -> Pinned:
        """Protect the cached part of a prefix from eviction, on every tier; 0 ms = until unpin."""
        request = cache_pb2.PinRequest(
            namespace=_namespace(model or self._model, scope),
            tokens=token_bytes(tokens),
            contents=contents_to_proto(contents),
            ttl_ms=ttl_ms,
        )
        reply = self._call(self._stub.Pin, request, timeout)
        return Pinned(reply.pin_id, reply.pinned_tokens)

    def unpin(self, pin_id: int, *, timeout: float | None = None) -> bool:
        """Lift a pin; False if it had ended."""
        request = cache_pb2.UnpinRequest(pin_id=pin_id)
        return self._call(self._stub.Unpin, request, timeout).num_pins > 0

    def unpin_prefix(
        self,
        prefix: Tokens = b"",
        *,
        scope: Scope | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> int:
        """Lift all pins of sequences that begin with `prefix`; returns how many."""
        request = cache_pb2.UnpinRequest(
            namespace=_namespace(model or self._model, scope), tokens=token_bytes(prefix)
        )
        return self._call(self._stub.Unpin, request, timeout).num_pins

    def retain(
        self,
        prefix: Tokens,
        retention: Retention,
        *,
        scope: Scope | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> int:
        """Change the retention of cached blocks of sequences that begin with `prefix`; returns how
        many blocks."""
        request = cache_pb2.RetainRequest(
            namespace=_namespace(model or self._model, scope),
            prefix=token_bytes(prefix),
            retention=retention.to_proto(),
        )
        return self._call(self._stub.Retain, request, timeout).num_blocks

    def namespaces(self, *, timeout: float | None = None) -> list[Namespace]:
        """Namespaces with anything cached, on whatever tier; those with most blocks first."""
        reply = self._call(self._stub.Namespaces, cache_pb2.NamespacesRequest(), timeout)
        return [
            Namespace(
                info.namespace.model_fingerprint,
                Scope.from_proto(info.namespace.scope),
                KVSpec.from_proto(info.kv_spec) if info.HasField("kv_spec") else None,
                info.num_blocks,
            )
            for info in reply.namespaces
        ]

    def kill_session(self, session_id: int, *, timeout: float | None = None) -> int:
        """Kill a session's processes, end it; returns the blocks freed."""
        request = cache_pb2.KillSessionRequest(session_id=session_id)
        return self._call(self._stub.KillSession, request, timeout).freed_blocks

    def _call(self, method: Callable[..., Any], request: Any, timeout: float | None) -> Any:
        seconds = self.timeout if timeout is None else timeout
        try:
            return method(request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _translate(error) from error


def _namespace(model: str, scope: Scope | None) -> cache_pb2.NamespaceRef:
    proto = pb.Scope() if scope is None else scope.to_proto()
    return cache_pb2.NamespaceRef(model_fingerprint=model, scope=proto)


def _translate(error: Any) -> RadixKVError:
    name = error.code().name
    return error_named(_CODES.get(name, name), error.details())
