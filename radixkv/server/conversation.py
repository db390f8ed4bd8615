"""What a client may say on a stream, whatever carries it: first Hello, then Steps, at last Bye."""

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from radixkv.server.errors import ProtocolError
from radixkv.server.sessions import Connection, Link, Session, ended
from radixkv.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from radixkv.server.runtime import Runtime

# Limits of a stream, on either transport.
HELLO_TIMEOUT_S = 30.0
MAX_UNSENT_BYTES = 32 << 20  # waiting for a peer that does not read, before it is not read from
SLOW_READER_TIMEOUT_S = 30.0  # how long it may stay so
CLOSE_TIMEOUT_S = 5.0  # for what was sent to go out


class Conversation:
    """One stream's side of the session protocol. The transport settles the runtime afterwards.

    States: no session yet -> a session, which this stream carries -> over: the stream was closed
    here, or another one carries the session now, and what still arrives is not read.
    """

    def __init__(self, runtime: "Runtime", link: Link, connection: Connection | None) -> None:
        self._runtime = runtime
        self._link = link
        self._connection = connection
        self.session: Session | None = None
        self.over = False

    def receive(self, data: bytes) -> None:
        """One serialized ClientMessage."""
        if self.over:
            return
        try:
            message = pb.ClientMessage.FromString(data)
        except DecodeError:
            self.break_off("this is not a ClientMessage")
            return
        kind = message.WhichOneof("message")
        session = self.session
        if session is None:
            self._first(kind, message)
        elif session.link is not self._link:
            self.over = True
        elif kind == "step":
            self._step(session, message.step)
        elif kind == "bye":
            self.over = True
            self._runtime.lifecycle.bye(session)
        else:
            self.break_off(f"{kind or 'an empty message'} within a session")

    def _step(self, session: Session, step: pb.Step) -> None:
        runtime = self._runtime
        session.heard_ms = runtime.now_ms()
        try:
            session.protocol.receive_step(step)
        except ProtocolError as error:
            self._fail(session, error)
        runtime.wrote(session)

    def _first(self, kind: str | None, message: pb.ClientMessage) -> None:
        if kind != "hello":
            self.break_off("the first message must be Hello")
            return
        self.session = self._runtime.lifecycle.hello(message.hello, self._link, self._connection)
        self.over = self.session is None

    def break_off(self, reason: str) -> None:
        """The client is wrong: say why, close the stream, and fail the session it carries."""
        if self.over:
            return
        error = ProtocolError(reason)
        if self.session is not None and self.session.link is self._link:
            self._fail(self.session, error)
            return
        self.over = True
        self._link.send(ended(error.code, reason))
        self._link.close()

    def _fail(self, session: Session, error: ProtocolError) -> None:
        self.over = True
        session.flush()
        self._runtime.lifecycle.fail(session, error)
