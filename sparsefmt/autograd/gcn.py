"""GCN's normalisation, differentiable in edge values, and the graphs that store its loops."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..errors import ShapeError, UnsupportedError
from ..formats.arrays import finish
from ..graph.built import slot
from ..graph.graph import Graph
from ..ops.engine.bind import flag
from ..ops.engine.table import Arg
from ..ops.gcn import api as ops
from ..ops.gcn.cuda import gcn_unit_scales
from .engine import library
from .engine.checks import TENSORS
from .engine.library import LibraryOp
from .engine.recording import Ctx, once_differentiable, taped
from .tensors.edge_index import as_graph
from .tensors.order import in_csr_order, in_own_order
from .tensors.prepare import GraphLike, tensors_of
from .tensors.tensors import GraphTensors

GCN_NORM = LibraryOp("gcn_norm")
GCN_NORM_BACKWARD = LibraryOp("gcn_norm_backward")
_VALUES = Arg("edge_weight", "entries")


def gcn_norm(
    graph: GraphLike, edge_weight: Tensor | None = None, *, self_loops: bool = True
) -> tuple[Graph, Tensor]:
    """Compute ``D^-1/2 (A + I) D^-1/2``, or without ``I``, differentiably in the values of ``A``.

    ``b[e] = d[i]^-1/2 a[e] d[j]^-1/2`` for the stored entry ``e = (i, j)``, where ``d[i]`` is the
    sum of the values of row ``i``, plus 1 for the loop that is added to a vertex without one; 0 in
    the place of ``d^-1/2`` where ``d <= 0``.  To multiply with it,
    ``normalised, b = gcn_norm(graph, a)`` and ``spmm(normalised, x, b)``.

    Parameters
    ----------
    graph : Graph, shape (n, n)
    edge_weight : Tensor, shape (nnz,), optional
        ``a`` in the order of ``graph.structure``, on the device of the graph: float16 or bfloat16
        (summed in float32), float32 or float64.  By default the graph's own values, as constants,
        and 1 for an unweighted graph.
    self_loops : bool
        Whether to add the loops.

    Returns
    -------
    normalised : Graph, shape (n, n)
        With ``self_loops`` an unweighted graph of ``nnz + n`` entries, the loop of each vertex
        behind its row; the same object at each call.  Without them ``graph`` itself.
    values : Tensor, shape (nnz + n,) or (nnz,)
        Of the entries of ``normalised``, in the order of its ``structure``; the loop of a vertex
        that stores one already is 0.  In the dtype of ``edge_weight`` or of the graph's values,
        float32 for an unweighted graph and under autocast, which leaves float64.

    Raises
    ------
    ShapeError
        If the graph is not square, or ``edge_weight`` not one value for each stored entry.
    DtypeError
        If ``graph`` is no Graph, ``edge_weight`` no tensor of floating numbers, or ``self_loops``
        no bool.
    DeviceError
        If ``edge_weight`` is not where the graph is.
    UnsupportedError
        If ``edge_weight`` is sparse, it is called within ``torch.func`` or with a tangent, loops
        are asked of the tensors that a tracer has in the place of a graph or, in backward, the
        gradient is differentiated again or, on a GPU, deterministic algorithms are asked for.

    Notes
    -----
    Forward is deterministic.  On a GPU the gradient adds up by atomics, in no fixed order; its
    workspace has an index for each entry.  The graph with the loops depends on the structure alone:
    the first call makes it, which synchronises with a GPU, and it stays with ``graph`` and what
    ``with_data`` makes of it, but not after ``to`` or a copy.  So call it once before a CUDA graph
    is captured, and for every new graph that a compiled function will get.  ``nn.GCNConv`` does the
    same by scales of rows and columns, without the values; but of several loops of a vertex, which
    count each here, it takes the last, as PyG does.

    GCN (ICLR'17), equation 2; fuseGNN (ICCAD'20), section 3, fuses the same steps.
    """
    graph = as_graph(graph, None)
    tensors = tensors_of(graph)
    flag("self_loops", self_loops)
    if tensors.n_rows != tensors.n_cols:
        raise ShapeError(
            f"graph has shape {(tensors.n_rows, tensors.n_cols)}: a vertex has one degree, give as "
            "many columns as rows."
        )
    values = _checked_values(edge_weight, tensors)
    out = taped(_GcnNorm, _norm, (values,), tensors, self_loops)
    if not self_loops:
        return cast(Graph, graph), in_own_order(tensors, out)
    if not isinstance(graph, Graph):
        raise UnsupportedError(
            "graph is only the tensors of one, as a tracer has them, to which no loops can be "
            "added: give self_loops=False, or the Graph itself."
        )
    graph._fill("looped")
    return graph._slots.looped[1 if graph._flipped else 0], out


def unit_scales(graph: GraphLike, dtype: torch.dtype) -> Tensor | None:
    """Compute GCN's factors of an unweighted graph on a GPU: (2, n), None where there is no kernel.

    ``d[i]^-1/2`` and ``own[i] / d[i]``, where ``d[i]`` is the number of entries of row i and
    ``own[i]``, which is 1 less the loops of the row.  In float64 before the cast.
    """
    tensors = tensors_of(graph)
    S = tensors.rows.structure
    if S is None or tensors.csr_values is not None or torch.compiler.is_compiling():
        return None
    direct = torch.float32 if dtype is torch.float32 else torch.float64
    out = torch.empty((2, tensors.n_rows), dtype=direct, device=tensors.device)
    return gcn_unit_scales(S, out).to(dtype) if tensors.n_rows else out.to(dtype)


def _checked_values(edge_weight: Tensor | None, graph: GraphTensors) -> Tensor | None:
    """Check edge values, cast them as autocast would, move them to CSR order; None is for ones."""
    values: Any = graph.csr_values if edge_weight is None else edge_weight
    if torch.is_autocast_enabled(graph.kind):
        values = library.cast(values, graph.kind, library.autocast_dtype(graph.kind, narrow=False))
    if edge_weight is None:
        return cast("Tensor | None", values)
    TENSORS.check("edge_weight", values, _VALUES, graph, graph.nnz, None)
    return in_csr_order(graph, cast(Tensor, values))


def _with_loops(graph: Graph) -> Graph:
    """Make the structure with the loops."""
    csr = ops.gcn_norm(graph.csr.with_data(None)).with_data(None)
    finish(csr.indptr)  # synchronize!
    return Graph(csr)


slot("looped", _with_loops, structural=True)


def _norm(values: Tensor | None, tensors: GraphTensors, loops: bool) -> Tensor:
    out: Tensor = GCN_NORM(tensors.rows, values, loops)
    return out


class _GcnNorm(Function):
    """The normalised values, with those of the loops if they are added."""

    @staticmethod
    def forward(ctx: Ctx, values: Tensor, tensors: GraphTensors, loops: bool) -> Tensor:
        ctx.save_for_backward(values)
        ctx.tensors, ctx.loops = tensors, loops
        return _norm(values, tensors, loops)

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (values,) = ctx.saved_tensors
        args = ctx.tensors.current().rows, values, grad, ctx.loops
        return once_differentiable("gcn_norm", GCN_NORM_BACKWARD, *args), None, None
