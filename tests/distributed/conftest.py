"""One set of processes for all tests."""

from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that run cases as ranks of a group, on the CPU."""
    found = Ranks()
    yield found
    found.close()


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Ranks]:
    """Two processes with a GPU each, joined by NCCL."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    found = Ranks(2, "cuda")
    yield found
    found.close()
