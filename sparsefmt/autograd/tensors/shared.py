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

    Public functions call its method of their name, in the place of their own code.
    """

    whole: Graph | None  #: the graph itself, where one process has all of it
    local: Graph  #: of the entries here: (targets here, sources here and then those of others)
    is_square: bool  #: whether the targets here are the sources here
    n_local: int  #: targets here
    n_sources: int  #: sources here

    @property
    def square(self) -> Graph:
        """Return the graph ``local`` with a row for each source, of a square graph."""

    def check(self, name: str, x: Tensor, *, of: str = "sources", dims: int | None = 2) -> None:
        """Raise if features have no row for each of the sources, or "targets", here."""

    def extended(self, x: Tensor) -> Tensor:
        """Join features of the sources here and of those of other processes."""

    def numbered(self, edge_index: Tensor) -> Tensor:
        """Return an ``edge_index`` of ``local`` by the numbers of the whole graph."""

    def sends_first(self, x: Tensor, width: int) -> bool:
        """Return True if features travel before a layer maps them to that width."""

    def maps_first(self, x: Tensor, width: int) -> bool:
        """Return True if features are mapped to that width before they are aggregated."""

    # functions of ``autograd``

    def spmm(self, x: Tensor, edge_weight: Tensor | None = None, **options: Any) -> Tensor:
        """Compute ``autograd.spmm``."""

    def operands(
        self, x: Tensor, edge_weight: Tensor | None = None, *scales: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Compute ``autograd.operands``."""

    def aggregate_with_own(self, x: Tensor, own: Tensor, *args: Any, **options: Any) -> Tensor:
        """Compute ``autograd.aggregate_with_own``."""

    def propagate(self, x: Tensor, scale: Tensor, own: Tensor, **options: Any) -> Tensor:
        """Compute ``autograd.propagate``."""

    def maxk_aggregate(self, x: Tensor, k: int, *args: Any, **options: Any) -> Tensor:
        """Compute ``autograd.maxk_aggregate``."""

    def sampled_aggregate(self, x: Tensor, width: int, *args: Any, **options: Any) -> Tensor:
        """Compute ``autograd.sampled_aggregate``."""

    def gat_aggregate(self, x: Tensor, el: Tensor, er: Tensor, **options: Any) -> Tensor:
        """Compute ``autograd.gat_aggregate`` of one head."""

    # what the planner asks

    def looped(self, which: str) -> "Shared":
        """Add loops to vertices."""

    def scaled_entries(self, row: Tensor | None, col: Tensor | None) -> Tensor:
        """Multiply the factors of the target and the source of each edge."""

    @property
    def busiest(self) -> dict[str, int]:
        """Return the largest sizes that any process has."""

    @property
    def times_forgotten(self) -> int:
        """Return how often results for constant features have become stale."""

    def bytes_between(self, x: Tensor) -> int:
        """Return the bytes of a feature on its way to another process."""

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
