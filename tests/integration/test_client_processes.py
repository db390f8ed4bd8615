"""Several processes and threads on one pool; forked children; idle and very long messages."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import uvloop

from radixkv.wire import channel
from radixkv_client import AsyncClient, Client, InvalidArgument, KVSpec, WrongProcess
from tests.client_rig import (
    FORMS,
    SPEC,
    B,
    check_idle,
    check_kv,
    connected,
    kv_view,
    write_kv,
)
from tests.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
_starts = count(0, 1000)

OTHER_PROCESS = """
import sys
from tests.client_rig import check_kv, connected, kv_view
prompt = list(range(int(sys.argv[3]), int(sys.argv[3]) + 10))
with connected((sys.argv[1], sys.argv[2]), sys.argv[4]) as client:
    with client.acquire(prompt) as lease:
        assert lease.cached_tokens == 8
        check_kv(client, lease, prompt, 8)
        kv_view(client)[lease.block_table[0], 1, 1, 1, 3, 3] ^= 255
        print(lease.block_table.tolist()[:2])
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--check-invariants", "--block-size", str(B), gpu_blocks=64) as process:
        yield process


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_another_process_finds_the_same_blocks_with_the_same_bytes(
    server: ServerProcess, form: tuple[str, str]
):
    start = next(_starts)
    prompt = list(range(start, start + 10))
    with connected(form, server.socket_dir) as client, client.acquire(prompt) as lease:
        write_kv(client, lease, prompt, 0)
        lease.commit(10)
        arguments = [*form, str(start), str(server.socket_dir)]
        other = subprocess.run(
            [sys.executable, "-c", OTHER_PROCESS, *arguments],
            cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert other.returncode == 0, other.stderr
        assert other.stdout.strip() == str(lease.block_table.tolist()[:2])
        kv_view(client)[lease.block_table[0], 1, 1, 1, 3, 3] ^= 255
        check_kv(client, lease, prompt, 10)


def in_child(client: Any, lease: Any, report: Any) -> None:
    """What a forked child may try."""
    errors = []
    with client:
        for call in (
            lambda: client.acquire([1]),
            lambda: lease.commit(1),
            lambda: client.batch(),
            lambda: client.stats(),
            lambda: client.reconnect(),
        ):
            try:
                call()
            except WrongProcess as error:
                errors.append(str(error))
    report.put(errors)


@pytest.mark.parametrize("transport", ["local", "grpc"])
def test_d5_a_forked_child_is_told_at_once_and_takes_nothing_with_it(
    server: ServerProcess, transport: str
):
    context = multiprocessing.get_context("fork")
    report = context.SimpleQueue()
    with Client.connect(
        server.socket_dir, model="tiny", kv_spec=SPEC, transport=transport
    ) as client:
        start = next(_starts)
        prompt = list(range(start, start + 10))
        with client.acquire(prompt) as lease:
            child = context.Process(target=in_child, args=(client, lease, report))
            started = time.monotonic()
            child.start()
            child.join(5)
            assert child.exitcode == 0 and time.monotonic() - started < 5
            errors = report.get()
            assert len(errors) == 5 and f"process {os.getpid()}" in errors[0]
            write_kv(client, lease, prompt, 0)
            assert lease.commit(10).published_tokens == 8
            assert client.stats().num_leases == 1
        check_idle(client)


def test_a_forked_child_neither_reads_nor_unmaps_the_pool(server: ServerProcess):
    """The mapping is not inherited; dropping the inherited object must not unmap whatever the child
    has mapped there by then."""
    with Client.connect(server.socket_dir, model="tiny", kv_spec=SPEC) as client:
        pid = os.fork()
        if pid == 0:
            try:
                client.pool.as_numpy()
            except WrongProcess:
                immortal = sys.getrefcount(client.pool._map) > sys.getrefcount(object()) + 1
                os._exit(0 if immortal else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.pool.as_numpy().shape[0] == 65


@pytest.mark.parametrize("transport", ["local", "grpc"])
def test_threads_share_a_client(server: ServerProcess, transport: str):
    errors: list[BaseException] = []
    with Client.connect(
        server.socket_dir, model="tiny", kv_spec=SPEC, transport=transport
    ) as client:

        def work(seed: int) -> None:
            try:
                for turn in range(15):
                    prompt = [seed, turn, 1, 2, 3, 4]
                    with client.acquire(prompt, capacity_wait_ms=10_000) as lease:
                        lease.append_blocks(1)
                        write_kv(client, lease, prompt, 0)
                        lease.commit(9, [5, 6, 7])
                    with client.acquire(prompt, wait_ms=5, capacity_wait_ms=10_000) as lease:
                        assert lease.cached_tokens in (0, 4)
                        check_kv(client, lease, prompt, lease.cached_tokens)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(1_000_000 + i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors, errors
        check_idle(client)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_d1_an_idle_client_keeps_its_connection(
    server: ServerProcess, form: tuple[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(channel, "CLIENT_PING_INTERVAL_MS", channel.MIN_PING_INTERVAL_MS + 100)
    with connected(form, server.socket_dir) as client:
        start = next(_starts)
        with client.acquire([start, 2, 3]) as lease:
            transport = getattr(client, "wrapped", client)._transport
            time.sleep(6 if form[1] == "grpc" else 0.5)
            started = time.monotonic()
            lease.commit(3)
            assert time.monotonic() - started < 0.1
            assert getattr(client, "wrapped", client)._transport is transport


@pytest.mark.parametrize("transport", ["local", "grpc"])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_d2_cancelled_tasks_leave_no_lease_and_no_wait(
    server: ServerProcess, transport: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
):
    async def run() -> None:
        async with await AsyncClient.connect(
            server.socket_dir, model="tiny", kv_spec=SPEC, transport=transport
        ) as client:
            start = next(_starts)
            async with await client.acquire([start], extra_blocks=62):
                waits = [
                    asyncio.create_task(
                        client.acquire([start, i, 3, 4, 5], capacity_wait_ms=30_000)
                    )
                    for i in range(50)
                ]
                while (await client.stats()).num_waiting < 50:
                    await asyncio.sleep(0.01)
                for task in waits:
                    task.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
                started = time.monotonic()
                await client.acquire([start])  # left to the session's end
                assert time.monotonic() - started < 1
                assert (await client.stats()).num_waiting == 0
            assert (await client.stats()).num_leases == 1

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(run(), 60))
    with connected(("sync", "local"), server.socket_dir) as observer:
        check_idle(observer)


@pytest.fixture(scope="module")
def wide_server() -> Iterator[ServerProcess]:
    with ServerProcess("--block-size", "1", gpu_blocks=1_200_000) as process:
        yield process


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_d1_more_than_four_mebibytes_travel_both_ways(
    wide_server: ServerProcess, form: tuple[str, str]
):
    spec = KVSpec(1, 1, 1, 0, "int8", block_size=1)
    tokens = array("i", range(1_100_000))
    with connected(form, wide_server.socket_dir, kv_spec=spec) as client:
        with client.acquire(tokens) as lease:
            assert len(lease.block_table) == 1_100_000
            lease.commit(1_000_000)
        assert client.lookup(tokens).cached_tokens == 1_000_000
        with pytest.raises(InvalidArgument, match="max_message_bytes"):
            client.acquire(bytes(17 * 2**20))
        with pytest.raises(InvalidArgument):
            client.acquire(bytes(12 * 2**20))
        with client.acquire(tokens[:5]) as lease:
            assert lease.cached_tokens == 4
        client.tools.invalidate(everything=True)
