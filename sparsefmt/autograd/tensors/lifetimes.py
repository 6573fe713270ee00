"""What a CUDA graph reads has to outlive it: noted while it is recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HasParts(Protocol):
    """The tensors of a graph."""

    def parts(self) -> list[Any]:
        """Give all that kernels read of it."""


#: Where users of graphs and of kept constants note them; None where nothing is recorded.
noted: list[Any] | None = None


@contextmanager
def noting() -> Iterator[list[Any]]:
    """Note the graphs that a run reads, for those who record it as a CUDA graph.

    Returns
    -------
    list
        Of a ``with`` statement.  At its end it holds the tensors of these graphs, all that was
        built of them, and what plans keep of constants: memory that must stay for as long as the
        CUDA graph is replayed.

    Notes
    -----
    Of all threads, since backward runs on others.
    """
    global noted
    before, found = noted, list[Any]()
    noted = found
    try:
        yield found
    finally:
        noted = before
    graphs = {id(one): one for one in found if isinstance(one, HasParts)}
    found += [part for one in graphs.values() for part in one.parts()]


def note(one: Any) -> None:
    """Keep this for as long as the graph that is being recorded, if one is."""
    if noted is not None:
        noted.append(one)
