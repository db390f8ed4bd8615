"""radixkv: asks a running server, over gRPC."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixkv import __version__
from radixkv.v1 import cache_pb2, cache_pb2_grpc, session_pb2
from radixkv.wire.channel import client_options
from radixkv.wire.limits import MAX_TOKENS
from radixkv.wire.paths import SocketPaths, default_socket_dir
from radixkv.wire.plain import as_plain

EXIT_FAILED = 1
EXIT_USAGE = 2
TOKEN_FILE_VARIABLE = "RADIXKV_ADMIN_TOKEN_FILE"
CALL_TIMEOUT_S = 10.0


class ToolError(Exception):
    """The command cannot be carried out; the message is one line for the user."""


class Server:
    """The server the command talks to, on its Unix socket or over TCP."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.target = _target(arguments)
        self.channel = grpc.insecure_channel(self.target, client_options())
        self.cache = cache_pb2_grpc.CacheStub(self.channel)
        token_file = arguments.admin_token_file or os.environ.get(TOKEN_FILE_VARIABLE)
        self.metadata = (
            (("authorization", f"Bearer {_read_text(token_file)}"),) if token_file else ()
        )

    def call(self, method: Callable[..., Any], request: Message) -> Any:
        """Call a method; raises `ToolError` with what the server, or gRPC, says."""
        try:
            return method(request, timeout=CALL_TIMEOUT_S, metadata=self.metadata)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code == grpc.StatusCode.UNAVAILABLE:
                raise ToolError(
                    f"no server answers on {self.target} ({details}): start radixkv-server or set "
                    "--socket-dir or --address"
                ) from None
            if code == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ToolError(
                    f"the server on {self.target} did not answer within {CALL_TIMEOUT_S:.0f} s"
                ) from None
            raise ToolError(f"{code.name}: {details}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ToolError(message)


def build_parser() -> argparse.ArgumentParser:
    """The command line of radixkv. Parsing raises `ToolError` instead of exiting."""
    shared = _Parser(add_help=False, allow_abbrev=False)
    shared.add_argument("--socket-dir", metavar="DIR", help="of the server (default: as it has)")
    shared.add_argument("--address", metavar="HOST:PORT", help="use gRPC over TCP instead")
    shared.add_argument(
        "--admin-token-file",
        metavar="FILE",
        help=f"token for changing calls over TCP (default ${TOKEN_FILE_VARIABLE})",
    )
    shared.add_argument("--json", action="store_true", help="print JSON")
    parser = _Parser(prog="radixkv", description="Ask a running radixkv-server.")
    parser.add_argument("--version", action="version", version=f"radixkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser
    add("stats", parents=[shared], help="books and counters").set_defaults(run=_stats)
    add("health", parents=[shared], help="is it serving?").set_defaults(run=_health)
    lookup = add("lookup", parents=[shared], help="how much of a prompt is cached; changes nothing")
    lookup.set_defaults(run=_lookup)
    _add_namespace(lookup)
    tokens = lookup.add_mutually_exclusive_group(required=True)
    tokens.add_argument("--tokens", metavar="1,2,3", help="token ids")
    tokens.add_argument("--tokens-file", metavar="FILE", help="file with little-endian int32")
    invalidate = add("invalidate", parents=[shared], help="drop cached blocks")
    invalidate.set_defaults(run=_invalidate)
    _add_namespace(invalidate)
    invalidate.add_argument("--prefix", metavar="1,2,3", help="only what begins with these tokens")
    invalidate.add_argument("--everything", action="store_true", help="all namespaces")
    invalidate.add_argument("--dry-run", action="store_true", help="only say what would go")
    sessions = add("sessions", parents=[shared], help="list the workers, or end one")
    sessions.set_defaults(run=_sessions)
    sessions.add_argument("action", nargs="?", choices=["kill"], help="kill: end a session")
    sessions.add_argument("id", nargs="?", type=int, metavar="ID", help="session id")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, 1 failed, 2 wrong usage."""
    try:
        parsed = build_parser().parse_args(arguments)
    except ToolError as error:
        print(f"radixkv: {error}", file=sys.stderr)
        return EXIT_USAGE
    try:
        return int(parsed.run(Server(parsed), parsed))
    except ToolError as error:
        print(f"radixkv: {error}", file=sys.stderr)
        return EXIT_FAILED


def _add_namespace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", metavar="FINGERPRINT", help="needed if several")
    parser.add_argument("--adapter", default="", help="adapter name")
    parser.add_argument("--adapter-version", default="", help="needed with --adapter")
    parser.add_argument("--salt", default="", help="tenant salt")


def _stats(server: Server, arguments: argparse.Namespace) -> int:
    reply = server.call(server.cache.Stats, cache_pb2.StatsRequest())
    if arguments.json:
        return _print_json(as_plain(reply))
    counters = reply.counters
    rate = counters.hit_tokens / counters.queried_tokens if counters.queried_tokens else 0.0
    print(f"radixkv-server {reply.server_version}, up {reply.uptime_ms / 1000:.0f} s", end="")
    print(", draining" if reply.draining else "")
    print(f"prefix hit rate {rate:.1%} ({counters.hit_tokens} of {counters.queried_tokens} tokens)")
    print(f"sessions {reply.num_sessions}, leases {reply.num_leases}, waiting {reply.num_waiting}")
    print("blocks " + ", ".join(f"{name} {count}" for name, count in as_plain(reply.books).items()))
    for name, count in as_plain(counters).items():
        print(f"  {name} {count}")
    return 0


def _health(server: Server, arguments: argparse.Namespace) -> int:
    stub = health_pb2_grpc.HealthStub(server.channel)
    reply = server.call(stub.Check, health_pb2.HealthCheckRequest())
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    _print_json({"status": name}) if arguments.json else print(name)
    return 0 if reply.status == health_pb2.HealthCheckResponse.SERVING else EXIT_FAILED


def _lookup(server: Server, arguments: argparse.Namespace) -> int:
    tokens = (
        _encode_tokens(arguments.tokens)
        if arguments.tokens is not None
        else _read_tokens(arguments.tokens_file)
    )
    request = cache_pb2.LookupRequest(namespace=_namespace(arguments), tokens=tokens)
    reply = server.call(server.cache.Lookup, request)
    kind = session_pb2.MissReason.Kind.Name(reply.miss.kind)
    nearest = memoryview(reply.miss.nearest_tokens).cast("i").tolist()
    if arguments.json:
        miss = {"kind": kind, "at_token": reply.miss.at_token, "nearest_tokens": nearest}
        return _print_json(as_plain(reply) | {"miss": miss})
    print(f"cached {reply.cached_tokens} of {len(tokens) // 4} tokens", end="")
    print(f", being computed {reply.being_computed}" if reply.being_computed else "")
    if reply.miss.kind != session_pb2.MissReason.NONE:
        print(f"{kind} at token {reply.miss.at_token}", end="")
        print(f"; nearest branch continues {nearest}" if nearest else "")
    return 0


def _invalidate(server: Server, arguments: argparse.Namespace) -> int:
    named = [arguments.model, arguments.adapter, arguments.salt, arguments.prefix]
    if arguments.everything and any(named):
        raise ToolError("--everything goes with no other choice of what to drop")
    request = cache_pb2.InvalidateRequest(
        namespace=None if arguments.everything else _namespace(arguments),
        prefix=_encode_tokens(arguments.prefix) if arguments.prefix else b"",
        everything=arguments.everything,
        dry_run=arguments.dry_run,
    )
    reply = server.call(server.cache.Invalidate, request)
    if arguments.json:
        return _print_json(as_plain(reply))
    verb = "would free" if arguments.dry_run else "freed"
    print(f"{verb} {reply.removed_blocks} blocks; {reply.leased_blocks} more are still leased")
    return 0


def _sessions(server: Server, arguments: argparse.Namespace) -> int:
    if arguments.action == "kill":
        if arguments.id is None or not 0 < arguments.id < 1 << 64:
            raise ToolError("sessions kill needs a session id, see `radixkv sessions`")
        request = cache_pb2.KillSessionRequest(session_id=arguments.id)
        killed = server.call(server.cache.KillSession, request)
        if arguments.json:
            return _print_json(as_plain(killed))
        print(f"session {arguments.id} ended, {killed.freed_blocks} blocks freed")
        return 0
    reply = server.call(server.cache.Sessions, cache_pb2.SessionsRequest())
    if arguments.json:
        return _print_json(as_plain(reply))
    for info in reply.sessions:
        pids = ",".join(map(str, info.pids)) or "-"
        print(
            f"{info.session_id}  {info.transport or 'disconnected'}  pids {pids}  {info.client}  "
            f"model {info.model_fingerprint}  leases {info.num_leases}  waiting {info.num_waiting}"
            f"  private {info.private_blocks}  reserve {info.reserved_blocks}  silent "
            f"{info.silent_ms / 1000:.0f} s{'  ALARM' if info.alarm else ''}"
        )
    if not reply.sessions:
        print("no sessions")
    return 0


def _target(arguments: argparse.Namespace) -> str:
    if arguments.address:
        return str(arguments.address)
    try:
        directory = Path(arguments.socket_dir) if arguments.socket_dir else default_socket_dir()
        return SocketPaths(directory.absolute()).grpc_target
    except ValueError as error:
        raise ToolError(str(error)) from None


def _namespace(arguments: argparse.Namespace) -> cache_pb2.NamespaceRef:
    scope = session_pb2.Scope(
        adapter=arguments.adapter,
        adapter_version=arguments.adapter_version,
        salt=arguments.salt,
    )
    return cache_pb2.NamespaceRef(model_fingerprint=arguments.model, scope=scope)


def _encode_tokens(text: str) -> bytes:
    try:
        return b"".join(int(part).to_bytes(4, "little", signed=True) for part in text.split(","))
    except (ValueError, OverflowError):
        raise ToolError("tokens must be whole numbers like 1,2,3") from None


def _read_tokens(path: str) -> bytes:
    data = _read_bytes(path, MAX_TOKENS * 4)
    if len(data) % 4:
        raise ToolError(f"{path} has {len(data)} bytes, not a multiple of 4")
    return data


def _read_text(path: str) -> str:
    return _read_bytes(path, 4096).decode("ascii", errors="replace").strip()


def _read_bytes(path: str, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ToolError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > limit:
        raise ToolError(f"{path} is larger than {limit} bytes")
    return data


def _print_json(value: object) -> int:
    print(json.dumps(value, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
