"""Products by tiles on tensor cores: SpMM and SDDMM of SGT.

Sections of ``tcgnn``; ``tf32`` is float32 storage with ``precision="tf32"``:

- ``table``: SpMM by tiles, with values and without, against cuSPARSE's best (of float16 for both
  2-byte dtypes; it needs values and gets ones) and this library's SpMM by CSR;
- ``sddmm``: SDDMM by tiles against cuSPARSE and CSR.

Every product is checked in float64 with the operands as they are stored, before any rounding to
TF32.  On the CPU, which has no tensor cores, the same runs beside torch.sparse and PyG.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from sparsefmt import CSR, SGT
from sparsefmt.ops import sddmm, spmm
from sparsefmt.ops.tiles import costs as tile_costs
from sparsefmt.ops.tiles.kernels import MMA_TILE

from . import _baselines, _graphs, _harness, _oracle
from ._harness import Call
from ._table import Benchmark, Limit, Row, Section, both, some_of
from .matmul import WIDE, Operands, of_dtype

#: What features and values are stored in.
STORAGE = {"tf32": "float32", "float16": "float16", "bfloat16": "bfloat16"}
#: What the rounding of float32 costs a sum on matrix units, with values and without.
TF32 = {True: 2.0**-15, False: 2.0**-17}
#: Least geomean over cuSPARSE, and its worst case; at worst over SpMM by CSR.
OVER_CUSPARSE: dict[str, tuple[float, float | None]] = {
    "tf32": (1.35, 0.95),
    "float16": (2.0, None),
    "bfloat16": (2.0, None),
}
OVER_CSR = 0.95
ERRORS = {"tf32": 4e-4, "float16": 1e-3}


def precision(dtype: str) -> dict[str, Any]:
    """Return the argument that asks for TF32 where ``dtype`` is that."""
    return {"precision": "tf32"} if dtype == "tf32" else {}


def limit_of(dtype: str, share: float, *, weighted: bool) -> float:
    """Return the largest error of a right sum, of whose entries matrix units take that share.

    A row that both take a part of is rounded twice: what CUDA cores stored is read and added to.
    Each rounding costs half a unit in the last place, and all terms are positive.
    """
    if dtype == "tf32":
        return _oracle.LIMITS["float32"] + (TF32[weighted] if share else 0.0)
    again = _oracle.ROUNDING[STORAGE[dtype]] if 0 < share < 1 else 0.0
    return _oracle.LIMITS[dtype] + again


def share_of(tiles: SGT, op: str, dtype: str, feat: int, *, weighted: bool = False) -> float:
    """Return the share of entries that matrix units take, by the costs of such a product."""
    itemsize = _graphs.dtype(STORAGE[dtype]).itemsize
    costs = tile_costs.measured(op, itemsize, weighted, feat)
    return 0.0 if costs is None else tiles.split(costs).share


def table(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every graph, width, dtype and kind: ours beside theirs and our CSR."""
    for name, graph in _graphs.loaded(options, _graphs.TABLE):
        tiles = graph.tosgt(MMA_TILE)
        for feat in options.widths or (WIDE[:1] if options.quick else WIDE):
            for dtype in options.dtypes or STORAGE:
                ours = Operands.of(graph, feat, STORAGE[dtype])
                half = "float16" if options.cuda else "float32"  # torch.sparse has no half
                theirs = ours if dtype == "tf32" else Operands.of(graph, feat, half)
                for weighted in (True, False):
                    case = f"{name} {feat} {dtype}" + " unweighted" * (not weighted)
                    row: Row = {"case": case, "graph": name, "feat": feat, "dtype": dtype}
                    row["kind"] = "weighted" if weighted else "unweighted"
                    operands = ours if weighted else replace(ours, A=ours.A.with_data(None))
                    share = share_of(tiles, "spmm", dtype, feat, weighted=weighted)
                    row |= {"share": share if options.cuda else 0.0}
                    product = (theirs if weighted else theirs.with_ones()).theirs()
                    yield row | _cell(tiles, operands, row, product, options)


def _cell(
    tiles: SGT, csr: Operands, facts: Row, theirs: tuple[str, Call], options: argparse.Namespace
) -> Row:
    """Check both of ours, and time them in turn with theirs."""
    dtype, weighted = facts["dtype"], csr.A.data is not None
    S = tiles.with_data(csr.A.data)
    ours = partial(spmm, S, csr.X, out=csr.Y, **precision(dtype))
    row = csr.checked()
    if "wrong" in row:
        return {"wrong": f"spmm(CSR): {row['wrong']}"}
    limit = limit_of(dtype, facts["share"], weighted=weighted)
    row = _oracle.judged(csr.checked(ours)["error"], limit)
    if "wrong" in row:
        return row
    row["algorithm"], product = theirs
    calls = {"ms": ours, "csr_ms": csr, "cusparse_ms" if options.cuda else "torch_ms": product}
    row |= _harness.timed(calls, cuda=options.cuda, quick=options.quick, cold=True)
    row["gb_s"] = csr.A.nnz * csr.X.shape[1] * csr.X.itemsize / row["ms"] / 1e6
    return row


def sddmm_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every graph, width and dtype; cuSPARSE in float32."""
    for name, A in _graphs.loaded(options, _graphs.TABLE):
        tiles = A.tosgt(MMA_TILE)
        for feat in options.widths or (32, 128):
            for dtype in options.dtypes or ("tf32", "float16"):
                row: Row = {"case": f"{name} {feat} {dtype}", "graph": name, "dtype": dtype}
                if options.cuda:
                    row["share"] = share_of(tiles, "sddmm", dtype, feat)
                yield row | _sddmm_cell(A, tiles, feat, dtype, options)


def _sddmm_cell(A: CSR, tiles: SGT, feat: int, dtype: str, options: argparse.Namespace) -> Row:
    def features(dtype: str) -> Any:
        shapes = (A.n_rows, feat), (A.n_cols, feat)
        return [_graphs.uniform(A.indptr, shape, dtype, seed=i) for i, shape in enumerate(shapes)]

    wide, own = features("float32"), features(STORAGE[dtype])
    ours, by_csr = partial(sddmm, tiles, *own, **precision(dtype)), partial(sddmm, A, *own)
    with _harness.poisoned(cuda=options.cuda):
        errors = [_oracle.sddmm_error(A, *own, call()) for call in (ours, by_csr)]
    bits = "float16" if dtype == "tf32" else dtype  # TF32 rounds both factors to as many
    row = {"error": errors[0]} | _oracle.refused(_oracle.complaint(errors[1], own[0].dtype))
    row |= _oracle.refused(_oracle.complaint(errors[0], _graphs.dtype(bits)))
    if "wrong" in row:
        return row
    calls = {"ms": ours, "csr_ms": by_csr}
    theirs = "cusparse_ms" if options.cuda else "pyg_ms"
    row["algorithm"], calls[theirs] = _baselines.best_sddmm(A, *wide)
    return row | _harness.timed(calls, cuda=options.cuda, quick=options.quick)


def _is_wide(row: Row) -> bool:
    return row["feat"] in WIDE


SECTIONS = {
    "table": Section(
        table,
        (
            *chain(
                *(
                    both("over_cusparse", *least, **of_dtype(dtype, WIDE))
                    for dtype, least in OVER_CUSPARSE.items()
                )
            ),
            *both("over_csr", None, OVER_CSR, by=("dtype",), where=_is_wide),
            Limit("over_cusparse", "mean", by=("dtype", "kind")),
            Limit("over_csr", "mean", by=("dtype", "kind")),
            Limit("error", most=lambda row: ERRORS.get(row["dtype"]), by=("dtype",)),
        ),
    ),
    "sddmm": Section(
        sddmm_rows,
        (
            *both("over_cusparse", 2.0, by=("dtype",)),
            *both("over_csr", by=("dtype",)),
            Limit("error", high=True, by=("dtype",)),
        ),
    ),
}
BENCHMARKS = {"tcgnn": Benchmark("tcgnn", __doc__, SECTIONS, {"dtypes": some_of(STORAGE)})}
