"""Row-balanced sparse features: MaxK."""

import operator
from typing import SupportsIndex

import numpy as np

from ...errors import DtypeError, ShapeError
from ...formats import checks
from ...formats.arrays import Array, allocating, as_array, is_cupy, namespace, on_device_of
from ...formats.cbsr import CBSR, column_dtype
from ..engine import checks as engine_checks
from ..engine.choose import pointer, row_stride


def maxk(X: Array, k: int) -> CBSR:
    """Keep the ``k`` largest features of each row (MaxK-GNN, section 3.1).

    ``S[i, f] = X[i, f]`` for the ``k`` largest of row ``i``, and 0 elsewhere.  Ties go to the
    lowest column; -0.0 and 0.0 tie; NaN counts as the largest value, as in ``torch.topk``, and all
    NaN tie.  Values are taken over bit by bit.

    Parameters
    ----------
    X : array, shape (n_rows, feat)
        float16, bfloat16, float32 or float64.  Contiguous rows at any distance are read in place,
        other layouts are copied.
    k : int
        Between 1 and ``feat``.

    Returns
    -------
    CBSR, shape (n_rows, feat)
        Columns ascending in every row.

    Raises
    ------
    ShapeError
        If ``X`` is not 2-D or ``k`` lies outside 1 .. feat.
    DtypeError
        If ``X`` holds no floats or ``k`` is no integer.

    Notes
    -----
    Deterministic, and exact for subnormal values too.  Rows are searched rather than sorted, except
    those of more than 65 536 features on a GPU.
    """
    X = as_array("X", X)
    checks.dense("X", X)
    checks.value_dtype("X.dtype", X.dtype)
    k = _count("k", k)
    feat = X.shape[1]
    if not 1 <= k <= feat:
        raise ShapeError(f"k is {k} but a row has {feat} features: k lies between 1 and {feat}.")
    X, xp = engine_checks.rows_in_place(X), namespace(X)
    with on_device_of(X), allocating(f"maxk of {X.shape}"):
        columns = xp.empty((len(X), k), column_dtype(feat))
        data = xp.empty((len(X), k), X.dtype)
        (_maxk_gpu if is_cupy(X) else _maxk_numba)(X, columns, data)
        return CBSR._trusted(indices=columns, data=data, shape=X.shape)


def _count(name: str, value: object) -> int:
    """An integer of any kind; bool is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise DtypeError(f"{name} is {value!r}: give an integer.")
    return operator.index(value)


def _maxk_gpu(X: Array, columns: Array, data: Array) -> None:
    from ..matmul import cuda as matmul_cuda
    from . import cuda_maxk

    if X.shape[1] > cuda_maxk.MAX_FEAT:
        _sort(X, columns, data)
        return
    cuda_maxk.maxk(
        str(X.dtype),
        n_rows=len(X),
        feat=X.shape[1],
        k=data.shape[1],
        ldx=row_stride(X),
        X=pointer(X),
        columns=pointer(columns),
        values=pointer(data),
        stream=matmul_cuda.stream(),
    )


def _maxk_numba(X: Array, columns: Array, data: Array) -> None:
    from ..engine import cpu

    cpu.maxk(X, columns, data)


def _sort(X: Array, columns: Array, data: Array) -> None:
    """By integers in the order of the values: -0 is 0, and every NaN the largest."""
    xp, integers = namespace(X), np.dtype(f"i{X.itemsize}")
    bits, limits = X.view(integers), np.iinfo(integers)
    infinity = int(np.array(np.inf, X.dtype).view(integers)[()])
    keys = xp.where(bits < 0, limits.min - bits, bits)
    keys = xp.where(bits & limits.max > infinity, limits.max, keys)
    order = xp.sort(xp.argsort(~keys, axis=1, kind="stable")[:, : data.shape[1]], axis=1)
    columns[...] = order
    data.view(integers)[...] = xp.take_along_axis(bits, order, axis=1)
