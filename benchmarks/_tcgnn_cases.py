"""What the sections of ``tcgnn`` share: graphs by name, and a product by tiles, checked."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sparsefmt import CSR, SGT
from sparsefmt._arrays import Array, namespace
from sparsefmt.ops import spmm
from sparsefmt.ops.tiles import MMA_TILE

from . import _graphs, _harness, _oracle
from ._spmm_table import Operands

#: What features and values are stored in.
STORAGE = {"tf32": "float32", "float16": "float16", "bfloat16": "bfloat16"}
#: Whose limit of right results holds: TF32 rounds two operands to as many bits as float16 has.
LIMIT_OF = {"tf32": "float16", "float16": "float16", "bfloat16": "bfloat16"}

SIGNED_SOURCE = (
    _oracle.SOURCE
    + r"""
// As spmm_errors, of a weighted sum, with its sign; NaN where the exact result is zero.
template <typename T, typename Index>
__global__ void signed_errors(const Index* indptr, const Index* indices, const T* data, const T* X,
                              const T* Y, const long long* rows, double* errors, int feat) {
    const long long row = rows[blockIdx.x];
    const long long start = indptr[row], stop = indptr[row + 1];
    for (long long f = threadIdx.x; f < feat; f += blockDim.x) {
        double exact = 0;
#pragma unroll 8
        for (long long e = start; e < stop; ++e)
            exact += wide(data[e]) * wide(X[(long long)indices[e] * feat + f]);
        errors[blockIdx.x * (long long)feat + f] = (wide(Y[row * feat + f]) - exact) / exact;
    }
}
"""
)


def sources(
    options: argparse.Namespace, generated: tuple[str, ...], real: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    """Names of graphs, with what ``_graphs.load`` takes for each: those asked for, else these.

    Real graphs whose files are missing are skipped with a line.
    """
    for name in options.graphs or generated:
        stored = options.data / f"{name}.npz"
        here = name in _graphs.RECIPES or Path(name).exists() or not stored.exists()
        yield Path(name).stem, name if here else str(stored)
    for name in () if options.graphs else real:
        path = options.data / f"{name}.npz"
        if path.exists():
            yield name, str(path)
        else:
            print(f"  {name} skipped: there is no {path}", flush=True)


def precision(dtype: str) -> dict[str, str]:
    """The argument that asks for TF32 where ``dtype`` is that."""
    return {"precision": "tf32"} if dtype == "tf32" else {}


def complaint(error: float, dtype: str) -> str | None:
    """Why a result by tiles of this error is refused; None if it is right."""
    return _oracle.complaint(error, _graphs.dtype(LIMIT_OF[dtype]))


def tiles_of(graph: CSR) -> tuple[SGT, float]:
    """Tiles of the best shape, split, and the share of entries that go to matrix units."""
    tiles = graph.with_data(None).tosgt(MMA_TILE)
    return tiles, tiles.split().share


@dataclass
class Tiled:
    """A product by tiles, beside that of the CSR with the same values and features."""

    S: SGT
    csr: Operands
    Y: Array
    dtype: str  #: of ``STORAGE``

    @classmethod
    def of(cls, structure: SGT, csr: Operands, dtype: str) -> "Tiled":
        """The tiles of ``csr.A``; what is kept of their structure serves all its values."""
        return cls(structure.with_data(csr.A.data), csr, namespace(csr.Y).empty_like(csr.Y), dtype)

    def __call__(self) -> Array:
        return spmm(self.S, self.csr.X, out=self.Y, **precision(self.dtype))

    def checked(self) -> dict[str, Any]:
        """The error by tiles, from a poisoned output; and what is wrong, of CSR too."""
        _harness.poison(self.Y)
        self()
        error = _oracle.spmm_error(self.csr.A, self.csr.X, self.Y)
        wrong = complaint(error, self.dtype)
        if wrong is None:
            wrong = _oracle.complaint(self.csr.error(), self.csr.X.dtype)
            wrong = wrong and f"spmm(CSR): {wrong}"
        return {"error": error} | ({"wrong": wrong} if wrong else {})

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
