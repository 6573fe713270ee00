"""Row-balanced sparse features: MaxK."""

import operator
from collections.abc import Callable
from typing import Any, SupportsIndex

from ...errors import DtypeError
from ...formats import checks
from ...formats.arrays import Array, as_array
from ...formats.cbsr import CBSR, column_dtype
from ..engine import choose
from ..engine.bind import count_of_features
from ..engine.table import Kernel, Op, Price, csr_kernels, deferred, unchecked
from . import cuda


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
    count_of_features(k, X.shape[1])
    columns, data = choose.run(MAXK, None, X, k)
    return CBSR._trusted(indices=columns, data=data, shape=X.shape)


def _count(name: str, value: object) -> int:
    """Check for an integer of any kind; bool is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise DtypeError(f"{name} is {value!r}: give an integer.")
    return operator.index(value)


# The rows of the table


def _chosen(_: Any, x: Any, k: Any) -> tuple[Any, ...]:
    shape = x.shape[0], k
    return (shape, column_dtype(x.shape[1]).name), (shape, x)


def _price_of_choice(_: Any, x: Any, k: int) -> Price:
    n_rows, feat = x.shape
    chosen = n_rows * k * (x.itemsize + column_dtype(feat).itemsize)
    return Price(n_rows * feat * x.itemsize + chosen, 0)


def _dense(_: Any, columns: Any, data: Any, feat: Any) -> tuple[Any, ...]:
    return (((data.shape[0], feat), data),)


def _price_of_dense(_: Any, columns: Any, data: Any, feat: int) -> Price:
    n_rows, k = columns.shape
    return Price(n_rows * (k * (columns.itemsize + data.itemsize) + feat * data.itemsize), 0)


def _at_columns(_: Any, x: Any, columns: Any) -> tuple[Any, ...]:
    return ((columns.shape, x),)


def _price_at_columns(_: Any, x: Any, columns: Any) -> Price:
    n_rows, k = columns.shape
    return Price(n_rows * k * (columns.itemsize + 2 * x.itemsize), 0)


MAXK = Op(
    "maxk",
    unchecked("Tensor x, SymInt k"),
    results=_chosen,
    kernels=(
        Kernel("maxk_rows", cuda.maxk, place="gpu", refuses=cuda.maxk_too_wide),
        Kernel("maxk_sorted", cuda.maxk_by_sorting, place="gpu"),
        Kernel("maxk_numba", deferred(f"{__package__}.cpu", "maxk"), place="cpu"),
    ),
    price=_price_of_choice,
    returns=2,
    structures=0,
)


def _of_features(launcher: Callable[..., Any], arguments: str, **facts: Any) -> Op:
    """Make the row of an operation without a matrix, named as its launcher."""
    name = launcher.__name__
    kernels = csr_kernels(launcher, name, f"{name}_numba")
    return Op(name, unchecked(arguments), kernels=kernels, structures=0, **facts)


CBSR_TO_DENSE = _of_features(
    cuda.cbsr_to_dense,
    "Tensor columns, Tensor kept, SymInt feat",
    results=_dense,
    price=_price_of_dense,
)
DENSE_TO_CBSR = _of_features(
    cuda.dense_to_cbsr, "Tensor x, Tensor columns", results=_at_columns, price=_price_at_columns
)
