"""What edges in another order than that of the CSR cost: products with values, and their gradient.

Edges come in random order, and by source as those of most files; beside them the same edges by
target.  Values move before the kernel, and gradients of values after it.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sparsefmt import COO, CSR, Graph
from sparsefmt.autograd import prepare, spmm
from sparsefmt.formats.arrays import namespace
from sparsefmt.interop.torch import to_tensor

from .. import _graphs, _harness
from .._harness import Target, geomean

GRAPHS = ("flickr", "arxiv", "amazon0505", "reddit", "products")
WIDTHS = (64, 128, 256)
PARTS = ("product", "gradient", "step")
#: Most times what edges by target take: a product, and backward of edge values alone.
LIMITS = {"product": 1.05, "gradient": 1.15}
COLUMNS = {
    "case": "<28",
    "product_ms": "9.3f",
    "product": "8.3f",
    "gradient_ms": "9.3f",
    "gradient": "8.3f",
    "step_ms": "9.3f",
    "step": "8.3f",
}


def order(options: argparse.Namespace) -> bool:
    """Each order in turn with edges by target, float32 values and features."""
    cuda = options.device != "cpu"
    _harness.print_head("edges in another order, times those by target, float32", COLUMNS)
    rows = []
    for name in options.graphs or (GRAPHS if cuda else ("cpu",)):
        csr = _graphs.load(name, device=options.device)
        for how in ("random", "source"):
            given, perm = disordered(csr, how)
            for feat in options.widths or WIDTHS:
                row = {"case": f"{Path(name).stem} {how} {feat}", "order": how, "feat": feat}
                rows.append(row | _case(csr, given, perm, feat, cuda=cuda, quick=options.quick))
                _harness.print_row(rows[-1], COLUMNS)
    return _harness.keep("spmm", "order", rows, judge, cuda=cuda, folder=options.out)


def disordered(csr: CSR, how: str) -> tuple[Graph, Any]:
    """The graph with its edges in random order or by source, and where each is in the CSR."""
    xp, coo = namespace(csr.indptr), csr.tocoo()
    perm = xp.argsort(coo.col, kind="stable") if how == "source" else xp.random.permutation(csr.nnz)
    return Graph(COO(coo.row[perm], coo.col[perm], shape=csr.shape)), to_tensor(perm).long()


def _case(
    csr: CSR, given: Graph, perm: Any, feat: int, *, cuda: bool, quick: bool
) -> dict[str, Any]:
    """Time a product, backward of the values alone, and a step with both gradients."""
    like = csr.indptr
    x, grad = (to_tensor(_graphs.uniform(like, (n, feat), seed=n)) for n in csr.shape[::-1])
    values = to_tensor(_graphs.uniform(like, (csr.nnz,), seed=1))
    ordered = Graph(csr)
    calls: list[Callable[[], Any]] = []
    results = []
    for graph, a in ((given, values[perm]), (ordered, values)):
        prepare(graph)
        leaf, features = a.clone().requires_grad_(), x.clone().requires_grad_()
        product = spmm(graph, x, leaf)
        calls += [
            lambda graph=graph, a=a: spmm(graph, x, a),
            lambda product=product, leaf=leaf: torch.autograd.grad(
                product, leaf, grad, retain_graph=True
            ),
            lambda graph=graph, leaf=leaf, features=features: torch.autograd.grad(
                spmm(graph, features, leaf), (features, leaf), grad
            ),
        ]
        results.append([spmm(graph, x, a), *calls[-1]()])
    mine, theirs = results
    theirs[2] = theirs[2][perm]
    if not all(torch.allclose(*both, rtol=1e-5) for both in zip(mine, theirs, strict=True)):
        return {"wrong": "another result than by target"}
    found, runs = _harness.paced(calls, cuda=cuda, quick=quick)
    row: dict[str, Any] = {"runs": runs}
    for part, ms, base in zip(PARTS, found[:3], found[3:], strict=True):
        row |= {f"{part}_ms": ms, part: ms / base}
    return row


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """The worst of each, and its geomean."""
    found = []
    for part, limit in LIMITS.items():
        held = {row["case"]: row[part] for row in rows}
        worst = max(held, key=lambda case: held[case])
        found += [
            Target(f"{part}, most ({worst})", held[worst], limit, at_least=False),
            Target(f"{part}, geomean", geomean(held.values())),
        ]
    return found
