"""Graphs whose rows several processes share out, and the functions that layers call of them.

A layer calls these functions in the place of those of the same names in ``autograd``.  Of a graph
that is shared out its own methods of these names compute: they know what other processes have.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor

from ..autograd import aggregate_with_own as plain_aggregate_with_own
from ..autograd import maxk_aggregate as plain_maxk_aggregate
from ..autograd import propagate as plain_propagate
from ..autograd import sampled_aggregate as plain_sampled_aggregate
from ..autograd import spmm as plain_spmm
from ..autograd.matmul import operands as plain_operands
from ..autograd.tensors.prepare import GraphLike
from ..autograd.tensors.shared import Shared as Shared
from ..autograd.tensors.shared import local_of as local_of
from ..autograd.tensors.shared import shared as shared

F = TypeVar("F", bound=Callable[..., Any])


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


def maps_first(graph: GraphLike, x: Tensor, width: int, *, otherwise: bool) -> bool:
    """Tell whether a layer maps features to that width before it aggregates them."""
    one = shared(graph)
    return otherwise if one is None else bool(one.maps_first(x, width))
