"""Loops of a graph, and what adding one to each vertex makes of degrees and softmax."""

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd import sddmm, spmm
from ..autograd.gcn import unit_scales
from ..autograd.tensors.order import own_values
from ..autograd.tensors.prepare import GraphLike, graph_tensors
from .shared import local_of


def symmetric(
    graph: GraphLike,
    edge_weight: Tensor | None,
    dtype: torch.dtype,
    fill: float = 1.0,
    *,
    to_all: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute ``d[i]^-1/2``, and ``own[i] / d[i]``, the part of a vertex's own features.

    ``d[i] = own[i] + sum_e a[e]`` over the entries of row ``i``; ``own[i]`` is ``fill`` for a
    vertex without a loop, 0 for one with a loop, and for one with more of them minus the values of
    all but the last, which counts alone, as in PyG.  With a ``fill`` of 0 nothing is added and all
    loops count.  ``to_all`` tells that ``own[i]`` is ``fill`` for each vertex, beside the loops
    that it has, which all count.  Both are 0 where ``d[i] <= 0``.  Differentiable in
    ``edge_weight``; those of the graph's own values are kept with it.  Of a graph that processes
    share, those of the vertices here.
    """
    graph = local_of(graph)
    if edge_weight is None:
        tensors = graph_tensors(graph)
        usual = fill == 1 and not to_all
        made = tensors.built_scales() if usual and dtype is torch.float32 else None
        if made is not None:
            return made
        key = ("gcn", dtype) if usual else ("gcn", dtype, fill, to_all)
        both = tensors.kept(key, lambda: _of_graph(graph, dtype, fill, to_all))
    else:
        both = _symmetric(graph, edge_weight, fill, to_all).to(dtype)
    scale, loop = both.unbind()
    return scale, loop


def stored(graph: GraphLike, dtype: torch.dtype) -> Tensor | None:
    """Tell which vertices get no loop from ``symmetric``, by a graph's own values: (n, 1), kept.

    None where each gets one; the capture of a CUDA graph cannot look, and where the build of the
    graph will tell, nobody waits for it.
    """
    graph = local_of(graph)
    tensors = graph_tensors(graph)
    known = tensors.loops if tensors.csr_values is None else None
    if known is False:
        return None
    if tensors.building:
        return symmetric(graph, None, dtype)[1][:, None] == 0
    blind = _is_blind(tensors)

    def make() -> Tensor:
        found = symmetric(graph, None, dtype)[1][:, None] == 0
        return found if blind or known or found.any() else found[:0]  # synchronize!

    found = tensors.kept(("stored", dtype), make)
    return None if found.shape[0] == 0 and tensors.n_rows else found


def _is_blind(graph: GraphLike) -> bool:
    """Tell whether the values of tensors cannot be looked at."""
    if torch.compiler.is_compiling():
        return True
    return graph_tensors(graph).kind == "cuda" and torch.cuda.is_current_stream_capturing()


def _of_graph(graph: GraphLike, dtype: torch.dtype, fill: float, to_all: bool) -> Tensor:
    """Compute both by the graph's own values, (2, n)."""
    found = unit_scales(graph, dtype) if fill == 1 and not to_all else None
    return _symmetric(graph, None, fill, to_all).to(dtype) if found is None else found


def _symmetric(
    graph: GraphLike, edge_weight: Tensor | None, fill: float, to_all: bool = False
) -> Tensor:
    """Compute both, (2, n), in float32 at least: 2-byte floats may not count up to a degree."""
    tensors = graph_tensors(graph)
    weights = own_values(graph) if edge_weight is None else edge_weight
    if weights is not None and weights.dtype.itemsize == 2:
        weights = weights.float()
    wide = torch.float64 if weights is None else weights.dtype
    with torch.autocast(tensors.kind, enabled=False):
        ones = torch.ones(tensors.n_cols, 1, dtype=wide, device=tensors.device)
        own = fill * (ones[: tensors.n_rows, 0] if to_all else missing_loops(graph).to(wide))
        earlier = earlier_loops(graph) if fill and not to_all else None
        if earlier is not None:
            earlier = earlier.to(wide) if weights is None else weights * earlier.to(wide)
            own = own - spmm(graph, ones, earlier)[:, 0]
        degree = own + spmm(graph, ones, weights)[:, 0]
    scale = degree.masked_fill(degree <= 0, inf).rsqrt()
    return torch.stack([scale, (own * scale * scale).masked_fill(own == 0, 0)])


def earlier_loops(graph: GraphLike) -> Tensor | None:
    """Give 1 for a loop with a later one of its vertex, else 0: (nnz,) in float64, kept.

    None where there is no such loop.  Where the build of the graph has told, or will tell, whether
    there are loops, nobody waits for it; other graphs are looked at once.
    """
    tensors = graph_tensors(graph)
    blind = _is_blind(tensors)
    if not blind and tensors.loops is False:
        return None
    blind = blind or bool(tensors.building)

    def make() -> Tensor:
        count = _loops_of_rows(graph)
        if not blind and not (count > 1).any():  # synchronize!
            return count[:0]
        row, col = ends(graph)
        at = torch.arange(1, tensors.nnz + 1, device=row.device)
        loop, rows = row == col, row.long()
        last = at.new_zeros(tensors.n_rows).scatter_reduce(0, rows, at * loop, "amax")
        return (loop & (at != last.index_select(0, rows))).double()

    found = tensors.kept("earlier loops", make)
    return None if found.shape[0] == 0 else found


def missing_loops(graph: GraphLike) -> Tensor:
    """Give 1 for a vertex without a loop, else 0: (n,) in float64, kept with the graph."""
    tensors = graph_tensors(graph)
    return tensors.kept("loops missing", lambda: (_loops_of_rows(graph) == 0).double())


def _loops_of_rows(graph: GraphLike) -> Tensor:
    """Count the loops of each row, (n_rows,) in float64, once for each graph."""
    return graph_tensors(graph).kept("loops of rows", lambda: loops(graph)[1])


def loops(graph: GraphLike) -> tuple[Tensor, Tensor]:
    """Give 1 for a loop, else 0, (nnz,), and the loops of each row, (n_rows,); both in float64."""
    row, col = ends(graph)
    found = (row == col).double()
    ones = found.new_ones(graph_tensors(graph).n_cols, 1)
    return found, spmm(graph, ones, found)[:, 0]


def ends(graph: GraphLike) -> tuple[Tensor, Tensor]:
    """Give the row and the column of each entry, (nnz,) in float64, in the user's order."""
    tensors = graph_tensors(graph)
    options = {"dtype": torch.float64, "device": tensors.device}
    rows, cols = (torch.arange(n, **options)[:, None] for n in (tensors.n_rows, tensors.n_cols))
    ones = torch.ones_like
    return sddmm(graph, rows, ones(cols)), sddmm(graph, ones(rows), cols)


class Looped(NamedTuple):
    """A graph each of whose first vertices has one loop, behind the other entries.

    ``edges`` is its ``edge_index`` and ``others`` tells which entries it has of the graph's own.
    """

    edges: Tensor
    others: Tensor

    @property
    def n_loops(self) -> int:
        """Number of loops: vertices that are both sources and targets."""
        return self.edges.shape[1] - self.others.shape[0]


def with_loops(graph: GraphLike) -> Looped:
    """Give a graph of any shape one loop for each vertex that is a row and a column, and no other.

    Made once for each graph.
    """
    tensors = graph_tensors(graph)

    def others() -> Tensor:
        row, col = ends(graph)
        return (row != col).nonzero()[:, 0]  # synchronize!

    kept = tensors.kept("others than loops", others)

    def edges() -> Tensor:
        row, col = ends(graph)
        own = torch.arange(min(tensors.n_rows, tensors.n_cols), device=tensors.device)
        return torch.stack([torch.cat([end[kept].long(), own]) for end in (col, row)])

    return Looped(tensors.kept("edges with loops", edges), kept)


def log_sums(graph: GraphLike, scores: Tensor, p: Tensor) -> Tensor:
    """Compute the logarithm of each row's sum of ``exp(scores)``, (n,); ``p`` is the softmax."""
    tensors = graph_tensors(graph)
    with torch.autocast(tensors.kind, enabled=False):
        # log Z = scores - log p at each entry of a row: their mean, weighted with p.
        log_z = scores - p.clamp(min=torch.finfo(p.dtype).tiny).log()
        log_z = spmm(graph, p.new_ones(tensors.n_cols, 1), p * log_z)[:, 0]
    indptr = tensors.rows.indptr
    return log_z.masked_fill(indptr[1:] == indptr[:-1], -inf)
