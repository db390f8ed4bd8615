"""Attention over a pool of KV blocks, and writing new KV into it. Imports torch only."""

from radixkv_kernels.attention import MIN_ROWS, paged_attention
from radixkv_kernels.write import write_kv

__all__ = ["MIN_ROWS", "paged_attention", "write_kv"]
