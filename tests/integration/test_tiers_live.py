"""Tiers under real servers, movers and workers: what is found is right, whatever dies meanwhile."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv_client.tools import Tools
from tests.fingerprints import BLOCK_SIZE
from tests.server_process import ServerProcess
from tests.tier_server import TierWorker, connect, prompts, spec_options, tiered_server

WORKING_SET = prompts(48, 12)
MAX_WAIT_S = 20.0


def stats(server: ServerProcess) -> dict[str, Any]:
    """What /stats says."""
    with urllib.request.urlopen(f"{server.http_url}/stats", timeout=5) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def tier(server: ServerProcess, name: str) -> dict[str, Any]:
    """One tier in /stats."""
    return next(tier for tier in stats(server)["tiers"] if tier["name"] == name)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait, not for ever, until something holds."""
    deadline = time.monotonic() + MAX_WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def serve_all(server: ServerProcess, working_set: list[list[int]] = WORKING_SET) -> TierWorker:
    """One worker serves every prompt once."""
    with connect(server) as client:
        worker = TierWorker(client)
        for prompt in working_set:
            worker.serve(prompt)
    return worker


def usable(working_set: list[list[int]]) -> int:
    """Tokens that a second run can hit at most."""
    return sum(len(prompt) - 1 for prompt in working_set)


def balanced(server: ServerProcess) -> None:
    """Every book of an idle server balances, and nothing is left in flight."""
    wait_until(lambda: stats(server)["books"]["in_flight"] == 0)
    found = stats(server)
    for books in [found["books"], *(tier["books"] for tier in found["tiers"] if "books" in tier)]:
        states = ("leased", "in_flight", "reserved", "pinned", "cached", "free")
        assert sum(books[state] for state in states) == books["total"], books


def mover_pids(server: ServerProcess) -> list[int]:
    """Processes the server has started."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return [int(pid) for pid in children]


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_a_working_set_eight_times_the_pool_is_found_again(tmp_path: Path, policy: str) -> None:
    options = ("--write-policy", policy, "--verify", "all", "--no-break-even")
    with tiered_server(tmp_path, 64, 128, 1024, *options) as server:
        serve_all(server)
        again = serve_all(server)
        assert again.cached_tokens == usable(WORKING_SET)
        assert again.from_below > usable(WORKING_SET) // 2
        assert stats(server)["counters"]["dropped_blocks"] == 0
        balanced(server)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_restarted_server_is_warm(tmp_path: Path, how: str) -> None:
    """After SIGTERM all of it is there; after SIGKILL what had gone down, here all as well."""
    policy = "write_back" if how == "stop" else "write_through"
    with tiered_server(
        tmp_path, 64, 128, 1024, "--write-policy", policy, "--no-break-even"
    ) as server:
        first = serve_all(server)
        if how == "kill":
            blocks = (first.queried_tokens - first.cached_tokens - len(WORKING_SET)) // BLOCK_SIZE
            wait_until(lambda: tier(server, "nvme")["books"]["cached"] == blocks)
        getattr(server, how)()
        server.start()
        again = serve_all(server)
        assert again.cached_tokens == usable(WORKING_SET)
        assert tier(server, "nvme")["read_blocks"] > 0
        balanced(server)


def test_the_server_is_killed_in_the_middle_of_writing_down(tmp_path: Path) -> None:
    with tiered_server(tmp_path, 64, 64, 1024, "--write-policy", "write_through") as server:
        for round_number in range(4):
            with connect(server) as client:
                worker = TierWorker(client)
                for prompt in WORKING_SET[: 12 * (round_number + 1)]:
                    worker.serve(prompt)
                server.kill()
            server.start()
        serve_all(server)  # every byte that is found is compared
        assert serve_all(server).cached_tokens >= usable(WORKING_SET) // 2
        balanced(server)


def test_a_mover_is_killed_in_the_middle_of_writing_down(tmp_path: Path) -> None:
    with tiered_server(tmp_path, 64, 128, 1024, "--no-break-even") as server:
        with connect(server) as client:
            worker = TierWorker(client)
            for number, prompt in enumerate(WORKING_SET * 2):
                if number % 12 == 5:
                    wait_until(lambda: len(mover_pids(server)) == 2)
                    os.kill(mover_pids(server)[number // 12 % 2], signal.SIGKILL)
                worker.serve(prompt)
        assert worker.cached_tokens > 0
        wait_until(lambda: len(mover_pids(server)) == 2)
        balanced(server)


def test_corrupted_records_are_misses(tmp_path: Path) -> None:
    with tiered_server(tmp_path, 64, 0, 1024, "--no-break-even") as server:
        serve_all(server)
        server.stop()
        files = (tmp_path / "nvme").iterdir()
        (segment,) = [path for path in files if path.stat().st_size > 1 << 20]
        with open(segment, "r+b") as file:
            for slot in range(0, 400, 5):  # a bit of the payload of every fifth record
                file.seek(slot * 8192 + 4096 + 100)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 4]))
        server.start()
        serve_all(server)
        assert tier(server, "nvme")["bad_blocks"] > 0
        assert serve_all(server).cached_tokens == usable(WORKING_SET)
        balanced(server)


def test_what_is_invalidated_does_not_come_back(tmp_path: Path) -> None:
    with tiered_server(tmp_path, 64, 64, 1024, "--no-break-even") as server:
        serve_all(server)
        with Tools(server.grpc_target) as tools:
            would = tools.invalidate(everything=True, dry_run=True)
            done = tools.invalidate(everything=True)
        assert would.nvme_blocks == done.nvme_blocks > 0 and done.failed_erasures == 0
        assert would.cpu_blocks == done.cpu_blocks > 0 and done.removed_blocks > 0
        server.kill()
        server.start()
        assert stats(server)["tiers"][1]["books"]["cached"] == 0
        assert serve_all(server, WORKING_SET[:4]).from_below == 0
        balanced(server)


def test_records_of_another_geometry_are_removed(tmp_path: Path) -> None:
    with tiered_server(tmp_path, 64, 0, 1024) as server:
        serve_all(server)
    options = spec_options(tmp_path)
    options[1] = options[1].replace(":int8", ":float16")
    nvme = ["--nvme-path", str(tmp_path / "nvme"), "--nvme-blocks", "1024"]
    with ServerProcess(*options, *nvme, gpu_blocks=64) as server:
        assert tier(server, "nvme")["ignored_records"] > 0
        assert tier(server, "nvme")["books"]["cached"] == 0
        assert "old layout" in server.stderr()


def run_workers(server: ServerProcess, count: int, seconds: float) -> list[dict[str, int]]:
    """Worker processes at once; what each of them saw."""
    command = [sys.executable, "-m", "tests.tier_load", str(server.socket_dir)]
    workers = [
        subprocess.Popen(
            [*command, str(seed), str(seconds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(count)
    ]
    seen = []
    for worker in workers:
        out, err = worker.communicate(timeout=seconds + 60)
        assert worker.returncode == 0, err
        seen.append(json.loads(out))
    return seen


@pytest.mark.parametrize("seconds", [4.0, pytest.param(150.0, marks=pytest.mark.slow)])
@pytest.mark.timeout(400)
def test_eight_workers_over_an_eighth_of_the_working_set(tmp_path: Path, seconds: float) -> None:
    with tiered_server(tmp_path, 104, 104, 1024, "--verify", "all", "--no-break-even") as server:
        seen = run_workers(server, 8, seconds)
        assert sum(worker["queried"] for worker in seen) > 0
        assert sum(worker["from_below"] for worker in seen) > 0
        assert all(tier["bad_blocks"] == 0 for tier in stats(server)["tiers"])
        balanced(server)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; where mounting is refused, the test is skipped by that name."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs is refused ({done.stderr.strip()}); a full disk is"
                    " injected in tests/unit/test_nvme_faults.py")  # fmt: skip
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_is_used_as_far_as_it_goes(tmp_path: Path, small_disk: Path) -> None:
    options = ["--nvme-path", str(small_disk), "--nvme-blocks", "1024", "--no-break-even"]
    with tiered_server(tmp_path, 64, 0, 0, *options) as server:
        assert 0 < tier(server, "nvme")["books"]["total"] < 256
        assert "have room" in server.stderr()
        serve_all(server)
        again = serve_all(server)
        assert again.cached_tokens > 0 and again.from_below > 0
        balanced(server)


def test_a_stopped_mover_costs_bounded_time(tmp_path: Path) -> None:
    """SIGSTOP of the movers of nvme: what they were to bring up is computed again."""
    options = ("--no-break-even", "--onboarding", "timeout", "--onboard-timeout", "0.5")
    with tiered_server(tmp_path, 160, 0, 1024, *options) as server:
        serve_all(server)
        wait_until(lambda: len(mover_pids(server)) == 1)
        (mover,) = mover_pids(server)
        os.kill(mover, signal.SIGSTOP)
        began = time.monotonic()
        with connect(server) as client:
            worker = TierWorker(client)
            for prompt in WORKING_SET[:6]:
                worker.serve(prompt)
        assert time.monotonic() - began < MAX_WAIT_S
        assert worker.from_below == 0
        os.kill(mover, signal.SIGCONT)
        wait_until(lambda: tier(server, "nvme")["state"] == "OK")
        serve_all(server)
        assert serve_all(server).cached_tokens == usable(WORKING_SET)
        balanced(server)
