"""Prefetch, pin, retain, invalidate and namespaces, asked of real servers by client and tool."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from radixkv_client import Exhausted, InvalidArgument, NotFound, PermissionDenied, Retention, Scope
from radixkv_client.pack import export_pack, import_pack
from radixkv_client.tools import Tools
from tests.fingerprints import BLOCK_SIZE, KV_SPEC
from tests.server_process import ServerProcess, clean_environment
from tests.tier_server import MODEL, TierWorker, connect, prompts, tiered_server

GPU = 24
BLOCKS = 8  # of one prompt; the last token is in a block of its own
WHOLE = BLOCKS * BLOCK_SIZE
PROMPTS = [prompts(1, BLOCKS, seed)[0] for seed in range(8)]
TENANT = Scope(salt="tenant")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A gpu pool for two prompts, and room for all of them below it."""
    with tiered_server(tmp_path, GPU, 128, 0, "--no-break-even") as server:
        yield server


@pytest.fixture
def small(tmp_path: Path) -> Iterator[ServerProcess]:
    """A gpu pool for two prompts, and nothing below it."""
    with tiered_server(tmp_path, GPU) as server:
        yield server


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[ServerProcess]:
    """As `server`, with nvme instead of cpu; everything goes there at once."""
    options = ("--no-break-even", "--write-policy", "write_through")
    with tiered_server(tmp_path, GPU, 0, 128, *options) as server:
        yield server


def tools_of(server: ServerProcess) -> Tools:
    return Tools(server.grpc_target)


def tiers(tools: Tools) -> dict[str, int]:
    """Cached and pinned blocks by tier."""
    reply = tools.stats()
    books = {"gpu": reply.books} | {tier.name: tier.books for tier in reply.tiers}
    return {name: book.cached + book.pinned for name, book in books.items()}


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until it is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not become true in time"
        time.sleep(0.01)


# ---- prefetch -------------------------------------------------------------------------------


def test_a_prefetched_prompt_is_on_the_gpu_when_it_is_used(server: ServerProcess) -> None:
    with connect(server) as client, tools_of(server) as tools:
        worker = TierWorker(client)
        for prompt in PROMPTS:
            worker.serve(prompt)
        prefetch = tools.prefetch(PROMPTS[0])
        assert (prefetch.cached_tokens, prefetch.loading_tokens) == (0, WHOLE)
        assert (prefetch.wait().loaded_tokens, prefetch.wait().failed_tokens) == (WHOLE, 0)
        assert not prefetch.cancel(), "it had ended"
        with client.acquire(PROMPTS[0], capacity_wait_ms=10_000) as lease:
            assert (lease.cached_tokens, lease.onboarding) == (WHOLE, None)
        again = tools.prefetch(PROMPTS[0])
        assert (again.handle, again.cached_tokens, again.reason) == (0, WHOLE, "LOADED")
        assert again.wait().loaded_tokens == 0
        assert not again.cancel()


def test_a_cancelled_prefetch_ends_and_what_it_loaded_is_right(server: ServerProcess) -> None:
    with connect(server) as client, tools_of(server) as tools:
        worker = TierWorker(client)
        for prompt in PROMPTS:
            worker.serve(prompt)
        for prompt in PROMPTS:
            prefetch = tools.prefetch(prompt)
            prefetch.cancel()
            ended = prefetch.wait()
            assert ended.loaded_tokens <= WHOLE
        for prompt in PROMPTS:
            worker.serve(prompt)
        with pytest.raises(NotFound):
            tools.wait_prefetch(1 << 40)
        assert not tools.cancel_prefetch(1 << 40)


def test_onboarding_says_where_a_hit_came_from(server: ServerProcess) -> None:
    with connect(server) as client:
        worker = TierWorker(client)
        for prompt in PROMPTS:
            worker.serve(prompt)
        with client.acquire(PROMPTS[0], capacity_wait_ms=10_000) as lease:
            assert lease.cached_tokens == WHOLE
            assert lease.onboarding is not None
            assert (lease.onboarding.reason, lease.onboarding.cpu_tokens) == ("LOADED", WHOLE)
            assert (lease.onboarding.nvme_tokens, lease.onboarding.left_tokens) == (0, 0)


# ---- pins and retention ---------------------------------------------------------------------


def test_a_pinned_prompt_stays_and_an_unpinned_one_goes(small: ServerProcess) -> None:
    with connect(small) as client, tools_of(small) as tools:
        worker = TierWorker(client)
        assert tools.pin(PROMPTS[0], model=MODEL).pin_id == 0, "nothing to pin"
        worker.serve(PROMPTS[0])
        pinned = tools.pin(PROMPTS[0])
        assert (pinned.pinned_tokens, tools.stats().books.pinned) == (WHOLE, BLOCKS)
        for prompt in PROMPTS[1:]:
            worker.serve(prompt)
        assert worker.serve(PROMPTS[0]) == WHOLE
        assert tools.unpin(pinned.pin_id)
        assert not tools.unpin(pinned.pin_id)
        for prompt in PROMPTS[1:]:
            worker.serve(prompt)
        assert worker.serve(PROMPTS[0]) == 0


def test_pins_are_lifted_by_prefix_and_by_time(small: ServerProcess) -> None:
    with connect(small) as client, tools_of(small) as tools:
        worker = TierWorker(client)
        worker.serve(PROMPTS[0])
        half = PROMPTS[0][: WHOLE // 2]
        assert tools.pin(half).pinned_tokens == WHOLE // 2
        assert tools.pin(PROMPTS[0]).pinned_tokens == WHOLE
        assert tools.unpin_prefix(PROMPTS[1]) == 0
        assert tools.unpin_prefix(PROMPTS[0][:3]) == 2
        assert tools.stats().books.pinned == 0
        tools.pin(PROMPTS[0], ttl_ms=200)
        assert tools.stats().books.pinned == BLOCKS
        eventually(lambda: tools.stats().books.pinned == 0)


def test_pins_hold_at_most_half_of_the_pool(small: ServerProcess) -> None:
    with connect(small) as client, tools_of(small) as tools:
        worker = TierWorker(client)
        for prompt in PROMPTS[:2]:
            worker.serve(prompt)
        tools.pin(PROMPTS[0])
        with pytest.raises(Exhausted, match="--max-pinned"):
            tools.pin(PROMPTS[1])
        assert tools.stats().books.pinned == BLOCKS


def test_low_priority_goes_first_and_a_time_to_live_ends(small: ServerProcess) -> None:
    with connect(small) as client, tools_of(small) as tools:
        worker = TierWorker(client)
        worker.serve(PROMPTS[0])
        worker.serve(PROMPTS[1], retention=Retention(priority=-100))
        worker.serve(PROMPTS[2])
        assert tools.lookup(PROMPTS[0]).cached_tokens == WHOLE, "older, and not the first to go"
        assert tools.lookup(PROMPTS[1]).cached_tokens < WHOLE
        assert tools.retain(PROMPTS[0][:3], Retention(ttl_ms=200)) == BLOCKS
        eventually(lambda: tools.lookup(PROMPTS[0]).cached_tokens == 0)
        assert tools.lookup(PROMPTS[2]).cached_tokens == WHOLE


# ---- invalidate and namespaces --------------------------------------------------------------


def test_d7_what_is_invalidated_does_not_come_back_after_a_restart(durable: ServerProcess) -> None:
    with connect(durable) as client, tools_of(durable) as tools:
        worker = TierWorker(client)
        for number, prompt in enumerate(PROMPTS):
            worker.serve(prompt, tags=[f"document {number % 2}", "all"])
        eventually(lambda: tiers(tools)["nvme"] == len(PROMPTS) * BLOCKS)
        dry = tools.invalidate(tag="document 0", dry_run=True)
        done = tools.invalidate(tag="document 0")
        assert (done.nvme_blocks, done.failed_erasures) == (4 * BLOCKS, 0)
        assert dry.nvme_blocks == done.nvme_blocks
        assert tools.invalidate(tag="document 0").nvme_blocks == 0, "twice is harmless"
    durable.restart()
    with connect(durable) as client:
        worker = TierWorker(client)
        found = [worker.serve(prompt) for prompt in PROMPTS]
        assert found == [0, WHOLE] * 4


def test_a_restart_knows_its_namespaces_before_anybody_says_hello(durable: ServerProcess) -> None:
    with connect(durable) as client, tools_of(durable) as tools:
        worker = TierWorker(client)
        worker.serve(PROMPTS[0])
        with client.acquire(PROMPTS[1], scope=TENANT) as lease:
            lease.commit(len(PROMPTS[1]))
        eventually(lambda: tiers(tools)["nvme"] == 2 * BLOCKS)
    assert durable.stop() == 0
    durable.restart()
    with tools_of(durable) as tools:
        found = {namespace.scope: namespace for namespace in tools.namespaces()}
        assert set(found) == {Scope(), TENANT}
        for namespace in found.values():
            assert (namespace.model, namespace.kv_spec) == (MODEL, KV_SPEC)
            assert namespace.num_blocks == BLOCKS
        prefetch = tools.prefetch(PROMPTS[0])
        assert prefetch.wait().loaded_tokens == WHOLE
        assert tools.lookup(PROMPTS[0]).cached_tokens == WHOLE
        assert tools.invalidate(scope=TENANT).nvme_blocks == BLOCKS
        assert [namespace.scope for namespace in tools.namespaces()] == [Scope()]


def test_what_is_wrong_is_refused(server: ServerProcess) -> None:
    with connect(server) as client, tools_of(server) as tools:
        for tags in (["x" * 65], [""], [str(number) for number in range(9)]):
            with pytest.raises(InvalidArgument, match="tag"):
                client.acquire(PROMPTS[0], tags=tags)
        for retention in (Retention(101), Retention(-101), Retention(ttl_ms=1 << 60)):
            with pytest.raises(InvalidArgument):
                client.acquire(PROMPTS[0], retention=retention)
            with pytest.raises(InvalidArgument):
                tools.retain(PROMPTS[0], retention)
        with pytest.raises(InvalidArgument):
            tools.pin(PROMPTS[0], ttl_ms=1 << 60)
        for call in (tools.prefetch, tools.pin):
            with pytest.raises(NotFound):
                call(PROMPTS[0], model="absent")
            with pytest.raises(InvalidArgument):
                call(b"\xff" * 8)


def test_g2_over_tcp_none_of_it_is_allowed_without_a_token(server: ServerProcess) -> None:
    with Tools(server.tools_target) as tools:
        for call in (
            lambda: tools.prefetch(PROMPTS[0]),
            lambda: tools.wait_prefetch(1),
            lambda: tools.cancel_prefetch(1),
            lambda: tools.pin(PROMPTS[0]),
            lambda: tools.unpin(1),
            lambda: tools.retain(PROMPTS[0], Retention()),
            lambda: tools.invalidate(everything=True),
            lambda: tools.namespaces(),
        ):
            with pytest.raises(PermissionDenied):
                call()


# ---- packs ----------------------------------------------------------------------------------


def test_packs_hold_what_is_below_and_more_than_the_gpu_has_room_for(
    server: ServerProcess, tmp_path: Path
) -> None:
    with connect(server) as client:
        worker = TierWorker(client)
        for prompt in PROMPTS:
            worker.serve(prompt)
    num_blocks = len(PROMPTS) * BLOCKS
    pack = tmp_path / "pack"
    assert export_pack(pack, PROMPTS, socket_dir=server.socket_dir).written_blocks == num_blocks
    server.restart()
    assert import_pack(pack, socket_dir=server.socket_dir).written_blocks == num_blocks
    with connect(server) as client:
        worker = TierWorker(client)
        assert [worker.serve(prompt) for prompt in PROMPTS] == [WHOLE] * len(PROMPTS)


# ---- the tool -------------------------------------------------------------------------------


def tool(server: ServerProcess, *arguments: str) -> str:
    """Run the tool; its output."""
    done = subprocess.run(
        [sys.executable, "-m", "radixkv.cli.tool", *arguments, "--socket-dir",
         str(server.socket_dir)],
        capture_output=True, text=True, timeout=30, env=clean_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tool(server: ServerProcess, tmp_path: Path) -> None:
    assert "nothing is cached" in tool(server, "namespaces")
    with connect(server) as client:
        worker = TierWorker(client)
        for prompt in PROMPTS:
            worker.serve(prompt, tags=["docs"])
    first = ",".join(map(str, PROMPTS[0]))
    file = tmp_path / "tokens"
    file.write_bytes(b"".join(token.to_bytes(4, "little") for token in PROMPTS[1]))
    assert f"{WHOLE} are on their way" in tool(server, "prefetch", "--tokens", first)
    again = tool(server, "prefetch", "--tokens-file", str(file), "--wait", "10")
    assert f"loaded {WHOLE}, failed 0" in again
    assert "it had ended" in tool(server, "prefetch", "--cancel", "123456")
    pinned = json.loads(tool(server, "pin", "--tokens", first, "--ttl", "60", "--json"))
    assert pinned["pinned_tokens"] == WHOLE
    assert "lifted 1 pins" in tool(server, "unpin", str(pinned["pin_id"]))
    assert "lifted 0 pins" in tool(server, "unpin", "--prefix", first)
    begin = ",".join(map(str, PROMPTS[1][:3]))
    retained = tool(server, "retain", "--prefix", begin, "--priority", "-5", "--ttl", "600")
    assert f"changed {BLOCKS} blocks" in retained
    shown = tool(server, "namespaces")
    assert f"{len(PROMPTS) * BLOCKS} blocks  model {MODEL}" in shown
    assert "tier cpu OK" in tool(server, "stats")
    (tier,) = json.loads(tool(server, "stats", "--json"))["tiers"]
    assert (tier["name"], tier["books"]["total"]) == ("cpu", 128)
    assert "copies below it (cpu " in tool(server, "invalidate", "--tag", "docs")
    assert "nothing is cached" in tool(server, "namespaces")
