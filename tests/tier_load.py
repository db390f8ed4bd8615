"""One worker process for tests of tiers: `python -m tests.tier_load SOCKET_DIR SEED SECONDS`.

It serves prompts of a working set that all workers share, checks every cached block it is given,
and prints what it saw as JSON. A wrong byte ends it with a traceback.
"""

import json
import random
import sys
import time
from pathlib import Path

from radixkv_client import Client
from radixkv_client.errors import Exhausted, Unavailable
from tests.fingerprints import KV_SPEC
from tests.tier_server import MODEL, TierWorker, prompts

NUM_PROMPTS = 64
PROMPT_BLOCKS = 12


def main(socket_dir: Path, seed: int, seconds: float) -> None:
    """Serve until the time is over; ends early when the server is gone."""
    chance = random.Random(seed)
    choices = prompts(NUM_PROMPTS, PROMPT_BLOCKS)
    refused = 0
    until = time.monotonic() + seconds
    with Client.connect(socket_dir, model=MODEL, kv_spec=KV_SPEC) as client:
        worker = TierWorker(client)
        while time.monotonic() < until:
            prompt = chance.choice(choices)
            if chance.random() < 0.2:
                prompt = prompt[: chance.randrange(1, len(prompt))]
            try:
                worker.serve(prompt)
            except Exhausted:
                refused += 1
            except Unavailable:
                break
    print(
        json.dumps(
            {
                "cached": worker.cached_tokens,
                "queried": worker.queried_tokens,
                "from_below": worker.from_below,
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
