"""Seeded simulation in virtual time: workers that crash, stall, repeat requests and wait.

Each worker is a generator that yields how many milliseconds its next step takes. One heap orders
workers, the mover that carries out copies late or not at all, and a reaper that kills and stalls
workers. All bytes are fingerprinted and everything is checked after every operation (core_audit).
A failure prints the seed; `SEEDS` below runs it again.
"""

import random
from collections.abc import Generator
from heapq import heappop, heappush

import pytest

from radixkv.core.errors import AlreadyExists, Exhausted, NotFound
from radixkv.core.results import ReleaseReason
from tests.core_audit import WaitingAcquire
from tests.core_rig import Rig
from tests.naive_model import ModelLease

SEEDS = range(12)
MANY_SEEDS = range(1_000, 1_400)
STEPS = 500
BLOCK_SIZE = 4
NUM_WORKERS = 4
POOL = 26  # about one and a half requests of the largest kind
Life = Generator[int, None, None]


class Preempted(Exception):
    """The worker gave its lease back under pressure."""


class Worker:
    """One session: takes requests one after the other, with forks, decode and preemption."""

    def __init__(self, sim: "Simulation", session: int) -> None:
        self.sim, self.rig, self.chance = sim, sim.rig, sim.chance
        self.session = sim.rig.open(session)
        self.life = self.run()

    def run(self) -> Life:
        """Request after request, for ever."""
        while True:
            yield self.chance.randint(1, 20)
            prompt = self.sim.prompt()
            resumed = False
            while prompt:
                try:
                    yield from self.serve(prompt, resumed)
                    prompt = []
                    self.sim.finished += 1
                except (Exhausted, Preempted):
                    resumed = True
                    yield self.chance.randint(10, 60)
                for lease in self.rig.leases(self.session):
                    self.release(lease, ReleaseReason.PREEMPTED)

    def serve(self, prompt: list[int], resumed: bool) -> Life:
        """Acquire, prefill in chunks, decode, perhaps fork, release."""
        lease = yield from self.acquire(prompt, resumed)
        if lease is None:
            return
        yield from self.answered(lease)
        while lease.computed < len(lease.atoms):
            yield self.chance.randint(1, 15)
            self.rig.compute(lease, min(lease.computed + 8, len(lease.atoms)))
            if self.chance.random() < 0.8:
                self.rig.commit(lease)
        family = [lease]
        if self.chance.random() < 0.4:
            self.rig.commit(lease)
            family += self.rig.fork(lease, self.chance.randint(1, 3), lease.computed)
        if self.chance.random() < 0.3:
            self.release(family.pop(0), ReleaseReason.FINISHED)
        for member in family:
            yield from self.decode(member)
            self.release(member, self.chance.choice(list(ReleaseReason)))

    def acquire(self, prompt: list[int], resumed: bool) -> Generator[int, None, ModelLease | None]:
        """A lease; None where the worker changed its mind while waiting."""
        got = self.rig.acquire(
            self.session, prompt, extra_blocks=self.chance.randint(0, 1),
            partial_tail=self.chance.random() < 0.3, resumed=resumed,
            capacity_wait_ms=self.chance.choice((0, 80)), wait_ms=self.chance.choice((0, 60)),
        )  # fmt: skip
        if isinstance(got, ModelLease):
            return got
        return (yield from self.wait(got))

    def wait(self, waiting: WaitingAcquire) -> Generator[int, None, ModelLease | None]:
        """Until the answer is there; now and then it asks twice, or cancels."""
        key = (waiting.session, waiting.lease_id)
        while key not in self.rig.answers:
            yield self.chance.randint(1, 10)
            if key in self.rig.waiting and self.chance.random() < 0.1:
                with pytest.raises(AlreadyExists):
                    self.rig.acquire(self.session, [1], lease_id=waiting.lease_id)
            if key in self.rig.waiting and self.chance.random() < 0.05:
                self.rig.cancel(waiting)
                return None
        answer = self.rig.answers.pop(key)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def answered(self, lease: ModelLease) -> Life:
        """The reply comes when the server's copies are done."""
        while lease.copies:
            yield 1

    def decode(self, lease: ModelLease) -> Life:
        """A few tokens, with blocks from the lease, the reserve, or Extend."""
        yield from self.answered(lease)
        self.rig.compute(lease)
        for _ in range(self.chance.randint(0, 12)):
            yield self.chance.randint(1, 8)
            self.relieve()
            if len(lease.atoms) == len(lease.table) * BLOCK_SIZE:
                self.grow(lease)
            lease.append(self.chance.randint(0, 1))
            self.rig.compute(lease)
            if self.chance.random() < 0.3:
                self.rig.commit(lease)
            elif self.chance.random() < 0.1 and not self.being_copied(lease):
                self.rig.trim(lease, self.chance.randint(lease.committed, lease.computed))
        self.rig.commit(lease)

    def being_copied(self, lease: ModelLease) -> bool:
        """Whether a Fork of this lease has no answer yet: its tail must stay as it is."""
        return bool(self.rig.model.in_copy() & set(lease.table))

    def grow(self, lease: ModelLease) -> None:
        """One block more."""
        if self.rig.draw(lease):
            return
        if self.chance.random() < 0.5:
            self.rig.refill(self.session, 2)
            assert self.rig.draw(lease)
            return
        if lease.drawn:
            self.rig.commit(lease, lease.committed)
        self.rig.extend(lease, 1)

    def relieve(self) -> None:
        """Under pressure: first the reserve, then the lease."""
        mine = [event for event in self.rig.pressure if event.session_id == self.session]
        if not mine:
            return
        self.rig.pressure = [event for event in self.rig.pressure if event not in mine]
        spare = self.rig.undrawn(self.session)
        self.rig.give_back(self.session, spare)
        if mine[-1].num_blocks > len(spare):
            raise Preempted

    def release(self, lease: ModelLease, reason: ReleaseReason) -> None:
        """Give the lease back; sometimes the request is sent twice."""
        self.rig.release(lease, reason)
        if self.chance.random() < 0.1:
            with pytest.raises(NotFound):
                self.rig.cache.release(self.session, lease.id, reason, self.rig.now_ms)


class Simulation:
    """Workers, mover and reaper on one virtual clock."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rig = Rig(
            POOL, BLOCK_SIZE, max_reserve_blocks=4, max_edge_tokens=4 * BLOCK_SIZE,
            max_private_blocks=self.chance.choice((0, 18)),
        )  # fmt: skip
        self.documents = [self.chance.choices((0, 1, 2), k=24) for _ in range(3)]
        self.finished = 0
        self.sessions = 0
        self.agenda: list[tuple[int, int, Worker | Life]] = []
        self.serial = 0
        for _ in range(NUM_WORKERS):
            self.hire()
        self.plan(0, self.mover())
        self.plan(50, self.reaper())

    def prompt(self) -> list[int]:
        """A document, cut somewhere, and a short question."""
        document = self.chance.choice(self.documents)
        question = self.chance.choices((0, 1), k=self.chance.randint(1, 6))
        return document[: self.chance.choice((8, 12, 23, 24))] + question

    def plan(self, in_ms: int, who: "Worker | Life") -> None:
        """`who` goes on in that many milliseconds."""
        self.serial += 1
        heappush(self.agenda, (self.rig.now_ms + in_ms, self.serial, who))

    def hire(self) -> None:
        """A new worker process."""
        self.sessions += 1
        self.plan(self.chance.randint(0, 30), Worker(self, self.sessions))

    def mover(self) -> Life:
        """Carries out copies, in any order, some late, some not at all."""
        while True:
            copies = list(self.rig.model.copies)
            if copies and self.chance.random() < 0.7:
                self.rig.finish_copy(self.chance.choice(copies), ok=self.chance.random() < 0.9)
            yield self.chance.randint(1, 12)

    def reaper(self) -> Life:
        """Kills a worker, wherever it is, or stops it for a long while."""
        while True:
            yield self.chance.randint(50, 300)
            workers = [i for i, (_, _, who) in enumerate(self.agenda) if isinstance(who, Worker)]
            at_ms, serial, victim = self.agenda[self.chance.choice(workers)]
            self.agenda.remove((at_ms, serial, victim))
            assert isinstance(victim, Worker)
            if self.chance.random() < 0.5:
                self.plan(self.chance.randint(300, 900), victim)
                continue
            victim.life.close()
            self.rig.close(victim.session)
            self.hire()

    def run(self, steps: int) -> None:
        """Step on; then everybody is killed and nothing may be left behind."""
        for _ in range(steps):
            at_ms, _, who = heappop(self.agenda)
            self.rig.advance(max(at_ms - self.rig.now_ms, 0))
            self.plan(next(who.life if isinstance(who, Worker) else who), who)
        for _, _, who in self.agenda:
            if isinstance(who, Worker):
                who.life.close()
                self.rig.close(who.session)
        self.rig.finish_copies()
        books = self.rig.cache.books()
        assert books.free + books.cached == books.total
        assert self.finished > steps // 100, "the workers hardly got on"


def simulate(seed: int) -> None:
    """One run; whatever goes wrong names the seed."""
    try:
        Simulation(seed).run(STEPS)
    except BaseException as error:
        error.add_note(f"simulation seed {seed}")
        raise


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_that_crash_stall_repeat_and_wait(seed: int) -> None:
    simulate(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_seeds() -> None:
    for seed in MANY_SEEDS:
        simulate(seed)
