"""Check the arguments of a call, by the row of its operation, for NumPy, CuPy and torch.

``bind`` takes one quick look at each array.  What fails it goes to a check of the ``Library``: its
error names the argument, its value and the mend, or it makes an array of the argument.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Never, Protocol

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
    out_of_memory,
)
from ...formats.base import Format
from ...formats.cbsr import CBSR
from ...formats.sgt import SGT
from ...graph.graph import Graph
from .memory import memory_of
from .table import FIRST, Arg, Op

TF32, BF16 = PRECISIONS = ("tf32", "bf16")  #: to what float32 features may be rounded

#: The name of an argument that has been checked, and its array.
Named = tuple[str, Any]


class Library(Protocol):
    """What arrays and tensors differ in.

    A check gets the name of an argument, its value, what the row says of it, the matrix or graph,
    the rows that it must have and the argument that it must be like; it raises or returns an array.
    """

    kind: type  #: of arrays
    floats: frozenset[Any]  #: dtypes of values
    layout: Any  #: of dense tensors; None for arrays, which have none

    def cast(self, op: Op, A: Any, args: dict[str, Any]) -> dict[str, Any]:
        """Cast arguments as the library does before an operation."""

    def own_values(self, op: Op, A: Any, values: Any, like: Named) -> Any:
        """Check that the matrix's own values have the dtype of ``like``."""

    def features(self, name: str, value: Any, arg: Arg, A: Any, size: int, like: Any) -> Any:
        """Check for (size, feat) or (size, heads, feat)."""

    def factor(self, name: str, value: Any, arg: Arg, A: Any, size: int, like: Any) -> Any:
        """Check for one factor of each row or column."""

    def entries(self, name: str, value: Any, arg: Arg, A: Any, size: int, like: Any) -> Any:
        """Check for one value, or a row of them, at each stored entry."""

    def scores(self, name: str, value: Any, arg: Arg, A: Any, size: int, like: Any) -> Any:
        """Check for one score of each head; float32 will do beside 2-byte features."""

    def vectors(self, name: str, value: Any, arg: Arg, A: Any, size: int, like: Any) -> Any:
        """Check for one vector of each head; float32 will do beside 2-byte features."""

    def balanced(self, name: str, value: Any, arg: Arg, A: Any, size: int, like: Any) -> Any:
        """Check for row-balanced features."""


_libraries: dict[type, Library] = {}


def register_library(graph: type, library: Library) -> None:
    """Use ``library`` for the arguments of calls with graphs of that class."""
    _libraries[graph] = library


def bind(op: Op, A: Any, /, **args: Any) -> list[Any]:
    """Check the matrix and the arguments of a call, in this order; return them as arrays.

    Names are those that users see; each is in ``op.named``.  None stays None where it is allowed,
    but ``out`` is allocated, and the matrix's own values are returned for those that it replaces.
    """
    if isinstance(A, Format):
        library, shape = ARRAYS, A.shape
        leaf = A.__dict__[A._array_fields[0]]
        kind: Any = type(leaf)
        place = None if kind is np.ndarray else leaf.data.device_id
        if checks.DEBUG:
            A.check()
    else:
        library = _libraries.get(type(A)) or sparse(A)
        kind, place, shape = library.kind, A.device, (A.n_rows, A.n_cols)
        args = library.cast(op, A, args)
    floats, layout, named, results = library.floats, library.layout, op.named, [A]
    bound: dict[str, Named] = {}
    for name, value in args.items():
        arg = named[name]
        rows, check = arg.rows, arg.check
        if value is None and arg.optional:
            if arg.own:
                value, like = A.data if layout is None else A.csr_values, bound[arg.like]
                if value is not None and value.dtype != like[1].dtype:
                    value = library.own_values(op, A, value, like)
        elif rows:
            size = A.nnz if rows == "entries" else 1 if rows == "heads" else shape[rows == "cols"]
            like = bound.get(arg.like)
            if not (
                (type(value) is kind or (layout is not None and isinstance(value, kind)))
                and value.dtype in floats
                and value.ndim in arg.quick
                and value.shape[0] == size
                and (like is None or value.dtype == like[1].dtype)
                and (not arg.behind or value.shape[1:] == like[1].shape[arg.behind])
                and (
                    place is None
                    or (layout is None and value.data.device_id == place)
                    or (layout is not None and value.device == place and value.layout is layout)
                )
                and (layout is not None or check not in ("factor", "vectors"))
            ):
                value = getattr(library, check)(name, value, arg, A, size, like)
            bound[arg.name] = name, value
            bound.setdefault(FIRST, (name, value))
        elif check == "word":
            if type(value) is not str or value not in arg.words:
                word(name, value, arg.words)
        elif arg.test:
            value = arg.test(name, value)
        elif check == "precision":
            precision(value, *bound[FIRST])
        elif check == "out":
            arrays = [bound[each.name][1] if each.name in bound else None for each in op.arguments]
            ((wanted, like),) = op.results(A, *arrays)
            value = output(value, shape=wanted, like=like, inputs=arrays, A=A)
        results.append(value)
    return results


def sparse(A: object) -> Format:
    """Check for a sparse matrix of this package."""
    if isinstance(A, Format):
        if checks.DEBUG:
            A.check()
        return A
    if isinstance(A, Graph):
        raise DtypeError("A is a Graph: give one of its formats, graph.csr for instance.")
    raise DtypeError(
        f"A is a {type(A).__name__}: give a sparsefmt format (COO, CSR, CSC, SGT, CBSR), "
        "for instance from sparsefmt.from_scipy()."
    )


# Words and numbers


def word(name: str, value: object, allowed: Iterable[str]) -> str:
    """Check for one of the allowed words."""
    if not (isinstance(value, str) and value in allowed):
        *names, last = (f'"{each}"' for each in allowed)
        raise UnsupportedError(f"{name} is {value!r}: use {', '.join(names)} or {last}.")
    return value


def flag(name: str, value: object, kinds: Any = bool) -> bool:
    """Check for True or False; ``kinds`` are the types that may say it."""
    if not isinstance(value, kinds):
        raise DtypeError(f"{name} is {value!r}: give True or False.")
    return bool(value)


def count_of_features(k: int, feat: int) -> None:
    """Check how many of ``feat`` features to keep."""
    if not 1 <= k <= feat:
        raise ShapeError(f"k is {k} but a row has {feat} features: k lies between 1 and {feat}.")


def precision(value: object, name: str, X: Array) -> None:
    """Check for one of ``PRECISIONS`` beside float32 features, or None."""
    if value is None:
        return
    if not (isinstance(value, str) and value in PRECISIONS):
        raise UnsupportedError(f'precision is {value!r}: use "tf32" or "bf16", or leave it out.')
    if X.dtype != np.float32:
        raise UnsupportedError(
            f'precision is "{value}" but {name} is {X.dtype}: it is for float32, leave it out.'
        )


# NumPy and CuPy


class Arrays:
    """NumPy and CuPy: arrays of other libraries come in through DLPack, sequences are copied."""

    kind = np.ndarray
    floats = frozenset(np.dtype(name) for name in ("float16", "float32", "float64"))
    layout = None

    def cast(self, op: Op, A: Any, args: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments: arrays are never cast."""
        return args

    def own_values(self, op: Op, A: Format, values: Array, like: Named) -> Never:
        """Raise what says that the matrix's own values have another dtype."""
        raise DtypeError(
            f"A.data is {A.dtype} but {like[0]} is {like[1].dtype}: cast one, "
            f"{like[0]}.astype(A.dtype) or A.astype({like[0]}.dtype)."
        )

    def features(
        self, name: str, value: Any, arg: Arg, A: Format, size: int, like: Named | None
    ) -> Array:
        """Check for (size, feat) or (size, heads, feat)."""
        axis, heads = _AXES[arg.rows], 3 in arg.axes
        if isinstance(value, Format):
            product = ", or spgemm(A, S) for row-balanced features" * (value.format == "cbsr")
            dense = f"give a dense array, {name}.toarray(){product}"
            raise DtypeError(f"{name} is a {type(value).__name__}: {dense}.")
        array = as_array(name, value, beside=A._indices)
        if array.ndim == 0:
            one = f"one row per {axis} of A"
            raise ShapeError(
                f"{name} is a single {array.dtype}, of shape (): give a matrix, {one}."
            )
        if array.ndim not in arg.axes:
            hint = f"{name}[:, None]" if array.ndim == 1 else f"{name}.reshape(len({name}), -1)"
            shapes = "(rows, feat) or (rows, heads, feat)" if heads else "(rows, feat)"
            raise ShapeError(f"{name} has shape {array.shape}: give {shapes}, such as {hint}.")
        if array.shape[0] != size:
            raise ShapeError(
                f"{name} has {array.shape[0]} rows but A has {size} {axis}s: {name} needs one row "
                f"per {axis} of A ({name}.shape == {array.shape}, A.shape == {A.shape})."
            )
        return self._alike(name, _values_beside(name, array, A), arg, like)

    def _alike(self, name: str, array: Array, arg: Arg, like: Named | None) -> Array:
        """Check for the shape behind the rows, and the dtype, of another argument."""
        if like is None:
            return array
        if arg.behind and array.shape[1:] != like[1].shape[1:]:
            raise ShapeError(
                f"{name} has shape {array.shape} but {like[0]} has {like[1].shape}: give both the "
                "same heads and feature width."
            )
        same_dtype(name, array, *like)
        return array

    def factor(
        self, name: str, value: Any, arg: Arg, A: Format, size: int, like: Named | None
    ) -> Array:
        """Check for one factor of each row or column; contiguous, float32 beside 2 bytes."""
        array, axis = as_array(name, value, empty=np.float64, beside=A._indices), _AXES[arg.rows]
        if array.ndim == 0 and array.dtype.kind in "iuf":
            full = f"full({size}, {array.item()}, {'A' if like is None else like[0]}.dtype)"
            raise ShapeError(
                f"{name} has shape (): give one factor per {axis} of A, "
                f"{namespace(A._indices).__name__.replace('numpy', 'np')}.{full} for instance."
            )
        if array.shape != (size,):
            raise ShapeError(
                f"{name} has shape {array.shape}: give ({size},), one factor per {axis} of A "
                f"(A.shape == {A.shape})."
            )
        checks.value_dtype(f"{name}.dtype", array.dtype)
        narrow = like is not None and like[1].dtype.itemsize == 2
        if like is not None and not (narrow and array.dtype == np.float32):
            same_dtype(name, array, *like)
        _beside(name, array, A)
        if narrow:
            with on_device_of(array), allocating(f"{name} in float32"):
                array = array.astype(np.float32)
        return contiguous(array)

    def entries(
        self, name: str, value: Any, arg: Arg, A: Format, size: int, like: Named | None
    ) -> Array:
        """Check for one value, or a row of them, at each stored entry."""
        array = as_array(name, value, empty=np.float64, beside=A._indices)
        if array.ndim not in arg.axes or array.shape[0] != size:
            shapes = f"({size},) or ({size}, heads)"
            if 1 not in arg.axes:
                hint = f"{name}[:, None] for instance" if array.ndim == 1 else ""
                shapes = f"({size}, feat), {hint}" if hint else f"({size}, feat)"
            raise ShapeError(
                f"{name} has shape {array.shape} but A stores {size} entries: give {shapes}, in "
                "the order of A's data."
            )
        array = _values_beside(name, array, A)
        if like is None:
            return array
        if arg.alike == "dtype" and array.ndim == 2 and like[1].ndim == 3:
            heads, other = array.shape[1], like[1].shape[1]
            if heads != other:
                raise ShapeError(
                    f"{name} has {heads} heads but {like[0]} has {other}: give both the same, or "
                    f"{like[0]} of shape (n_cols, feat) for all heads."
                )
        if arg.behind and 1 in arg.axes and array.shape != like[1].shape:
            raise ShapeError(
                f"{name} has shape {array.shape} but {like[0]} {like[1].shape}: give the same."
            )
        return self._alike(name, array, arg, like)

    def scores(
        self, name: str, value: Any, arg: Arg, A: Format, size: int, like: Named | None
    ) -> Array:
        """Check for one score of each head; one head may have an axis or none."""
        array, each = as_array(name, value, empty=np.float64, beside=A._indices), _ENDS[arg.rows]
        if like is None and array.ndim not in (1, 2):
            raise ShapeError(
                f"{name} has shape {array.shape}: give ({size},) or ({size}, heads), one score per "
                f"{each}."
            )
        heads = array.shape[1:] if like is None else like[1].shape[arg.behind]
        if array.shape not in ([(size,), (size, 1)] if heads in ((), (1,)) else [(size, *heads)]):
            order = ", in the order of A's data" * (arg.rows == "entries")
            raise ShapeError(
                f"{name} has shape {array.shape}: give {(size, *heads)}, one score per {each}"
                f"{' and head' * bool(heads)}{order} (A.shape == {A.shape}, A.nnz == {A.nnz})."
            )
        return self._floats(name, array, A, like)

    def _floats(self, name: str, array: Array, A: Format, like: Named | None) -> Array:
        """Check for the dtype of another argument, or float32 beside 2 bytes."""
        checks.value_dtype(f"{name}.dtype", array.dtype)
        if like and not (like[1].dtype.itemsize == 2 and array.dtype == np.float32):
            same_dtype(name, array, *like)
        checks.same_device(name, array, "A", A._indices)
        return array

    def vectors(self, name: str, value: Any, arg: Arg, A: Format, size: int, like: Named) -> Array:
        """Check for one vector of each head; one head may have an axis or none."""
        array, (other, x) = as_array(name, value, empty=np.float64, beside=A._indices), like
        shape = x.shape[1:]
        one = [shape[-1:], (1, shape[-1])]
        if array.shape not in (one if shape[:-1] in ((), (1,)) else [shape]):
            per_head = "one vector per head" if len(shape) == 2 else "one vector"
            raise ShapeError(
                f"{name} has shape {array.shape}: give {shape}, {per_head} ({other}.shape == "
                f"{x.shape})."
            )
        return self._floats(name, array, A, like)

    def balanced(
        self, name: str, value: Any, arg: Arg, A: Format, size: int, like: Named | None
    ) -> CBSR:
        """Check for row-balanced features, as wide as others."""
        if not isinstance(value, CBSR):
            raise DtypeError(
                f"{name} is a {type(value).__name__}: give a CBSR, maxk(X, k) for instance."
            )
        if value.n_rows != size:
            raise ShapeError(
                f"{name} has {value.n_rows} rows but A has {size} columns: {name} needs one row "
                f"per column of A ({name}.shape == {value.shape}, A.shape == {A.shape})."
            )
        if like is not None and like[1].shape[1] != value.n_cols:
            raise ShapeError(
                f"{name} has {value.n_cols} columns but {like[0]} has shape {like[1].shape}: give "
                "both the same feature width."
            )
        checks.same_device(name, value.indices, "A", A._indices)
        return value


ARRAYS = Arrays()
_AXES: dict[Any, str] = {"rows": "row", "cols": "column"}
_ENDS: dict[Any, str] = {"rows": "target", "cols": "source", "entries": "stored entry"}


def same_dtype(name: str, array: Array, other_name: str, other: Any) -> None:
    """Check for the dtype of another array."""
    if array.dtype != other.dtype:
        raise DtypeError(
            f"{name} is {array.dtype} but {other_name} is {other.dtype}: cast one, "
            f"{name}.astype({other_name}.dtype) for instance."
        )


def _values_beside(name: str, array: Array, A: Format) -> Array:
    """Check for floats on the device of ``A``."""
    checks.value_dtype(f"{name}.dtype", array.dtype)
    _beside(name, array, A)
    return array


def _beside(name: str, array: Array, A: Format) -> None:
    """Check for an array on the device of ``A``."""
    if device_of(array) != A.device:
        raise DeviceError(
            f"{name} is on {device_of(array)} but A is on {A.device}: move one of them, "
            f'A.to("{device_of(array)}") for instance.'
        )


def structure(A: Format) -> Format:
    """Return ``A`` without its values, where only the structure is read: conversions move less."""
    return A if A.format in ("csr", "cbsr") else A.with_data(None)


# Results


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
        try:  # entering a context would take three calls
            return np.empty(shape, like.dtype)
        except MemoryError as error:
            raise out_of_memory(f"a result of shape {shape}", error) from error
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
