"""Checks of an operation's arguments; each error names the argument, its value and the mend."""

from typing import Any

import numpy as np

from .. import _validate
from .._arrays import (
    Array,
    allocating,
    as_array,
    contiguous,
    device_of,
    is_cupy,
    namespace,
    on_device_of,
)
from ..base import Format
from ..errors import DeviceError, DtypeError, FormatError, ShapeError


def sparse(name: str, A: object) -> Format:
    """A sparse matrix of this package."""
    if not isinstance(A, Format):
        raise DtypeError(
            f"{name} is a {type(A).__name__}: give a sparsefmt format (COO, CSR, CSC, SGT, CBSR), "
            "for instance from sparsefmt.from_scipy()."
        )
    return A


def features(name: str, X: object, *, rows: int, like: Format) -> Array:
    """A dense, contiguous feature matrix with ``rows`` rows on the device of ``like``."""
    array = as_array(name, X, beside=like._indices)
    if array.ndim != 2:
        hint = f"{name}[:, None]" if array.ndim == 1 else f"{name}.reshape(len({name}), -1)"
        raise ShapeError(f"{name} has shape {array.shape}: give (rows, feat), such as {hint}.")
    if array.shape[0] != rows:
        raise ShapeError(
            f"{name} has {array.shape[0]} rows but A has {rows} columns: {name} needs one row per "
            f"column of A ({name}.shape == {array.shape}, A.shape == {like.shape})."
        )
    _validate.value_dtype(f"{name}.dtype", array.dtype)
    if device_of(array) != like.device:
        raise DeviceError(
            f"{name} is on {device_of(array)} but A is on {like.device}: move one of them, "
            f'A.to("{device_of(array)}") for instance.'
        )
    return contiguous(array)


def output(out: Array | None, *, shape: tuple[int, ...], like: Array, inputs: list[Array]) -> Array:
    """``out`` if it can take the result, else a new array with the dtype and device of ``like``."""
    xp = namespace(like)
    if out is None:
        with on_device_of(like), allocating(f"a result of shape {shape}"):
            return xp.empty(shape, like.dtype)
    if not (is_cupy(out) or isinstance(out, np.ndarray)):
        raise DtypeError(f"out is a {type(out).__name__}: give a NumPy or CuPy array, or none.")
    if device_of(out) != device_of(like):
        raise DeviceError(
            f"out is on {device_of(out)} but the inputs are on {device_of(like)}: give an array "
            "there, or none."
        )
    if out.shape != shape:
        raise ShapeError(f"out has shape {out.shape}: the result has {shape}, give that.")
    if out.dtype != like.dtype:
        raise DtypeError(f"out is {out.dtype}: the result is {like.dtype}, give that.")
    if not out.flags.c_contiguous or not getattr(out.flags, "writeable", True):
        raise FormatError("out must be C-contiguous and writeable: give a fresh array.")
    for array in inputs:
        if may_overlap(out, array):
            raise FormatError("out overlaps an input: give an array of its own.")
    return out


def may_overlap(a: Array, b: Array) -> bool:
    """Whether the bounds of two arrays' memory meet."""
    (a_low, a_high), (b_low, b_high) = _bounds(a), _bounds(b)
    return a_low < b_high and b_low < a_high


def _bounds(a: Any) -> tuple[int, int]:
    start = a.data.ptr if is_cupy(a) else a.ctypes.data
    return start, start + a.nbytes
