"""The graph of conversions: one function per edge, the shortest path for the rest.

An edge takes ``(A, want_perm)`` and returns ``(B, perm)`` with ``B.data == A.data[perm]``; ``perm``
is None where the order of the values does not change.  On a GPU every edge runs there, as sorts,
scans and searches; none loops over rows.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from .._caches import cache
from ..errors import OutOfMemoryError, ShapeError, UnsupportedError
from . import checks, primitives
from .arrays import (
    INDEX_DTYPES,
    Array,
    DType,
    allocating,
    as_array,
    elementwise,
    is_cupy,
    namespace,
    on_device_of,
)
from .base import Format, FormatName
from .cbsr import CBSR
from .compressed import COO, CSC, CSR, Compressed
from .condense import condense, sgt_coordinates
from .sgt import DEFAULT_TILE, SGT, check_tile

Edge: TypeAlias = Callable[..., tuple[Any, Array | None]]


def to_format(A: Format, format: FormatName, **options: Any) -> Any:
    """Convert a matrix to the format of that name; itself if it has it already."""
    return _convert(A, format, want_perm=False, **options)[0]


def to_format_with_perm(A: Format, format: FormatName, **options: Any) -> tuple[Any, Array]:
    """Return ``(B, perm)`` in that format, where ``B.data == A.data[perm]`` (a CBSR's raveled)."""
    B, perm = _convert(A, format, want_perm=True, **options)
    if perm is None:
        dtype = B.index_dtype if B.index_dtype in INDEX_DTYPES else np.int64  # CBSR: uint8, uint16
        with on_device_of(A._indices), allocating(f"a permutation of {A.nnz} entries"):
            perm = namespace(A._indices).arange(A.nnz, dtype=dtype)
    return B, perm


def unpickled(format: str, device: str, fields: dict[str, Any], options: dict[str, Any]) -> Format:
    """Build the matrix that ``torch.save`` has pickled, and check it in full."""
    kinds: dict[str, Any] = {kind.format: kind for kind in (COO, CSR, CSC, SGT, CBSR)}
    arrays = {
        name: np.frombuffer(values, checks.any_dtype(name, dtype)).reshape(shape).copy()
        for name, (dtype, shape, values) in fields.items()
    }
    A: Format = kinds[format](**arrays, **options).to(device)
    return A


def numbered_csr(A: Format) -> tuple[CSR, Array | None]:
    """Convert a matrix to CSR; return it and the permutation of its edge values, or None.

    None stands for a permutation that changes no place.
    """
    return _convert(A, "csr", want_perm=True)


def _convert(
    A: Format, format: FormatName, *, want_perm: bool, **options: Any
) -> tuple[Any, Array | None]:
    _check_options(format, options)
    B: Any = A
    path = steps(A, format, options.get("tile"))
    if not path:
        return A, None
    perm: Array | None = None
    with on_device_of(A._indices), allocating(f"{A.format} -> {format} of {A.nnz} entries"):
        for step in path:
            B, moved = _EDGES[B.format, step](B, want_perm, **(options if step == "sgt" else {}))
            if moved is not None:
                perm = moved if perm is None else perm[moved]
    return B, perm


def steps(
    A: Format, format: FormatName, tile: tuple[int, int] | None = None
) -> Sequence[FormatName]:
    """Return the formats that a conversion goes through, the last one counted."""
    if A.format != format:
        return _path(A.format, format)
    retiled = isinstance(A, SGT) and tile not in (None, A.tile)
    return ("csr", "sgt") if retiled else ()


def _check_options(format: str, options: dict[str, Any]) -> None:
    if format not in _FORMATS:
        raise UnsupportedError(
            f"format is {format!r}: use one of {', '.join(_FORMATS)}, or .toarray() for dense."
        )
    for name in options:
        if (format, name) != ("sgt", "tile"):
            raise UnsupportedError(f'{name} is no option of {format!r}: only "sgt" has one, tile.')
    if "tile" in options:
        options["tile"] = check_tile(options["tile"])


@cache
def _path(start: FormatName, goal: FormatName) -> tuple[FormatName, ...]:
    """Return the formats after ``start`` on a shortest path to ``goal``, breadth first."""
    paths: dict[FormatName, tuple[FormatName, ...]] = {start: ()}
    frontier = [start]
    for current in frontier:
        for source, target in _EDGES:
            if source == current and target not in paths:
                paths[target] = (*paths[current], target)
                frontier.append(target)
    if goal not in paths:
        raise UnsupportedError(
            f"{start} -> {goal}: a CBSR is made from dense features, by sparsefmt.ops.maxk(X, k)."
        )
    return paths[goal]


# The edges


def _csr_to_coo(A: CSR, want_perm: bool) -> tuple[COO, None]:
    row = primitives.expand(A.indptr, A.nnz)
    return COO._trusted(row=row, col=A.indices, data=A.data, shape=A.shape), None


def _coo_to_csr(A: COO, want_perm: bool) -> tuple[CSR, Array | None]:
    if primitives.is_ascending(A.row):
        indptr = primitives.pointers(A.row, A.n_rows, A.index_dtype)
        return CSR._trusted(indptr=indptr, indices=A.col, data=A.data, shape=A.shape), None
    if not is_cupy(A.row):
        return _by_counting(CSR, A, want_perm)
    indptr, perm = primitives.group(A.row, A.n_rows)
    col, data = primitives.take(perm, A.col, A.data)
    B = CSR._trusted(indptr=indptr, indices=col, data=data, shape=A.shape)
    return B, perm.astype(A.index_dtype, copy=False) if want_perm else None


def _csr_to_csc(A: CSR, want_perm: bool) -> tuple[CSC, Array | None]:
    if not is_cupy(A.indices):
        return _by_counting(CSC, A, want_perm)
    indptr, perm = primitives.group(A.indices, A.n_cols)
    row, data = primitives.take(perm, primitives.expand(A.indptr, A.nnz), A.data)
    B = CSC._trusted(indptr=indptr, indices=row, data=data, shape=A.shape)
    return B, perm.astype(A.index_dtype, copy=False) if want_perm else None


def _transposed(edge: Edge) -> Edge:
    """Build the edge that converts the transpose by ``edge`` and transposes the result."""

    def convert(A: COO | CSC, want_perm: bool) -> tuple[Any, Array | None]:
        B, perm = edge(A.T, want_perm)
        return B.T, perm

    return convert


def _sgt_to_csr(A: SGT, want_perm: bool) -> tuple[CSR, None]:
    xp = namespace(A.order)
    indices = xp.empty(A.nnz, A.index_dtype)
    indptr = xp.zeros(A.n_rows + 1, A.index_dtype)
    for rows, part, row, col in sgt_coordinates(A):
        indices[A.order[part]] = col
        lengths = indptr[rows.start + 1 : rows.stop + 1]
        lengths += xp.bincount(row, minlength=len(lengths))  # synchronize!
    primitives.sum_up(indptr)
    return CSR._trusted(indptr=indptr, indices=indices, data=A.data, shape=A.shape), None


def _cbsr_to_csr(A: CBSR, want_perm: bool) -> tuple[CSR, None]:
    xp = namespace(A.indices)
    large = max(A.nnz, *A.shape) > np.iinfo(np.int32).max
    dtype = np.dtype(np.int64 if large else np.int32)
    indptr = xp.arange(0, A.nnz + 1, A.k, dtype=dtype)
    indices = A.indices.ravel().astype(dtype)
    return CSR._trusted(indptr=indptr, indices=indices, data=A.data.ravel(), shape=A.shape), None


_EDGES: dict[tuple[FormatName, FormatName], Edge] = {
    ("coo", "csr"): _coo_to_csr,
    ("coo", "csc"): _transposed(_coo_to_csr),
    ("csr", "coo"): _csr_to_coo,
    ("csc", "coo"): _transposed(_csr_to_coo),
    ("csr", "csc"): _csr_to_csc,
    ("csc", "csr"): _transposed(_csr_to_csc),
    ("csr", "sgt"): lambda A, want_perm, tile=DEFAULT_TILE: (condense(A, tile), None),
    ("sgt", "csr"): _sgt_to_csr,
    ("cbsr", "csr"): _cbsr_to_csr,
}
_FORMATS = ("coo", "csr", "csc", "sgt", "cbsr")


def _by_counting(
    to: type[CSR] | type[CSC], A: COO | CSR, want_perm: bool
) -> tuple[Any, Array | None]:
    """Convert a matrix to CSR or CSC by SciPy's counting sort, on the CPU.

    Where SciPy's loop cannot move the values, it moves their places.
    """
    moves_values = A.data is not None and A.data.dtype in (np.float32, np.float64)
    places = want_perm or not (A.data is None or moves_values)
    if places:
        payload: Array = np.arange(A.nnz, dtype=A.index_dtype)
    else:
        payload = A.data if moves_values else np.zeros(A.nnz, np.int8)
    n_major = A.shape[0 if to is CSR else 1]
    indptr, indices = (np.empty(size, A.index_dtype) for size in (n_major + 1, A.nnz))
    moved = np.empty_like(payload)
    if isinstance(A, COO):
        entries = A.row, A.col, payload
        primitives.scipy_loops().coo_tocsr(*A.shape, A.nnz, *entries, indptr, indices, moved)
    else:
        entries = A.indptr, A.indices, payload
        primitives.scipy_loops().csr_tocsc(*A.shape, *entries, indptr, indices, moved)
    perm = moved if places else None
    data = None if A.data is None else A.data[perm] if places else moved
    return to._trusted(indptr=indptr, indices=indices, data=data, shape=A.shape), perm


# Dense


def from_dense(
    X: Array, format: FormatName = "csr", *, index_dtype: DType = np.int32, **options: Any
) -> Any:
    """Convert the nonzero cells of a dense matrix to a sparse one, columns ascending in a row.

    Parameters
    ----------
    X : array, shape (n_rows, n_cols)
        float16, bfloat16, float32 or float64.  NaN counts as nonzero.
    format : "csr", "csc", "coo" or "sgt"
    index_dtype : int32 or int64
    **options
        ``tile=(height, width)`` for ``"sgt"``.

    Returns
    -------
    CSR, CSC, COO or SGT, shape (n_rows, n_cols)
        In the dtype and on the device of ``X``.

    Raises
    ------
    ShapeError
        If ``X`` is not 2-D.
    DtypeError
        If ``X`` holds no floats.
    IndexRangeError
        If ``index_dtype`` cannot count the rows, columns or nonzero cells.
    UnsupportedError
        If ``format`` or an option is unknown, or ``format`` is "cbsr" (see ``ops.maxk``).
    """
    return from_dense_with_perm(X, format, index_dtype=index_dtype, **options)[0]


def from_dense_with_perm(
    X: Array, format: FormatName = "csr", *, index_dtype: DType = np.int32, **options: Any
) -> tuple[Any, Array]:
    """Return ``(A, cells)``, where ``A.data == X.ravel()[cells]``, see ``from_dense``."""
    X = as_array("X", X, empty=np.float64)
    checks.dense("X", X)
    checks.value_dtype("X.dtype", X.dtype)
    index = checks.index_dtype("index_dtype", index_dtype)
    xp = namespace(X)
    with on_device_of(X), allocating(f"dense -> {format} of shape {X.shape}"):
        cells = xp.flatnonzero(X)  # synchronize!
        checks.sizes_fit(X.shape, len(cells), index)
        row, col = (places.astype(index) for places in xp.divmod(cells, max(X.shape[1], 1)))
        A = COO._trusted(row=row, col=col, data=X.ravel()[cells], shape=X.shape)
        B, perm = _convert(A, format, want_perm=True, **options)
        return B, cells if perm is None else cells[perm]


def to_dense(A: Format, dtype: DType = None) -> Array:
    """Convert a matrix to a dense array; duplicates add up in the order of CSR."""
    default = np.float32 if A.data is None else A.data.dtype
    target = checks.value_dtype("dtype", default if dtype is None else dtype)
    if A.n_rows * A.n_cols * target.itemsize > sys.maxsize:
        raise OutOfMemoryError(
            f"a dense array of shape {A.shape} cannot be addressed: take a part."
        )
    csr = A.tocsr()
    xp = namespace(csr.indices)
    with on_device_of(csr.indices), allocating(f"dense array of shape {A.shape}"):
        X = xp.zeros(A.shape, target)
        if not is_cupy(X):
            values = target.type(1) if csr.data is None else csr.data.astype(target)
            np.add.at(X.reshape(-1), dense_cells(csr), values)
        elif csr.nnz:
            values = xp.ones(csr.nnz, target) if csr.data is None else csr.data.astype(target)
            _to_dense_kernel()(csr.indptr, csr.indices, values, A.n_cols, X, size=A.n_rows)
        return X


def dense_cells(A: Format) -> Array:
    """Return the cell of each stored entry in the flat dense array, in ``A``'s own order."""
    if isinstance(A, SGT | CBSR):
        A = A.tocsr()
    with on_device_of(A._indices), allocating(f"cells of {A.nnz} entries"):
        coo = A.tocoo()
        return coo.row.astype(np.int64) * A.n_cols + coo.col


_to_dense_kernel = elementwise(
    "raw I indptr, raw I indices, raw T data, int64 n_cols",
    "raw T X",
    """
    for (I e = indptr[i]; e < indptr[i + 1]; ++e) {
        long long cell = i * n_cols + indices[e];
        X[cell] = X[cell] + data[e];  // bfloat16 has no +=
    }
    """,
    "sparsefmt_to_dense",
)


# Rows and columns


def take(A: Format, key: Any) -> Any:
    """Return the chosen rows and columns, in the chosen order, in the format of ``A``."""
    if isinstance(key, tuple) and len(key) > 2:
        raise ShapeError(f"A[...] got {len(key)} keys: a matrix has rows and columns, give two.")
    rows, cols = (
        (*key, slice(None), slice(None))[:2] if isinstance(key, tuple) else (key, slice(None))
    )
    if isinstance(A, CBSR):
        return _take_cbsr(A, rows, cols)
    B: Format = A
    if not (isinstance(rows, slice) and rows == slice(None)):
        B = _take_major(B.tocsr(), rows, "rows")
    if not (isinstance(cols, slice) and cols == slice(None)):
        B = _take_major(B.tocsc(), cols, "columns")
    return to_format(B, A.format, **({"tile": A.tile} if isinstance(A, SGT) else {}))


def _take_major(A: Compressed, key: Any, axis: str) -> Compressed:
    with on_device_of(A.indptr), allocating(f"some {axis} of {A!r}"):
        chosen = checks.selection(axis, key, A.n_major, like=A.indptr)
        n_chosen = len(chosen)
        shape = (n_chosen, A.shape[1]) if isinstance(A, CSR) else (A.shape[0], n_chosen)
        indptr, places = primitives.take_segments(A.indptr, chosen)
        data = None if A.data is None else A.data[places]
        return A._replace(indptr=indptr, indices=A.indices[places], data=data, shape=shape)


def _take_cbsr(A: CBSR, rows: Any, cols: Any) -> CBSR:
    if not (isinstance(cols, slice) and cols == slice(None)):
        raise UnsupportedError(
            "columns: some columns of a CBSR do not leave k entries in every row; "
            "use A.tocsr()[rows, columns]."
        )
    if isinstance(rows, slice) and rows == slice(None):
        return A
    with on_device_of(A.indices), allocating(f"some rows of {A!r}"):
        places = namespace(A.indices).empty(0, np.int64)
        chosen = checks.selection("rows", rows, A.n_rows, like=places)
        shape = (len(chosen), A.n_cols)
        return A._replace(indices=A.indices[chosen], data=A.data[chosen], shape=shape)


def is_sorted(A: Compressed) -> bool:
    """Return True if minor indices never decrease within a row (CSR) or column (CSC)."""
    with on_device_of(A.indices), allocating(f"comparing {A.nnz} indices"):
        falls = A.indices[1:] < A.indices[:-1]
        starts = A.indptr[1:-1]
        starts = starts[(starts > 0) & (starts < A.nnz)]  # synchronize!
        falls[starts - 1] = False
        return not bool(falls.any())  # synchronize!
