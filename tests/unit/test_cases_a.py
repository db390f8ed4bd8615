"""Cases A1 to A6: wrong hits. Every negative is paired with a positive."""

import os
import random
import subprocess
import sys

import pytest

from radixkv.core import evicted
from radixkv.core.cache import Cache
from radixkv.core.errors import InvalidArgument
from radixkv.core.namespace import namespace_key
from radixkv.core.results import (
    Acquired,
    AcquireRequest,
    CacheConfig,
    ContentRange,
    MissKind,
    ReleaseReason,
)
from tests.core_rig import NAMESPACE, Rig
from tests.naive_model import int32

IMAGE = 500
TEXT = [1, 2, 3, 4]
PLACEHOLDERS = frozenset({IMAGE})
END = [9]  # what is asked for is one token longer than what is cached


def commit_prompt(
    cache: Cache,
    tokens: list[int],
    namespace: bytes = NAMESPACE,
    contents: tuple[ContentRange, ...] = (),
) -> Acquired:
    """Acquire, commit and release in session 1, without a model beside it."""
    request = AcquireRequest(int32(tokens), namespace, contents, PLACEHOLDERS)
    lease = cache.acquire(1, 1, request, 0)
    assert isinstance(lease, Acquired)
    cache.commit(1, 1, len(tokens), b"", ())
    cache.release(1, 1, ReleaseReason.FINISHED, 0)
    return lease


def cached(
    cache: Cache,
    tokens: list[int],
    namespace: bytes = NAMESPACE,
    contents: tuple[ContentRange, ...] = (),
) -> int:
    """Usable cached tokens of a prompt."""
    return cache.lookup(namespace, int32(tokens), contents, PLACEHOLDERS).cached_tokens


def new_cache(num_blocks: int = 64, block_size: int = 4) -> Cache:
    """A cache with session 1 open."""
    cache = Cache(CacheConfig(num_blocks=num_blocks, block_size=block_size))
    cache.open_session(1)
    return cache


# ---- A1: identity of a cached block too weak ----------------------------------------------


def test_a1_i_colliding_digests_never_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicted, "xxh3_64_intdigest", lambda *args: hash(args) & 0xFF)
    chance = random.Random(1)
    cache = new_cache(num_blocks=600, block_size=2)
    known = {tuple(chance.choices(range(10_000), k=2)) for _ in range(1_000)}
    others = {tuple(chance.choices(range(10_000), k=2)) for _ in range(1_000)} - known
    for tokens in sorted(known):
        commit_prompt(cache, list(tokens))
    hits = [tokens for tokens in others if cached(cache, [*tokens, *END])]
    assert hits == []
    cache.check()
    found = sum(cached(cache, [*tokens, *END]) == 2 for tokens in known)
    assert found == 600, "what was not evicted hits fully"


def test_a1_ii_same_last_block_and_length() -> None:
    rig = Rig(block_size=2)
    rig.open(1)
    p, q = [1, 1, 2, 2, 7, 7], [3, 3, 4, 4, 7, 7]
    rig.cache_prompt(1, p)
    assert rig.lookup(q + END) == 0
    rig.cache_prompt(1, q)
    first, second = rig.lease(1, p + END), rig.lease(1, q + END)
    assert first.computed == second.computed == 6, "each hits its own, with its own fingerprints"
    assert not set(first.table) & set(second.table)
    assert rig.lookup([1, 1, 4, 4, 7, 7] + END) == 2


@pytest.mark.parametrize("token", [-1, -2, -(2**31)])
def test_a1_iii_negative_tokens_are_refused(token: int) -> None:
    rig = Rig(block_size=1)
    rig.open(1)
    rig.cache_prompt(1, [1, 2])
    for tokens in ([token, 1], [1, token], [1, 2, token]):
        with pytest.raises(InvalidArgument):
            rig.acquire(1, tokens)
        with pytest.raises(InvalidArgument):
            rig.cache.lookup(NAMESPACE, int32(tokens))
    lease = rig.lease(1, [1, 2, 3], extra_blocks=1)
    with pytest.raises(InvalidArgument):
        rig.cache.commit(1, lease.id, 4, int32([token]), ())
    rig.settle()
    assert rig.lookup([1, 2] + END) == 2


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
def test_a1_iii_torn_tokens_are_refused(length: int) -> None:
    rig = Rig(block_size=1)
    rig.open(1)
    with pytest.raises(InvalidArgument):
        rig.cache.acquire(1, 1, AcquireRequest(bytes(length), NAMESPACE), 0)
    with pytest.raises(InvalidArgument):
        rig.cache.lookup(NAMESPACE, bytes(length))
    rig.cache_prompt(1, [0, 0])
    assert rig.lookup([0, 0] + END) == 2


# ---- A2: adapter identity -----------------------------------------------------------------


def adapter_key(adapter: str = "", version: str = "", salt: str = "") -> bytes:
    """A namespace that differs in the adapter or the salt only."""
    return namespace_key(
        model="model", kv_spec=b"spec", adapter=adapter, adapter_version=version, salt=salt
    )


def test_a2_adapters_and_versions_are_kept_apart() -> None:
    rig = Rig(block_size=2)
    rig.open(1)
    tokens = [1, 2, 3, 4]
    rig.cache_prompt(1, tokens, namespace=adapter_key("x", "1"))
    for other in (adapter_key(), adapter_key("x", "2"), adapter_key("y", "1")):
        assert rig.lookup(tokens + END, other) == 0
    assert rig.lookup(tokens + END, adapter_key("x", "1", salt="tenant")) == 0
    assert rig.lookup(tokens + END, adapter_key("x", "1")) == 4


def test_a2_a_reload_without_a_version_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="version"):
        adapter_key("x")
    assert adapter_key("x", "1") != adapter_key("x", "2")


def test_a2_fields_cannot_run_into_each_other() -> None:
    keys = [adapter_key("x", "12"), adapter_key("x1", "2"), adapter_key("x", "1", "2")]
    assert len(set(keys)) == len(keys)
    assert adapter_key("x", "12") == adapter_key("x", "12")


# ---- A3: multimodal placeholders ----------------------------------------------------------


def picture(content_id: bytes, start: int = 4, length: int = 4) -> tuple[ContentRange, ...]:
    """A picture behind `start` tokens of text."""
    return (ContentRange(start, length, content_id),)


PROMPT = TEXT + [IMAGE] * 4 + [5, 6]


def test_a3_i_another_picture_shares_only_the_text_before_it() -> None:
    cache = new_cache()
    commit_prompt(cache, PROMPT, contents=picture(b"aaa"))
    assert cached(cache, PROMPT, contents=picture(b"bbb")) == 4
    assert cached(cache, PROMPT, contents=picture(b"aaa")) == 8


def test_a3_ii_a_shifted_picture_does_not_hit() -> None:
    cache = new_cache()
    commit_prompt(cache, PROMPT, contents=picture(b"aaa"))
    shifted = TEXT + TEXT + [IMAGE] * 4 + [5, 6]
    assert cached(cache, shifted, contents=picture(b"aaa", start=8)) == 4
    halves = TEXT + [IMAGE] * 4 + [5, 6]
    assert cached(cache, halves, contents=picture(b"aaa", start=4)) == 8


@pytest.mark.parametrize("length", [None, 2, 3])
def test_a3_iii_absent_or_inconsistent_content_is_not_cacheable(length: int | None) -> None:
    cache = new_cache()
    bad = () if length is None else picture(b"aaa", length=length)
    commit_prompt(cache, PROMPT, contents=picture(b"aaa"))
    assert cached(cache, PROMPT, contents=bad) == 4
    lookup = cache.lookup(NAMESPACE, int32(PROMPT), bad, PLACEHOLDERS)
    assert lookup.miss.kind is MissKind.UNCACHEABLE
    before = cache.books().cached
    assert commit_prompt(cache, PROMPT, contents=bad).cached_tokens == 4
    assert cache.books().cached == before, "nor is it published"
    assert cached(cache, PROMPT, contents=picture(b"aaa")) == 8


@pytest.mark.parametrize(
    "contents",
    [
        picture(b"", start=4),
        picture(b"x" * 65),
        picture(b"aaa", start=8, length=4),
        picture(b"aaa", length=0),
        picture(b"aaa") + picture(b"bbb", start=6, length=2),
    ],
)
def test_a3_iii_malformed_ranges_are_refused(contents: tuple[ContentRange, ...]) -> None:
    cache = new_cache()
    with pytest.raises(InvalidArgument):
        commit_prompt(cache, PROMPT, contents=contents)
    cache.check()
    assert cache.books().free == 64
    commit_prompt(cache, PROMPT, contents=picture(b"aaa"))
    assert cached(cache, PROMPT, contents=picture(b"aaa")) == 8


def test_a3_iv_text_is_unaffected() -> None:
    cache = new_cache()
    text = TEXT + TEXT + END
    commit_prompt(cache, PROMPT, contents=picture(b"aaa"))
    assert cached(cache, text) == 4
    commit_prompt(cache, text)
    assert cached(cache, text) == 8


def test_a3_ids_of_evicted_pictures_are_not_confused() -> None:
    cache = new_cache(num_blocks=3)
    for number in range(50):
        name = b"picture %d" % number
        commit_prompt(cache, PROMPT, contents=picture(name))
        assert cached(cache, PROMPT, contents=picture(name)) == 8
        assert cached(cache, PROMPT, contents=picture(b"picture %d" % (number - 1))) <= 4
        cache.check()


# ---- A4: the fully cached prompt ----------------------------------------------------------

USABLE = {0: 0, 1: 0, 15: 0, 16: 0, 17: 16, 31: 16, 32: 16, 33: 32}


@pytest.mark.parametrize(("length", "usable"), USABLE.items())
def test_a4_one_token_at_least_is_left_to_compute(length: int, usable: int) -> None:
    rig = Rig(block_size=16)
    rig.open(1)
    tokens = list(range(length))
    assert rig.cache.lookup(NAMESPACE, int32(tokens)).cached_tokens == 0
    if length == 0:
        with pytest.raises(InvalidArgument):
            rig.acquire(1, tokens)
        return
    rig.cache_prompt(1, tokens)
    assert rig.lookup(tokens) == usable
    assert rig.lookup(tokens + [1000]) == length - length % 16
    lease = rig.acquire(1, tokens, wait_ms=1000, capacity_wait_ms=1000)
    assert rig.leases() == [lease], "nothing to load, so it is answered at once"
    assert lease.computed == usable


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_a4_partial_tail_reaches_length_minus_one(length: int) -> None:
    rig = Rig(block_size=16)
    rig.open(1)
    tokens = list(range(48))
    rig.cache_prompt(1, tokens)
    lease = rig.lease(1, tokens[:length], partial_tail=True)
    rig.finish_copies()
    assert lease.computed == length - 1
    rig.compute(lease)
    rig.settle()


# ---- A5: a hole in the prefix (one tier) --------------------------------------------------

SEVEN = list(range(14))


@pytest.mark.parametrize("removed", range(7))
def test_a5_i_ii_nothing_counts_behind_a_removed_block(removed: int) -> None:
    rig = Rig(block_size=2)
    rig.open(1)
    rig.cache_prompt(1, SEVEN)
    assert rig.lookup(SEVEN + END) == 14
    rig.invalidate(NAMESPACE, SEVEN[: 2 * removed + 2])
    assert rig.lookup(SEVEN + END) == 2 * removed
    assert rig.cache.books().cached == removed, "what cannot be used is not kept"
    rig.cache_prompt(1, SEVEN)
    assert rig.lookup(SEVEN + END) == 14


def test_a5_iii_a_block_goes_between_lookup_and_acquire() -> None:
    rig = Rig(block_size=2)
    rig.open(1)
    rig.cache_prompt(1, SEVEN)
    assert rig.lookup(SEVEN + END) == 14
    rig.invalidate(NAMESPACE, SEVEN[:8])
    lease = rig.lease(1, SEVEN + END)
    assert lease.computed == 6 and len(lease.locks) == 3
    rig.release(lease)
    assert rig.cache.books().leased == 0


# ---- A6: keys differ between processes ----------------------------------------------------

DERIVE = """
from radixkv.core.content import ContentTable
from radixkv.core.namespace import namespace_key, namespace_seed
from radixkv.core.results import ContentRange
for salt in ("", "tenant"):
    for adapter, version in (("", ""), ("x", "1")):
        key = namespace_key(model="m", kv_spec=b"spec", adapter=adapter,
                            adapter_version=version, salt=salt)
        print(key.hex(), namespace_seed(key))
table = ContentTable()
for content_id in (b"a", b"b", b"c"):
    tokens = table.resolve(bytes(16), (ContentRange(1, 2, content_id),), frozenset(), True).tokens
    print(table.canonical(tokens).hex())
"""


def test_a6_keys_are_the_same_in_every_interpreter() -> None:
    outputs = []
    for seed in (None, "0", "1", "random"):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        if seed is not None:
            env["PYTHONHASHSEED"] = seed
        outputs.append(subprocess.check_output([sys.executable, "-c", DERIVE], env=env, timeout=60))
    assert len(set(outputs)) == 1
    lines = outputs[0].split(b"\n")[:-1]
    assert len(lines) == len(set(lines)) == 7, "and different things have different keys"
