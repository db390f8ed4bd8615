"""A process with a RemoteStore that puts some blocks, says so, and stays until stdin ends.

usage: python -m tests.remote_peer URL BLOCK_BYTES FIRST_NUMBER END_NUMBER
"""

import sys

from tests.remote_rig import DONE, open_store, put


def main() -> None:
    """Run."""
    block_bytes, numbers = int(sys.argv[2]), range(int(sys.argv[3]), int(sys.argv[4]))
    store = open_store(sys.argv[1], block_bytes)
    outcomes = put(store, numbers, block_bytes)
    assert outcomes == [DONE] * len(numbers), store.problem
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main()
