"""Cases B1 to B6: references, leaks, double frees, eviction."""

import itertools
import random

import pytest

from radixkv.core.errors import Exhausted, TooLarge
from radixkv.core.results import Books
from tests.core_audit import WaitingAcquire
from tests.core_rig import NAMESPACE, Rig
from tests.naive_model import ModelLease, int32

END = [9]  # what is asked for is one token longer than what is cached


def new_rig(num_blocks: int = 16, block_size: int = 4, sessions: int = 3, **config: int) -> Rig:
    """A rig with sessions 1, 2, 3 … open."""
    rig = Rig(num_blocks, block_size, **config)
    for session in range(1, sessions + 1):
        rig.open(session)
    return rig


def prompt(num_blocks: int, first: int = 0, block_size: int = 4) -> list[int]:
    """A whole number of blocks of tokens that no prompt with another `first` shares."""
    return list(range(first, first + num_blocks * block_size))


def fill(rig: Rig, session: int) -> list[ModelLease]:
    """Take every block that can be had."""
    taken = []
    for token in itertools.count(5_000):
        try:
            taken.append(rig.lease(session, [token]))
        except Exhausted:
            return taken
    raise AssertionError


def assert_all_free(rig: Rig) -> None:
    """No lease is left; after evicting all, free == total."""
    assert rig.cache.books().leased == rig.cache.books().in_flight == 0
    for lease in fill(rig, 1):
        rig.release(lease)
    books = rig.cache.books()
    assert books.free == books.total and not rig.model.entries


# ---- B1: lock and split -------------------------------------------------------------------


@pytest.mark.parametrize("first_released", [0, 1])
def test_b1_locks_survive_a_split(first_released: int) -> None:
    rig = new_rig(20)
    long = prompt(8)
    rig.cache_prompt(1, long)
    readers = [rig.lease(1, long + END)]
    rig.cache_prompt(2, long[:16] + prompt(2, 500))
    readers.append(rig.lease(2, long[:16] + END))
    assert [reader.computed for reader in readers] == [32, 16]
    taken = fill(rig, 3)
    assert len(rig.model.entries) == 8, "everything evictable is gone, and nothing else"
    rig.settle()
    for lease in taken:
        rig.release(lease)
    rig.release(readers[first_released])
    rig.release(readers[1 - first_released])
    assert rig.cache.books().leased == 0
    assert_all_free(rig)


def test_b1_a_partial_match_keeps_only_what_it_matched() -> None:
    rig = new_rig(16)
    rig.cache_prompt(1, prompt(8))
    reader = rig.lease(1, prompt(4) + END)
    assert rig.cache.books().leased == 5 and rig.cache.books().cached == 4
    fill(rig, 2)
    assert rig.lookup(prompt(8) + END) == 16
    rig.release(reader)


# ---- B2: the same prefix committed twice --------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_b2_the_first_copy_stays_and_both_tables_read_right(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(10):
        rig = new_rig(16)
        tokens = prompt(5)
        racers = [rig.compute(rig.lease(session, tokens)) for session in (1, 2)]
        assert racers[1].computed == len(tokens)
        goals = [(racer, upto) for racer in racers for upto in (8, 12, 20) if upto]
        chance.shuffle(goals)
        duplicates = 0
        for racer, upto in goals:
            if upto > racer.committed:
                duplicates += rig.commit(racer, upto)
            assert rig.lookup(tokens + END) % 4 == 0
        assert duplicates == 5, "one copy of each block in the tree"
        assert rig.lookup(tokens + END) == 20
        fill(rig, 3)
        rig.settle()
        rig.close(3)
        chance.shuffle(racers)
        for racer in racers:
            rig.release(racer)
        books = rig.cache.books()
        assert (books.free, books.cached) == (11, 5)


def test_b2_the_loser_also_keeps_the_trees_copy() -> None:
    rig = new_rig(12)
    first, second = (rig.compute(rig.lease(session, prompt(5))) for session in (1, 2))
    rig.commit(first)
    assert rig.commit(second) == 5
    rig.release(first)
    fill(rig, 3)
    assert rig.lookup(prompt(5) + END) == 20
    rig.close(3)
    rig.release(second)
    assert rig.cache.books().free == 7


# ---- B3: lookups that pin -----------------------------------------------------------------


def test_b3_i_lookups_do_not_pin() -> None:
    rig = new_rig(16)
    rig.cache_prompt(1, prompt(8))
    for _ in range(10_000):
        assert rig.cache.lookup(NAMESPACE, int32(prompt(8) + END)).cached_tokens == 32
    rig.cache_prompt(1, prompt(16, 1_000))
    assert rig.lookup(prompt(8) + END) == 0 and rig.lookup(prompt(16, 1_000) + END) == 64


def test_b3_ii_a_lease_that_is_hardly_used_leaves_nothing() -> None:
    rig = new_rig(16)
    rig.cache_prompt(1, prompt(8))
    lease = rig.lease(1, prompt(8) + END)
    assert rig.cache.books().leased == 9
    rig.release(lease)
    assert rig.cache.books().leased == 0 and rig.cache.books().cached == 8


def test_b3_iii_iv_each_lease_keeps_its_own_lock() -> None:
    rig = new_rig(16)
    rig.cache_prompt(1, prompt(8))
    rig.lookup(prompt(8) + END)
    rig.lookup(prompt(8) + END)
    a, b = rig.lease(1, prompt(8) + END), rig.lease(2, prompt(8) + END)
    rig.release(a)
    fill(rig, 3)
    assert rig.lookup(prompt(8) + END) == 32, "b's lock survives"
    rig.close(3)
    rig.release(b)
    assert rig.cache.books().leased == 0
    assert_all_free(rig)


# ---- B4: allocation when nothing can be evicted -------------------------------------------


def test_b4_i_exhausted_within_the_deadline_and_served_after_a_release() -> None:
    rig = new_rig(16)
    rig.cache_prompt(1, prompt(4))
    holders = fill(rig, 1)
    waiting = rig.acquire(2, [1], capacity_wait_ms=500)
    assert isinstance(waiting, WaitingAcquire)
    rig.advance(499)
    assert (2, waiting.lease_id) not in rig.answers
    assert rig.lookup([5_000, 1]) == 0, "look-ups go on"
    rig.advance(1)
    error = rig.answers[2, waiting.lease_id]
    assert isinstance(error, Exhausted) and "1 " in str(error) and "16" in str(error)
    again = rig.acquire(2, [1], capacity_wait_ms=500)
    assert isinstance(again, WaitingAcquire)
    rig.release(holders[0])
    assert isinstance(rig.answers[2, again.lease_id], ModelLease)


def test_b4_i_nothing_to_poll_for_without_waiters() -> None:
    rig = new_rig(4)
    holders = fill(rig, 1)
    assert rig.cache.next_deadline_ms() is None
    with pytest.raises(Exhausted):
        rig.acquire(2, [1])
    assert rig.cache.next_deadline_ms() is None
    rig.release(holders[0])
    assert rig.lease(2, [1]).table


def test_b4_ii_a_failed_request_takes_nothing() -> None:
    rig = new_rig(16)
    holder = rig.lease(1, prompt(6))
    with pytest.raises(Exhausted) as caught:
        rig.acquire(2, prompt(12, 1_000))
    assert "12" in str(caught.value) and "10" in str(caught.value)
    assert rig.cache.books() == Books(6, 0, 0, 0, 0, 10, 16)
    assert len(rig.lease(2, prompt(10, 1_000)).table) == 10
    rig.release(holder)


@pytest.mark.parametrize("failing", range(1, 7))
def test_b4_iii_failing_at_the_kth_block_changes_nothing(failing: int) -> None:
    rig = new_rig(8)
    rig.cache_prompt(3, prompt(2))
    reader = rig.lease(3, prompt(2) + END)
    rig.lease(1, prompt(6 - failing, 2_000)) if failing < 6 else None
    free = rig.cache.books().free
    assert free == failing - 1
    parent = reader
    for attempt in (
        lambda: rig.acquire(2, prompt(6, 1_000)),
        lambda: rig.extend(parent, 6),
        lambda: rig.fork(parent, 6, 9),
    ):
        rig.compute(parent)
        with pytest.raises(Exhausted):
            attempt()
        assert rig.cache.books().free == free
    assert rig.lookup(prompt(2) + END) == 8


def test_b4_iv_a_failed_extend_keeps_what_the_lease_has() -> None:
    rig = new_rig(16)
    lease = rig.compute(rig.lease(1, prompt(5)))
    holders = fill(rig, 2)
    with pytest.raises(Exhausted):
        rig.extend(lease, 1)
    assert len(lease.table) == 5
    rig.release(holders[0])
    rig.extend(lease, 1)
    assert len(lease.table) == 6
    assert rig.commit(lease) == 0


@pytest.mark.parametrize("wait_ms", [0, 500])
def test_b4_v_what_can_never_fit_is_refused_at_once(wait_ms: int) -> None:
    rig = new_rig(16)
    with pytest.raises(TooLarge) as caught:
        rig.acquire(1, prompt(17), capacity_wait_ms=wait_ms)
    assert "17" in str(caught.value) and "16" in str(caught.value)
    assert len(rig.lease(1, prompt(16)).table) == 16


# ---- B5: copy-on-write after fork ---------------------------------------------------------


def forked(rig: Rig) -> list[ModelLease]:
    """A parent of 2 full blocks + 5 tokens with 3 children, copies outstanding."""
    parent = rig.compute(rig.lease(1, list(range(21))))
    rig.commit(parent, 16)
    return [parent, *rig.fork(parent, 3, 21)]


def write_next(rig: Rig, lease: ModelLease, token: int) -> None:
    """The worker decodes one token."""
    lease.append(token)
    rig.compute(lease)
    rig.settle()


def test_b5_full_blocks_are_shared_and_the_tail_is_private() -> None:
    rig = new_rig(16, 8)
    family = forked(rig)
    rig.finish_copies()
    assert len({tuple(lease.table[:2]) for lease in family}) == 1
    assert len({lease.table[2] for lease in family}) == 4
    for token, lease in enumerate(family, 100):
        write_next(rig, lease, token)
    heads = {tuple(rig.kv[lease.table[2]][:5]) for lease in family}
    assert len(heads) == 1, "the first five slots are the parent's"
    assert rig.cache.counters.copied_blocks == 3
    assert rig.cache.books().leased == 6


def test_b5_the_parent_goes_while_the_copy_is_delayed() -> None:
    rig = new_rig(16, 8)
    parent, *children = forked(rig)
    rig.release(parent)
    for lease in fill(rig, 2):
        rig.compute(lease)
    rig.settle()
    rig.finish_copies()
    for token, child in enumerate(children, 100):
        assert child.computed == 21
        write_next(rig, child, token)


@pytest.mark.parametrize("delayed", [False, True])
def test_b5_released_in_all_24_orders(delayed: bool) -> None:
    for order in itertools.permutations(range(4)):
        rig = new_rig(16, 8)
        family = forked(rig)
        if not delayed:
            rig.finish_copies()
        for index in order:
            rig.release(family[index])
        rig.finish_copies()
        books = rig.cache.books()
        assert (books.free, books.cached) == (14, 2)


def test_b5_a_fork_at_a_block_boundary_copies_nothing() -> None:
    rig = new_rig(16, 8)
    parent = rig.compute(rig.lease(1, list(range(16))))
    rig.commit(parent)
    children = rig.fork(parent, 3, 16)
    assert rig.cache.counters.copied_blocks == 0 and rig.cache.books().leased == 2
    for lease in (parent, *children):
        rig.release(lease)


def test_b5_children_keep_a_private_duplicate_of_the_parent() -> None:
    rig = new_rig(16, 8)
    winner, parent = (rig.compute(rig.lease(session, list(range(21)))) for session in (1, 2))
    rig.commit(winner, 16)
    assert rig.commit(parent, 16) == 2
    children = rig.fork(parent, 2, 21)
    rig.release(parent)
    rig.finish_copies()
    fill(rig, 3)
    rig.settle()
    for lease in (*children, winner):
        rig.release(lease)
    rig.close(3)
    assert rig.cache.books().free == 14


# ---- B6: eviction takes the tail first ----------------------------------------------------


def commit_in_chunks(rig: Rig, tokens: list[int], chunk: int) -> None:
    """Chunked prefill: each chunk is committed as soon as it is computed."""
    lease = rig.lease(1, tokens)
    for upto in range(chunk, len(tokens) + 1, chunk):
        if upto > lease.committed:
            rig.compute(lease, upto)
            rig.commit(lease, upto)
    rig.release(lease)


@pytest.mark.parametrize("chunk", [4, 8, 16, 32])
def test_b6_the_tail_goes_first(chunk: int) -> None:
    rig = new_rig(8)
    commit_in_chunks(rig, prompt(8), chunk)
    assert rig.lookup(prompt(8) + END) == 32
    rig.cache_prompt(2, prompt(3, 1_000))
    assert rig.lookup(prompt(8) + END) == 20
    assert rig.lookup(prompt(3, 1_000) + END) == 12


@pytest.mark.parametrize("chunk", [4, 8, 16])
def test_b6_what_two_prefixes_share_goes_last(chunk: int) -> None:
    rig = new_rig(12)
    first, second = prompt(8), prompt(4) + prompt(4, 500)
    commit_in_chunks(rig, first, chunk)
    commit_in_chunks(rig, second, chunk)
    for taken, left in ((3, (20, 32)), (6, (16, 24)), (9, (12, 12))):
        lease = rig.lease(2, prompt(taken, 1_000))
        assert (rig.lookup(first + END), rig.lookup(second + END)) == left
        rig.release(lease)


def test_b6_a_touched_prefix_outlives_an_older_one() -> None:
    rig = new_rig(16)
    rig.cache_prompt(1, prompt(8))
    rig.cache_prompt(1, prompt(8, 500))
    rig.release(rig.lease(1, prompt(8) + END))
    rig.cache_prompt(2, prompt(4, 1_000))
    assert rig.lookup(prompt(8, 500) + END) == 16
    assert rig.lookup(prompt(8) + END) == 32
