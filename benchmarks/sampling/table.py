"""Products over samples of each row against cuSPARSE's best SpMM of the whole graph.

Ours reads the structure alone, as most graphs have it, cuSPARSE a value of each entry too, as it
must; ``weighted_ms`` is ours with values.  All go with one another in turn.  What is sampled from
is a graph of its own, without what ``spmm`` has prepared; where it prepares itself, from a width of
the mean degree on, the time of that is not in the figures, no more than that of cuSPARSE.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sparsefmt import CSR
from sparsefmt.formats.arrays import Array, is_cupy, namespace
from sparsefmt.ops import sample_with_perm, spmm, spmm_sampled

from .. import _cusparse, _graphs, _harness, _oracle
from .._harness import Target

GRAPHS = ("reddit", "products", "flickr", "com-amazon")
SAMPLES = (16, 64, 256)  #: entries of a row
STRATEGIES = ("bucket", "fastrand", "random")
FEAT = 128
SEED = 0
#: Graph -> the dtypes that are measured unless some are asked for; float32 of the others.
DTYPES = {"reddit": ("float32", "bfloat16")}
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
COLUMNS = {
    "case": "<34",
    "ms": "8.4f",
    "weighted_ms": "11.4f",
    "spmm_ms": "8.4f",
    "cusparse_ms": "11.3f",
    "over_cusparse": "13.2f",
    "over_spmm": "9.2f",
    "weighted": "8.3f",
    "rate": "6.4f",
    "gb_s": "6.0f",
    "cold_ms": "8.4f",
    "cold_over_cusparse": "18.2f",
    "error": "8.1e",
}


def bare(A: CSR) -> CSR:
    """The same arrays without anything that was built of them."""
    return CSR(A.indptr, A.indices, A.data, shape=A.shape, validate="cheap")


@dataclass
class Operands:
    """A graph to sample from, without values and with them, and features; results of both."""

    A: CSR
    W: CSR
    X: Array
    Y: Array
    whole: CSR  #: for ``spmm``, which keeps its plan with it

    @classmethod
    def of(cls, graph: CSR, feat: int, dtype: str) -> "Operands":
        """Values and features uniform in [0, 1)."""
        W = _graphs.weighted(graph, dtype)
        X = _graphs.uniform(graph.indptr, (graph.n_cols, feat), dtype)
        Y = namespace(X).empty((graph.n_rows, feat), X.dtype)
        return cls(bare(graph), bare(W), X, Y, graph)

    def call(self, A: CSR, width: int, strategy: str) -> Callable[[], Array]:
        """The product of ``A``, one of both, over a sample of each row."""
        how: dict[str, Any] = {"strategy": strategy, "seed": SEED}
        return partial(spmm_sampled, A, self.X, width, out=self.Y, **how)

    def full(self) -> Array:
        """Over all entries, without values."""
        return spmm(self.whole, self.X, out=self.Y)

    def checked(self, width: int, strategy: str) -> dict[str, Any]:
        """Errors of both, from poisoned outputs, and the sample; what is wrong."""
        row: dict[str, Any] = {"error": 0.0}
        for name, A in (("", self.A), ("with values: ", self.W)):
            B, perm = sample_with_perm(A, width, strategy=strategy, seed=SEED)
            wrong = sample_complaint(A, B, perm, width, strategy)
            if is_cupy(self.Y):
                _harness.poison(self.Y)
            else:
                self.Y.fill(np.nan)
            self.call(A, width, strategy)()
            error = _oracle.spmm_error(B, self.X, self.Y)
            wrong = wrong or _oracle.complaint(error, self.X.dtype)
            if wrong:
                return {"wrong": f"{name}{wrong}"}
            row |= {"error": max(row["error"], error), "kept": B.nnz, "rate": B.nnz / A.nnz}
        return row


def sample_complaint(A: CSR, B: CSR, perm: Array, width: int, strategy: str) -> str | None:
    """Why ``B`` is no such sample of ``A``; None if it is one.

    All counts, values and columns are compared, and the places of the entries in sampled rows.
    """
    xp = namespace(A.indptr)
    if not (B.lengths == xp.minimum(A.lengths, width)).all():
        return "rows of the sample are not as long as they should be"
    if not (B.indices == A.indices[perm]).all():
        return "columns of the sample are not those of its entries"
    if A.data is not None and not (B.data == A.data[perm]).all():
        return "values of the sample are not those of its entries"
    for row in _oracle.sampled_rows(A).tolist():
        start, stop = (int(A.indptr[row + i]) for i in (0, 1))
        span = slice(int(B.indptr[row]), int(B.indptr[row + 1]))
        places = _host(perm[span]).astype(np.int64) - start
        if not is_sample(places, stop - start, width, strategy):
            return f"row {row} is no sample by {strategy}"
    return None


def is_sample(places: Any, length: int, width: int, strategy: str) -> bool:
    """Whether these places in a row of that length are what the strategy may choose, in order."""
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


def table(options: argparse.Namespace) -> bool:
    """Every graph, dtype, strategy and number of entries."""
    _harness.print_head(f"spmm_sampled against cuSPARSE {_cusparse.version()}", COLUMNS)
    rows = []
    for source in options.graphs or GRAPHS:
        graph, name = _graphs.load(source), Path(source).stem
        for feat in options.widths or (FEAT,):
            for row in _rows_of(graph, name, feat, options):
                _harness.print_row(row, COLUMNS)
                rows.append(row)
        _harness.free()
    return _harness.keep("sampled", "table", rows, judge, cuda=True, folder=options.out)


def _rows_of(
    graph: CSR, name: str, feat: int, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """All beside one product of cuSPARSE, in float32 whatever the dtype of ours."""
    wide = Operands.of(graph, feat, "float32")
    algorithm, theirs = _cusparse.best_spmm(wide.W, wide.X, namespace(wide.X).empty_like(wide.Y))
    for dtype in options.dtypes or DTYPES.get(name, ("float32",)):
        ours = wide if dtype == "float32" else Operands.of(graph, feat, dtype)
        for width in options.sample or SAMPLES:
            for strategy in options.strategies or STRATEGIES:
                case = f"{name} {feat} {dtype} {strategy} S={width}"
                row: dict[str, Any] = {"case": case, "graph": name}
                row |= {"feat": feat, "dtype": dtype, "strategy": strategy, "sample": width}
                yield row | {"algorithm": algorithm} | _cell(ours, theirs, row, options.quick)


def _cell(
    ours: Operands, theirs: Callable[[], Any], case: dict[str, Any], quick: bool
) -> dict[str, Any]:
    """Ours, with values, ``spmm`` and cuSPARSE in turn; two of them with an empty L2."""
    width, strategy = case["sample"], case["strategy"]
    row = ours.checked(width, strategy)
    if "wrong" in row:
        return row
    calls = {
        "ms": ours.call(ours.A, width, strategy),
        "weighted_ms": ours.call(ours.W, width, strategy),
        "spmm_ms": ours.full,
        "cusparse_ms": theirs,
    }
    times, row["runs"] = _harness.paced([*calls.values()], cuda=True, quick=quick)
    row |= dict(zip(calls, times, strict=True))
    row |= {f"over_{name}": row[f"{name}_ms"] / row["ms"] for name in ("cusparse", "spmm")}
    row["weighted"] = row["weighted_ms"] / row["ms"]
    row["gb_s"] = row["kept"] * ours.X.shape[1] * ours.X.itemsize / row["ms"] / 1e6
    if not quick:
        pair = [calls["ms"], theirs]
        cold = _harness.medians(pair, cuda=True, runs=5, warmups=1, flush=True)
        row |= {"cold_ms": cold[0], "cold_over_cusparse": cold[1] / cold[0]}
    return row


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Over cuSPARSE where that is stated, over ``spmm`` on low degrees, with values; errors."""
    found = []
    plain = [row for row in rows if (row["dtype"], row["feat"]) == ("float32", FEAT)]
    for row in plain:
        stated = OVER_CUSPARSE.get((row["graph"], row["strategy"]))
        if stated and row["sample"] in SAMPLES:
            limit = stated[SAMPLES.index(row["sample"])]
            found.append(Target(f"{row['case']} over cuSPARSE", row["over_cusparse"], limit))
    for graph in LOW_DEGREE:
        held = [row for row in plain if row["graph"] == graph]
        found += lowest(f"{graph} over spmm", held, "over_spmm", 1.0)
    found += lowest("over cuSPARSE, float32", plain, "over_cusparse", None)
    found += highest("with values over without, float32", plain, "weighted", WEIGHTED)
    others = [row for row in rows if row not in plain]
    found += highest("with values over without, other cases", others, "weighted", None)
    for dtype, limit in _oracle.LIMITS.items():
        held = [row for row in rows if row["dtype"] == dtype]
        found += highest(f"{dtype} relative error", held, "error", limit)
    return found


def lowest(
    name: str, rows: Iterable[dict[str, Any]], key: str, limit: float | None
) -> list[Target]:
    """The least of a figure, where any row has it."""
    worst = min((row for row in rows if key in row), key=lambda row: row[key], default=None)
    return [Target(f"{name}, worst ({worst['case']})", worst[key], limit)] if worst else []


def highest(
    name: str, rows: Iterable[dict[str, Any]], key: str, limit: float | None
) -> list[Target]:
    """The largest of a figure, where any row has it."""
    worst = max((row for row in rows if key in row), key=lambda row: row[key], default=None)
    if worst is None:
        return []
    return [Target(f"{name}, worst ({worst['case']})", worst[key], limit, at_least=False)]
