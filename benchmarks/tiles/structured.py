"""SpMM by tiles against CSR on graphs whose rows, side by side, share columns."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sparsefmt import CSR
from sparsefmt.formats.arrays import namespace

from .. import _graphs, _harness
from .._harness import Target, geomean
from ..cbsr.products import communities
from ..matmul.table import Operands
from . import tcgnn
from .cases import (
    KINDS,
    STORAGE,
    Tiled,
    case_of,
    print_row,
    sources,
    tiles_of,
    without_values,
)
from .spmm import errors

REAL = ("dd", "musae_facebook", "fb_oklahoma97", "gemsec_new_sites")
#: Copies of a real graph stand on the diagonal until there are so many entries.
LEAST_ENTRIES = 10_000_000
WIDTHS = (64, 128)
OVER_CSR = 1.3  #: geomean of all, for each dtype
GROUPS = ("ids not shuffled", "communities", "real", "real, communities")
COLUMNS = {
    "case": "<59",
    "ms": "8.3f",
    "csr_ms": "8.3f",
    "over_csr": "8.2f",
    "share": "6.3f",
    "order_s": "8.4f",
    "order_scaled_s": "14.3f",
    "error": "8.1e",
    "bias": "9.1e",
}


@dataclass(frozen=True)
class Variant:
    """A graph in one order of its vertices, and what is to be told of it."""

    group: str  #: of ``GROUPS``
    name: str
    graph: CSR
    facts: dict[str, Any] = field(default_factory=dict)


def structured(options: argparse.Namespace) -> bool:
    """Every variant, width and dtype, with values and without, ours in turn with CSR."""
    _harness.print_head("spmm by tiles against spmm by CSR, graphs with structure", COLUMNS)
    rows = []
    for variant in _variants(options):
        for row in _rows_of(variant, options):
            print_row(row, COLUMNS)
            rows.append(row)
        _harness.free()
    return _harness.keep("tcgnn", "structured", rows, judge, cuda=True, folder=options.out)


def _variants(options: argparse.Namespace) -> Iterator[Variant]:
    """Generated graphs by ranges of communities, planted and found; real ones, stored and found.

    The order of communities of a batch is that of the single graph, applied before it is copied;
    its seconds are those of the single graph, scaled by the number of copies: an upper bound, since
    a small graph leaves the device idle.
    """
    for name, source in sources(options, _graphs.TABLE, REAL):
        graph = _graphs.load(source)
        generated = source in _graphs.RECIPES
        copies = 1 if generated else -(-LEAST_ENTRIES // max(graph.nnz, 1))
        facts: dict[str, Any] = {"copies": copies}
        if generated:
            yield Variant(GROUPS[0], name, _graphs.load(source, shuffle=False), facts)
        else:
            yield Variant(GROUPS[2], name, batch(graph, copies), facts)
        order, seconds = communities(graph)
        facts = facts | {"order_s": seconds, "order_scaled_s": seconds * copies}
        ordered = batch(order.apply(graph).sorted_indices(), copies)
        yield Variant(GROUPS[1 if generated else 3], name, ordered, facts)


def batch(graph: CSR, copies: int) -> CSR:
    """So many copies of a graph as the blocks of a diagonal, without values."""
    xp, dtype = namespace(graph.indptr), graph.index_dtype
    at = xp.arange(copies, dtype=dtype)[:, None]
    starts = (graph.indptr[:-1] + at * graph.nnz).ravel()
    end = xp.full(1, copies * graph.nnz, dtype)
    indices = (graph.indices + at * graph.n_cols).ravel()
    shape = (copies * graph.n_rows, copies * graph.n_cols)
    return CSR(xp.concatenate([starts, end]), indices, shape=shape, validate="cheap")


def _rows_of(variant: Variant, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    tiles, name = tiles_of(variant.graph), f"{variant.group}: {variant.name}"
    common = {"group": variant.group, "graph": variant.name} | variant.facts
    for feat in options.widths or WIDTHS:
        for dtype in options.dtypes or tcgnn.DTYPES:
            with_values = Operands.of(variant.graph, feat, STORAGE[dtype])
            for weighted in KINDS:
                row = case_of(name, feat, dtype, weighted=weighted) | common
                operands = with_values if weighted else without_values(with_values)
                yield row | _cell(Tiled.of(tiles, operands, dtype), quick=options.quick)


def _cell(ours: Tiled, *, quick: bool) -> dict[str, Any]:
    row = ours.checked()
    if "wrong" in row:
        return row
    row["bias"] = ours.bias()
    (ms, csr_ms), runs = _harness.paced([ours, ours.csr], cuda=True, quick=quick)
    return row | {"ms": ms, "csr_ms": csr_ms, "over_csr": csr_ms / ms, "runs": runs}


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """The geomean and the error of each dtype; to know, the geomean of some and the worst case.

    What tensor cores round shows here: in ``table`` they take next to nothing.
    """
    found = []
    for dtype in tcgnn.DTYPES:
        held = [row for row in rows if row["dtype"] == dtype]
        if not held:
            continue
        name, worst = f"{dtype} over spmm(CSR)", min(held, key=lambda row: row["over_csr"])
        mean = geomean(row["over_csr"] for row in held)
        found.append(Target(f"{name}, geomean of {len(held)}", mean, OVER_CSR))
        found.append(Target(f"{name}, worst ({worst['case']})", worst["over_csr"]))
        found += errors(dtype, held)
        ratios = [row["over_csr"] for row in held if row["share"]]
        if ratios:
            found.append(Target(f"{name}, by tiles, {len(ratios)}", geomean(ratios)))
        parts: dict[str, tuple[str, Any]]
        parts = {"with values": ("weighted", True), "without values": ("weighted", False)}
        parts |= {group: ("group", group) for group in GROUPS}
        for part, (key, value) in parts.items():
            ratios = [row["over_csr"] for row in held if row[key] == value]
            if ratios:
                found.append(Target(f"{name}, {part}, {len(ratios)}", geomean(ratios)))
    return found
