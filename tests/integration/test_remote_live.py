"""Two real servers beside one Mooncake: what one computes the other attaches, and no more."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from radixkv_client import Scope
from radixkv_client.tools import Tools
from tests.integration.test_tiers_live import balanced, tier, wait_until
from tests.mooncake_master import MasterProcess, needs_mooncake
from tests.server_process import ServerProcess
from tests.tier_server import TierWorker, connect, prompts, tiered_server

pytestmark = [needs_mooncake, pytest.mark.timeout(180)]
PROMPTS = prompts(6, 12)
USABLE = len(PROMPTS[0]) - 1


@contextmanager
def two_servers(directory: Path, master: MasterProcess) -> Iterator[list[ServerProcess]]:
    """Both write through to the remote."""
    options = ("--remote", master.url(segment_gib=0.25), "--write-policy", "write_through")
    with ExitStack() as stack:
        servers = []
        for name in ("one", "two"):
            (directory / name).mkdir()
            server = tiered_server(directory / name, 64, 0, 0, *options, "--no-break-even")
            servers.append(stack.enter_context(server))
        yield servers


def serve(server: ServerProcess, prompt: list[int], **options: object) -> TierWorker:
    """One request by one worker."""
    with connect(server) as client:
        worker = TierWorker(client)
        worker.serve(prompt, **options)
    return worker


def stored(server: ServerProcess) -> int:
    """Blocks the server has put into the remote."""
    written: int = tier(server, "remote")["written_blocks"]
    return written


def test_a_prefix_of_one_is_attached_under_the_other(tmp_path: Path) -> None:
    with MasterProcess() as master, two_servers(tmp_path, master) as (one, two):
        first = serve(one, PROMPTS[0])
        assert first.cached_tokens == 0
        wait_until(lambda: stored(one) == USABLE // 4)
        second = serve(two, PROMPTS[0])
        assert second.cached_tokens == second.from_below == USABLE
        # Not for another tenant, under whichever server.
        other = Scope(salt="another")
        assert serve(two, PROMPTS[0], scope=other).cached_tokens == 0
        for server in (one, two):
            balanced(server)


def test_what_is_invalidated_is_not_attached_from_the_remote(tmp_path: Path) -> None:
    with MasterProcess() as master, two_servers(tmp_path, master) as (one, two):
        serve(one, PROMPTS[0])
        serve(one, PROMPTS[2])
        wait_until(lambda: stored(one) == 2 * USABLE // 4)
        with Tools(one.grpc_target) as tools:
            done = tools.invalidate(PROMPTS[0][:4])
        assert done.remote_blocks == USABLE // 4 and done.failed_erasures == 0
        assert serve(two, PROMPTS[0]).cached_tokens == 0
        assert serve(two, PROMPTS[2]).from_below == USABLE


def test_a_namespace_is_invalidated_on_the_remote_too(tmp_path: Path) -> None:
    """Also what only another server knows of, and nothing of another tenant."""
    with MasterProcess() as master, two_servers(tmp_path, master) as (one, two):
        other = Scope(salt="another")
        serve(one, PROMPTS[0])
        serve(one, PROMPTS[2], scope=other)
        wait_until(lambda: stored(one) == 2 * USABLE // 4)
        serve(two, PROMPTS[4])  # a model it knows, but none of these prompts
        with Tools(two.grpc_target) as tools:
            assert tools.invalidate().failed_erasures == 0
        assert serve(two, PROMPTS[0]).cached_tokens == 0
        assert serve(two, PROMPTS[2], scope=other).from_below == USABLE


def test_a_remote_that_is_gone_costs_bounded_time_and_comes_back(tmp_path: Path) -> None:
    with MasterProcess() as master, two_servers(tmp_path, master) as (one, two):
        serve(one, PROMPTS[0])
        wait_until(lambda: stored(one) == USABLE // 4)
        master.kill()
        for prompt in PROMPTS[1:5]:
            serve(two, prompt, timeout=25.0)  # not found, and in time
        master.restart()
        before = stored(one)

        def shares_again() -> bool:
            serve(one, prompts(1, 12, seed=100 + stored(one))[0])
            return stored(one) > before

        wait_until(shares_again)
        for server in (one, two):
            balanced(server)
