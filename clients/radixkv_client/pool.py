"""A pool of KV blocks, mapped into this process without copying."""

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any

from radixkv.v1 import session_pb2 as pb
from radixkv.wire.model_config import DTYPE_BYTES
from radixkv_client.errors import Internal, InvalidArgument, Unavailable, WrongProcess
from radixkv_client.spec import KVSpec

if TYPE_CHECKING:
    import numpy
    import torch

_TORCH_DTYPES = {"fp8_e4m3": "float8_e4m3fn"}
_live: "weakref.WeakSet[PoolMapping]" = weakref.WeakSet()


class PoolMapping:
    """The server's pool in this process's memory: `num_blocks` + 1 blocks of `block_bytes`.

    Views are valid until close(), which the client calls when the server has restarted or the
    client is closed; a view kept longer reads its old memory, which nobody else uses any more, and
    keeps it from being given back. A forked child has no mapping: taking a view there raises
    WrongProcess, touching one taken before is a fault.
    """

    def __init__(self, descriptor: int, pool: pb.Pool, kv_spec: KVSpec) -> None:
        self.num_blocks = pool.num_blocks
        self.block_bytes = pool.block_bytes
        self.kv_spec = kv_spec
        self._map = _map_pool(descriptor, pool)
        self._closed = False
        self._pid = os.getpid()
        _live.add(self)

    @property
    def closed(self) -> bool:
        """True after close(); no further views can be taken."""
        return self._closed

    def as_numpy(self) -> "numpy.ndarray[Any, Any]":
        """The pool as uint8 [num_blocks + 1, block_bytes], zero-copy and writable."""
        import numpy

        shape = (self.num_blocks + 1, self.block_bytes)
        return numpy.frombuffer(self._open_map(), dtype=numpy.uint8).reshape(shape)

    def torch_view(self, layer: int) -> "tuple[torch.Tensor, torch.Tensor | None]":
        """Keys and values of one layer, zero-copy and writable.

        Each is a strided view [num_blocks + 1, num_kv_heads, block_size, head dim] of the pool;
        values are None where the spec has none (MLA latent). Raises InvalidArgument for a layer
        out of range or a layout other than LKHTD, Unavailable after close().
        """
        import torch

        spec = self.kv_spec
        if not 0 <= layer < spec.num_layers:
            raise InvalidArgument(f"layer {layer}: the pool has layers 0 to {spec.num_layers - 1}")
        if spec.layout != "LKHTD" or self.block_bytes % DTYPE_BYTES[spec.dtype]:
            raise InvalidArgument(
                f"no tensor views of layout {spec.layout!r} with blocks of "
                f"{self.block_bytes} bytes of {spec.dtype}"
            )
        dtype = getattr(torch, _TORCH_DTYPES.get(spec.dtype, spec.dtype))
        whole = torch.frombuffer(self._open_map(), dtype=torch.uint8).view(dtype)
        plane = spec.num_kv_heads * spec.block_size
        offset = layer * plane * (spec.head_dim + spec.value_head_dim)
        keys = self._strided(whole, offset, spec.head_dim)
        if not spec.value_head_dim:
            return keys, None
        return keys, self._strided(whole, offset + plane * spec.head_dim, spec.value_head_dim)

    def _strided(self, whole: "torch.Tensor", offset: int, head_dim: int) -> "torch.Tensor":
        spec = self.kv_spec
        block_elements = self.block_bytes // DTYPE_BYTES[spec.dtype]
        size = (self.num_blocks + 1, spec.num_kv_heads, spec.block_size, head_dim)
        stride = (block_elements, spec.block_size * head_dim, head_dim, 1)
        return whole.as_strided(size, stride, offset)

    def _open_map(self) -> mmap.mmap:
        if self._pid != os.getpid():
            raise WrongProcess(f"this pool is mapped in process {self._pid}; connect anew here")
        if self._closed:
            raise Unavailable(
                "this pool mapping is closed: the server restarted or the client "
                "was closed; take views of client.pool anew"
            )
        return self._map

    def close(self) -> None:
        """Refuse further views, and unmap once the last view of it is gone."""
        self._closed = True
        with contextlib.suppress(BufferError):  # views live; the last one unmaps
            self._map.close()


def _map_pool(descriptor: int, pool: pb.Pool) -> mmap.mmap:
    wanted = (pool.num_blocks + 1) * pool.block_bytes
    size = os.fstat(descriptor).st_size
    if pool.kind != "memfd" or pool.size_bytes != wanted or size < wanted:
        raise Internal(
            f"pool {pool.pool_id} of kind {pool.kind!r}: {size} bytes behind it, "
            f"{pool.size_bytes} announced, {wanted} expected"
        )
    mapping = mmap.mmap(descriptor, wanted, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def _keep_in_child() -> None:
    """A forked child has a hole where the mapping was and may map something else there; so the
    inherited object must never unmap it."""
    for pool in _live:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool._map))


os.register_at_fork(after_in_child=_keep_in_child)
