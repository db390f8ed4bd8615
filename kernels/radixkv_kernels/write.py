"""Scatter the KV of new tokens into their slots."""

import torch


def write_kv(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write keys and values of new tokens into one layer of the pool, in place.

    k_new [tokens, kv heads, head dim], v_new [tokens, kv heads, value head dim], any float dtype.
    k, v [blocks + 1, kv heads, block size, head dim]: one layer's views of the pool.
    slots int64 [tokens]: block id * block size + offset; no slot may occur twice, except those of
    block 0, the null block, which takes what nobody will read.
    Raises ValueError if the shapes do not fit. A slot outside the pool raises IndexError.
    """
    tokens, num_kv_heads, _ = k_new.shape
    if slots.shape != (tokens,) or v_new.shape[:2] != (tokens, num_kv_heads):
        raise ValueError(f"{tokens} keys, {v_new.shape[0]} values, {tuple(slots.shape)} slots")
    if k.shape[1] != num_kv_heads or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"pool has {tuple(k.shape)}, {tuple(v.shape)} for {num_kv_heads} KV heads")
    block_size = k.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    k[blocks, :, offsets] = k_new.to(k.dtype)
    v[blocks, :, offsets] = v_new.to(v.dtype)
