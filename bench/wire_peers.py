"""The servers that the wire is measured against, each a process of its own.

    python -m bench.wire_peers echo|zmq|zmq-sync SOCKET REPLY_BYTES

`echo` is as little as asyncio can do: frames in, a constant frame out. The two others carry the
fields of Acquire and its reply by msgspec over ZeroMQ: `zmq` in an event loop, as a server that
also does other things must, `zmq-sync` in a bare blocking loop.
"""

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_TIMEOUT_S = 20.0
HEADER_BYTES = 4


class Peer:
    """One of the servers above, running. Context manager."""

    def __init__(self, kind: str, path: Path, reply_bytes: int) -> None:
        command = [sys.executable, "-m", "bench.wire_peers", kind, str(path), str(reply_bytes)]
        self._process = subprocess.Popen(command)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not path.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"the {kind} peer did not start")
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()


class EchoClient:
    """Blocking round trips with the echo."""

    def __init__(self, path: Path, request_bytes: int, reply_bytes: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._request = request_bytes.to_bytes(HEADER_BYTES, "little") + bytes(request_bytes)
        self._reply_bytes = reply_bytes + HEADER_BYTES

    def call(self) -> None:
        """One round trip."""
        self._socket.sendall(self._request)
        left = self._reply_bytes
        while left:
            left -= len(self._socket.recv(left))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class ZmqClient:
    """Blocking round trips that carry an Acquire and its reply."""

    def __init__(self, path: Path, tokens: bytes) -> None:
        import msgspec
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.connect(f"ipc://{path}")
        self._tokens = tokens
        acquire, _, reply = message_types()
        self._acquire = acquire
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(reply).decode
        self._count = 0

    def call(self) -> None:
        """One round trip."""
        self._count += 1
        self._socket.send(self._encode(self._acquire(self._count, self._tokens)))
        self._decode(self._socket.recv())

    def close(self) -> None:
        """Close the socket."""
        self._socket.close(linger=0)
        self._context.term()


def message_types() -> tuple[Any, Any, Any]:
    """msgspec twins of Acquire, MissReason and AcquireReply."""
    import msgspec

    acquire = msgspec.defstruct(
        "Acquire",
        [("lease_id", int), ("tokens", bytes), ("extra_blocks", int, 0), ("wait_ms", int, 0)],
    )
    miss = msgspec.defstruct("Miss", [("kind", int), ("at_token", int)])
    reply = msgspec.defstruct(
        "AcquireReply",
        [("lease_id", int), ("block_table", bytes), ("cached_tokens", int), ("miss", miss)],
    )
    return acquire, miss, reply


class _Echo(asyncio.Protocol):
    def __init__(self, reply: bytes) -> None:
        self._reply = reply
        self._buffer = bytearray()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= HEADER_BYTES:
            end = HEADER_BYTES + int.from_bytes(self._buffer[:HEADER_BYTES], "little")
            if len(self._buffer) < end:
                return
            del self._buffer[:end]
            self._transport.write(self._reply)


async def serve_echo(path: str, reply_bytes: int) -> None:
    """Answer every frame with the same frame."""
    reply = reply_bytes.to_bytes(HEADER_BYTES, "little") + bytes(reply_bytes)
    server = await asyncio.get_running_loop().create_unix_server(lambda: _Echo(reply), path)
    await server.serve_forever()


class _Answer:
    """Decodes a request and encodes a reply with a table of `table_bytes`."""

    def __init__(self, table_bytes: int) -> None:
        import msgspec

        acquire, self._miss, self._reply = message_types()
        self._decode = msgspec.msgpack.Decoder(acquire).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._table = bytes(table_bytes)

    def __call__(self, data: bytes) -> bytes:
        request = self._decode(data)
        cached = len(request.tokens) // 4
        return self._encode(
            self._reply(request.lease_id, self._table, cached, self._miss(0, cached))
        )


async def serve_zmq(path: str, reply_bytes: int) -> None:
    """ROUTER in the event loop."""
    import zmq
    import zmq.asyncio

    answer = _Answer(reply_bytes)
    router = zmq.asyncio.Context().socket(zmq.ROUTER)
    router.bind(f"ipc://{path}")
    while True:
        peer, empty, data = await router.recv_multipart()
        await router.send_multipart([peer, empty, answer(data)])


def serve_zmq_sync(path: str, reply_bytes: int) -> None:
    """REP in a blocking loop."""
    import zmq

    answer = _Answer(reply_bytes)
    replier = zmq.Context().socket(zmq.REP)
    replier.bind(f"ipc://{path}")
    while True:
        replier.send(answer(replier.recv()))


def main() -> None:
    """Serve until killed."""
    import uvloop

    kind, path, reply_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if kind == "zmq-sync":
        serve_zmq_sync(path, reply_bytes)
    else:
        uvloop.run({"echo": serve_echo, "zmq": serve_zmq}[kind](path, reply_bytes))


if __name__ == "__main__":
    main()
