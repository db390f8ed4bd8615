"""Sessions and who belongs to them: processes, connections, the stream that carries Steps.

Theory of operation
    An attach connection is *unclaimed* until a Hello with its token arrives, on it or over gRPC,
    and makes a session; the token then names the session, for resumes. A session has at most one
    *link*, the stream that carries it: the newest Hello's. A lost link only disconnects.

    A session is open -> ended. Ending frees all it holds, so it happens only when no process can
    use its blocks any more (Bye, or the last attached process has exited) and never by a clock.
    A session whose client broke the protocol is *failed*: it has lost its stream for good and its
    waiting Acquires, and keeps its blocks until it ends.
"""

import asyncio
import logging
from collections.abc import Iterator
from typing import Protocol

from radixkv.core.errors import Exhausted, FailedPrecondition, NotFound
from radixkv.pools.layout import KVSpec
from radixkv.server.errors import PermissionDenied, status
from radixkv.server.operations import Operations
from radixkv.server.processes import AttachedProcess
from radixkv.server.session import SessionProtocol
from radixkv.v1 import session_pb2 as pb
from radixkv.wire import limits

log = logging.getLogger(__name__)


class Link(Protocol):
    """A stream that carries one session's messages; `transport` is "local" or "grpc"."""

    transport: str

    def send(self, message: bytes) -> None:
        """Queue one serialized ServerMessage; never blocks."""

    def close(self) -> None:
        """Close once everything sent has gone out; idempotent."""


class Connection(Link, Protocol):
    """An attach connection: what brings a process, and takes the pools' descriptors."""

    token: bytes
    process: AttachedProcess
    session: "Session | None"

    def send_pools(self) -> None:
        """Send the pools with their descriptors, behind what was sent before."""


class Session:
    """One worker's session: its protocol, its processes, and where they are connected."""

    def __init__(self, session_id: int, token: bytes, hello: pb.Hello, spec: KVSpec) -> None:
        self.session_id = session_id
        self.token = token
        self.client = hello.client
        self.model = hello.model_fingerprint
        self.spec = spec
        self.operations: Operations
        self.protocol: SessionProtocol
        self.link: Link | None = None
        self.connections: list[Connection] = []
        self.processes: list[AttachedProcess] = []
        self.opened_ms = 0
        self.heard_ms = 0
        self.alarm = False
        self.failed = False
        self.pressure = 0  # blocks asked for while there was no link
        self.ended = asyncio.Event()
        self.freed_blocks = 0  # valid once `ended`

    def __str__(self) -> str:
        pids = ", ".join(str(process.pid) for process in self.processes)
        return f"session {self.session_id} ({self.client or 'unnamed'}, pid {pids or 'gone'})"

    def flush(self) -> None:
        """Send what is ready; without a link it is kept for a resume."""
        messages = self.protocol.take_output()
        link = self.link
        if link is not None:
            for message in messages:
                link.send(message)

    def press(self, num_blocks: int) -> None:
        """Ask for blocks, at once or as soon as there is a link."""
        if self.link is None:
            self.pressure = num_blocks
            return
        message = pb.ServerMessage(pressure=pb.Pressure(num_blocks=num_blocks))
        self.link.send(message.SerializeToString())

    def take_link(self, link: Link) -> None:
        """The newest Hello's stream carries the session; one that it replaces is closed.

        An attach connection that hands its session over to gRPC stays, for its process.
        """
        old, self.link = self.link, link
        if old is None or old is link:
            return
        if not (link.transport == "grpc" and old in self.connections):
            old.close()

    def drop_link(self, link: Link) -> None:
        """This stream is gone."""
        if self.link is link:
            self.link = None

    def join(self, connection: Connection) -> AttachedProcess | None:
        """A connection of this session's process, or of one more; returns the latter, to watch.

        Raises Exhausted above MAX_PROCESSES_PER_SESSION.
        """
        if connection in self.connections:
            return None
        for known in self.processes:
            if known.pidfd is not None and known.pid == connection.process.pid:
                for other in [c for c in self.connections if c.process is known]:
                    self.connections.remove(other)
                    other.close()
                connection.process.close()
                connection.process = known
                self._add(connection)
                return None
        if len(self.processes) >= limits.MAX_PROCESSES_PER_SESSION:
            raise Exhausted(
                f"{limits.MAX_PROCESSES_PER_SESSION} processes are attached to the session, no"
                " more are allowed"
            )
        self.processes.append(connection.process)
        self._add(connection)
        return connection.process

    def _add(self, connection: Connection) -> None:
        connection.session = self
        self.connections.append(connection)


class SessionTable:
    """All sessions, and the attach connections that have not become one yet."""

    def __init__(self) -> None:
        self._by_id: dict[int, Session] = {}
        self._by_token: dict[bytes, Session] = {}
        self._unclaimed: dict[bytes, Connection] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def get(self, session_id: int) -> Session | None:
        """The open session of this id."""
        return self._by_id.get(session_id)

    def find(self, session_id: int) -> Session:
        """The open session of this id; raises NotFound."""
        session = self._by_id.get(session_id)
        if session is None:
            raise NotFound(f"no session {session_id}")
        return session

    def offer(self, connection: Connection) -> None:
        """A new attach connection, whose token may now be used once."""
        self._unclaimed[connection.token] = connection

    def withdraw(self, connection: Connection) -> None:
        """The connection closed before anybody said Hello."""
        if self._unclaimed.get(connection.token) is connection:
            del self._unclaimed[connection.token]

    def is_unclaimed(self, connection: Connection) -> bool:
        """Whether nobody has said Hello with this connection's token."""
        return self._unclaimed.get(connection.token) is connection

    def unclaimed(self, token: bytes) -> Connection:
        """The attach connection of a new session's token. Raises PermissionDenied, Exhausted."""
        connection = self._unclaimed.get(token)
        if connection is None:
            raise PermissionDenied(
                "the session token belongs to no attach connection without a session"
            )
        if len(self._by_id) >= limits.MAX_SESSIONS:
            raise Exhausted(f"{limits.MAX_SESSIONS} sessions are open, no more are allowed")
        return connection

    def resumable(self, token: bytes) -> Session:
        """The session to resume. Raises PermissionDenied, FailedPrecondition."""
        session = self._by_token.get(token)
        if session is None:
            raise PermissionDenied(
                "the session token belongs to no session: it has ended, or the server is a new one"
            )
        if session.failed:
            raise FailedPrecondition("the session was ended because its client broke the protocol")
        return session

    def next_id(self) -> int:
        """An id no session has had."""
        self._last_id += 1
        return self._last_id

    def add(self, session: Session) -> None:
        """A new session; its token is claimed."""
        self._unclaimed.pop(session.token)
        self._by_id[session.session_id] = session
        self._by_token[session.token] = session

    def remove(self, session: Session) -> None:
        """The session has ended; its token names nothing any more."""
        del self._by_id[session.session_id]
        del self._by_token[session.token]


def ended(code: str, message: str) -> bytes:
    """The last message of a stream that is not coming back."""
    return pb.ServerMessage(ended=pb.Ended(status=status(code, message))).SerializeToString()
