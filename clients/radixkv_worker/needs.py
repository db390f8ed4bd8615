"""How many blocks a request needs at the very least, so that what never fits is refused.

Beams of one request share full blocks of equal tokens, and each has a tail of its own; they need
their blocks at the same time. Plain samples do not: those without room take their turn later.
"""

from radixkv_worker.sequence import Group


def blocks_at_least(group: Group, block_size: int) -> int:
    """Blocks that the request needs at one time if it generates all its tokens.

    Beams count as sharing every full block, so what passes here may still turn out too large.
    """
    params = group.request.params
    one = -(-group.max_computed // block_size)
    branches = params.beam_width - 1 if group.is_beam and params.max_tokens > 1 else 0
    return one + branches


def blocks_to_resume(group: Group, block_size: int) -> int:
    """Blocks that the beams need to come together again, all of what they share still cached.

    Each comes back with every block it can still need; of its own tokens all but the last can be
    cached.
    """
    one = -(-group.max_computed // block_size)
    shared: set[tuple[int, bytes]] = set()  # a block of tokens behind a prefix, by its hash
    private = 0
    for beam in group.sequences:
        num_full = (len(beam.tokens) - 1) // block_size
        private += one - num_full
        prefix = 0
        for at in range(num_full):
            part = (prefix, beam.tokens[at * block_size : (at + 1) * block_size].tobytes())
            shared.add(part)
            prefix = hash(part)
    return len(shared) + private
