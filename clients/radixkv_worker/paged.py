"""The KV of a step's sequences in the blocks of the shared pool: what the model's forward calls."""

from collections.abc import Sequence as Sized

import torch
from torch import Tensor

from radixkv_client import PoolMapping
from radixkv_kernels import paged_attention, write_kv
from radixkv_worker.model import Attention


class PagedCache:
    """Views of one mapping of the pool; drop it before the mapping goes."""

    def __init__(self, pool: PoolMapping, num_layers: int) -> None:
        self._views = [pool.torch_view(layer) for layer in range(num_layers)]
        self._block_size = pool.kv_spec.block_size

    def attention(self, tables: Sized[Sized[int]], ranges: Sized[tuple[int, int]]) -> Attention:
        """For one forward pass: sequence i computes tokens ranges[i], whose KV goes to the blocks
        of tables[i], and attends to everything before them."""
        block_tables = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int32)
        slots = []
        for row, (table, (start, end)) in enumerate(zip(tables, ranges, strict=True)):
            block_tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
            positions = torch.arange(start, end)
            blocks = block_tables[row, positions // self._block_size].to(torch.int64)
            slots.append(blocks * self._block_size + positions % self._block_size)
        all_slots = torch.cat(slots)
        seq_lens = torch.tensor([end for _, end in ranges], dtype=torch.int32)
        query_lens = torch.tensor([end - start for start, end in ranges], dtype=torch.int32)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._views[layer]
            assert values is not None, "the model has values of its own"
            write_kv(k, v, keys, values, all_slots)
            scale = q.shape[2] ** -0.5
            return paged_attention(q, keys, values, block_tables, seq_lens, query_lens, scale=scale)

        return attend
