"""How the places below the gpu do: what was moved, and whether they are left alone for now.

A place whose reads (or writes) fail MAX_FAILURES times in a row is *suspended* for reads (writes),
longer each time: nothing is read from it (written to it) until it is tried again. A full disk can
still be read. While an operation takes far too long (a stopped mover), nothing more is begun.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.core.tier_ops import Place

MAX_FAILURES = 3  # in a row
FIRST_SUSPENSION_MS = 1_000
MAX_SUSPENSION_MS = 60_000


@dataclass(slots=True)
class Direction:
    """Reads or writes of a place; `until_ms` is 0 unless they are suspended."""

    done_blocks: int = 0
    failed_blocks: int = 0
    until_ms: int = 0
    _failures: int = 0  # in a row
    _suspensions: int = 0  # in a row

    def worked(self) -> None:
        """An operation was of use."""
        self._failures = self._suspensions = 0

    def failed(self, now_ms: int) -> None:
        """An operation was of no use."""
        self._failures += 1
        if self._failures >= MAX_FAILURES and now_ms >= self.until_ms:
            suspension_ms = FIRST_SUSPENSION_MS << min(self._suspensions, 10)
            self.until_ms = now_ms + min(suspension_ms, MAX_SUSPENSION_MS)
            self._suspensions += 1

    def stalled(self, now_ms: int) -> None:
        """An operation is under way far too long: leave this alone for a while."""
        self.until_ms = max(self.until_ms, now_ms + FIRST_SUSPENSION_MS)

    def is_suspended(self, now_ms: int) -> bool:
        """Whether to leave this alone for now."""
        return now_ms < self.until_ms


@dataclass(slots=True)
class Health:
    """Of one place."""

    reads: Direction = field(default_factory=Direction)
    writes: Direction = field(default_factory=Direction)
    bad_blocks: int = 0  # that were read and not what they should be
    hit_tokens: int = 0  # brought up for the Acquire that hit them

    def is_degraded(self, now_ms: int) -> bool:
        """Whether reads or writes are suspended."""
        return self.reads.is_suspended(now_ms) or self.writes.is_suspended(now_ms)


class Healths:
    """Of all places below the gpu."""

    def __init__(self) -> None:
        self._places = {place: Health() for place in Place}

    def __getitem__(self, place: Place) -> Health:
        return self._places[place]

    def resume(self, now_ms: int) -> None:
        """End the suspensions whose time is over."""
        for direction in self._directions():
            if direction.until_ms <= now_ms:
                direction.until_ms = 0

    def resume_ms(self) -> int | None:
        """When `resume` has something to do."""
        return min((d.until_ms for d in self._directions() if d.until_ms), default=None)

    def _directions(self) -> list[Direction]:
        return [way for health in self._places.values() for way in (health.reads, health.writes)]
