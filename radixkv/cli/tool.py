"""radixkv: asks a running server, over gRPC."""

import argparse
import os
import sys
from collections.abc import Sequence

from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixkv import __version__
from radixkv.cli import packs, tiers
from radixkv.cli.call import (
    TOKEN_FILE_VARIABLE,
    Parser,
    Server,
    ToolError,
    add_namespace,
    add_tokens,
    encode_tokens,
    identifier,
    names_namespace,
    namespace_of,
    print_json,
    tokens_of,
)
from radixkv.v1 import cache_pb2, session_pb2
from radixkv.wire.plain import as_plain

EXIT_FAILED = 1
EXIT_USAGE = 2
ERASE_TIMEOUT_S = 90.0  # the server waits for erasures, for less than this


def build_parser() -> argparse.ArgumentParser:
    """The command line of radixkv. Parsing raises `ToolError` instead of exiting."""
    shared = Parser(add_help=False, allow_abbrev=False)
    shared.add_argument("--socket-dir", metavar="DIR", help="of the server (default: as it has)")
    shared.add_argument("--address", metavar="HOST:PORT", help="use gRPC over TCP instead")
    shared.add_argument(
        "--admin-token-file",
        metavar="FILE",
        help=f"token for changing calls over TCP (default ${TOKEN_FILE_VARIABLE})",
    )
    shared.add_argument("--json", action="store_true", help="print JSON")
    parser = Parser(prog="radixkv", description="Ask a running radixkv-server.")
    parser.add_argument("--version", action="version", version=f"radixkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser
    add("stats", parents=[shared], help="books and counters").set_defaults(run=_stats)
    add("health", parents=[shared], help="is it serving?").set_defaults(run=_health)
    lookup = add("lookup", parents=[shared], help="how much of a prompt is cached; changes nothing")
    lookup.set_defaults(run=_lookup)
    add_namespace(lookup)
    add_tokens(lookup)
    invalidate = add("invalidate", parents=[shared], help="drop cached blocks")
    invalidate.set_defaults(run=_invalidate)
    add_namespace(invalidate)
    invalidate.add_argument("--prefix", metavar="1,2,3", help="only what begins with these tokens")
    invalidate.add_argument(
        "--tag",
        default="",
        help="only what was published under this tag, and "
        "what follows it; alone: in all namespaces",
    )
    invalidate.add_argument("--everything", action="store_true", help="all namespaces")
    invalidate.add_argument("--dry-run", action="store_true", help="only say what would go")
    sessions = add("sessions", parents=[shared], help="list the workers, or end one")
    sessions.set_defaults(run=_sessions)
    sessions.add_argument("action", nargs="?", choices=["kill"], help="kill: end a session")
    sessions.add_argument("id", nargs="?", type=identifier, metavar="ID", help="session id")
    tiers.add_commands(add, shared)
    packs.add_commands(add, shared)
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
    except BrokenPipeError:  # what reads our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _stats(server: Server, arguments: argparse.Namespace) -> int:
    reply = server.call(server.cache.Stats, cache_pb2.StatsRequest())
    if arguments.json:
        return print_json(as_plain(reply))
    counters = reply.counters
    rate = counters.hit_tokens / counters.queried_tokens if counters.queried_tokens else 0.0
    print(f"radixkv-server {reply.server_version}, up {reply.uptime_ms / 1000:.0f} s", end="")
    print(", draining" if reply.draining else "")
    print(f"prefix hit rate {rate:.1%} ({counters.hit_tokens} of {counters.queried_tokens} tokens)")
    print(f"sessions {reply.num_sessions}, leases {reply.num_leases}, waiting {reply.num_waiting}")
    print("blocks " + ", ".join(f"{name} {count}" for name, count in as_plain(reply.books).items()))
    for tier in reply.tiers:
        tiers.print_tier(tier)
    for name, count in as_plain(counters).items():
        print(f"  {name} {count}")
    return 0


def _health(server: Server, arguments: argparse.Namespace) -> int:
    stub = health_pb2_grpc.HealthStub(server.channel)
    reply = server.call(stub.Check, health_pb2.HealthCheckRequest())
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    print_json({"status": name}) if arguments.json else print(name)
    return 0 if reply.status == health_pb2.HealthCheckResponse.SERVING else EXIT_FAILED


def _lookup(server: Server, arguments: argparse.Namespace) -> int:
    tokens = tokens_of(arguments)
    request = cache_pb2.LookupRequest(namespace=namespace_of(arguments), tokens=tokens)
    reply = server.call(server.cache.Lookup, request)
    kind = session_pb2.MissReason.Kind.Name(reply.miss.kind)
    nearest = memoryview(reply.miss.nearest_tokens).cast("i").tolist()
    if arguments.json:
        miss = {"kind": kind, "at_token": reply.miss.at_token, "nearest_tokens": nearest}
        return print_json(as_plain(reply) | {"miss": miss})
    print(f"cached {reply.cached_tokens} of {len(tokens) // 4} tokens", end="")
    print(f", being computed {reply.being_computed}" if reply.being_computed else "")
    if reply.miss.kind != session_pb2.MissReason.NONE:
        print(f"{kind} at token {reply.miss.at_token}", end="")
        print(f"; nearest branch continues {nearest}" if nearest else "")
    return 0


def _invalidate(server: Server, arguments: argparse.Namespace) -> int:
    named = names_namespace(arguments) or bool(arguments.prefix)
    if arguments.everything and (named or arguments.tag):
        raise ToolError("--everything goes with no other choice of what to drop")
    everywhere = arguments.everything or (arguments.tag and not named)
    request = cache_pb2.InvalidateRequest(
        namespace=None if everywhere else namespace_of(arguments),
        prefix=encode_tokens(arguments.prefix) if arguments.prefix else b"",
        tag=arguments.tag,
        everything=arguments.everything,
        dry_run=arguments.dry_run,
    )
    reply = server.call(server.cache.Invalidate, request, ERASE_TIMEOUT_S)
    if arguments.json:
        print_json(as_plain(reply))
    else:
        _print_invalidated(reply, "would free" if arguments.dry_run else "freed")
    return EXIT_FAILED if reply.failed_erasures else 0


def _print_invalidated(reply: cache_pb2.InvalidateReply, verb: str) -> None:
    print(f"{verb} {reply.removed_blocks} blocks", end="")
    below = {"cpu": reply.cpu_blocks, "nvme": reply.nvme_blocks, "remote": reply.remote_blocks}
    if any(below.values()):
        copies = ", ".join(f"{name} {count}" for name, count in below.items())
        print(f" of the gpu and copies below it ({copies})", end="")
    print(f"; {reply.leased_blocks} more are still leased")
    if reply.failed_erasures:
        print(f"{reply.failed_erasures} could not be erased: they may come back after a restart")


def _sessions(server: Server, arguments: argparse.Namespace) -> int:
    if arguments.action == "kill":
        if arguments.id is None:
            raise ToolError("sessions kill needs a session id, see `radixkv sessions`")
        request = cache_pb2.KillSessionRequest(session_id=arguments.id)
        killed = server.call(server.cache.KillSession, request)
        if arguments.json:
            return print_json(as_plain(killed))
        print(f"session {arguments.id} ended, {killed.freed_blocks} blocks freed")
        return 0
    reply = server.call(server.cache.Sessions, cache_pb2.SessionsRequest())
    if arguments.json:
        return print_json(as_plain(reply))
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


if __name__ == "__main__":
    sys.exit(main())
