"""Movers that die, stop or hang, and what becomes of their operations; the end of the server."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from radixkv.pools.mover_faults import FAULTS_VARIABLE
from radixkv.pools.mover_ring import SLOTS
from radixkv.pools.movers import CLOSE_TIMEOUT_S
from tests.fault_surroundings import until
from tests.mover_rig import CPU, DONE, FAILED, GPU, NVME, MoverRig, transfer


def is_there(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def one_block(transfer_id: int, block: int):
    return transfer(transfer_id, GPU, CPU, range(block, block + 1), range(block, block + 1))


@pytest.mark.parametrize("place", [CPU, NVME])
def test_a_killed_mover_fails_its_operations_and_another_one_goes_on(tmp_path, place) -> None:
    with MoverRig(tmp_path, nvme_blocks=32) as rig:
        rig.fill(range(1, 33))
        rig.faults("* 20 kill")
        rig.submit(transfer(1, GPU, place, range(1, 33), range(1, 33)))
        rig.submit(transfer(2, GPU, place, range(1, 2), range(1, 2)))  # lies ready behind it
        rig.submit(transfer(3, GPU, place, range(1, 2), range(1, 2)))  # waits
        rig.until(lambda: rig.pids(place))
        (victim,) = rig.pids(place)
        assert rig.outcomes_of(1) == (FAILED,) * 32
        assert not is_there(victim)
        assert rig.outcomes_of(2) == (FAILED,)
        rig.faults()
        assert rig.outcomes_of(3) == (DONE,)
        assert rig.pids(place) != [victim] and rig.movers.num_exits()[place] == 1
        assert rig.outcomes(transfer(4, GPU, place, range(1, 33), range(1, 33))) == (DONE,) * 32
        assert rig.outcomes(transfer(5, place, GPU, range(1, 33), range(33, 65))) == (DONE,) * 32
        assert all(rig.holds(rig.gpu, range(33, 65)))


def test_killed_at_random_moments_every_operation_ends_once_and_done_means_done(tmp_path) -> None:
    with MoverRig(tmp_path, num_processes=2) as rig:
        rig.fill(range(1, 65))
        op_id = 0
        for round_ in range(6):
            rig.until(lambda: len(rig.pids()) == 2)
            first = op_id + 1
            for block in range(1, 65, 8):
                op_id += 1
                blocks = range(block, block + 8)
                rig.submit(transfer(op_id, GPU, CPU, blocks, blocks))
            rig.run_for(0.0005 * round_)
            alive = rig.pids()  # the last victim's exit may be seen only now
            os.kill(alive[round_ % len(alive)], signal.SIGKILL)
            for n, block in enumerate(range(1, 65, 8)):
                outcomes = rig.outcomes_of(first + n)
                held = rig.holds(rig.cpu, range(block, block + 8), block)
                assert all(held[k] for k, outcome in enumerate(outcomes) if outcome is DONE)
            rig.cpu.view()[:] = 0


def test_an_answer_sent_before_the_exit_still_counts(tmp_path) -> None:
    with MoverRig(tmp_path) as rig:
        rig.fill(range(1, 4))
        rig.faults("gpu>cpu 0 hold")
        rig.submit(*(one_block(n, n) for n in range(1, 4)))
        rig.until(lambda: rig.movers.num_queued()[CPU] == 1)
        (pid,) = rig.pids()
        rig.faults("gpu>cpu end hold")
        until(lambda: rig.holds(rig.cpu, range(1, 2)) == [True], "it is copied")
        rig.faults("gpu>cpu 0 delay 0.5")
        time.sleep(0.2)  # the loop does not run: the first answer lies unread
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_there(pid), "it is dead")
        rig.faults()
        assert rig.outcomes_of(1) == (DONE,)
        assert rig.outcomes_of(2) == (FAILED,)
        assert rig.outcomes_of(3) == (DONE,)


def test_c1_a_stopped_mover_keeps_its_operations_and_holds_up_no_others(tmp_path) -> None:
    with MoverRig(tmp_path, num_processes=2) as rig:
        rig.fill(range(1, 33))
        rig.until(lambda: len(rig.pids()) == 2)
        rig.submit(*(one_block(n, n) for n in range(1, 3)))
        rig.until(lambda: len(rig.ended) == 2)
        stopped = rig.pids()[0]
        os.kill(stopped, signal.SIGSTOP)
        rig.submit(*(one_block(n, n) for n in range(3, 33)))
        rig.until(lambda: len(rig.ended) >= 32 - SLOTS)
        rig.run_for(0.3)
        kept = set(range(1, 33)) - rig.ended.keys()
        assert len(kept) <= SLOTS, "in flight with the stopped one, given to nobody else"
        assert not any(rig.cpu.view()[n].any() for n in kept)
        os.kill(stopped, signal.SIGCONT)
        rig.until(lambda: len(rig.ended) == 32)
        assert all(ended[1] == (DONE,) for ended in rig.ended.values())
        assert all(rig.holds(rig.cpu, range(1, 33)))
        assert rig.movers.num_exits()[CPU] == 0


def test_what_a_stopped_mover_has_fails_when_it_has_exited_and_not_before(tmp_path) -> None:
    with MoverRig(tmp_path) as rig:
        rig.outcomes(one_block(1, 1))
        (pid,) = rig.pids()
        os.kill(pid, signal.SIGSTOP)
        rig.submit(one_block(2, 2))
        rig.run_for(0.3)
        assert 2 not in rig.ended
        os.kill(pid, signal.SIGKILL)
        assert rig.outcomes_of(2) == (FAILED,)
        assert rig.outcomes(one_block(3, 3)) == (DONE,)


def test_a_mover_that_dies_again_and_again_is_started_ever_more_slowly(tmp_path) -> None:
    with MoverRig(tmp_path) as rig:
        rig.faults("* 0 kill")
        start = time.monotonic()
        for n in range(1, 5):
            assert rig.outcomes(one_block(n, n)) == (FAILED,)
        assert rig.movers.num_exits()[CPU] == 4
        assert time.monotonic() - start > 0.1 + 0.2 + 0.4
        rig.faults()
        assert rig.outcomes(one_block(5, 5)) == (DONE,)


@pytest.mark.parametrize("how", ["idle", "busy", "hung", "stopped", "starting"])
def test_close_ends_promptly(tmp_path, how) -> None:
    with MoverRig(tmp_path, num_processes=2, nvme_blocks=8) as rig:
        if how != "starting":
            rig.outcomes(transfer(1, GPU, CPU, range(1, 2), range(1, 2)))
            rig.outcomes(transfer(2, GPU, NVME, range(1, 2), range(1, 2)))
        if how == "busy":
            rig.faults("* * delay 0.02")
        if how == "hung":
            rig.faults("* 0 hold")
        pids = [pid for place in (CPU, NVME) for pid in rig.pids(place)]
        if how == "stopped":
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        for n in range(10, 20):
            rig.submit(transfer(n, GPU, CPU, range(1, 33), range(1, 33)))
            rig.submit(transfer(n + 10, GPU, NVME, range(1, 9), range(1, 9)))
        rig.run_for(0.05)
        ended = dict(rig.ended)
        start = time.monotonic()
        rig.close()
        assert time.monotonic() - start < CLOSE_TIMEOUT_S + 0.5
        assert not any(map(is_there, pids))
        assert rig.ended == ended, "nothing is reported any more"
        rig.movers.close()


SERVER = """
import asyncio, sys
from pathlib import Path
from tests.mover_rig import *
rig = MoverRig(Path(sys.argv[1]), num_processes=2, nvme_blocks=8)
rig.faults("* 1 hold")
rig.outcomes(transfer(1, GPU, CPU, range(1, 2), range(1, 2)))
rig.outcomes(transfer(2, GPU, NVME, range(1, 2), range(1, 2)))
rig.until(lambda: sum(map(len, rig.movers.pids().values())) == 4)
rig.submit(transfer(3, GPU, CPU, range(1, 9), range(1, 9)))
rig.submit(transfer(4, GPU, NVME, range(1, 9), range(1, 9)))
rig.run_for(0.1)
print(*rig.pids(CPU), *rig.pids(NVME), flush=True)
rig.run_for(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_movers_end_with_the_server_whatever_they_are_at(tmp_path, how) -> None:
    command = [sys.executable, "-c", SERVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pids = [int(pid) for pid in server.stdout.readline().split()]
        assert len(pids) == 4 and all(map(is_there, pids))
        os.kill(pids[1], signal.SIGSTOP)
        server.send_signal(how)
        server.wait()
        until(lambda: not any(map(is_there, pids)), "all movers are gone")


def test_faults_are_in_effect_only_where_the_environment_says_so(tmp_path) -> None:
    with MoverRig(tmp_path) as rig:
        rig.outcomes(one_block(1, 1))
        rig.faults("* * fail")
        assert rig.outcomes(one_block(2, 2)) == (FAILED,)
        del os.environ[FAULTS_VARIABLE]
        os.kill(rig.pids()[0], signal.SIGKILL)
        rig.until(lambda: rig.movers.num_exits()[CPU] == 1)
        assert rig.outcomes(one_block(3, 3)) == (DONE,)
