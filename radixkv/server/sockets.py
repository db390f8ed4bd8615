"""What a server listens on: its socket directory, held by a lock, and TCP ports."""

import errno
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from radixkv.server.settings import Address
from radixkv.wire.paths import SocketPaths, make_private_directory

TCP_BACKLOG = 128


class StartError(Exception):
    """The server cannot start; the message is one line that says what to change."""


class SocketDir:
    """A directory with this server's sockets, held exclusively until `close`.

    A lock says whether a server lives there, not the sockets: those of a dead server are replaced,
    those of a live one are not. If the directory is removed meanwhile and another server makes it
    anew, that server holds another lock file, and its sockets are left alone.
    """

    def __init__(self, directory: Path) -> None:
        """Make and lock the directory, remove stale sockets; raises `StartError`."""
        try:
            self.paths = SocketPaths(directory)
            make_private_directory(directory)
            self._lock = self._take_lock()
        except ValueError as error:
            raise StartError(str(error)) from None
        except OSError as error:
            if error.errno is None:  # of make_private_directory, which says what to change
                raise StartError(str(error)) from None
            raise StartError(
                f"cannot use {error.filename or directory} for sockets: {error.strerror}: "
                "set another --socket-dir"
            ) from None
        try:
            self._remove_stale(self.paths.attach)
            self._remove_stale(self.paths.grpc)
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Remove the sockets, if they are still this server's, and give up the lock."""
        if self._is_held():
            self.paths.attach.unlink(missing_ok=True)
            self.paths.grpc.unlink(missing_ok=True)
        os.close(self._lock)

    def bind_grpc(self, bind: Callable[[str], object]) -> None:
        """Have `bind` listen on a gRPC target, which then gets the name `paths.grpc`.

        gRPC unlinks the path it has bound when it stops, whosever socket is there by then. So it
        binds a name that nobody else uses.
        """
        passing = self.paths.directory / f"g.{secrets.token_hex(4)}"  # no longer than attach.sock
        bind(f"unix:{passing}")
        passing.rename(self.paths.grpc)

    def _is_held(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock), self.paths.lock.lstat())
        except OSError:
            return False

    def _take_lock(self) -> int:
        lock = os.open(self.paths.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise StartError(
                f"another radixkv-server (process {owner}) uses {self.paths.directory}: stop it, "
                "or set another --socket-dir"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock

    def _remove_stale(self, path: Path) -> None:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise StartError(f"{path} is in the way and no socket: remove it or set --socket-dir")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                path.unlink(missing_ok=True)
                return
            except OSError:
                pass
        raise StartError(f"socket {path} is in use by a live process: set another --socket-dir")


@contextmanager
def private_umask() -> Iterator[None]:
    """Sockets created inside are for this user only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def bind_tcp(address: Address, purpose: str, option: str) -> socket.socket:
    """A bound TCP socket, not yet listening; raises `StartError` naming purpose and option."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _bind_error(address, purpose, option, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(TCP_BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(address, purpose, option, error) from None
    return listener


def check_tcp_free(address: Address, purpose: str, option: str) -> None:
    """Raise `StartError` if gRPC, which does not say why it cannot bind, could not bind here."""
    bind_tcp(address, purpose, option).close()


def _bind_error(address: Address, purpose: str, option: str, error: Exception) -> StartError:
    reasons = {
        errno.EADDRINUSE: "the port is taken",
        errno.EADDRNOTAVAIL: "this machine does not have that address",
        errno.EACCES: "ports below 1024 need privileges",
    }
    number = error.errno if isinstance(error, OSError) else None
    why = reasons.get(number or 0, getattr(error, "strerror", None) or str(error))
    return StartError(
        f"cannot listen on {address} for {purpose} (port {address.port}): {why}: "
        f"set {option} to another HOST:PORT or off"
    )
