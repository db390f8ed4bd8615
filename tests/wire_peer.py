"""A client of a real server made of raw messages, on either transport, that can be cut anywhere.

Nothing of `radixkv_client` is used, so both ends are tested against the protocol's text.
Every wait is bounded.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import grpc

from radixkv.v1 import session_pb2 as pb
from radixkv.wire.channel import client_options
from radixkv.wire.framing import FrameDecoder

TIMEOUT_S = 10.0
SPEC = pb.KVSpec(
    num_layers=1, num_kv_heads=1, head_dim=1, value_head_dim=1, dtype="int8", block_size=4,
    layout="LKHTD", block_bytes=8,
)  # fmt: skip


class Cut(Exception):
    """The stream has ended; `str` says how."""


class LocalStream:
    """Framed messages on an attach socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(str(path))
        self.descriptors: list[int] = []
        self._decoder = FrameDecoder()
        self._inbox: list[bytes] = []

    def send(self, data: bytes) -> None:
        """One serialized message."""
        self.send_raw(len(data).to_bytes(4, "little") + data)

    def send_raw(self, data: bytes) -> None:
        """Any bytes."""
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise Cut(str(error)) from error

    def receive(self, timeout: float = TIMEOUT_S) -> pb.ServerMessage:
        """The next message; raises Cut, TimeoutError."""
        self.socket.settimeout(timeout)
        while not self._inbox:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 18, 8)
            except ConnectionError as error:
                raise Cut(str(error)) from error
            self.descriptors += descriptors
            if not data:
                raise Cut("end of file")
            self._inbox += self._decoder.feed(data)
        return pb.ServerMessage.FromString(self._inbox.pop(0))

    def close(self) -> None:
        """Close, rudely."""
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


class GrpcStream:
    """The same messages on Cache.Session."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.insecure_channel(target, options=client_options())
        self._outbox: queue.Queue[bytes | None] = queue.Queue()
        self._inbox: queue.Queue[bytes | str] = queue.Queue()
        method = self.channel.stream_stream("/radixkv.v1.Cache/Session")
        self.call = method(iter(self._outbox.get, None))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for data in self.call:
                self._inbox.put(data)
            self._inbox.put("end of stream")
        except grpc.RpcError as error:
            self._inbox.put(f"{error.code().name}: {error.details()}")

    def send(self, data: bytes) -> None:
        """One serialized message."""
        self._outbox.put(data)

    def receive(self, timeout: float = TIMEOUT_S) -> pb.ServerMessage:
        """The next message; raises Cut, TimeoutError."""
        try:
            item = self._inbox.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(item, str):
            self._inbox.put(item)
            raise Cut(item)
        return pb.ServerMessage.FromString(item)

    def close(self) -> None:
        """Cancel, rudely."""
        self.call.cancel()
        self._outbox.put(None)
        self.channel.close()


class WirePeer:
    """One session of this process, or the attempt at one. Checks that replies come once."""

    def __init__(self, socket_dir: Path, transport: str, kv_spec: pb.KVSpec = SPEC) -> None:
        self.socket_dir = socket_dir
        self.kv_spec = kv_spec
        self.transport = transport
        self.attach = LocalStream(socket_dir / "attach.sock")
        self.attached = self.attach.receive().attached
        self.token = self.attached.session_token
        self.stream: LocalStream | GrpcStream = self._open()
        self.steps: list[bytes] = []
        self.replies: dict[int, pb.Reply] = {}
        self.messages: list[pb.ServerMessage] = []  # other than replies
        self.num_ops = 0

    def _open(self) -> LocalStream | GrpcStream:
        return self.attach if self.transport == "local" else GrpcStream(
            f"unix:{self.socket_dir / 'grpc.sock'}"
        )

    def hello(self, **changes: object) -> pb.HelloReply:
        """Say Hello with `changes` to a good one; the reply, whatever it is."""
        fields = {
            "session_token": self.token, "protocol_version": 1, "client": "test",
            "model_fingerprint": "model", "kv_spec": self.kv_spec,
        }  # fmt: skip
        hello = pb.Hello(**(fields | changes))
        self.stream.send(pb.ClientMessage(hello=hello).SerializeToString())
        return self.stream.receive().hello

    def open(self, **changes: object) -> "WirePeer":
        """Hello that must succeed; takes the pools."""
        reply = self.hello(**changes)
        assert reply.status.code == pb.OK, reply
        self.session_id = reply.session_id
        pools = self.attach.receive().pools
        assert len(pools.pools) == 1 and len(self.attach.descriptors) == 1
        return self

    def make_step(self, *ops: pb.Op) -> bytes:
        """The next Step, serialized; not sent yet."""
        message = pb.ClientMessage()
        message.step.number = len(self.steps) + 1
        message.step.replies_seen = len(self.replies)
        for op in ops:
            self.num_ops += 1
            op.op_id = self.num_ops
            message.step.ops.append(op)
        self.steps.append(message.SerializeToString())
        return self.steps[-1]

    def send(self, *ops: pb.Op) -> None:
        """Send a Step and wait for nothing."""
        self.stream.send(self.make_step(*ops))

    def step(self, *ops: pb.Op) -> list[pb.Reply]:
        """Send a Step; its replies, in the order of its operations."""
        first = self.num_ops + 1
        self.send(*ops)
        return self.wait_for(range(first, self.num_ops + 1))

    def wait_for(self, op_ids: Iterable[int], timeout: float = TIMEOUT_S) -> list[pb.Reply]:
        """Replies to these operations."""
        wanted, deadline = list(op_ids), time.monotonic() + timeout
        while True:
            by_op = {reply.op_id: reply for reply in self.replies.values()}
            if all(op_id in by_op for op_id in wanted):
                return [by_op[op_id] for op_id in wanted]
            self.read_one(max(deadline - time.monotonic(), 0.001))

    def read_one(self, timeout: float = TIMEOUT_S) -> None:
        """Take one message from the stream."""
        message = self.stream.receive(timeout)
        if message.WhichOneof("message") != "replies":
            self.messages.append(message)
        for reply in message.replies.replies:
            assert reply.number == len(self.replies) + 1, (reply.number, len(self.replies))
            self.replies[reply.number] = reply

    def ended(self) -> pb.Status:
        """Read to the stream's end; the status of the Ended before it, Cut if there was none."""
        while not self.messages or self.messages[-1].WhichOneof("message") != "ended":
            self.read_one()
        status = self.messages[-1].ended.status
        try:
            self.stream.receive()
        except Cut:
            return status
        raise AssertionError("something came after Ended")

    def cut(self) -> None:
        """Close the stream. Over gRPC the attach connection stays."""
        self.stream.close()

    def resume(self) -> pb.HelloReply:
        """Connect again and go on: Hello, then the Steps that the server has not got."""
        if self.transport == "local":
            self.attach = LocalStream(self.socket_dir / "attach.sock")
            self.attach.receive()
        self.messages.clear()
        self.stream = self._open()
        reply = self.hello(resume=True, replies_seen=len(self.replies))
        if reply.status.code == pb.OK:
            for data in self.steps[reply.last_step :]:
                self.stream.send(data)
        return reply

    def bye(self) -> None:
        """End the session."""
        self.stream.send(pb.ClientMessage(bye=pb.Bye()).SerializeToString())
        assert self.ended().code == pb.OK
        self.close()

    def finish(self) -> None:
        """End the session if that is still possible, whatever has become of the stream.

        One that was failed for breaking the protocol stays until this process ends.
        """
        self.close()
        try:
            if self.resume().status.code == pb.OK:
                self.bye()
        except (Cut, OSError):
            pass
        self.close()

    def close(self) -> None:
        """Close everything; the session goes on while this process lives."""
        self.stream.close()
        self.attach.close()


def unary(server_address: str, method: str, request: object, reply_type: type, **options: object):
    """Call a unary method of Cache by address; returns the reply, raises grpc.RpcError."""
    with grpc.insecure_channel(server_address, options=client_options()) as channel:
        call = channel.unary_unary(
            f"/radixkv.v1.Cache/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply_type.FromString,
        )
        return call(request, timeout=TIMEOUT_S, **options)
