"""Graphs whose rows several processes share out, and the functions that layers call of them.

A layer calls these functions in the place of those of the same names in ``autograd``.  Of a graph
that is shared out its own methods of these names compute: they know what other processes have.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor

from ..autograd import GraphLike
from ..autograd import aggregate_with_own as plain_aggregate_with_own
from ..autograd import maxk_aggregate as plain_maxk_aggregate
from ..autograd import operands as plain_operands
from ..autograd import propagate as plain_propagate
from ..autograd import sampled_aggregate as plain_sampled_aggregate
from ..autograd import spmm as plain_spmm

F = TypeVar("F", bound=Callable[..., Any])


class Shared:
    """The rows of a graph that this process has, as ``distributed.DistGraph`` has them.

    Beside methods that are named as functions of this file it has ``local``, the graph of its
    entries, (targets here, sources here and then those of others); ``square``, the same with a
    row for each source, if it is square as a whole; ``is_square``, whether targets
    here are the sources here; ``check``, which refuses features of other numbers of them;
    ``extended(x)``, which puts features of other sources behind those of here; ``numbered``, which
    gives an ``edge_index`` of ``local`` the numbers of the whole graph; and ``sends_first(x,
    width)`` and ``maps_first(x, width)``, for layers that map features to that width.
    """


def shared(graph: object) -> Any:
    """Give the graph if it is shared out, else None."""
    return graph if isinstance(graph, Shared) else None


def _over_processes(function: F) -> F:
    """Let a graph that is shared out compute a function by its own method of that name."""
    name = function.__name__

    @wraps(function)
    def run(graph: Any, *args: Any, **options: Any) -> Any:
        if isinstance(graph, Shared):
            return getattr(graph, name)(*args, **options)
        return function(graph, *args, **options)

    return cast(F, run)


aggregate_with_own = _over_processes(plain_aggregate_with_own)
maxk_aggregate = _over_processes(plain_maxk_aggregate)
operands = _over_processes(plain_operands)
propagate = _over_processes(plain_propagate)
sampled_aggregate = _over_processes(plain_sampled_aggregate)
spmm = _over_processes(plain_spmm)


def local_of(graph: GraphLike) -> GraphLike:
    """Give the graph of the entries here, whose rows are the targets here."""
    found: GraphLike = graph if shared(graph) is None else shared(graph).local
    return found


def maps_first(graph: GraphLike, x: Tensor, width: int, *, otherwise: bool) -> bool:
    """Tell whether a layer maps features to that width before it aggregates them."""
    one = shared(graph)
    return otherwise if one is None else bool(one.maps_first(x, width))
