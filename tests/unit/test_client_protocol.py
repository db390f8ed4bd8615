"""The client's sans-I/O session, with scripted replies."""

import pytest

from radixkv.v1 import session_pb2 as pb
from radixkv_client.errors import Exhausted, Internal, InvalidArgument, NotFound, Unavailable
from radixkv_client.protocol import MAX_QUEUED_OPS, Request, Session, default_limits


def make_session(**limits: int) -> Session:
    announced = default_limits()
    for name, value in limits.items():
        setattr(announced, name, value)
    return Session(announced, pressures.append)


pressures: list[int] = []


def refill(num_blocks: int = 1, results: list[int] | None = None) -> Request:
    op = pb.Op()
    op.refill.num_blocks = num_blocks
    return Request(op, lambda reply: len(reply.refill.blocks))


def steps_of(messages: list[bytes]) -> list[pb.Step]:
    return [pb.ClientMessage.FromString(data).step for data in messages]


def reply(number: int, op_id: int, code: int = pb.OK, message: str = "") -> pb.Reply:
    made = pb.Reply(number=number, op_id=op_id)
    if code == pb.OK:
        made.refill.blocks = b"\1\0\0\0"
    else:
        made.status.code, made.status.message = code, message
    return made


def replies(last_step: int, *made: pb.Reply) -> pb.ServerMessage:
    return pb.ServerMessage(replies=pb.Replies(last_step=last_step, replies=made))


def test_operations_submitted_together_travel_in_one_step_in_order():
    session = make_session()
    session.submit([refill(), refill()])
    session.submit([refill()])
    (step,) = steps_of(session.outgoing())
    assert (step.number, [op.op_id for op in step.ops]) == (1, [1, 2, 3])
    assert session.outgoing() == []


def test_each_operation_gets_its_own_answer_and_replies_seen_is_reported():
    session = make_session()
    first, second = session.submit([refill(), refill()])
    session.outgoing()
    session.receive(replies(1, reply(1, 2)))
    assert second.done and not first.done and second.result() == 4
    session.receive(replies(1, reply(2, 1, pb.NOT_FOUND, "no lease 7")))
    with pytest.raises(NotFound, match="no lease 7"):
        first.result()
    session.submit([refill()])
    assert steps_of(session.outgoing())[0].replies_seen == 2


def test_at_most_eight_steps_are_unacknowledged_and_queued_operations_share_the_next():
    session = make_session()
    for _ in range(8):
        session.submit([refill()])
        assert len(session.outgoing()) == 1
    session.submit([refill()])
    session.submit([refill()])
    assert session.outgoing() == [] and not session.has_outgoing
    session.receive(replies(1))
    (step,) = steps_of(session.outgoing())
    assert step.number == 9 and len(step.ops) == 2


def test_a_step_keeps_within_the_servers_limits():
    session = make_session(max_ops_per_step=2, max_message_bytes=1000)
    session.submit([refill()] * 1 + [refill() for _ in range(4)])
    assert [len(step.ops) for step in steps_of(session.outgoing())] == [2, 2, 1]
    big = pb.Op()
    big.give_back.blocks = b"x" * 600
    session.submit([Request(big, lambda r: None), Request(clone(big), lambda r: None)])
    assert [len(step.ops) for step in steps_of(session.outgoing())] == [1, 1]
    huge = pb.Op()
    huge.give_back.blocks = b"x" * 1000
    with pytest.raises(InvalidArgument, match="max_message_bytes"):
        session.submit([Request(huge, lambda r: None)])
    assert session.submit([refill()])


def clone(op: pb.Op) -> pb.Op:
    copy = pb.Op()
    copy.CopyFrom(op)
    return copy


def test_unanswered_operations_are_bounded():
    session = make_session()
    session.submit([refill() for _ in range(MAX_QUEUED_OPS)])
    with pytest.raises(Exhausted):
        session.submit([refill()])


@pytest.mark.parametrize("got", range(4))
def test_after_a_cut_exactly_the_steps_the_server_has_not_got_are_sent_again(got: int):
    session = make_session()
    answers, sent = [], []
    for _ in range(3):
        answers += session.submit([refill()])
        sent += session.outgoing()
    assert session.resume(got) == sent[got:]
    assert not any(answer.done for answer in answers)


def test_replies_repeated_after_a_resume_are_ignored():
    session = make_session()
    (answer,) = session.submit([refill()])
    session.outgoing()
    session.receive(replies(1, reply(1, 1)))
    session.resume(1)
    session.receive(replies(1, reply(1, 1)))
    assert answer.result() == 4 and session.replies_seen == 1


def test_what_breaks_the_protocol_is_an_internal_error():
    session = make_session()
    session.submit([refill()])
    session.outgoing()
    with pytest.raises(Internal, match="reply 2 follows reply 0"):
        session.receive(replies(1, reply(2, 1)))
    with pytest.raises(Internal, match="operation 9"):
        session.receive(replies(1, reply(1, 9)))
    with pytest.raises(Internal, match="Step 5 of 1"):
        session.receive(replies(5))
    with pytest.raises(Internal, match="attached"):
        session.receive(pb.ServerMessage(attached=pb.Attached()))


def test_failing_settles_everything_once_and_for_good():
    session = make_session()
    errors: list[Exception] = []
    op = refill().op
    (answer,) = session.submit([Request(op, lambda r: None, errors.append)])
    called: list[bool] = []
    answer.on_done(lambda done: called.append(done.done))
    session.fail(Unavailable("gone"))
    session.fail(Unavailable("again"))
    assert called == [True] and len(errors) == 1
    with pytest.raises(Unavailable, match="gone"):
        answer.result()
    with pytest.raises(Unavailable, match="gone"):
        session.submit([refill()])
    assert session.outgoing() == [] and session.num_unanswered == 0


def test_the_servers_end_of_the_session_fails_it_with_its_status():
    session = make_session()
    (answer,) = session.submit([refill()])
    status = pb.Status(code=pb.INVALID_ARGUMENT, message="gap")
    session.receive(pb.ServerMessage(ended=pb.Ended(status=status)))
    with pytest.raises(InvalidArgument, match="gap"):
        answer.result()


def test_pressure_is_passed_on():
    pressures.clear()
    make_session().receive(pb.ServerMessage(pressure=pb.Pressure(num_blocks=5)))
    assert pressures == [5]
