"""Makes the process run with the settings that were measured to matter (`radixkv.wire.channel`).

malloc reads its settings when a process starts, so the program starts itself once more with them.
"""

import gc
import os
import sys

from radixkv.wire.channel import missing_environment

MARKER = "_RADIXKV_STARTED_AGAIN"


def start_again_if_needed() -> None:
    """Replace this process by itself with the missing settings, at most once.

    What the user has set stays. Call it first thing in `main`, before threads exist and before
    grpc is imported; the process id stays the same.
    """
    missing = missing_environment()
    if os.environ.pop(MARKER, None) == str(os.getpid()) or not missing:
        return
    environ = {**os.environ, **missing, MARKER: str(os.getpid())}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def freeze_loaded_objects() -> None:
    """Keep what start-up made out of later garbage collections, which stop the world."""
    gc.collect()
    gc.freeze()
