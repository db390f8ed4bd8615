"""The table at the end of the demo."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from radixkv_worker.demo.checks import Check, Counted
from radixkv_worker.demo.runner import Answered

WIDTH = 78


def kind_of(result: Answered, computed_by: dict[str, tuple[int, int]]) -> str:
    """Cold if its topic was computed in the same wave, else a hit: on whose blocks?

    `computed_by` maps a topic or conversation to (worker, wave) that last computed it.
    """
    worker, wave = computed_by[result.ask.follows or result.ask.topic]
    if wave == result.wave:
        return "cold"
    return "hit, same worker" if worker == result.ask.worker else "hit, other worker"


def times_by_kind(answered: Sequence[Answered]) -> dict[str, list[Answered]]:
    """Requests by kind, in the table's order."""
    kinds: dict[str, list[Answered]] = {
        "cold": [], "hit, same worker": [], "hit, other worker": []
    }  # fmt: skip
    computed_by: dict[str, tuple[int, int]] = {}
    for result in answered:
        computed_by.setdefault(result.ask.topic, (result.ask.worker, result.wave))
        computed_by[result.ask.name] = (result.ask.worker, result.wave)
        kinds[kind_of(result, computed_by)].append(result)
    return kinds


def render(
    answered: Sequence[Answered], counted: Counted, stats: Any, checks: Sequence[Check]
) -> str:
    """Times, rates, sizes and checks as text."""
    lines = ["", "time to first token".ljust(26) + "requests   prompt   cached     median"]
    medians = {}
    for kind, results in times_by_kind(answered).items():
        medians[kind] = median(result.ttft_ms for result in results)
        prompt = median(len(result.prompt) for result in results)
        cached = median(result.stats["cached_tokens"] for result in results)
        lines.append(
            f"  {kind:<24}{len(results):>8}{prompt:>9.0f}{cached:>9.0f}{medians[kind]:>8.0f} ms"
        )
    counters, block_mib = stats.counters, stats.block_bytes / (1 << 20)
    rate = counters.hit_tokens / counters.queried_tokens
    private, caches = sum(counted.private_blocks), len(counted.private_blocks)
    faster = medians["cold"] / medians["hit, other worker"]
    lines += [
        f"  a hit on the other worker's blocks is {faster:.1f} times as fast as cold",
        "",
        _row(
            "prefix hit rate",
            f"{rate:.1%} ({counters.hit_tokens:,} of {counters.queried_tokens:,} tokens)",
        ),
        _row(
            "blocks in use",
            f"{stats.books.cached:,} ({stats.books.cached * block_mib:.0f} MiB); "
            f"{caches} private caches: {private:,} ({private * block_mib:.0f} MiB)",
        ),
        _row("KV bytes copied for hits", _detail(checks, "no KV is copied for a hit")),
        "",
    ]
    for check in checks:
        lines.append(f"{'ok    ' if check.holds else 'FAILED'} {check.claim}")
        lines.append(f"       {check.detail}")
    lines.append("-" * WIDTH)
    return "\n".join(lines)


def _row(name: str, value: str) -> str:
    return f"{name:<26}{value}"


def _detail(checks: Sequence[Check], claim: str) -> str:
    return next(check.detail for check in checks if check.claim == claim).split(" bytes")[0]
