"""Unary calls for tools and for what a worker asks beside its session. Imports grpc."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from radixkv.v1 import cache_pb2, cache_pb2_grpc
from radixkv.v1 import session_pb2 as pb
from radixkv.wire.channel import client_options
from radixkv_client.errors import RadixKVError, error_named
from radixkv_client.tokens import Tokens, token_bytes
from radixkv_client.values import ContentRange, Miss, Scope, contents_to_proto

DEFAULT_TIMEOUT_S = 30.0
_CODES = {"RESOURCE_EXHAUSTED": "EXHAUSTED", "OUT_OF_RANGE": "TOO_LARGE"}


@dataclass(frozen=True, slots=True)
class Lookup:
    """How much of a prompt is cached now, how much behind it is being computed, why not more."""

    cached_tokens: int
    being_computed: int
    miss: Miss


@dataclass(frozen=True, slots=True)
class Invalidated:
    """Blocks freed now, and blocks that live leases keep until they end."""

    removed_blocks: int
    leased_blocks: int


class Tools:
    """A channel to a server's unary calls. Context manager; safe for several threads.

    `address` is a gRPC target: the Unix socket, or the TCP port for tools, where changing calls
    need `admin_token`. Calls raise this package's errors, DeadlineExceeded after `timeout` seconds.
    """

    def __init__(
        self, address: str, *, timeout: float = DEFAULT_TIMEOUT_S, admin_token: str = ""
    ) -> None:
        self.timeout = timeout
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
            namespace=_namespace(model, scope),
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
        everything: bool = False,
        dry_run: bool = False,
        timeout: float | None = None,
    ) -> Invalidated:
        """Forget every cached block whose sequence begins with `prefix`; all of a namespace
        without one; all namespaces with `everything`. `dry_run` only counts."""
        request = cache_pb2.InvalidateRequest(
            prefix=token_bytes(prefix), everything=everything, dry_run=dry_run
        )
        if not everything:
            request.namespace.CopyFrom(_namespace(model, scope))
        reply = self._call(self._stub.Invalidate, request, timeout)
        return Invalidated(reply.removed_blocks, reply.leased_blocks)

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
