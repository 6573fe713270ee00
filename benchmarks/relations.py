"""RGCNConv beside PyG's: forward and backward in features and weights, and memory.

Types of edges are drawn evenly.  ``full`` has a matrix for each type, ``bases`` four for all,
``blocks`` eight blocks on the diagonals.  Both layers get the same ``edge_index``, in order of the
targets; results and gradients are compared in each case.  Memory is what a step takes beyond its
inputs, ours with the groups of edges that are kept from the first step on.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

from . import _baselines, _graphs, _harness, _oracle
from ._harness import MIB
from ._table import Benchmark, Limit, Row, Section, positive

PARTS = {"full": {}, "bases": {"num_bases": 4}, "blocks": {"num_blocks": 8}}
TYPES = 8


def rows(parts: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield every graph and width with weights of one kind, in float32."""
    for name, source in _graphs.chosen(options, ("arxiv", "reddit"), cpu=("arxiv",)):
        A = _graphs.load(source, device=options.device)
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
        cuda = self.options.cuda
        ours, theirs = (partial(self.both, layer) for layer in (self.ours, self.theirs))
        if cuda:
            before = torch.cuda.memory_allocated()
            ours()
            torch.cuda.synchronize()
            row["kept_mib"] = (torch.cuda.memory_allocated() - before) / MIB
        calls = {"ms": ours, "forward_ms": partial(self.forward, self.ours)}
        try:
            error = row["error"] = _oracle.norm_error(ours(), theirs())
            row |= _oracle.refused(_oracle.over(error, 1e-4))
            if cuda:
                mib, row["pyg_mib"] = (sum(_harness.peak_bytes(c)) / MIB for c in (ours, theirs))
                row |= {"mib": mib, "saved": row["pyg_mib"] / (mib + row["kept_mib"])}
            calls |= {"pyg_ms": theirs, "pyg_forward_ms": partial(self.forward, self.theirs)}
        except torch.cuda.OutOfMemoryError:
            row["skipped"] = "PyG does not fit into memory"
        _harness.free()
        return row | _harness.timed(calls, cuda=cuda, quick=self.options.quick)


LIMITS = (Limit("over_pyg", least=3.0), Limit("saved", least=2.0))
SECTIONS = {name: Section(partial(rows, name), LIMITS) for name in PARTS}
BENCHMARKS = {"rgcn": Benchmark("rgcn", __doc__, SECTIONS, {"types": positive})}
