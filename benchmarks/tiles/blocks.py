"""SpMM with a matrix of dense 16 x 16 blocks beside torch's BSR, cuSPARSE and a dense product."""

import argparse
import subprocess
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from sparsefmt import CSR
from sparsefmt.ops.tiles.kernels import MMA_TILE

from .. import _baselines, _graphs, _harness, _oracle
from .._baselines import Call
from .._harness import Target
from ..matmul.table import Operands
from . import tcgnn
from .cases import STORAGE, Tiled, print_row

#: Rows and columns, sides of a block, and features.
N, SIDE, FEAT = 4096, 16, 16
WINDOWS = N // SIDE
#: Dense blocks of every window: 87.5 % to 99.6 % of all cells are empty.
BLOCKS = (32, 16, 8, 4, 2, 1)
DTYPES = ("tf32", "float16")
TILES = tuple(dict.fromkeys([(SIDE, SIDE), MMA_TILE]))
LEAST = 1.0  #: over each of torch's BSR and cuSPARSE
COLUMNS = {
    "case": "<12",
    "sparsity": "8.3f",
    "ms": "8.4f",
    "tile": "<7",
    "share": "6.3f",
    "bsr_ms": "8.4f",
    "bsr": "<9",
    "cusparse_ms": "11.4f",
    "algorithm": "<9",
    "dense_ms": "8.4f",
    "over_bsr": "8.2f",
    "over_cusparse": "13.2f",
    "over_dense": "10.2f",
    "error": "8.1e",
}


@dataclass
class Blocks:
    """Blocks at random distinct places of every window, with values in [0, 1); on the host."""

    places: Any  #: (WINDOWS, count) block columns, ascending
    values: Any  #: (WINDOWS, count, SIDE, SIDE)

    @classmethod
    def of(cls, count: int) -> "Blocks":
        """So many in each window."""
        rng = np.random.default_rng(count)
        every = np.tile(np.arange(WINDOWS, dtype=np.int32), (WINDOWS, 1))
        places = np.sort(rng.permuted(every, axis=1)[:, :count], axis=1)
        return cls(places, rng.random((WINDOWS, count, SIDE, SIDE), dtype=np.float32))

    @property
    def count(self) -> int:
        """Blocks of a window."""
        return int(self.places.shape[1])

    def csr(self) -> CSR:
        """As CSR, columns ascending."""
        columns = self.places[:, None, :, None] * SIDE + np.arange(SIDE, dtype=np.int32)
        shape = (WINDOWS, SIDE, self.count, SIDE)
        indices = np.ascontiguousarray(np.broadcast_to(columns, shape)).ravel()
        data = self.values.transpose(0, 2, 1, 3).ravel()
        indptr = np.arange(N + 1, dtype=np.int32) * (self.count * SIDE)
        return CSR(indptr, indices, data, shape=(N, N))

    def bsr(self, dtype: torch.dtype) -> torch.Tensor:
        """As torch's BSR, on the GPU."""
        starts = torch.arange(WINDOWS + 1, dtype=torch.int32) * self.count
        places = torch.from_numpy(self.places.ravel())
        values = torch.from_numpy(self.values.reshape(-1, SIDE, SIDE))
        starts, places, values = starts.cuda(), places.cuda(), values.to(dtype).cuda()
        return torch.sparse_bsr_tensor(starts, places, values, size=(N, N))

    def operands(self, dtype: str) -> Operands:
        """For cuSPARSE and our CSR."""
        A = self.csr().to("cuda").astype(_graphs.dtype(dtype))
        X = _graphs.uniform(A.indptr, (N, FEAT), dtype)
        return Operands(A, X, *(_graphs.uniform(A.indptr, X.shape, dtype) for _ in range(2)))


def blocks(options: argparse.Namespace) -> bool:
    """Every number of blocks and dtype; torch's products in TF32 where ours are."""
    title = f"spmm of {N} x {N} in dense blocks of {SIDE} x {SIDE}, width {FEAT}"
    dtypes = [dtype for dtype in options.dtypes or DTYPES if dtype in DTYPES]
    if not dtypes:
        print(f"\n== {title}: skipped, only {' and '.join(DTYPES)} are measured")
        return True
    _harness.print_head(title, COLUMNS)
    rows = []
    torch.set_float32_matmul_precision("high")
    for count in BLOCKS:
        matrix = Blocks.of(count)
        for dtype in dtypes:
            row = {"case": f"{count} {dtype}", "blocks": count, "dtype": dtype}
            row["sparsity"] = 1 - count / WINDOWS
            rows.append(row | _cell(matrix, dtype, quick=options.quick))
            print_row(rows[-1], COLUMNS)
    torch.set_float32_matmul_precision("highest")
    return _harness.keep("tcgnn", "blocks", rows, judge, cuda=True, folder=options.out)


def _cell(matrix: Blocks, dtype: str, *, quick: bool) -> dict[str, Any]:
    """Ours by each tile in turn with the others; the best tile counts."""
    wide = matrix.operands("float32")
    own = wide if dtype == "tf32" else matrix.operands(STORAGE[dtype])
    ours = {f"{tile[0]}x{tile[1]}": _tiled(own, tile, dtype) for tile in TILES}
    row: dict[str, Any] = {"error": 0.0}
    for product in ours.values():
        found = product.checked()
        if "wrong" in found:
            return found
        row["error"] = max(row["error"], found["error"])
    row["algorithm"], theirs = wide.baseline()
    functions: dict[str, Call] = {**ours, "cusparse_ms": theirs, "dense_ms": _dense(matrix, own)}
    found, bsr = _bsr(matrix, own, wide)
    functions |= {"bsr_ms": bsr} if bsr is not None else {}
    times, row["runs"] = _harness.paced([*functions.values()], cuda=True, quick=quick)
    row |= found | dict(zip(functions, times, strict=True))
    by_tile = {tile: row.pop(tile) for tile in ours}
    tile = min(by_tile, key=lambda tile: by_tile[tile])
    row |= {"tile": tile, "share": ours[tile].share, "ms": by_tile[tile], "ms_by_tile": by_tile}
    for name in ("bsr", "cusparse", "dense"):
        if f"{name}_ms" in row:
            row[f"over_{name}"] = row[f"{name}_ms"] / row["ms"]
    return row


def _tiled(own: Operands, tile: tuple[int, int], dtype: str) -> Tiled:
    return Tiled.of(own.A.with_data(None).tosgt(tile), own, dtype)


def _dense(matrix: Blocks, own: Operands) -> Call:
    x = _baselines.tensor(own.X)
    left = torch.from_numpy(matrix.csr().toarray()).to(x)
    return lambda: left @ x


def _bsr(matrix: Blocks, own: Operands, wide: Operands) -> tuple[dict[str, Any], Call | None]:
    """BSR of torch in our dtype, else in float32, if either runs here; and what to tell of it."""
    refused = {}
    for operands in (own,) if own is wide else (own, wide):
        x = _baselines.tensor(operands.X)
        name = str(x.dtype).removeprefix("torch.")
        try:
            call = _baselines.guarded(partial(_bsr_product, matrix, x))
        except (_baselines.Missing, subprocess.SubprocessError) as reason:  # its compiler's
            refused[f"bsr_{name}"] = str(reason)
            continue
        result = _baselines.as_cupy(call())
        error = _oracle.spmm_error(operands.A, operands.X, result)
        return refused | {"bsr": name, "bsr_error": error}, call
    return refused, None


def _bsr_product(matrix: Blocks, x: torch.Tensor) -> Call:
    left = matrix.bsr(x.dtype)
    return lambda: left @ x


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """The lowest ratio to BSR and to cuSPARSE of each dtype; to the dense product, to know."""
    found = []
    limits = {"over_bsr": LEAST, "over_cusparse": LEAST, "over_dense": None}
    for dtype in tcgnn.DTYPES:
        for key, limit in limits.items():
            held = [row for row in rows if row["dtype"] == dtype and key in row]
            if held:
                worst = min(held, key=lambda row: row[key])
                name = f"{dtype} {key.replace('_', ' ')}, worst ({worst['blocks']} blocks)"
                found.append(Target(name, worst[key], limit))
    return found
