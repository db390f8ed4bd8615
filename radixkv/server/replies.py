"""A session's replies: numbered as they become ready, kept as sent until they are acknowledged."""

from collections import deque

from radixkv.core.errors import InvalidArgument
from radixkv.server.errors import ProtocolError
from radixkv.v1 import session_pb2 as pb

MAX_BATCH_BYTES = 4 << 20  # of payload in one message before another is begun


class ReplyLog:
    """Replies 1, 2, 3 … in batches; see `session` for what acknowledging means.

    Invariants: 0 <= acknowledged <= num_sent <= num_ready; the kept messages hold exactly the
    replies (acknowledged, num_sent], but for replies that share a message with a later one.
    """

    __slots__ = (
        "_batch", "_kept", "_made", "_num_batch_bytes", "_told_step", "acknowledged",
        "num_kept_bytes", "num_ready", "num_sent",
    )  # fmt: skip

    def __init__(self) -> None:
        self.acknowledged = 0  # highest consecutive reply number the client has seen
        self.num_sent = 0  # replies in messages already made
        self.num_ready = 0  # replies begun
        self.num_kept_bytes = 0
        self._kept: deque[tuple[int, int, bytes]] = deque()  # replies before, last reply, message
        self._made: list[bytes] = []
        self._batch = pb.ServerMessage()
        self._num_batch_bytes = 0
        self._told_step = 0

    def next(self, op_id: int) -> pb.Reply:
        """A new reply for the caller to fill in before it calls anything else here."""
        reply = self._batch.replies.replies.add()
        self.num_ready += 1
        reply.number = self.num_ready
        reply.op_id = op_id
        return reply

    def count(self, num_bytes: int, last_step: int) -> None:
        """The reply just filled in carries so many bytes; a batch that is large enough is closed.

        `last_step` is the last Step that was carried out wholly.
        """
        self._num_batch_bytes += num_bytes
        if self._num_batch_bytes > MAX_BATCH_BYTES:
            self._seal(last_step)

    def take(self, last_step: int) -> list[bytes]:
        """Messages that have not been taken yet; also tells `last_step` if that is all there is."""
        if self.num_ready > self.num_sent:
            self._seal(last_step)
        elif last_step > self._told_step:
            self._told_step = last_step
            self._made.append(pb.ServerMessage(replies=pb.Replies(last_step=last_step))
                              .SerializeToString())  # fmt: skip
        made, self._made = self._made, []
        return made

    def _seal(self, last_step: int) -> None:
        self._batch.replies.last_step = self._told_step = last_step
        data = self._batch.SerializeToString()
        self._kept.append((self.num_sent, self.num_ready, data))
        self.num_sent = self.num_ready
        self.num_kept_bytes += len(data)
        self._made.append(data)
        self._batch = pb.ServerMessage()
        self._num_batch_bytes = 0

    def acknowledge(self, number: int) -> None:
        """The client has seen all replies up to `number`. Raises ProtocolError if not sent yet."""
        if number > self.num_sent:
            raise ProtocolError(
                f"replies_seen is {number}, only {self.num_sent} replies have been sent"
            )
        self.acknowledged = number
        kept = self._kept
        while kept and kept[0][1] <= number:
            self.num_kept_bytes -= len(kept.popleft()[2])

    def check_resume(self, replies_seen: int) -> None:
        """Raise InvalidArgument unless every reply after `replies_seen` is still here."""
        if not self.acknowledged <= replies_seen <= self.num_sent:
            raise InvalidArgument(
                f"replies_seen is {replies_seen}; a resume is possible from {self.acknowledged} to"
                f" {self.num_sent}"
            )

    def resume(self, replies_seen: int, last_step: int) -> list[bytes]:
        """Messages with every reply after `replies_seen`, once; nothing is left to `take`."""
        self.take(last_step)
        self.acknowledge(replies_seen)
        return [
            data if before >= replies_seen else _behind(data, replies_seen)
            for before, _, data in self._kept
        ]

    def clear(self) -> None:
        """Forget everything that is kept."""
        self._kept.clear()
        self._made.clear()
        self._batch = pb.ServerMessage()
        self.num_kept_bytes = self._num_batch_bytes = 0
        self.num_sent = self.num_ready


def _behind(data: bytes, number: int) -> bytes:
    """The message `data` without its replies up to `number`."""
    message = pb.ServerMessage.FromString(data)
    num_seen = sum(reply.number <= number for reply in message.replies.replies)
    del message.replies.replies[:num_seen]
    trimmed: bytes = message.SerializeToString()
    return trimmed
