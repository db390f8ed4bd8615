"""A SessionProtocol over a real Cache, without sockets, loop or threads: time is a number, copies
run when the test says so, and every message can be lost."""

from collections.abc import Iterable

from radixkv.core.cache import Cache
from radixkv.core.results import AcquireAnswered, CacheConfig, CopyOp
from radixkv.server.namespaces import SessionNamespaces
from radixkv.server.operations import Operations
from radixkv.server.session import Deferred, SessionProtocol
from radixkv.v1 import session_pb2 as pb
from tests.naive_model import int32


class NoBacking:
    """Blocks always have memory."""

    complete = True


class SessionRig:
    """One cache; `open` gives sessions, `settle` ends a batch as the runtime does."""

    def __init__(self, num_blocks: int = 32, block_size: int = 4, **config: int) -> None:
        self.cache = Cache(CacheConfig(num_blocks=num_blocks, block_size=block_size, **config))
        self.now_ms = 0
        self.peers: dict[int, Peer] = {}
        self.copies: list[tuple[Peer, Deferred, CopyOp]] = []
        self.backing = NoBacking()

    def open(self) -> "Peer":
        """A new session."""
        peer = Peer(self, len(self.peers) + 1)
        self.peers[peer.session_id] = peer
        return peer

    def settle(self) -> None:
        """Route what the cache has to say, then collect every session's output."""
        while events := self.cache.poll(self.now_ms):
            for event in events:
                if isinstance(event, AcquireAnswered):
                    protocol = self.peers[event.session_id].protocol
                    protocol.acquire_answered(event.lease_id, event.result)
        self.cache.check()
        for peer in self.peers.values():
            peer.wire += peer.protocol.take_output()

    def finish_copies(self, ok: bool = True) -> None:
        """All copies end."""
        copies, self.copies = self.copies, []
        for peer, deferred, copy in copies:
            self.cache.copy_done(copy.copy_id, ok)
            peer.protocol.copy_done(deferred, ok)
        self.settle()


class Peer:
    """A client that checks what it gets: replies come once, in order, one for each operation."""

    def __init__(self, rig: SessionRig, session_id: int) -> None:
        self.rig = rig
        self.session_id = session_id
        rig.cache.open_session(session_id)
        namespaces = SessionNamespaces("model", b"spec", frozenset())
        self.operations = Operations(
            rig.cache, session_id, namespaces, rig.backing, lambda: rig.now_ms
        )
        self.protocol = SessionProtocol(self.operations, self._start_copies)
        self.wire: list[bytes] = []  # sent by the server, not read yet
        self.steps: list[pb.Step] = []
        self.replies: list[pb.Reply] = []
        self.num_ops = 0
        self.told_step = 0

    def _start_copies(self, deferred: Deferred, copies: tuple[CopyOp, ...]) -> None:
        self.rig.copies += [(self, deferred, copy) for copy in copies]

    def make_step(self, *ops: pb.Op) -> pb.Step:
        """The next Step; not sent yet."""
        step = pb.Step(number=len(self.steps) + 1, replies_seen=len(self.replies))
        for op in ops:
            self.num_ops += 1
            op.op_id = self.num_ops
            step.ops.append(op)
        self.steps.append(step)
        return step

    def step(self, *ops: pb.Op) -> list[pb.Reply]:
        """Send a Step, end the batch, read; the replies that came by then."""
        self.protocol.receive_step(self.make_step(*ops))
        self.rig.settle()
        return self.read()

    def read(self) -> list[pb.Reply]:
        """Read everything on the wire."""
        new = []
        wire, self.wire = self.wire, []
        for data in wire:
            replies = pb.ServerMessage.FromString(data).replies
            self.told_step = max(self.told_step, replies.last_step)
            for reply in replies.replies:
                assert reply.number == len(self.replies) + 1, "every reply once, in order"
                assert reply.op_id not in {seen.op_id for seen in self.replies}
                self.replies.append(reply)
                new.append(reply)
        return new

    def cut(self) -> None:
        """The connection is cut with everything on it, and resumed."""
        self.wire = []
        self.protocol.check_resume(len(self.replies))
        last_step = self.protocol.last_step
        self.wire = self.protocol.resume(len(self.replies))
        self.read()
        for step in self.steps[last_step:]:
            self.protocol.receive_step(step)
        self.rig.settle()


def acquire(lease_id: int, tokens: Iterable[int], **fields: object) -> pb.Op:
    """An Acquire."""
    return pb.Op(acquire=pb.Acquire(lease_id=lease_id, tokens=int32(tokens), **fields))


def commit(lease_id: int, upto: int, tokens: Iterable[int] = (), **fields: object) -> pb.Op:
    """A Commit."""
    body = pb.Commit(lease_id=lease_id, upto=upto, tokens=int32(tokens), **fields)
    return pb.Op(commit=body)


def release(lease_id: int, **fields: object) -> pb.Op:
    """A Release."""
    return pb.Op(release=pb.Release(lease_id=lease_id, **fields))


def fork(lease_id: int, child_ids: Iterable[int], upto: int, tail_block: int = 0) -> pb.Op:
    """A Fork."""
    body = pb.Fork(lease_id=lease_id, child_ids=child_ids, upto=upto, tail_block=tail_block)
    return pb.Op(fork=body)


def extend(lease_id: int, num_blocks: int) -> pb.Op:
    """An Extend."""
    return pb.Op(extend=pb.Extend(lease_id=lease_id, num_blocks=num_blocks))


def refill(num_blocks: int) -> pb.Op:
    """A Refill."""
    return pb.Op(refill=pb.Refill(num_blocks=num_blocks))


def code(reply: pb.Reply) -> str:
    """Name of the reply's status."""
    return pb.Code.Name(reply.status.code)
