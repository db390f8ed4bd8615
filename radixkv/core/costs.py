"""What moving a block and computing a token costs, measured; the rule that compares the two."""

from __future__ import annotations

from radixkv.core.tier_ops import Place

WEIGHT = 0.2  # of the newest measurement in a moving average


class Costs:
    """Moving averages. What was not measured yet is assumed to pay, so that it gets measured."""

    __slots__ = ("_move_s", "_prefill_s")

    def __init__(self) -> None:
        self._move_s: dict[tuple[Place, Place], float] = {}
        self._prefill_s: float | None = None

    def moved(self, source: Place, target: Place, num_blocks: int, elapsed_s: float) -> None:
        """A transfer of so many blocks took so long, without its time in queues."""
        key = (source, target)
        self._move_s[key] = _mix(self._move_s.get(key), elapsed_s / num_blocks)

    def prefilled(self, num_tokens: int, elapsed_s: float) -> None:
        """A worker computed so many tokens of a prompt in this time."""
        self._prefill_s = _mix(self._prefill_s, elapsed_s / num_tokens)

    def move_s(self, source: Place, target: Place) -> float | None:
        """Seconds per block."""
        return self._move_s.get((source, target))

    @property
    def prefill_s(self) -> float | None:
        """Seconds per token."""
        return self._prefill_s

    def gain_s(self, source: Place, num_blocks: int, block_size: int, queued: int) -> float:
        """Seconds that bringing blocks up saves over computing them; `queued` are in front."""
        move_s = self.move_s(source, Place.GPU)
        if move_s is None or self._prefill_s is None:
            return 0.0
        return num_blocks * block_size * self._prefill_s - (num_blocks + queued) * move_s


def _mix(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
