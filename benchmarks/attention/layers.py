"""One layer of GCN and GAT, forward and backward, beside PyG's: Table 3 of fuseGNN.

``transductive``: what belongs to the graph is made once, PyG's normalised edges and loops too.
``inductive``: every iteration begins with unsorted edges, and conversion and normalisation count.
Times are those of the clock on the wall, the GPU waited for.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from sparsefmt import CSR, Graph, autograd, nn

from .. import _baselines, _graphs, _harness
from .._baselines import Call
from .._harness import Target, geomean
from ..tiles.training import FEATURES, OTHER_FEATURES
from .cases import TIMES_PYG, ends_of, graphs_of, is_cuda, normal, precision
from .oracle import Exact, Sum, product_at, sampled, worst
from .pace import paced

GENERATED = ("reddit",)
HIDDEN = (16, 64, 512)
MODES = ("transductive", "inductive")
OURS: dict[str, Callable[..., Module]] = {"GCN": nn.GCNConv, "GAT": nn.GATConv}
#: Largest error of a layer that PyG cannot run, relative to the magnitudes of its terms: products
#: of dense matrices stand before and behind the sums, and scores magnify their rounding.  Beyond
#: it, and beyond twice PyG's own, a result is refused.
LIMIT = 1e-4
COLUMNS = {
    "case": "<34",
    "ms": "9.3f",
    "pyg_ms": "9.3f",
    "over_pyg": "8.2f",
    "error": "8.1e",
    "pyg_error": "9.1e",
    "skipped": "<40",
}


def pyg_layer(model: str, edges: Tensor, n: int, mode: str) -> tuple[Callable[..., Module], Tensor]:
    """PyG's layer and its edges; ``transductive``: normalised once, or with loops already."""
    from torch_geometric import nn as pyg
    from torch_geometric.utils import add_self_loops, remove_self_loops

    if model == "GCN":
        return (lambda *channels: pyg.GCNConv(*channels, cached=mode == "transductive")), edges
    if mode == "inductive":
        return pyg.GATConv, edges
    looped = add_self_loops(remove_self_loops(edges)[0], num_nodes=n)[0]
    return (lambda *channels, **more: pyg.GATConv(*channels, add_self_loops=False, **more)), looped


def shuffled(edges: Tensor) -> Tensor:
    """The same edges in an order at random."""
    chance = torch.Generator(edges.device).manual_seed(0)
    order = torch.randperm(edges.shape[1], generator=chance, device=edges.device)
    return edges[:, order].contiguous()


class Case:
    """One layer over a graph, with features and a gradient of the result."""

    def __init__(self, model: str, graph: Graph, edges: Tensor, feat: int, hidden: int) -> None:
        self.model, self.graph, self.edges = model, graph, edges
        self.n, like = graph.n_rows, graph.csr.indptr
        self.x = normal(like, (self.n, feat), seed=1)
        self.grad = normal(like, (self.n, hidden), seed=2)
        torch.manual_seed(0)
        self.layer = OURS[model](feat, hidden).to(self.x.device)

    def graph_of(self, mode: str) -> Graph:
        """The prepared one, or one of the edges."""
        if mode == "transductive":
            return self.graph
        return Graph.from_edge_index(self.edges, num_nodes=self.n)

    def ours(self, mode: str) -> Call:
        """A step: the result and the gradients of the parameters."""
        weights = [*self.layer.parameters()]
        return lambda: torch.autograd.grad(
            self.layer(self.x, self.graph_of(mode)), weights, self.grad
        )

    def pyg(self, mode: str) -> Call:
        """PyG's, with the same weights; ``Missing`` if it cannot."""

        def first() -> Call:
            layer, edges = self.pyg_layer(mode)
            weights = [*layer.parameters()]
            return lambda: torch.autograd.grad(layer(self.x, edges), weights, self.grad)

        try:
            return _baselines.guarded(first)
        finally:
            _harness.free()

    def pyg_layer(self, mode: str) -> tuple[Module, Tensor]:
        """PyG's layer with the same weights, and its edges."""
        edges = _baselines.edge_index(self.graph.csr) if mode == "transductive" else self.edges
        make, edges = pyg_layer(self.model, edges, self.n, mode)
        layer = make(self.x.shape[1], self.grad.shape[1]).to(self.x.device)
        layer.load_state_dict(self.layer.state_dict())
        return layer, edges

    def checked(self, mode: str, exact: dict[str, Sum], vertices: Tensor) -> dict[str, Any]:
        """The result and the gradient of the features, beside what is exact."""
        error = self._error(self.layer, self.graph_of(mode), exact, vertices)
        row = {"error": error} | self._pyg_error(mode, exact, vertices)
        limit = max(LIMIT, TIMES_PYG * row.get("pyg_error", 0.0))
        wrong = f"error {error:.3g}, at most {limit:.3g} is right"
        return row if error <= limit else {"wrong": wrong}

    def _error(self, layer: Module, graph: Any, exact: dict[str, Sum], vertices: Tensor) -> float:
        x = self.x.clone().requires_grad_()
        out = layer(x, graph)
        (dx,) = torch.autograd.grad(out, x, self.grad)
        found = {"out": out.detach(), "x": dx}
        return max(worst(found[name][vertices], exact[name]) for name in found)

    def _pyg_error(self, mode: str, exact: dict[str, Sum], vertices: Tensor) -> dict[str, float]:
        """That of PyG's layer, if it can run."""
        found: list[float] = []

        def first() -> Call:
            layer, edges = self.pyg_layer(mode)
            return lambda: found.append(self._error(layer, edges, exact, vertices))

        try:
            _baselines.guarded(first)
        except _baselines.Missing:
            return {}
        finally:
            _harness.free()
        return {"pyg_error": found[-1]}

    def exact(self, A: CSR) -> tuple[dict[str, Sum], Tensor]:
        """``out`` and ``x`` in float64 at sampled vertices, from the weights of the layer."""
        rows, cols = ends_of(A)
        vertices, loops = sampled(cols, self.n), torch.arange(self.n, device=rows.device)
        apart = rows != cols
        ends = torch.cat([rows[apart], loops]), torch.cat([cols[apart], loops])
        weights = {name: w.detach().double() for name, w in self.layer.named_parameters()}
        h = self.x.double() @ weights["lin.weight"].T
        parts = _gcn if self.model == "GCN" else _gat
        (out, most), (dh, dh_most) = parts(ends, h, self.grad, weights, vertices)
        W = weights["lin.weight"]
        sums = {"out": (out + weights["bias"], most), "x": (dh @ W, dh_most @ W.abs())}
        return sums, vertices


def _gcn(ends: Any, h: Tensor, grad: Tensor, _: Any, vertices: Tensor) -> tuple[Sum, Sum]:
    """``D^-1/2 (A + I) D^-1/2 h`` and the gradient of ``h``; the entries have the loops."""
    degree = torch.bincount(ends[0], minlength=len(h)).double()
    weights = (degree[ends[0]] * degree[ends[1]]).rsqrt()
    out = product_at(ends, weights, h, vertices, "rows")
    return out, product_at(ends, weights, grad, vertices, "cols")


def _gat(
    ends: Any, h: Tensor, grad: Tensor, weights: dict[str, Tensor], vertices: Tensor
) -> tuple[Sum, Sum]:
    """One head of GAT, and the gradient of ``h``: through the values and through both scores."""
    source, target = weights["att_src"][0], weights["att_dst"][0]
    inputs = {"h": h[:, None], "el": h @ source.T, "er": h @ target.T}
    exact = Exact("gat", ends, inputs, grad[:, None])
    found = exact.at("rows", vertices) | exact.at("cols", vertices)
    dh, most = (tensor[:, 0] for tensor in found["h"])
    for name, vector in (("el", source), ("er", target)):
        dh = dh + found[name][0] * vector
        most = most + found[name][1] * vector.abs()
    return (found["out"][0][:, 0], found["out"][1][:, 0]), (dh, most)


def layers(options: argparse.Namespace) -> bool:
    """Every graph, layer, width and mode, in float32."""
    _harness.print_head("one layer, forward and backward, on the wall", COLUMNS)
    rows = []
    cuda = is_cuda(options)
    for name, source in graphs_of(options, GENERATED if cuda else ()):
        A = _graphs.load(source, device=options.device)
        graph = Graph(A)
        autograd.prepare(graph)
        edges = shuffled(_baselines.edge_index(A))
        feat = FEATURES.get(name, OTHER_FEATURES)
        for model in OURS:
            for hidden in options.widths or HIDDEN:
                for row in _rows_of(Case(model, graph, edges, feat, hidden), name, options):
                    _harness.print_row(row, COLUMNS)
                    rows.append(row | options.facts)
                _harness.free()
        del A, graph, edges
        _harness.free()
    return _harness.keep("fuse", "layers", rows, judge, cuda=cuda, folder=options.out)


def _rows_of(case: Case, graph: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    exact, vertices = case.exact(case.graph.csr)
    hidden = case.grad.shape[1]
    for mode in MODES:
        row: dict[str, Any] = {"case": f"{case.model} {graph} {hidden} {mode}"}
        row |= {"model": case.model, "graph": graph, "mode": mode, "hidden": hidden}
        row |= case.checked(mode, exact, vertices)
        if "wrong" in row:
            yield row
            continue
        calls = {"ms": case.ours(mode)}
        try:
            calls["pyg_ms"] = case.pyg(mode)
        except _baselines.Missing as reason:
            row["skipped"] = f"PyG: {reason}"
        _harness.free()
        times, row["runs"] = on_the_wall(calls.values(), options)
        row |= dict(zip(calls, times, strict=True))
        yield row | ({"over_pyg": row["pyg_ms"] / row["ms"]} if "pyg_ms" in row else {})


def on_the_wall(calls: Any, options: argparse.Namespace) -> tuple[list[float], int]:
    """Medians of the time until a call is done, and of how many runs."""
    cuda = is_cuda(options)

    def waited(call: Call) -> Call:
        def run() -> None:
            call()
            if cuda:
                torch.cuda.synchronize()

        return run

    return paced([waited(call) for call in calls], cuda=False, quick=options.quick)


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Errors beside PyG's; over PyG, by layer and mode, to know."""
    found = []
    for model in OURS:
        for mode in MODES:
            held = [row for row in rows if (row["model"], row["mode"]) == (model, mode)]
            ratios = [row["over_pyg"] for row in held if "over_pyg" in row]
            if ratios:
                name = f"{model} {mode} over PyG"
                found.append(Target(f"{name}, geomean of {len(ratios)}", geomean(ratios)))
                found.append(Target(f"{name}, worst", min(ratios)))
    found += [Target("largest error", max(row["error"] for row in rows)), *precision(rows)]
    alone = [row["error"] for row in rows if "pyg_error" not in row]
    if alone:
        found.append(Target("largest error, PyG not run", max(alone), LIMIT, at_least=False))
    return found
