"""Products with several heads: features of each, and a value of each for every stored entry."""

from typing import Any

from ...errors import ShapeError, UnsupportedError
from ...formats.arrays import Array
from ...formats.base import Format
from ...formats.convert import numbered_csr
from ..engine import checks, choose
from ..engine.table import find
from .cuda import shape_of_heads


def side_by_side(X: Array) -> Array:
    """Lay the features of heads that share their values side by side."""
    return X.reshape(X.shape[0], X.shape[1] * X.shape[2])


def one_value(A: Format, values: Array) -> Format:
    """Give ``A`` one value for each entry, in the order of its own data."""
    return A.with_data(values.reshape(A._indices.shape) if A.format == "cbsr" else values)


def spmm_of_heads(
    A: Format, X: Array, values: Array, *, reduce: str, scales: dict[str, Any], out: Array | None
) -> Array:
    """Multiply with values of shape (nnz, heads), in one launch; ``X`` has been checked."""
    heads = values.shape[1]
    if X.ndim == 3 and X.shape[1] != heads:
        raise ShapeError(
            f"values has {heads} heads but X has {X.shape[1]}: give both the same, or X of shape "
            "(n_cols, feat) for all heads."
        )
    checks.same_dtype("values", values, "X", X)
    summed(reduce)
    row_scale = checks.factors("row_scale", scales["row_scale"], A=A, axis="rows", like=X)
    col_scale = checks.factors("col_scale", scales["col_scale"], A=A, axis="columns", like=X)
    inputs = X, values, row_scale, col_scale
    out = checks.output(out, shape=shape_of_heads(A, X, values), like=X, inputs=inputs, A=A)
    csr, numbers = numbered_csr(checks.structure(A))
    given = values, numbers, row_scale, col_scale, reduce
    found: Array = choose.run(find("spmm"), csr, X, *given, out=out)
    return found


def summed(reduce: str) -> None:
    """Refuse maxima and minima of heads by name."""
    if reduce not in ("sum", "mean"):
        raise UnsupportedError(
            f'reduce is "{reduce}" with a value of each head: call it for one head at a time, with '
            "its features and its values, or reduce by sum or mean."
        )


def against(values: Any, who: str) -> list[str]:
    """Say why a kernel that takes one value an entry cannot run, if so."""
    if values is None or values.ndim == 1:
        return []
    return [f"{who} one value an entry"]
