"""How things are measured: interleaved pairs of batches, medians, an interval, a verdict.

What is compared is run in turns, so that a machine that slows down slows both. A batch repeats a
call until it takes long enough for the clock. The interval holds the true median with at least
95 % certainty (order statistics; no assumption about the distribution).
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

MIN_PAIRS = 15
QUICK_PAIRS = 5  # where --quick asks for less
Call = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """Ours ÷ theirs over all pairs, with both medians in microseconds per call."""

    median: float
    low: float
    high: float
    ours_us: float
    theirs_us: float


@dataclass(frozen=True)
class Row:
    """One line of the table. `limit` None = no aim; `at_least` = bigger is better."""

    name: str
    measured: float | None
    unit: str = ""
    limit: float | None = None
    at_least: bool = False
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """Met, missed and by how much, or why there is nothing to say."""
        if self.measured is None:
            return "not measured"
        if self.limit is None:
            return ""
        small, big = (self.limit, self.measured)[:: -1 if self.at_least else 1]
        if big <= small:
            return "met"
        return f"missed by {big / small:.2f}x" if small else "missed"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics around the median that hold it with at least 95 % certainty."""
    ordered = sorted(values)
    count = len(ordered)
    tail, outside, chance = 0, 0.5**count, 0.5**count
    while 2 * outside <= 0.05 and tail < (count - 1) // 2:
        tail += 1
        chance *= (count - tail + 1) / tail
        outside += chance
    return ordered[max(tail - 1, 0)], ordered[min(count - tail, count - 1)]


def batch_us(call: Call, repeats: int, clock: Callable[[], float]) -> float:
    """Microseconds per call over one batch."""
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats * 1e6


def cpu_us(call: Call, repeats: int) -> float:
    """CPU time of this thread per call."""
    return batch_us(call, repeats, time.thread_time)


def wall_us(call: Call, repeats: int) -> float:
    """Wall time per call."""
    return batch_us(call, repeats, time.perf_counter)


def repeats_for(call: Call, least_ms: float = 2.0) -> int:
    """How many calls make a batch of at least that length; also warms up."""
    call()
    once = max(wall_us(call, 3), 0.05)
    return max(int(least_ms * 1000 / once), 1)


def compare(
    ours: Call,
    theirs: Call,
    pairs: int = MIN_PAIRS,
    measure: Callable[[Call, int], float] = cpu_us,
    repeats: tuple[int, int] | None = None,
) -> Ratio:
    """Batches of both in turns; garbage collection waits meanwhile."""
    counts = repeats or (repeats_for(ours), repeats_for(theirs))
    gc.collect()
    gc.disable()
    try:
        both = [(measure(ours, counts[0]), measure(theirs, counts[1])) for _ in range(pairs)]
    finally:
        gc.enable()
    ratios = [mine / other for mine, other in both]
    low, high = interval(ratios)
    return Ratio(
        median(ratios),
        low,
        high,
        median(pair[0] for pair in both),
        median(pair[1] for pair in both),
    )


def ratio_row(name: str, ratio: Ratio, limit: float | None, their_name: str) -> Row:
    """The row of a comparison."""
    note = f"{ratio.ours_us:.1f} µs, {their_name} {ratio.theirs_us:.1f} µs"
    return Row(name, ratio.median, "x", limit, low=ratio.low, high=ratio.high, note=note)


def median_row(
    name: str, values: Sequence[float], unit: str, limit: float | None = None,
    at_least: bool = False, note: str = "",
) -> Row:  # fmt: skip
    """The row of a series of measurements."""
    low, high = interval(values)
    return Row(name, median(values), unit, limit, at_least, low, high, note)
