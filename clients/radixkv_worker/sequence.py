"""One sample or beam of a request, as the scheduler and the engine see it while it runs.

Life of a sequence
    QUEUED --acquire_nowait--> ACQUIRING --lease granted--> RUNNING --finished--> FINISHED
    RUNNING --beam has its candidates--> READY --all beams of the request have--> RUNNING
    ACQUIRING, RUNNING, READY --no room, preempted, server lost--> QUEUED
    `tokens` (prompt and generated) only grows; the KV of the first `computed` of them lies in the
    lease's blocks. Without a lease `computed` is 0: whoever resumes gets what is still cached and
    computes the rest again, and nothing that was handed out is handed out again.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from radixkv_client import Lease, Pending
from radixkv_worker.request import Event, Request, Tally
from radixkv_worker.sampling import Candidates, Sampler
from radixkv_worker.tokenizer import TextStream


class Phase(Enum):
    """Where a sequence is; see the module's text."""

    QUEUED = "queued"
    ACQUIRING = "acquiring"
    RUNNING = "running"
    READY = "ready"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Group:
    """A request with its sequences: one, `n` samples, or the beams that live now.

    `serial` orders requests by arrival. `attempts` counts how often a beam group came together
    anew; `not_before_s` is when it may try again.
    """

    request: Request
    serial: int
    sink: Callable[[Event], None]
    sequences: list["Sequence"] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    ended_beams: list[tuple[float, list[int]]] = field(default_factory=list)
    num_steps: int = 0  # of beam search
    attempts: int = 0
    not_before_s: float = 0.0

    @property
    def is_beam(self) -> bool:
        """Whether the sequences are beams, which are preempted and resumed together."""
        return self.request.params.beam_width > 0

    @property
    def max_computed(self) -> int:
        """Tokens of one sequence whose KV is computed at most: all but the last one."""
        return len(self.request.prompt) + self.request.params.max_tokens - 1


@dataclass(slots=True, eq=False)
class Sequence:
    """See the module's text. `holds_all`: the lease has every block the sequence can ever need."""

    group: Group
    index: int
    tokens: array  # int32
    sampler: Sampler
    text: TextStream
    queued_s: float
    phase: Phase = Phase.QUEUED
    lease: Lease | None = None
    pending: Pending | None = None
    computed: int = 0
    resumed: bool = False
    holds_all: bool = False
    total: float = 0.0  # of a beam: sum of log probabilities
    options: Candidates | None = None  # of a beam in READY

    @property
    def held(self) -> Lease:
        """The lease, where there must be one."""
        assert self.lease is not None, "the sequence has no lease"
        return self.lease

    @property
    def order(self) -> tuple[int, int]:
        """Position by age: requests by arrival, samples by index; larger is younger."""
        return self.group.serial, self.index

    @property
    def generated(self) -> array:
        """The tokens behind the prompt."""
        return self.tokens[len(self.group.request.prompt) :]

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is still to be computed before the next token can be chosen."""
        return len(self.tokens) - self.computed

    def forget_lease(self) -> None:
        """Back to the queue's state; the lease was released, refused or lost."""
        self.phase = Phase.QUEUED
        self.lease = self.pending = self.options = None
        self.computed = 0
        self.resumed, self.holds_all = True, False
