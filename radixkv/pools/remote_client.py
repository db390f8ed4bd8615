"""Mooncake's client library behind five methods, and what has to be done about its ways.

What was found by trying version 0.3.13, and is dealt with here:
- By default its calls wait 30 s for a master or a peer that is stopped, and connecting is tried
  20 times. Environment variables shorten that; they are read when it is loaded.
- It listens on all interfaces, whatever address it is given, and whoever reaches these ports can
  read and write the memory it offers. On a machine that takes part under a loopback address, we
  bind the sockets to the loopback device as soon as they are there.
- Its log names keys, which are digests of prompts, when something fails; it is silenced, since the
  codes it returns say the same.
- A call after `close` ends the process.
"""

import ctypes
import logging
import os
import socket
import stat
from typing import Any

from radixkv.pools.remote_url import RemoteUrl

log = logging.getLogger(__name__)

PACKAGE = "mooncake-transfer-engine-non-cuda"
SYSTEM_PACKAGES = ("libibverbs1", "libnuma1", "liburing2", "libcurl4")
RPC_TIMEOUT_S = 2
PEER_TIMEOUT_S = 3  # without any progress of a transfer
_ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": str(RPC_TIMEOUT_S * 1000),
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": str(RPC_TIMEOUT_S),
    "MC_TCP_PROGRESS_TIMEOUT_SEC": str(PEER_TIMEOUT_S),
    "MC_TCP_STATUS_TIMEOUT_SEC": str(PEER_TIMEOUT_S),
    "MC_TCP_ADMISSION_TIMEOUT_MS": str(PEER_TIMEOUT_S * 1000),
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_LOG_LEVEL": "ERROR",
    "MC_YLT_LOG_LEVEL": "critical",
}
_INTERNAL_BUFFER_BYTES = 16 << 20  # for calls of the library that we do not make; 0 is refused
_LOG_LEVEL = "_ZN3fLI17FLAGS_minloglevelE"  # of glog
_FATAL = 3

OK = 0
NO_SPACE = -200
BUFFER_TOO_SMALL = -600  # of a get
NOT_READY = -703  # somebody is putting it
NOT_FOUND = -704
LEASE_EXPIRED = -707
TRANSFER_FAILED = -800
RPC_FAILED = -900
RPC_TIMED_OUT = -901
_TEXTS = {
    NO_SPACE: "the cluster has no memory left for it",
    NOT_READY: "somebody else is writing it",
    LEASE_EXPIRED: "it took longer than the master keeps an object for its reader",
    TRANSFER_FAILED: "the machine that holds it does not answer",
    RPC_FAILED: "the master cannot be reached",
    RPC_TIMED_OUT: "the master does not answer",
}


class RemoteUnavailable(Exception):
    """The library cannot be used, or there is no connection; the message says what to do."""


def explain(code: int) -> str:
    """What a code of the library means."""
    return _TEXTS.get(code, f"error {code} of Mooncake")


def is_masters_fault(code: int) -> bool:
    """Whether a code means that no call can succeed at the moment."""
    return code in (RPC_FAILED, RPC_TIMED_OUT)


def load_library() -> Any:
    """Mooncake's module; raises RemoteUnavailable that names the packages to install."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import mooncake.store
    except ImportError as error:
        raise RemoteUnavailable(
            f"Mooncake cannot be loaded ({error}). It takes pip install '{PACKAGE}' (or the extra "
            f"radixkv[remote]), and on Debian apt-get install {' '.join(SYSTEM_PACKAGES)}"
        ) from None
    return mooncake.store


class MooncakeClient:
    """One membership in a cluster. Every method may hang; none may be called at the same time.

    States: not connected -> connected (`connect`) -> closed. The library itself finds a master
    again that was restarted, and offers it our segment anew.
    """

    def __init__(self, url: RemoteUrl, buffer_address: int, buffer_bytes: int) -> None:
        """Raises RemoteUnavailable. The buffer is what `put` and `get` may name parts of."""
        self._library = load_library()
        self._url = url
        self._buffer = (buffer_address, buffer_bytes)
        self._config = self._library.ReplicateConfig()
        self._config.replica_num = url.replicas
        self._store: Any = None

    @property
    def is_connected(self) -> bool:
        """Whether `connect` has succeeded."""
        return self._store is not None

    def connect(self) -> None:
        """Join the cluster; raises RemoteUnavailable."""
        url = self._url
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", url.host)  # what it tells others
        store = self._library.MooncakeDistributedStore()
        before = _listening()
        code = store.setup(
            url.host, url.metadata, url.segment_bytes, _INTERNAL_BUFFER_BYTES, url.protocol,
            url.device, url.master,
        )  # fmt: skip
        if code != OK:
            raise RemoteUnavailable(f"no connection to Mooncake's master {url.master}")
        try:
            if url.is_local:
                _confine_to_loopback(_listening() - before)
            code = store.register_buffer(*self._buffer)
            if code != OK:
                raise RemoteUnavailable(f"the buffer was refused: {explain(code)}")
        except BaseException:
            store.close()
            raise
        _silence_log()
        log.info("joined the cluster of %s, offering %d MiB", url.master, url.segment_bytes >> 20)
        self._store = store

    def put(self, keys: list[str], addresses: list[int], size: int) -> list[int]:
        """Store objects of `size` bytes. OK also for a key that was there, with its old bytes."""
        sizes = [size] * len(keys)
        return list(self._store.batch_put_from(keys, addresses, sizes, self._config))

    def get(self, keys: list[str], addresses: list[int], size: int) -> list[int]:
        """Fetch objects of at most `size` bytes; their size, or a negative code, each."""
        return list(self._store.batch_get_into(keys, addresses, [size] * len(keys)))

    def exist(self, keys: list[str]) -> list[int]:
        """1 = there, 0 = not, or a negative code, each."""
        return list(self._store.batch_is_exist(keys))

    def remove(self, keys: list[str], starts: list[str]) -> list[int]:
        """Remove objects, and all whose keys begin with one of `starts`, also while they are read.

        OK or a negative code, each.
        """
        codes = list(self._store.batch_remove(keys, True)) if keys else []
        for start in starts:
            codes.append(min(self._store.remove_by_regex(f"^{start}.*", True), OK))
        return codes

    def close(self) -> None:
        """Leave; what others had stored in our segment is gone. Takes about a second."""
        store, self._store = self._store, None
        if store is not None:
            store.close()


def _listening() -> set[int]:
    """Descriptors of this process that listen on all interfaces."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as other:
                if (
                    other.family in (socket.AF_INET, socket.AF_INET6)
                    and other.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    and other.getsockname()[0] in ("0.0.0.0", "::")
                ):
                    found.add(descriptor)
        except OSError:
            continue  # closed meanwhile
    return found


def _confine_to_loopback(descriptors: set[int]) -> None:
    """Let these sockets accept connections from this machine only; raises RemoteUnavailable."""
    for descriptor in descriptors:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
        except OSError as error:
            raise RemoteUnavailable(
                f"Mooncake's ports cannot be kept from the network ({error.strerror}; it takes "
                "Linux 5.7). Where the network is trusted, say host=ADDRESS in the URL"
            ) from None


def _silence_log() -> None:
    """Keep keys out of stderr. Without effect if the library has another logger by now."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "libglog" in line}
        for path in paths:
            ctypes.c_int.in_dll(ctypes.CDLL(path), _LOG_LEVEL).value = _FATAL
    except (OSError, ValueError) as error:
        log.warning("the log of Mooncake cannot be silenced: %s", error)
