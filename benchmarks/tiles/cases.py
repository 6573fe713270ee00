"""What the sections of ``tcgnn`` share: graphs by name, and a product by tiles, checked."""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sparsefmt import CSR, SGT
from sparsefmt.formats.arrays import Array, namespace
from sparsefmt.ops import Costs, spmm
from sparsefmt.ops.tiles import costs as tile_costs
from sparsefmt.ops.tiles.kernels import MMA_TILE

from .. import _graphs, _harness, _oracle
from ..matmul.table import Operands

#: What features and values are stored in.
STORAGE = {"tf32": "float32", "float16": "float16", "bfloat16": "bfloat16"}
#: What the rounding of float32 costs a sum on matrix units, with values and without.
TF32 = {True: 2.0**-15, False: 2.0**-17}

#: With edge values and without, as rows of results tell them apart.
KINDS = (True, False)

SIGNED_SOURCE = (
    _oracle.SOURCE
    + r"""
// As spmm_errors, of a sum, with its sign; NaN where the exact result is zero. data may be null.
template <typename T, typename Index>
__global__ void signed_errors(const Index* indptr, const Index* indices, const T* data, const T* X,
                              const T* Y, const long long* rows, double* errors, int feat) {
    const long long row = rows[blockIdx.x];
    const long long start = indptr[row], stop = indptr[row + 1];
    for (long long f = threadIdx.x; f < feat; f += blockDim.x) {
        double exact = 0;
#pragma unroll 8
        for (long long e = start; e < stop; ++e)
            exact += (data ? wide(data[e]) : 1) * wide(X[(long long)indices[e] * feat + f]);
        errors[blockIdx.x * (long long)feat + f] = (wide(Y[row * feat + f]) - exact) / exact;
    }
}
"""
)


def sources(
    options: argparse.Namespace, generated: tuple[str, ...], real: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    """Names of graphs, with what ``_graphs.load`` takes for each: those asked for, else these.

    Real graphs whose files are missing are skipped with a line; one that is asked for and not there
    is an error before any is measured.
    """
    yield from [_source(name, options.data) for name in options.graphs or generated]
    for name in () if options.graphs else real:
        path = options.data / f"{name}.npz"
        if path.exists():
            yield name, str(path)
        else:
            print(f"  {name} skipped: there is no {path}", flush=True)


def _source(name: str, folder: Path) -> tuple[str, str]:
    if name in _graphs.RECIPES:
        return name, name
    for path in (Path(name), folder / f"{name}.npz"):
        if name and path.exists():
            return path.stem, str(path)
    known = ", ".join(_graphs.RECIPES)
    raise SystemExit(f"{name!r} is no file, here or in {folder}, nor one of {known}")


def precision(dtype: str) -> dict[str, Any]:
    """The argument that asks for TF32 where ``dtype`` is that."""
    return {"precision": "tf32"} if dtype == "tf32" else {}


def limit_of(dtype: str, share: float = 0.0, *, weighted: bool = True) -> float:
    """The largest relative error of a right sum, of whose entries matrix units take that share.

    A row that both take a part of is rounded twice: what CUDA cores stored is read and added to.
    Each rounding costs half a unit in the last place, and all terms are positive.
    """
    if dtype == "tf32":
        return _oracle.LIMITS["float32"] + (TF32[weighted] if share else 0.0)
    again = _oracle.ROUNDING[STORAGE[dtype]] if 0 < share < 1 else 0.0
    return _oracle.LIMITS[dtype] + again


def complaint(error: float, dtype: str, share: float = 0.0, *, weighted: bool = True) -> str | None:
    """Why a result by tiles of this error is refused; None if it is right."""
    limit = limit_of(dtype, share, weighted=weighted)
    return None if error <= limit else f"relative error {error:.3g}, at most {limit:.3g} is right"


def share_of(tiles: SGT, op: str, dtype: str, feat: int, *, weighted: bool = False) -> float:
    """The share of entries that matrix units take in such a product, by the costs of its kind."""
    itemsize = _graphs.dtype(STORAGE[dtype]).itemsize
    costs = tile_costs.measured(op, itemsize, weighted, feat)
    return 0.0 if costs is None else tiles.split(costs).share


def print_row(row: dict[str, Any], columns: dict[str, str]) -> None:
    """As ``_harness`` does, with the share cut to three digits: only all entries print as 1."""
    share = row.get("share")
    cut = {} if share is None else {"share": math.floor(share * 1000) / 1000}
    _harness.print_row(row | cut, columns)


def case_of(name: str, feat: int, dtype: str, *, weighted: bool) -> dict[str, Any]:
    """What a row is known by; those with values have the plain name."""
    case = f"{name} {feat} {dtype}" + ("" if weighted else " unweighted")
    return {"case": case, "feat": feat, "dtype": dtype, "weighted": weighted}


def tiles_of(graph: CSR) -> SGT:
    """Tiles of the best shape, without values."""
    return graph.with_data(None).tosgt(MMA_TILE)


def without_values(operands: Operands) -> Operands:
    """The same features and room for results, with the structure alone."""
    return replace(operands, A=operands.A.with_data(None))


def with_ones(operands: Operands) -> Operands:
    """The same for those who have no product without values."""
    ones = namespace(operands.X).ones(operands.A.nnz, operands.X.dtype)
    return replace(operands, A=operands.A.with_data(ones))


@dataclass
class Tiled:
    """A product by tiles, beside that of the CSR with the same values and features."""

    S: SGT
    csr: Operands
    Y: Array
    dtype: str  #: of ``STORAGE``
    costs: Costs | None = None  #: instead of those of its kind

    @classmethod
    def of(
        cls, structure: SGT, csr: Operands, dtype: str, *, costs: Costs | None = None
    ) -> "Tiled":
        """The tiles of ``csr.A``; what is kept of their structure serves all its values."""
        S, Y = structure.with_data(csr.A.data), namespace(csr.Y).empty_like(csr.Y)
        return cls(S, csr, Y, dtype, costs)

    def __call__(self) -> Array:
        """The product by tiles, into ``Y``."""
        return spmm(self.S, self.csr.X, out=self.Y, costs=self.costs, **precision(self.dtype))

    @property
    def share(self) -> float:
        """Of the entries, what matrix units take in this product."""
        if self.costs is not None:
            return self.S.split(self.costs).share
        weighted, feat = self.S.data is not None, self.csr.X.shape[1]
        return share_of(self.S, "spmm", self.dtype, feat, weighted=weighted)

    def checked(self) -> dict[str, Any]:
        """The share and the error by tiles, from a poisoned output; what is wrong, of CSR too."""
        _harness.poison(self.Y)
        self()
        error = _oracle.spmm_error(self.csr.A, self.csr.X, self.Y)
        share = self.share
        wrong = complaint(error, self.dtype, share, weighted=self.S.data is not None)
        if wrong is None:
            wrong = _oracle.complaint(self.csr.error(), self.csr.X.dtype)
            wrong = wrong and f"spmm(CSR): {wrong}"
        return {"share": share, "error": error} | ({"wrong": wrong} if wrong else {})

    def bias(self) -> float:
        """Mean relative error, with its sign, of the last result in sampled rows."""
        import cupy

        A, X = self.csr.A, self.csr.X
        rows, feat = _oracle.sampled_rows(A), X.shape[1]
        errors = cupy.full((len(rows), feat), np.nan)
        kernel = _signed(_oracle.expression("signed_errors", X.dtype, A.index_dtype))
        pointers = (_oracle.pointer(A.data), X.data.ptr, self.Y.data.ptr)
        arrays = (A.indptr, A.indices, *pointers, rows, errors)
        kernel((len(rows),), (min(feat, 256),), (*arrays, np.int32(feat)))
        return float(cupy.nanmean(errors))


@cache
def _signed(name: str) -> Any:
    import cupy

    options = ("-std=c++17",)
    module = cupy.RawModule(code=SIGNED_SOURCE, options=options, name_expressions=(name,))
    return module.get_function(name)
