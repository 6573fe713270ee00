"""The library ops of graph attention: schemas, kernels, fakes and autocast, as in ``bridge``.

A backward op takes the structure of the graph and that of its transpose, whose ``perm`` it reads
edge scores and masks by.  It returns a gradient for each tensor that may have one, empty where the
tensor was not given; that of edge scores, the only result with a value an entry, only if
``of_edges``.  ``statistics`` hold what forward knows of each row, and no value of an entry.  A
``bias`` has heads * feat values and is added to each row of a square graph; the gradient is asked
of ``gat_of_vectors_backward``, which takes the vectors that ``gat_scores`` had, and gives those of
source, target and bias as one tensor.  Seeds are tensors, so that a captured CUDA graph reads
another one at each replay.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _cpu_attention, _cuda, _cuda_attention, _library
from ._scores import heads_and_feat, shape_of, sums_dtype
from .bridge import FeatureOp, Op
from .structure import Side

_ON_CPU, _ON_CUDA = vars(_cpu_attention), vars(_cuda_attention)

_STRUCTURE = "Tensor indptr, Tensor indices, SymInt n_cols, Tensor[] plan"
_BOTH = f"{_STRUCTURE}, Tensor t_indptr, Tensor t_indices, Tensor[] t_plan, Tensor perm"
_GAT = (
    "Tensor h, Tensor el, Tensor er, Tensor? edges, Tensor? loop_edges, Tensor? seed, "
    "float slope, float dropout, bool loops"
)
_SCHEMAS = (
    f"gat({_STRUCTURE}, Tensor? bias, {_GAT}) -> Tensor",
    f"gat_with_statistics({_STRUCTURE}, Tensor? bias, {_GAT}) -> (Tensor, Tensor, Tensor)",
)
_BACKWARD_SCHEMAS = (
    f"gat_backward({_BOTH}, Tensor grad, Tensor out, Tensor plus, Tensor statistics, "
    f"bool of_edges, {_GAT}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"gat_of_vectors_backward({_BOTH}, Tensor grad, Tensor out, Tensor plus, Tensor statistics, "
    f"bool of_edges, Tensor source, Tensor target, Tensor? bias, {_GAT}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)
#: Of features alone, without a structure.
_FEATURE_SCHEMAS = ("gat_scores(Tensor h, Tensor source, Tensor target) -> (Tensor, Tensor)",)

# The shapes of results


def _out(indptr: Tensor, x: Tensor) -> Tensor:
    return x.new_empty((indptr.shape[0] - 1, *x.shape[1:]))


def _statistics(out: Tensor, *each: int) -> Tensor:
    """Of each row and head."""
    return out.new_empty((out.shape[0], heads_and_feat(out)[0], *each), dtype=sums_dtype(out))


def _gat_fake(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    bias: Tensor | None,
    h: Tensor,
    *_: Any,
) -> Any:
    return _out(indptr, h)


def _gat_with_statistics_fake(*args: Any) -> Any:
    out = _gat_fake(*args)
    return out, torch.empty_like(out), _statistics(out, 4)


def _gat_backward_fake(*args: Any) -> Any:
    of_edges, h, el, er, edges, loop_edges = args[12:18]
    shapes = el.shape, er.shape, shape_of(loop_edges), shape_of(edges, of_edges)
    return h.new_empty(h.shape), *(h.new_empty(one, dtype=sums_dtype(h)) for one in shapes)


def _gat_of_vectors_backward_fake(*args: Any) -> Any:
    source, _, bias = args[13:16]
    dh, _, _, *others = _gat_backward_fake(*args[:13], *args[16:])
    of = 2 if bias is None else 3
    return dh, dh.new_empty((of, *source.shape), dtype=sums_dtype(dh)), *others


def _gat_scores_fake(h: Tensor, source: Tensor, target: Tensor) -> Any:
    el, er = (h.new_empty(h.shape[:-1], dtype=sums_dtype(h)) for _ in range(2))
    return el, er


_FAKES: dict[str, Any] = {
    "gat": _gat_fake,
    "gat_with_statistics": _gat_with_statistics_fake,
    "gat_backward": _gat_backward_fake,
    "gat_of_vectors_backward": _gat_of_vectors_backward_fake,
    "gat_scores": _gat_scores_fake,
}

# Autocast: features in the autocast dtype, scores in float32; float64 stays

_FEATURES = ("h", "source", "target", "bias")
_UNDER_AUTOCAST = ("gat", "gat_with_statistics", "gat_scores")


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
    for schema in _SCHEMAS + _BACKWARD_SCHEMAS + _FEATURE_SCHEMAS:
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


GAT = Op("gat", _ON_CUDA)
GAT_WITH_STATISTICS = Op("gat_with_statistics", _ON_CUDA)
GAT_BACKWARD = BackwardOp("gat_backward", _ON_CUDA)
GAT_OF_VECTORS_BACKWARD = BackwardOp("gat_of_vectors_backward", _ON_CUDA)
GAT_SCORES = FeatureOp("gat_scores", _ON_CUDA)
