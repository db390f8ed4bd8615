"""What the demo proves beside its numbers. Every check that fails fails the demo."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from radixkv_client import Client
from radixkv_worker.demo.naive import NaiveCache
from radixkv_worker.demo.runner import Answered, Workers
from radixkv_worker.demo.workload import LONG_TOKENS


@dataclass(frozen=True, slots=True)
class Check:
    """A claim, whether it holds, and the numbers behind it."""

    claim: str
    holds: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Counted:
    """What the naive model says about the workload. Hits in tokens, sizes in blocks."""

    hit_tokens: int
    shared_blocks: int
    private_blocks: tuple[int, ...]


def count_naively(answered: Sequence[Answered], num_workers: int, block_size: int) -> Counted:
    """Hits in one shared cache, and what it and a private cache per worker would hold.

    Requests of one wave may be counted in any order: the sum of their hits is the same.
    """
    shared = NaiveCache(block_size)
    private = [NaiveCache(block_size) for _ in range(num_workers)]
    hit_tokens = 0
    for result in answered:
        hit_tokens += shared.hit(result.prompt)
        for cache in (shared, private[result.ask.worker]):
            for sample in result.samples:
                cache.add(result.prompt + sample[:-1])  # the last token is never computed
    return Counted(hit_tokens, shared.num_blocks, tuple(cache.num_blocks for cache in private))


def check_counts(answered: Sequence[Answered], counted: Counted, stats: Any) -> list[Check]:
    """The server's hit tokens and cached blocks are those of the naive model."""
    hits, blocks = stats.counters.hit_tokens, stats.books.cached
    reported = sum(result.stats["cached_tokens"] for result in answered)
    return [
        Check(
            "hit tokens equal a naive model's count",
            hits == counted.hit_tokens == reported,
            f"server {hits:,}, workers {reported:,}, naive {counted.hit_tokens:,}",
        ),
        Check(
            "each shared block is stored once",
            blocks == counted.shared_blocks,
            f"server {blocks:,}, naive {counted.shared_blocks:,}",
        ),
    ]


def check_copies(answered: Sequence[Answered], stats: Any, block_size: int) -> Check:
    """Only forks copied blocks: one tail for each branch."""
    tails = sum(
        len(sample) > 1
        for result in answered
        if len(result.prompt) % block_size
        for sample in result.samples[1:]
    )
    copied = (stats.counters.copied_blocks - tails) * stats.block_bytes
    return Check(
        "no KV is copied for a hit",
        copied == 0,
        f"{copied} bytes; {tails} tails for {stats.counters.forks} branches of parallel samples",
    )


def check_tables(answered: Sequence[Answered], block_size: int) -> Check:
    """A prefix has the same block ids in every worker's table."""
    ids: dict[tuple[int, ...], int] = {}
    workers: dict[tuple[int, ...], set[int]] = {}
    wrong = 0
    for result in answered:
        table = result.stats["block_ids"]
        for index in range(len(result.prompt) // block_size):
            prefix = tuple(result.prompt[: (index + 1) * block_size])
            wrong += ids.setdefault(prefix, table[index]) != table[index]
            workers.setdefault(prefix, set()).add(result.ask.worker)
    both = sum(len(numbers) > 1 for numbers in workers.values())
    return Check(
        "both workers' tables hold the same block ids",
        not wrong and both > 0,
        f"{both} blocks in tables of both, {wrong} differ",
    )


async def check_mappings(workers: Workers, client: Client) -> Check:
    """A byte changed through this process's mapping shows in the mappings of both workers."""
    with client.acquire([1] * client.block_size) as lease:
        block_id = lease.block_table[0]
        block = client.pool.as_numpy()[block_id]
        seen = []
        for _ in range(2):
            block[secrets.randbelow(len(block))] ^= 0xFF
            mine = xxhash.xxh3_128_hexdigest(block)
            theirs = [await workers.digest(number, block_id) for number in range(2)]
            seen.append((mine, *theirs))
    same = all(len(set(digests)) == 1 for digests in seen)
    return Check(
        "a byte changed through one mapping shows in the others",
        same and seen[0] != seen[1],
        f"block {block_id} in three processes",
    )


def check_single_flight(answers: Sequence[dict[str, Any]], waits: int, block_size: int) -> Check:
    """Two identical prompts sent at once: one worker computes, the other waits and hits."""
    computed = sorted(answer["radixkv"]["computed_tokens"] for answer in answers)
    generated = len(answers[0]["choices"][0]["radixkv"]["tokens"]) - 1
    hit = (LONG_TOKENS - 1) // block_size * block_size
    tokens = [answer["choices"][0]["radixkv"]["tokens"] for answer in answers]
    return Check(
        f"two identical {LONG_TOKENS:,}-token prompts at once are prefilled once",
        computed == [LONG_TOKENS - hit + generated, LONG_TOKENS + generated]
        and waits >= 1
        and tokens[0] == tokens[1],
        f"{computed[1] - generated:,} and {computed[0] - generated:,} prompt tokens computed",
    )


def check_answers(names: Sequence[str], got: Sequence[Any], uncached: Sequence[Any]) -> Check:
    """Every answer, token by token, equals the one computed without any cache."""
    wrong = [name for name, one, other in zip(names, got, uncached, strict=True) if one != other]
    num_tokens = sum(len(sample) for samples in uncached for sample in samples)
    return Check(
        "every answer equals the uncached one, token by token",
        not wrong,
        f"{len(names)} requests, {num_tokens} tokens" + (f"; wrong: {wrong}" if wrong else ""),
    )
