"""The session protocol, without I/O: Steps in, replies out, both exactly once.

Theory of operation
    Knows: the highest Step received, which replies were produced and which of them the client has
    seen, and which leases are owed an answer. Must not know: sockets, transports, clocks.

    Steps arrive with consecutive numbers. One that was received before is a repetition after a
    cut and is ignored; a gap is the client's error. Operations start in order. Each gets one
    reply, numbered in the order in which replies become ready, and kept (as the bytes that were
    sent) until the client has acknowledged it.

    A lease is *blocked* from an operation that cannot be answered at once (a waiting Acquire, an
    Acquire or Fork whose copies run) until that is answered. Operations on a blocked lease are
    held, in order, and started then; behind a failed Acquire they fail with its status. Release
    of a waiting Acquire is not held: it cancels. A Fork blocks its children like its parent.

    A Step is acknowledged when the client has seen every reply produced before that Step ended;
    at most MAX_UNACKNOWLEDGED_STEPS may be unacknowledged, so a client that reads nothing stops.

Invariants: reply numbers are consecutive from 1; every operation of a received Step is answered,
held, or behind exactly one `Deferred`; `_blocked` maps each lease of a Deferred to it; what is
held and kept stays bounded.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from radixkv.core.errors import AlreadyExists, CacheError, Exhausted, InvalidArgument
from radixkv.core.results import Acquired, CopyOp, Forked, Waiting
from radixkv.server.errors import ProtocolError, Unavailable, status
from radixkv.server.operations import Operations, fill_reply
from radixkv.server.replies import ReplyLog
from radixkv.v1 import session_pb2 as pb
from radixkv.wire import limits

log = logging.getLogger(__name__)

MAX_HELD_BYTES = 64 << 20  # prompts of waiting Acquires and operations behind them, one session
MAX_HELD_OPS = 16_384  # of one session
MAX_KEPT_BYTES = 64 << 20  # of replies not yet acknowledged; above it, nothing in _GROWING starts
_GROWING = frozenset({"acquire", "extend", "fork", "refill"})  # replies may be large
_OP_BYTES = 64  # an operation's share of memory beside its payload


@dataclass(eq=False, slots=True)
class Deferred:
    """An operation that is answered later, the leases it blocks, and what is held behind it.

    `result` is None while an Acquire waits. `num_copies` still run; `ok` if none has failed.
    """

    op_id: int
    kind: str
    lease_ids: tuple[int, ...]
    num_bytes: int
    result: Acquired | Forked | None = None
    num_copies: int = 0
    ok: bool = True
    cancelled: bool = False
    held: deque[pb.Op] = field(default_factory=deque)


CopyStarter = Callable[[Deferred, tuple[CopyOp, ...]], None]


class SessionProtocol:
    """One session's Steps and replies. `start_copies` begins copies and returns at once;
    `copy_done` must be called later for each."""

    def __init__(self, operations: Operations, start_copies: CopyStarter) -> None:
        self.last_step = 0
        self.closed = False
        self._operations = operations
        self._run = operations.run
        self._start_copies = start_copies
        self._blocked: dict[int, Deferred] = {}
        self._num_held_ops = 0
        self._num_held_bytes = 0
        self._replies = ReplyLog()
        self._step_marks: deque[int] = deque()  # replies produced at each unacknowledged Step's end

    # ---- in ---------------------------------------------------------------------------------

    def receive_step(self, step: pb.Step) -> None:
        """Carry out a Step, once. Raises ProtocolError; the session cannot go on after that."""
        if self.closed:
            return
        if step.replies_seen > self._replies.acknowledged:
            self._acknowledge(step.replies_seen)
        number = step.number
        if number != self.last_step + 1:
            if 0 < number <= self.last_step:
                return  # sent again after a cut, and received before it
            raise ProtocolError(f"Step {number} follows Step {self.last_step}")
        ops = step.ops
        if len(ops) > limits.MAX_OPS_PER_STEP:
            raise ProtocolError(
                f"Step {number} has {len(ops)} operations, at most {limits.MAX_OPS_PER_STEP}"
                " are allowed"
            )
        if len(self._step_marks) >= limits.MAX_UNACKNOWLEDGED_STEPS:
            raise ProtocolError(
                f"more than {limits.MAX_UNACKNOWLEDGED_STEPS} Steps are unacknowledged"
            )
        for op in ops:
            self._start(op)
        self.last_step = number
        if self._replies.num_ready > self._replies.acknowledged:
            self._step_marks.append(self._replies.num_ready)

    def acquire_answered(self, lease_id: int, result: Acquired | Exception) -> None:
        """A waiting Acquire got its answer from the core."""
        if self.closed:
            return
        deferred = self._blocked[lease_id]
        assert deferred.result is None, "answered twice"
        if isinstance(result, Acquired):
            try:
                self._operations.back_acquired(result)
            except Exhausted as error:
                self._fail_deferred(deferred, error)
                return
            deferred.result = result
            if result.copies:
                self._copy(deferred, result.copies)
            else:
                self._finish(deferred)
            return
        assert isinstance(result, CacheError)
        if not self._operations.accepting and not deferred.cancelled:
            result = Unavailable("the server is draining and gives no new leases")
        self._fail_deferred(deferred, result)

    def copy_done(self, deferred: Deferred, ok: bool) -> None:
        """One of the copies begun for `deferred` has ended, and the core knows."""
        deferred.num_copies -= 1
        deferred.ok = deferred.ok and ok
        if deferred.num_copies or self.closed:
            return
        if deferred.ok:
            self._finish(deferred)
        elif isinstance(deferred.result, Acquired):
            deferred.result = deferred.result._replace(tail_tokens=0)
            self._finish(deferred)
        else:
            self._operations.abort(deferred.lease_ids[1:])
            self._unblock(deferred)
            self._answer_error(deferred.op_id, "INTERNAL", "the copy of the tail failed")
            self._start_held(deferred)

    def cancel_waiting(self) -> None:
        """Cancel every waiting Acquire; the core's events answer them."""
        for lease_id, deferred in list(self._blocked.items()):
            if deferred.result is None and not deferred.cancelled:
                self._operations.abort((lease_id,))

    def close(self) -> None:
        """The session is over: nothing is answered any more, everything kept is dropped."""
        self.closed = True
        self._blocked.clear()
        self._replies.clear()

    # ---- out --------------------------------------------------------------------------------

    def take_output(self) -> list[bytes]:
        """Serialized ServerMessages that became ready; send them, or leave them to `resume`."""
        return self._replies.take(self.last_step)

    def check_resume(self, replies_seen: int) -> None:
        """Raise InvalidArgument unless the replies after `replies_seen` are still there."""
        self._replies.check_resume(replies_seen)

    def resume(self, replies_seen: int) -> list[bytes]:
        """The messages to send again after a cut: every reply after `replies_seen`, once."""
        messages = self._replies.resume(replies_seen, self.last_step)
        self._acknowledge(replies_seen)
        return messages

    def _acknowledge(self, number: int) -> None:
        self._replies.acknowledge(number)
        marks = self._step_marks
        while marks and marks[0] <= number:
            marks.popleft()

    # ---- one operation ----------------------------------------------------------------------

    def _start(self, op: pb.Op) -> None:
        """Carry out, hold or refuse one operation."""
        kind = op.WhichOneof("op")
        try:
            if kind is None:
                raise InvalidArgument("an operation of a kind that this server does not know")
            body = getattr(op, kind)
            if self._blocked and self._hold(op, kind, body):
                return
            if kind in _GROWING:
                self._check_room(kind, body)
            result = self._run[kind](body)
        except CacheError as error:
            self._answer_error(op.op_id, error.code, str(error))
            return
        except Exception:
            log.exception("operation %s failed", kind)
            self._answer_error(op.op_id, "INTERNAL", "a fault in the server; its log has more")
            return
        if type(result) is Waiting:
            self._defer(Deferred(op.op_id, kind, (body.lease_id,), len(body.tokens) + _OP_BYTES))
        elif kind in ("acquire", "fork") and result.copies:
            lease_ids = (body.lease_id, *body.child_ids) if kind == "fork" else (body.lease_id,)
            deferred = Deferred(op.op_id, kind, lease_ids, _OP_BYTES, result)
            self._defer(deferred)
            self._copy(deferred, result.copies)
        else:
            self._answer(op.op_id, kind, result)

    def _check_room(self, kind: str, body: Any) -> None:
        if self._replies.num_kept_bytes > MAX_KEPT_BYTES:
            raise Exhausted(
                f"{self._replies.num_kept_bytes} bytes of replies are unacknowledged, at most"
                f" {MAX_KEPT_BYTES} are kept"
            )
        if kind == "acquire":  # any may have to wait for blocks from below
            self._check_held(len(body.tokens))

    def _check_held(self, num_bytes: int) -> None:
        if self._num_held_ops >= MAX_HELD_OPS or self._num_held_bytes + num_bytes > MAX_HELD_BYTES:
            raise Exhausted(
                f"{self._num_held_ops} operations with {self._num_held_bytes} bytes wait in this"
                f" session, at most {MAX_HELD_OPS} with {MAX_HELD_BYTES} may"
            )

    def _hold(self, op: pb.Op, kind: str, body: Any) -> bool:
        """Whether `op` is held behind a blocked lease. Raises Exhausted, AlreadyExists."""
        if kind in ("refill", "give_back"):
            return False
        deferred = self._blocked.get(body.lease_id)
        if deferred is None:
            if kind == "fork" and not self._blocked.keys().isdisjoint(body.child_ids):
                raise AlreadyExists("a child's id is that of a lease which is not answered yet")
            return False
        if deferred.result is None and not deferred.cancelled:
            if kind == "acquire":
                return False  # the core knows that the id is in use
            if kind == "release" and self._operations.is_waiting(body.lease_id):
                deferred.cancelled = True
                return False
        num_bytes = op.ByteSize() + _OP_BYTES
        self._check_held(num_bytes)
        # A copy: the original would keep its whole Step's memory.
        held = pb.Op()
        held.CopyFrom(op)
        deferred.held.append(held)
        deferred.num_bytes += num_bytes
        self._num_held_ops += 1
        self._num_held_bytes += num_bytes
        return True

    def _defer(self, deferred: Deferred) -> None:
        self._num_held_bytes += deferred.num_bytes
        for lease_id in deferred.lease_ids:
            self._blocked[lease_id] = deferred

    def _copy(self, deferred: Deferred, copies: tuple[CopyOp, ...]) -> None:
        deferred.num_copies = len(copies)
        self._start_copies(deferred, copies)

    def _unblock(self, deferred: Deferred) -> None:
        for lease_id in deferred.lease_ids:
            del self._blocked[lease_id]
        self._num_held_ops -= len(deferred.held)
        self._num_held_bytes -= deferred.num_bytes

    def _finish(self, deferred: Deferred) -> None:
        self._unblock(deferred)
        self._answer(deferred.op_id, deferred.kind, deferred.result)
        self._start_held(deferred)

    def _fail_deferred(self, deferred: Deferred, error: CacheError) -> None:
        """Answer a waiting Acquire, and those held behind it up to the next Acquire."""
        self._unblock(deferred)
        self._answer_error(deferred.op_id, error.code, str(error))
        while deferred.held and deferred.held[0].WhichOneof("op") != "acquire":
            op = deferred.held.popleft()
            self._answer_error(op.op_id, error.code, f"its Acquire failed: {error}")
        self._start_held(deferred)

    def _start_held(self, deferred: Deferred) -> None:
        while deferred.held:
            self._start(deferred.held.popleft())

    def _answer(self, op_id: int, kind: str, result: Any) -> None:
        num_bytes = fill_reply(self._replies.next(op_id), kind, result)
        if num_bytes:
            self._replies.count(num_bytes, self.last_step)

    def _answer_error(self, op_id: int, code: str, message: str) -> None:
        self._replies.next(op_id).status.CopyFrom(status(code, message))
