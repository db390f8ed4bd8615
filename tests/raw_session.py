"""A session spoken by hand on the attach socket: what the wire says, without the client.

with RawSession(server.attach_path) as session:
    session.hello(SPEC)
    reply = session.call(acquire=pb.Acquire(lease_id=1, tokens=tokens(range(40))))
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

from radixkv.v1 import session_pb2 as pb
from radixkv.wire.framing import FrameDecoder, encode
from radixkv.wire.limits import PROTOCOL_VERSION

MAX_WAIT_S = 10.0
SPEC = pb.KVSpec(
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    value_head_dim=8,
    dtype="float32",
    block_size=16,
    layout="LKHTD",
    block_bytes=2 * 16 * 16 * 4,
)


def tokens(ids: Iterable[int]) -> bytes:
    """Token ids as the wire has them."""
    ids = list(ids)
    return struct.pack(f"<{len(ids)}i", *ids)


class RawSession:
    """One attach connection. Every wait ends after MAX_WAIT_S."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(MAX_WAIT_S)
        self.socket.connect(path)
        self.descriptors: list[int] = []
        self.replies: dict[int, pb.Reply] = {}
        self.hello_reply = pb.HelloReply()
        self._decoder = FrameDecoder()
        self._inbox: list[pb.ServerMessage] = []
        self._next_step = 1
        self.attached = self.receive().attached

    def __enter__(self) -> "RawSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cut the connection."""
        self.socket.close()
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def send(self, **message: Any) -> None:
        """Send one ClientMessage with the given field."""
        self.socket.sendall(encode(pb.ClientMessage(**message)))

    def receive(self) -> pb.ServerMessage:
        """The next ServerMessage; raises EOFError at the end of the stream."""
        while not self._inbox:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 20, 16)
            self.descriptors += descriptors
            if not data:
                raise EOFError("the server closed the connection")
            self._inbox += [pb.ServerMessage.FromString(part) for part in self._decoder.feed(data)]
        return self._inbox.pop(0)

    def hello(self, spec: pb.KVSpec = SPEC, model: str = "model") -> pb.HelloReply:
        """Say Hello; returns the reply. After an accepted one `descriptors` holds the pool's."""
        self.send(
            hello=pb.Hello(
                session_token=self.attached.session_token,
                protocol_version=PROTOCOL_VERSION,
                client="test",
                model_fingerprint=model,
                kv_spec=spec,
            )
        )
        self.hello_reply = self.receive().hello
        if self.hello_reply.status.code == pb.OK:
            assert self.receive().HasField("pools")
        return self.hello_reply

    def call(self, **operation: Any) -> pb.Reply:
        """Carry out one operation in a Step of its own and wait for its reply."""
        number = self._next_step
        self._next_step += 1
        step = pb.Step(
            number=number, replies_seen=number - 1, ops=[pb.Op(op_id=number, **operation)]
        )
        self.send(step=step)
        deadline = time.monotonic() + MAX_WAIT_S
        while number not in self.replies:
            assert time.monotonic() < deadline, "no reply"
            for reply in self.receive().replies.replies:
                self.replies[reply.op_id] = reply
        return self.replies.pop(number)
