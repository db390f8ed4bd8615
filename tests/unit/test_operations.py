"""One operation on the wire: what is refused, with which words, and that nothing has changed."""

import struct

import pytest

from radixkv.core import tier_ops
from radixkv.core.errors import Exhausted
from radixkv.core.results import Acquired, Miss, MissKind, Onboarded, OnboardReason, Retention
from radixkv.pools.arena import ArenaError
from radixkv.server.backing import Backing
from radixkv.server.namespaces import Models
from radixkv.v1 import cache_pb2
from radixkv.v1 import session_pb2 as pb
from radixkv.wire import limits
from tests.naive_model import int32, ints
from tests.session_rig import SessionRig, acquire, code, commit, extend, fork, refill, release


@pytest.fixture
def rig():
    return SessionRig()


@pytest.fixture
def peer(rig):
    """A session with lease 1: two committed blocks, a third one begun, one block in reserve."""
    peer = rig.open()
    replies = peer.step(acquire(1, range(10)), commit(1, 8), refill(1))
    assert [code(reply) for reply in replies] == ["OK"] * 3
    return peer


def content(start, length, content_id=b"image"):
    return pb.ContentRange(start=start, length=length, content_id=content_id)


BAD = {
    "no operation": (pb.Op(), "kind that this server does not know"),
    "token bytes": (pb.Op(acquire=pb.Acquire(lease_id=2, tokens=b"12345")), "multiple of 4"),
    "no tokens": (acquire(2, []), ""),
    "negative token": (acquire(2, [1, 2, -3]), "negative token"),
    "negative token in commit": (commit(1, 11, [-1]), "negative token"),
    "too many tokens": (
        pb.Op(acquire=pb.Acquire(lease_id=2, tokens=bytes(4 * (limits.MAX_TOKENS + 1)))),
        "2097153 tokens, at most 2097152",
    ),
    "wait too long": (acquire(2, [1], wait_ms=limits.MAX_WAIT_MS + 1), "at most 3600000 ms"),
    "content id": (acquire(2, range(9), contents=[content(0, 4, b"")]), "1 to 64 bytes"),
    "long content id": (acquire(2, range(9), contents=[content(0, 4, b"x" * 65)]), "1 to 64"),
    "content out of bounds": (acquire(2, range(9), contents=[content(8, 4)]), "out of bounds"),
    "content overflow": (
        acquire(2, range(9), contents=[content(2**32 - 1, 2**32 - 1)]),
        "out of bounds",
    ),
    "content overlap": (
        acquire(2, range(9), contents=[content(0, 4), content(3, 2)]),
        "overlapping",
    ),
    "many contents": (acquire(2, range(9), contents=[content(0, 1)] * 4097), "4097 content"),
    "adapter without version": (acquire(2, range(9), scope={"adapter": "x"}), "adapter_version"),
    "long salt": (acquire(2, range(9), scope={"salt": "ä" * 129}), "scope.salt is 258 bytes"),
    "many tags": (acquire(2, range(9), tags=map(str, range(9))), "9 tags, at most 8"),
    "empty tag": (acquire(2, range(9), tags=[""]), "1 to 64 bytes"),
    "long tag": (acquire(2, range(9), tags=["ä" * 33]), "1 to 64 bytes"),
    "unprintable tag": (acquire(2, range(9), tags=["a\nb"]), "printable"),
    "priority": (acquire(2, range(9), retention={"priority": 101}), "priority 101"),
    "low priority": (acquire(2, range(9), retention={"priority": -101}), "priority -101"),
    "ttl": (acquire(2, range(9), retention={"ttl_ms": limits.MAX_TTL_MS + 1}), "a year"),
    "commit past the end": (commit(1, 13), "upto 13"),
    "commit below": (commit(1, 4), "upto 4"),
    "commit absurd": (commit(1, 2**32 - 1), "upto 4294967295"),
    "commit of a foreign block": (commit(1, 8, blocks=int32([9])), "reserve"),
    "commit of a block twice": (commit(1, 8, blocks=int32([4, 4])), "reserve"),
    "commit of the null block": (commit(1, 8, blocks=int32([0])), "reserve"),
    "commit of a negative block": (commit(1, 8, blocks=int32([-4])), "reserve"),
    "block bytes": (commit(1, 8, blocks=b"123"), "block ids are 3 bytes"),
    "many blocks": (
        commit(1, 8, blocks=bytes(4 * (limits.MAX_BLOCKS_PER_OP + 1))),
        "262145 block ids",
    ),
    "extend by nothing": (extend(1, 0), "at least 1"),
    "extend absurdly": (extend(1, 2**32 - 1), "at most 2097152 tokens"),
    "refill by nothing": (refill(0), "at least 1"),
    "fork without children": (fork(1, [], 8), "has 0 children"),
    "fork with many children": (fork(1, range(2, 300), 8), "at most 256|1 to 256"),
    "fork with the same child twice": (fork(1, [2, 2], 8), "distinct"),
    "fork from a foreign tail": (fork(1, [2], 9, 31), "block 31"),
    "fork from a negative tail": (fork(1, [2], 9, -3), "block -3"),
    "trim committed": (pb.Op(trim=pb.Trim(lease_id=1, upto=4)), "upto 4"),
    "trim above": (pb.Op(trim=pb.Trim(lease_id=1, upto=13)), "upto 13"),
    "unknown reason": (
        pb.Op(release=pb.Release.FromString(bytes([0x08, 1, 0x10, 77]))),
        "reason 77 is unknown",
    ),
    "commit of another lease": (
        release(1, commit=pb.Commit(lease_id=3, upto=8)),
        "carries a Commit of lease 3",
    ),
    "give back a foreign block": (pb.Op(give_back=pb.GiveBack(blocks=int32([9]))), "reserve"),
    "give back bytes": (pb.Op(give_back=pb.GiveBack(blocks=b"1")), "multiple of 4"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_operations_are_refused_and_change_nothing(rig, peer, name):
    op, words = BAD[name]
    before = rig.cache.books(), rig.cache.session_use(peer.session_id)
    (reply,) = peer.step(op)
    assert code(reply) in ("INVALID_ARGUMENT", "FAILED_PRECONDITION"), reply
    assert any(word in reply.status.message for word in words.split("|")), reply
    assert (rig.cache.books(), rig.cache.session_use(peer.session_id)) == before
    good = peer.step(extend(1, 1), commit(1, 9), release(1))
    assert [code(reply) for reply in good] == ["OK"] * 3, "the session goes on"


@pytest.mark.parametrize(
    "op",
    [extend(99, 1), commit(99, 4), release(99), fork(99, [5], 0),
     pb.Op(trim=pb.Trim(lease_id=99)), extend(2**64 - 1, 1)],
)  # fmt: skip
def test_unknown_leases_are_not_found(peer, op):
    assert code(peer.step(op)[0]) == "NOT_FOUND"


def test_another_sessions_lease_and_block_are_out_of_reach(rig, peer):
    other = rig.open()
    reserved = ints(peer.replies[2].refill.blocks)[0]
    replies = other.step(
        extend(1, 1), commit(1, 8), release(1), fork(1, [2], 8),
        pb.Op(give_back=pb.GiveBack(blocks=int32([reserved]))),
        acquire(1, range(3)), commit(1, 3, blocks=int32([reserved])),
    )  # fmt: skip
    assert [code(reply) for reply in replies] == [
        "NOT_FOUND", "NOT_FOUND", "NOT_FOUND", "NOT_FOUND", "INVALID_ARGUMENT", "OK",
        "INVALID_ARGUMENT",
    ]  # fmt: skip
    assert code(peer.step(commit(1, 10, blocks=int32([reserved])))[0]) == "OK"


def test_a_prompt_larger_than_the_pool_is_refused_with_both_numbers(peer):
    (reply,) = peer.step(acquire(2, range(33 * 4), capacity_wait_ms=1000))
    assert code(reply) == "TOO_LARGE"
    assert "33 blocks" in reply.status.message and "32" in reply.status.message
    (reply,) = peer.step(acquire(2, range(4), extra_blocks=2**32 - 1))
    assert code(reply) == "TOO_LARGE"


def test_release_carries_a_commit(rig, peer):
    body = pb.Commit(upto=12, tokens=int32([10, 11]))
    (reply,) = peer.step(release(1, commit=body, reason=pb.CONVERSATION_OVER))
    assert reply.release.cached_tokens == 12


def test_a_release_whose_commit_fails_keeps_the_lease(rig, peer):
    (reply,) = peer.step(release(1, commit=pb.Commit(upto=99)))
    assert code(reply) == "INVALID_ARGUMENT"
    assert rig.cache.num_leases == 1


def test_scopes_keep_apart_and_the_same_scope_is_shared(rig, peer):
    scopes = [{"salt": "a"}, {"salt": "b"}, {"adapter": "x", "adapter_version": "1"}, {}]
    for number, scope in enumerate(scopes):
        first, again = 10 + 2 * number, 11 + 2 * number
        replies = peer.step(
            acquire(first, range(50, 59), scope=scope), commit(first, 8),
            acquire(again, range(50, 59), scope=scope), release(first), release(again),
        )  # fmt: skip
        assert replies[0].acquire.cached_tokens == 0
        assert replies[2].acquire.cached_tokens == 8
    assert peer.step(acquire(30, range(50, 59)))[0].acquire.cached_tokens == 8, "{} is no scope"


def test_tags_and_retention_reach_the_core_and_onboarding_comes_back(rig, peer, monkeypatch):
    asked = []
    onboarded = Onboarded(OnboardReason.TIMEOUT, 4, 8, 12, 16)

    def answer(session_id, lease_id, request, now_ms):
        asked.append(request)
        return Acquired(lease_id, b"", 0, 0, 0, Miss(MissKind.NONE), 0, (), onboarded)

    monkeypatch.setattr(rig.cache, "acquire", answer)
    tags = ["b", "ä" * 32, "b"]
    retention = {"priority": -100, "ttl_ms": limits.MAX_TTL_MS}
    replies = peer.step(
        acquire(7, range(9), tags=tags, retention=retention), acquire(8, range(9), retention={})
    )
    assert asked[0].tags == ("b", "ä" * 32), "each once, in order"
    assert asked[0].retention == Retention(-100, limits.MAX_TTL_MS)
    assert (asked[1].tags, asked[1].retention) == ((), Retention())
    assert replies[0].acquire.onboarding == pb.Onboarding(
        reason=pb.Onboarding.TIMEOUT, cpu_tokens=4, nvme_tokens=8, remote_tokens=12, left_tokens=16
    )
    first = peer.replies[0].acquire
    assert not first.HasField("onboarding"), "nothing lay below"


def test_every_reason_of_the_core_has_its_name_on_the_wire():
    assert {reason.name: reason.value for reason in OnboardReason} == dict(
        pb.Onboarding.Reason.items()
    )


def test_limits_of_core_and_wire_agree():
    assert (limits.MAX_TAGS, limits.MAX_TAG_BYTES) == (tier_ops.MAX_TAGS, tier_ops.MAX_TAG_BYTES)


def test_a_fault_in_the_server_is_internal_and_tells_no_detail(rig, peer, monkeypatch, caplog):
    def broken(*_):
        raise AssertionError("secret detail")

    monkeypatch.setattr(rig.cache, "extend", broken)
    (reply,) = peer.step(extend(1, 1))
    assert code(reply) == "INTERNAL" and "secret" not in reply.status.message
    assert "secret detail" in caplog.text


# ---- memory behind blocks ------------------------------------------------------------------


class PoolWithRoom:
    """A pool whose arena has memory for blocks 1 to `room`."""

    def __init__(self, room):
        self.room = room
        self.arena = self

    def ensure(self, highest):
        if highest > self.room:
            raise ArenaError("no memory")


def test_blocks_without_memory_are_not_handed_out(rig):
    pool = PoolWithRoom(room=6)
    rig.backing = Backing(pool, 32)
    peer = rig.open()
    replies = peer.step(acquire(1, range(6)), commit(1, 4), extend(1, 1), refill(1))
    assert [code(reply) for reply in replies] == ["OK"] * 4
    tail = ints(replies[0].acquire.block_table)[1]
    books = rig.cache.books()
    replies = peer.step(
        acquire(2, range(100, 112)), extend(1, 3), fork(1, [3, 4, 5], 6, tail), refill(3)
    )
    assert [code(reply) for reply in replies] == ["EXHAUSTED"] * 4
    assert all("no memory" in reply.status.message for reply in replies)
    assert rig.cache.books() == books and not rig.copies
    pool.room = 32
    replies = peer.step(acquire(2, range(100, 112)), extend(1, 3), fork(1, [3, 4, 5], 6, tail))
    rig.finish_copies()
    assert [code(reply) for reply in replies + peer.read()] == ["OK"] * 3


@pytest.mark.parametrize(
    ("lease_id", "count", "expected"),
    [(77, 2**32 - 1, "NOT_FOUND"), (1, 2**32 - 1, "INVALID_ARGUMENT"), (77, 1, "NOT_FOUND"),
     (1, 0, "INVALID_ARGUMENT"), (1, 33, "TOO_LARGE"), (1, 32, "EXHAUSTED")],
)  # fmt: skip
def test_an_extend_that_is_refused_asks_for_no_memory(rig, lease_id, count, expected):
    pool = PoolWithRoom(room=32)
    rig.backing = Backing(pool, 32)
    peer = rig.open()
    peer.step(acquire(1, range(6)))
    pool.room = 0  # asking for any would answer EXHAUSTED with other words
    (reply,) = peer.step(extend(lease_id, count))
    assert code(reply) == expected
    assert "no memory" not in reply.status.message


def test_memory_is_asked_for_until_the_whole_pool_has_it(rig):
    rig.backing = backing = Backing(PoolWithRoom(32), 32)
    peer = rig.open()
    peer.step(acquire(1, range(31 * 4)))
    assert not backing.complete
    peer.step(extend(1, 1))
    assert backing.complete


def test_a_waiting_acquire_gets_blocks_with_memory_or_an_error(rig):
    rig.backing = Backing(PoolWithRoom(room=16), 32)
    other, peer = rig.open(), rig.open()
    other.step(acquire(1, range(16 * 4)))
    peer.step(*[acquire(i, range(20 * 4), capacity_wait_ms=9) for i in (1, 2)])
    other.step(release(1))
    assert [code(reply) for reply in peer.read()] == ["EXHAUSTED"] * 2
    assert rig.cache.books().free == 32


# ---- namespaces that tools name ------------------------------------------------------------


def test_tools_name_models():
    models = Models()
    ref = cache_pb2.NamespaceRef
    with pytest.raises(Exception, match="no model"):
        list(models.resolve(ref()))
    one = models.add("one", b"spec", frozenset({7}))
    assert list(models.resolve(ref())) == [(one.base, frozenset({7}))]
    assert models.add("one", b"spec", frozenset({7})) is one
    models.add("one", b"other spec", frozenset())
    models.add("two", b"spec", frozenset())
    with pytest.raises(Exception, match="2 models are known"):
        list(models.resolve(ref()))
    assert len(list(models.resolve(ref(model_fingerprint="one")))) == 2
    scope = pb.Scope(salt="a")
    (found,) = models.resolve(ref(model_fingerprint="two", scope=scope))
    assert found[0] == models.add("two", b"spec", frozenset()).of(scope)
    with pytest.raises(Exception, match="no model 'three'"):
        list(models.resolve(ref(model_fingerprint="three")))


def test_models_and_cached_scopes_are_bounded(monkeypatch):
    monkeypatch.setattr("radixkv.server.namespaces.MAX_MODELS", 2)
    monkeypatch.setattr("radixkv.server.namespaces.MAX_CACHED_SCOPES", 3)
    models = Models()
    namespaces = models.add("one", b"spec", frozenset())
    models.add("two", b"spec", frozenset())
    with pytest.raises(Exhausted):
        models.add("three", b"spec", frozenset())
    keys = [namespaces.of(pb.Scope(salt=str(i))) for i in range(10)]
    assert len(set(keys)) == 10
    assert keys == [namespaces.of(pb.Scope(salt=str(i))) for i in range(10)]
    assert len(namespaces._by_scope) <= 3


def test_tables_are_little_endian_int32(peer):
    table = peer.replies[0].acquire.block_table
    assert struct.unpack(f"<{len(table) // 4}i", table) == tuple(ints(table))
