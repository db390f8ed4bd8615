"""Movers as processes: bytes, failures of one block, order, cancellation, the nvme store."""

import os
import signal

import pytest

from radixkv.core.tier_ops import Cancel, Place, Probe
from radixkv.pools.movers import ProbeEnded, TransferEnded
from tests.mover_rig import BAD, CPU, DONE, FAILED, GPU, NVME, REMOTE, MoverRig, transfer


@pytest.mark.parametrize("block_bytes", [1000, 360 << 10])
@pytest.mark.parametrize("verify_all", [False, True])
def test_blocks_come_back_from_cpu_as_they_left(tmp_path, block_bytes, verify_all) -> None:
    with MoverRig(tmp_path, block_bytes=block_bytes, num_processes=2, verify_all=verify_all) as rig:
        rig.fill(range(1, 33))
        assert rig.outcomes(transfer(1, GPU, CPU, range(1, 33), range(30, 62))) == (DONE,) * 32
        rig.gpu.view()[:] = 0
        op = transfer(2, CPU, GPU, range(30, 62), range(33, 65))
        assert rig.outcomes(op) == (DONE,) * 32
        assert all(rig.holds(rig.gpu, range(33, 65)))
        assert not rig.gpu.view()[:33].any(), "other blocks are not touched"
        assert not rig.cpu.view()[:30].any() and not rig.cpu.view()[62:].any()
        ended = rig.ended[2]
        assert isinstance(ended, TransferEnded) and 0 < ended.elapsed_s < 5
        assert rig.movers.problems() == {}


def test_many_transfers_over_several_movers(tmp_path) -> None:
    with MoverRig(tmp_path, num_processes=2) as rig:
        rig.fill(range(1, 65))
        down = [transfer(n, GPU, CPU, range(n, n + 1), range(n, n + 1)) for n in range(1, 65)]
        rig.submit(*down)
        rig.until(lambda: len(rig.ended) == 64)
        rig.gpu.view()[:] = 0
        for n in range(1, 65):
            rig.submit(transfer(100 + n, CPU, GPU, range(n, n + 1), range(65 - n, 66 - n)))
        rig.until(lambda: len(rig.ended) == 128)
        assert all(set(ended[1]) == {DONE} for ended in rig.ended.values())
        assert all(rig.holds(rig.gpu, range(65 - n, 66 - n), n) == [True] for n in range(1, 65))


def test_c4_one_failed_block_ends_its_transfer_and_no_other(tmp_path) -> None:
    with MoverRig(tmp_path) as rig:
        rig.fill(range(1, 6))
        rig.faults("gpu>cpu 3 fail")
        assert rig.outcomes(transfer(1, GPU, CPU, range(1, 6), range(1, 6))) == (
            (DONE,) * 3 + (FAILED,) * 2
        )
        assert rig.holds(rig.cpu, range(1, 6)) == [True] * 3 + [False] * 2
        assert rig.movers.problems() == {CPU: "a fault injected by a test"}
        rig.faults()
        assert rig.outcomes(transfer(2, GPU, CPU, range(1, 6), range(1, 6))) == (DONE,) * 5
        rig.faults("cpu>gpu 0 fail")
        assert rig.outcomes(transfer(3, CPU, GPU, range(1, 6), range(6, 11))) == (FAILED,) * 5
        rig.faults()
        assert rig.outcomes(transfer(4, CPU, GPU, range(1, 6), range(6, 11))) == (DONE,) * 5
        assert all(rig.holds(rig.gpu, range(6, 11)))


def test_a_block_that_rots_on_cpu_is_bad_never_done(tmp_path) -> None:
    with MoverRig(tmp_path, verify_all=True) as rig:
        rig.fill(range(1, 6))
        rig.outcomes(transfer(1, GPU, CPU, range(1, 6), range(1, 6)))
        rig.cpu.view()[3, 77] ^= 1
        op = transfer(2, CPU, GPU, range(1, 6), range(6, 11))
        assert rig.outcomes(op) == (DONE,) * 2 + (BAD,) + (FAILED,) * 2
        assert "block 3 on cpu" in rig.movers.problems()[CPU]
        # Written anew, it is good again.
        rig.outcomes(transfer(3, GPU, CPU, range(1, 6), range(1, 6)))
        assert rig.outcomes(op._replace(transfer_id=4)) == (DONE,) * 5
        assert all(rig.holds(rig.gpu, range(6, 11)))


def test_without_verify_all_a_sample_is_verified(tmp_path) -> None:
    with MoverRig(tmp_path, verify_all=False) as rig:
        rig.fill(range(1, 2))
        rig.outcomes(transfer(1, GPU, CPU, range(1, 2), range(1, 2)))
        rig.cpu.view()[1, 0] ^= 1
        for n in range(2, 402):
            rig.submit(transfer(n, CPU, GPU, range(1, 2), range(2, 3)))
        rig.until(lambda: len(rig.ended) == 401)
        num_bad = sum(ended[1] == (BAD,) for ended in rig.ended.values())
        assert 1 <= num_bad <= 100, "about one in 16"


# ---- cancellation, order ----------------------------------------------------------------------


def test_a_cancelled_transfer_stops_at_the_next_block(tmp_path) -> None:
    with MoverRig(tmp_path) as rig:
        rig.fill(range(1, 6))
        rig.faults("gpu>cpu 2 hold")
        rig.submit(transfer(1, GPU, CPU, range(1, 6), range(1, 6)))
        rig.until(lambda: rig.holds(rig.cpu, range(1, 3)) == [True, True])
        rig.submit(Cancel(1), Cancel(1))
        rig.run_for(0.05)
        assert rig.ended == {}, "not before the mover has let go of it"
        rig.faults()
        assert rig.outcomes_of(1) == (DONE,) * 2 + (FAILED,) * 3
        rig.submit(Cancel(1))
        assert rig.movers.problems() == {}
        assert rig.outcomes(transfer(2, GPU, CPU, range(1, 6), range(1, 6))) == (DONE,) * 5


def test_a_cancelled_transfer_that_waits_ends_at_once(tmp_path) -> None:
    with MoverRig(tmp_path) as rig:
        rig.faults("gpu>cpu 0 hold")
        for n in range(1, 5):
            rig.submit(transfer(n, GPU, CPU, range(n, n + 1), range(n, n + 1)))
        rig.until(lambda: rig.movers.num_queued()[CPU] == 2)
        rig.submit(Cancel(4))
        assert rig.ended == {}, "nothing is reported from within submit"
        assert rig.outcomes_of(4) == (FAILED,)
        rig.faults()
        assert [rig.outcomes_of(n) for n in (1, 2, 3)] == [(DONE,)] * 3
        assert not rig.cpu.view()[4].any()


def test_what_is_waited_for_overtakes_what_is_not(tmp_path) -> None:
    with MoverRig(tmp_path) as rig:
        rig.fill(range(1, 9))
        rig.outcomes(transfer(1, GPU, CPU, range(1, 9), range(1, 9)))
        rig.faults("gpu>cpu 0 hold")
        for n in range(2, 6):
            rig.submit(transfer(n, GPU, CPU, range(n, n + 1), range(n, n + 1)))
        rig.until(lambda: rig.movers.num_queued()[CPU] == 2)
        for n in range(6, 8):
            rig.submit(transfer(n, CPU, GPU, range(n, n + 1), range(n, n + 1)))
        rig.faults()
        rig.until(lambda: len(rig.ended) == 7)
        assert list(rig.ended) == [1, 2, 3, 6, 7, 4, 5]


# ---- nvme, remote -----------------------------------------------------------------------------


def test_blocks_come_back_from_nvme_as_they_left(tmp_path) -> None:
    with MoverRig(tmp_path, num_processes=2, nvme_blocks=64) as rig:
        rig.fill(range(1, 33))
        assert rig.outcomes(transfer(1, GPU, NVME, range(1, 33), range(33, 65))) == (DONE,) * 32
        rig.outcomes(transfer(2, GPU, CPU, range(1, 33), range(1, 33)))
        assert rig.outcomes(transfer(3, CPU, NVME, range(1, 33), range(1, 33))) == (DONE,) * 32
        for number, slots in enumerate((range(33, 65), range(1, 33))):
            rig.gpu.view()[:] = 0
            op = transfer(10 + number, NVME, GPU, slots, range(1, 33))
            assert rig.outcomes(op) == (DONE,) * 32
            assert all(rig.holds(rig.gpu, range(1, 33)))


def test_nvme_blocks_that_are_erased_or_others_are_bad(tmp_path) -> None:
    with MoverRig(tmp_path, nvme_blocks=8) as rig:
        rig.fill(range(1, 5))
        rig.outcomes(transfer(1, GPU, NVME, range(1, 5), range(1, 5)))
        assert rig.outcomes(transfer(2, NVME, GPU, range(1, 5), range(1, 5), first=2)) == (
            (BAD,) * 4
        )
        assert rig.erase(3, range(2, 3))
        assert rig.outcomes(transfer(4, NVME, GPU, range(1, 3), range(1, 3))) == (DONE, BAD)


def test_what_rots_on_cpu_is_not_written_to_nvme(tmp_path) -> None:
    with MoverRig(tmp_path, nvme_blocks=8) as rig:
        rig.fill(range(1, 5))
        rig.outcomes(transfer(1, GPU, CPU, range(1, 5), range(1, 5)))
        rig.cpu.view()[2, 5] ^= 1
        op = transfer(2, CPU, NVME, range(1, 5), range(1, 5))
        assert rig.outcomes(op) == (DONE, BAD, FAILED, FAILED)
        assert rig.outcomes(transfer(3, NVME, GPU, range(1, 3), range(1, 3))) == (DONE, BAD)


def test_a_place_whose_movers_cannot_start_fails_soon_and_alone(tmp_path) -> None:
    with MoverRig(tmp_path, remote_url="nonsense://nowhere") as rig:
        rig.submit(Probe(1, (b"d" * 16,)))
        assert rig.end_of(1) == ProbeEnded(1, None)
        rig.submit(Probe(2, (b"d" * 16,)))
        assert rig.ended.keys() == {1}, "nothing is reported from within submit"
        assert rig.outcomes(transfer(3, GPU, REMOTE, range(1, 3), range(0))) == (FAILED,) * 2
        assert rig.end_of(2) == ProbeEnded(2, None)
        assert rig.movers.problems()[REMOTE]
        assert rig.outcomes(transfer(4, GPU, CPU, range(1, 3), range(1, 3))) == (DONE,) * 2


# ---- the processes ----------------------------------------------------------------------------


def test_movers_are_niced_and_leave_signals_to_the_server(tmp_path) -> None:
    with MoverRig(tmp_path, num_processes=2) as rig:
        rig.outcomes(transfer(1, GPU, CPU, range(1, 2), range(1, 2)))
        rig.until(lambda: len(rig.pids()) == 2)
        pids = rig.pids()
        own = os.getpriority(os.PRIO_PROCESS, 0)
        for n, pid in enumerate(pids):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
            rig.submit(transfer(10 + n, GPU, CPU, range(1, 2), range(1 + n, 2 + n)))
        rig.until(lambda: len(rig.ended) == 3)
        rig.until(lambda: [os.getpriority(os.PRIO_PROCESS, pid) for pid in pids] == [own + 10] * 2)
        assert rig.pids() == pids and rig.movers.num_exits() == {Place.CPU: 0}
