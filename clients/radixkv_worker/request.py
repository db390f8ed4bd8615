"""What a caller asks of the engine, and what comes back: frozen values."""

from dataclasses import dataclass, field

MAX_SAMPLES = 16  # parallel samples or beams of one request
MAX_STOPS = 8
MAX_STOP_CHARS = 128


class BadRequest(ValueError):
    """The request cannot be served as it is; the message says what to change."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate. Raises BadRequest for values out of range.

    `temperature` 0 is greedy. With `beam_width` the best `n` of so many beams come back, and
    temperature, top_p, seed and stop strings do not apply. `stop_tokens` end a text like the
    model's own end token, unless `ignore_eos`, which ignores both.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    beam_width: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            (self.max_tokens >= 1, f"max_tokens {self.max_tokens} is below 1"),
            (0 <= self.temperature <= 100, f"temperature {self.temperature} is not in [0, 100]"),
            (0 < self.top_p <= 1, f"top_p {self.top_p} is not in (0, 1]"),
            (1 <= self.n <= MAX_SAMPLES, f"n {self.n} is not in [1, {MAX_SAMPLES}]"),
            (0 <= self.beam_width <= MAX_SAMPLES, f"best_of {self.beam_width} > {MAX_SAMPLES}"),
            (not self.beam_width or self.n <= self.beam_width, "n is above best_of"),
            (0 <= self.seed < 1 << 63, f"seed {self.seed} is not in [0, 2**63)"),
            (len(self.stop) <= MAX_STOPS, f"more than {MAX_STOPS} stop strings"),
            (
                all(0 < len(stop) <= MAX_STOP_CHARS for stop in self.stop),
                f"a stop string is empty or longer than {MAX_STOP_CHARS} characters",
            ),
        )
        for good, message in checks:
            if not good:
                raise BadRequest(message)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `arrived_s` is on the monotonic clock; time to first token counts from it."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrived_s: float


@dataclass(frozen=True, slots=True)
class RequestStats:
    """How a request went. Times in milliseconds since its arrival; `ttft_ms` to the first token.

    `cached_tokens`, `being_computed` and `waited_ms` are those of its first Acquire;
    `computed_tokens` counts every token of every forward pass, after preemptions again.
    `block_ids` are the blocks of the prompt when it was computed.
    """

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    being_computed: int
    computed_tokens: int
    waited_ms: int
    miss: str
    ttft_ms: float
    total_ms: float
    preemptions: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one sample: tokens and the text they add. `finish_reason` "stop" or "length"."""

    index: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    score: float | None = None  # of a beam: mean log probability


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a request that went well."""

    stats: RequestStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that did not; `retryable`: the same request may succeed later."""

    code: str
    message: str
    retryable: bool


Event = Delta | Done | Failed


@dataclass(slots=True)
class Tally:
    """What RequestStats is made from, while the request runs."""

    cached_tokens: int = 0
    being_computed: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    waited_ms: int = 0
    miss: str = ""
    first_token_s: float | None = None
    preemptions: int = 0
    block_ids: tuple[int, ...] = field(default=())
