"""Checks of an operation's arguments; each error names the argument, its value and the mend."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...errors import DeviceError, DtypeError, FormatError, ShapeError, UnsupportedError
from ...formats import checks
from ...formats.arrays import (
    Array,
    allocating,
    as_array,
    contiguous,
    device_of,
    is_cupy,
    namespace,
    on_device_of,
)
from ...formats.base import Format
from ...formats.compressed import CSR
from ...formats.sgt import SGT
from ...graph.graph import Graph
from .memory import memory_of, rows_apart

TF32, BF16 = PRECISIONS = ("tf32", "bf16")  #: to what float32 features may be rounded
_VALUES = frozenset(np.dtype(name) for name in ("float16", "float32", "float64"))


def sparse(name: str, A: object) -> Format:
    """A sparse matrix of this package."""
    if isinstance(A, Graph):
        raise DtypeError(f"{name} is a Graph: give one of its formats, graph.csr for instance.")
    if not isinstance(A, Format):
        raise DtypeError(
            f"{name} is a {type(A).__name__}: give a sparsefmt format (COO, CSR, CSC, SGT, CBSR), "
            "for instance from sparsefmt.from_scipy()."
        )
    if checks.DEBUG:
        A.check()
    return A


def csr(name: str, A: object) -> CSR:
    """A sparse matrix of this package, as CSR."""
    found = sparse(name, A)
    return found if isinstance(found, CSR) else found.tocsr()


def choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """One of the allowed words."""
    if not (isinstance(value, str) and value in allowed):
        raise UnsupportedError(f"{name} is {value!r}: use one of {', '.join(allowed)}.")
    return value


def word(name: str, value: object, allowed: Iterable[str]) -> str:
    """Check for one of the allowed words, in the words of torch's functions."""
    if not (isinstance(value, str) and value in allowed):
        *names, last = (f'"{each}"' for each in allowed)
        raise UnsupportedError(f"{name} is {value!r}: use {', '.join(names)} or {last}.")
    return value


def flag(name: str, value: object, kinds: Any = bool) -> None:
    """Check for True or False; ``kinds`` are the types that may say it."""
    if not isinstance(value, kinds):
        raise DtypeError(f"{name} is {value!r}: give True or False.")


def count_of_features(k: int, feat: int) -> None:
    """Check how many of ``feat`` features to keep."""
    if not 1 <= k <= feat:
        raise ShapeError(f"k is {k} but a row has {feat} features: k lies between 1 and {feat}.")


def precision(value: object, name: str, X: Array) -> str | None:
    """One of ``PRECISIONS`` for float32 features; None if there is nothing to allow."""
    if value is None:
        return None
    if not (isinstance(value, str) and value in PRECISIONS):
        raise UnsupportedError(f'precision is {value!r}: use "tf32" or "bf16", or leave it out.')
    if X.dtype != np.float32:
        raise UnsupportedError(
            f'precision is "{value}" but {name} is {X.dtype}: it is for float32, leave it out.'
        )
    return value


def features(name: str, X: Any, *, A: Format, axis: str = "columns", heads: bool = False) -> Any:
    """Dense features, one row per row or column of ``A``, on its device; see ``rows_in_place``."""
    rows = A.shape[1] if axis == "columns" else A.shape[0]
    if _fits(X, A) and X.shape[0] == rows and (X.ndim == 2 or (heads and X.ndim == 3)):
        return X
    if isinstance(X, Format):
        product = ", or spgemm(A, S) for row-balanced features" if X.format == "cbsr" else ""
        dense = f"give a dense array, {name}.toarray(){product}"
        raise DtypeError(f"{name} is a {type(X).__name__}: {dense}.")
    array = as_array(name, X, beside=A._indices)
    if array.ndim == 0:
        one = f"one row per {axis.removesuffix('s')} of A"
        raise ShapeError(f"{name} is a single {array.dtype}, of shape (): give a matrix, {one}.")
    if array.ndim not in ((2, 3) if heads else (2,)):
        hint = f"{name}[:, None]" if array.ndim == 1 else f"{name}.reshape(len({name}), -1)"
        shapes = "(rows, feat) or (rows, heads, feat)" if heads else "(rows, feat)"
        raise ShapeError(f"{name} has shape {array.shape}: give {shapes}, such as {hint}.")
    if array.shape[0] != rows:
        raise ShapeError(
            f"{name} has {array.shape[0]} rows but A has {rows} {axis}: {name} needs one row per "
            f"{axis.removesuffix('s')} of A ({name}.shape == {array.shape}, A.shape == {A.shape})."
        )
    return _values_beside(name, array, A)


def values_like(A: Format, X: Array) -> None:
    """The values of ``A``, if any, have the dtype of the features."""
    if A.data is not None and A.data.dtype != X.dtype:
        raise DtypeError(
            f"A.data is {A.dtype} but X is {X.dtype}: cast one, X.astype(A.dtype) or "
            "A.astype(X.dtype)."
        )


def alike(name: str, array: Array, other_name: str, other: Array) -> None:
    """The same heads, feature width and dtype as the other features."""
    if array.shape[1:] != other.shape[1:]:
        raise ShapeError(
            f"{name} has shape {array.shape} but {other_name} has {other.shape}: give both the "
            "same heads and feature width."
        )
    same_dtype(name, array, other_name, other)


def same_dtype(name: str, array: Array, other_name: str, other: Array) -> None:
    """The dtype of the other array."""
    if array.dtype != other.dtype:
        raise DtypeError(
            f"{name} is {array.dtype} but {other_name} is {other.dtype}: cast one, "
            f"{name}.astype({other_name}.dtype) for instance."
        )


def factors(name: str, value: object, *, A: Format, axis: str, like: Any = None) -> Array | None:
    """One factor per row or column of ``A``, contiguous, or None for none.

    Of the dtype of the features, or float32 beside 2-byte ones; float32 is what it becomes there,
    since that is what the kernels take.
    """
    if value is None:
        return None
    size = A.n_cols if axis == "columns" else A.n_rows
    array = as_array(name, value, empty=np.float64, beside=A._indices)
    if array.ndim == 0 and array.dtype.kind in "iuf":
        full = f"full({size}, {array.item()}, {'A' if like is None else 'X'}.dtype)"
        raise ShapeError(
            f"{name} has shape (): give one factor per {axis.removesuffix('s')} of A, "
            f"{namespace(A._indices).__name__.replace('numpy', 'np')}.{full} for instance."
        )
    if array.shape != (size,):
        raise ShapeError(
            f"{name} has shape {array.shape}: give ({size},), one factor per "
            f"{axis.removesuffix('s')} of A (A.shape == {A.shape})."
        )
    checks.value_dtype(f"{name}.dtype", array.dtype)
    if like is not None and not (like.dtype.itemsize == 2 and array.dtype == np.float32):
        same_dtype(name, array, "X", like)
    _beside(name, array, A)
    if like is not None and like.dtype.itemsize == 2:
        with on_device_of(array), allocating(f"{name} in float32"):
            array = array.astype(np.float32)
    return contiguous(array)


def entries(name: str, values: Any, *, A: Format) -> Array:
    """One value, or one per head, for each stored entry of ``A``, on its device."""
    if _fits(values, A) and values.shape[0] == A.nnz and values.ndim < 3:
        return values
    array = as_array(name, values, empty=np.float64, beside=A._indices)
    if array.ndim not in (1, 2) or array.shape[0] != A.nnz:
        raise ShapeError(
            f"{name} has shape {array.shape} but A stores {A.nnz} entries: give ({A.nnz},) or "
            f"({A.nnz}, heads), in the order of A's data."
        )
    return _values_beside(name, array, A)


def structure(A: Format) -> Format:
    """``A`` without its values, where only the structure is read: a conversion then moves less."""
    return A if A.format in ("csr", "cbsr") else A.with_data(None)


def rows_in_place(X: Array) -> Array:
    """``X`` itself if its rows are contiguous and do not overlap, at any distance; else a copy."""
    if rows_apart(X):
        return X
    with on_device_of(X), allocating(f"a contiguous copy of {X.nbytes} bytes"):
        return X.copy()


def output(
    out: Array | None,
    *,
    shape: tuple[int, ...],
    like: Array,
    inputs: Sequence[Array | None],
    A: Format | None = None,
) -> Array:
    """``out`` if it can take the result, else a new array with the dtype and device of ``like``.

    It may overlap none of the inputs and no array of ``A``.
    """
    on_cpu, kind = isinstance(like, np.ndarray), type(like)
    if out is None:
        if not on_cpu:
            return memory_of(like).empty(shape, like.dtype, like)
        with allocating(f"a result of shape {shape}"):
            return np.empty(shape, like.dtype)
    fits = type(out) is kind and out.shape == shape and out.dtype == like.dtype
    if not (fits and (on_cpu or out.data.device_id == like.data.device_id)):
        _check_output(out, shape, like)
    flags = out.flags
    if not flags.c_contiguous:
        raise FormatError("out is not C-contiguous: give a fresh array, or none.")
    if on_cpu and not flags.aligned:
        raise FormatError("out is not aligned to its dtype: give a fresh array, or none.")
    if on_cpu and not flags.writeable:
        raise FormatError("out is read-only: give a writeable array, or none.")
    if on_cpu:
        for one in (*inputs, *_arrays_of(A)):
            if one is not None and np.may_share_memory(out, one):
                raise FormatError(_OVERLAPS)
        return out
    low = out.data.ptr
    high = low + out.nbytes
    given = [_bounds(one) for one in inputs if one is not None]
    for begin, end in (*given, *(() if A is None else _bounds_of(A))):
        if low < end and begin < high:
            raise FormatError(_OVERLAPS)
    return out


_OVERLAPS = "out overlaps an input: give an array of its own."


def _arrays_of(A: Format | None) -> Iterable[Any]:
    """List all arrays that an operation may read of ``A``."""
    if A is None:
        return ()
    fields = A.__dict__
    own = [fields[name] for name in A._array_fields]
    return own if type(A) is not SGT else (*own, *A._built_arrays())


def _check_output(out: Any, shape: tuple[int, ...], like: Array) -> None:
    """Raise what keeps ``out`` from taking a result of that shape, like that array."""
    if not (is_cupy(out) or type(out) is np.ndarray):  # a subclass may hide cells or its shape
        mend = "np.asarray(out) for instance" if isinstance(out, np.ndarray) else "or none"
        raise DtypeError(f"out is a {type(out).__name__}: give a NumPy or CuPy array, {mend}.")
    if device_of(out) != device_of(like):
        raise DeviceError(
            f"out is on {device_of(out)} but the inputs are on {device_of(like)}: give an array "
            "there, or none."
        )
    if out.shape != shape:
        raise ShapeError(f"out has shape {out.shape}: the result has {shape}, give that.")
    if out.dtype != like.dtype:
        raise DtypeError(f"out is {out.dtype}: the result is {like.dtype}, give that.")


def _bounds_of(A: Format) -> tuple[tuple[int, int], ...]:
    """Return the bounds of all that an operation may read of ``A``; its own are found once."""
    found: tuple[Array | None, tuple[tuple[int, int], ...]] | None = A.__dict__.get("_bounds")
    if found is None or found[0] is not A.data:
        found = A.data, tuple(map(_bounds, A._arrays().values()))
        object.__setattr__(A, "_bounds", found)
    return found[1] if type(A) is not SGT else (*found[1], *map(_bounds, A._built_arrays()))


def _bounds(a: Any) -> tuple[int, int]:
    """Where an array begins and ends; for none a place that overlaps nothing."""
    if a is None:
        return 0, 0
    start, size = a.ctypes.data if type(a) is np.ndarray else a.data.ptr, a.nbytes
    if size == 0 or a.flags.c_contiguous:
        return start, start + size
    reach = [stride * (size - 1) for stride, size in zip(a.strides, a.shape, strict=True)]
    low = start + sum(one for one in reach if one < 0)
    return low, start + sum(one for one in reach if one > 0) + a.itemsize


def _fits(array: Any, A: Format) -> bool:
    """Whether it is a plain array of floats, beside the arrays of ``A``: nearly every call's."""
    return beside(array, A) and array.dtype in _VALUES and array.ndim > 0


def beside(array: Any, A: Format) -> bool:
    """Whether it is a plain array on the device of ``A``."""
    other = A._indices
    kind = type(other)
    return type(array) is kind and (
        kind is np.ndarray or bool(array.data.device_id == other.data.device_id)
    )


def _beside(name: str, array: Array, A: Format) -> None:
    if device_of(array) != A.device:
        raise DeviceError(
            f"{name} is on {device_of(array)} but A is on {A.device}: move one of them, "
            f'A.to("{device_of(array)}") for instance.'
        )


def _values_beside(name: str, array: Array, A: Format) -> Array:
    """Check that ``array`` holds floats on the device of ``A``, and return it."""
    checks.value_dtype(f"{name}.dtype", array.dtype)
    _beside(name, array, A)
    return array
