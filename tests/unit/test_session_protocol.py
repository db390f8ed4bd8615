"""Steps and replies: exactly once, whatever is cut, held, waited for or acknowledged late."""

import random

import pytest

from radixkv.server.errors import ProtocolError
from radixkv.v1 import session_pb2 as pb
from radixkv.wire import limits
from tests.naive_model import ints
from tests.session_rig import (
    Peer,
    SessionRig,
    acquire,
    code,
    commit,
    extend,
    fork,
    refill,
    release,
)


@pytest.fixture
def rig():
    return SessionRig()


def codes(replies):
    return [code(reply) for reply in replies]


# ---- Steps ---------------------------------------------------------------------------------


def test_each_operation_has_its_own_reply_in_order(rig):
    peer = rig.open()
    replies = peer.step(acquire(7, range(9)), commit(7, 9), release(7), release(7))
    assert [reply.op_id for reply in replies] == [1, 2, 3, 4]
    assert codes(replies) == ["OK", "OK", "OK", "NOT_FOUND"]
    assert replies[0].acquire.lease_id == 7 and len(ints(replies[0].acquire.block_table)) == 3
    assert replies[1].commit.published_tokens == 8
    assert replies[2].release.cached_tokens == 8
    assert peer.told_step == 1


def test_a_lease_of_an_earlier_operation_of_the_same_step_can_be_named(rig):
    peer = rig.open()
    replies = peer.step(acquire(1, range(8)), commit(1, 8), fork(1, [2, 3], 8), release(3))
    assert codes(replies) == ["OK"] * 4
    assert rig.cache.session_use(peer.session_id).num_leases == 2


def test_a_step_received_twice_is_carried_out_once(rig):
    peer = rig.open()
    step = peer.make_step(acquire(1, range(5)))
    peer.protocol.receive_step(step)
    peer.protocol.receive_step(step)
    rig.settle()
    assert len(peer.read()) == 1
    peer.protocol.receive_step(step)
    rig.settle()
    assert peer.read() == []
    assert rig.cache.num_leases == 1


@pytest.mark.parametrize("number", [0, 2, 2**64 - 1])
def test_a_gap_breaks_the_protocol(rig, number):
    peer = rig.open()
    with pytest.raises(ProtocolError, match=f"Step {number} follows Step 0"):
        peer.protocol.receive_step(pb.Step(number=number))


def test_too_many_operations_break_the_protocol(rig):
    peer = rig.open()
    step = pb.Step(number=1, ops=[pb.Op()] * (limits.MAX_OPS_PER_STEP + 1))
    with pytest.raises(ProtocolError, match="at most 1024"):
        peer.protocol.receive_step(step)


def test_acknowledging_what_was_not_sent_breaks_the_protocol(rig):
    peer = rig.open()
    peer.step(acquire(1, range(5)))
    with pytest.raises(ProtocolError, match="only 1 replies"):
        peer.protocol.receive_step(pb.Step(number=2, replies_seen=2))


def test_eight_steps_may_be_unacknowledged(rig):
    peer = rig.open()
    for _ in range(limits.MAX_UNACKNOWLEDGED_STEPS):
        peer.protocol.receive_step(peer.make_step(refill(1)))
        rig.settle()
    with pytest.raises(ProtocolError, match="more than 8 Steps"):
        peer.protocol.receive_step(peer.make_step(refill(1)))
    peer.steps.pop()
    peer.read()
    assert len(peer.step(refill(1))) == 1


def test_steps_whose_operations_wait_do_not_fill_the_window(rig):
    peer = rig.open()
    peer.step(acquire(1, range(32 * 4)))
    for lease_id in range(2, 22):
        assert peer.step(acquire(lease_id, range(100), capacity_wait_ms=1000)) == []
        assert peer.told_step == lease_id, "the client hears that the Step has arrived"
    rig.now_ms = 1000
    rig.settle()
    assert codes(peer.read()) == ["EXHAUSTED"] * 20


# ---- cuts ----------------------------------------------------------------------------------


def script(peer: Peer) -> list[list[pb.Op]]:
    """Steps with immediate, failing, waiting and copying operations."""
    return [
        [acquire(1, range(6)), commit(1, 6)],
        [acquire(2, [*range(5), 99, 98], partial_tail=True), extend(2, 1)],
        [acquire(3, range(200, 300), capacity_wait_ms=500), commit(3, 100), release(9)],
        [fork(1, [4, 5], 6, ints(peer.replies[0].acquire.block_table)[1] if peer.replies else 2)],
        [release(4), refill(2), release(1)],
        [release(3), release(5), release(2)],
    ]


@pytest.mark.parametrize("seed", range(60))
def test_cuts_at_any_point_change_no_answer(seed):
    """The same script with and without cuts ends in the same replies."""
    plain = run_script(random.Random(seed), cuts=0.0)
    cut = run_script(random.Random(seed), cuts=0.5)
    assert plain == cut
    assert len(plain) == 14


def run_script(chance: random.Random, cuts: float) -> list[tuple[int, str]]:
    rig = SessionRig(num_blocks=24)
    peer = rig.open()
    cutting = random.Random(chance.random())
    for number in range(6):
        step = peer.make_step(*script(peer)[number])
        if cutting.random() >= cuts / 2:  # else the Step is lost with the connection
            peer.protocol.receive_step(step)
        if cutting.random() < cuts:
            peer.cut()
        if peer.protocol.last_step < step.number:
            peer.cut()
        rig.settle()
        if cutting.random() < cuts:
            peer.cut()
        if chance.random() < 0.5:
            rig.finish_copies()
        if cutting.random() < cuts:
            peer.cut()
        peer.read()
    rig.finish_copies()
    peer.cut()
    peer.read()
    assert not rig.cache.num_leases
    return sorted((reply.op_id, code(reply)) for reply in peer.replies)


def test_resume_repeats_exactly_the_replies_not_seen(rig):
    """Every point of resuming, also inside a message that holds several replies."""
    peer = rig.open()
    for _ in range(4):
        peer.protocol.receive_step(peer.make_step(refill(1), refill(1)))
        rig.settle()
    for seen in range(9):
        messages = peer.protocol.resume(seen)
        numbers = [
            reply.number
            for data in messages
            for reply in pb.ServerMessage.FromString(data).replies.replies
        ]
        assert numbers == list(range(seen + 1, 9))


def test_resume_from_forgotten_or_future_replies_is_refused(rig):
    peer = rig.open()
    peer.step(refill(1), refill(1))
    peer.step(refill(1))
    for seen in (0, 1, 4):
        with pytest.raises(Exception, match="replies_seen"):
            peer.protocol.check_resume(seen)
    for seen in (2, 3):
        peer.protocol.check_resume(seen)


def test_a_reply_that_becomes_ready_while_disconnected_is_kept(rig):
    peer = rig.open()
    other = rig.open()
    other.step(acquire(1, range(32 * 4)))
    peer.step(acquire(1, range(8), capacity_wait_ms=1000))
    other.step(release(1))
    peer.wire = []
    peer.cut()
    assert [reply.op_id for reply in peer.replies] == [1]


# ---- waiting leases ------------------------------------------------------------------------


@pytest.fixture
def full(rig):
    """A second session that holds the whole pool under lease 1."""
    other = rig.open()
    assert codes(other.step(acquire(1, range(1000, 1000 + 32 * 4)))) == ["OK"]
    return other


def test_operations_on_a_waiting_lease_start_once_it_is_answered(rig, full):
    peer = rig.open()
    assert peer.step(acquire(1, range(6), capacity_wait_ms=1000)) == []
    assert peer.step(commit(1, 4), extend(1, 1), fork(1, [2], 4)) == []
    assert codes(peer.step(refill(1), release(8))) == ["EXHAUSTED", "NOT_FOUND"], "not held"
    full.step(release(1))
    replies = peer.read()
    assert [reply.op_id for reply in replies] == [1, 2, 3, 4]
    assert codes(replies) == ["OK"] * 4


def test_operations_on_a_waiting_lease_fail_with_its_status(rig, full):
    peer = rig.open()
    peer.step(acquire(1, range(6), capacity_wait_ms=1000), commit(1, 4), extend(1, 1))
    rig.now_ms = 1000
    rig.settle()
    replies = peer.read()
    assert codes(replies) == ["EXHAUSTED"] * 3
    assert "32 " in replies[0].status.message or "0 free" in replies[0].status.message
    assert replies[1].status.message.startswith("its Acquire failed")


def test_release_cancels_a_waiting_acquire(rig, full):
    peer = rig.open()
    peer.step(acquire(1, range(6), capacity_wait_ms=1000), commit(1, 4))
    replies = peer.step(release(1))
    assert {r.op_id: code(r) for r in replies} == {1: "CANCELLED", 2: "CANCELLED", 3: "OK"}
    assert rig.cache.num_waiting == 0
    assert codes(peer.step(commit(1, 4))) == ["NOT_FOUND"]


def test_an_id_can_be_used_again_right_after_its_waiting_acquire_was_cancelled(rig, full):
    peer = rig.open()
    wait = {"capacity_wait_ms": 1000}
    replies = peer.step(acquire(1, range(6), **wait), release(1), acquire(1, range(5), **wait))
    assert {r.op_id: code(r) for r in replies} == {1: "CANCELLED", 2: "OK"}
    full.step(release(1))
    assert [(r.op_id, code(r)) for r in peer.read()] == [(3, "OK")]


def test_a_waiting_lease_id_is_in_use(rig, full):
    peer = rig.open()
    peer.step(acquire(1, range(6), capacity_wait_ms=1000), acquire(2, range(3), wait_ms=5))
    replies = peer.step(acquire(1, range(6)))
    assert codes(replies) == ["ALREADY_EXISTS"]


def test_close_cancels_without_answering(rig, full):
    peer = rig.open()
    peer.step(acquire(1, range(6), capacity_wait_ms=1000), commit(1, 4))
    peer.protocol.close()
    rig.cache.close_session(peer.session_id, 0)
    rig.settle()
    assert peer.read() == [] and rig.cache.num_waiting == 0


def test_draining_refuses_new_and_waiting_acquires_and_nothing_else(rig, full):
    peer = rig.open()
    peer.step(acquire(1, range(6), capacity_wait_ms=1000), commit(1, 4))
    for each in (peer, full):
        each.operations.accepting = False
        each.protocol.cancel_waiting()
    rig.settle()
    assert codes(peer.read()) == ["UNAVAILABLE", "UNAVAILABLE"]
    assert codes(peer.step(acquire(2, range(6)))) == ["UNAVAILABLE"]
    assert codes(full.step(commit(1, 8), fork(1, [2], 8), release(2), release(1))) == ["OK"] * 4


# ---- copies --------------------------------------------------------------------------------


def forked(rig) -> Peer:
    """Lease 1 with one committed block and a tail, forked into 2 and 3; copies run."""
    peer = rig.open()
    table = ints(peer.step(acquire(1, range(6)), commit(1, 4))[0].acquire.block_table)
    assert peer.step(fork(1, [2, 3], 6, table[1])) == []
    return peer


def test_a_fork_is_answered_after_its_copies_and_holds_parent_and_children(rig):
    peer = forked(rig)
    assert peer.step(extend(1, 1), release(2), extend(3, 1)) == []
    assert codes(peer.step(acquire(9, range(50, 55)))) == ["OK"], "other leases go on"
    rig.finish_copies()
    replies = peer.read()
    assert [reply.op_id for reply in replies] == [3, 4, 5, 6]
    assert codes(replies) == ["OK"] * 4
    assert len(ints(replies[0].fork.tail_blocks)) == 2


def test_a_failed_copy_leaves_no_children(rig):
    peer = forked(rig)
    peer.step(release(2))
    rig.finish_copies(ok=False)
    assert codes(peer.read()) == ["INTERNAL", "NOT_FOUND"]
    assert rig.cache.session_use(peer.session_id).lease_ids == (1,)


def test_a_partial_tail_counts_once_it_is_copied(rig):
    peer = rig.open()
    peer.step(acquire(1, range(8)), commit(1, 8))
    tokens = [*range(6), 77, 78]
    assert peer.step(acquire(2, tokens, partial_tail=True), extend(2, 1)) == []
    rig.finish_copies()
    replies = peer.read()
    assert replies[0].acquire.cached_tokens == 6 and codes(replies) == ["OK", "OK"]


def test_a_partial_tail_whose_copy_fails_is_not_counted(rig):
    peer = rig.open()
    peer.step(acquire(1, range(8)), commit(1, 8))
    peer.step(acquire(2, [*range(6), 77, 78], partial_tail=True))
    rig.finish_copies(ok=False)
    assert peer.read()[0].acquire.cached_tokens == 4


def test_a_lease_that_is_not_answered_yet_cannot_become_a_child(rig):
    peer = forked(rig)
    peer.step(acquire(8, range(100, 104)), commit(8, 4))
    assert codes(peer.step(fork(8, [3], 4))) == ["ALREADY_EXISTS"]


# ---- bounds --------------------------------------------------------------------------------


def test_held_operations_are_bounded(rig, full, monkeypatch):
    monkeypatch.setattr("radixkv.server.session.MAX_HELD_OPS", 5)
    peer = rig.open()
    peer.step(acquire(1, range(6), capacity_wait_ms=1000))
    replies = peer.step(*[extend(1, 1) for _ in range(8)])
    assert codes(replies) == ["EXHAUSTED"] * 3
    full.step(release(1))
    assert codes(peer.read()) == ["OK"] * 6


def test_prompts_of_waiting_acquires_are_bounded(rig, full, monkeypatch):
    monkeypatch.setattr("radixkv.server.session.MAX_HELD_BYTES", 1000)
    peer = rig.open()
    replies = peer.step(*[acquire(i, range(100), capacity_wait_ms=1000) for i in range(1, 5)])
    assert codes(replies) == ["EXHAUSTED"] * 2
    peer.step(release(1))
    assert codes(peer.step(acquire(9, range(100), capacity_wait_ms=1000))) == []


def test_unacknowledged_replies_are_bounded(rig, monkeypatch):
    monkeypatch.setattr("radixkv.server.session.MAX_KEPT_BYTES", 300)
    monkeypatch.setattr("radixkv.server.replies.MAX_BATCH_BYTES", 100)
    peer = rig.open()
    replies = peer.step(*[acquire(i, range(40)) for i in range(1, 11)], release(1))
    assert {"OK", "EXHAUSTED"} == set(codes(replies[:-1])) and code(replies[-1]) == "OK"
    assert codes(peer.step(acquire(20, range(8)))) == ["OK"], "once acknowledged it goes on"


def test_large_batches_are_split_and_resumable(rig, monkeypatch):
    monkeypatch.setattr("radixkv.server.replies.MAX_BATCH_BYTES", 16)
    peer = rig.open()
    peer.protocol.receive_step(peer.make_step(*[acquire(i, range(10)) for i in range(1, 9)]))
    rig.settle()
    assert len(peer.wire) == 5, "four with two replies each, and that the Step has arrived"
    first = pb.ServerMessage.FromString(peer.wire[0]).replies
    assert first.last_step == 0, "a Step counts as received once all of it was carried out"
    peer.cut()
    assert codes(peer.read()) == [] and len(peer.replies) == 8
