"""Causal attention of new tokens over KV that lies in blocks of a shared pool: plain torch.

Theory of operation
-------------------
One path serves prefill, prefill behind a cached prefix, and decode: a sequence with `seq_len`
tokens in the pool, the last `query_len` of which are new, sends rows (token, query head) against
its own keys. Sequences that add one token each are worked on together, padded to the longest.

What makes results reproducible bit for bit in float32, whatever else is in the batch and
wherever the prefix was cut:
- a product of matrices gives each row the same bits for any number of rows from MIN_ROWS on
  (below it other routines with another order of summation are chosen), so rows are padded to it;
- sums over tokens run in tiles of COLUMN_TILE, counted from the start of the sequence, one product
  of one shape after the other; a padded column has weight exactly 0 and value 0, and adding zeros
  at the end of a sum changes nothing.
The first is a habit of BLAS libraries, not a promise: tests/same_bits.py probes it, and
tests/kernels/test_paged_attention.py proves the rest. Without it answers differ in the last bits.

Slots that no token fills may hold anything (NaN, Inf): scores of padded columns are overwritten,
not added to, and padded values are set to 0. Only blocks that hold tokens of a sequence are read.
Math runs in float32, or float64 for float64 inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

MIN_ROWS = 8  # rows of a matrix product from which on a row's bits do not depend on their number
COLUMN_TILE = 128  # tokens summed in one matrix product; columns are padded to a multiple of it
MAX_SCORES = 1 << 20  # scores held at once; bounds memory, keeps tiles in the CPU's caches
MAX_QUERY_TILE = 128  # new tokens of one sequence worked on at once
MAX_GROUP_TOKENS = 1 << 15  # padded tokens gathered at once for one group of sequences
MAX_PADDING = 2.0  # a group of sequences is cut when padding makes it more than this much larger


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Attend from new tokens to everything before them in their sequence, themselves included.

    q [total new tokens, query heads, head dim]: the sequences' new tokens one after another.
    k, v [blocks + 1, kv heads, block size, (value) head dim]: one layer's views of the pool; the
    KV of the new tokens is already written. query heads is a multiple of kv heads.
    block_tables int32 [sequences, max blocks]: only the first ceil(seq_len / block size) entries
    of a row are used. seq_lens, query_lens int32 [sequences]: tokens in the pool, the new ones
    included, and new tokens. `scale` multiplies the scores.
    Returns [total new tokens, query heads, value head dim] in q's dtype; zeros for seq_len 0.
    Raises ValueError if shapes or lengths do not fit.
    """
    sequences = _sequences(q, k, v, block_tables, seq_lens, query_lens)
    out = q.new_zeros((q.shape[0], q.shape[1], v.shape[3]))
    num_kv_heads = k.shape[1]
    grouped = q.unflatten(1, (num_kv_heads, q.shape[1] // num_kv_heads))
    for group in _groups(sequences):
        keys, values = _gather(k, v, block_tables, group)
        for rows, limits in _query_tiles(group, q.shape[1]):
            result = _attend(grouped[rows], keys, values, limits, scale)
            out[rows] = result.flatten(2, 3).to(out.dtype)
    return out


@dataclass(frozen=True, slots=True)
class _Sequence:
    index: int
    first_row: int  # of its new tokens in q
    seq_len: int
    query_len: int


def _sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
) -> list[_Sequence]:
    """The sequences with something to do; checks that everything fits together."""
    if q.dim() != 3 or k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"shapes q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if q.shape[2] != k.shape[3] or q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"queries {tuple(q.shape)} do not fit keys {tuple(k.shape)}")
    if not len(block_tables) == len(seq_lens) == len(query_lens):
        raise ValueError(f"{len(block_tables)} tables, {len(seq_lens)}/{len(query_lens)} lengths")
    capacity = block_tables.shape[1] * k.shape[2]
    sequences, first_row = [], 0
    pairs = zip(seq_lens.tolist(), query_lens.tolist(), strict=True)
    for index, (seq_len, query_len) in enumerate(pairs):
        if seq_len > capacity or query_len < 0 or (query_len > seq_len and seq_len != 0):
            raise ValueError(
                f"sequence {index}: {query_len} new of {seq_len} tokens, table for {capacity}"
            )
        if seq_len and query_len:
            sequences.append(_Sequence(index, first_row, seq_len, query_len))
        first_row += query_len
    if first_row != q.shape[0]:
        raise ValueError(f"{q.shape[0]} queries for {first_row} new tokens")
    return sequences


def _groups(sequences: list[_Sequence]) -> Iterator[list[_Sequence]]:
    """Sequences to work on together: those with one new token and similar lengths."""
    single = sorted((s for s in sequences if s.query_len == 1), key=lambda s: s.seq_len)
    group: list[_Sequence] = []
    total = 0
    for sequence in single:
        padded = sequence.seq_len * (len(group) + 1)
        wasteful = padded > MAX_PADDING * (total + sequence.seq_len)
        if group and (wasteful or padded > MAX_GROUP_TOKENS):
            yield group
            group, total = [], 0
        group.append(sequence)
        total += sequence.seq_len
    if group:
        yield group
    for sequence in sequences:
        if sequence.query_len > 1:
            yield [sequence]


def _gather(
    k: torch.Tensor, v: torch.Tensor, block_tables: torch.Tensor, group: list[_Sequence]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a group's blocks together: [sequences, kv heads, columns, head dim] twice.

    Columns are the longest sequence's tokens, padded to whole blocks and whole column tiles.
    """
    block_size = k.shape[2]
    num_blocks = -(-max(s.seq_len for s in group) // block_size)
    ids = block_tables[[s.index for s in group], :num_blocks].to(torch.int64)
    for row, sequence in enumerate(group):
        ids[row, -(-sequence.seq_len // block_size) :] = ids[row, 0]
    keys, values = _copy_blocks(k, ids), _copy_blocks(v, ids)
    for row, sequence in enumerate(group):
        values[row, :, sequence.seq_len :] = 0
    return keys, values


def _copy_blocks(pool: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if pool.dtype == torch.float64 else torch.float32
    blocks = pool.index_select(0, ids.flatten()).unflatten(0, tuple(ids.shape))
    columns = blocks.to(dtype).transpose(1, 2).flatten(2, 3)
    missing = -columns.shape[2] % COLUMN_TILE
    return torch.nn.functional.pad(columns, (0, 0, 0, missing)) if missing else columns


def _query_tiles(
    group: list[_Sequence], num_heads: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tiles of new tokens: rows of q [sequences, tile], keys each may see [sequences, tile]."""
    query_len = group[0].query_len
    longest = max(s.seq_len for s in group)
    tile = min(MAX_QUERY_TILE, max(1, MAX_SCORES // (longest * num_heads * len(group))))
    first_rows = torch.tensor([[s.first_row] for s in group])
    first_limits = torch.tensor([[s.seq_len - s.query_len + 1] for s in group])
    for start in range(0, query_len, tile):
        steps = torch.arange(start, min(start + tile, query_len))
        yield first_rows + steps, first_limits + steps


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, limits: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [sequences, tile, kv heads, group, head dim] -> the same with the value head dim."""
    num_sequences, tile, num_kv_heads, group, _ = q.shape
    last = int(limits.max())
    columns = -(-last // COLUMN_TILE) * COLUMN_TILE
    rows = (q.to(keys.dtype) * scale).permute(0, 2, 1, 3, 4).flatten(2, 3)
    if tile * group < MIN_ROWS:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, MIN_ROWS - tile * group))
    scores = torch.matmul(rows, keys[:, :, :columns].transpose(2, 3))
    first = int(limits.min())  # columns from here on are hidden from some row
    hidden = torch.arange(first, columns) >= limits.unsqueeze(-1)
    real = scores[:, :, : tile * group, first:].unflatten(2, (tile, group))
    real.masked_fill_(hidden[:, None, :, None, :], -torch.inf)
    weights = torch.softmax(scores, dim=-1).flatten(0, 1)
    values = values.flatten(0, 1)
    out = values.new_zeros((len(weights), weights.shape[1], values.shape[2]))
    for start in range(0, columns, COLUMN_TILE):
        part = slice(start, start + COLUMN_TILE)
        out.baddbmm_(weights[:, :, part], values[:, part])
    out = out[:, : tile * group].unflatten(0, (num_sequences, num_kv_heads))
    return out.unflatten(2, (tile, group)).transpose(1, 2)
