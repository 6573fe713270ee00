"""Bytes that SpMM, SpGEMM and SSpMM move: counted, and launches for a profiler to measure them.

For E entries of int32 and float32, n vertices, F features, float32, k of them kept (F up to 256,
so that a column is a byte):

- SpMM ``E (8 + 4 F) + 4 n F``: an entry reads its column and value, and a row of features;
- SpGEMM ``E (8 + 5 k) + 4 n F``: the k values and columns of a row instead;
- SSpMM ``E (12 + 5 k) + 4 n F``: an entry reads its row and column in one word, its number and its
  value; every row of the gradient is read once, and k values are added at k columns, fewer where
  entries of one column meet on chip;
- the same by panels of 64 features, deterministic, ``E (12 p + 4 F) + 8 n F + 5 n k p``: for each
  of the ``p = F / 64`` an entry reads its column, number in the other order and value, and the
  dense product is written, and read where a place is.

Every operand counts as often as it is asked for.  Caches answer part of that; what they are asked
for and what reaches the memory is measured by Nsight Compute::

    ncu --profile-from-start off --clock-control none \
        --metrics dram__bytes.sum,lts__t_bytes.sum \
        python -m benchmarks maxk --sections profile --k 32
"""

import argparse
from pathlib import Path
from typing import Any

from sparsefmt import reorder

from .. import _graphs, _harness
from .._harness import Target
from .products import FEAT, KS, Operands

NAMED_K = 32  #: of the figures that are told
GB = 1e9
PANEL = 64  #: features
COLUMNS = {
    "case": "<18",
    "spmm_gb": "9.3f",
    "spgemm_gb": "9.3f",
    "sspmm_gb": "9.3f",
    "panels_gb": "9.3f",
    "spgemm_share": "12.3f",
    "sspmm_share": "11.3f",
    "panels_share": "12.3f",
}


def traffic(options: argparse.Namespace) -> bool:
    """Every k; the shares are of what SpMM moves."""
    cuda = options.device == "cuda"
    _harness.print_head(f"bytes counted, width {FEAT}, float32", COLUMNS)
    rows = []
    for name in options.graphs or ("reddit" if cuda else "cpu",):
        graph = _graphs.load(name, device=options.device)
        for k in options.k or KS:
            moved = counted(graph.nnz, graph.n_rows, k)
            row = {"case": f"{Path(name).stem} k={k}", "k": k}
            row |= {f"{way}_gb": bytes / GB for way, bytes in moved.items()}
            row |= {f"{way}_share": bytes / moved["spmm"] for way, bytes in moved.items()}
            _harness.print_row(row, COLUMNS)
            rows.append(row)
    return _harness.keep("maxk", "traffic", rows, judge, cuda=cuda, folder=options.out)


def counted(entries: int, n: int, k: int, feat: int = FEAT) -> dict[str, int]:
    """Bytes of each operation, by the formulas above."""
    panels, product = -(-feat // PANEL), 4 * n * feat
    return {
        "spmm": entries * (8 + 4 * feat) + product,
        "spgemm": entries * (8 + 5 * k) + product,
        "sspmm": entries * (12 + 5 * k) + product,
        "panels": entries * (12 * panels + 4 * feat) + 2 * product + 5 * n * k * panels,
    }


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """The shares at one k, to know."""
    return [
        Target(f"{way} {row['case']}, share of SpMM's bytes", row[f"{way}_share"])
        for row in rows
        if row["k"] == NAMED_K
        for way in ("spgemm", "sspmm", "panels")
    ]


def profile(options: argparse.Namespace) -> bool:
    """SpMM and each product once, where a profiler sees them; at ``NAMED_K`` by default."""
    from cupyx.profiler import profile as seen

    for name in options.graphs or ("reddit",):
        operands = Operands.of(_graphs.load(name))
        operands.order = reorder.community_order(operands.A)
        for k in options.k or (NAMED_K,):
            calls = {"spmm": operands.dense, **operands.products(operands.features(k))}
            for call in calls.values():  # compiles
                call()
            with seen():
                for call in calls.values():
                    call()
            print(f"{Path(name).stem} k={k}: {', '.join(calls)}")
    return True
