"""The same model over a contiguous cache of its own: what the shared pool is compared with.

Shares the forward pass with the engine and nothing else: no blocks, no tables, no prefix cache,
one sequence at a time, attention by the textbook.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv_worker.model import Model


class ContiguousCache:
    """KV of one sequence in one tensor per layer, in order of position."""

    def __init__(self, model: Model, capacity: int) -> None:
        config = model.config
        shape = (config.num_layers, config.num_kv_heads, capacity, config.head_dim)
        self._model = model
        self._keys = torch.zeros(shape, dtype=model.dtype)
        self._values = torch.zeros(shape, dtype=model.dtype)
        self._length = 0

    def append(self, tokens: Sequence[int]) -> Tensor:
        """Compute more tokens of the sequence; returns the last one's float32 logits."""
        positions = torch.arange(self._length, self._length + len(tokens))
        logits = self._model.forward(
            torch.tensor(tokens), positions, self._attend, torch.tensor([len(tokens) - 1])
        )
        self._length += len(tokens)
        return logits[0]

    def copy(self) -> "ContiguousCache":
        """An independent cache with the same sequence, for branching."""
        twin = ContiguousCache.__new__(ContiguousCache)
        twin._model, twin._length = self._model, self._length
        twin._keys, twin._values = self._keys.clone(), self._values.clone()
        return twin

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        end = self._length + len(q)
        self._keys[layer, :, self._length : end] = k.transpose(0, 1)
        self._values[layer, :, self._length : end] = v.transpose(0, 1)
        group = q.shape[1] // k.shape[1]
        keys = self._keys[layer, :, :end].repeat_interleave(group, 0)
        values = self._values[layer, :, :end].repeat_interleave(group, 0)
        hidden = torch.ones(len(q), end, dtype=torch.bool).triu(self._length + 1)
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) * q.shape[2] ** -0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ values).transpose(0, 1)


def greedy(
    model: Model, prompt: Sequence[int], max_tokens: int, stop_tokens: Sequence[int] = ()
) -> list[int]:
    """The tokens greedy decoding gives, a stop token included, without any cached prefix."""
    cache = ContiguousCache(model, len(prompt) + max_tokens)
    generated: list[int] = []
    pending = list(prompt)
    while len(generated) < max_tokens:
        token = int(cache.append(pending).argmax())
        generated.append(token)
        if token in stop_tokens:
            break
        pending = [token]
    return generated


def beam_search(
    model: Model, prompt: Sequence[int], max_tokens: int, width: int, stop_tokens: Sequence[int]
) -> list[tuple[float, list[int]]]:
    """Plain beam search: the `width` best (mean log probability, tokens), best first.

    Of all continuations of all beams, the best 2 * width are looked at: those that end leave the
    beam, the best `width` others go on. It is over when `width` have ended, or at `max_tokens`.
    """
    live: list[tuple[float, list[int], ContiguousCache]]
    live = [(0.0, [], ContiguousCache(model, len(prompt) + max_tokens))]
    pending = [list(prompt)]
    ended: list[tuple[float, list[int]]] = []
    for _ in range(max_tokens):
        options = []
        for index, (total, tokens, cache) in enumerate(live):
            scores, ids = cache.append(pending[index]).log_softmax(-1).topk(2 * width)
            options += [
                (total + float(score), index, [*tokens, int(token)])
                for score, token in zip(scores.double(), ids, strict=True)
            ]
        options.sort(key=lambda option: -option[0])
        following: list[tuple[float, list[int], ContiguousCache]] = []
        for total, index, tokens in options[: 2 * width]:
            if tokens[-1] in stop_tokens:
                ended.append((total / len(tokens), tokens))
            elif len(following) < width:
                following.append((total, tokens, live[index][2].copy()))
        live = following
        pending = [[tokens[-1]] for _, tokens, _ in live]
        if len(ended) >= width:
            break
    ended += [(total / len(tokens), tokens) for total, tokens, _ in live]
    return sorted(ended, key=lambda option: -option[0])[:width]
