"""radixkv-server whose copies wait while the file named by COPY_GATE exists (MAX_GATED_S at most).

    server = ServerProcess(…, env={"COPY_GATE": str(path)})
    server.command[2] = "tests.gated_server"
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from radixkv.cli.server import main
from radixkv.pools.copies import CopyThread

MAX_GATED_S = 10.0
GATE = Path(os.environ["COPY_GATE"])


def wait_for_gate(op: Any) -> None:
    """Hold the copying thread up."""
    deadline = time.monotonic() + MAX_GATED_S
    while GATE.exists() and time.monotonic() < deadline:
        time.sleep(0.001)


class GatedCopyThread(CopyThread):
    """Waits before each copy."""

    def __init__(self, arena: Any, before_copy: Any = None) -> None:
        assert before_copy is None, "something else waits already"
        super().__init__(arena, wait_for_gate)


if __name__ == "__main__":
    import radixkv.server.pool_host

    radixkv.server.pool_host.CopyThread = GatedCopyThread
    sys.exit(main())
