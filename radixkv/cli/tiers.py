"""Commands of radixkv about what stays cached, and where."""

import argparse
from collections.abc import Callable
from typing import Any

from radixkv.cli.call import (
    CALL_TIMEOUT_S,
    Server,
    ToolError,
    add_namespace,
    add_tokens,
    encode_tokens,
    identifier,
    milliseconds,
    names_namespace,
    namespace_of,
    print_json,
    tokens_of,
)
from radixkv.v1 import cache_pb2, session_pb2
from radixkv.wire.limits import MAX_WAIT_MS
from radixkv.wire.plain import as_plain


def add_commands(add: Callable[..., Any], shared: argparse.ArgumentParser) -> None:
    """Add them; each sets `run`."""
    prefetch = add("prefetch", parents=[shared], help="bring a prefix up to the gpu")
    prefetch.set_defaults(run=_prefetch)
    add_namespace(prefetch)
    add_tokens(prefetch, required=False)
    prefetch.add_argument("--wait", type=milliseconds, default=0, metavar="SECONDS",
                          help="wait so long for its end")  # fmt: skip
    prefetch.add_argument("--cancel", type=identifier, metavar="HANDLE", help="stop one instead")
    pin = add("pin", parents=[shared], help="keep the cached part of a prefix from eviction")
    pin.set_defaults(run=_pin)
    add_namespace(pin)
    add_tokens(pin)
    pin.add_argument("--ttl", type=milliseconds, default=0, metavar="SECONDS",
                     help="for so long (default: until unpin)")  # fmt: skip
    unpin = add("unpin", parents=[shared], help="lift a pin, or all of a prefix")
    unpin.set_defaults(run=_unpin)
    add_namespace(unpin)
    unpin.add_argument("id", nargs="?", type=identifier, metavar="PIN", help="pin id")
    unpin.add_argument("--prefix", metavar="1,2,3", help="all pins of what begins so")
    retain = add("retain", parents=[shared], help="change how long cached blocks are kept")
    retain.set_defaults(run=_retain)
    add_namespace(retain)
    retain.add_argument("--prefix", metavar="1,2,3", help="only what begins with these tokens")
    retain.add_argument("--priority", type=int, metavar="-100…100",
                        help="lower goes first (0 if only --ttl is given)")  # fmt: skip
    retain.add_argument("--ttl", type=milliseconds, metavar="SECONDS",
                        help="forget after so long (never if not given)")  # fmt: skip
    namespaces = add("namespaces", parents=[shared], help="what is cached for whom")
    namespaces.set_defaults(run=_namespaces)


def print_tier(tier: cache_pb2.Tier) -> None:
    """A tier of Stats, in a few lines."""
    state = cache_pb2.Tier.State.Name(tier.state)
    print(f"tier {tier.name} {state}" + (f" ({tier.problem})" if tier.problem else ""))
    if tier.HasField("books"):
        books = as_plain(tier.books).items()
        print("  blocks " + ", ".join(f"{name} {count}" for name, count in books))
    shown = as_plain(tier)
    counts = {name: value for name, value in shown.items() if isinstance(value, int)}
    print("  " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    speeds = (tier.read_bytes_per_second, tier.write_bytes_per_second)
    if any(speeds):
        print("  read {:.0f} MiB/s, write {:.0f} MiB/s".format(*(s / 2**20 for s in speeds)))


def _prefetch(server: Server, arguments: argparse.Namespace) -> int:
    named = arguments.tokens is not None or arguments.tokens_file is not None
    if arguments.cancel is not None:
        if named or arguments.wait:
            raise ToolError("--cancel goes with nothing else")
        return _cancel(server, arguments)
    if not named:
        raise ToolError("prefetch needs --tokens, --tokens-file or --cancel")
    request = cache_pb2.PrefetchRequest(
        namespace=namespace_of(arguments), tokens=tokens_of(arguments)
    )
    reply = server.call(server.cache.Prefetch, request)
    ended = _wait(server, reply.handle, min(arguments.wait, MAX_WAIT_MS))
    if arguments.json:
        return print_json(as_plain(reply) | ({"ended": as_plain(ended)} if ended else {}))
    reason = session_pb2.Onboarding.Reason.Name(reply.reason)
    print(f"{reply.cached_tokens} tokens are on the gpu, {reply.loading_tokens} are on their way "
          f"({reason}), handle {reply.handle}")  # fmt: skip
    if ended is not None:
        print(f"loaded {ended.loaded_tokens}, failed {ended.failed_tokens}" if ended.done
              else "still running")  # fmt: skip
    return 0


def _wait(server: Server, handle: int, wait_ms: int) -> cache_pb2.WaitPrefetchReply | None:
    if not handle or not wait_ms:
        return None
    request = cache_pb2.WaitPrefetchRequest(handle=handle, timeout_ms=wait_ms)
    timeout_s = wait_ms / 1000 + CALL_TIMEOUT_S
    reply: cache_pb2.WaitPrefetchReply = server.call(server.cache.WaitPrefetch, request, timeout_s)
    return reply


def _cancel(server: Server, arguments: argparse.Namespace) -> int:
    request = cache_pb2.CancelPrefetchRequest(handle=arguments.cancel)
    reply = server.call(server.cache.CancelPrefetch, request)
    if arguments.json:
        return print_json(as_plain(reply))
    print("cancelled" if reply.cancelled else "it had ended")
    return 0


def _pin(server: Server, arguments: argparse.Namespace) -> int:
    tokens = tokens_of(arguments)
    request = cache_pb2.PinRequest(
        namespace=namespace_of(arguments), tokens=tokens, ttl_ms=arguments.ttl
    )
    reply = server.call(server.cache.Pin, request)
    if arguments.json:
        return print_json(as_plain(reply))
    print(f"pinned {reply.pinned_tokens} of {len(tokens) // 4} tokens, pin {reply.pin_id}")
    return 0


def _unpin(server: Server, arguments: argparse.Namespace) -> int:
    named = arguments.prefix is not None or names_namespace(arguments)
    if named == (arguments.id is not None):
        raise ToolError("unpin takes a pin id, or else a --prefix or namespace")
    if arguments.id is not None:
        request = cache_pb2.UnpinRequest(pin_id=arguments.id)
    else:
        prefix = encode_tokens(arguments.prefix) if arguments.prefix else b""
        request = cache_pb2.UnpinRequest(namespace=namespace_of(arguments), tokens=prefix)
    reply = server.call(server.cache.Unpin, request)
    if arguments.json:
        return print_json(as_plain(reply))
    print(f"lifted {reply.num_pins} pins")
    return 0


def _retain(server: Server, arguments: argparse.Namespace) -> int:
    if arguments.priority is None and arguments.ttl is None:
        raise ToolError("say how: --priority, --ttl or both; what is left out becomes the default")
    priority, ttl_ms = arguments.priority or 0, arguments.ttl or 0
    try:
        retention = session_pb2.Retention(priority=priority, ttl_ms=ttl_ms)
    except ValueError as error:
        raise ToolError(f"--priority: {error}") from None
    request = cache_pb2.RetainRequest(
        namespace=namespace_of(arguments),
        prefix=encode_tokens(arguments.prefix) if arguments.prefix else b"",
        retention=retention,
    )
    reply = server.call(server.cache.Retain, request)
    if arguments.json:
        return print_json(as_plain(reply))
    print(f"changed {reply.num_blocks} blocks")
    return 0


def _namespaces(server: Server, arguments: argparse.Namespace) -> int:
    reply = server.call(server.cache.Namespaces, cache_pb2.NamespacesRequest())
    if arguments.json:
        return print_json(as_plain(reply))
    for info in reply.namespaces:
        scope, spec = info.namespace.scope, info.kv_spec
        words = [f"{info.num_blocks} blocks", f"model {info.namespace.model_fingerprint}"]
        words += [f"adapter {scope.adapter} {scope.adapter_version}"] if scope.adapter else []
        words += [f"salt {scope.salt!r}"] if scope.salt else []
        print("  ".join(words), f" {spec.dtype}, {spec.block_size} tokens, "
              f"{spec.block_bytes} bytes a block")  # fmt: skip
    if not reply.namespaces:
        print("nothing is cached")
    return 0
