"""From logits to tokens: what each sequence of a step does next. No I/O, no leases.

Beam search keeps `Group.sequences` equal to the beams that live; when all of them are READY their
candidates are ranked together, some beams end, some go on, some branch, the rest are dropped.
"""

import time
from array import array
from dataclasses import dataclass, field

from torch import Tensor

from radixkv_worker.request import Delta
from radixkv_worker.sampling import Extension, Sampler, beam_step, candidates
from radixkv_worker.sequence import Group, Phase, Sequence
from radixkv_worker.tokenizer import TextStream
from radixkv_worker.weights import LoadedModel


@dataclass(slots=True)
class Outcome:
    """What a step decided. `dropped` beams lead nowhere; `forks` pair a sequence with the new ones
    that share all it has computed; `finished` have their last token; `done` requests are over."""

    dropped: list[Sequence] = field(default_factory=list)
    forks: list[tuple[Sequence, list[Sequence]]] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    deltas: list[tuple[Group, Delta]] = field(default_factory=list)
    done: list[Group] = field(default_factory=list)


class Generation:
    """Turns requests into sequences and logits into their next tokens."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer = loaded.tokenizer
        self._eos = loaded.model.config.eos_tokens

    def begin(self, group: Group) -> Sequence:
        """The first sequence of a request; others branch off when the prompt is computed."""
        request = group.request
        first = Sequence(
            group=group,
            index=0,
            tokens=array("i", request.prompt),
            sampler=Sampler(request.params, 0),
            text=TextStream(self._tokenizer, request.params.stop),
            queued_s=time.monotonic(),
        )
        group.sequences = [first]
        return first

    def choose(self, sequences: list[Sequence], logits: Tensor) -> Outcome:
        """Choose the next token of each sequence from its row of logits; changes the sequences."""
        outcome = Outcome()
        groups = {}
        for sequence, row in zip(sequences, logits, strict=True):
            group = sequence.group
            self._note_prompt(sequence)
            if group.is_beam:
                sequence.options = candidates(row, group.request.params.beam_width)
                sequence.phase = Phase.READY
                groups[group.serial] = group
                continue
            branches = self._branches(sequence)
            for branch in [sequence, *branches]:
                self._append(branch, branch.sampler.choose(row), outcome)
            living = [branch for branch in branches if branch.phase is not Phase.FINISHED]
            if living:
                outcome.forks.append((sequence, living))
            groups[group.serial] = group
        for group in groups.values():
            if group.is_beam:
                if all(beam.phase is Phase.READY for beam in group.sequences):
                    self._beam_step(group, outcome)
            elif all(sample.phase is Phase.FINISHED for sample in group.sequences):
                outcome.done.append(group)
        return outcome

    def _note_prompt(self, sequence: Sequence) -> None:
        tally = sequence.group.tally
        if tally.first_token_s is None:
            tally.first_token_s = time.monotonic()
            tally.block_ids = tuple(sequence.held.block_table)

    def _stop_tokens(self, group: Group) -> tuple[int, ...]:
        params = group.request.params
        return () if params.ignore_eos else self._eos + params.stop_tokens

    # ---- samples ----------------------------------------------------------------------------

    def _branches(self, sequence: Sequence) -> list[Sequence]:
        """The other samples of a request whose prompt has just been computed."""
        group = sequence.group
        params = group.request.params
        if len(group.sequences) == params.n:
            return []
        branches = [self._twin(sequence, index) for index in range(1, params.n)]
        group.sequences += branches
        return branches

    def _twin(self, sequence: Sequence, index: int) -> Sequence:
        return Sequence(
            group=sequence.group,
            index=index,
            tokens=sequence.tokens[:],
            sampler=Sampler(sequence.group.request.params, index),
            text=sequence.text.copy(),
            queued_s=time.monotonic(),
            phase=Phase.RUNNING,
            total=sequence.total,
        )

    def _append(self, sequence: Sequence, token: int, outcome: Outcome) -> None:
        """Take a token, end the sequence if it is the last one, and report both."""
        group = sequence.group
        sequence.tokens.append(token)
        group.tally.generated_tokens += 1
        stops = token in self._stop_tokens(group)
        text = "" if stops else sequence.text.push(token)
        reason = "stop" if stops or sequence.text.stopped else None
        if reason is None and len(sequence.tokens) > group.max_computed:
            reason = "length"
        if reason is not None:
            text += sequence.text.finish()
            sequence.phase = Phase.FINISHED
            if sequence.lease is not None:
                outcome.finished.append(sequence)
        delta = Delta(sequence.index, (token,), text, reason)
        outcome.deltas.append((group, delta))

    # ---- beams ------------------------------------------------------------------------------

    def _beam_step(self, group: Group, outcome: Outcome) -> None:
        params, beams = group.request.params, group.sequences
        options = [beam.options for beam in beams if beam.options is not None]
        step = beam_step(
            [beam.total for beam in beams], options, params.beam_width, self._stop_tokens(group)
        )
        group.num_steps += 1
        group.tally.generated_tokens += len(step.ended) + len(step.following)
        for extension in step.ended:
            tokens = [*beams[extension.parent].generated, extension.token]
            group.ended_beams.append((extension.total / len(tokens), tokens))
        last = group.num_steps == params.max_tokens
        if last or len(group.ended_beams) >= params.beam_width:
            for extension in step.following:
                tokens = [*beams[extension.parent].generated, extension.token]
                group.ended_beams.append((extension.total / len(tokens), tokens))
            outcome.finished += beams
            self._report_beams(group, outcome)
            return
        self._extend_beams(group, step.following, outcome)

    def _extend_beams(
        self, group: Group, following: tuple[Extension, ...], outcome: Outcome
    ) -> None:
        """Each beam that goes on takes its best extension; further ones branch off before."""
        beams = group.sequences
        by_parent: dict[int, list[Extension]] = {}
        for extension in following:
            by_parent.setdefault(extension.parent, []).append(extension)
        # Indices order beams by age; a new one is younger than all before it.
        next_index = max(beam.index for beam in beams) + 1
        outcome.dropped += [beam for at, beam in enumerate(beams) if at not in by_parent]
        living: list[Sequence] = []
        for parent, extensions in by_parent.items():
            beam = beams[parent]
            branches = [self._twin(beam, next_index + at) for at in range(len(extensions) - 1)]
            next_index += len(branches)
            if branches:
                outcome.forks.append((beam, branches))
            for sequence, extension in zip([beam, *branches], extensions, strict=True):
                sequence.tokens.append(extension.token)
                sequence.total = extension.total
                sequence.phase, sequence.options = Phase.RUNNING, None
                living.append(sequence)
        group.sequences = living

    def _report_beams(self, group: Group, outcome: Outcome) -> None:
        best = sorted(group.ended_beams, key=lambda beam: -beam[0])[: group.request.params.n]
        stop_tokens = self._stop_tokens(group)
        for index, (score, tokens) in enumerate(best):
            stopped = tokens[-1] in stop_tokens
            text = self._tokenizer.decode(tokens[:-1] if stopped else tokens)
            reason = "stop" if stopped else "length"
            outcome.deltas.append((group, Delta(index, tuple(tokens), text, reason, score)))
        outcome.done.append(group)
