"""Workers that stop at named points of a session's life, to be killed or stopped there.

A script is a generator over a `Worker`: it yields the name of each point it has come to, and goes
on when it is told to. What it reads back through its mapping must be right, also after a pause of
any length. POINTS lists all of them.
"""

import mmap
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from radixkv.v1 import session_pb2 as pb
from tests.fault_processes import Parent
from tests.fingerprints import BLOCK_SIZE, KV_SPEC, SequenceKV
from tests.naive_model import ints
from tests.session_rig import acquire, code, commit, extend, fork, refill, release
from tests.wire_peer import LocalStream, WirePeer

NAMESPACE = b"model"
WAIT_MS = 20_000
LEADER_TOKENS = 16


class Worker:
    """One session spoken by hand, with the pool mapped and KV fingerprinted.

    `base` is the first of the tokens that only this worker uses.
    """

    def __init__(self, socket_dir: Path, transport: str, base: int) -> None:
        self.socket_dir = socket_dir
        self.transport = transport
        self.base = base
        self.peer: WirePeer
        self.pool: np.ndarray

    def tokens(self, count: int, at: int = 0) -> list[int]:
        """Tokens that nobody else uses."""
        return list(range(self.base + at, self.base + at + count))

    def open(self) -> "Worker":
        """From nothing to a mapped pool."""
        self.peer = WirePeer(self.socket_dir, self.transport, KV_SPEC.to_proto())
        self.peer.open()
        self.map()
        return self

    def map(self) -> None:
        """Map the pool whose descriptor has come."""
        memory = mmap.mmap(self.peer.attach.descriptors[0], 0)
        self.pool = np.frombuffer(memory, np.uint8).reshape(-1, KV_SPEC.block_bytes)

    def kv(self, tokens: Iterable[int]) -> SequenceKV:
        """A sequence's KV in the pool."""
        return SequenceKV(self.pool, NAMESPACE, list(tokens))

    def send(self, *ops: pb.Op) -> range:
        """Send a Step; the ids to `get` its answers by."""
        first = self.peer.num_ops + 1
        self.peer.send(*ops)
        return range(first, self.peer.num_ops + 1)

    def get(self, op_ids: Iterable[int]) -> list[pb.Reply]:
        """Answers, all of which must be OK."""
        replies = self.peer.wait_for(op_ids, timeout=WAIT_MS / 1000)
        bad = [reply for reply in replies if code(reply) != "OK"]
        assert not bad, bad
        return replies

    def do(self, *ops: pb.Op) -> list[pb.Reply]:
        """Send a Step and get its answers."""
        return self.get(self.send(*ops))

    def compute(self, kv: SequenceKV, reply: pb.Reply) -> list[int]:
        """Check what an Acquire found and write the rest; returns the table."""
        table = ints(reply.acquire.block_table)
        kv.check(table, 0, reply.acquire.cached_tokens)
        kv.write(table, reply.acquire.cached_tokens, len(kv.tokens))
        return table

    def publish(self, lease_id: int, tokens: list[int]) -> tuple[SequenceKV, list[int]]:
        """Acquire, compute and commit; the lease stays."""
        kv = self.kv(tokens)
        table = self.compute(kv, self.do(acquire(lease_id, tokens, capacity_wait_ms=WAIT_MS))[0])
        self.do(commit(lease_id, len(tokens)))
        return kv, table

    def bye(self) -> None:
        """End the session."""
        self.peer.bye()


Script = Callable[[Worker], Iterator[str]]


def handshake(w: Worker) -> Iterator[str]:
    """From nothing to a mapped pool, one message at a time."""
    stream = LocalStream(w.socket_dir / "attach.sock")
    yield "connected"
    stream.close()
    w.peer = WirePeer(w.socket_dir, w.transport, KV_SPEC.to_proto())
    yield "attached"
    hello = pb.Hello(
        session_token=w.peer.token, protocol_version=1, client="victim",
        model_fingerprint="model", kv_spec=KV_SPEC.to_proto(),
    )  # fmt: skip
    w.peer.stream.send(pb.ClientMessage(hello=hello).SerializeToString())
    yield "hello sent"
    assert w.peer.stream.receive().hello.status.code == pb.OK
    yield "hello answered"
    assert w.peer.attach.receive().pools.pools
    w.map()
    yield "mapped"
    w.publish(1, w.tokens(9))


def half_frames(w: Worker) -> Iterator[str]:
    """Half of a Hello and half of a Step; over gRPC half of what opens a connection."""
    if w.transport == "grpc":
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(str(w.socket_dir / "grpc.sock"))
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM")
        yield "half a hello"
        raw.close()
        w.open()
        yield "half a step"
        return
    stream = LocalStream(w.socket_dir / "attach.sock")
    stream.send_raw(b"\x40\0\0\0\x0a\x3e")
    yield "half a hello"
    stream.close()
    w.open()
    kv, table = w.publish(1, w.tokens(9))
    data = w.peer.make_step(release(1))
    frame = len(data).to_bytes(4, "little") + data
    w.peer.stream.send_raw(frame[: len(frame) // 2])
    yield "half a step"
    kv.check(table, 0, 9)
    w.peer.stream.send_raw(frame[len(frame) // 2 :])
    w.get([w.peer.num_ops])


def cold(w: Worker) -> Iterator[str]:
    """A miss: Acquire, prefill, Commit, Release."""
    kv = w.open().kv(w.tokens(14))
    sent = w.send(acquire(1, kv.tokens, extra_blocks=2, capacity_wait_ms=WAIT_MS))
    yield "acquire sent"
    (reply,) = w.get(sent)
    yield "acquired"
    table = ints(reply.acquire.block_table)
    kv.write(table, 0, 6)
    yield "half computed"
    kv.check(table, 0, 6)
    kv.write(table, 6, 14)
    sent = w.send(commit(1, 14))
    yield "commit sent"
    w.get(sent)
    yield "committed"
    kv.check(table, 0, 14)
    sent = w.send(release(1))
    yield "release sent"
    w.get(sent)


def hit(w: Worker) -> Iterator[str]:
    """A hit on what was published."""
    tokens = w.tokens(14)
    kv, _ = w.open().publish(1, tokens)
    w.do(release(1))
    sent = w.send(acquire(2, tokens, capacity_wait_ms=WAIT_MS))
    yield "acquire sent"
    (reply,) = w.get(sent)
    yield "acquired"
    kv.check(w.compute(kv, reply), 0, 14)


def tail(w: Worker) -> Iterator[str]:
    """A hit whose partial tail is being copied."""
    tokens = w.tokens(12)
    w.open().publish(1, tokens)
    kv = w.kv([*tokens[:10], 7, 7])
    sent = w.send(acquire(2, kv.tokens, partial_tail=True, capacity_wait_ms=WAIT_MS))
    yield "copy running"
    (reply,) = w.get(sent)
    assert reply.acquire.cached_tokens == 10
    kv.check(w.compute(kv, reply), 0, 12)


def copied(w: Worker) -> Iterator[str]:
    """A fork whose tails are being copied; the parent goes first."""
    tokens = w.tokens(10)
    _, table = w.open().publish(1, tokens)
    sent = w.send(fork(1, [2, 3], 10, table[2]), release(1))
    yield "copies running"
    _check_children(w, tokens, table, w.get(sent)[0])


def branched(w: Worker) -> Iterator[str]:
    """Holding a parent and its children."""
    tokens = w.tokens(10)
    kv, table = w.open().publish(1, tokens)
    (reply,) = w.do(fork(1, [2, 3], 10, table[2]))
    yield "forked"
    _check_children(w, tokens, table, reply)
    kv.check(table, 0, 10)


def _check_children(w: Worker, tokens: list[int], table: list[int], reply: pb.Reply) -> None:
    tails = ints(reply.fork.tail_blocks)
    children = [(w.kv([*tokens, 70 + n]), [*table[:2], block]) for n, block in enumerate(tails)]
    for child, its_table in children:
        child.check(its_table, 0, 10)
        child.write(its_table, 10, 11)
    for child, its_table in children:
        child.check(its_table, 0, 11)


def room(w: Worker) -> Iterator[str]:
    """Waiting for room; the surroundings hold all there is."""
    kv = w.open().kv(w.tokens(20))
    sent = w.send(acquire(1, kv.tokens, capacity_wait_ms=WAIT_MS))
    yield "waiting"
    table = w.compute(kv, w.get(sent)[0])
    kv.check(table, 0, 20)


def follow(w: Worker) -> Iterator[str]:
    """Waiting for the computation of a lease in the surroundings, whose tokens are at -1,000."""
    kv = w.open().kv(w.tokens(LEADER_TOKENS, -1000) + [1])
    sent = w.send(acquire(1, kv.tokens, wait_ms=WAIT_MS))
    yield "waiting"
    (reply,) = w.get(sent)
    assert reply.acquire.cached_tokens == LEADER_TOKENS
    kv.check(w.compute(kv, reply), 0, LEADER_TOKENS + 1)


def lead(w: Worker) -> Iterator[str]:
    """Computing what the surroundings wait for."""
    kv = w.open().kv(w.tokens(LEADER_TOKENS, -1000) + [2])
    (reply,) = w.do(acquire(1, kv.tokens, capacity_wait_ms=WAIT_MS))
    yield "leading"
    table = w.compute(kv, reply)
    w.do(commit(1, len(kv.tokens)))
    kv.check(table, 0, len(kv.tokens))


def grow(w: Worker) -> Iterator[str]:
    """Extend, Trim, Refill, a Commit that names reserve, GiveBack."""
    tokens = w.tokens(10)
    kv, table = w.open().publish(1, tokens)
    sent = w.send(extend(1, 2))
    yield "extend sent"
    table += ints(w.get(sent)[0].extend.blocks)
    yield "extended"
    sent = w.send(pb.Op(trim=pb.Trim(lease_id=1, upto=10)))
    yield "trim sent"
    reserve = ints(w.get(sent)[0].trim.to_reserve)
    assert sorted(table[3:]) == sorted(reserve)
    sent = w.send(refill(3))
    yield "refill sent"
    reserve += ints(w.get(sent)[0].refill.blocks)
    yield "holding reserve"
    table[3:], rest = reserve[:1], reserve[1:]
    kv = w.kv([*tokens, *w.tokens(4, 50)])
    kv.write(table, 10, 14)
    blocks, new = np.int32(table[3:]).tobytes(), kv.tokens[10:]
    sent = w.send(commit(1, 14, new, blocks=blocks))
    yield "commit of reserve sent"
    w.get(sent)
    kv.check(table, 0, 14)
    sent = w.send(pb.Op(give_back=pb.GiveBack(blocks=np.int32(rest).tobytes())))
    yield "give back sent"
    w.get(sent)


def steps(w: Worker) -> Iterator[str]:
    """Between Steps, behind a Step of many operations, with the window full, and saying Bye."""
    first, first_table = w.open().publish(1, w.tokens(9))
    second, second_table = w.publish(2, w.tokens(12, 100))
    yield "between steps"
    second.check(second_table, 0, 12)  # not below: without a lease it may be evicted meanwhile
    ops = [extend(1, 1), fork(2, [3], 12), release(2), acquire(4, w.tokens(9)), release(3)]
    sent = w.send(*ops)
    yield "batch sent"
    w.get(sent)
    first.check(first_table, 0, 9)
    sent = range(w.peer.num_ops + 1, w.peer.num_ops + 9)
    for _ in sent:
        w.send(acquire(5, w.tokens(9)))
    yield "window full"
    first.check(first_table, 0, 9)
    w.peer.wait_for(sent)
    w.peer.stream.send(pb.ClientMessage(bye=pb.Bye()).SerializeToString())
    yield "bye sent"
    assert w.peer.ended().code == pb.OK


SCRIPTS: dict[str, tuple[Script, tuple[str, ...]]] = {
    "handshake": (
        handshake, ("connected", "attached", "hello sent", "hello answered", "mapped"),
    ),
    "half frames": (half_frames, ("half a hello", "half a step")),
    "cold": (
        cold,
        ("acquire sent", "acquired", "half computed", "commit sent", "committed", "release sent"),
    ),
    "hit": (hit, ("acquire sent", "acquired")),
    "tail": (tail, ("copy running",)),
    "fork": (copied, ("copies running",)),
    "branches": (branched, ("forked",)),
    "room": (room, ("waiting",)),
    "follow": (follow, ("waiting",)),
    "lead": (lead, ("leading",)),
    "grow": (
        grow,
        (
            "extend sent", "extended", "trim sent", "refill sent", "holding reserve",
            "commit of reserve sent", "give back sent",
        ),
    ),
    "steps": (steps, ("between steps", "batch sent", "window full", "bye sent")),
}  # fmt: skip
POINTS = [(script, point) for script, (_, points) in SCRIPTS.items() for point in points]
FINISHED = "finished"


def run_script(parent: Parent, socket_dir: str, transport: str, script: str, base: int) -> None:
    """Name each point to the parent and wait there until it says something."""
    worker = Worker(Path(socket_dir), transport, base)
    function, points = SCRIPTS[script]
    seen = []
    for point in function(worker):
        seen.append(point)
        parent.say(point)
        parent.hear()
    assert tuple(seen) == points
    if points[-1] != "bye sent":
        worker.bye()
    parent.say(FINISHED)
    parent.hear()


def hold_blocks(parent: Parent, socket_dir: str, transport: str, base: int) -> None:
    """Lease half the pool, say how many blocks that is, and wait."""
    worker = Worker(Path(socket_dir), transport, base).open()
    num_blocks = (len(worker.pool) - 1) // 2
    worker.do(acquire(1, worker.tokens(BLOCK_SIZE * num_blocks), capacity_wait_ms=WAIT_MS))
    parent.say(num_blocks)
    parent.hear()


assert BLOCK_SIZE == 4, "the scripts count in blocks of four tokens"
