"""Row-balanced sparse features: MaxK."""

import operator
from typing import Any

import numpy as np

from .. import _validate
from .._arrays import Array, allocating, as_array, namespace, on_device_of
from ..cbsr import CBSR, column_dtype
from ..errors import DtypeError, ShapeError


def maxk(X: Array, k: int) -> CBSR:
    """Keep the ``k`` largest features of each row (MaxK-GNN, section 3.1).

    ``S[i, f] = X[i, f]`` for the ``k`` largest of row ``i``, and 0 elsewhere.  Ties go to the
    lowest column; -0.0 and 0.0 tie; NaN counts as the largest value.

    Parameters
    ----------
    X : array, shape (n_rows, feat)
        float16, bfloat16, float32 or float64.
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
    """
    X = as_array("X", X)
    _validate.dense("X", X)
    _validate.value_dtype("X.dtype", X.dtype)
    try:
        k = operator.index(k)
    except TypeError as error:
        raise DtypeError(f"k is {k!r}: give an integer.") from error
    feat = X.shape[1]
    if not 1 <= k <= feat:
        raise ShapeError(f"k is {k} but a row has {feat} features: k lies between 1 and {feat}.")
    xp = namespace(X)
    with on_device_of(X), allocating(f"maxk of {X.shape}"):
        order = xp.argsort(_descending(X), axis=1, kind="stable")[:, :k]
        columns = xp.sort(order, axis=1)
        data = xp.take_along_axis(X, columns, axis=1)
        return CBSR._trusted(indices=columns.astype(column_dtype(feat)), data=data, shape=X.shape)


def _descending(X: Array) -> Any:
    """Keys that sort as -X with NaN first; float32 holds both 2-byte floats exactly."""
    xp = namespace(X)
    keys = X.astype(np.float32) if X.dtype.itemsize == 2 else X
    ranks = xp.unique(-keys, return_inverse=True)[1].reshape(X.shape)  # synchronize!
    return xp.where(xp.isnan(keys), -1, ranks)
