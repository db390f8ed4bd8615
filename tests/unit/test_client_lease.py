"""What a lease believes and sends, with scripted replies."""

from array import array
from typing import Any

import pytest

from radixkv.v1 import session_pb2 as pb
from radixkv_client.connected import Connected
from radixkv_client.errors import (
    Exhausted,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
)
from radixkv_client.lease import LeaseState
from radixkv_client.protocol import Answer, Request, default_limits
from radixkv_client.tokens import token_bytes
from radixkv_client.values import AcquireOptions, ContentRange, Onboarding, Retention, Scope

B = 4


class Rig:
    """A session without a server: operations are inspected, replies are written by hand."""

    def __init__(self) -> None:
        limits = default_limits()
        limits.max_reserve_blocks = 16
        hello = pb.HelloReply(block_size=B, limits=limits)
        self.connected = Connected(b"t" * 16, hello, pool=None)  # type: ignore[arg-type]
        self._number = 0

    def lease(self, num_tokens: int = 10, cached: int = 4, table: tuple = (1, 2, 3)) -> LeaseState:
        lease = LeaseState(None, self.connected, num_tokens)
        answer, _ = self.send(lease.acquire_request(tokens(0, num_tokens), AcquireOptions()))
        self.reply(
            answer,
            acquire=pb.AcquireReply(
                lease_id=lease.id, block_table=ids(*table), cached_tokens=cached
            ),
        )
        return lease

    def send(self, request: Request) -> tuple[Answer, pb.Op]:
        (answer,) = self.connected.session.submit([request])
        self.connected.session.outgoing()
        self.connected.session._acknowledge(self.connected.session._last_step)
        return answer, request.op

    def reply(
        self, answer: Answer, error: str = "", code: int = pb.INVALID_ARGUMENT, **result: Any
    ) -> None:
        session = self.connected.session
        op_id = next(i for i, (_, a) in session._unanswered.items() if a is answer)
        self._number += 1
        reply = pb.Reply(number=self._number, op_id=op_id, **result)
        if error:
            reply.status.code, reply.status.message = code, error
        session.receive(pb.ServerMessage(replies=pb.Replies(replies=[reply])))


def tokens(start: int, end: int) -> bytes:
    return token_bytes(list(range(start, end)))


def ids(*blocks: int) -> bytes:
    return array("i", blocks).tobytes()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_acquire_carries_all_options_and_takes_in_the_reply(rig: Rig):
    lease = LeaseState(None, rig.connected, 3)
    options = AcquireOptions(
        scope=Scope("ada", "1", "tenant"),
        contents=[ContentRange(0, 2, b"img")],
        extra_blocks=2,
        partial_tail=True,
        capacity_wait_ms=1500,
        wait_ms=500,
        resumed=True,
    )
    assert options.max_wait_s == 2.0
    answer, op = rig.send(lease.acquire_request(tokens(0, 3), options))
    assert op.acquire.scope == pb.Scope(adapter="ada", adapter_version="1", salt="tenant")
    assert op.acquire.contents[0].content_id == b"img" and op.acquire.resumed
    assert not lease.live
    miss = pb.MissReason(kind=pb.MissReason.DIVERGES, at_token=1, nearest_tokens=ids(7))
    rig.reply(
        answer,
        acquire=pb.AcquireReply(
            lease_id=lease.id,
            block_table=ids(5, 6),
            cached_tokens=B + 1,
            being_computed=8,
            waited_ms=3,
            miss=miss,
        ),
    )
    assert answer.result() is lease and lease.live
    assert lease.block_table.tolist() == [5, 6] and lease.cached_tokens == B + 1
    assert lease.committed_tokens == B and lease.being_computed == 8 and lease.waited_ms == 3
    assert (lease.miss.kind, lease.miss.at_token) == ("DIVERGES", 1)
    assert lease.miss.nearest_tokens.tolist() == [7]


def test_tags_and_retention_are_sent_and_onboarding_is_taken_in(rig: Rig):
    lease = LeaseState(None, rig.connected, 3)
    assert lease.onboarding is None
    options = AcquireOptions(tags=["a", "b"], retention=Retention(-3, 60_000))
    answer, op = rig.send(lease.acquire_request(tokens(0, 3), options))
    assert list(op.acquire.tags) == ["a", "b"]
    assert op.acquire.retention == pb.Retention(priority=-3, ttl_ms=60_000)
    below = pb.Onboarding(reason=pb.Onboarding.TIMEOUT, cpu_tokens=4, left_tokens=8)
    rig.reply(answer, acquire=pb.AcquireReply(lease_id=lease.id, onboarding=below))
    assert lease.onboarding == Onboarding("TIMEOUT", 4, 0, 0, 8)
    plain = LeaseState(None, rig.connected, 3).acquire_request(tokens(0, 3), AcquireOptions())
    assert not plain.op.acquire.tags and not plain.op.acquire.HasField("retention")


@pytest.mark.parametrize("tags", ["tag", [1], ["a", None], ["\ud800"], ["a\nb"]])
def test_what_is_no_tag_is_refused(tags: Any):
    with pytest.raises(InvalidArgument, match="tags"):
        AcquireOptions(tags=tags)


@pytest.mark.parametrize("retention", [Retention("x"), Retention(1.5), Retention(ttl_ms=-1)])
def test_what_is_no_retention_is_refused(rig: Rig, retention: Any):
    with pytest.raises(InvalidArgument, match="Retention"):
        LeaseState(None, rig.connected, 3).acquire_request(
            tokens(0, 3), AcquireOptions(retention=retention)
        )


def test_commit_sends_only_what_the_lease_has_not_seen_and_names_drawn_blocks(rig: Rig):
    lease = rig.lease()
    rig.connected.reserve.add(array("i", [8, 9]))
    assert lease.draw(2).tolist() == [8, 9] == lease.block_table.tolist()[3:]
    answer, op = rig.send(lease.commit_request(16, tokens(10, 16)))
    assert op.commit.tokens == tokens(10, 16) and op.commit.blocks == ids(8, 9)
    assert lease.num_tokens == 16 and lease.committed_tokens == 4
    rig.reply(answer, commit=pb.CommitReply(published_tokens=16, duplicate_blocks=1))
    assert lease.committed_tokens == 16 and answer.result().duplicate_blocks == 1
    answer, op = rig.send(lease.commit_request(17, tokens(16, 17)))
    assert op.commit.blocks == b"" and op.commit.tokens == tokens(16, 17)


def test_a_refused_commit_leaves_the_lease_as_it_was(rig: Rig):
    lease = rig.lease()
    rig.connected.reserve.add(array("i", [8]))
    lease.draw(1)
    answer, _ = rig.send(lease.commit_request(12, tokens(10, 12)))
    rig.reply(answer, error="no")
    assert lease.num_tokens == 10
    _, op = rig.send(lease.commit_request(12, tokens(10, 12)))
    assert op.commit.blocks == ids(8) and op.commit.tokens == tokens(10, 12)


def test_a_refusal_under_later_operations_leaves_only_release(rig: Rig):
    lease = rig.lease()
    rig.connected.reserve.add(array("i", [8]))
    lease.draw(1)
    first, _ = rig.send(lease.commit_request(12, tokens(10, 12)))
    with pytest.raises(FailedPrecondition, match="unanswered"):
        lease.commit_request(13, tokens(12, 13))
    second, _ = rig.send(lease.commit_request(8, b""))
    rig.reply(first, error="no")
    rig.reply(second, commit=pb.CommitReply(published_tokens=8))
    with pytest.raises(FailedPrecondition, match="release the lease"):
        lease.commit_request(12, b"")
    answer, _ = rig.send(lease.release_request("aborted"))
    rig.reply(answer, release=pb.ReleaseReply(cached_tokens=8))
    assert rig.connected.reserve.num_free == 1 and rig.connected.reserve.num_drawn == 0


@pytest.mark.parametrize(("upto", "given"), [(11, 0), (-1, 0), (17, 6)])
def test_commit_beyond_the_known_tokens_is_refused_here(rig: Rig, upto: int, given: int):
    lease = rig.lease()
    with pytest.raises(InvalidArgument):
        lease.commit_request(upto, tokens(10, 10 + given))
    assert lease.num_tokens == 10


def test_extend_over_drawn_blocks_names_them_first(rig: Rig):
    lease = rig.lease()
    rig.connected.reserve.add(array("i", [8]))
    lease.draw(1)
    naming, extending = lease.extend_requests(2)
    first, op = rig.send(naming)
    assert op.commit.blocks == ids(8) and op.commit.upto == 4 and not op.commit.tokens
    second, op = rig.send(extending)
    assert op.extend.num_blocks == 2
    with pytest.raises(FailedPrecondition, match="unanswered"):
        lease.check_drawable()
    rig.reply(first, commit=pb.CommitReply(published_tokens=4))
    rig.reply(second, extend=pb.ExtendReply(blocks=ids(20, 21)))
    assert lease.block_table.tolist() == [1, 2, 3, 8, 20, 21]
    lease.check_drawable()


def test_trim_of_drawn_blocks_needs_no_server(rig: Rig):
    lease = rig.lease()
    rig.connected.reserve.add(array("i", [8, 9]))
    lease.draw(2)
    assert lease.trim_requests(16) == []
    assert lease.block_table.tolist() == [1, 2, 3, 8]
    assert rig.connected.reserve.num_free == 1
    assert lease.trim_requests(12) == [] and rig.connected.reserve.num_drawn == 0


def test_trim_of_known_tokens_asks_the_server_and_takes_whole_blocks_in(rig: Rig):
    lease = rig.lease()
    rig.connected.reserve.add(array("i", [8]))
    lease.draw(1)
    (request,) = lease.trim_requests(7)
    answer, op = rig.send(request)
    assert op.trim.upto == 7 and lease.num_tokens == 7
    rig.reply(answer, trim=pb.TrimReply(to_reserve=ids(3)))
    assert lease.block_table.tolist() == [1, 2] and rig.connected.reserve.num_free == 2
    with pytest.raises(FailedPrecondition, match="committed"):
        lease.trim_requests(3)


def test_fork_shares_full_blocks_and_gives_each_child_its_tail(rig: Rig):
    lease = rig.lease()
    answer, _ = rig.send(lease.commit_request(8, b""))
    rig.reply(answer, commit=pb.CommitReply(published_tokens=8))
    children = [LeaseState(None, rig.connected, 0) for _ in range(2)]
    answer, op = rig.send(lease.fork_request(children, 9))
    assert op.fork.tail_block == 3 and list(op.fork.child_ids) == [c.id for c in children]
    rig.reply(answer, fork=pb.ForkReply(tail_blocks=ids(30, 31)))
    assert [c.block_table.tolist() for c in children] == [[1, 2, 30], [1, 2, 31]]
    assert all((c.num_tokens, c.committed_tokens, c.live) == (9, 8, True) for c in children)
    assert lease.block_table.tolist() == [1, 2, 3]


def test_a_drawn_tail_named_by_fork_stays_the_parents(rig: Rig):
    lease = rig.lease(num_tokens=8, table=(1, 2))
    rig.connected.reserve.add(array("i", [8]))
    answer, _ = rig.send(lease.commit_request(8, b""))
    rig.reply(answer, commit=pb.CommitReply(published_tokens=8))
    lease.draw(1)
    child = LeaseState(None, rig.connected, 0)
    answer, op = rig.send(lease.fork_request([child], 10))
    assert op.fork.tail_block == 8
    rig.reply(answer, fork=pb.ForkReply(tail_blocks=ids(30)))
    assert child.num_tokens == 8
    _, op = rig.send(lease.commit_request(10, tokens(8, 10)))
    assert op.commit.blocks == ids(8) and op.commit.tokens == tokens(8, 10)


def test_a_refused_fork_ends_its_children(rig: Rig):
    lease = rig.lease()
    child = LeaseState(None, rig.connected, 0)
    answer, _ = rig.send(lease.fork_request([child], 4))
    rig.reply(answer, error="full", code=pb.EXHAUSTED)
    assert child.ended and lease.live
    with pytest.raises(Exhausted, match="full"):
        child.commit_request(0, b"")


def test_release_keeps_drawn_blocks_in_the_reserve_and_is_final(rig: Rig):
    lease = rig.lease()
    rig.connected.reserve.add(array("i", [8, 9]))
    lease.draw(2)
    answer, op = rig.send(lease.release_request("preempted", (8, b"")))
    assert op.release.reason == pb.PREEMPTED and op.release.commit.blocks == ids(8, 9)
    assert rig.connected.reserve.num_drawn == 0 and lease.ended
    rig.reply(answer, release=pb.ReleaseReply(cached_tokens=8))
    assert answer.result() == 8
    for build in (lambda: lease.release_request("finished"), lambda: lease.commit_request(8, b"")):
        with pytest.raises(FailedPrecondition, match="released"):
            build()
    with pytest.raises(InvalidArgument, match="conversation over"):
        rig.lease().release_request("bored")


def test_a_refused_release_leaves_the_lease_live(rig: Rig):
    lease = rig.lease()
    rig.connected.reserve.add(array("i", [8]))
    lease.draw(1)
    answer, _ = rig.send(lease.release_request("finished", (12, tokens(10, 12))))
    rig.reply(answer, error="bad tokens")
    assert lease.live and lease.block_table.tolist() == [1, 2, 3]
    assert (rig.connected.reserve.num_free, rig.connected.reserve.num_drawn) == (1, 0)
    rig.send(lease.release_request("aborted"))


def test_operations_may_follow_an_unanswered_acquire_except_a_fork_inside_a_block(rig: Rig):
    lease = LeaseState(None, rig.connected, 10)
    rig.send(lease.acquire_request(tokens(0, 10), AcquireOptions()))
    lease.commit_request(8, b"")
    lease.fork_request([LeaseState(None, rig.connected, 0)], 8)
    with pytest.raises(FailedPrecondition, match="Acquire is answered"):
        lease.fork_request([LeaseState(None, rig.connected, 0)], 9)
    lease.release_request("aborted")


def test_after_the_session_failed_every_operation_says_so(rig: Rig):
    lease = rig.lease()
    waiting = LeaseState(None, rig.connected, 1)
    rig.send(waiting.acquire_request(tokens(0, 1), AcquireOptions()))
    rig.connected.session.fail(Unavailable("server restarted"))
    for dead in (lease, waiting):
        assert not dead.live
        for build in (
            lambda dead=dead: dead.release_request("finished"),
            lambda dead=dead: dead.extend_requests(1),
            lambda dead=dead: dead.check_drawable(),
        ):
            with pytest.raises(Unavailable, match="server restarted"):
                build()


@pytest.mark.parametrize("value", [-1, 2**32, "3", 1.5])
def test_values_of_the_wrong_type_or_range_are_invalid_arguments(rig: Rig, value: Any):
    lease = rig.lease()
    with pytest.raises(InvalidArgument):
        lease.extend_requests(value)
    with pytest.raises(InvalidArgument):
        lease.acquire_request(b"", AcquireOptions(extra_blocks=value))


def test_pressure_returns_free_reserve_and_reports_the_rest(rig: Rig):
    rig.connected.reserve.add(array("i", [8, 9]))
    session = rig.connected.session
    session.receive(pb.ServerMessage(pressure=pb.Pressure(num_blocks=5)))
    (data,) = session.outgoing()
    (op,) = pb.ClientMessage.FromString(data).step.ops
    assert sorted(array("i", op.give_back.blocks)) == [8, 9]
    assert rig.connected.pressure == 3 and rig.connected.reserve.num_free == 0
