"""One set of processes for all tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from train_cases import write_parts


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


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph to train on, in four parts."""
    return write_parts(tmp_path_factory.mktemp("train") / "parts", 4)
