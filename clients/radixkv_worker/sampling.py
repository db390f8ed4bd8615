"""Choosing tokens: greedy, temperature, top-p, and one step of beam search.

A sample's choices depend on its logits, its seed and its own number of choices so far, and on
nothing else in the batch. Beams are ranked by mean log probability, as in reference.beam_search.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv_worker.request import SamplingParams


class Sampler:
    """Chooses one sample's tokens; `index` tells the samples of one request apart."""

    def __init__(self, params: SamplingParams, index: int) -> None:
        self._temperature = params.temperature
        self._top_p = params.top_p
        self._generator = torch.Generator().manual_seed((params.seed + index) % (1 << 63))

    def choose(self, logits: Tensor) -> int:
        """A token id from float32 logits [vocabulary]; advances the generator unless greedy."""
        if self._temperature == 0:
            return int(logits.argmax())
        shifted = logits.double() - logits.max().double()  # so that no division overflows to NaN
        weights = torch.softmax(shifted / self._temperature, -1)
        draw = torch.rand((), generator=self._generator, dtype=torch.float64)
        if self._top_p == 1:
            return _invert(weights, draw)
        ordered, ids = weights.sort(descending=True, stable=True)
        kept = int((ordered.cumsum(0) < self._top_p).sum()) + 1
        return int(ids[_invert(ordered[:kept], draw)])


def _invert(weights: Tensor, draw: Tensor) -> int:
    sums = weights.cumsum(0)
    index = int(torch.searchsorted(sums, draw * sums[-1], right=True))
    return min(index, len(weights) - 1)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best continuations of one beam: log probabilities and token ids, best first."""

    scores: tuple[float, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Extension:
    """Beam `parent` goes on with `token`; `total` is the sum of its log probabilities then."""

    parent: int
    token: int
    total: float


@dataclass(frozen=True, slots=True)
class BeamStep:
    """Beams that end with a stop token, and the best others, both best first."""

    ended: tuple[Extension, ...]
    following: tuple[Extension, ...]


def candidates(logits: Tensor, width: int) -> Candidates:
    """The 2 * width best continuations from float32 logits [vocabulary]."""
    count = min(2 * width, len(logits))
    scores, tokens = logits.log_softmax(-1).topk(count)
    return Candidates(tuple(scores.double().tolist()), tuple(tokens.tolist()))


def beam_step(
    totals: Sequence[float],
    options: Sequence[Candidates],
    width: int,
    stop_tokens: Container[int],
) -> BeamStep:
    """One step of beam search over beams with `totals` and their `options`; a pure function."""
    extensions = [
        Extension(parent, token, total + score)
        for parent, (total, option) in enumerate(zip(totals, options, strict=True))
        for score, token in zip(option.scores, option.tokens, strict=True)
    ]
    extensions.sort(key=lambda extension: -extension.total)
    best = extensions[: 2 * width]
    return BeamStep(
        ended=tuple(e for e in best if e.token in stop_tokens),
        following=tuple(e for e in best if e.token not in stop_tokens)[:width],
    )
