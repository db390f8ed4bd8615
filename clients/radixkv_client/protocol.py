"""One session's Steps and Replies, without any I/O: both clients and both transports drive this.

Theory of operation
    Knows: Steps that the server may not have got (as bytes, to send again), operations without an
    answer, and the highest consecutive reply number seen.
    Must not know: sockets, threads, clocks, what an operation means to a lease.

    submit() queues operations; outgoing() packs what is queued into as few Steps as possible while
    fewer than `max_unacknowledged_steps` are under way. receive() takes what the server sent, in
    order: each Reply is interpreted and answered at once, so a lease's state is what the server
    says it is in the order in which the server says it.
    After a cut: resume(last_step) gives the Steps to send again. Replies the server repeats are
    known by their number. fail() ends the session for good: a new incarnation of the server, or a
    session that the server ended; every operation without an answer fails, and so do later ones.

    Invariants: reply numbers are consecutive; an operation is answered exactly once; Steps kept
    have consecutive numbers and end at the newest one sent.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.v1 import session_pb2 as pb
from radixkv.wire import limits
from radixkv_client.errors import Exhausted, Internal, InvalidArgument, RadixKVError, error_named

MAX_QUEUED_OPS = 65_536
_STEP_BYTES = 64  # a Step's size beside its operations
_OP_BYTES = 24  # an operation's size beside its body


def default_limits() -> pb.Limits:
    """What a client assumes where the server announced nothing."""
    return pb.Limits(
        max_message_bytes=limits.MAX_MESSAGE_BYTES,
        max_tokens=limits.MAX_TOKENS,
        max_ops_per_step=limits.MAX_OPS_PER_STEP,
        max_unacknowledged_steps=limits.MAX_UNACKNOWLEDGED_STEPS,
        max_waiting_acquires=limits.MAX_WAITING_ACQUIRES,
        max_leases=limits.MAX_LEASES,
    )


def _nothing(error: RadixKVError) -> None:
    """What most operations do about a refusal."""


@dataclass(slots=True)
class Request:
    """One operation to send; not frozen, since that triples the cost of making one.

    `on_reply` turns an OK Reply into the caller's result; `on_error` puts the caller's state right
    if the operation was refused or lost.
    """

    op: pb.Op
    on_reply: Callable[[pb.Reply], Any]
    on_error: Callable[[RadixKVError], None] = _nothing


class Answer:
    """What became of one operation: nothing yet, a value, or an error."""

    __slots__ = ("_callbacks", "done", "error", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: RadixKVError | None = None
        self._callbacks: tuple[Callable[[Answer], None], ...] = ()

    def result(self) -> Any:
        """The value; raises the error. Only once `done`."""
        assert self.done, "not answered yet"
        if self.error is not None:
            raise self.error
        return self.value

    def on_done(self, callback: Callable[["Answer"], None]) -> None:
        """Call back once, when answered; at once if it is."""
        if self.done:
            callback(self)
        else:
            self._callbacks += (callback,)

    def settle(self, value: Any, error: RadixKVError | None = None) -> None:
        """Give the answer, once."""
        assert not self.done, "answered twice"
        self.done, self.value, self.error = True, value, error
        callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            callback(self)


class Session:
    """The Steps and Replies of one session. Not thread-safe; the client holds a lock."""

    def __init__(self, limits: pb.Limits, on_pressure: Callable[[int], None]) -> None:
        self.limits = limits
        self.failure: RadixKVError | None = None
        self.replies_seen = 0
        self._on_pressure = on_pressure
        self._max_step_bytes: int = limits.max_message_bytes - _STEP_BYTES
        self._max_ops: int = limits.max_ops_per_step
        self._max_steps: int = limits.max_unacknowledged_steps
        self._queue: deque[tuple[pb.Op, int]] = deque()
        self._unanswered: dict[int, tuple[Request, Answer]] = {}
        self._kept: deque[tuple[int, bytes]] = deque()
        self._last_step = 0
        self._last_op_id = 0

    @property
    def num_unanswered(self) -> int:
        """Operations submitted that have no answer yet."""
        return len(self._unanswered)

    def submit(self, requests: Sequence[Request]) -> list[Answer]:
        """Queue operations in order, all or none; send what outgoing() then gives.

        Raises the session's failure, InvalidArgument for an operation above the message limit,
        Exhausted above MAX_QUEUED_OPS unanswered ones.
        """
        if self.failure is not None:
            raise self.failure
        if len(self._unanswered) + len(requests) > MAX_QUEUED_OPS:
            raise Exhausted(
                f"{len(self._unanswered)} operations unanswered, at most {MAX_QUEUED_OPS} are kept"
            )
        sizes = [request.op.ByteSize() + _OP_BYTES for request in requests]
        if max(sizes, default=0) > self._max_step_bytes:
            raise InvalidArgument(
                f"an operation of {max(sizes)} bytes, at most {self._max_step_bytes} fit "
                f"max_message_bytes"
            )
        answers = []
        for request, size in zip(requests, sizes, strict=True):
            self._last_op_id += 1
            request.op.op_id = self._last_op_id
            answer = Answer()
            self._unanswered[self._last_op_id] = (request, answer)
            self._queue.append((request.op, size))
            answers.append(answer)
        return answers

    @property
    def has_outgoing(self) -> bool:
        """Whether outgoing() would give something."""
        return bool(self._queue) and len(self._kept) < self._max_steps

    @property
    def window_is_full(self) -> bool:
        """Whether operations are queued that only an acknowledgement lets out."""
        return bool(self._queue) and not self.has_outgoing

    def outgoing(self) -> list[bytes]:
        """Serialized ClientMessages to send now, in order; nothing while the window is full."""
        steps = []
        while self.has_outgoing:
            steps.append(self._pack_step())
        return steps

    def _pack_step(self) -> bytes:
        message = pb.ClientMessage()
        step = message.step
        self._last_step += 1
        step.number = self._last_step
        step.replies_seen = self.replies_seen
        queue, num_ops, num_bytes = self._queue, 0, 0
        append = step.ops.append
        while queue and num_ops < self._max_ops:
            op, size = queue[0]
            num_bytes += size
            if num_bytes > self._max_step_bytes:
                break
            append(op)
            queue.popleft()
            num_ops += 1
        data: bytes = message.SerializeToString()
        self._kept.append((self._last_step, data))
        return data

    def resume(self, last_step: int) -> list[bytes]:
        """The Steps that the server has not got, to send again in order."""
        self._acknowledge(last_step)
        return [data for _, data in self._kept]

    def receive(self, message: pb.ServerMessage) -> None:
        """Take one message of the server. Raises Internal if it breaks the protocol."""
        kind = message.WhichOneof("message")
        if kind == "replies":
            for reply in message.replies.replies:
                self._receive_reply(reply)
            self._acknowledge(message.replies.last_step)
        elif kind == "pressure":
            self._on_pressure(message.pressure.num_blocks)
        elif kind == "ended":
            status = message.ended.status
            self.fail(error_named(pb.Code.Name(status.code), f"session ended: {status.message}"))
        elif kind != "pools":
            raise Internal(f"the server sent {kind} within a session")

    def _receive_reply(self, reply: pb.Reply) -> None:
        number = reply.number
        if number != self.replies_seen + 1:
            if number <= self.replies_seen:
                return  # sent again after a resume
            raise Internal(f"reply {number} follows reply {self.replies_seen}")
        self.replies_seen = number
        entry = self._unanswered.pop(reply.op_id, None)
        if entry is None:
            raise Internal(f"reply to operation {reply.op_id}, which is not waiting for one")
        request, answer = entry
        if reply.HasField("status") and reply.status.code != pb.OK:
            error = error_named(pb.Code.Name(reply.status.code), reply.status.message)
            request.on_error(error)
            answer.settle(None, error)
        else:
            answer.settle(request.on_reply(reply))

    def _acknowledge(self, last_step: int) -> None:
        if last_step > self._last_step:
            raise Internal(f"the server got Step {last_step} of {self._last_step}")
        while self._kept and self._kept[0][0] <= last_step:
            self._kept.popleft()

    def fail(self, error: RadixKVError) -> None:
        """End the session: everything unanswered, and everything submitted later, fails so."""
        if self.failure is not None:
            return
        self.failure = error
        unanswered: Iterable[tuple[Request, Answer]] = list(self._unanswered.values())
        self._unanswered.clear()
        self._queue.clear()
        self._kept.clear()
        for request, answer in unanswered:
            request.on_error(error)
            answer.settle(None, error)
