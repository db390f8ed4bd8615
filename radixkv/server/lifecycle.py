"""How sessions begin, go on after a cut, fail and end; see `sessions` for the states."""

import asyncio
import logging
from typing import TYPE_CHECKING

from radixkv.core.errors import CacheError, FailedPrecondition, InvalidArgument
from radixkv.server import handshake
from radixkv.server.errors import ProtocolError, Unavailable, status_of
from radixkv.server.operations import Operations
from radixkv.server.processes import AttachedProcess
from radixkv.server.session import SessionProtocol
from radixkv.server.sessions import Connection, Link, Session, SessionTable, ended
from radixkv.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from radixkv.server.runtime import Runtime

log = logging.getLogger(__name__)

KILL_TIMEOUT_S = 10.0
MIN_ALARM_CHECK_S = 0.05
MAX_ALARM_CHECK_S = 5.0


class Lifecycle:
    """Opens and ends the sessions of one runtime. Callers settle the runtime afterwards."""

    def __init__(self, runtime: "Runtime", table: SessionTable, session_alarm: float) -> None:
        """`session_alarm`: seconds of silence, 0 = never an alarm."""
        self._runtime = runtime
        self._table = table
        self._alarm_ms = session_alarm * 1000
        self._alarm_check_s = min(max(session_alarm / 4, MIN_ALARM_CHECK_S), MAX_ALARM_CHECK_S)
        self._alarm_timer: asyncio.TimerHandle | None = None
        if session_alarm:
            self._check_alarms()

    # ---- Hello ------------------------------------------------------------------------------

    def hello(self, hello: pb.Hello, link: Link, connection: Connection | None) -> Session | None:
        """Answer a Hello on `link` (and `connection`, if that is an attach connection).

        Returns the session that the link carries from now on; None if it was refused: the reply
        says why, and the link is closed.
        """
        runtime = self._runtime
        try:
            handshake.check_hello(hello)
            if hello.resume:
                session = self._resume(hello, connection)
            else:
                session = self._open(hello, connection)
        except CacheError as error:
            log.info("refused a Hello on %s: %s", link.transport, error)
            reply = handshake.hello_reply(
                runtime.incarnation, runtime.pool_host, runtime.cache.config
            )
            reply.status.CopyFrom(status_of(error))
            link.send(pb.ServerMessage(hello=reply).SerializeToString())
            link.close()
            return None
        session.heard_ms = runtime.now_ms()
        session.take_link(link)
        reply = handshake.hello_reply(runtime.incarnation, runtime.pool_host, runtime.cache.config)
        reply.session_id = session.session_id
        reply.last_step = session.protocol.last_step
        link.send(pb.ServerMessage(hello=reply).SerializeToString())
        attached = connection or (session.connections[-1] if session.connections else None)
        if attached is not None:
            attached.send_pools()
        for message in session.protocol.resume(hello.replies_seen):
            link.send(message)
        if session.pressure:
            session.press(session.pressure)
            session.pressure = 0
        log.info("%s on %s, %s", session, link.transport, "resumed" if hello.resume else "new")
        return session

    def _open(self, hello: pb.Hello, connection: Connection | None) -> Session:
        runtime = self._runtime
        if runtime.draining:
            raise Unavailable("the server is draining and takes no new sessions")
        owner = self._table.unclaimed(hello.session_token)
        if connection is not None and connection is not owner:
            raise InvalidArgument("the session token was given to another attach connection")
        spec = handshake.spec_of(hello)
        runtime.pool_host.fix_spec(spec)
        namespaces = runtime.models.add(
            hello.model_fingerprint, spec.encode(), frozenset(hello.placeholder_tokens)
        )
        session = Session(self._table.next_id(), hello.session_token, hello, spec)
        session.opened_ms = runtime.now_ms()
        session.operations = Operations(
            runtime.cache, session.session_id, namespaces, runtime.backing, runtime.now_ms
        )
        session.protocol = SessionProtocol(session.operations, runtime.start_copies(session))
        runtime.cache.open_session(session.session_id)
        self._table.add(session)
        self._watch(session, owner)
        return session

    def _resume(self, hello: pb.Hello, connection: Connection | None) -> Session:
        session = self._table.resumable(hello.session_token)
        if hello.model_fingerprint not in ("", session.model):
            raise FailedPrecondition("model_fingerprint is not that of the session to resume")
        if hello.HasField("kv_spec") and handshake.spec_of(hello) != session.spec:
            raise FailedPrecondition("kv_spec is not that of the session to resume")
        session.protocol.check_resume(hello.replies_seen)
        if connection is not None:
            self._table.withdraw(connection)
            self._watch(session, connection)
        return session

    def _watch(self, session: Session, connection: Connection) -> None:
        process = session.join(connection)
        if process is not None:
            process.watch(self._runtime.loop, lambda gone: self._exited(session, gone))

    # ---- ends -------------------------------------------------------------------------------

    def _exited(self, session: Session, process: AttachedProcess) -> None:
        log.info("process %d of session %d has exited", process.pid, session.session_id)
        self._remove_process(session, process)
        self._runtime.settle()

    def _remove_process(self, session: Session, process: AttachedProcess) -> None:
        if process not in session.processes:
            return
        session.processes.remove(process)
        process.close()
        for connection in [c for c in session.connections if c.process is process]:
            session.connections.remove(connection)
            session.drop_link(connection)
            connection.close()
        if not session.processes:
            self.end(session, None)

    def disconnected(self, session: Session, connection: Connection) -> None:
        """An attach connection is at its end; without a pidfd, so is its process."""
        session.drop_link(connection)
        if connection in session.connections:
            session.connections.remove(connection)
            if not connection.process.is_observable:
                self._remove_process(session, connection.process)

    def fail(self, session: Session, error: ProtocolError) -> None:
        """The client broke the protocol: the stream ends, the session's blocks stay its own."""
        log.warning("%s broke the protocol: %s", session, error)
        session.failed = True
        session.protocol.cancel_waiting()
        link, session.link = session.link, None
        if link is not None:
            session_over = f"{error}; the session cannot go on"
            link.send(ended(error.code, session_over))
            link.close()

    def end(self, session: Session, last_message: bytes | None) -> None:
        """Free everything the session holds and close its streams, `last_message` first."""
        if session.ended.is_set():
            return
        runtime = self._runtime
        session.ended.set()
        session.protocol.close()
        session.freed_blocks = runtime.cache.close_session(session.session_id, runtime.now_ms())
        self._table.remove(session)
        link, session.link = session.link, None
        if link is not None:
            if last_message is not None:
                link.send(last_message)
            link.close()
        for connection in session.connections:
            connection.close()
        for process in session.processes:
            process.close()
        session.connections.clear()
        log.info("%s has ended, %d blocks freed", session, session.freed_blocks)

    def bye(self, session: Session) -> None:
        """The client is done."""
        self.end(session, ended("OK", "bye"))

    async def kill(self, session_id: int) -> int:
        """SIGKILL all processes of a session; returns the blocks freed once they are gone.

        Raises NotFound, FailedPrecondition, Unavailable if they are not gone in KILL_TIMEOUT_S.
        """
        session = self._table.find(session_id)
        log.warning("killing %s", session)
        for process in list(session.processes):
            process.kill()
        try:
            await asyncio.wait_for(session.ended.wait(), KILL_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(
                f"session {session_id} was sent SIGKILL and is not gone after"
                f" {KILL_TIMEOUT_S:.0f} s; it keeps its blocks until it is"
            ) from None
        return session.freed_blocks

    def close(self) -> None:
        """The server stops: every stream is told so and closed."""
        if self._alarm_timer is not None:
            self._alarm_timer.cancel()
            self._alarm_timer = None
        for session in self._table:
            self.end(session, ended(Unavailable.code, "the server has stopped"))

    # ---- alarms -----------------------------------------------------------------------------

    def _check_alarms(self) -> None:
        loop = self._runtime.loop
        self._alarm_timer = loop.call_later(self._alarm_check_s, self._check_alarms)
        now_ms = self._runtime.now_ms()
        for session in self._table:
            silent_ms = now_ms - session.heard_ms
            if silent_ms < self._alarm_ms:
                if session.alarm:
                    session.alarm = False
                    log.info("%s speaks again", session)
            elif not session.alarm:
                use = self._runtime.cache.session_use(session.session_id)
                if use.num_leases or use.reserved_blocks:
                    session.alarm = True
                    log.warning(
                        "%s is silent for %d ms and holds %d leases, %d private and %d reserved"
                        " blocks: if it hangs, `radixkv sessions kill %d` frees them",
                        session, silent_ms, use.num_leases, use.private_blocks,
                        use.reserved_blocks, session.session_id,
                    )  # fmt: skip
