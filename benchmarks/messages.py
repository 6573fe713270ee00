"""Messages with features of edges beside PyG's: forward and backward of GINEConv.

Without its network, in features of vertices and of edges, which lie as PyG wants them.  Results and
gradients are compared with PyG's before anything is timed.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

from sparsefmt import CSR, Graph

from . import _baselines, _graphs, _harness, _oracle
from ._harness import Call
from ._table import Benchmark, Limit, Row, Section


def gine(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every graph and width, in float32."""
    for name, source in _graphs.chosen(options, ("arxiv", "reddit"), cpu=("arxiv",)):
        A = _graphs.load(source, device=options.device)
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

    row: Row = {}
    calls: dict[str, Call] = {"ms": partial(both, ours), "forward_ms": ours}
    try:
        error = row["error"] = _oracle.norm_error(both(ours), both(theirs))
        row |= _oracle.refused(_oracle.over(error, 1e-4))
        calls |= {"pyg_ms": partial(both, theirs), "pyg_forward_ms": theirs}
    except torch.cuda.OutOfMemoryError:
        row["skipped"] = "PyG does not fit into memory"
    _harness.free()
    return row | _harness.timed(calls, cuda=options.cuda, quick=options.quick)


SECTIONS = {"gine": Section(gine, (Limit("over_pyg", least=4.0),))}
BENCHMARKS = {"messages": Benchmark("messages", __doc__, SECTIONS)}
