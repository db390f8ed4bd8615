"""The bars of the index: match, agent turn, eviction, memory, growth; against SGLang and vLLM.

Everything is CPU time of one thread in one process. `Ours` is the core's public API, so its times
include what the peers' modules leave to others: leases, books, allocation, miss reasons.
"""

import gc
import tracemalloc
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench import peers
from bench.indexes import BLOCK_SIZE, VLLM, Ours, OurTree, SGLang
from bench.measure import (
    MIN_PAIRS,
    Row,
    compare,
    cpu_us,
    median_row,
    ratio_row,
    repeats_for,
)

VOCABULARY = 50_000
SEQUENCE_TOKENS = 512
EVICT_BLOCKS = 16
EVICT_REPEATS = 20
LEAF_BLOCKS = 16
SHORT_LEAF_BLOCKS = 4
TURNS = 20
AGENTS = 15
GROWTH = (1_000, 10_000, 100_000)
POOL = 400_000


class Workload:
    """Random tokens from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def tokens(self, count: int) -> np.ndarray:
        """That many tokens nobody has seen before."""
        return self._random.integers(0, VOCABULARY, count)

    def sequences(self, count: int, length: int = SEQUENCE_TOKENS) -> np.ndarray:
        """One sequence a row."""
        return self._random.integers(0, VOCABULARY, (count, length))


def rows(quick: bool = False) -> list[Row]:
    """All rows of this part; what a missing peer would give says so."""
    sizes = GROWTH[:2] if quick else GROWTH
    found: list[Row] = []
    sglang = _load(peers.load_sglang)
    vllm = _load(peers.load_vllm)
    found += _against_sglang(sglang, match_rows, ["match, 6k full hit", "match, 32k full hit"])
    found += _against_sglang(sglang, turn_row, ["agent turn"])
    found += _against_sglang(
        sglang, lambda peer: many_sequences_row(peer, sizes[-1]),
        [f"match, 512 tokens among {sizes[-1]:,} sequences"],
    )  # fmt: skip
    found += eviction_rows(vllm, sizes[-1])
    found += [bytes_row(vllm), pair_row()]
    return found + growth_rows(sizes)


def _load(loader: Callable[[], SimpleNamespace]) -> SimpleNamespace | str:
    try:
        return loader()
    except peers.PeerMissing as error:
        return f"peer not available: {error}"


def _against_sglang(
    peer: SimpleNamespace | str, part: Callable[[SimpleNamespace], list[Row]], names: list[str]
) -> list[Row]:
    if isinstance(peer, str):
        return [Row(name, None, note=peer) for name in names]
    return part(peer)


def match_rows(peer: SimpleNamespace) -> list[Row]:
    """A full hit of one long prompt."""
    found = []
    for tokens, label, limit in ((6_144, "6k", 0.6), (32_768, "32k", 0.3)):
        work = Workload(tokens).tokens(tokens + 1)
        ours = Ours(POOL)
        ours.insert(ours.key(work[:tokens]))
        mine = ours.key(work)
        assert ours.match(mine) == tokens
        for rust, bar in ((True, limit), (False, None)):
            theirs = SGLang(peer, rust)
            theirs.insert(theirs.key(work[:tokens]))
            key = theirs.key(work)
            assert theirs.match(key) == tokens
            ratio = compare(lambda o=ours, m=mine: o.match(m), lambda t=theirs, k=key: t.match(k))
            name = f"match, {label} full hit ÷ SGLang {'Rust' if rust else 'Python'}"
            found.append(ratio_row(name, ratio, bar, "SGLang"))
    return found


def turn_row(peer: SimpleNamespace) -> list[Row]:
    """A conversation: each turn asks with all that was said, and caches prompt and answer.

    The bar compares trees: match and insert. Beside it stands what a whole lease takes here
    (Acquire with allocation and locks, Commit, Release), which SGLang's module does not do.
    """
    histories = Workload(3).sequences(AGENTS, 2_048 + TURNS * 512 + 512)
    ours, tree, theirs = Ours(POOL), OurTree(POOL), SGLang(peer, rust=True)
    times: list[tuple[float, ...]] = []
    for history in histories:
        calls = [_turn_calls(index, history) for index in (tree, theirs, ours)]
        gc.collect()
        gc.disable()
        turns = [[cpu_us(call, 1) for call in turn] for turn in zip(*calls, strict=True)]
        gc.enable()
        times.append(tuple(sum(column) / TURNS for column in zip(*turns, strict=True)))
    found = []
    for name, column, limit in (
        ("agent turn (tree: match + insert) ÷ SGLang Rust", 0, 0.25),
        ("agent turn (Acquire + Commit + Release) ÷ SGLang Rust", 2, None),
    ):
        own, other = median(t[column] for t in times), median(t[1] for t in times)
        note = f"{own:.1f} µs, SGLang {other:.1f} µs"
        ratios = [t[column] / t[1] for t in times]
        found.append(median_row(name, ratios, "x", limit, note=note))
    return found


def _turn_calls(index: Any, history: np.ndarray) -> list[Callable[[], None]]:
    calls = []
    for turn in range(TURNS):
        prompt = index.key(history[: 2_048 + turn * 512 + 256])
        whole = index.key(history[: 2_048 + turn * 512 + 512])
        calls.append(lambda p=prompt, w=whole: index.turn(p, w))
    return calls


def many_sequences_row(peer: SimpleNamespace, count: int) -> list[Row]:
    """A short hit in a big tree, a different one each time."""
    sequences = Workload(4).sequences(count)
    ours, theirs = Ours(count * (SEQUENCE_TOKENS // BLOCK_SIZE)), SGLang(peer, rust=True)
    for sequence in sequences:
        ours.insert(ours.key(sequence))
        theirs.insert(theirs.key(sequence))
    gc.freeze()
    chosen = sequences[:: max(count // 1_000, 1)]
    calls = [_round_robin(index, chosen) for index in (ours, theirs)]
    ratio = compare(calls[0], calls[1])
    gc.unfreeze()
    name = f"match, 512 tokens among {count:,} sequences ÷ SGLang Rust"
    return [ratio_row(name, ratio, 1.0, "SGLang")]


def _round_robin(index: Any, sequences: np.ndarray) -> Callable[[], int]:
    keys = [index.key(np.append(sequence, 1)) for sequence in sequences]
    state = [0]

    def call() -> int:
        state[0] = (state[0] + 7) % len(keys)
        return index.match(keys[state[0]])

    return call


def _full_of_leaves(index: Any, count: int, blocks: int = LEAF_BLOCKS) -> Any:
    for sequence in Workload(5).sequences(count, blocks * BLOCK_SIZE):
        index.insert(index.key(sequence))
    return index


def _evict_calls(index: Any) -> Callable[[], None]:
    return lambda: index.evict(EVICT_BLOCKS)


def eviction_rows(peer: SimpleNamespace | str, most: int) -> list[Row]:
    """Evicting 16 blocks from a full pool, and how that grows with the number of leaves."""
    few = most // 10
    ours = {
        (count, blocks): _evict_calls(_full_of_leaves(Ours(count * blocks), count, blocks))
        for count, blocks in ((few, LEAF_BLOCKS), (most, LEAF_BLOCKS), (few, SHORT_LEAF_BLOCKS))
    }
    repeats = (EVICT_REPEATS, EVICT_REPEATS)
    gc.freeze()
    growth = compare(ours[most, LEAF_BLOCKS], ours[few, LEAF_BLOCKS], repeats=repeats)
    label = f"evict 16 blocks, {most:,} leaves ÷ {few:,} leaves"
    found = [ratio_row(label, growth, 1.5, "with fewer")]
    for count, blocks, limit in ((most, LEAF_BLOCKS, 1.0), (few, SHORT_LEAF_BLOCKS, None)):
        name = f"evict 16 blocks, {count:,} leaves of {blocks} blocks ÷ vLLM"
        if isinstance(peer, str):
            found.append(Row(name, None, note=peer))
            continue
        theirs = _evict_calls(_full_of_leaves(VLLM(peer, count * blocks), count, blocks))
        gc.freeze()
        ratio = compare(ours[count, blocks], theirs, repeats=repeats)
        found.append(ratio_row(name, ratio, limit, "vLLM"))
    gc.unfreeze()
    return found


def bytes_row(peer: SimpleNamespace | str) -> Row:
    """Index memory of a full pool of conversations, per block."""
    name = "index bytes per block ÷ vLLM"
    if isinstance(peer, str):
        return Row(name, None, note=peer)
    histories = Workload(6).sequences(100, 2_048 + TURNS * 512)
    blocks = histories.size // BLOCK_SIZE
    used = []
    for make in (lambda: Ours(blocks), lambda: VLLM(peer, blocks)):
        gc.collect()
        tracemalloc.start()
        index = make()
        for turn in range(TURNS + 1):
            for history in histories:
                index.insert(index.key(history[: 2_048 + turn * 512]))
        gc.collect()
        used.append(tracemalloc.get_traced_memory()[0] / blocks)
        tracemalloc.stop()
        del index
    note = f"{used[0]:.0f} bytes, vLLM {used[1]:.0f} bytes"
    return Row(name, used[0] / used[1], "x", 0.4, note=note)


def pair_row() -> Row:
    """Acquire + Release of a cached prompt of 1,024 tokens."""
    ours = Ours(POOL)
    work = Workload(7).tokens(1_024)
    ours.insert(ours.key(work))
    key = ours.key(work)
    return _cpu_row("core, Acquire + Release, 1k tokens", lambda: ours.pair(key), 20.0)


def _cpu_row(name: str, call: Callable[[], object], limit: float | None = None) -> Row:
    repeats = repeats_for(call)
    gc.collect()
    gc.disable()
    values = [cpu_us(call, repeats) for _ in range(MIN_PAIRS)]
    gc.enable()
    return median_row(name, values, "µs", limit)


def growth_rows(sizes: tuple[int, ...]) -> list[Row]:
    """The same operations with more and more sequences cached."""
    found = []
    for count in sizes:
        ours = Ours((count + 2_000) * (SEQUENCE_TOKENS // BLOCK_SIZE))
        sequences = Workload(8).sequences(count)
        for sequence in sequences:
            ours.insert(ours.key(sequence))
        gc.freeze()
        found += _growth_at(ours, sequences)
        gc.unfreeze()
    return found


def _growth_at(ours: Ours, sequences: np.ndarray) -> list[Row]:
    label = f"512 tokens, {len(sequences):,} sequences"
    hit = ours.key(sequences[len(sequences) // 2])
    misses = iter([ours.key(row) for row in Workload(9).sequences(MIN_PAIRS * 100)])
    inserts = [cpu_us(lambda: ours.insert(next(misses)), 100) for _ in range(MIN_PAIRS)]
    return [
        _cpu_row(f"lookup, {label}", _round_robin(ours, sequences[:1_000])),
        _cpu_row(f"Acquire + Release, {label}", lambda: ours.pair(hit)),
        median_row(f"miss: Acquire + Commit + Release, {label}", inserts, "µs"),
    ]
