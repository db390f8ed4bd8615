"""Workers killed, and stopped and continued, at every point of a session's life (D3, D6).

Two bystanders work on beside them, and read back fingerprinted KV: they see no error and no wrong
byte. What a dead worker held is free within END_S; what a stopped one holds stays its own.
"""

import random
import time
from contextlib import ExitStack

import pytest

from tests.fault_processes import Child
from tests.fault_surroundings import AROUND, END_S, Site, memory_kib, surroundings, until
from tests.fault_worker import FINISHED, POINTS, SCRIPTS, hold_blocks, run_script
from tests.server_process import ServerProcess

NUM_BLOCKS = 96
ALARM_S = 0.12
NUM_REPEATS = 20
IDS = [f"{script}: {point}" for script, point in POINTS]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    gate = tmp_path_factory.mktemp("gate") / "closed"
    options = ("--check-invariants", "--block-size", "4", "--session-alarm", str(ALARM_S))
    server = ServerProcess(*options, gpu_blocks=NUM_BLOCKS, env={"COPY_GATE": str(gate)})
    server.command[2] = "tests.gated_server"
    with server:
        site = Site(server, gate)
        yield site
        site.close()


@pytest.fixture(params=["local", "grpc"])
def transport(request):
    return request.param


def start(site, transport, script, base):
    return Child(run_script, str(site.server.socket_dir), transport, script, base)


def come_to(victim, point):
    """Let the victim go on up to this point."""
    while (at := victim.hear()) != point:
        assert at != FINISHED, f"it never came to {point!r}"
        victim.tell("go on")


def check_gone(site, pid):
    until(lambda: site.session_of(pid) is None, "its session is gone", END_S)


def kill_at(site, transport, script, point):
    base = site.next_base()
    with (
        surroundings(site, script, base) as around,
        start(site, transport, script, base) as victim,
    ):
        come_to(victim, point)
        around.at_point(victim.pid)
        victim.kill()
        check_gone(site, victim.pid)
        around.killed()
        victim.join()
    site.check_books()


def stop_at(site, transport, script, point):
    base = site.next_base()
    with (
        surroundings(site, script, base) as around,
        start(site, transport, script, base) as victim,
    ):
        come_to(victim, point)
        around.at_point(victim.pid)
        victim.stop()
        around.stopped()
        site.progress()
        held = site.session_of(victim.pid)
        if held is not None and (held.num_leases or held.reserved_blocks):
            until(lambda: site.session_of(victim.pid).alarm, "the alarm", ALARM_S + END_S)
            still = site.session_of(victim.pid)
            for what in ("num_leases", "private_blocks", "reserved_blocks", "num_waiting"):
                assert getattr(still, what) == getattr(held, what), what
        victim.go_on()
        victim.tell("go on")
        while victim.hear() != FINISHED:
            victim.tell("go on")
    check_gone(site, victim.pid)
    site.check_books()


@pytest.mark.parametrize(("script", "point"), POINTS, ids=IDS)
def test_a_killed_worker_loses_only_its_own_work(site, transport, script, point):
    kill_at(site, transport, script, point)


@pytest.mark.parametrize(("script", "point"), POINTS, ids=IDS)
def test_a_stopped_worker_keeps_what_it_has_and_finishes_right(site, transport, script, point):
    stop_at(site, transport, script, point)


@pytest.mark.slow
def test_series_of_kills_and_stops_at_random_points(site, transport):
    chance = random.Random(1)
    for _ in range(NUM_REPEATS):
        for action in (kill_at, stop_at):
            action(site, transport, *chance.choice(POINTS))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_REPEATS))
def test_kills_and_stops_at_random_moments_under_load(site, seed):
    """Four workers at once that do not wait at their points; each is hit when it happens."""
    chance = random.Random(seed)
    scripts = [script for script in SCRIPTS if script not in AROUND]
    with ExitStack() as stack:
        victims = []
        for number in range(4):
            script, transport = chance.choice(scripts), ("local", "grpc")[number % 2]
            victim = start(site, transport, script, site.next_base())
            victims.append(stack.enter_context(victim))
            for _ in range(10):
                victim.tell("go on")  # ahead of its points
        time.sleep(chance.random() * 0.1)
        for victim in chance.sample(victims, 2):
            victim.stop()
        time.sleep(chance.random() * 0.1)
        for victim in victims:
            victim.go_on()
        time.sleep(chance.random() * 0.05)
        for victim in victims:
            victim.kill()
        for victim in victims:
            check_gone(site, victim.pid)
            victim.join()
    site.check_books()


@pytest.mark.slow
def test_d3_worker_holding_half_the_pool_is_killed_again_and_again(site, transport):
    """Leased falls by exactly its share, and the server's memory stays where it was."""
    site.bystanders.pause()
    try:
        levels = []
        for _ in range(NUM_REPEATS):
            base = site.next_base()
            before = site.tools.stats().books
            with Child(hold_blocks, str(site.server.socket_dir), transport, base) as victim:
                assert victim.hear() == NUM_BLOCKS // 2
                during = site.tools.stats().books
                assert during.leased == before.leased + NUM_BLOCKS // 2
                victim.kill()
                check_gone(site, victim.pid)
                victim.join()
            after = site.tools.stats().books
            assert after.leased == before.leased and after.in_flight == 0
            levels.append(memory_kib(site.server.pid))
        assert max(levels[NUM_REPEATS // 2 :]) - levels[NUM_REPEATS // 2 - 1] < 4096, levels
    finally:
        site.bystanders.resume()


def test_bystanders_were_at_work(site):
    site.progress()
    assert min(site.bystanders.rounds()) > 10
    errors = [line for line in site.server.stderr().splitlines() if " ERROR " in line]
    assert not errors, errors
