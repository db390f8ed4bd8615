"""Case B1, the random walk: 20,000 operations with the books checked after each."""

import random
from collections.abc import Callable
from contextlib import suppress

from radixkv.core.errors import Exhausted
from tests.core_rig import Rig
from tests.naive_model import ModelLease

SESSIONS = (1, 2, 3)


class Walk:
    """A random walk over all operations; `step` carries one out."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rig = Rig(14, 2, max_edge_tokens=8)
        for session in SESSIONS:
            self.rig.open(session)
        self.steps: list[Callable[[], None]] = [
            self.acquire, self.acquire, self.commit, self.commit, self.fork, self.release,
            self.release, self.decode, self.trim, self.refill,
        ]  # fmt: skip

    def step(self) -> None:
        """One operation; the pool being full is no fault."""
        with suppress(Exhausted):
            self.chance.choice(self.steps)()
        self.rig.finish_copies()

    def pick(self) -> ModelLease | None:
        """A live lease."""
        leases = self.rig.leases()
        return self.chance.choice(leases) if leases else None

    def acquire(self) -> None:
        tokens = self.chance.choices((0, 1), k=self.chance.randint(1, 9))
        if len(self.rig.leases()) < 6:
            self.rig.acquire(
                self.chance.randint(1, 3), tokens, partial_tail=self.chance.random() < 0.3
            )

    def commit(self) -> None:
        if lease := self.pick():
            self.rig.compute(lease, self.chance.randint(lease.computed, len(lease.atoms)))
            self.rig.commit(lease, self.chance.randint(lease.committed, lease.computed))

    def fork(self) -> None:
        if (lease := self.pick()) and lease.computed - lease.committed < 2:
            self.rig.fork(lease, self.chance.randint(1, 2), lease.computed)

    def release(self) -> None:
        if lease := self.pick():
            self.rig.release(lease)

    def decode(self) -> None:
        if lease := self.pick():
            room = len(lease.table) * self.rig.block_size > len(lease.atoms)
            if room or self.rig.draw(lease):
                lease.append(self.chance.randint(0, 1))
            self.rig.settle()

    def trim(self) -> None:
        if lease := self.pick():
            self.rig.trim(lease, self.chance.randint(lease.committed, len(lease.atoms)))

    def refill(self) -> None:
        session = self.chance.randint(1, 3)
        spare = self.rig.undrawn(session)
        if spare and self.chance.random() < 0.5:
            self.rig.give_back(session, spare)
        else:
            self.rig.refill(session, 1)


def test_b1_random_walk_of_20000_operations() -> None:
    for seed in range(10):
        walk = Walk(seed)
        for number in range(2_000):
            try:
                walk.step()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, operation {number}: {error}") from error
        for session in SESSIONS:
            walk.rig.close(session)
        books = walk.rig.cache.books()
        assert books.free + books.cached == books.total
        walk.rig.open(1)
        walk.rig.lease(1, list(range(5_000, 5_000 + 28)))
        assert not walk.rig.model.entries, "all that was cached could be evicted"
