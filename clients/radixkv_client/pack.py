"""Packs: cached prefixes as a file, to start another server warm.

Both directions are an ordinary client's work. Export takes a lease on each prefix and writes its
cached blocks. Import takes a lease on each sequence, reads the blocks that are not cached into its
private ones, checks them there, and only then commits. A file that is not whole, undamaged and of
a layout that the server has is refused before anything of it is published.

Content (images, audio) is left out: only what the tokens alone identify is exported.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from radixkv.wire.paths import SocketPaths, default_socket_dir
from radixkv_client.client import Client
from radixkv_client.errors import NotFound
from radixkv_client.pack_format import (
    PackError,
    PackFile,
    PackHeader,
    PackSequence,
    common_blocks,
    encode_header,
    header_room,
)
from radixkv_client.tokens import TOKEN_BYTES, Tokens, token_bytes
from radixkv_client.tools import Namespace, Tools
from radixkv_client.values import Scope

CLIENT_NAME = "radixkv pack"
CAPACITY_WAIT_MS = 30_000
# An Acquire finds all but its last token, so that one more is needed to find whole blocks.
ONE_MORE_TOKEN = bytes(TOKEN_BYTES)

SocketDir = str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class PackSummary:
    """What a pack holds, and the blocks of it that were written (on import: that were missing).

    Of `asked_tokens`, in whole blocks, `num_tokens` were cached.
    """

    header: PackHeader
    num_tokens: int
    asked_tokens: int
    written_blocks: int

    @property
    def written_bytes(self) -> int:
        """KV bytes of the blocks that were written."""
        return self.written_blocks * self.header.kv_spec.block_bytes


def export_pack(
    path: str | os.PathLike[str],
    prefixes: Sequence[Tokens],
    *,
    socket_dir: SocketDir = None,
    model: str = "",
    scope: Scope | None = None,
) -> PackSummary:
    """Write the cached whole blocks of some prefixes to a file (0600), whole or not at all.

    `model` may be left out while one has anything cached. Raises PackError if nothing of any prefix
    is cached, and OSError.
    """
    scope = scope or Scope()
    encoded = [token_bytes(prefix) for prefix in prefixes]
    directory = Path(socket_dir) if socket_dir is not None else default_socket_dir()
    with Tools(SocketPaths(directory.absolute()).grpc_target) as tools:
        namespace = _find(tools.namespaces(), model, scope)
    assert namespace.kv_spec is not None
    with (
        Client.connect(
            directory, model=namespace.model, kv_spec=namespace.kv_spec, client_name=CLIENT_NAME
        ) as client,
        _replacing(Path(path)) as file,
    ):
        return _Export(client, scope, file).run(encoded)


def import_pack(path: str | os.PathLike[str], *, socket_dir: SocketDir = None) -> PackSummary:
    """Publish what a pack holds, in the namespace that it names.

    Raises PackError for a file that is no good, before anything of it is published; the client's
    errors, of which TooLarge says that a sequence does not fit the pool; and OSError.
    """
    with PackFile(path) as pack:
        pack.check_blocks()
        header = pack.header
        with Client.connect(
            socket_dir, model=header.model, kv_spec=header.kv_spec, client_name=CLIENT_NAME
        ) as client:
            return _import(client, pack)


def _find(namespaces: list[Namespace], model: str, scope: Scope) -> Namespace:
    """The namespace with most blocks that fits."""
    found = [
        namespace
        for namespace in namespaces
        if namespace.scope == scope and namespace.kv_spec and model in ("", namespace.model)
    ]
    models = sorted({namespace.model for namespace in found})
    if not models:
        named = f" of model {model!r}" if model else ""
        raise NotFound(f"nothing{named} is cached in this namespace")
    if len(models) > 1:
        raise PackError(f"{len(models)} models have something cached here; name one of {models}")
    return found[0]


class _Export:
    """One export: writes blocks behind the room for the header, and the header last."""

    def __init__(self, client: Client, scope: Scope, file: int) -> None:
        self._client = client
        self._scope = scope
        self._file = file
        self._sequences: list[PackSequence] = []
        self._checksums: list[int] = []
        self._before = b""

    def run(self, prefixes: list[bytes]) -> PackSummary:
        client = self._client
        chosen = _whole_blocks(prefixes, client.block_size)
        num_tokens = sum(map(len, chosen)) // TOKEN_BYTES
        blocks_offset = header_room(len(chosen), num_tokens, num_tokens // client.block_size)
        has_tiers = bool(client.stats().tiers)
        for tokens in chosen:
            if has_tiers:  # an Acquire may be answered before all of it is up
                model = client.identity.model
                client.tools.prefetch(tokens, scope=self._scope, model=model).wait()
            self._export(tokens, blocks_offset)
        if not self._sequences:
            raise PackError(f"none of these {len(chosen)} prefixes is cached")
        model, kv_spec = client.identity.model, client.kv_spec
        header = PackHeader(model, self._scope, kv_spec, self._sequences, self._checksums)
        _write(self._file, encode_header(header, blocks_offset), 0)
        return PackSummary(header, _num_tokens(header), num_tokens, len(self._checksums))

    def _export(self, tokens: bytes, blocks_offset: int) -> None:
        client = self._client
        block_bytes = client.kv_spec.block_bytes
        shared = common_blocks(self._before, tokens, client.block_size)
        with client.acquire(
            tokens + ONE_MORE_TOKEN,
            scope=self._scope,
            capacity_wait_ms=CAPACITY_WAIT_MS,
            resumed=True,  # nothing that a hit rate should count
        ) as lease:
            lease.trim(lease.cached_tokens)  # nobody shall wait for us to compute the rest
            num_blocks = lease.cached_tokens // client.block_size
            if num_blocks <= shared:
                return
            pool = client.pool.as_numpy()
            for block in lease.block_table[shared:num_blocks]:
                data = memoryview(pool[block])
                _write(self._file, data, blocks_offset + len(self._checksums) * block_bytes)
                self._checksums.append(xxh3_64_intdigest(data))
        self._before = tokens[: lease.cached_tokens * TOKEN_BYTES]
        self._sequences.append(PackSequence(self._before, shared))


def _whole_blocks(prefixes: list[bytes], block_size: int) -> list[bytes]:
    """The prefixes without what is not a whole block, sorted, without those that another has."""
    step = block_size * TOKEN_BYTES
    whole = sorted({tokens[: len(tokens) // step * step] for tokens in prefixes} - {b""})
    if not whole:
        raise PackError(f"none of these prefixes has a whole block of {block_size} tokens")
    longer = [*whole[1:], b""]
    return [tokens for tokens, next_ in zip(whole, longer, strict=True)
            if not next_.startswith(tokens)]  # fmt: skip


def _import(client: Client, pack: PackFile) -> PackSummary:
    header = pack.header
    written = num_read = 0
    before: list[int] = []  # where in the file the blocks of the sequence before are
    for sequence in header.sequences:
        num_own = header.num_blocks(sequence) - sequence.num_shared
        positions = [*before[: sequence.num_shared], *range(num_read, num_read + num_own)]
        written += _import_sequence(client, pack, sequence, positions)
        num_read += num_own
        before = positions
    num_tokens = _num_tokens(header)
    return PackSummary(header, num_tokens, num_tokens, written)


def _import_sequence(
    client: Client, pack: PackFile, sequence: PackSequence, positions: list[int]
) -> int:
    """Publish one sequence, or nothing of it; returns how many blocks were missing."""
    with client.acquire(
        sequence.tokens + ONE_MORE_TOKEN,
        scope=pack.header.scope,
        capacity_wait_ms=CAPACITY_WAIT_MS,
        resumed=True,
    ) as lease:
        first = lease.cached_tokens // client.block_size
        pool = client.pool.as_numpy()
        for index in range(first, len(positions)):
            pack.read_block(positions[index], memoryview(pool[lease.block_table[index]]))
        lease.commit(len(positions) * client.block_size)
        return len(positions) - first


def _num_tokens(header: PackHeader) -> int:
    return sum(len(sequence.tokens) for sequence in header.sequences) // TOKEN_BYTES


@contextmanager
def _replacing(path: Path) -> Iterator[int]:
    """A new file, readable by its owner only, that takes the place of `path` if all goes well."""
    if path.exists() and not path.is_file():
        raise PackError(f"{path} is there and is not a regular file")
    file, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
    try:
        try:
            yield file
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _write(file: int, data: Any, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        count = os.pwrite(file, view, offset)
        view = view[count:]
        offset += count
