"""A session spoken by hand on the attach socket of a server with the default block size.

with RawSession(server) as session:
    session.greet()
    reply = session.call(acquire=pb.Acquire(lease_id=1, tokens=tokens(range(40))))
"""

import struct
from collections.abc import Iterable
from typing import Any

from radixkv.v1 import session_pb2 as pb
from tests.server_process import ServerProcess
from tests.wire_peer import WirePeer

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


class RawSession(WirePeer):
    """A `WirePeer` that closes on the way out and sends one operation per Step."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(server.socket_dir, "local")

    def __enter__(self) -> "RawSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def greet(self, spec: pb.KVSpec = SPEC, model: str = "model") -> pb.HelloReply:
        """Say Hello; returns the reply, which may be a refusal."""
        reply = self.hello(kv_spec=spec, model_fingerprint=model)
        if reply.status.code == pb.OK:
            assert self.stream.receive().HasField("pools")
        return reply

    def call(self, **operation: Any) -> pb.Reply:
        """Carry out one operation and wait for its reply."""
        return self.step(pb.Op(**operation))[0]
