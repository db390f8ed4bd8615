"""Settings for all tests of kernels."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """As in the worker: the parts that several threads sum depend on the number of threads."""
    torch.set_num_threads(1)
