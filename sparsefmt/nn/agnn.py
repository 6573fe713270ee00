"""AGNN: attention by the cosine of two vertices' features."""

from typing import Unpack

import torch
from torch import Tensor
from torch.nn import Parameter

from ..autograd import as_graph, dot_aggregate, edge_softmax, sddmm, spmm
from ..autograd.tensors.prepare import GraphLike, graph_tensors, has_tiles
from ._attention import entries_with_loops, refuse_static
from ._inputs import Ends, check_flags, check_input
from ._loops import log_sums, loops, missing_loops
from ._passing import Passing, PassingOptions

#: The least length that a row is divided by: what ``torch.nn.functional.normalize`` has.
LEAST_LENGTH = 1e-12


class AGNNConv(Passing):
    """Attention by cosines: ``y[i] = sum_e P[e] x[j]`` over the entries ``e = (i, j)`` of row i.

    ``P[e] = exp(beta cos(x[i], x[j])) / sum_e' exp(beta cos(x[i], x[j']))``, where
    ``cos(a, b) = <a, b> / (max(|a|, 1e-12) max(|b|, 1e-12))``: 0 for a row of zeros.

    Parameters
    ----------
    requires_grad : bool
        Whether ``beta`` is a parameter, or a buffer.
    add_self_loops : bool
        Whether each vertex has one loop, however many the graph stores.  If not, the loops are
        those of the graph, each counts, and a row without entries gives 0.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GATConv``, ``node_dim`` being -2.

    Raises
    ------
    UnsupportedError
        If an option is one that only PyG's layer can do; the text says what to do instead.
    DtypeError, ShapeError
        If an option of PyG's is no such value.

    Notes
    -----
    Scores, softmax and aggregation are one pass over the entries, ``autograd.dot_aggregate``: no
    other graph is built, and nothing of the size of the entries.  Its gradient can be used but not
    differentiated.  Lengths and scores are computed in float32 at least, from rows in the dtype of
    ``x``.  In float16 a row is divided by 2**-14 at least, since the gradient of a row of zeros is
    divided by it too.

    A graph on a GPU that has tiles, ``prepare(graph, tile=...)``, goes by ``sddmm``,
    ``edge_softmax`` and ``spmm``, whose products are the tensor cores'; gradients are then
    differentiable any number of times.  There a loop that is missing is added to the result, and of
    ``c`` loops each has 1 / c of the part of one.  What is needed for that, a value for each entry,
    is kept with the graph, but computed at each call in code that ``torch.compile`` has compiled.
    Where each vertex has one loop, ``add_self_loops=False`` gives the same for less.

    AGNN (Thekumparampil et al. 2018, arXiv 1803.03735); TC-GNN (ATC'23), section 2.1.
    """

    __module__ = "sparsefmt.nn"

    beta: Tensor

    def __init__(
        self,
        requires_grad: bool = True,
        add_self_loops: bool = True,
        **passing: Unpack[PassingOptions],
    ) -> None:
        check_flags(requires_grad=requires_grad, add_self_loops=add_self_loops)
        super().__init__(**passing)
        self.requires_grad, self.add_self_loops = requires_grad, add_self_loops
        if requires_grad:
            self.beta = Parameter(torch.ones(1))
        else:
            self.register_buffer("beta", torch.ones(1))

    def reset_parameters(self) -> None:
        """Set a ``beta`` that is trained to 1; a fixed one stays, as in PyG."""
        if self.requires_grad:
            with torch.no_grad():
                self.beta.fill_(1)

    def _shown(self) -> list[str]:
        return []

    def forward(self, x: Tensor, edge_index: GraphLike) -> Tensor:
        """Map (n, feat) to (n, feat), in the dtype of ``x``, or autocast's.

        Parameters
        ----------
        x : Tensor, shape (n, feat)
            float16, bfloat16, float32 or float64.
        edge_index : Graph, shape (n, n), or PyG's
            Only its structure is read.

        Raises
        ------
        ShapeError
            If the graph is not square, or ``x`` not of that shape.
        DtypeError, DeviceError, UnsupportedError
            As ``autograd.spmm``.
        """
        refuse_static(x, self)
        graph = as_graph(edge_index, x, name="edge_index")
        check_input(x, graph, edge_index)
        ends = Ends(self._turned(graph, edge_index), x, x, True).gathered()
        graph, x = ends.graph, ends.source
        wide = torch.promote_types(x.dtype, torch.float32)
        unit = _unit(x.to(wide), max(LEAST_LENGTH, torch.finfo(x.dtype).tiny))
        beta, add = self.beta.to(wide), self.add_self_loops
        if has_tiles(graph):
            return _composed(graph, x, unit, beta, add)
        queries, keys = (beta * ends.of_targets(unit)).to(x.dtype), unit.to(x.dtype)
        if add and len(queries) != len(keys):
            graph, add = entries_with_loops(graph, None, None).graph, False
        return dot_aggregate(graph, queries, keys, x, scale=1.0, self_loops=add)


def _composed(
    graph: GraphLike, x: Tensor, unit: Tensor, beta: Tensor, add_self_loops: bool
) -> Tensor:
    """Compose the layer of ``sddmm``, ``edge_softmax`` and ``spmm``."""
    wide, narrow = unit.dtype, unit.to(x.dtype)
    scores = beta * sddmm(graph, narrow, narrow).to(wide)
    if add_self_loops:
        scores = scores + _loop_scores(graph, wide)
    p = edge_softmax(graph, scores)
    y = spmm(graph, x, p.to(x.dtype))
    if add_self_loops:
        own = _own_part(graph, beta * unit.square().sum(1), scores, p)
        y = torch.lerp(y, x.to(y.dtype), own[:, None].to(y.dtype))
    return y


def _unit(x: Tensor, least: float) -> Tensor:
    """Scale rows to length one, with finite derivatives even of a row of zeros."""
    return x * x.square().sum(1, keepdim=True).clamp(min=least**2).rsqrt()


def _loop_scores(graph: GraphLike, dtype: torch.dtype) -> Tensor:
    """Compute ``-log(c)`` at each loop of a vertex with ``c`` of them, 0 elsewhere: (nnz,)."""

    def make() -> Tensor:
        counted, count = loops(graph)
        logs = count.clamp(min=1).log()[:, None]
        return (-counted * sddmm(graph, logs, torch.ones_like(logs))).to(dtype)

    return graph_tensors(graph).kept(("loop scores", dtype), make)


def _own_part(graph: GraphLike, own: Tensor, scores: Tensor, p: Tensor) -> Tensor:
    """Compute the part of a missing loop, ``exp(own) / (exp(own) + Z)``, else 0: (n,).

    ``own`` are the scores of the loops, ``Z`` the row's sum of ``exp(scores)``, and ``p`` the
    softmax of ``scores``.
    """
    missing = missing_loops(graph, graph_tensors(graph)).to(own.dtype)
    return torch.sigmoid(own - log_sums(graph, scores, p)) * missing
