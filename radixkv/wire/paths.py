"""Where the sockets of a server are, for the server and for those who look for it."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOCKET_DIR_VARIABLE = "RADIXKV_SOCKET_DIR"
MAX_SOCKET_PATH_BYTES = 107  # of a Unix socket address, without its final zero


@dataclass(frozen=True, slots=True)
class SocketPaths:
    """Paths inside one server's socket directory. Raises ValueError if they are too long."""

    directory: Path

    def __post_init__(self) -> None:
        length = len(os.fsencode(self.attach))
        if length > MAX_SOCKET_PATH_BYTES:
            raise ValueError(
                f"{self.attach} is {length} bytes long, and a socket's path at most "
                f"{MAX_SOCKET_PATH_BYTES}; choose a shorter --socket-dir"
            )

    @property
    def attach(self) -> Path:
        """The Unix socket that hands out pools and carries framed sessions."""
        return self.directory / "attach.sock"

    @property
    def grpc(self) -> Path:
        """The Unix socket that serves gRPC."""
        return self.directory / "grpc.sock"

    @property
    def grpc_target(self) -> str:
        """The gRPC socket as a gRPC address, e.g. "unix:/run/user/7/radixkv/grpc.sock"."""
        return f"unix:{self.grpc}"

    @property
    def lock(self) -> Path:
        """The file whose lock the running server holds."""
        return self.directory / "lock"


def default_socket_dir(environ: Mapping[str, str] | None = None) -> Path:
    """$RADIXKV_SOCKET_DIR, else $XDG_RUNTIME_DIR/radixkv, else /tmp/radixkv-<uid>."""
    environ = os.environ if environ is None else environ
    if chosen := environ.get(SOCKET_DIR_VARIABLE):
        return Path(chosen).absolute()
    if runtime_dir := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime_dir) / "radixkv"
    return Path(f"/tmp/radixkv-{os.getuid()}")


def make_private_directory(path: Path) -> None:
    """Create `path` with mode 0700, or make sure that only this user can put anything in it.

    In /tmp anybody may have made it first: raises PermissionError, saying what to change, if it is
    not a directory, belongs to somebody else, or others may write to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise PermissionError(
                f"{path} is not a directory of this user; remove it or choose another --socket-dir"
            ) from None
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"others may write to {path}; chmod 700 it or choose another --socket-dir"
            ) from None
