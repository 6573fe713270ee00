"""Layers beside PyG's: messages with features of edges, and edges of several types.

``messages`` is forward and backward of GINEConv without its network, in features of vertices and of
edges, which lie as PyG wants them.  ``rgcn`` is RGCNConv, whose types of edges are drawn evenly:
``full`` has a matrix for each type, ``bases`` four for all, ``blocks`` eight blocks on the
diagonals; its memory is what a step takes beyond its inputs, ours with the groups of edges that are
kept from the first step on.  Results and gradients are compared with PyG's before they are timed.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

from sparsefmt import CSR, Graph

from . import _baselines, _graphs, _harness, _oracle
from ._harness import MIB, Call
from ._table import Benchmark, Limit, Row, Section, positive

PARTS = {"full": {}, "bases": {"num_bases": 4}, "blocks": {"num_blocks": 8}}
TYPES, LIMIT = 8, 1e-4


def beside(calls: dict[str, Call], options: argparse.Namespace) -> Row:
    """Compare ``ms`` with ``pyg_ms``, and time all in turn, ours alone where PyG does not fit."""
    import torch

    row: Row = {}
    try:
        row |= _oracle.judged(_oracle.norm_error(calls["ms"](), calls["pyg_ms"]()), LIMIT)
    except torch.cuda.OutOfMemoryError:
        row["skipped"] = "PyG does not fit into memory"
        calls = {name: call for name, call in calls.items() if not name.startswith("pyg")}
    _harness.free()
    return row | _harness.timed(calls, cuda=options.cuda, quick=options.quick)


def gine(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every graph and width, in float32."""
    for name, A in _graphs.loaded(options, ("arxiv", "reddit"), cpu=("arxiv",)):
        for feat in options.widths or (32,):
            yield {"case": f"{name} x {feat}"} | _cell(A, feat, options)


def _cell(A: CSR, feat: int, options: argparse.Namespace) -> Row:
    import torch
    from torch_geometric.nn import GINEConv

    from sparsefmt.autograd import message_aggregate

    graph, index = Graph(A), _baselines.edge_index(A)
    torch.manual_seed(0)
    sizes = (A.n_cols, A.n_rows, A.nnz)
    x, grad, edges = (torch.rand(n, feat, device=options.device).sub_(0.5) for n in sizes)
    leaves = [x.requires_grad_(), edges.requires_grad_()]
    conv = GINEConv(torch.nn.Identity()).to(options.device)

    def ours() -> Any:
        return message_aggregate(graph, x, edges, message="relu_add") + x

    def theirs() -> Any:
        return conv(x, index, edges)

    def both(forward: Call) -> Any:
        y = forward()
        return y.detach(), *torch.autograd.grad(y, leaves, grad)

    calls = {"ms": partial(both, ours), "pyg_ms": partial(both, theirs)}
    calls |= {"forward_ms": ours, "pyg_forward_ms": theirs}
    return beside(calls, options)


def rows(parts: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield every graph and width with weights of one kind, in float32."""
    for name, A in _graphs.loaded(options, ("arxiv", "reddit"), cpu=("arxiv",)):
        index, n = _baselines.edge_index(A), A.n_rows
        del A
        for feat in options.widths or (64, 128):
            row: Row = {"case": f"{name} x {feat}", "types": options.types or TYPES}
            yield row | _Case(index, n, feat, parts, options).row()


class _Case:
    """Both layers with the same weights, features and edges."""

    def __init__(
        self, index: Any, n: int, feat: int, parts: str, options: argparse.Namespace
    ) -> None:
        import torch
        from torch_geometric.nn import RGCNConv

        from sparsefmt import nn

        self.index, self.options = index, options
        torch.manual_seed(0)
        types = options.types or TYPES
        self.types = torch.randint(types, (index.shape[1],), device=index.device)
        x, self.grad = (torch.rand(n, feat, device=index.device) - 0.5 for _ in range(2))
        self.x = x.requires_grad_()
        args: Any = PARTS[parts]
        self.theirs, self.ours = (
            kind(feat, feat, types, **args).to(index.device) for kind in (RGCNConv, nn.RGCNConv)
        )
        self.ours.load_state_dict(self.theirs.state_dict())

    def forward(self, layer: Any) -> Any:
        """Run the layer."""
        return layer(self.x, self.index, self.types)

    def both(self, layer: Any) -> Any:
        """Run the layer; return its result and the gradients of features and all weights."""
        import torch

        y = self.forward(layer)
        return y.detach(), *torch.autograd.grad(y, [self.x, *layer.parameters()], self.grad)

    def row(self) -> Row:
        """Compare both, then measure them in turn."""
        import torch

        row: Row = {}
        ours, theirs = (partial(self.both, layer) for layer in (self.ours, self.theirs))
        if self.options.cuda:
            before = torch.cuda.memory_allocated()
            ours()
            torch.cuda.synchronize()
            row["kept_mib"] = (torch.cuda.memory_allocated() - before) / MIB
            row["mib"] = sum(_harness.peak_bytes(ours)) / MIB
        forwards = (partial(self.forward, layer) for layer in (self.ours, self.theirs))
        calls = {"ms": ours, "pyg_ms": theirs}
        calls |= dict(zip(("forward_ms", "pyg_forward_ms"), forwards, strict=True))
        row |= beside(calls, self.options)
        if self.options.cuda and "pyg_ms" in row:
            row["pyg_mib"] = sum(_harness.peak_bytes(theirs)) / MIB
            row["saved"] = row["pyg_mib"] / (row["mib"] + row["kept_mib"])
        return row


RGCN = (Limit("over_pyg", least=3.0), Limit("saved", least=2.0))
SECTIONS = {name: Section(partial(rows, name), RGCN) for name in PARTS}
GINE = {"gine": Section(gine, (Limit("over_pyg", least=4.0),))}
BENCHMARKS = {
    "messages": Benchmark("messages", __doc__, GINE),
    "rgcn": Benchmark("rgcn", __doc__, SECTIONS, {"types": positive}),
}
