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

import torch

from sparsefmt import CSR, Graph, autograd, nn

from . import _baselines, _graphs, _harness, _oracle
from ._harness import MIB, Call
from ._table import Benchmark, Limit, Row, Section, positive

PARTS: dict[str, dict[str, Any]] = {
    "full": {},
    "bases": {"num_bases": 4},
    "blocks": {"num_blocks": 8},
}
TYPES, LIMIT = 8, 1e-4


def beside(calls: dict[str, Call], options: argparse.Namespace) -> Row:
    """Compare ``ms`` with ``pyg_ms``, and time all in turn, ours alone where PyG does not fit."""
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
    from torch_geometric.nn import GINEConv

    graph, index = Graph(A), _baselines.edge_index(A)
    torch.manual_seed(0)
    sizes = (A.n_cols, A.n_rows, A.nnz)
    x, grad, edges = (torch.rand(n, feat, device=options.device).sub_(0.5) for n in sizes)
    leaves = [x.requires_grad_(), edges.requires_grad_()]
    conv = GINEConv(torch.nn.Identity()).to(options.device)

    def ours() -> Any:
        return autograd.message_aggregate(graph, x, edges, message="relu_add") + x

    theirs, run = partial(conv, x, index, edges), _harness.with_gradients
    calls = {"ms": partial(run, ours, leaves, grad), "pyg_ms": partial(run, theirs, leaves, grad)}
    return beside(calls | {"forward_ms": ours, "pyg_forward_ms": theirs}, options)


def rows(parts: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield every graph and width with weights of one kind, in float32."""
    for name, A in _graphs.loaded(options, ("arxiv", "reddit"), cpu=("arxiv",)):
        index = _baselines.edge_index(A)
        for feat in options.widths or (64, 128):
            row: Row = {"case": f"{name} x {feat}", "types": options.types or TYPES}
            yield row | _typed_cell(index, A.n_rows, feat, PARTS[parts], options)


def _typed_cell(
    index: Any, n: int, feat: int, parts: dict[str, Any], options: argparse.Namespace
) -> Row:
    """Compare both layers with the same weights, features and edges, then measure in turn."""
    from torch_geometric.nn import RGCNConv

    torch.manual_seed(0)
    count = options.types or TYPES
    types = torch.randint(count, (index.shape[1],), device=index.device)
    x, grad = (torch.rand(n, feat, device=index.device) - 0.5 for _ in range(2))
    theirs, ours = (
        kind(feat, feat, count, **parts).to(index.device) for kind in (RGCNConv, nn.RGCNConv)
    )
    ours.load_state_dict(theirs.state_dict())
    calls: dict[str, Call] = {}
    for name, layer in (("", ours), ("pyg_", theirs)):
        forward = partial(layer, x.requires_grad_(), index, types)
        inputs = [x, *layer.parameters()]
        calls[f"{name}ms"] = partial(_harness.with_gradients, forward, inputs, grad)
        calls[f"{name}forward_ms"] = forward
    row: Row = {}
    if options.cuda:
        before = torch.cuda.memory_allocated()
        calls["ms"]()
        torch.cuda.synchronize()
        row["kept_mib"] = (torch.cuda.memory_allocated() - before) / MIB
        row["mib"] = sum(_harness.peak_bytes(calls["ms"])) / MIB
    row |= beside(calls, options)
    if options.cuda and "pyg_ms" in row:
        row["pyg_mib"] = sum(_harness.peak_bytes(calls["pyg_ms"])) / MIB
        row["saved"] = row["pyg_mib"] / (row["mib"] + row["kept_mib"])
    return row


RGCN = (Limit("over_pyg", least=3.0), Limit("saved", least=2.0))
SECTIONS = {name: Section(partial(rows, name), RGCN) for name in PARTS}
GINE = {"gine": Section(gine, (Limit("over_pyg", least=4.0),))}
BENCHMARKS = {
    "messages": Benchmark("messages", __doc__, GINE),
    "rgcn": Benchmark("rgcn", __doc__, SECTIONS, {"types": positive}),
}
