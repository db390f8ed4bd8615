"""What the commands of radixkv have in common: the server they ask, tokens, namespaces, JSON."""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from radixkv.v1 import cache_pb2, cache_pb2_grpc, session_pb2
from radixkv.wire.channel import client_options
from radixkv.wire.limits import MAX_TOKENS
from radixkv.wire.paths import SocketPaths, default_socket_dir

TOKEN_FILE_VARIABLE = "RADIXKV_ADMIN_TOKEN_FILE"
CALL_TIMEOUT_S = 10.0


class ToolError(Exception):
    """The command cannot be carried out; the message is one line for the user."""


class Server:
    """The server the command talks to, on its Unix socket or over TCP."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.target: str = arguments.address or SocketPaths(socket_dir_of(arguments)).grpc_target
        self.channel = grpc.insecure_channel(self.target, client_options())
        self.cache = cache_pb2_grpc.CacheStub(self.channel)
        token_file = arguments.admin_token_file or os.environ.get(TOKEN_FILE_VARIABLE)
        self.metadata = (
            (("authorization", f"Bearer {read_text(token_file)}"),) if token_file else ()
        )

    def call(
        self, method: Callable[..., Any], request: Message, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """Call a method; raises `ToolError` with what the server, or gRPC, says."""
        try:
            return method(request, timeout=timeout_s, metadata=self.metadata)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code == grpc.StatusCode.UNAVAILABLE:
                raise ToolError(
                    f"no server answers on {self.target} ({details}): start radixkv-server or set "
                    "--socket-dir or --address"
                ) from None
            if code == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ToolError(
                    f"the server on {self.target} did not answer within {timeout_s:.0f} s"
                ) from None
            raise ToolError(f"{code.name}: {details}") from None


class Parser(argparse.ArgumentParser):
    """Raises `ToolError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """See argparse."""
        raise ToolError(message)


def socket_dir_of(arguments: argparse.Namespace) -> Path:
    """The directory of the server's sockets."""
    try:
        directory = Path(arguments.socket_dir) if arguments.socket_dir else default_socket_dir()
        SocketPaths(directory.absolute())
    except ValueError as error:
        raise ToolError(str(error)) from None
    return directory.absolute()


def add_namespace(parser: argparse.ArgumentParser) -> None:
    """Options that name a namespace."""
    parser.add_argument("--model", default="", metavar="FINGERPRINT", help="needed if several")
    parser.add_argument("--adapter", default="", help="adapter name")
    parser.add_argument("--adapter-version", default="", help="needed with --adapter")
    parser.add_argument("--salt", default="", help="tenant salt")


def add_tokens(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Options that name a sequence of tokens; see `tokens_of`."""
    tokens = parser.add_mutually_exclusive_group(required=required)
    tokens.add_argument("--tokens", metavar="1,2,3", help="token ids")
    tokens.add_argument("--tokens-file", metavar="FILE", help="file with little-endian int32")


def tokens_of(arguments: argparse.Namespace) -> bytes:
    """The tokens that `add_tokens`' options give."""
    if arguments.tokens is not None:
        return encode_tokens(arguments.tokens)
    return _read_tokens(arguments.tokens_file)


def scope_of(arguments: argparse.Namespace) -> session_pb2.Scope:
    """The scope that `add_namespace`'s options name."""
    return session_pb2.Scope(
        adapter=arguments.adapter,
        adapter_version=arguments.adapter_version,
        salt=arguments.salt,
    )


def namespace_of(arguments: argparse.Namespace) -> cache_pb2.NamespaceRef:
    """The namespace that `add_namespace`'s options name."""
    return cache_pb2.NamespaceRef(model_fingerprint=arguments.model, scope=scope_of(arguments))


def names_namespace(arguments: argparse.Namespace) -> bool:
    """Whether any of `add_namespace`'s options is given."""
    return bool(arguments.model or arguments.adapter or arguments.salt)


def encode_tokens(text: str) -> bytes:
    """Tokens from "1,2,3", or from the file of "@FILE"."""
    if text.startswith("@"):
        return _read_tokens(text[1:])
    try:
        return b"".join(int(part).to_bytes(4, "little", signed=True) for part in text.split(","))
    except (ValueError, OverflowError):
        raise ToolError("tokens must be whole numbers like 1,2,3") from None


def milliseconds(text: str) -> int:
    """A duration that the command line has in seconds."""
    try:
        value = round(float(text) * 1000)
    except (ValueError, OverflowError):
        value = -1
    if not 0 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def identifier(text: str) -> int:
    """A number that the server gave: a session, a handle, a pin."""
    if not (text.isascii() and text.isdigit() and 0 < int(text[:32]) < 1 << 64):
        raise argparse.ArgumentTypeError(f"{text!r} is not an id")
    return int(text)


def print_json(value: object) -> int:
    """Print it; returns exit code 0."""
    print(json.dumps(value, indent=2))
    return 0


def _read_tokens(path: str) -> bytes:
    data = _read_bytes(path, MAX_TOKENS * 4)
    if len(data) % 4:
        raise ToolError(f"{path} has {len(data)} bytes, not a multiple of 4")
    return data


def read_text(path: str) -> str:
    """A short file's text, without blanks around it."""
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
