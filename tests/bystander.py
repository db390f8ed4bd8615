"""A worker that lives through the faults of others and must see neither an error nor a wrong byte.

It works by itself, through the real client: hits, misses, forks, appends and trims, over prompts
that share prefixes, and reads back everything its leases say is there. It can be asked, over its
pipe, to `pause` (it then holds no lease) and to go on with `resume`; both answer with the number of
rounds done.
"""

import contextlib
import random
import time
from pathlib import Path

from radixkv_client import Client, Exhausted, Lease
from tests.fault_processes import Child, Parent
from tests.fingerprints import BLOCK_SIZE, KV_SPEC, SequenceKV

MODEL = "model"
NAMESPACE = b"model"
MAX_ROUND_S = 5.0  # a round that takes longer was held up by somebody
CAPACITY_WAIT_MS = 4000
REST_S = 0.004


def bystand(parent: Parent, socket_dir: str, transport: str, seed: int) -> None:
    """Work until the pipe is closed."""
    with Client.connect(
        Path(socket_dir), model=MODEL, kv_spec=KV_SPEC, transport=transport, client_name="bystander"
    ) as client:
        worker = Rounds(client, seed)
        parent.say("ready")
        while True:
            message = parent.hear(REST_S)
            if message == "pause":
                parent.say(worker.num_rounds)
                assert parent.hear() == "resume"
                parent.say(worker.num_rounds)
            elif message == "rounds":
                parent.say(worker.num_rounds)
            worker.round()


class Rounds:
    """One bystander's work; a round ends with no lease held."""

    def __init__(self, client: Client, seed: int) -> None:
        self.num_rounds = 0
        self.max_round_s = MAX_ROUND_S
        self._client = client
        self._random = random.Random(seed)

    def round(self) -> None:
        """One request, from Acquire to Release."""
        started = time.monotonic()
        self._request()
        took = time.monotonic() - started
        assert took < self.max_round_s, f"a round took {took:.1f} s"
        self.num_rounds += 1

    def _prompt(self) -> list[int]:
        choose = self._random
        family = choose.randrange(4)
        shared = [1000 * family + i for i in range(choose.choice((4, 10, 16, 17)))]
        return shared + [choose.randrange(8) for _ in range(choose.randrange(1, 12))]

    def _request(self) -> None:
        prompt = self._prompt()
        more = [self._random.randrange(9) for _ in range(6)]
        kv = SequenceKV(self._client.pool.as_numpy(), NAMESPACE, prompt + more)
        with self._client.acquire(
            prompt,
            partial_tail=self._random.random() < 0.5,
            capacity_wait_ms=CAPACITY_WAIT_MS,
            wait_ms=self._random.choice((0, 200)),
        ) as lease:
            kv.check(lease.block_table, 0, lease.cached_tokens)
            kv.write(lease.block_table, lease.cached_tokens, len(prompt))
            lease.commit(len(prompt))
            kv.check(lease.block_table, 0, len(prompt))
            with contextlib.suppress(Exhausted):  # the clear, retryable error of a full pool
                self._decode(lease, kv, len(prompt))
            kv.check(lease.block_table, 0, len(prompt))

    def _decode(self, lease: Lease, kv: SequenceKV, length: int) -> None:
        what = self._random.randrange(4)
        if what == 0:
            self._fork(lease, kv, length)
        elif what == 1:
            lease.extend(2)
            lease.trim(length)
        else:
            lease.append_blocks(2)
            kv.write(lease.block_table, length, len(kv.tokens))
            lease.commit(len(kv.tokens), kv.tokens[length:])
            kv.check(lease.block_table, 0, len(kv.tokens))

    def _fork(self, lease: Lease, kv: SequenceKV, length: int) -> None:
        children = lease.fork(2, length)
        room = -length % BLOCK_SIZE
        pool = self._client.pool.as_numpy()
        copies = []
        for number, child in enumerate(children):
            copy = SequenceKV(pool, NAMESPACE, [*kv.tokens[:length], *[90 + number] * room])
            copy.check(child.block_table, 0, length)
            copy.write(child.block_table, length, length + room)
            copies.append(copy)
        for copy, child in zip(copies, children, strict=True):
            copy.check(child.block_table, 0, length + room)
            child.release()


class Bystanders:
    """Two of them, one on each transport."""

    def __init__(self, socket_dir: Path) -> None:
        self.children = [
            Child(bystand, str(socket_dir), transport, seed)
            for seed, transport in enumerate(("local", "grpc"))
        ]
        for child in self.children:
            assert child.hear() == "ready"

    def rounds(self) -> list[int]:
        """Rounds done by each."""
        return [child.ask("rounds") for child in self.children]

    def pause(self) -> None:
        """Return when both hold no lease."""
        for child in self.children:
            child.tell("pause")
        for child in self.children:
            child.hear()

    def resume(self) -> None:
        """Let them go on."""
        for child in self.children:
            child.ask("resume")

    def close(self) -> None:
        """End both."""
        for child in self.children:
            child.kill()
            child.join()
