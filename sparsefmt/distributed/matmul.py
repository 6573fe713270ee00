"""Products of a graph that ranks share, with features that they share likewise."""

import torch
from torch import Tensor

from ..autograd import spmm
from ..errors import ShapeError, UnsupportedError
from .graph import DistGraph


def dist_spmm(
    graph: DistGraph,
    x: Tensor,
    edge_weight: Tensor | None = None,
    *,
    reduce: str = "sum",
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> Tensor:
    """Aggregate the features of each vertex's in-neighbours, those of other ranks too.

    ``y[i, f] = r[i] * reduce_e(a[e] * c[j] * x[j, f])`` as ``autograd.spmm``, over the rows ``i`` of
    this rank.  What lies here is multiplied while the rest is on its way, and in backward gradients
    go home while the own ones are computed.

    Parameters
    ----------
    graph : DistGraph
    x : Tensor, shape (n_local, feat)
        Of the vertices of this rank.
    edge_weight : Tensor, shape (n_edges,), optional
        ``a`` of the edges of this rank, in the order of its ``edge_index``; 1 by default.
    reduce : "sum" or "mean"
    row_scale, col_scale : Tensor, shape (n_local,), optional
        ``r`` and ``c`` of the vertices of this rank.

    Returns
    -------
    Tensor, shape (n_local, feat)

    Raises
    ------
    UnsupportedError
        If ``reduce`` is another one.
    ShapeError, DtypeError, DeviceError
        As ``autograd.spmm``.

    Notes
    -----
    All tensors have gradients, which all ranks compute at the same time, and which cannot be
    differentiated again.  Deterministic: a row adds up its own part first.
    """
    if reduce not in ("sum", "mean"):
        raise UnsupportedError(f"reduce is {reduce!r}: give 'sum' or 'mean'.")
    if x.shape[:1] != (graph.n_local,):
        raise ShapeError(
            f"x has shape {tuple(x.shape)} but this rank has {graph.n_local} vertices: give "
            f"({graph.n_local}, feat), graph.rows_of(x) of all features for instance."
        )
    if col_scale is not None:
        x = x * col_scale[:, None]
    if reduce == "mean":
        inverse = graph.inverse_degree(x)
        row_scale = inverse if row_scale is None else row_scale * inverse
    exchange = graph.halo.start(x)
    weights = (None, None) if edge_weight is None else graph.split(edge_weight)
    own = spmm(graph.own, x, weights[0], row_scale=row_scale)
    return own + spmm(graph.rest, exchange.finish(), weights[1], row_scale=row_scale)


def extended(graph: DistGraph, x: Tensor) -> Tensor:
    """Put the features of a rank's halo behind its own: (n_local + n_halo, ...)."""
    return torch.cat([x, graph.halo.exchange(x)])
