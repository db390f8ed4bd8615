"""Seeded simulation of the tier state machine: every combination of tiers, under nasty faults.

A failure prints its seed and the last steps; `simulate(seed, steps)` runs it again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest

from radixkv.core import erasing, offload, onboard
from tests.core_audit import SENTINEL
from tests.tier_movers import NASTY, NONE, SLOW
from tests.tier_workers import BLOCK_SIZE, PLACEHOLDERS, TierSimulation

SIZES = list(product((0, 10, 60), (0, 40, 300), (False, True)))  # cpu, nvme, remote
POLICIES = ("write_back", "write_through", "selective")
ONBOARDING = ("wait", "best_effort", "timeout")
COMBINATIONS = list(product(SIZES, POLICIES, ONBOARDING))
SEEDS = range(len(COMBINATIONS))
NVME_SEEDS = [seed for seed in SEEDS if COMBINATIONS[seed][0][1]]
MANY_SEEDS = range(10_000, 10_000 + 30 * len(COMBINATIONS))
STEPS = 130
MANY_STEPS = 600
BATCH = 18


def simulation(seed: int) -> TierSimulation:
    """Tiers and policies by the seed's place in the list, the rest by the seed."""
    (cpu, nvme, remote), policy, onboarding = COMBINATIONS[seed % len(COMBINATIONS)]
    return TierSimulation(
        seed, faults=(NASTY, NASTY, SLOW, NONE)[seed // 7 % 4], cpu_blocks=cpu, nvme_blocks=nvme,
        remote=remote, write_policy=policy, onboarding=onboarding, break_even=seed % 5 == 0,
        eviction_wait_ms=(0, 300)[seed // 3 % 2], onboard_timeout_ms=150,
    )  # fmt: skip


@contextmanager
def told(sim: TierSimulation, how: str, seed: int, *more: int) -> Iterator[None]:
    """Transfers are short or long; whatever goes wrong says how to run it again, and its story."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (offload, onboard):
            patch.setattr(module, "RUN_BLOCKS", (32, 3, 1)[seed % 3])
        patch.setattr(onboard, "MAX_RUNS", (4, 2)[seed % 2])
        patch.setattr(offload, "MAX_IN_FLIGHT", (256, 4)[seed // 2 % 2])
        patch.setattr(erasing, "MAX_ERASED", (1024, 3)[seed // 4 % 2])
        try:
            yield
        except BaseException as error:
            error.add_note(f"{how}{(seed, *more)}: {sim.rig.config}\n{sim.rig.story()}")
            raise


def simulate(seed: int, steps: int) -> None:
    """One run."""
    sim = simulation(seed)
    with told(sim, "simulate", seed, steps):
        sim.run(steps)
        sim.clear()


@pytest.mark.parametrize("first", range(0, len(SEEDS), BATCH))
def test_tiers_that_are_slow_fail_lie_and_die(first: int) -> None:
    for seed in SEEDS[first : first + BATCH]:
        simulate(seed, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_seeds() -> None:
    for seed in MANY_SEEDS:
        simulate(seed, MANY_STEPS)


# ---- the process dies at every step -------------------------------------------------------


def die_at(seed: int, step: int, more: int) -> None:
    """The process dies after `step` steps; what is found then serves the next ones."""
    sim = simulation(seed)
    with told(sim, "die_at", seed, step, more):
        for _ in range(step):
            sim.step()
        sim.crash()
        sim.run(more)


@pytest.mark.parametrize("seed", [NVME_SEEDS[3], NVME_SEEDS[-3]])  # alone; with cpu and remote
def test_death_at_every_step(seed: int) -> None:
    for step in range(10, 82, 3):
        die_at(seed, step, 10)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", NVME_SEEDS)
def test_death_at_every_step_of_many_runs(seed: int) -> None:
    for step in range(200):
        die_at(seed, step, 20)


# ---- nothing is lost ----------------------------------------------------------------------


def keep_everything(seed: int, steps: int, cpu_blocks: int, nvme_blocks: int) -> None:
    """Without faults and with room below, what was committed is found in the end, all of it."""
    sim = TierSimulation(
        seed, faults=(NONE, SLOW)[seed % 2], careful=True, cpu_blocks=cpu_blocks,
        nvme_blocks=nvme_blocks, eviction_wait_ms=60_000, break_even=False,
    )  # fmt: skip
    with told(sim, "keep_everything", seed, steps, cpu_blocks, nvme_blocks):
        sim.run(steps)
        assert len(sim.committed) > 3, "the workers hardly got on"
        sim.rig.open(0)
        for prompt in sim.committed:
            whole = len(prompt.tokens) - len(prompt.tokens) % BLOCK_SIZE
            lease = sim.rig.lease(
                0, [*prompt.tokens, SENTINEL], namespace=prompt.namespace,
                contents=prompt.contents, placeholder_tokens=PLACEHOLDERS,
                capacity_wait_ms=60_000,
            )  # fmt: skip
            assert lease.published == whole, f"{lease.published} of {prompt}"
            sim.rig.release(lease)


@pytest.mark.parametrize("places", [(400, 0), (0, 400), (30, 400)])
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost(seed: int, places: tuple[int, int]) -> None:
    keep_everything(seed, 250, *places)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_lost_in_many_runs() -> None:
    for seed in range(200):
        for places in ((400, 0), (0, 400), (30, 400), (10, 400)):
            keep_everything(seed, 500, *places)
