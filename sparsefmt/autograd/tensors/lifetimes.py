"""Keep the memory that a captured CUDA graph reads alive."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Where users of graphs and of kept constants note them; None where nothing is recorded.
noted: list[Any] | None = None


@contextmanager
def noting() -> Iterator[list[Any]]:
    """Yield a list of what a run reads, for those who record it as a CUDA graph.

    At the end it holds the tensors of these graphs, all that was built of them, and what plans keep
    of constants: memory that must stay for as long as the CUDA graph is replayed.  That is what all
    threads read, since backward runs on others.
    """
    global noted
    before, parts = noted, list[Any]()
    noted = parts
    try:
        yield parts
    finally:
        noted = before
    graphs = {id(user): user for user in parts if hasattr(user, "parts")}
    parts += [part for user in graphs.values() for part in user.parts()]


def note(user: Any) -> None:
    """Keep an object as long as the CUDA graph that is being recorded, if one is."""
    if noted is not None:
        noted.append(user)
