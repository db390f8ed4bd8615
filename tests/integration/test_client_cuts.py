"""Cuts at every frame, restarts of the server, and a server that does not answer."""

import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from radixkv_client import DeadlineExceeded, Unavailable
from tests.client_rig import FORMS, B, check_idle, check_kv, connected, write_kv
from tests.cutting_proxy import cutting_proxy
from tests.server_process import ServerProcess

OPTIONS = ("--check-invariants", "--block-size", str(B))
MAX_FRAMES = 400
_starts = count(0, 1000)


def fresh_server() -> ServerProcess:
    return ServerProcess(*OPTIONS, gpu_blocks=64)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with fresh_server() as process:
        yield process


def scenario(client: Any) -> None:
    """Everything once, with deferred replies outstanding; the outcome must not depend on cuts."""
    start = next(_starts)
    prompt = list(range(start, start + 10))
    lease = client.acquire(prompt, extra_blocks=40)
    following = client.acquire_nowait(prompt, wait_ms=30_000)
    crowded = client.acquire_nowait(prompt[::-1], extra_blocks=30, capacity_wait_ms=30_000)
    write_kv(client, lease, prompt, 0)
    lease.commit(10)
    with following.result() as followed:
        assert followed.cached_tokens == 8
        check_kv(client, followed, prompt, 8)
        (child,) = followed.fork(1, 8)
        child.append_blocks(1)
        child.commit(12, [1, 2, 3, 4])
        child.trim(12)
        assert child.release() == 12
    lease.release()
    with crowded.result() as last:
        assert len(last.block_table) == 33


def run_with_cut(
    server: ServerProcess, directory: Path, form: tuple[str, str], cut_after: int, torn: bool
) -> bool:
    """Run the scenario with one cut; False if it was over before."""
    with connected(("sync", "local"), server.socket_dir) as observer:
        before = observer.stats().counters
        with cutting_proxy(server.socket_dir, directory, cut_after, torn) as proxy:
            try:
                with connected(form, directory, timeout=20.0) as client:
                    scenario(client)
                    counters = observer.stats().counters
                    assert counters.acquires - before.acquires == 3
                    assert counters.commits - before.commits == 2
                    assert counters.forks - before.forks == 1
            except (Unavailable, DeadlineExceeded):
                # Only the first handshake may fail by a cut; no operation had begun.
                assert observer.stats().counters.acquires == before.acquires
        observer.tools.invalidate(everything=True)
        wait_for_idle(observer)
        return proxy.has_cut


def wait_for_idle(observer: Any) -> None:
    """A session whose connection was cut during the handshake lives until this process ends, but
    it holds nothing."""
    deadline = time.monotonic() + 5
    while observer.stats().num_leases and time.monotonic() < deadline:
        time.sleep(0.01)
    check_idle(observer)


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_a_cut_at_any_frame_changes_nothing(
    server: ServerProcess, tmp_path: Path, form: tuple[str, str], torn: bool
):
    for cut_after in range(MAX_FRAMES):
        if not run_with_cut(server, tmp_path / str(cut_after), form, cut_after, torn):
            assert cut_after > 20
            return
    raise AssertionError(f"no end after {MAX_FRAMES} frames")


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_after_a_restart_everything_fails_at_once_until_reconnect(form: tuple[str, str]):
    with fresh_server() as server, connected(form, server.socket_dir) as client:
        prompt = list(range(10))
        lease = client.acquire(prompt)
        waiting = client.acquire_nowait(prompt, wait_ms=60_000)
        pool, incarnation = client.pool, client.incarnation
        view = pool.as_numpy()
        server.kill()
        started = time.monotonic()
        with pytest.raises(Unavailable):
            waiting.result()
        with pytest.raises(Unavailable):
            lease.commit(4)
        assert time.monotonic() - started < 1.0
        with pytest.raises(Unavailable):
            client.reconnect(timeout=0.3)
        server.restart()
        with pytest.raises(Unavailable, match="reconnect"):
            client.acquire(prompt)
        with lease:
            pass  # leaving the context of a lost lease is no error
        assert client.reconnect() and not client.reconnect()
        assert client.incarnation != incarnation and client.pool is not pool
        with pytest.raises(Unavailable, match="anew"):
            pool.as_numpy()
        view[0, 0] = 1  # old memory, nobody's
        with pytest.raises(Unavailable):
            lease.extend(1)
        with client.acquire(prompt) as lease:
            write_kv(client, lease, prompt, 0)
            lease.commit(8)
        check_idle(client)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_a_restart_between_two_calls_is_noticed_within_a_second(form: tuple[str, str]):
    with fresh_server() as server, connected(form, server.socket_dir) as client:
        lease = client.acquire([1, 2, 3])
        server.restart()
        started = time.monotonic()
        with pytest.raises(Unavailable, match="restarted|gone"):
            lease.extend(1)
        assert time.monotonic() - started < 1.0
        assert client.reconnect()
        client.acquire([1, 2, 3]).release()


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_a_frozen_server_costs_a_call_its_timeout_and_nothing_else(form: tuple[str, str]):
    with fresh_server() as server, connected(form, server.socket_dir) as client:
        lease = client.acquire([1, 2, 3])
        os.kill(server.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            for call in (
                lambda: client.acquire([4, 5, 6], timeout=0.2),
                lambda: lease.append_blocks(1, timeout=0.2),
                lambda: lease.extend(1, timeout=0.2),
                lambda: client.stats(timeout=0.2),
            ):
                with pytest.raises(DeadlineExceeded):
                    call()
            assert time.monotonic() - started < 3
        finally:
            os.kill(server.pid, signal.SIGCONT)
        lease.trim(3)
        assert lease.release() == 0
        check_idle(client)
