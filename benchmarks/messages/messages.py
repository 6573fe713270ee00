"""Messages with features of edges against PyG's: forward and backward of GINEConv.

``python -m benchmarks messages [--device cpu|cuda] [--graphs arxiv,reddit] [--widths 32] [--quick]
[--out FOLDER]``

Results and gradients are compared with PyG's before anything is timed.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from sparsefmt import CSR, Graph

from .. import _baselines, _graphs, _harness, _options
from .._harness import Target

SECTIONS = {"gine": ("messages.messages", "gine")}
GRAPHS, WIDTHS = ("arxiv", "reddit"), (32,)
GINE_COLUMNS = {
    "case": "<24",
    "ms": "9.3f",
    "pyg_ms": "9.3f",
    "ratio": "6.2f",
    "forward_ms": "10.3f",
    "pyg_forward_ms": "14.3f",
    "error": "8.1e",
    "pyg": "<30",
}


def main(argv: list[str]) -> int:
    """Run the sections asked for; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks messages")
    _options.add_options(parser)
    parser.add_argument("--sections", type=_options.some_of(SECTIONS))
    options = _options.parse(parser, argv)
    options.sections = options.sections or tuple(SECTIONS)
    return _options.run(SECTIONS, options)


def gine(options: argparse.Namespace) -> bool:
    """Forward and backward in features of vertices and of edges, which lie as PyG wants them."""
    cuda = options.device == "cuda"
    if not cuda:
        _baselines.use_threads(options.threads)
    _harness.print_head(f"GINEConv without its network, float32, {options.device}", GINE_COLUMNS)
    rows = []
    for name in options.graphs or (GRAPHS if cuda else ("arxiv",)):
        graph = _graphs.load(name, device=options.device)
        for feat in options.widths or WIDTHS:
            case = {"case": f"{Path(name).stem} x {feat}", "feat": feat}
            rows.append(case | _gine_case(graph, feat, cuda=cuda, quick=options.quick))
            _harness.print_row(rows[-1], GINE_COLUMNS)
            _harness.free()
    return _harness.keep("messages", "gine", rows, judge_gine, cuda=cuda, folder=options.out)


def _gine_case(graph: CSR, feat: int, *, cuda: bool, quick: bool) -> dict[str, Any]:
    import torch
    from torch_geometric.nn import GINEConv

    from sparsefmt.autograd import message_aggregate

    kept, index = Graph(graph), _baselines.edge_index(graph)
    device = "cuda" if cuda else "cpu"
    x, grad = (torch.rand(n, feat, device=device) - 0.5 for n in (graph.n_cols, graph.n_rows))
    edges = torch.rand(graph.nnz, feat, device=device).sub_(0.5)
    leaves = [x.requires_grad_(), edges.requires_grad_()]
    conv = GINEConv(torch.nn.Identity()).to(device)

    def ours() -> Any:
        return message_aggregate(kept, x, edges, message="relu_add") + x

    def theirs() -> Any:
        return conv(x, index, edges)

    def both(forward: Any) -> Any:
        return torch.autograd.grad(forward(), leaves, grad)

    row: dict[str, Any] = {}
    functions = [partial(both, ours), partial(both, theirs), ours, theirs]
    try:
        y = theirs().detach()
        row["error"] = float((ours().detach() - y).abs().max() / y.abs().max())
        dx, de = both(theirs)
        mine, of_edges = both(ours)
        row["error"] = max(row["error"], float((mine - dx).abs().max() / dx.abs().max()))
        if not torch.equal(of_edges, de) or row["error"] > 1e-3:
            return {"wrong": f"differs from PyG's by {row['error']}"}
        del dx, de, mine, of_edges, y
    except torch.cuda.OutOfMemoryError:
        row["pyg"] = "does not fit into memory"
        functions = functions[::2]
    _harness.free()
    times, row["runs"] = _harness.paced(functions, cuda=cuda, quick=quick)
    if "pyg" in row:
        return row | {"ms": times[0], "forward_ms": times[1]}
    names = "ms", "pyg_ms", "forward_ms", "pyg_forward_ms"
    return row | dict(zip(names, times, strict=True)) | {"ratio": times[1] / times[0]}


def judge_gine(rows: list[dict[str, Any]]) -> list[Target]:
    """Four times PyG's in every case in which it fits."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    return [Target("forward and backward, worst over PyG's", min(ratios), 4.0)] if ratios else []
