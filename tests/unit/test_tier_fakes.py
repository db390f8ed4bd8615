"""The tier rig's own parts: fakes that let a fault pass would prove nothing."""

from dataclasses import replace

import pytest

from radixkv.core.content import ContentTable
from radixkv.core.digest import block_digest, root_digest
from radixkv.core.results import ContentRange
from radixkv.core.tier_ops import BlockIdentity, Cancel, Erase, Outcome, Probe, Transfer
from tests.naive_model import int32
from tests.tier_places import CPU, GPU, NVME, REMOTE, Places
from tests.tier_traffic import Traffic
from tests.tier_truth import KnownBlock, Truth

SPACE = b"space"
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]


def identity(block: KnownBlock, **other: object) -> BlockIdentity:
    """What the core should say of a block."""
    found = BlockIdentity(block.digest, block.parent_digest, block.tokens, block.pieces)
    return found._replace(**other)


class Bench:
    """Two blocks of a sequence, their bytes on gpu 1 and 2, and somebody to carry things out."""

    def __init__(self, verify_all: bool = True) -> None:
        self.truth = Truth(4)
        self.chain = self.truth.chain(SPACE, TOKENS)
        self.places = Places(8, 4, verify_all)
        for number, block in enumerate(self.chain, 1):
            self.places.gpu[number][:] = block.content
        self.traffic = Traffic({GPU: 8, CPU: 8, NVME: 8}, True, self.truth)
        self.next_id = 1

    def op(self, source: int, target: int, sources: tuple = (), targets: tuple = ()) -> Transfer:
        """A transfer of the first blocks of the sequence."""
        count = max(len(sources), len(targets))
        names = tuple(map(identity, self.chain[:count])) if {source, target} - {GPU, CPU} else ()
        self.next_id += 1
        return Transfer(self.next_id, source, target, sources, targets, SPACE, names)

    def copy(self, *args: object) -> list[Outcome]:
        """Carry a transfer out."""
        op = self.op(*args)
        count = max(len(op.source_ids), len(op.target_ids))
        return [self.places.copy(op, index, now_ms=0) for index in range(count)]


def nowhere(block: KnownBlock) -> bool:
    """The remote offers nothing."""
    return False


# ---- truth --------------------------------------------------------------------------------


def test_digests_are_those_of_the_core() -> None:
    content = ContentRange(2, 4, b"cat")
    chain = Truth(4).chain(SPACE, [1, 2, 9, 9, 9, 9, 3, 4], (content,))
    table = ContentTable()
    tokens = table.resolve(int32([1, 2, 9, 9, 9, 9, 3, 4]), (content,), frozenset(), True).tokens
    tokens = table.canonical(tokens)
    digest = root_digest(SPACE)
    for index, block in enumerate(chain):
        assert block.parent_digest == digest
        digest = block_digest(digest, tokens[16 * index : 16 * index + 16])
        assert block.digest == digest
    assert [tuple(piece) for block in chain for piece in block.pieces] == [
        (b"cat", 4, 0, 2, 2), (b"cat", 4, 2, 0, 2),
    ]  # fmt: skip


def test_equal_prompts_are_the_same_blocks_and_others_are_not() -> None:
    truth = Truth(4)
    first, second = truth.chain(SPACE, TOKENS)
    assert truth.chain(SPACE, [*TOKENS, 1]) == [first, second]
    assert truth.chain(SPACE, [0, *TOKENS[1:]])[1] is not second
    assert truth.chain(b"other", TOKENS)[0] is not first
    assert first.subtree() == [first, second]


def test_what_lapses_takes_along_what_follows() -> None:
    truth = Truth(4)
    first, second = truth.chain(SPACE, TOKENS)
    truth.publish([first], (), (10, 10))
    truth.publish([second], (), None)
    assert truth.lapse(9, nowhere) == [] and truth.may_be_found(second)
    assert truth.lapse(10, nowhere) == [first, second]
    assert not truth.may_be_found(second) and truth.may_have_record(second)


def test_marks_of_several_publications_are_the_laxer_ones() -> None:
    truth = Truth(4)
    first, _ = truth.chain(SPACE, TOKENS)
    truth.publish([first], ("red", "blue"), (8, 10))
    truth.publish([first], ("blue",), (15, 20))
    assert first.tags == {"blue"} and first.any_tags == {"red", "blue"}
    assert first.expires_ms == 20 and first.sure_until_ms == 8
    truth.publish([first], (), None)
    assert truth.lapse(1_000, nowhere) == [] and truth.scope(SPACE, (), "red") == []


def test_records_are_allowed_until_an_invalidation_has_ended() -> None:
    truth = Truth(4)
    first, second = truth.chain(SPACE, TOKENS)
    truth.publish([first, second], ("red",), None)
    gone = truth.scope(None, (), "red")
    truth.kill(gone, ticket=1)
    assert set(gone) == {first, second} and truth.may_have_record(first)
    truth.ticket_ended(1, failed_erasures=0)
    assert not truth.may_have_record(first)
    with pytest.raises(AssertionError, match="nvme"):
        truth.restart({first.digest: [identity(first)]}, set())


# ---- places -------------------------------------------------------------------------------


def test_bytes_survive_every_hop() -> None:
    bench = Bench()
    done = [Outcome.DONE] * 2
    assert bench.copy(GPU, CPU, (1, 2), (3, 4)) == done
    assert bench.copy(CPU, NVME, (3, 4), (5, 6)) == done
    assert bench.copy(CPU, REMOTE, (3, 4)) == done
    assert bench.copy(NVME, GPU, (5, 6), (7, 8)) == done
    assert bench.copy(REMOTE, GPU, (), (3, 4)) == done
    for block in (3, 4, 7, 8):
        assert tuple(bench.places.gpu[block]) == bench.chain[(block - 1) % 2].content
    assert [found.slot for found in bench.places.scan()] == [5, 6]


@pytest.mark.parametrize("place", [CPU, NVME, REMOTE])
def test_a_flipped_bit_is_bad_and_the_target_stays(place: int) -> None:
    bench = Bench()
    source = () if place is REMOTE else (3,)
    bench.copy(GPU, place, (1,), source)
    bench.places.flip(place, bench.chain[0].digest if place is REMOTE else 3)
    before = list(bench.places.gpu[5])
    assert bench.copy(place, GPU, source, (5,)) == [Outcome.BAD]
    assert bench.places.gpu[5] == before


def test_only_damage_may_make_a_read_bad() -> None:
    bench = Bench()
    bench.copy(GPU, NVME, (1,), (3,))
    wrong = bench.op(NVME, GPU, (3,), (5,))._replace(identities=(identity(bench.chain[1]),))
    with pytest.raises(AssertionError, match="slot 3"):
        bench.places.copy(wrong, 0, now_ms=0)
    with pytest.raises(AssertionError, match="slot 4"):
        bench.copy(NVME, GPU, (4,), (5,))
    bench.places.tear(3)
    assert bench.copy(NVME, GPU, (3,), (5,)) == [Outcome.BAD]
    assert bench.places.scan() == []


def test_cpu_is_verified_only_if_asked_for_but_always_on_its_way_down() -> None:
    bench = Bench(verify_all=False)
    bench.copy(GPU, CPU, (1,), (3,))
    bench.places.flip(CPU, 3)
    assert bench.copy(CPU, NVME, (3,), (4,)) == [Outcome.BAD]
    assert bench.copy(CPU, GPU, (3,), (5,)) == [Outcome.DONE]
    assert tuple(bench.places.gpu[5]) != bench.chain[0].content


def test_blocks_that_were_never_computed_are_not_copied_out() -> None:
    bench = Bench()
    with pytest.raises(AssertionError, match="never computed"):
        bench.copy(GPU, CPU, (3,), (3,))


def test_remote_objects_expire_by_themselves() -> None:
    bench = Bench()
    op = bench.op(GPU, REMOTE, (1,))
    op = op._replace(identities=(identity(bench.chain[0], expires_ms=10),))
    bench.places.copy(op, 0, now_ms=0)
    read = bench.op(REMOTE, GPU, (), (5,))
    assert bench.places.copy(read, 0, now_ms=9) is Outcome.DONE
    assert bench.places.copy(read, 0, now_ms=10) is Outcome.BAD


# ---- traffic ------------------------------------------------------------------------------


def test_readers_may_share_and_writers_may_not() -> None:
    bench = Bench()
    first = bench.op(GPU, CPU, (1, 2), (1, 2))
    bench.traffic.begin(first)
    bench.traffic.begin(bench.op(GPU, NVME, (1, 2), (1, 2)))
    for wrong in (
        bench.op(GPU, CPU, (1,), (2,)),
        bench.op(CPU, NVME, (1,), (4,)),
        bench.op(NVME, GPU, (4,), (1,)),
    ):
        with pytest.raises(AssertionError, match="being"):
            bench.traffic.begin(wrong)
    with pytest.raises(AssertionError, match="being written"):
        bench.traffic.begin(Erase(90, NVME, (2,), ()))
    bench.traffic.end(first)
    bench.traffic.begin(bench.op(CPU, GPU, (1,), (5,)))
    with pytest.raises(AssertionError, match="target"):
        bench.traffic.check_unused((5,), "given away")


def test_malformed_operations_are_told() -> None:
    bench = Bench()
    good = bench.op(NVME, GPU, (1, 2), (1, 2))
    wrong_names = good.identities[::-1], good.identities[:1], ()
    for wrong in (
        *(good._replace(identities=names) for names in wrong_names),
        good._replace(target_ids=(1, 1)),
        good._replace(source_ids=(0, 1)),
        good._replace(target_ids=(1, 9)),
        good._replace(target=CPU),
        good._replace(namespace=b"other"),
        good._replace(source=REMOTE),
    ):
        with pytest.raises(AssertionError):
            bench.traffic.begin(wrong._replace(transfer_id=wrong.transfer_id + 100))
        bench = Bench()


def test_ids_and_cancellations_are_of_one_operation() -> None:
    bench = Bench()
    op = bench.op(GPU, CPU, (1,), (1,))
    with pytest.raises(AssertionError, match="unfinished"):
        bench.traffic.begin(Cancel(op.transfer_id))
    bench.traffic.begin(op)
    bench.traffic.begin(Cancel(op.transfer_id))
    bench.traffic.end(op)
    assert not len(bench.traffic) and not bench.traffic.cancelled
    with pytest.raises(AssertionError, match="used before"):
        bench.traffic.begin(op)
    with pytest.raises(AssertionError, match="nobody ever asked"):
        bench.traffic.begin(Probe(70, (bytes(16),)))


def test_a_record_is_a_value() -> None:
    bench = Bench()
    bench.copy(GPU, NVME, (1,), (3,))
    before = bench.places.nvme[3]
    bench.places.flip(NVME, 3)
    assert bench.places.nvme[3] != before == replace(before)
