"""Messages as plain values."""

import json

from radixkv.v1 import cache_pb2
from radixkv.v1 import session_pb2 as pb
from radixkv.wire.plain import as_plain


def test_numbers_stay_numbers_and_zeros_are_there() -> None:
    plain = as_plain(cache_pb2.StatsReply(uptime_ms=1 << 60, incarnation=b"\x01\xff"))
    assert plain["uptime_ms"] == 1 << 60
    assert plain["incarnation"] == "01ff"
    assert plain["books"]["total"] == 0
    assert json.loads(json.dumps(plain)) == plain


def test_lists_messages_and_enums() -> None:
    reply = cache_pb2.SessionsReply(sessions=[cache_pb2.SessionInfo(pids=[3, 4], client="c")])
    (session,) = as_plain(reply)["sessions"]
    assert session["pids"] == [3, 4]
    assert session["client"] == "c"
    miss = as_plain(pb.MissReason(kind=pb.MissReason.EVICTED, at_token=5))
    assert miss == {"kind": "EVICTED", "at_token": 5, "nearest_tokens": ""}
