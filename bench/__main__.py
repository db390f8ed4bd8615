"""`python -m bench [PART]… [--quick]`: measure, print a table, write JSON.

Run it on an otherwise idle machine. Results of the last run are in bench/results.json; parts that
were not run keep their rows there.
"""

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import copies, index, nvme, remote, serving, tiers, wire
from bench.measure import Row

RESULTS = Path(__file__).parent / "results.json"
PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "index": index.rows,
    "wire": wire.rows,
    "serving": serving.rows,
    "copies": copies.rows,
    "nvme": nvme.rows,
    "remote": remote.rows,
    "tiers": tiers.rows,
}


def main() -> None:
    """Run the chosen parts (all by default)."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    print(machine())
    for part in options.parts or PARTS:
        start = time.monotonic()
        rows = PARTS[part](options.quick)
        print(f"\n{part}, {time.monotonic() - start:.0f} s\n{table(rows)}", flush=True)
        results[part] = {
            "machine": machine(),
            "commit": commit(),
            "rows": [asdict(row) | {"verdict": row.verdict} for row in rows],
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def machine() -> str:
    """Processor, cores, load, Python."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    load = os.getloadavg()[0]
    return f"{model}, {os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}"


def commit() -> str:
    """The commit that is measured, with a mark if the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def table(rows: list[Row]) -> str:
    """What, aim, measured, interval, verdict."""
    lines: list[tuple[str, ...]] = [("what", "aim", "measured", "interval", "verdict", "")]
    for row in rows:
        aim = "" if row.limit is None else f"{'>=' if row.at_least else '<='} {number(row.limit)}"
        spread = "" if row.low is None else f"{number(row.low)} – {number(row.high)}"
        measured = "–" if row.measured is None else f"{number(row.measured)} {row.unit}"
        lines.append((row.name, aim, measured, spread, row.verdict, row.note))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def number(value: Any) -> str:
    """Three digits that matter."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
