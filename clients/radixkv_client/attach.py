"""The handshake: connect to the attach socket, say Hello, receive the pools' descriptors.

Blocking and short; the asyncio client runs it in a thread. It ends with a connected socket, which
a transport takes over, and whatever the server sent behind the handshake.
"""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from radixkv.v1 import session_pb2 as pb
from radixkv.wire import framing, limits
from radixkv.wire.paths import SocketPaths, default_socket_dir
from radixkv_client.errors import Internal, RadixKVError, Unavailable, error_named

CLIENT_VERSION = "radixkv-client 0.1.0"
CAPABILITIES = ("reserve", "resume")
_READ_BYTES = 65_536
_FULL_QUEUE_POLL_S = 0.005


class ConnectionLost(Exception):
    """The connection was cut, or nobody listens; the session may go on over another one."""


class HandshakeTimeout(Exception):
    """Somebody listens, and did not answer in time."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The session to go on with, and the highest consecutive reply number seen."""

    token: bytes
    incarnation: bytes
    replies_seen: int


@dataclass(frozen=True, slots=True)
class Identity:
    """Where the server is, and what this client says in Hello."""

    socket_dir: Path
    model: str
    kv_spec: pb.KVSpec
    placeholder_tokens: tuple[int, ...] = ()
    client_name: str = ""

    @property
    def attach_path(self) -> str:
        """Path of the attach socket."""
        return str(SocketPaths(self.socket_dir).attach)

    def hello(self, token: bytes, resume: Resume | None = None) -> pb.ClientMessage:
        """Hello for a new session of `token`, or for going on with an old one."""
        return pb.ClientMessage(
            hello=pb.Hello(
                session_token=token if resume is None else resume.token,
                protocol_version=limits.PROTOCOL_VERSION,
                capabilities=CAPABILITIES,
                client=self.client_name or CLIENT_VERSION,
                model_fingerprint=self.model,
                kv_spec=self.kv_spec,
                placeholder_tokens=self.placeholder_tokens,
                resume=resume is not None,
                replies_seen=0 if resume is None else resume.replies_seen,
            )
        )


def make_identity(
    socket_dir: str | os.PathLike[str] | None,
    model: str,
    kv_spec: pb.KVSpec,
    placeholder_tokens: Sequence[int],
    client_name: str,
) -> Identity:
    """An Identity; without `socket_dir` the server's default directory."""
    directory = Path(socket_dir) if socket_dir is not None else default_socket_dir()
    return Identity(directory, model, kv_spec, tuple(placeholder_tokens), client_name)


class AttachConnection:
    """A framed, blocking connection to the attach socket, used until the handshake is over.

    `deadline` is on the monotonic clock and bounds every call. Descriptors that came and were not
    taken are closed with the connection.
    """

    def __init__(self, path: str, deadline: float) -> None:
        self.deadline = deadline
        self.backlog: list[pb.ServerMessage] = []
        self.decoder = framing.FrameDecoder()
        self._descriptors: list[int] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connect(path)
            self.attached = self._expect("attached").attached
        except (OSError, RadixKVError, ConnectionLost, HandshakeTimeout) as error:
            self.close()
            if isinstance(error, OSError):
                raise _translate(error, path) from error
            raise

    def _connect(self, path: str) -> None:
        """Connect; a server that is behind with accepting says "try again" at once."""
        while True:
            self.socket.settimeout(self._remaining())
            try:
                self.socket.connect(path)
                return
            except BlockingIOError:
                time.sleep(_FULL_QUEUE_POLL_S)

    def say_hello(self, hello: pb.ClientMessage) -> pb.HelloReply:
        """Send Hello here and read its reply; raises the error it was refused with."""
        self._send(framing.encode(hello))
        return accepted(self._expect("hello").hello)

    def take_pools(self) -> tuple[pb.Pools, list[int]]:
        """Read Pools; the caller owns its descriptors, one per pool."""
        pools = self._expect("pools").pools
        count = len(pools.pools)
        if len(self._descriptors) < count:
            raise Internal(f"{count} pools came with {len(self._descriptors)} descriptors")
        taken, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return pools, taken

    def explain(self, error: RadixKVError) -> Exception:
        """Why Hello over gRPC was refused: `error`, unless this connection has been cut."""
        return error if self.still_open() else ConnectionLost("the attach connection was cut")

    def still_open(self) -> bool:
        """Whether the server still holds its end; what it sent meanwhile is dropped."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(_READ_BYTES):
                pass
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def drop_descriptors(self) -> None:
        """Close descriptors that nobody took."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def close(self) -> None:
        """Close the socket and descriptors nobody took."""
        self.socket.close()
        self.drop_descriptors()

    def _expect(self, kind: str) -> pb.ServerMessage:
        """The next message of this kind; Replies before it wait in `backlog`."""
        while True:
            for position, message in enumerate(self.backlog):
                got = message.WhichOneof("message")
                if got == kind:
                    return self.backlog.pop(position)
                if got == "ended":
                    raise _status_error(message.ended.status)
            self._read()

    def _read(self) -> None:
        try:
            self.socket.settimeout(self._remaining())
            data, descriptors, _, _ = socket.recv_fds(
                self.socket, _READ_BYTES, limits.MAX_POOLS, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise _translate(error, "the attach socket") from error
        self._descriptors += descriptors
        if not data:
            raise ConnectionLost("the server closed the attach socket")
        for payload in self.decoder.feed(data):
            self.backlog.append(pb.ServerMessage.FromString(payload))

    def _send(self, frame: bytes) -> None:
        try:
            self.socket.settimeout(self._remaining())
            self.socket.sendall(frame)
        except OSError as error:
            raise _translate(error, "the attach socket") from error

    def _remaining(self) -> float:
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise HandshakeTimeout("no answer to the handshake in time")
        return remaining


@dataclass(frozen=True, slots=True)
class Opened:
    """A finished handshake. Whoever gets it owns the connection and the pools' descriptors."""

    connection: AttachConnection
    token: bytes
    hello: pb.HelloReply
    pools: pb.Pools
    descriptors: list[int]


def attach(identity: Identity, deadline: float, resume: Resume | None = None) -> AttachConnection:
    """Connect; Unavailable if `resume` names another run of the server."""
    connection = AttachConnection(identity.attach_path, deadline)
    if resume is not None and connection.attached.incarnation != resume.incarnation:
        connection.close()
        raise restarted()
    return connection


def open_local(identity: Identity, deadline: float, resume: Resume | None = None) -> Opened:
    """The whole handshake on the attach socket. Raises what the server refused Hello with."""
    connection = attach(identity, deadline, resume)
    try:
        hello = connection.say_hello(identity.hello(connection.attached.session_token, resume))
        return opened(connection, hello, resume)
    except BaseException:
        connection.close()
        raise


def opened(connection: AttachConnection, hello: pb.HelloReply, resume: Resume | None) -> Opened:
    """What an accepted Hello leads to; a resumed session keeps its old mapping of the pools."""
    if resume is None:
        pools, descriptors = connection.take_pools()
        return Opened(connection, connection.attached.session_token, hello, pools, descriptors)
    connection.drop_descriptors()
    return Opened(connection, resume.token, hello, pb.Pools(), [])


def restarted() -> Unavailable:
    """What every operation of a session of an earlier run of the server fails with."""
    return Unavailable(
        "the server restarted: all leases and its pool are gone; drop views, then call reconnect()"
    )


def accepted(reply: pb.HelloReply) -> pb.HelloReply:
    """The reply if the server accepted Hello; raises the error it was refused with."""
    if reply.status.code != pb.OK:
        raise _status_error(reply.status)
    return reply


def unreachable(identity: Identity, error: Exception) -> Unavailable:
    """What a caller is told when no session could be opened."""
    return Unavailable(f"no radixkv-server at {identity.attach_path}: {error}")


def _status_error(status: pb.Status) -> RadixKVError:
    return error_named(pb.Code.Name(status.code), status.message)


def _translate(error: OSError, where: str) -> Exception:
    if isinstance(error, TimeoutError):
        return HandshakeTimeout(f"{where}: no answer in time")
    return ConnectionLost(f"{where}: {error.strerror or error}")
