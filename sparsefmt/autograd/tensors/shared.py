"""Graphs whose rows several processes share: what public functions and layers ask of them."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from ...graph.graph import Graph

T = TypeVar("T")


class _Declared(type(Protocol)):  # type: ignore[misc]
    """A metaclass of protocols whose instances are those of declared subclasses alone.

    ``isinstance`` then takes 0.1 µs, where a comparison of all members takes 30.
    """

    __instancecheck__, __subclasscheck__ = type.__instancecheck__, type.__subclasscheck__


@runtime_checkable
class Shared(Protocol, metaclass=_Declared):
    """The rows of a graph that this process has, as ``distributed.DistGraph`` has them.

    ``spmm``, ``aggregate_with_own``, ``propagate``, ``maxk_aggregate`` and ``sampled_aggregate``
    call its method of their name in the place of their own code.  Other public functions refuse it;
    layers call the rest.
    """

    whole: Graph | None  #: the graph itself, where one process has all of it
    local: Graph  #: of the entries here: (targets here, sources here and then those of others)
    is_square: bool  #: whether the targets here are the sources here
    n_local: int  #: targets here
    n_sources: int  #: sources here

    @property
    def square(self) -> Graph:
        """Return the graph ``local`` with a row for each source, of a square graph."""

    #: ``check(name, x, of="sources", dims=2)`` raises if x has no row for each source, or target.
    check: Callable[..., None]
    #: Joins features of the sources here and of those of other processes.
    extended: Callable[[Tensor], Tensor]
    #: Returns an ``edge_index`` of ``local`` by the numbers of the whole graph.
    numbered: Callable[[Tensor], Tensor]
    #: Returns True if features travel before a layer maps them to that width.
    sends_first: Callable[[Tensor, int], bool]
    #: Returns True if features are mapped to that width before they are aggregated.
    maps_first: Callable[[Tensor, int], bool]

    # functions of ``autograd``, with all arguments but the graph; ``gat_aggregate`` of one head

    spmm: Callable[..., Tensor]
    operands: Callable[..., tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]]
    aggregate_with_own: Callable[..., Tensor]
    propagate: Callable[..., Tensor]
    maxk_aggregate: Callable[..., Tensor]
    sampled_aggregate: Callable[..., Tensor]
    gat_aggregate: Callable[..., Tensor]

    # what the planner asks

    #: Adds loops to vertices.
    looped: Callable[[str], "Shared"]
    #: Multiplies the factors of the target and the source of each edge.
    scaled_entries: Callable[[Tensor | None, Tensor | None], Tensor]
    #: Returns the bytes of a feature on its way to another process.
    bytes_between: Callable[[Tensor], int]

    @property
    def busiest(self) -> dict[str, int]:
        """Return the largest sizes that any process has."""

    @property
    def times_forgotten(self) -> int:
        """Return how often results for constant features have become stale."""

    def agreed(self, facts: Callable[[], Mapping[str, Any]], own: Callable[[], T]) -> T:
        """Check that facts are alike on all processes; return ``own()`` of the first."""


def shared(graph: object) -> Any:
    """Return the graph if processes share it, else None."""
    return graph if isinstance(graph, Shared) else None


def local_of(graph: Any) -> Any:
    """Return the graph of the entries here, whose rows are the targets here."""
    return graph.local if isinstance(graph, Shared) else graph


def n_sources(graph: Any) -> int:
    """Return the number of rows of features that a layer takes with a graph."""
    return int(graph.n_sources if isinstance(graph, Shared) else graph.shape[1])


def is_square(graph: Any) -> bool:
    """Return True if the targets of a graph are its sources."""
    shape = graph.shape
    return graph.is_square if isinstance(graph, Shared) else bool(shape[0] == shape[1])
