"""What the sections of ``fuse`` share: attention of every kind, ours and PyG's, checked."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from sparsefmt import CSR, Graph, autograd
from sparsefmt.formats.arrays import Array

from .. import _baselines, _cusparse, _graphs, _harness
from .._baselines import Call
from .._harness import Target
from .._oracle import ROUNDING
from ..tiles.cases import sources
from .oracle import SIDES, VALUES, Exact, complaint

KINDS = tuple(SIDES)
SLOPE = 0.2
SPMM_FEAT = 128  #: of the product that attention is held against
TIMES_PYG = 2.0  #: most of an error of ours over that of PyG, from the same float64 reference
#: Real graphs, of ``--data``; one of them is the name of a generated graph too.
REAL = ("cora", "pubmed")


def is_cuda(options: argparse.Namespace) -> bool:
    """Whether the sections run on a GPU."""
    return bool(options.device == "cuda")


def graphs_of(
    options: argparse.Namespace, generated: tuple[str, ...], real: tuple[str, ...] = REAL
) -> Iterator[tuple[str, str]]:
    """Names of graphs, real ones first, with what ``_graphs.load`` takes for each.

    ``real`` ones come from their files, whoever asks for them; without it they are skipped.
    """
    asked = options.graphs or (*real, *generated)
    for name in asked:
        path = options.data / f"{name}.npz"
        if name not in real:
            yield from sources(argparse.Namespace(graphs=(name,), data=options.data), ())
        elif path.exists():
            yield name, str(path)
        else:
            print(f"  {name} skipped: there is no {path}", flush=True)


def ends_of(A: CSR) -> tuple[Tensor, Tensor]:
    """Row and column of every entry in CSR order, int64."""
    cols, rows = _baselines.edge_index(A)
    return rows, cols


def normal(like: Array, shape: tuple[int, ...], *, seed: int, dtype: str = "float32") -> Tensor:
    """Normally distributed numbers, rounded to torch's dtype of that name."""
    wide = _baselines.tensor(_graphs.normal(like, shape, seed=seed))
    found: Tensor = wide.to(getattr(torch, dtype))
    return found


class Attention:
    """One attention over a graph, with the gradient of its result.

    Features are normal; scores are sums of a normal number of each end, or dot products with about
    the same spread.  Those of ``gat`` are in float32 beside 2-byte features.
    """

    def __init__(
        self, kind: str, graph: Graph, heads: int, feat: int, dtype: str = "float32"
    ) -> None:
        self.kind, self.graph, self.A, self.dtype = kind, graph, graph.csr, dtype
        like, n, m = self.A.indptr, self.A.n_rows, self.A.n_cols
        wide, narrow = (heads, feat), "float32" if dtype in ("float16", "bfloat16") else dtype
        kinds: dict[str, dict[str, tuple[int, ...]]] = {
            "gat": {"h": (m, *wide), "el": (m, heads), "er": (n, heads)},
            "gatv2": {"left": (m, *wide), "right": (n, *wide), "att": wide},
            "dot": {"queries": (n, *wide), "keys": (m, *wide), "values": (m, *wide)},
        }
        self.inputs: dict[str, Tensor] = {}
        for seed, (name, shape) in enumerate(kinds[kind].items()):
            stored = narrow if name in ("el", "er") else dtype
            tensor = normal(like, shape, seed=seed, dtype=stored)
            tensor *= feat**-0.5 if name == "att" else 1
            self.inputs[name] = tensor.requires_grad_()
        self.grad = normal(like, (n, *wide), seed=9, dtype=dtype)

    def forward(self) -> Tensor:
        """(n_rows, heads, feat) by this library."""
        x = self.inputs.values()
        found: Tensor
        if self.kind == "gat":
            found = autograd.gat_aggregate(self.graph, *x, negative_slope=SLOPE)
        elif self.kind == "gatv2":
            found = autograd.gatv2_aggregate(self.graph, *x, negative_slope=SLOPE)
        else:
            found = autograd.dot_aggregate(self.graph, *x)
        return found

    def forward_only(self) -> Tensor:
        """The same where no gradient will be asked for."""
        with torch.no_grad():
            return self.forward()

    def both(self, forward: Callable[[], Tensor] | None = None) -> tuple[Tensor, ...]:
        """The result and the gradients of all inputs, ours or by another ``forward``."""
        out = (forward or self.forward)()
        return out.detach(), *torch.autograd.grad(out, [*self.inputs.values()], self.grad)

    def checked(self) -> dict[str, Any]:
        """The largest error in float64 at sampled vertices, and what is wrong."""
        found = dict(zip(("out", *self.inputs), self.both(), strict=True))
        exact = Exact(self.kind, ends_of(self.A), self.inputs, self.grad, slope=SLOPE)
        errors = exact.errors(found)
        wrong = complaint(errors, self.grad.dtype)
        return {"error": max(errors.values())} | ({"wrong": wrong} if wrong else {})

    def pyg(self) -> Call:
        """Forward and backward as PyG's layers of that name do it; ``Missing`` if it cannot."""

        def first() -> Call:
            self._make_room()
            ends = ends_of(self.A)
            return lambda: self.both(lambda: pyg_attention(self.kind, ends, self.inputs))

        try:
            return _baselines.guarded(first)
        finally:
            _harness.free()

    def _make_room(self) -> None:
        """Fail at once, out of memory, where PyG would after long.

        Its backward holds values of every entry, their gradient and that of their product.
        """
        if self.grad.is_cuda:
            shape = (self.A.nnz, *self.grad.shape[1:])
            room = [self.grad.new_empty(shape) for _ in range(3)]
            del room
            _harness.free()


def pyg_attention(kind: str, ends: tuple[Tensor, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    """Gather, ``torch_geometric.utils.softmax``, multiply and scatter."""
    from torch_geometric.utils import scatter, softmax

    rows, cols = ends
    if kind == "gat":
        n = len(inputs["er"])
        s = leaky_relu(inputs["el"][cols] + inputs["er"][rows], SLOPE)
    elif kind == "gatv2":
        n = len(inputs["right"])
        s = (leaky_relu(inputs["left"][cols] + inputs["right"][rows], SLOPE) * inputs["att"]).sum(
            -1
        )
    else:
        n, feat = len(inputs["queries"]), inputs["queries"].shape[-1]
        s = (inputs["queries"][rows] * inputs["keys"][cols]).sum(-1) * feat**-0.5
    p = softmax(s, rows, num_nodes=n)
    found: Tensor = scatter(inputs[VALUES[kind]][cols] * p[..., None], rows, 0, n, "sum")
    return found


def theirs(A: CSR, *, cuda: bool) -> tuple[str, Call]:
    """The SpMM that attention is held against: cuSPARSE's best, on the CPU torch.sparse's."""
    B = _graphs.weighted(A)
    X = _graphs.uniform(A.indptr, (A.n_cols, SPMM_FEAT))
    if not cuda:
        return "torch.sparse", _baselines.torch_spmm(B, X)
    import cupy

    return _cusparse.best_spmm(B, X, cupy.empty((A.n_rows, SPMM_FEAT), X.dtype))


def precision(rows: list[dict[str, Any]]) -> list[Target]:
    """The largest error over PyG's own, of rows that have both; rounding a result is no error."""
    both = [row for row in rows if "pyg_error" in row]
    if not both:
        return []

    def over(row: dict[str, Any]) -> float:
        return float(row["error"] / max(row["pyg_error"], ROUNDING["float32"]))

    most = max(both, key=over)
    text = f"largest error over PyG's own ({most['case']})"
    return [Target(text, over(most), TIMES_PYG, at_least=False)]


def case_of(kind: str, graph: str, heads: int, feat: int, dtype: str) -> dict[str, Any]:
    """How results name a case."""
    case = {"case": f"{kind} {graph} {heads}x{feat} {dtype}", "kind": kind, "graph": graph}
    return case | {"heads": heads, "feat": feat, "dtype": dtype}


def prepared(source: str, options: argparse.Namespace) -> Graph:
    """The graph, with its transpose, on the device of the options."""
    graph = Graph(_graphs.load(source, device=options.device))
    autograd.prepare(graph)
    return graph


def stem(name: str) -> str:
    """What a graph is called in results."""
    return Path(name).stem
