"""Faults for tests: what happens to a mover before a block, as a file says that tests may change.

Only in effect where the environment names such a file in `MOVER_FAULTS`. Each line is

    HOP INDEX ACTION [SECONDS]

HOP is e.g. gpu>cpu, nvme>gpu, erase or probe; INDEX a block's position in its operation, "end" for
behind the last one; "*" is any of either. ACTION is `delay` (by SECONDS), `hold` (until the file
no longer has the line, MAX_HOLD_S at most), `fail` or `kill`.
"""

import os
import signal
import time
from pathlib import Path

from radixkv.core.tier_ops import Transfer
from radixkv.pools.mover_ring import MoverOp, num_blocks

FAULTS_VARIABLE = "MOVER_FAULTS"
MAX_HOLD_S = 60.0


class Faults:
    """Called before each block; see `MoverWork`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, op: MoverOp, index: int) -> None:
        """Do what the lines for this point say, in order. Raises OSError for `fail`."""
        for line in self._lines():
            hop, position, action, *seconds = line.split()
            if hop in ("*", _hop(op)) and position in ("*", _position(op, index)):
                self._act(line, action, float(seconds[0]) if seconds else 0.0)

    def _lines(self) -> list[str]:
        try:
            return [line for line in self._path.read_text().splitlines() if line.strip()]
        except FileNotFoundError:
            return []

    def _act(self, line: str, action: str, seconds: float) -> None:
        if action == "delay":
            time.sleep(seconds)
        elif action == "hold":
            deadline = time.monotonic() + MAX_HOLD_S
            while line in self._lines() and time.monotonic() < deadline:
                time.sleep(0.002)
        elif action == "fail":
            raise OSError("a fault injected by a test")
        elif action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise ValueError(f"unknown action: {line}")


def _hop(op: MoverOp) -> str:
    if isinstance(op, Transfer):
        return f"{op.source.name}>{op.target.name}".lower()
    return type(op).__name__.lower()


def _position(op: MoverOp, index: int) -> str:
    return "end" if index == num_blocks(op) else str(index)
