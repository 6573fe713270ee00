"""CBSR: a row-balanced sparse feature matrix (MaxK-GNN)."""

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ..errors import DtypeError, ShapeError, UnsupportedError
from . import checks
from .arrays import Array, DType
from .base import Format, FormatName, Level

if TYPE_CHECKING:
    from .compressed import CSC


def column_dtype(n_cols: int) -> np.dtype[Any]:
    """Choose the dtype of a CBSR's columns: uint8 to 256 columns, uint16 to 65 536, else int32."""
    return np.dtype(np.uint8 if n_cols <= 256 else np.uint16 if n_cols <= 65536 else np.int32)


@dataclass(frozen=True, eq=False, repr=False)
class CBSR(Format):
    """Compressed balanced sparse rows: exactly ``k`` entries in every row (MaxK-GNN, section 3.2).

    Parameters
    ----------
    indices : array, shape (n_rows, k)
        Columns, ascending and distinct in a row; uint8 to 256 columns, uint16 to 65 536, else
        int32.
    data : array, shape (n_rows, k)
        float16, bfloat16, float32 or float64.
    shape : (n_rows, n_cols)
    validate : "full" or "cheap"
        How much to check, see ``check``.

    Raises
    ------
    FormatError, ShapeError, DtypeError, DeviceError, IndexRangeError
        If the arrays do not form such a matrix.
    """

    indices: Array  #: (n_rows, k) columns, ascending and distinct in a row
    data: Array  #: (n_rows, k) values
    shape: tuple[int, int] = field(kw_only=True)
    validate: InitVar[Level] = field(default="full", kw_only=True)

    format: ClassVar[FormatName] = "cbsr"
    _array_fields: ClassVar[tuple[str, ...]] = ("indices", "data")

    @property
    def k(self) -> int:
        """Return the number of stored entries in every row."""
        return int(self.indices.shape[1])

    @property
    def nnz(self) -> int:
        """Return the number of stored entries: ``n_rows * k``."""
        return int(self.indices.size)

    @property
    def T(self) -> "CSC":
        """Return the transpose as CSC (columns are not balanced, so it is no CBSR)."""
        return self.tocsr().T

    def astype(self, dtype: DType = None, *, index_dtype: DType = None) -> Self:
        """Convert the values to another dtype; that of the columns follows from their number.

        Raises
        ------
        UnsupportedError
            If ``index_dtype`` is another one.
        DtypeError
            If one of them is no dtype, or values cannot have it.
        """
        wanted = None if index_dtype is None else checks.any_dtype("index_dtype", index_dtype)
        if wanted not in (None, self.index_dtype):
            raise UnsupportedError(
                f"index_dtype is {index_dtype!r} but a CBSR of {self.n_cols} columns stores them "
                f"as {self.index_dtype}: use .tocsr().astype(index_dtype=...)."
            )
        return super().astype(dtype)

    def _check_cheap(self) -> None:
        if self.indices.ndim != 2 or self.indices.shape[0] != self.n_rows:
            raise ShapeError(
                f"indices has shape {self.indices.shape}: give (n_rows, k) with "
                f"n_rows == {self.n_rows}."
            )
        if not 1 <= self.k <= self.n_cols:
            raise ShapeError(
                f"k is {self.k} (indices.shape[1]) but a row has {self.n_cols} columns: "
                "k lies between 1 and n_cols."
            )
        checks.sizes_fit((0, self.n_cols), 0, np.dtype(np.int32))
        expected = column_dtype(self.n_cols)
        if self.indices.dtype != expected:
            raise DtypeError(
                f"indices.dtype is {self.indices.dtype} but {self.n_cols} columns are stored as "
                f"{expected}: cast with .astype()."
            )
        if self.data is None:
            raise DtypeError(
                "data is None: a CBSR holds features, which always have values, give them."
            )
        checks.values(self.data, self.indices.shape, like=self.indices)

    def _check_full(self) -> None:
        checks.balanced(self.indices, self.n_cols)
