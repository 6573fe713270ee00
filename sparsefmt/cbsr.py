"""CBSR: a row-balanced sparse feature matrix (MaxK-GNN)."""

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from . import _validate
from ._arrays import Array, is_cupy, namespace
from .base import Format, FormatName, Level
from .errors import DtypeError, FormatError, ShapeError

if TYPE_CHECKING:
    from .compressed import CSC


def column_dtype(n_cols: int) -> np.dtype[Any]:
    """The smallest dtype that CBSR stores columns in: uint8 to 256, uint16 to 65 536, else int32."""
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
        """Stored entries of every row."""
        return int(self.indices.shape[1])

    @property
    def nnz(self) -> int:
        """Number of stored entries: ``n_rows * k``."""
        return int(self.indices.size)

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """Dtype of ``indices``."""
        return self.indices.dtype

    @property
    def T(self) -> "CSC":
        """The transpose as CSC (columns are not balanced, so it is no CBSR)."""
        return self.tocsr().T

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
        expected = column_dtype(self.n_cols)
        if self.indices.dtype != expected:
            raise DtypeError(
                f"indices.dtype is {self.indices.dtype} but {self.n_cols} columns are stored as "
                f"{expected}: cast with .astype()."
            )
        if self.data is None:
            raise DtypeError("data is None: CBSR holds features, which always have values.")
        _validate.values(self.data, self.indices.shape, like=self.indices)

    def _check_full(self) -> None:
        _validate.in_range("indices", self.indices, self.n_cols, "columns")
        xp = namespace(self.indices)
        falls = self.indices[:, 1:] <= self.indices[:, :-1]
        if falls.any():  # synchronize!
            row, place = (int(i[0]) for i in xp.nonzero(falls))
            pair = self.indices[row, place : place + 2]
            left, right = (pair.get() if is_cupy(pair) else pair).tolist()
            raise FormatError(
                f"indices[{row}, {place}:{place + 2}] is {[left, right]}: columns of a row must "
                "ascend and be distinct."
            )
