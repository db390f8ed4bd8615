"""`radixkv pack`: cached prefixes to a file and back. An ordinary client does the work."""

import argparse
from collections.abc import Callable
from typing import Any

from radixkv.cli.call import (
    Server,
    ToolError,
    add_namespace,
    encode_tokens,
    print_json,
    scope_of,
    socket_dir_of,
)
from radixkv_client.errors import RadixKVError
from radixkv_client.pack import PackSummary, export_pack, import_pack
from radixkv_client.values import Scope


def add_commands(add: Callable[..., Any], shared: argparse.ArgumentParser) -> None:
    """Add them; each sets `run`."""
    pack = add("pack", help="write cached prefixes to a file, or publish those of one")
    actions = pack.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = actions.add_parser("export", parents=[shared], help="write cached prefixes to a file")
    export.set_defaults(run=_export)
    add_namespace(export)
    export.add_argument("--prefix", action="append", required=True, metavar="1,2,3|@FILE",
                        help="tokens, or a file with little-endian int32; several are allowed"
                        )  # fmt: skip
    export.add_argument("file", metavar="FILE")
    publish = actions.add_parser("import", parents=[shared], help="publish what a pack holds")
    publish.set_defaults(run=_import)
    publish.add_argument("file", metavar="FILE")


def _export(server: Server, arguments: argparse.Namespace) -> int:
    prefixes = [encode_tokens(text) for text in arguments.prefix]

    def work() -> PackSummary:
        return export_pack(
            arguments.file,
            prefixes,
            socket_dir=socket_dir_of(arguments),
            model=arguments.model,
            scope=Scope.from_proto(scope_of(arguments)),
        )

    return _run(work, arguments, f"cannot write {arguments.file}", "wrote", "written")


def _import(server: Server, arguments: argparse.Namespace) -> int:
    def work() -> PackSummary:
        return import_pack(arguments.file, socket_dir=socket_dir_of(arguments))

    return _run(work, arguments, f"cannot import {arguments.file}", "imported", "were missing")


def _run(
    work: Callable[[], PackSummary],
    arguments: argparse.Namespace,
    failure: str,
    verb: str,
    participle: str,
) -> int:
    if arguments.address:
        raise ToolError("pack maps the pool: it needs the server's sockets, not --address")
    try:
        summary = work()
    except RadixKVError as error:
        raise ToolError(f"{failure}: {error}") from None
    except OSError as error:
        raise ToolError(f"{failure}: {error.strerror or error}") from None
    num_sequences = len(summary.header.sequences)
    if arguments.json:
        counts = {
            "model_fingerprint": summary.header.model,
            "num_sequences": num_sequences,
            "num_tokens": summary.num_tokens,
            "asked_tokens": summary.asked_tokens,
            "num_blocks": len(summary.header.checksums),
            "written_blocks": summary.written_blocks,
            "written_bytes": summary.written_bytes,
        }
        return print_json(counts)
    print(
        f"{verb} {num_sequences} prefixes, {summary.num_tokens} of {summary.asked_tokens} tokens,"
        f" of model {summary.header.model}: {summary.written_blocks} blocks"
        f" ({summary.written_bytes / 2**20:.1f} MiB) {participle}"
    )
    return 0
