"""Conversions against SciPy (CPU) and cupyx.scipy.sparse (GPU).

``python -m benchmarks convert [--device cpu|cuda] [--nodes N --edges E] [--out FOLDER]``

On a GPU the default is the reddit-sized graph, on the CPU one of 5 million edges.  Every conversion
is checked against the library's before anything is timed.
"""

import argparse
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sparsefmt import COO, generate
from sparsefmt.formats.arrays import namespace

from .. import _harness, _memory
from .._harness import Row

SIZES = {"cuda": (232_965, 114_615_892), "cpu": (200_000, 5_000_000)}


def main(argv: list[str]) -> int:
    """Check, time and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks convert")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--edges", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    nodes, edges = SIZES[options.device]
    graph = shuffled_graph(options.nodes or nodes, options.edges or edges, options.device)
    cuda = options.device == "cuda"
    _harness.report("convert", measure(graph, cuda=cuda), cuda=cuda, folder=options.out)
    return 0


def shuffled_graph(nodes: int, edges: int, device: str) -> COO:
    """A weighted power-law graph with planted communities, its entries in no order."""
    sizes: dict[str, Any] = {"exponent": 2.3, "inside": 0.6, "community": 4000}
    graph = generate.power_law(nodes, edges, seed=0, device=device, **sizes)
    xp = namespace(graph.row)
    xp.random.seed(0)
    order = xp.random.permutation(graph.nnz)
    values = xp.random.random(graph.nnz).astype(np.float32)
    return COO(graph.row[order], graph.col[order], values, shape=graph.shape)


def measure(graph: COO, *, cuda: bool) -> list[Row]:
    """Every conversion with its baseline."""
    library, name = _library(cuda)
    csr = graph.tocsr()
    their_coo = library.coo_matrix((graph.data, graph.coords), shape=graph.shape)
    their_csr = library.csr_matrix((csr.data, csr.indices, csr.indptr), shape=csr.shape)
    _check(graph, their_coo, their_csr, name)

    if cuda:
        rows = [_row("coo -> csr", graph.tocsr, their_coo.tocsr, name, ">= 1.0", cuda)]
    else:  # without SciPy's sum over duplicates, which ours does not do either
        their_coo.has_canonical_format = True
        baseline = f"{name}, duplicates not summed"
        rows = [_row("coo -> csr", graph.tocsr, their_coo.tocsr, baseline, ">= 0.83", cuda)]
    limit = ">= 1.0" if cuda else ">= 0.83"
    rows += [
        _row("csr -> csc", csr.tocsc, their_csr.tocsc, name, limit, cuda),
        _row("csr -> coo", csr.tocoo, their_csr.tocoo, name, limit, cuda),
    ]
    structure = csr.with_data(None)
    rows.append(_row("csr -> csc, unweighted", structure.tocsc, None, "", "", cuda))
    rows.append(_sgt_row(structure, cuda))
    rows.append(_row("sgt(16x8) -> csr", structure.tosgt().tocsr, None, "", "", cuda))
    return rows


def _row(case: str, ours: Any, theirs: Any, baseline: str, limit: str, cuda: bool) -> Row:
    slow = case == "coo -> csr" and cuda  # cupyx sums duplicates by a comparison sort
    runs = 5 if slow and theirs else _harness.RUNS
    warmups = 2 if slow and theirs else _harness.WARMUPS
    ms, baseline_ms = _harness.alternate(ours, theirs, cuda=cuda, runs=runs, warmups=warmups)
    return Row(case, ms, baseline, baseline_ms, limit, {})


def _sgt_row(structure: Any, cuda: bool) -> Row:
    ms, _ = _harness.alternate(structure.tosgt, None, cuda=cuda)
    tiles = structure.tosgt()
    extra: dict[str, Any] = {"tiles": tiles.tile_count, "saved": round(tiles.reduction, 4)}
    if cuda:
        peak = _memory.peak_bytes(structure.tosgt)
        extra["peak extra bytes / structure bytes"] = round(peak / structure.nbytes, 2)
    limit = "<= 120 ms, peak <= 6" if cuda else "<= 3000 ms"
    return Row("csr -> sgt(16x8)", ms, "", None, limit, extra)


def _library(cuda: bool) -> tuple[ModuleType, str]:
    if cuda:
        import cupyx.scipy.sparse as library
    else:
        import scipy.sparse as library
    return library, "cupyx.scipy.sparse" if cuda else "SciPy"


def _check(graph: COO, their_coo: Any, their_csr: Any, name: str) -> None:
    """Stop unless our conversions hold the same entries as the library's."""
    csr = graph.tocsr()
    theirs = their_coo.tocsr()
    theirs.sort_indices()  # the entries of a row may stand in any order
    _same("coo -> csr", name, _parts(csr.sorted_indices()), _parts(theirs))
    csc = csr.tocsc()
    _same("csr -> csc", name, _parts(csc), _parts(their_csr.tocsc()))
    coo, theirs = csr.tocoo(), their_csr.tocoo()
    _same("csr -> coo", name, (coo.row, coo.col, coo.data), (theirs.row, theirs.col, theirs.data))
    back = csc.tocsr().tosgt().tocsr()
    if back.tocsc() != csc:
        raise SystemExit("csr -> sgt -> csr -> csc is not exact: nothing is reported")


def _parts(A: Any) -> tuple[Any, Any, Any]:
    return A.indptr, A.indices, A.data


def _same(case: str, name: str, ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    """Stop unless the arrays are equal, shapes included."""
    for mine, other in zip(ours, theirs, strict=True):
        if mine.shape != other.shape or not bool((mine == other).all()):
            raise SystemExit(f"{case} differs from {name}: nothing is reported")
