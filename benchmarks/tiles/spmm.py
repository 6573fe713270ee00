"""SpMM by tiles over graphs, widths and dtypes, against cuSPARSE and SpMM by CSR."""

import argparse
from collections.abc import Iterator
from typing import Any

from sparsefmt import CSR, SGT

from .. import _cusparse, _graphs, _harness, _oracle
from .._baselines import Call
from .._harness import Target, geomean
from ..matmul.table import WIDE, Operands, geomean_and_worst
from . import tcgnn
from .cases import (
    KINDS,
    STORAGE,
    Tiled,
    case_of,
    limit_of,
    print_row,
    sources,
    tiles_of,
    with_ones,
    without_values,
)

#: Least geomean over cuSPARSE (float16 for the halves), and its worst case.
OVER_CUSPARSE = {"tf32": (1.35, 0.95), "float16": (2.0, None), "bfloat16": (2.0, None)}
OVER_CSR = 0.95  #: at worst
#: At most; of bfloat16 what is right, which depends on the share.
ERRORS = {"tf32": 4e-4, "float16": 1e-3}
COLUMNS = {
    "case": "<34",
    "ms": "8.3f",
    "csr_ms": "8.3f",
    "cusparse_ms": "11.3f",
    "algorithm": "<8",
    "ratio": "5.2f",
    "over_csr": "8.2f",
    "share": "6.3f",
    "cold_ms": "8.3f",
    "cold_ratio": "10.2f",
    "error": "8.1e",
    "bias": "8.1e",
}
#: Of Fig. 10.
WIDTHS = (16, 32, 64, 128, 256)
WIDTH_GRAPHS = ("artist", "com-amazon", "amazon0505", "arxiv", "ddi")
WIDTH_COLUMNS = {
    "case": "<25",
    "ms": "8.3f",
    "cusparse_ms": "11.3f",
    "algorithm": "<8",
    "ratio": "5.2f",
    "over_csr": "8.2f",
    "gb_s": "6.0f",
    "error": "8.1e",
}


def table(options: argparse.Namespace) -> bool:
    """Every cell: ours beside cuSPARSE and our CSR, warm, and beside cuSPARSE with an empty L2.

    With values and without; cuSPARSE needs some and gets ones, by the algorithm that is best with
    any.
    """
    _harness.print_head(f"spmm by tiles against cuSPARSE {_cusparse.version()}", COLUMNS)
    dtypes, widths = options.dtypes or tcgnn.DTYPES, options.widths or WIDE
    rows = _measured(options, _graphs.TABLE, widths, dtypes, COLUMNS, kinds=KINDS)
    return _harness.keep("tcgnn", "table", rows, judge_table, cuda=True, folder=options.out)


def width(options: argparse.Namespace) -> bool:
    """The same over widths, with values, in TF32 unless asked otherwise."""
    _harness.print_head("spmm by tiles over widths", WIDTH_COLUMNS)
    dtypes, widths = options.dtypes or ("tf32",), options.widths or WIDTHS
    rows = _measured(options, WIDTH_GRAPHS, widths, dtypes, WIDTH_COLUMNS)
    return _harness.keep("tcgnn", "width", rows, judge_width, cuda=True, folder=options.out)


def _measured(
    options: argparse.Namespace,
    graphs: tuple[str, ...],
    widths: tuple[int, ...],
    dtypes: tuple[str, ...],
    columns: dict[str, str],
    *,
    kinds: tuple[bool, ...] = KINDS[:1],
) -> list[dict[str, Any]]:
    """Every graph, width, kind and dtype, printed as they come."""
    rows = []
    for name, source in sources(options, graphs):
        graph = _graphs.load(source)
        tiles = tiles_of(graph)
        for feat in widths:
            for found in cells(graph, tiles, feat, dtypes, kinds, quick=options.quick):
                case = case_of(name, feat, found["dtype"], weighted=found["weighted"])
                rows.append(case | {"graph": name} | found)
                print_row(rows[-1], columns)
        del graph, tiles
        _harness.free()
    return rows


def cells(
    graph: CSR,
    tiles: SGT,
    feat: int,
    dtypes: tuple[str, ...],
    kinds: tuple[bool, ...],
    *,
    quick: bool,
) -> Iterator[dict[str, Any]]:
    """One row for each kind and dtype; both halves are held against cuSPARSE in float16."""
    for storage in ("float32", "float16"):
        asked = [name for name in dtypes if (name == "tf32") == (storage == "float32")]
        if not asked:
            continue
        with_values = Operands.of(graph, feat, storage)
        algorithm, theirs = with_values.baseline()
        for weighted in kinds:
            wide = with_values if weighted else with_ones(with_values)
            if not weighted:
                theirs = _cusparse.spmm(wide.A, wide.X, wide.theirs, algorithm)
            theirs()
            facts = {"weighted": weighted, "algorithm": algorithm}
            facts["cusparse_error"] = _oracle.spmm_error(wide.A, wide.X, wide.theirs)
            for dtype in asked:
                same = STORAGE[dtype] == storage
                operands = wide if same else Operands.of(graph, feat, STORAGE[dtype])
                operands = operands if weighted else without_values(operands)
                ours = Tiled.of(tiles, operands, dtype)
                yield {"dtype": dtype} | facts | _cell(ours, theirs, quick=quick)


def _cell(ours: Tiled, theirs: _cusparse.Product, *, quick: bool) -> dict[str, Any]:
    row = ours.checked()
    if "wrong" in row:
        return row
    row["bias"] = ours.bias()
    functions: list[Call] = [ours, ours.csr, theirs]
    (ms, csr_ms, their_ms), runs = _harness.paced(functions, cuda=True, quick=quick)
    row |= {"ms": ms, "csr_ms": csr_ms, "cusparse_ms": their_ms, "runs": runs}
    row |= {"ratio": their_ms / ms, "over_csr": csr_ms / ms}
    row["gb_s"] = ours.csr.A.nnz * ours.csr.X.shape[1] * ours.csr.X.itemsize / ms / 1e6
    if not quick:
        cold = _harness.medians([ours, theirs], cuda=True, runs=5, warmups=1, flush=True)
        row |= {"cold_ms": cold[0], "cold_ratio": cold[1] / cold[0]}
    return row


def judge_table(rows: list[dict[str, Any]]) -> list[Target]:
    """By dtype: over cuSPARSE and over CSR at the wide widths, and by kind, to know; all errors."""
    found = []
    for dtype, limits in OVER_CUSPARSE.items():
        held = [row for row in rows if row["dtype"] == dtype]
        if not held:
            continue
        wide = [row for row in held if row["feat"] in WIDE]
        theirs = "float32" if dtype == "tf32" else "float16"
        found += geomean_and_worst(
            f"{dtype} 64/128/256 over cuSPARSE {theirs}", wide, "ratio", *limits
        )
        found += geomean_and_worst(
            f"{dtype} 64/128/256 over spmm(CSR)", wide, "over_csr", None, OVER_CSR
        )
        for weighted in KINDS:
            kind = [row for row in wide if row["weighted"] == weighted]
            name = f"{dtype} {'with' if weighted else 'without'} values"
            for key, what in (("ratio", f"cuSPARSE {theirs}"), ("over_csr", "spmm(CSR)")):
                found += geomean_and_worst(f"{name} over {what}", kind, key, None, None)[:1]
        found += errors(dtype, held)
    return found


def errors(dtype: str, rows: list[dict[str, Any]]) -> list[Target]:
    """The largest of all, by the asked-for limits, and the bias, which has none, to know."""
    limit = ERRORS.get(dtype) or max(limit_of(dtype, row["share"]) for row in rows)
    largest, bias = max(row["error"] for row in rows), max(abs(row["bias"]) for row in rows)
    return [
        Target(f"{dtype} largest relative error", largest, limit, at_least=False),
        Target(f"{dtype} largest bias, either way", bias),
    ]


def judge_width(rows: list[dict[str, Any]]) -> list[Target]:
    """The geomean over cuSPARSE of each width and dtype, to know."""
    found = []
    for dtype, feat in sorted({(row["dtype"], row["feat"]) for row in rows}):
        ratios = [row["ratio"] for row in rows if (row["dtype"], row["feat"]) == (dtype, feat)]
        name = f"{dtype} {feat} over cuSPARSE, geomean of {len(ratios)}"
        found.append(Target(name, geomean(ratios)))
    return found
