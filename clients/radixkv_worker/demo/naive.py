"""A model of a prefix cache that anyone can check: a set of prefixes, whole blocks each."""

from collections.abc import Sequence


class NaiveCache:
    """Nothing is ever evicted. Prefixes are kept whole, so a match is by exact tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prefixes: set[tuple[int, ...]] = set()

    @property
    def num_blocks(self) -> int:
        """Blocks it holds."""
        return len(self._prefixes)

    def hit(self, prompt: Sequence[int]) -> int:
        """Usable cached tokens of a prompt: whole blocks, and at least one token is left over."""
        hit = 0
        for end in range(self._block_size, len(prompt), self._block_size):
            if tuple(prompt[:end]) not in self._prefixes:
                break
            hit = end
        return hit

    def add(self, tokens: Sequence[int]) -> None:
        """All full blocks of a computed sequence."""
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            self._prefixes.add(tuple(tokens[:end]))
