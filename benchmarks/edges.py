"""Numbers of each entry: ``sddmm`` and ``edge_softmax``.

SDDMM beside cuSPARSE, preprocessed, with the better of two layouts, which may refuse float16; on
the CPU beside PyG's gather.  The softmax beside PyG's and the bandwidth of a copy, of which it
counts the scores read and the probabilities written once, 2 * nnz * heads * 4 bytes.
"""

import argparse
from collections.abc import Iterator
from functools import partial

from sparsefmt.ops import edge_softmax, sddmm

from . import _baselines, _graphs, _harness, _oracle
from ._harness import Call
from ._table import Benchmark, Limit, Row, Section, both, numbers, some_of

WIDTHS, DTYPES, HEADS = (32, 64, 128, 256), ("float32", "float16"), (1, 4, 8)
LARGEST = ("products", "reddit", "proteins")


def sddmm_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every graph, width and dtype."""
    for name, A in _graphs.loaded(options, _graphs.TABLE):
        for feat in options.widths or (WIDTHS if options.cuda else (32, 128)):
            for dtype in options.dtypes or (DTYPES if options.cuda else DTYPES[:1]):
                row: Row = {"case": f"{name} {feat} {dtype}", "graph": name, "dtype": dtype}
                X = _graphs.uniform(A.indptr, (A.n_rows, feat), dtype, seed=1)
                Y = _graphs.uniform(A.indptr, (A.n_cols, feat), dtype, seed=2)
                out = sddmm(A, X, Y)
                _harness.poison(out)
                error = _oracle.sddmm_error(A, X, Y, sddmm(A, X, Y, out=out))
                row |= _oracle.rounded(error, X.dtype)
                if "wrong" not in row:
                    calls: dict[str, Call] = {"ms": partial(sddmm, A, X, Y, out=out)}
                    try:
                        theirs = "cusparse_ms" if options.cuda else "pyg_ms"
                        row["algorithm"], calls[theirs] = _baselines.best_sddmm(A, X, Y)
                    except RuntimeError as refusal:  # of cuSPARSE
                        row["skipped"] = str(refusal)
                    row |= _harness.timed(calls, cuda=options.cuda, quick=options.quick, cold=True)
                    row["gb_s"] = A.nnz * feat * X.itemsize / row["ms"] / 1e6
                yield row


def softmax_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every graph and number of heads, in float32."""
    for name, A in _graphs.loaded(options, (*_graphs.TABLE, "proteins")):
        for heads in options.heads or HEADS:
            scores = _graphs.uniform(A.indptr, (A.nnz, heads)) * 8 - 4
            out = scores.copy()
            _harness.poison(out)
            error = _oracle.softmax_error(A, scores, edge_softmax(A, scores, out=out))
            row: Row = {"case": f"{name} x {heads}", "graph": name}
            row |= _oracle.rounded(error, scores.dtype)
            if "wrong" not in row:
                calls: dict[str, Call] = {"ms": partial(edge_softmax, A, scores, out=out)}
                theirs = partial(_baselines.pyg_softmax, A, scores)
                row |= _baselines.add(calls, "pyg_ms", theirs)
                row |= _harness.timed(calls, cuda=options.cuda, quick=options.quick, cold=True)
                row["gb_s"] = 2 * scores.nbytes / row["ms"] / 1e6
                if options.cuda:
                    row["of_copy"] = row["gb_s"] / _harness.copy_bandwidth()
            yield row


SDDMM = Section(
    sddmm_rows,
    (
        *both("over_cusparse", 2.0, where=lambda row: row["dtype"] == "float32"),
        *both("over_cusparse", where=lambda row: row["dtype"] != "float32", by=("dtype",)),
        Limit("over_pyg", least=5.0, on=("cpu",)),
    ),
)
SOFTMAX = Section(
    softmax_rows,
    (
        Limit("of_copy", least=0.7, where=lambda row: row["graph"] in LARGEST),
        Limit("over_pyg", least=5.0, on=("cpu", "cuda")),
        Limit("over_pyg", "mean"),
    ),
)
BENCHMARKS = {
    "sddmm": Benchmark("sddmm", __doc__, {"table": SDDMM}, {"dtypes": some_of(DTYPES)}),
    "softmax": Benchmark("softmax", __doc__, {"table": SOFTMAX}, {"heads": numbers}),
}
