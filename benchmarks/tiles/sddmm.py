"""SDDMM by tiles against cuSPARSE and SDDMM by CSR."""

import argparse
from dataclasses import dataclass
from typing import Any

from sparsefmt import CSR, SGT
from sparsefmt.formats.arrays import Array
from sparsefmt.ops import sddmm

from .. import _cusparse, _graphs, _harness, _oracle
from .._baselines import Call
from .._harness import Target
from ..matmul.table import geomean_and_worst
from .cases import (
    STORAGE,
    complaint,
    precision,
    print_row,
    share_of,
    sources,
    tiles_of,
)

WIDTHS = (32, 128)
DTYPES = ("tf32", "float16")
OVER_CUSPARSE = 2.0  #: geomean over cuSPARSE in float32, for each dtype
COLUMNS = {
    "case": "<24",
    "ms": "8.3f",
    "csr_ms": "8.3f",
    "cusparse_ms": "11.3f",
    "half_ms": "8.3f",
    "ratio": "6.2f",
    "ratio_half": "10.2f",
    "over_csr": "8.2f",
    "share": "6.3f",
    "error": "8.1e",
    "refused": "<30",
}


@dataclass
class Operands:
    """A pattern with features of its rows and columns in one dtype, and room for cuSPARSE."""

    A: CSR
    X: Array
    Y: Array
    theirs: Array

    @classmethod
    def of(cls, graph: CSR, feat: int, dtype: str) -> "Operands":
        """Features uniform in [0, 1): the same numbers in every dtype, but for rounding."""
        X = _graphs.uniform(graph.indptr, (graph.n_rows, feat), dtype, seed=1)
        Y = _graphs.uniform(graph.indptr, (graph.n_cols, feat), dtype, seed=2)
        return cls(graph, X, Y, _poisoned(graph.nnz, X.dtype))

    def error(self, found: Array) -> float:
        """The largest relative error at sampled entries."""
        return _oracle.sddmm_error(self.A, self.X, self.Y, found)

    def baseline(self) -> _cusparse.Product:
        """The product of cuSPARSE by its better layout; CusparseError if it refuses."""
        return _cusparse.best_sddmm(self.A, self.X, self.Y, self.theirs)[1]


def _poisoned(count: int, dtype: Any) -> Array:
    import cupy

    array = cupy.empty(count, dtype)
    _harness.poison(array)
    return array


def table(options: argparse.Namespace) -> bool:
    """Every graph, width and dtype; cuSPARSE in float32, and in float16 beside the halves."""
    _harness.print_head(f"sddmm by tiles against cuSPARSE {_cusparse.version()}", COLUMNS)
    rows = []
    for name, source in sources(options, _graphs.TABLE):
        graph = _graphs.load(source)
        tiles = tiles_of(graph)
        for feat in options.widths or WIDTHS:
            wide = Operands.of(graph, feat, "float32")
            theirs = wide.baseline()
            for dtype in options.dtypes or DTYPES:
                case = {"case": f"{name} {feat} {dtype}", "graph": name, "feat": feat}
                row = case | {"dtype": dtype, "share": share_of(tiles, "sddmm", dtype, feat)}
                rows.append(row | _cell(wide, tiles, dtype, theirs, quick=options.quick))
                print_row(rows[-1], COLUMNS)
            del wide, theirs
        del graph, tiles
        _harness.free()
    return _harness.keep("tcgnn", "sddmm", rows, judge, cuda=True, folder=options.out)


def _cell(
    wide: Operands, tiles: SGT, dtype: str, theirs: _cusparse.Product, *, quick: bool
) -> dict[str, Any]:
    """Ours by tiles and by CSR in turn with cuSPARSE's; ``wide`` is in float32."""
    A, feat, narrow = wide.A, wide.X.shape[1], dtype != "tf32"
    own = Operands.of(A, feat, STORAGE[dtype]) if narrow else wide
    out, csr_out = (_poisoned(A.nnz, own.X.dtype) for _ in range(2))

    def ours() -> Array:
        return sddmm(tiles, own.X, own.Y, out=out, **precision(dtype))

    def by_csr() -> Array:
        return sddmm(A, own.X, own.Y, out=csr_out)

    error = own.error(ours())
    bits = dtype if narrow else "float16"  # TF32 rounds both factors to as many
    wrong = complaint(error, bits) or _oracle.complaint(own.error(by_csr()), own.X.dtype)
    if wrong:
        return {"wrong": wrong}
    theirs()
    row: dict[str, Any] = {"error": error, "cusparse_error": wide.error(wide.theirs)}
    functions: dict[str, Call] = {"ms": ours, "csr_ms": by_csr, "cusparse_ms": theirs}
    if narrow:
        try:
            functions["half_ms"] = Operands.of(A, feat, "float16").baseline()
        except _cusparse.CusparseError as refusal:
            row["refused"] = str(refusal)
    times, row["runs"] = _harness.paced([*functions.values()], cuda=True, quick=quick)
    row |= dict(zip(functions, times, strict=True))
    against = {"ratio": "cusparse_ms", "ratio_half": "half_ms", "over_csr": "csr_ms"}
    return row | {key: row[ms] / row["ms"] for key, ms in against.items() if ms in row}


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """By dtype: over cuSPARSE in float32; in float16, and over CSR, to know."""
    found = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        held = [row for row in rows if row["dtype"] == dtype]
        found += geomean_and_worst(
            f"{dtype} over cuSPARSE float32", held, "ratio", OVER_CUSPARSE, None
        )
        found += geomean_and_worst(f"{dtype} over cuSPARSE float16", held, "ratio_half", None, None)
        found += geomean_and_worst(f"{dtype} over sddmm(CSR)", held, "over_csr", None, None)
        largest = max(row["error"] for row in held)
        found.append(Target(f"{dtype} largest relative error", largest))
    return found
