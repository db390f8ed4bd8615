"""A mover: a process that carries out copies for the server that started it, and ends with it.

    python -m radixkv.pools.mover_process DESCRIPTOR

DESCRIPTOR is one end of a socket, whose first message is `MoverSettings`. The mover maps what that
names, says that it is ready, and answers one operation after the other until the socket ends.
It runs niced, and dies by the kernel's hand if the server does, whatever it is busy with; then no
process is left that writes to the arenas.
"""

import ctypes
import json
import logging
import mmap
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from radixkv.pools.checked_copy import map_checksum_table
from radixkv.pools.mover_faults import FAULTS_VARIABLE, Faults
from radixkv.pools.mover_ring import RingMemory, encode_answer
from radixkv.pools.mover_work import BeforeBlock, MappedPlaces, MoverWork
from radixkv.pools.nvme import NvmeAttachment, NvmeStore
from radixkv.pools.remote import RemoteStore
from radixkv.pools.stores import ObjectStore, SlotStore

log = logging.getLogger(__name__)

READY = b"ready"
MAX_SETTINGS_BYTES = 16 << 10
LOG_FORMAT = "%(asctime)s %(levelname)s mover %(process)d: %(message)s"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class MoverSettings:
    """What one mover has to do with. Descriptors are inherited; None or 0 = no such place."""

    server_pid: int
    niceness: int
    ring: int
    block_bytes: int
    block_size: int
    gpu: int
    gpu_blocks: int
    cpu: int | None = None
    cpu_blocks: int = 0
    checksums: int | None = None
    nvme: NvmeAttachment | None = None
    nvme_lock: int | None = None
    remote_url: str | None = None
    verify_all: bool = False

    def encode(self) -> bytes:
        """As the first message."""
        return json.dumps(asdict(self)).encode()


def main() -> None:
    """Run until the server closes the socket."""
    _die_with_parent()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        message = connection.recv(MAX_SETTINGS_BYTES)
        if not message:
            return  # the server is gone
        settings = MoverSettings(**json.loads(message))
        if os.getppid() != settings.server_pid:
            return  # it was gone before the kernel knew whom to tell
        os.nice(settings.niceness)
        try:
            places = _map(settings)
        except Exception as error:
            log.exception("cannot start")
            connection.send(str(error).encode())
            sys.exit(1)
        try:
            _serve(connection, RingMemory(settings.ring, settings.block_size), places)
        finally:
            for store in (places.nvme, places.remote):
                if store is not None:
                    store.close()


def _serve(connection: socket.socket, ring: RingMemory, places: MappedPlaces) -> None:
    work = MoverWork(places, _before_block())
    with suppress(ConnectionError):  # the server is gone
        connection.send(READY)
        while message := connection.recv(1):
            slot = message[0]
            answer = work.carry_out(ring.read(slot), ring.is_cancelled(slot))
            connection.send(encode_answer(slot, answer))


def _before_block() -> BeforeBlock | None:
    path = os.environ.get(FAULTS_VARIABLE)
    return Faults(Path(path)) if path else None


def _die_with_parent() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG")


def _map(settings: MoverSettings) -> MappedPlaces:
    gpu = map_arena(settings.gpu, settings.gpu_blocks, settings.block_bytes)
    cpu = checksums = None
    if settings.cpu is not None and settings.checksums is not None:
        cpu = map_arena(settings.cpu, settings.cpu_blocks, settings.block_bytes)
        checksums = map_checksum_table(settings.checksums, settings.cpu_blocks)
    return MappedPlaces(
        gpu, cpu, checksums, _nvme(settings), _remote(settings), settings.verify_all
    )


def map_arena(descriptor: int, num_blocks: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    """Map an arena: uint8 [num_blocks + 1, block_bytes]."""
    mapping = mmap.mmap(descriptor, (num_blocks + 1) * block_bytes)
    return np.frombuffer(mapping, np.uint8).reshape(num_blocks + 1, block_bytes)


def _nvme(settings: MoverSettings) -> SlotStore | None:
    if settings.nvme is None:
        return None
    return NvmeStore.attach(NvmeAttachment(*settings.nvme))


def _remote(settings: MoverSettings) -> ObjectStore | None:
    if settings.remote_url is None:
        return None
    return RemoteStore(settings.remote_url, settings.block_bytes, settings.block_size)


if __name__ == "__main__":
    main()
