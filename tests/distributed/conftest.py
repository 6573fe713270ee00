"""One set of processes for all tests."""

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that run cases as ranks of a group."""
    found = Ranks()
    yield found
    found.close()
