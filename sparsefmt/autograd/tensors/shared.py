"""Graphs whose rows several processes share out, as far as this layer knows them."""

from typing import Any


class Shared:
    """The rows of a graph that this process has, as ``distributed.DistGraph`` has them.

    Layers call its methods that are named as functions of ``nn.shared``.  Beside these it has
    ``whole``, the graph itself where one process has all of it, else None; ``local``, the graph of
    its entries, (targets here, sources here and then those of others); ``square``, the same with a
    row for each source, if it is square as a whole; ``is_square``, whether targets
    here are the sources here, of which there are ``n_sources``; ``check``, which refuses features
    of other numbers of them; ``extended(x)``, which puts features of other sources behind those of
    here; ``numbered``, which gives an ``edge_index`` of ``local`` the numbers of the whole graph;
    and ``sends_first(x, width)`` and ``maps_first(x, width)``, for layers that map features to that
    width.  The planner asks for ``looped(which)``, ``scaled_entries``, ``gat_aggregate``,
    ``busiest``, ``bytes_between``, ``times_forgotten`` and ``agreed``: see
    ``distributed.planning``.
    """


def shared(graph: object) -> Any:
    """Return the graph if processes share it, else None."""
    return graph if isinstance(graph, Shared) else None


def local_of(graph: Any) -> Any:
    """Return the graph of this process's entries, or the graph itself if it is not shared."""
    return graph if shared(graph) is None else shared(graph).local


def n_sources(graph: Any) -> int:
    """Return the number of rows of features that a layer takes with a graph."""
    count: int = graph.shape[1] if shared(graph) is None else graph.n_sources
    return count


def is_square(graph: Any) -> bool:
    """Return True if the targets of a graph are its sources."""
    square: bool = graph.shape[0] == graph.shape[1] if shared(graph) is None else graph.is_square
    return square
