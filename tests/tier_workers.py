"""Workers and tools over a working set of up to eight times the gpu, from a seed.

As in tests/sim/test_workers: everybody is a generator that yields how many milliseconds the next
step takes, and one heap orders them all. A `TierSimulation` also ends the whole process now and
then and starts again on what nvme and the remote hold.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from radixkv.core.errors import Exhausted, TooLarge
from radixkv.core.results import ContentRange, ReleaseReason, Retention
from tests.core_audit import WaitingAcquire
from tests.tier_audit import TierLease
from tests.tier_movers import NASTY, Faults, Life, Movers
from tests.tier_rig import TierRig

BLOCK_SIZE = 4
POOL = 24
NUM_WORKERS = 3
IMAGE = 99  # placeholder token
PLACEHOLDERS = frozenset({IMAGE})
TENANTS = (b"tenant a", b"tenant b", b"long" * 513)  # records have no room for the last
TAGS = ("", "", "", "red", "blue")


@dataclass(frozen=True)
class Prompt:
    """What a worker asks for."""

    namespace: bytes
    tokens: list[int]
    contents: tuple[ContentRange, ...] = ()


@dataclass
class Corpus:
    """Documents that share beginnings: different blocks for 1.6, 3 or 8 times the gpu."""

    chance: Random
    tenants: tuple[bytes, ...] = TENANTS
    documents: list[tuple[bytes, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number in range(self.chance.choice((2, 4, 10))):
            trunk = [number, *self.chance.choices(range(10), k=11)]
            for _ in range(4):
                branch = self.chance.choices(range(10), k=16)
                self.documents.append((self.tenants[number % len(self.tenants)], trunk + branch))

    def document(self) -> tuple[bytes, list[int]]:
        """Any; those of the first families a little more often."""
        return self.documents[int(self.chance.random() ** 1.3 * len(self.documents))]

    def prompt(self) -> Prompt:
        """A document, cut somewhere, and a question; sometimes a picture between them."""
        namespace, document = self.document()
        head = document[: self.chance.choice((12, 16, 21, 28, 28))]
        question = self.chance.choices(range(2), k=self.chance.randint(1, 6))
        if self.chance.random() < 0.85:
            return Prompt(namespace, head + question)
        picture = ContentRange(len(head), 5, self.chance.choice((b"cat", b"dog")))
        return Prompt(namespace, head + [IMAGE] * 5 + question, (picture,))


class Worker:
    """One session: takes requests one after the other, with forks and decode."""

    def __init__(self, sim: TierSimulation, session: int) -> None:
        self.sim, self.rig, self.chance = sim, sim.rig, sim.chance
        self.session = sim.rig.open(session)
        self.life = self.run()

    def run(self) -> Life:
        """Request after request, for ever."""
        while True:
            yield self.chance.randint(1, 10)
            with suppress(Exhausted, TooLarge):
                yield from self.serve(self.sim.corpus.prompt())
                self.sim.finished += 1
            for lease in self.rig.leases_of(self.session):
                self.rig.release(lease, ReleaseReason.PREEMPTED)

    def serve(self, prompt: Prompt) -> Life:
        """Acquire, prefill in chunks, decode, perhaps fork, release."""
        lease = yield from self.acquire(prompt)
        if lease is None:
            return
        yield from self.answered(lease)
        while lease.computed < len(lease.atoms):
            yield self.chance.randint(1, 12)
            self.rig.compute(lease, min(lease.computed + 16, len(lease.atoms)))
            if self.chance.random() < 0.8:
                self.rig.commit(lease)
        family = [lease]
        if self.chance.random() < 0.1:
            self.rig.commit(lease)
            family += self.rig.fork(lease, self.chance.randint(1, 2), lease.computed)
        for member in family:
            yield from self.decode(member)
            self.rig.release(member, self.chance.choice(list(ReleaseReason)))

    def acquire(self, prompt: Prompt) -> Generator[int, None, TierLease | None]:
        """A lease; None where the worker changed its mind while waiting."""
        tag = self.chance.choice(TAGS)
        retention = None
        if self.chance.random() < 0.15:
            ttl_ms = self.chance.choice((0, 60, 400))
            retention = Retention(self.chance.choice((-100, 0, 50)), ttl_ms)
        got = self.rig.acquire(
            self.session, prompt.tokens, prompt.namespace, prompt.contents,
            placeholder_tokens=PLACEHOLDERS, extra_blocks=self.chance.randint(0, 1),
            partial_tail=self.chance.random() < 0.2, tags=(tag,) if tag else (),
            capacity_wait_ms=self.chance.choice((0, 200, 1000)),
            wait_ms=self.chance.choice((0, 0, 60)), retention=retention,
        )  # fmt: skip
        if isinstance(got, TierLease):
            return got
        return (yield from self.wait(got))

    def wait(self, waiting: WaitingAcquire) -> Generator[int, None, TierLease | None]:
        """Until the answer is there; now and then it cancels."""
        while (answer := self.rig.answer(waiting)) is None:
            yield self.chance.randint(5, 40)
            key = (waiting.session, waiting.lease_id)
            if key in self.rig.waiting and self.chance.random() < 0.02:
                self.rig.cancel(waiting)
                return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def answered(self, lease: TierLease) -> Life:
        """The reply comes when the copies within the gpu are done."""
        while lease.copies:
            yield self.chance.randint(2, 8)

    def decode(self, lease: TierLease) -> Life:
        """A few tokens, with blocks from the lease, the reserve, or Extend."""
        yield from self.answered(lease)
        self.rig.compute(lease)
        for _ in range(self.chance.choice((0, 0, 0, 3))):
            yield self.chance.randint(1, 8)
            if len(lease.atoms) == len(lease.table) * BLOCK_SIZE:
                self.grow(lease)
            lease.append(self.chance.randint(0, 1))
            self.rig.compute(lease)
            if self.chance.random() < 0.3:
                self.rig.commit(lease)
        self.rig.commit(lease)

    def grow(self, lease: TierLease) -> None:
        """One block more."""
        if self.rig.draw(lease):
            return
        if self.chance.random() < 0.3:
            self.rig.refill(self.session, 2)
            assert self.rig.draw(lease)
            return
        if lease.drawn:
            self.rig.commit(lease, lease.committed)
        self.rig.extend(lease, 1)


class Hog(Worker):
    """Takes most of the gpu for a moment, so that all the others' blocks have to go down."""

    def run(self) -> Life:
        """Again and again."""
        while True:
            yield self.chance.randint(15, 60)
            with suppress(Exhausted):
                tokens = self.chance.choices(range(10), k=self.chance.randint(40, 4 * POOL))
                got = self.rig.acquire(self.session, tokens, b"hog", capacity_wait_ms=400)
                lease = got if isinstance(got, TierLease) else (yield from self.wait(got))
                if lease is not None:
                    yield self.chance.randint(1, 5)
                    self.rig.release(lease)


class CarefulWorker(Worker):
    """Waits as long as it takes, and takes no block in ways that cannot wait."""

    def serve(self, prompt: Prompt) -> Life:
        """Acquire, prefill, commit, release."""
        got = self.rig.acquire(
            self.session, prompt.tokens, prompt.namespace, prompt.contents,
            placeholder_tokens=PLACEHOLDERS, capacity_wait_ms=60_000,
        )  # fmt: skip
        lease = got if isinstance(got, TierLease) else (yield from self.wait(got))
        if lease is None:
            return
        yield self.chance.randint(1, 15)
        self.rig.compute(lease)
        self.rig.commit(lease)
        self.sim.committed.append(prompt)
        self.rig.release(lease)


class Tools:
    """Somebody who looks up, prefetches, pins, retains and invalidates."""

    def __init__(self, sim: TierSimulation) -> None:
        self.sim, self.rig, self.chance = sim, sim.rig, sim.chance
        self.life = self.run()

    def run(self) -> Life:
        """One call after the other, for ever."""
        calls = [
            (8, self.lookup), (6, self.prefetch), (2, self.cancel), (3, self.pin),
            (2, self.unpin), (1, self.retain), (1, self.invalidate),
        ]  # fmt: skip
        weights, functions = zip(*calls, strict=True)
        while True:
            yield self.chance.randint(5, 50)
            self.chance.choices(functions, weights)[0]()

    def lookup(self) -> None:
        """Of any prompt, also with pictures."""
        prompt = self.sim.corpus.prompt()
        self.rig.lookup(prompt.tokens, prompt.namespace, prompt.contents)

    def prefetch(self) -> None:
        """A document that may be needed soon."""
        namespace, document = self.sim.corpus.document()
        self.rig.prefetch(document, namespace)

    def cancel(self) -> None:
        """Some prefetch, ended or not."""
        handles = [*self.rig.prefetches, *self.rig.ended]
        if handles:
            self.rig.cancel_prefetch(self.chance.choice(handles))

    def pin(self) -> None:
        """A document's beginning, for a while or until it is lifted."""
        namespace, document = self.sim.corpus.document()
        if len(self.rig.pins) < 3:
            with suppress(Exhausted, TooLarge):
                head = document[: self.chance.choice((9, 16, 28))]
                self.rig.pin(head, self.chance.choice((0, 80, 300)), namespace)

    def unpin(self) -> None:
        """Some pin that still holds."""
        if self.rig.pins:
            pin_id = self.chance.choice(sorted(self.rig.pins))
            if self.chance.random() < 0.5:
                self.rig.unpin(pin_id)
            else:
                pin = self.rig.pins[pin_id]
                self.rig.unpin_prefix(pin.tokens[: self.chance.choice((0, 3, 8))], pin.namespace)

    def retain(self) -> None:
        """Make what is cached of a family more or less durable."""
        namespace, document = self.sim.corpus.document()
        ttl_ms = self.chance.choice((0, 0, 150))
        priority = self.chance.choice((-100, 0, 80))
        self.rig.retain(document[:12], Retention(priority, ttl_ms), namespace)

    def invalidate(self) -> None:
        """A family, a part of one, a tag, a tenant or everything."""
        namespace, document = self.sim.corpus.document()
        kind = self.chance.random()
        if kind < 0.4:
            prefix = document[: self.chance.choice((5, 8, 14, 16))]
            self.rig.invalidate(namespace, prefix)
        elif kind < 0.7:
            self.rig.invalidate(self.chance.choice((None, namespace)), tag="red")
        elif kind < 0.9:
            self.rig.invalidate(namespace)
        else:
            self.rig.invalidate(None)


class TierSimulation:
    """Workers, tools, movers and a reaper on one virtual clock."""

    def __init__(
        self, seed: int, faults: Faults = NASTY, careful: bool = False, **config: object
    ) -> None:
        self.chance = Random(seed)
        self.corpus = Corpus(self.chance, TENANTS[:2] if careful else TENANTS)
        verify_all = self.chance.random() < 0.5
        options = dict(max_reserve_blocks=4, max_edge_tokens=4 * BLOCK_SIZE, **config)
        self.rig = TierRig(POOL, BLOCK_SIZE, verify_all, **options)
        self.faults, self.careful = faults, careful
        self.finished = 0
        self.committed: list[Prompt] = []
        self.sessions = 0
        self.serial = 0
        self.start()

    def start(self) -> None:
        """A new process, with new workers."""
        self.agenda: list[tuple[int, int, Worker | Life]] = []
        self.movers = Movers(self.rig, self.chance, self.faults)
        for kind in (Hog, *[CarefulWorker if self.careful else Worker] * NUM_WORKERS):
            self.hire(kind)
        if not self.careful:
            self.plan(5, Tools(self).life)
        self.plan(0, self.movers.surroundings())
        self.plan(self.chance.randint(50, 300), self.reaper())

    def plan(self, in_ms: int, who: Worker | Life) -> None:
        """`who` goes on in that many milliseconds."""
        self.serial += 1
        heappush(self.agenda, (self.rig.now_ms + in_ms, self.serial, who))

    def hire(self, kind: type[Worker]) -> None:
        """A new worker process."""
        self.sessions += 1
        self.plan(self.chance.randint(0, 10), kind(self, self.sessions))

    def reaper(self) -> Life:
        """Kills a worker, wherever it is; or the server."""
        while True:
            if not self.careful and self.chance.random() < 0.25:
                self.crash()
                return
            self.kill()
            yield self.chance.randint(50, 300)

    def kill(self) -> None:
        """One worker dies, and there is another."""
        workers = [entry for entry in self.agenda if isinstance(entry[2], Worker)]
        victim = self.chance.choice(workers)
        self.agenda.remove(victim)
        self.end(victim[2])
        self.hire(type(victim[2]))

    def end(self, worker: Worker) -> None:
        """A worker's process is gone."""
        worker.life.close()
        self.rig.close(worker.session)

    def crash(self) -> None:
        """The server's process is gone, and starts again."""
        self.rig.crash(self.chance)
        self.start()

    def step(self) -> None:
        """Whoever is next."""
        for life in self.movers.lives():
            self.plan(0, life)
        at_ms, _, who = heappop(self.agenda)
        self.rig.advance(max(at_ms - self.rig.now_ms, 0))
        agenda = self.agenda
        try:
            in_ms = next(who.life if isinstance(who, Worker) else who)
        except StopIteration:
            return
        if agenda is self.agenda:  # else who did it is of the process that died
            self.plan(in_ms, who)

    def run(self, steps: int) -> None:
        """Step on; then everybody leaves, and nothing may be left under way."""
        for _ in range(steps):
            self.step()
        for _, _, who in self.agenda:
            if isinstance(who, Worker):
                self.end(who)
        self.rig.quiesce()

    def clear(self) -> None:
        """Start again, invalidate all; every place must be empty."""
        self.rig.crash()
        self.rig.invalidate(None)
        self.rig.quiesce()
        for place in self.rig.sizes:
            books = self.rig.books(place)
            assert books.free == books.total, (place, books)
