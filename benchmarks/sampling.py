"""SpMM over a sample of each row.

``spmm_sampled`` goes against cuSPARSE's best float32 SpMM of the whole graph, and ``spmm``
(on the CPU torch.sparse).  Ours reads the structure alone, as most graphs have it, cuSPARSE a
value of each entry too, as it must; ``weighted_ms`` is ours with values.

Products are checked in float64 at sampled rows, against ``sample(...)``, whose entries are checked
too.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from sparsefmt import CSR
from sparsefmt.formats.arrays import Array, is_cupy, namespace
from sparsefmt.ops import sample_with_perm, spmm, spmm_sampled

from . import _baselines, _graphs, _harness, _oracle
from ._table import Benchmark, Limit, Row, Section, numbers, some_of

SAMPLES, STRATEGIES, FEAT, SEED = (16, 64, 256), ("bucket", "fastrand", "random"), 128, 0
#: Least speed-ups over cuSPARSE in float32, of ``SAMPLES`` in turn.
OVER_CUSPARSE = {
    ("reddit", "bucket"): (38.0, 13.0, 3.1),
    ("reddit", "fastrand"): (26.0, 10.0, 3.0),
    ("reddit", "random"): (20.0, 8.0, 2.4),
    ("products", "bucket"): (5.0, 2.5, 2.0),
}
#: Graphs of few entries in a row, where a sample is never to be slower than ``spmm``.
LOW_DEGREE = ("flickr", "com-amazon")
WEIGHTED = 1.15  #: most time with values over that without
PRIMES = (577, 587, 593, 599)


def table(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every graph, dtype, strategy and number of entries, beside a float32 product."""
    for name, graph in _graphs.loaded(options, ("reddit", "products", *LOW_DEGREE)):
        for feat in options.widths or (FEAT,):
            X = _graphs.uniform(graph.indptr, (graph.n_cols, feat))
            _, theirs = _baselines.best_spmm(_graphs.weighted(graph), X)
            dtypes = ("float32", "bfloat16") if name == "reddit" else ("float32",)
            for dtype in options.dtypes or dtypes:
                for width in options.sample or SAMPLES:
                    for strategy in options.strategies or STRATEGIES:
                        case = f"{name} {feat} {dtype} {strategy} S={width}"
                        row = {"case": case, "graph": name, "feat": feat, "dtype": dtype}
                        row |= {"strategy": strategy, "sample": width}
                        yield row | _cell(graph, row, theirs, options)


def _cell(graph: CSR, facts: Row, theirs: Any, options: argparse.Namespace) -> Row:
    """Check ours, without values and with them, and time both beside ``spmm`` and theirs."""
    width, strategy, dtype = facts["sample"], facts["strategy"], facts["dtype"]
    X = _graphs.uniform(graph.indptr, (graph.n_cols, facts["feat"]), dtype)
    Y = namespace(X).empty((graph.n_rows, facts["feat"]), X.dtype)
    row: Row = {"error": 0.0}
    calls = {}
    for name, A in (("ms", graph), ("weighted_ms", _graphs.weighted(graph, dtype))):
        A = CSR(A.indptr, A.indices, A.data, shape=A.shape, validate="cheap")  # nothing is built
        B, perm = sample_with_perm(A, width, strategy=strategy, seed=SEED)
        wrong = sample_complaint(A, B, perm, width, strategy)
        call = partial(spmm_sampled, A, X, width, out=Y, strategy=strategy, seed=SEED)
        _harness.poison(Y)
        call()
        error = _oracle.spmm_error(B, X, Y)
        row |= _oracle.refused(wrong or _oracle.complaint(error, X.dtype))
        row |= {"error": max(row["error"], error), "rate": B.nnz / A.nnz}
        calls[name] = call
    if "wrong" in row:
        return row
    calls |= {"spmm_ms": partial(spmm, graph, X, out=Y)}
    calls["cusparse_ms" if options.cuda else "torch_ms"] = theirs
    row |= _harness.timed(calls, cuda=options.cuda, quick=options.quick)
    row["gb_s"] = row["rate"] * graph.nnz * X.shape[1] * X.itemsize / row["ms"] / 1e6
    return row


def sample_complaint(A: CSR, B: CSR, perm: Array, width: int, strategy: str) -> str | None:
    """Return why ``B`` is no such sample of ``A``; None if it is one.

    All counts, values and columns are compared, and the places of the entries in sampled rows.
    """
    xp = namespace(A.indptr)
    if not (B.lengths == xp.minimum(A.lengths, width)).all():
        return "rows of the sample are not as long as they should be"
    if not (B.indices == A.indices[perm]).all():
        return "columns of the sample are not those of its entries"
    if A.data is not None and not (B.data == A.data[perm]).all():
        return "values of the sample are not those of its entries"
    for row in _oracle.sampled(_baselines.ends_of(A)[0], A.n_rows).tolist():
        start, stop = (int(A.indptr[row + i]) for i in (0, 1))
        span = slice(int(B.indptr[row]), int(B.indptr[row + 1]))
        if not is_sample(_host(perm[span]).astype(np.int64) - start, stop - start, width, strategy):
            return f"row {row} is no sample by {strategy}"
    return None


def is_sample(places: Any, length: int, width: int, strategy: str) -> bool:
    """Return True if the strategy may choose these places of a row of that length, in order."""
    numbers = np.arange(min(length, width))
    if strategy == "fastrand" and width < length:
        prime = next(prime for prime in PRIMES if length % prime)
        return bool(np.array_equal(places, numbers * prime % length))
    if strategy == "random" and width < length:
        inside = bool(((places >= 0) & (places < length)).all())
        return inside and len(np.unique(places)) == width
    return bool(np.array_equal(places, numbers))


def _host(array: Array) -> Any:
    return array.get() if is_cupy(array) else array


def _is_plain(row: Row) -> bool:
    return (row["dtype"], row["feat"]) == ("float32", FEAT)


def _least(row: Row) -> float | None:
    stated = OVER_CUSPARSE.get((row["graph"], row["strategy"]), ())
    return dict(zip(SAMPLES, stated, strict=False)).get(row["sample"])


def _is_low(row: Row) -> bool:
    return _is_plain(row) and row["graph"] in LOW_DEGREE


SECTIONS = {
    "table": Section(
        table,
        (
            Limit("over_cusparse", "each", least=_least, where=_is_plain),
            Limit("over_spmm", least=1.0, by=("graph",), where=_is_low),
            Limit("over_weighted", most=WEIGHTED, where=_is_plain),
            Limit("error", most=lambda row: _oracle.LIMITS[row["dtype"]], by=("dtype",)),
        ),
    ),
}
EXTRA = {"dtypes": some_of(_oracle.LIMITS), "strategies": some_of(STRATEGIES), "sample": numbers}
BENCHMARKS = {"sampled": Benchmark("sampled", __doc__, SECTIONS, EXTRA)}
