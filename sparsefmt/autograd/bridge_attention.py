"""The library ops of attention between whole rows, as in ``bridge``.

A backward op takes the structure of the graph and that of its transpose, whose ``perm`` it reads
edge scores and masks by.  It returns a gradient for each tensor that may have one, empty where the
tensor was not given; that of edge scores, the only result with a value an entry, only if
``of_edges``.  ``statistics`` hold what forward knows of each row, and no value of an entry.  Seeds
are tensors, so that a captured CUDA graph reads another one at each replay.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _cpu_attend, _cuda, _cuda_attend, _library
from ._scores import heads_and_feat, shape_of, sums_dtype
from .bridge import Op
from .structure import Side

_ON_CPU, _ON_CUDA = vars(_cpu_attend), vars(_cuda_attend)

_STRUCTURE = "Tensor indptr, Tensor indices, SymInt n_cols, Tensor[] plan"
_BOTH = f"{_STRUCTURE}, Tensor t_indptr, Tensor t_indices, Tensor[] t_plan, Tensor perm"
_ATTEND = (
    "Tensor queries, Tensor keys, Tensor? values, Tensor? att, Tensor? edges, Tensor? seed, "
    "float slope, float scale, float dropout, bool loops"
)
_SCHEMAS = (
    f"attend({_STRUCTURE}, {_ATTEND}) -> Tensor",
    f"attend_with_statistics({_STRUCTURE}, {_ATTEND}) -> (Tensor, Tensor)",
)
_BACKWARD_SCHEMAS = (
    f"attend_backward({_BOTH}, Tensor grad, Tensor out, Tensor statistics, bool of_edges, "
    f"{_ATTEND}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)

# The shapes of results


def _out(indptr: Tensor, x: Tensor) -> Tensor:
    return x.new_empty((indptr.shape[0] - 1, *x.shape[1:]))


def _statistics(out: Tensor, *each: int) -> Tensor:
    """Of each row and head."""
    return out.new_empty((out.shape[0], heads_and_feat(out)[0], *each), dtype=sums_dtype(out))


def _attend_fake(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    queries: Tensor,
    keys: Tensor,
    *_: Any,
) -> Any:
    return _out(indptr, keys)


def _attend_with_statistics_fake(*args: Any) -> Any:
    out = _attend_fake(*args)
    return out, _statistics(out, 2)


def _attend_backward_fake(*args: Any) -> Any:
    of_edges, queries, keys, values, att, edges = args[11:17]
    features = (keys.new_empty(shape_of(one)) for one in (queries, keys, values))
    scores = shape_of(att), shape_of(edges, of_edges)
    return *features, *(keys.new_empty(one, dtype=sums_dtype(keys)) for one in scores)


_FAKES: dict[str, Any] = {
    "attend": _attend_fake,
    "attend_with_statistics": _attend_with_statistics_fake,
    "attend_backward": _attend_backward_fake,
}

# Autocast: features in the autocast dtype, scores in float32; float64 stays

_FEATURES = ("queries", "keys", "values")
_UNDER_AUTOCAST = ("attend", "attend_with_statistics")


def _autocast(op: Any, kind: str) -> Any:
    narrow = [argument.name in _FEATURES for argument in op._schema.arguments]

    def kernel(*args: Any) -> Any:
        dtypes = (_library.autocast_dtype(kind, narrow=one) for one in narrow)
        with torch.autocast(kind, enabled=False):
            cast = partial(_library.cast, kind=kind)
            return op(*(cast(one, dtype=dtype) for one, dtype in zip(args, dtypes, strict=False)))

    return kernel


_structure: Any = _cuda.of_tensors(lambda structure: structure)


def _of_both(kernel: Any) -> Any:
    """A backward kernel as a library op takes it: with both structures in tensors."""

    def run(
        indptr: Tensor,
        indices: Tensor,
        n_cols: int,
        plan: list[Tensor],
        t_indptr: Tensor,
        t_indices: Tensor,
        t_plan: list[Tensor],
        *args: Any,
    ) -> Any:
        S = _structure(indptr, indices, n_cols, plan)
        T = _structure(t_indptr, t_indices, indptr.shape[0] - 1, t_plan)
        return kernel(S, T, *args)

    return run


def _register() -> None:
    for schema in _SCHEMAS + _BACKWARD_SCHEMAS:
        name = schema.split("(")[0]
        kernel = _ON_CUDA[name]
        if schema in _BACKWARD_SCHEMAS:
            kernel = _of_both(kernel)
        elif schema in _SCHEMAS:
            kernel = _cuda.of_tensors(kernel)
        _library.define(schema, _ON_CPU[name], kernel, _FAKES[name])
    for name in _UNDER_AUTOCAST:
        _library.define_autocast(name, _autocast)


_register()

# The ops as ``attention`` calls them


class BackwardOp(Op):
    """A library op, called with both sides of a graph in the place of its structures."""

    def __call__(self, side: Side, columns: Any, *args: Any) -> Any:
        """By the short way where nothing can tell."""
        if _library.needs_no_dispatcher(side, args):
            return self.kernel(side.structure, columns.structure, columns.perm, *args)
        structure = side.indptr, side.indices, side.n_cols, side.plan
        transposed = columns.indptr, columns.indices, columns.plan, columns.perm
        return self.library(*structure, *transposed, *args)


ATTEND = Op("attend", _ON_CUDA)
ATTEND_WITH_STATISTICS = Op("attend_with_statistics", _ON_CUDA)
ATTEND_BACKWARD = BackwardOp("attend_backward", _ON_CUDA)
