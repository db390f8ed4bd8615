"""Connecting, refusals of Hello, and closing."""

from collections.abc import Iterator
from typing import Any

import pytest

from radixkv_client import Cancelled, FailedPrecondition, InvalidArgument, KVSpec, Unavailable
from tests.client_rig import FORMS, B, check_idle, connected
from tests.server_process import ServerProcess


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--check-invariants", "--block-size", str(B), gpu_blocks=64) as process:
        yield process


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_closing_ends_the_session_and_the_mapping(server: ServerProcess, form: tuple[str, str]):
    with connected(form, server.socket_dir) as client:
        lease = client.acquire([1, 2, 3])
        session_id, pool = client.session_id, client.pool
        client.close()
        client.close()
        with pytest.raises(Cancelled, match="closed"):
            client.acquire([1])
        with pytest.raises(Cancelled):
            lease.commit(1)
        with pytest.raises(Unavailable):
            pool.as_numpy()
        with connected(form, server.socket_dir) as observer:
            assert session_id not in [session.session_id for session in observer.sessions()]
            check_idle(observer)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_what_hello_refuses_is_raised_by_connect(server: ServerProcess, form: tuple[str, str]):
    other = KVSpec(2, 2, 4, 4, "int8", block_size=8)
    refusals: list[tuple[str, dict[str, Any]]] = [
        ("block_size", {"kv_spec": other}),
        ("model", {"model": ""}),
    ]
    for field, options in refusals:
        with (
            pytest.raises((InvalidArgument, FailedPrecondition), match=field),
            connected(form, server.socket_dir, **options),
        ):
            pass


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_without_a_server_connect_says_where_it_looked(tmp_path: Any, form: tuple[str, str]):
    with pytest.raises(Unavailable, match=r"attach\.sock"), connected(form, tmp_path):
        pass
