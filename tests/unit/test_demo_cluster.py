"""The cluster demo's own arithmetic: a good run passes, and every check can fail."""

from dataclasses import replace
from typing import Any

import pytest

from radixkv_client import Onboarding
from radixkv_worker.demo_cluster.__main__ import Result, judge, render

LOADED = Onboarding("LOADED", 0, 0, 32, 0)


def answer(cached: int, ttft_ms: float, tokens: tuple[int, ...] = (7, 8)) -> dict[str, Any]:
    return {
        "radixkv": {"cached_tokens": cached, "ttft_ms": ttft_ms},
        "choices": [{"radixkv": {"tokens": list(tokens)}}],
    }


GOOD = Result(answer(0, 90.0), answer(48, 10.0), answer(0, 100.0), LOADED, 32, 80, 64)


def test_a_good_run():
    found = judge(GOOD)
    assert all(check.holds for check in found)
    assert "10.0 times as fast" in render(GOOD, found)


@pytest.mark.parametrize(
    ("bad", "failing"),
    [
        (replace(GOOD, shared=answer(32, 10.0), hit_tokens=64), [0]),
        (replace(GOOD, onboarding=None, hit_tokens=48), [1]),
        (replace(GOOD, onboarding=replace(LOADED, remote_tokens=16), hit_tokens=64), [1]),
        (replace(GOOD, onboarding=replace(LOADED, reason="FAILED")), [1]),
        (replace(GOOD, hit_tokens=79), [2]),
        (replace(GOOD, shared=answer(48, 10.0, (7, 9))), [3]),
    ],
)
def test_every_check_can_fail(bad, failing):
    assert [index for index, check in enumerate(judge(bad)) if not check.holds] == failing
