"""G3: names from outside never become paths, and two different names never share anything."""

from collections.abc import Iterator

import pytest

from radixkv.v1 import session_pb2 as pb
from tests.raw_session import RawSession, tokens
from tests.server_process import ServerProcess

NAMES = [
    "plain", "../x", "a/b", "a_b", "/etc/x", "..", "x" * 300, "nul\0inside", "line\nbreak", "a@b",
    "dot.", "space ", "space", "\u00e9", "e\u0301", "Upper", "upper", "%2e%2e", "a;b=1", "a",
]  # fmt: skip
PROMPT = tokens(range(40))


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--check-invariants", gpu_blocks=600) as server:
        yield server


def files(server: ServerProcess) -> set[str]:
    """Everything below the server's directory."""
    return {str(path) for path in server.directory.rglob("*")}


def scope_of(field: str, name: str) -> pb.Scope:
    if field == "salt":
        return pb.Scope(salt=name)
    if field == "adapter":
        return pb.Scope(adapter=name, adapter_version="1")
    return pb.Scope(adapter="adapter", adapter_version=name)


def publish(session: RawSession, scope: pb.Scope) -> int | None:
    """Acquire, commit, release PROMPT; the tokens that were cached, None if the name is refused."""
    reply = session.call(acquire=pb.Acquire(lease_id=1, tokens=PROMPT, scope=scope))
    if reply.status.code != pb.OK:
        assert reply.status.code == pb.INVALID_ARGUMENT, reply.status
        assert len(reply.status.message) < 600
        return None
    commit = pb.Commit(lease_id=1, upto=40)
    released = session.call(release=pb.Release(lease_id=1, commit=commit))
    assert released.status.code == pb.OK
    return reply.acquire.cached_tokens


@pytest.mark.parametrize("field", ["salt", "adapter", "adapter_version"])
def test_g3_names_in_a_scope(server: ServerProcess, field: str) -> None:
    before = files(server)
    with RawSession(server) as session:
        session.greet()
        first = {name: publish(session, scope_of(field, name)) for name in NAMES}
        again = {name: publish(session, scope_of(field, name)) for name in NAMES}
        empty = publish(session, scope_of(field, ""))
    accepted = {name for name, cached in first.items() if cached is not None}
    assert {"plain", "a/b", "a_b", "Upper", "upper", "\u00e9", "e\u0301"} <= accepted
    assert "x" * 300 not in accepted
    assert {first[name] for name in accepted} == {0}, "a name found what another had stored"
    assert {again[name] for name in accepted} == {32}, "a name lost what it had stored"
    assert empty in (0, None)
    assert files(server) == before


def test_g3_names_of_models(server: ServerProcess) -> None:
    before = files(server)
    found: dict[str, list[int | None]] = {}
    for name in [*NAMES, *NAMES, ""]:
        with RawSession(server) as session:
            code = session.greet(model=name).status.code
            assert code in (pb.OK, pb.INVALID_ARGUMENT)
            cached = publish(session, pb.Scope()) if code == pb.OK else None
            found.setdefault(name, []).append(cached)
    assert found.pop("") == [None]
    assert found.pop("x" * 300) == [None, None]
    assert found.pop("plain") == [0, 32]
    assert all(cached in ([0, 32], [None, None]) for cached in found.values()), found
    assert files(server) == before
