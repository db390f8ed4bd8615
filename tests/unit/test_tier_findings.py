"""What attacks on the tiers found, each as the shortest story that shows it."""

import pytest

from tests.tier_places import NVME, REMOTE
from tests.unit.test_cases_c import B, hit, new_rig, push_out, text


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
@pytest.mark.parametrize("cpu", [1, 2, 4])
def test_a_cpu_tier_smaller_than_the_gpu_does_not_cut_nvme_off(policy: str, cpu: int) -> None:
    """It is full of beginnings of what is on the gpu; the rest has to go past it."""
    rig = new_rig(16, write_policy=policy, cpu_blocks=cpu, nvme_blocks=100, eviction_wait_ms=10_000)
    prompts = [text(6, start=100 * number) for number in range(1, 9)]
    for prompt in prompts:
        rig.cache_prompt(1, prompt, capacity_wait_ms=20_000)
        rig.finish_all()
    for prompt in prompts:
        rig.finish_all()
        assert hit(rig, prompt, capacity_wait_ms=20_000) == 6
    assert rig.cache.counters.dropped_blocks == 0


@pytest.mark.parametrize("place", [NVME, REMOTE])
def test_write_through_goes_on_after_its_edge_was_split(place: object) -> None:
    """The first blocks are being written when a second prompt leaves the path within them."""
    rig = new_rig(32, nvme_blocks=64 * (place is NVME), remote=place is REMOTE)
    first = text(8)
    rig.cache_prompt(1, first)
    assert rig.traffic.pending(target=place), "its write has not ended"
    second = first[: 4 * B] + text(4, start=500)
    rig.cache_prompt(1, second)
    rig.finish_all()
    written = rig.places.nvme if place is NVME else rig.places.remote
    assert len(written) == 12, "every block was written down, though nothing pressed for room"
    push_out(rig)
    assert hit(rig, first) == 8 and hit(rig, second) == 8
