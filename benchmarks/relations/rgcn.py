"""RGCNConv against PyG's: forward and backward in features and weights, and memory.

``python -m benchmarks rgcn [--device cpu|cuda] [--sections full,bases,blocks]
[--graphs arxiv,reddit] [--widths 64,128] [--types 8] [--quick] [--out FOLDER]``

Types of edges are drawn evenly.  ``full`` has a matrix for each type, ``bases`` four for all,
``blocks`` eight blocks on the diagonals.  Both layers get the same ``edge_index``, in order of the
targets; results and gradients are compared in each case, else none is reported.  Memory is what a
step takes beyond its inputs, ours with the groups of edges that are kept from the first step on.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from .. import _baselines, _graphs, _harness, _memory, _options
from .._harness import Target
from .._memory import MIB

PARTS = {"full": {}, "bases": {"num_bases": 4}, "blocks": {"num_blocks": 8}}
SECTIONS = {name: ("relations.rgcn", name) for name in PARTS}
GRAPHS, WIDTHS = ("arxiv", "reddit"), (64, 128)
#: Of the largest value of a result, beyond which both layers are not the same.
LIMIT = 1e-3
COLUMNS = {
    "case": "<24",
    "ms": "9.3f",
    "pyg_ms": "9.3f",
    "ratio": "6.2f",
    "forward_ms": "10.3f",
    "pyg_forward_ms": "14.3f",
    "mib": "8.0f",
    "kept_mib": "8.0f",
    "pyg_mib": "8.0f",
    "memory": "6.2f",
    "error": "8.1e",
    "pyg": "<26",
}


def main(argv: list[str]) -> int:
    """Run the sections asked for; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks rgcn")
    _options.add_options(parser)
    parser.add_argument("--sections", type=_options.some_of(SECTIONS), default=tuple(SECTIONS))
    parser.add_argument("--types", type=_options.positive, default=8, help="of edges")
    return _options.run(SECTIONS, _options.parse(parser, argv))


def _section(name: str, options: argparse.Namespace) -> bool:
    """Every graph and width with weights of one kind."""
    cuda = options.device == "cuda"
    if not cuda:
        _baselines.use_threads(options.threads)
    head = f"RGCNConv, {options.types} types, {name} weights, float32, {options.device}"
    _harness.print_head(head, COLUMNS)
    rows = []
    for graph_name in options.graphs or (GRAPHS if cuda else GRAPHS[:1]):
        index, n = _edges(graph_name, options.device)
        for feat in options.widths or WIDTHS:
            case = {"case": f"{Path(graph_name).stem} x {feat}", "feat": feat}
            case["types"] = options.types
            rows.append(case | _Case(index, n, feat, name, options).row())
            _harness.print_row(rows[-1], COLUMNS)
            _harness.free()
    return _harness.keep("rgcn", name, rows, judge, cuda=cuda, folder=options.out)


full, bases, blocks = (partial(_section, name) for name in PARTS)


def _edges(name: str, device: str) -> tuple[Any, int]:
    """PyG's ``edge_index`` of a graph, and its vertices; nothing else of the graph is kept."""
    graph = _graphs.load(name, device=device)
    index = _baselines.edge_index(graph).clone()
    del graph
    _harness.free()
    return index, int(index.max()) + 1


class _Case:
    """Both layers with the same weights, features and edges."""

    def __init__(
        self, index: Any, n: int, feat: int, parts: str, options: argparse.Namespace
    ) -> None:
        import torch
        from torch_geometric.nn import RGCNConv

        from sparsefmt import nn

        self.index, self.cuda, self.quick = index, options.device == "cuda", options.quick
        torch.manual_seed(0)
        self.types = torch.randint(options.types, (index.shape[1],), device=index.device)
        x, self.grad = (torch.rand(n, feat, device=index.device) - 0.5 for _ in range(2))
        self.x = x.requires_grad_()
        given: Any = PARTS[parts]
        self.theirs, self.ours = (
            kind(feat, feat, options.types, **given).to(index.device)
            for kind in (RGCNConv, nn.RGCNConv)
        )
        self.ours.load_state_dict(self.theirs.state_dict())

    def forward(self, layer: Any) -> Any:
        """Run the layer."""
        return layer(self.x, self.index, self.types)

    def both(self, layer: Any) -> Any:
        """Run the layer, and give the gradients of features and of all weights."""
        import torch

        y = self.forward(layer)
        return torch.autograd.grad(y, [self.x, *layer.parameters()], self.grad)

    def row(self) -> dict[str, Any]:
        """Compare both, then measure them in turn."""
        import torch

        row: dict[str, Any] = {}
        if self.cuda:
            row["kept_mib"] = self._kept_mib()
        layers = [self.ours, self.theirs]
        try:
            row["error"] = self._error()
            if row["error"] > LIMIT:
                return {"wrong": f"differs from PyG's by {row['error']}"}
            if self.cuda:
                row |= self._memory(row["kept_mib"])
        except torch.cuda.OutOfMemoryError:
            layers, row["pyg"] = [self.ours], "does not fit into memory"
        _harness.free()
        functions = [partial(run, layer) for run in (self.both, self.forward) for layer in layers]
        times, row["runs"] = _harness.paced(functions, cuda=self.cuda, quick=self.quick)
        if "pyg" in row:
            return row | {"ms": times[0], "forward_ms": times[1]}
        names = "ms", "pyg_ms", "forward_ms", "pyg_forward_ms"
        return row | dict(zip(names, times, strict=True)) | {"ratio": times[1] / times[0]}

    def _kept_mib(self) -> float:
        """What the first step leaves in memory: the groups of edges."""
        import torch

        before = torch.cuda.memory_allocated()
        self.both(self.ours)
        torch.cuda.synchronize()
        return (torch.cuda.memory_allocated() - before) / MIB

    def _memory(self, kept_mib: float) -> dict[str, float]:
        ours, theirs = (
            sum(_memory.torch_peak_bytes(partial(self.both, layer))) / MIB
            for layer in (self.ours, self.theirs)
        )
        memory = (ours + kept_mib) / theirs
        return {"mib": ours, "pyg_mib": theirs, "memory": memory}

    def _error(self) -> float:
        """The largest difference of results and gradients, of the largest value of each."""
        expected = [self.forward(self.theirs).detach(), *self.both(self.theirs)]
        found = [self.forward(self.ours).detach(), *self.both(self.ours)]
        pairs = zip(found, expected, strict=True)
        return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Three times PyG's speed and half its memory, in every case in which it fits."""
    fit = [row for row in rows if "ratio" in row]
    if not fit:
        return []
    found = [Target("forward and backward, worst over PyG's", min(r["ratio"] for r in fit), 3.0)]
    if "memory" in fit[0]:
        saved = min(1 / row["memory"] for row in fit)
        found.append(Target("PyG's memory over ours, worst", saved, 2.0))
    return found
