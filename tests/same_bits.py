"""Whether this machine's matrix products give a row the same bits for any number of rows.

They do with the BLAS kernels we know of, from MIN_ROWS rows on. Where they do not, float32 answers
still agree token by token, and tests that ask for equal bits say why they are skipped.
"""

import functools

import pytest
import torch

from radixkv_kernels import MIN_ROWS


@functools.cache
def rows_are_independent() -> bool:
    """Probe plain torch, without any code of ours."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for inner, outer in ((16, 48), (48, 192), (64, 128), (128, 128), (576, 1536)):
        rows = torch.randn(512, inner, generator=generator)
        weight = torch.randn(outer, inner, generator=generator)
        whole = torch.nn.functional.linear(rows, weight)
        for count in (MIN_ROWS, MIN_ROWS + 1, 24, 100):
            part = torch.nn.functional.linear(rows[:count].clone(), weight)
            if not torch.equal(part, whole[:count]):
                return False
    return True


def require_row_independence() -> None:
    """Skip the calling test where the machine lacks it."""
    if not rows_are_independent():
        pytest.skip("on this CPU the rows of a matrix product depend on their number")
