"""paged_attention against plain float64 attention; rubbish in unused slots (E2); same bits."""

import itertools
import random

import pytest
import torch

from radixkv_kernels import paged_attention, write_kv
from tests.same_bits import require_row_independence

HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 3, 4, 8)
BLOCK_SIZES = (8, 16, 32, 64)
RUBBISH = (float("nan"), float("inf"), float("-inf"))


class Pool:
    """One layer of a pool full of rubbish; sequences are written into scattered blocks."""

    def __init__(
        self,
        *,
        kv_heads: int = 2,
        head_dim: int = 64,
        value_dim: int | None = None,
        block_size: int = 16,
        num_blocks: int = 200,
        dtype: torch.dtype = torch.float32,
        rubbish: float = float("nan"),
        seed: int = 0,
    ) -> None:
        self.block_size = block_size
        # A layer's view of a pool is strided: make it so here too.
        shape = (num_blocks + 1, 3, kv_heads, block_size)
        self.k = torch.full((*shape, head_dim), rubbish, dtype=dtype)[:, 1]
        self.v = torch.full((*shape, value_dim or head_dim), rubbish, dtype=dtype)[:, 1]
        self.generator = torch.Generator().manual_seed(seed)
        self.unused = list(range(1, num_blocks + 1))
        random.Random(seed).shuffle(self.unused)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def table(self, length: int) -> list[int]:
        """Take the blocks for `length` tokens."""
        return [self.unused.pop() for _ in range(-(-length // self.block_size))]

    def write(self, table: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        positions = torch.arange(len(keys))
        blocks = torch.tensor(table, dtype=torch.int64)[positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        write_kv(keys.to(self.k.dtype), values.to(self.v.dtype), self.k, self.v, slots)

    def sequence(self, length: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Write a random sequence; its table, keys and values as the pool holds them."""
        kv_heads = self.k.shape[1]
        keys = self.random(length, kv_heads, self.k.shape[3]).to(self.k.dtype)
        values = self.random(length, kv_heads, self.v.shape[3]).to(self.v.dtype)
        table = self.table(length)
        self.write(table, keys, values)
        return table, keys, values


def attend(
    pool: Pool, q: torch.Tensor, tables: list[list[int]], lengths: list[int], new: list[int]
) -> torch.Tensor:
    """paged_attention with stale ids behind each table, as an engine's buffer has them."""
    width = max(len(table) for table in tables) + 2
    stale = [0, -1]
    padded = [(table + stale * width)[:width] for table in tables]
    return paged_attention(
        q,
        pool.k,
        pool.v,
        torch.tensor(padded, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(new, dtype=torch.int32),
        scale=q.shape[2] ** -0.5,
    )


def plain(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """float64 attention of the last len(q) tokens, one query at a time."""
    group = q.shape[1] // keys.shape[1]
    keys = keys.double().repeat_interleave(group, 1)
    values = values.double().repeat_interleave(group, 1)
    rows = []
    for index, query in enumerate(q.double()):
        seen = len(keys) - len(q) + index + 1
        scores = torch.einsum("hd,thd->ht", query, keys[:seen]) * q.shape[2] ** -0.5
        rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values[:seen]))
    return torch.stack(rows)


def pairwise(*factors: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Few combinations that together contain every pair of values of any two factors."""
    rows = list(itertools.product(*factors))
    random.Random(1).shuffle(rows)
    columns = list(itertools.combinations(range(len(factors)), 2))
    missing = {(i, j, a, b) for i, j in columns for a in factors[i] for b in factors[j]}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: sum((i, j, row[i], row[j]) in missing for i, j in columns))
        chosen.append(best)
        missing -= {(i, j, best[i], best[j]) for i, j in columns}
    return chosen


def lengths_around(block_size: int) -> list[int]:
    return [1, 2, block_size - 1, block_size, block_size + 1, 3 * block_size, 4 * block_size + 3]


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "kv_heads"),
    pairwise(HEAD_DIMS, GROUPS, BLOCK_SIZES, (1, 2, 5)),
)
def test_equals_plain_attention(head_dim: int, group: int, block_size: int, kv_heads: int) -> None:
    pool = Pool(kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
    lengths = lengths_around(block_size)
    sequences = [pool.sequence(length) for length in lengths]
    # prefill, decode, and prefill behind a cached prefix, in one ragged batch
    choices = [lambda n: n, lambda n: 1, lambda n: (n + 1) // 2]
    new = [choices[index % 3](length) for index, length in enumerate(lengths)]
    q = pool.random(sum(new), kv_heads * group, head_dim).float()
    out = attend(pool, q, [table for table, _, _ in sequences], lengths, new)
    parts = zip(q.split(new), out.split(new), sequences, strict=True)
    for query, result, (_, keys, values) in parts:
        torch.testing.assert_close(result.double(), plain(query, keys, values), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)],
)
def test_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    pool = Pool(dtype=dtype, value_dim=48)
    table, keys, values = pool.sequence(37)
    q = pool.random(9, 6, 64).to(dtype)
    out = attend(pool, q, [table], [37], [9])
    assert out.dtype == dtype and out.shape == (9, 6, 48)
    expected = plain(q, keys, values)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("rubbish", RUBBISH)
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_e2_rubbish_in_unused_slots(rubbish: float, block_size: int) -> None:
    results = []
    for filler in (rubbish, 0.0):
        pool = Pool(rubbish=filler, block_size=block_size)
        lengths = [*lengths_around(block_size), 127, 128, 129]
        tables = [pool.sequence(length)[0] for length in lengths]
        new = [1 if index % 2 else length for index, length in enumerate(lengths)]
        q = pool.random(sum(new), 6, 64).float()
        results.append(attend(pool, q, tables, lengths, new))
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])


def test_e2_block_recycled_from_a_request_that_produced_nan() -> None:
    pool = Pool(rubbish=0.0, num_blocks=2)
    sick = pool.table(20)
    nan = torch.full((20, 2, 64), float("nan"))
    pool.write(sick, nan, nan)
    pool.unused = sick
    table, keys, values = pool.sequence(18)
    q = pool.random(18, 4, 64).float()
    out = attend(pool, q, [table], [18], [18])
    torch.testing.assert_close(out.double(), plain(q, keys, values), atol=1e-5, rtol=0)


def test_empty_sequences_give_zeros() -> None:
    pool = Pool()
    table, keys, values = pool.sequence(5)
    q = pool.random(4, 4, 64).float()
    out = attend(pool, q, [[], table, []], [0, 5, 0], [2, 1, 1])
    assert torch.equal(out[[0, 1, 3]], torch.zeros(3, 4, 64))
    torch.testing.assert_close(out[2:3].double(), plain(q[2:3], keys, values), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 128), (8, 80)])
def test_same_bits_whatever_else_is_in_the_batch(group: int, head_dim: int) -> None:
    require_row_independence()
    pool = Pool(num_blocks=600, head_dim=head_dim)
    lengths = [1, 2, 7, 16, 17, 100, 130, 131, 260, 700, 701, 1024]
    sequences = [pool.sequence(length)[0] for length in lengths]
    q = pool.random(len(lengths), 2 * group, head_dim).float()
    together = attend(pool, q, sequences, lengths, [1] * len(lengths))
    for index, (table, length) in enumerate(zip(sequences, lengths, strict=True)):
        alone = attend(pool, q[index : index + 1], [table], [length], [1])
        assert torch.equal(alone[0], together[index]), f"length {length}"


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 128), (8, 80)])
def test_same_bits_wherever_the_prefix_is_cut(group: int, head_dim: int) -> None:
    """Whole prefill, prefill in chunks, prefill behind a cached prefix and decode agree."""
    require_row_independence()
    pool = Pool(head_dim=head_dim)
    length = 389
    table, _, _ = pool.sequence(length)
    q = pool.random(length, 2 * group, head_dim).float()
    whole = attend(pool, q, [table], [length], [length])
    for cuts in ([16], [384], [388], [1, 2, 3, 50, 51, 200], list(range(1, length))):
        edges = [0, *cuts, length]
        for start, end in itertools.pairwise(edges):
            part = attend(pool, q[start:end], [table], [end], [end - start])
            assert torch.equal(part, whole[start:end]), f"tokens {start} to {end}"


def test_long_sequence_is_worked_on_in_tiles() -> None:
    pool = Pool(num_blocks=400, kv_heads=1)
    table, keys, values = pool.sequence(5000)
    q = pool.random(300, 3, 64).float()
    out = attend(pool, q, [table], [5000], [300])
    torch.testing.assert_close(out.double(), plain(q, keys, values), atol=1e-5, rtol=0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    pool = Pool()
    table, _, _ = pool.sequence(20)
    q = pool.random(3, 4, 64).float()
    with pytest.raises(ValueError, match="table for"):
        attend(pool, q, [table], [16 * 7], [3])
    with pytest.raises(ValueError, match="new of 2 tokens"):
        attend(pool, q, [table], [2], [3])
    with pytest.raises(ValueError, match="3 queries for 2"):
        attend(pool, q, [table], [20], [2])
    with pytest.raises(ValueError, match="do not fit keys"):
        attend(pool, pool.random(3, 5, 64).float(), [table], [20], [3])
    with pytest.raises(ValueError, match="slots"):
        write_kv(q, q, pool.k, pool.v, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="KV heads"):
        write_kv(q, q, pool.k, pool.v, torch.zeros(3, dtype=torch.int64))


def test_write_kv_touches_only_its_slots() -> None:
    pool = Pool(rubbish=0.0, num_blocks=4)
    k, v = pool.random(2, 2, 64).float(), pool.random(2, 2, 64).float()
    write_kv(k, v, pool.k, pool.v, torch.tensor([2 * 16 + 5, 3 * 16]))
    assert torch.equal(pool.k[2, :, 5], k[0]) and torch.equal(pool.v[3, :, 0], v[1])
    assert pool.k.count_nonzero() + pool.v.count_nonzero() == 4 * 2 * 64
