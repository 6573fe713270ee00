"""Layers over ranks, beside the same layers of one process."""

import math
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
from dist_cases import FEAT, N, edges_of, here, numbers, shared_out, worst
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential

from sparsefmt import nn
from sparsefmt.distributed import DistGraph, sum_gradients
from sparsefmt.distributed.halo import Halo
from sparsefmt.formats import checks
from sparsefmt.nn import _inputs

OUT, EDGE = 3, 2


def network() -> Sequential:
    """What GIN makes of sums."""
    return Sequential(Linear(FEAT, 4), ReLU(), Linear(4, OUT))


#: Name -> a layer, and what the edges have: nothing, a weight, features or a type.
LAYERS: dict[str, tuple[Any, str]] = {
    "gcn": (lambda: nn.GCNConv(FEAT, OUT), ""),
    "gcn weighted": (lambda: nn.GCNConv(FEAT, OUT), "edge_weight"),
    "gcn improved": (lambda: nn.GCNConv(FEAT, OUT, improved=True), "edge_weight"),
    "gcn without loops": (lambda: nn.GCNConv(FEAT, OUT, add_self_loops=False), ""),
    "gcn plain": (lambda: nn.GCNConv(FEAT, OUT, normalize=False), "edge_weight"),
    "gcn plain mean": (lambda: nn.GCNConv(FEAT, OUT, normalize=False, aggr="mean"), ""),
    "gcn wider": (lambda: nn.GCNConv(FEAT, 2 * FEAT), ""),
    "gcn maxk": (lambda: nn.GCNConv(FEAT, 2 * FEAT, k=3), ""),
    "gcn maxk weighted": (lambda: nn.GCNConv(FEAT, 2 * FEAT, k=3), "edge_weight"),
    "gcn maxk of many": (lambda: nn.GCNConv(FEAT, 300, k=3), ""),
    "gcn sampled": (lambda: nn.GCNConv(FEAT, OUT, sample=3).eval(), ""),
    "sage": (lambda: nn.SAGEConv(FEAT, OUT), ""),
    "sage wider": (lambda: nn.SAGEConv(FEAT, 2 * FEAT), ""),
    "sage sum": (lambda: nn.SAGEConv(FEAT, OUT, aggr="sum", normalize=True), "edge_weight"),
    "sage max": (lambda: nn.SAGEConv(FEAT, OUT, aggr="max", project=True), ""),
    "sage several": (lambda: nn.SAGEConv(FEAT, OUT, aggr=["mean", "max"]), ""),
    "sage maxk": (lambda: nn.SAGEConv(FEAT, 2 * FEAT, k=4), "edge_weight"),
    "sage sampled": (lambda: nn.SAGEConv(FEAT, OUT, sample=2).eval(), ""),
    "gin": (lambda: nn.GINConv(network(), train_eps=True), ""),
    "gin mean": (lambda: nn.GINConv(network(), 0.5, aggr="mean"), "edge_weight"),
    "gin maxk": (lambda: nn.GINConv(network(), 0.5, k=2), ""),
    "gine": (lambda: nn.GINEConv(network(), 0.5, edge_dim=EDGE), "edge_attr"),
    "gat": (lambda: nn.GATConv(FEAT, OUT, heads=2), ""),
    "gat wider": (lambda: nn.GATConv(FEAT, 2 * FEAT, heads=2, concat=False), ""),
    "gat edges": (lambda: nn.GATConv(FEAT, OUT, heads=2, edge_dim=EDGE), "edge_attr"),
    "gat own maps": (lambda: nn.GATConv((FEAT, FEAT), 1, add_self_loops=False), ""),
    "gatv2": (lambda: nn.GATv2Conv(FEAT, OUT, heads=2, residual=True), ""),
    "gatv2 shared": (lambda: nn.GATv2Conv(FEAT, 1, heads=2, share_weights=True), ""),
    "gatv2 edges": (lambda: nn.GATv2Conv(FEAT, OUT, edge_dim=EDGE), "edge_attr"),
    "agnn": (lambda: nn.AGNNConv(), ""),
    "agnn without loops": (lambda: nn.AGNNConv(add_self_loops=False), ""),
    "transformer": (lambda: nn.TransformerConv(FEAT, 1, heads=2, beta=True), ""),
    "transformer edges": (lambda: nn.TransformerConv(FEAT, OUT, edge_dim=EDGE), "edge_attr"),
    "sg": (lambda: nn.SGConv(FEAT, OUT, K=2), "edge_weight"),
    "tag": (lambda: nn.TAGConv(FEAT, OUT, K=2), "edge_weight"),
    "tag max": (lambda: nn.TAGConv(FEAT, OUT, K=2, normalize=False, aggr="max"), ""),
    "appnp": (lambda: nn.APPNP(2, 0.2), "edge_weight"),
    "arma": (lambda: nn.ARMAConv(FEAT, OUT, 2, 2), ""),
    "cluster": (lambda: nn.ClusterGCNConv(FEAT, OUT, 0.5), ""),
    "edge": (lambda: nn.EdgeConv(Linear(2 * FEAT, OUT)), ""),
    "gated": (lambda: nn.GatedGraphConv(FEAT, 2), "edge_weight"),
    "graph": (lambda: nn.GraphConv(FEAT, OUT), "edge_weight"),
    "le": (lambda: nn.LEConv(FEAT, OUT), "edge_weight"),
    "mixhop": (lambda: nn.MixHopConv(FEAT, OUT), ""),
    "pna": (
        lambda: nn.PNAConv(FEAT, OUT, ["std", "max"], ["linear"], torch.ones(3), edge_dim=EDGE),
        "edge_attr",
    ),
    "resgated": (lambda: nn.ResGatedGraphConv(FEAT, OUT), ""),
    "resgated edges": (lambda: nn.ResGatedGraphConv(FEAT, OUT, edge_dim=EDGE), "edge_attr"),
    "simple loops": (lambda: nn.SimpleConv(["max", "mean"], "self_loop"), "edge_weight"),
    "ssg": (lambda: nn.SSGConv(FEAT, OUT, 0.2, K=2), ""),
    "rgcn": (lambda: nn.RGCNConv(FEAT, OUT, 3), "edge_type"),
    "rgcn max": (lambda: nn.RGCNConv(FEAT, OUT, 3, num_bases=2, aggr="max"), "edge_type"),
}


def of_edges(name: str, count: int) -> Tensor | None:
    """What a layer gets beside its features: something for each edge."""
    if name == "edge_weight":
        return numbers(count).abs() + 0.1
    if name == "edge_type":
        return torch.arange(count, device=here()) % 3
    return numbers(count, EDGE) if name else None


def layer(group: Any, name: str, graph: str, bounds: str) -> float:
    """Largest difference of a layer's result and gradients from those of one process."""
    torch.manual_seed(3)
    make, what = LAYERS[name]
    conv = make().double().to(here())
    alone = deepcopy(conv)
    edges = edges_of(graph)
    whole, borders, rows, mine = shared_out(group, edges, bounds)
    given = numbers(N, FEAT), of_edges(what, edges.shape[1])
    y, wanted = run(alone, what, whole, *given)
    part = None if given[1] is None else given[1][mine]
    shared = DistGraph(edges[:, mine], borders, group)
    z, found = run(conv, what, shared, given[0][rows], part, rows)
    sum_gradients(conv, group)
    pairs = [(z, y[rows]), (found[0], wanted[0][rows])]
    if len(wanted) > 1:
        pairs.append((found[1], wanted[1][mine]))
    pairs += [(a.grad, b.grad) for a, b in zip(conv.parameters(), alone.parameters(), strict=True)]
    return worst(pairs)


def layer_of_squares(group: Any, name: str, graph: str, bounds: str) -> float:
    """The same difference where rows without entries stand for vertices of others, as on a GPU."""
    with patch.object(_inputs, "takes_rows_too_many", lambda x: True):
        return layer(group, name, graph, bounds)


def lost_halo() -> Any:
    """Let each exchange bring NaN."""
    real = Halo.receive
    return patch.object(Halo, "receive", lambda halo, received: real(halo, received) * math.nan)


def layer_of_a_lost_halo(group: Any, name: str) -> float:
    """The same difference where each exchange brings NaN."""
    with lost_halo():
        return layer(group, name, "random", "balanced")


def layer_while_debugging(group: Any, name: str) -> float:
    """The same difference where ranks compare what they are given."""
    with patch.object(checks, "DEBUG", True):
        return layer(group, name, "random", "empty ranks")


def run(
    conv: Any, what: str, graph: Any, x: Tensor, edges: Tensor | None, rows: slice = slice(None)
) -> tuple[Tensor, list[Tensor]]:
    """The result of a layer, and the gradients of its features and of what edges have."""
    leaves = [x.clone().requires_grad_()]
    options = {}
    if edges is not None:
        options[what] = edges
        if edges.is_floating_point():
            options[what] = edges.clone().requires_grad_()
            leaves.append(options[what])
    y = conv(leaves[0], graph, **options)
    seed = numbers(N, y.shape[1]).flip(0)[rows]
    (y * seed).sum().backward()
    return y.detach(), [leaf.grad for leaf in leaves]
