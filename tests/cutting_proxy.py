"""A proxy before a server's sockets that cuts every connection at one chosen frame.

It forwards frames of the attach socket (with descriptors) and of HTTP/2 on the gRPC socket, and
counts them together, in both directions. When `cut_after` frames have passed, all connections are
closed, half a frame further if `torn`; what connects later passes freely. The server sees
connections of this process, as it would without the proxy.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from radixkv.v1 import session_pb2 as pb

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_READ_BYTES = 65_536


class CuttingProxy:
    """Listens in `directory` as a server would; `has_cut` tells whether it came to that."""

    def __init__(self, server_dir: Path, directory: Path, cut_after: int, torn: bool) -> None:
        self.directory = directory
        self.has_cut = False
        self._server_dir = server_dir
        self._left = cut_after
        self._torn = torn
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listeners = [self._listen("attach.sock"), self._listen("grpc.sock")]

    def close(self) -> None:
        """Close everything."""
        for listener in self._listeners:
            listener.close()
        with self._lock:
            self._close_connections()

    def _listen(self, name: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.directory / name))
        listener.listen()
        threading.Thread(target=self._accept, args=(listener, name), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket, name: str) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                upstream = socket.socket(socket.AF_UNIX)
                upstream.connect(str(self._server_dir / name))
                self._open += [client, upstream]
                split = _split_attach if name == "attach.sock" else _split_http2
                for source, target in ((client, upstream), (upstream, client)):
                    arguments = (source, target, split)
                    threading.Thread(target=self._forward, args=arguments, daemon=True).start()

    def _forward(
        self, source: socket.socket, target: socket.socket, split: Callable[[bytes], int]
    ) -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(source, _READ_BYTES, 8)
                if not data:
                    break
                rest += data
                while length := split(rest):
                    frame, rest = self._rewrite(rest[:length], split), rest[length:]
                    self._pass(target, frame, descriptors)
                    descriptors = []
        for side in (source, target):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def _rewrite(self, frame: bytes, split: Callable[[bytes], int]) -> bytes:
        """Attached names the gRPC socket: name the proxy's instead."""
        if split is _split_attach and b"unix:" in frame:
            message = pb.ServerMessage.FromString(frame[4:])
            message.attached.grpc_address = f"unix:{self.directory / 'grpc.sock'}"
            data = message.SerializeToString()
            return len(data).to_bytes(4, "little") + data
        return frame

    def _pass(self, target: socket.socket, frame: bytes, descriptors: list[int]) -> None:
        with self._lock:
            if self._left == 0 and not self.has_cut:
                self.has_cut = True
                if self._torn:
                    target.sendall(frame[: len(frame) // 2])
                self._close_connections()
                return
            self._left -= 1
            socket.send_fds(target, [frame], descriptors)
            for descriptor in descriptors:
                socket.close(descriptor)

    def _close_connections(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._open.clear()


@contextlib.contextmanager
def cutting_proxy(
    server_dir: Path, directory: Path, cut_after: int, torn: bool = False
) -> Iterator[CuttingProxy]:
    """A proxy in a new directory."""
    directory.mkdir(mode=0o700)
    proxy = CuttingProxy(server_dir, directory, cut_after, torn)
    try:
        yield proxy
    finally:
        proxy.close()


def _split_attach(data: bytes) -> int:
    """Bytes of the first whole frame, 0 if it is not whole."""
    if len(data) < 4:
        return 0
    length = 4 + int.from_bytes(data[:4], "little")
    return length if len(data) >= length else 0


def _split_http2(data: bytes) -> int:
    if data.startswith(_PREFACE[: len(data)]) and data:
        return len(_PREFACE) if len(data) >= len(_PREFACE) else 0
    if len(data) < 9:
        return 0
    length = 9 + int.from_bytes(data[:3], "big")
    return length if len(data) >= length else 0
