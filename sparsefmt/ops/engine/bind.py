"""Check the arguments of a call, by the row of its operation, for NumPy, CuPy and torch.

``bind`` takes one quick look at each array.  What fails it goes to ``check`` of the library, which
converts the argument to an array that kernels take, or raises an error that names the argument,
its value and the mend.
"""

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
    out_of_memory,
)
from ...formats.base import Format
from ...formats.cbsr import CBSR
from ...formats.sgt import SGT
from ...graph.graph import Graph
from ...interop.torch import is_tensor
from .memory import is_contiguous, memory_of
from .table import FIRST, Arg, Op

TF32, BF16 = PRECISIONS = ("tf32", "bf16")  #: to what float32 features may be rounded

#: An array that has been checked, behind the name of its argument in the user's call.
Named = tuple[str, Any]


def bind(op: Op, A: Any, /, **args: Any) -> list[Any]:
    """Check the matrix and the arguments of a call; return them, as arrays, in the caller's order.

    Arguments come by their names in the user's function, see ``op.named``, each behind the one that
    it is ``like``.  An optional None stays None; a ``stored`` one becomes the matrix's values.
    """
    library: Any = ARRAYS
    if isinstance(A, Format):
        shape = A.shape
        leaf = A.__dict__[A._array_fields[0]]
        kind: Any = type(leaf)
        place: Any = None if kind is np.ndarray else leaf.data.device_id  # torch's: a device
        if checks.DEBUG:
            A.check()
    else:
        library = _libraries.get(type(A)) or sparse(A)  # which raises
        kind, place, shape = library.array_class, A.device, (A.n_rows, A.n_cols)
        if library.casts(A.kind):
            args = library.cast(op, A, args)
    floats, layout, named, results = library.floats, library.layout, op.named, [A]
    arrays = layout is None  # of NumPy or CuPy, not tensors
    bound: dict[str, Any] = {}  # by names of the row
    for name, value in args.items():
        arg = named[name]
        if value is None and arg.optional:
            if arg.stored:
                value = A.data if arrays else A.csr_values
                if value is not None and value.dtype != bound[arg.like][1].dtype:
                    value = library.own_values(op, A, value, bound[arg.like])
        elif arg.rows:
            axis, like, trailing = arg.axis, bound.get(arg.like), arg.trailing
            # Vectors of heads may have an axis of length 1 before the heads, as in PyG.
            size = shape[axis] if axis is not None else A.nnz if arg.rows == "entries" else 1
            if not (
                (type(value) is kind or (not arrays and isinstance(value, kind)))
                and (value.dtype in floats if like is None else value.dtype == like[1].dtype)
                and value.ndim in arg.quick
                and value.shape[0] == size
                and (like is None or not trailing or value.shape[1:] == like[1].shape[trailing])
                and (place is None or place == (value.data.device_id if arrays else value.device))
                and (not arg.is_copied if arrays else value.layout is layout)
            ):
                value = library.check(name, value, arg, A, size, like)
            bound[arg.name] = named_value = name, value
            if FIRST not in bound:
                bound[FIRST] = named_value
        elif arg.check == "word":
            if type(value) is not str or value not in arg.words:
                word(name, value, arg.words)
        elif arg.test:
            value = arg.test(name, value)
        elif arg.check == "precision":
            precision(value, *bound[FIRST])
        elif arg.check == "out":  # for None, which is optional, ``call`` allocates
            inputs = [bound[each][1] if each in bound else None for each in op.names]
            ((wanted, of),) = op.results(A, *inputs)
            value = output(value, shape=wanted, like=of, inputs=inputs, A=A)
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


def array_of(name: str, value: object, *, like: Array | None = None) -> Array:
    """Convert what an operation takes to an array; refuse tensors, which expect one back."""
    if is_tensor(value):
        raise DtypeError(
            f"{name} is a torch.Tensor: sparsefmt.autograd has functions of tensors, such as "
            f"spmm(Graph(A), {name}); or give {name}.numpy(force=True), or a CuPy array."
        )
    return as_array(name, value, empty=np.float64, like=like)


# Words and numbers


def word(name: str, value: object, allowed: Iterable[str]) -> str:
    """Check for one of the allowed words."""
    if not (isinstance(value, str) and value in allowed):
        *names, last = (f'"{each}"' for each in allowed)
        raise UnsupportedError(f"{name} is {value!r}: use {', '.join(names)} or {last}.")
    return value


def flag(name: str, value: object, kinds: Any = bool) -> bool:
    """Check for True or False, of one of the types ``kinds``."""
    if not isinstance(value, kinds):
        raise DtypeError(f"{name} is {value!r}: give True or False.")
    return bool(value)


def count_of_features(k: int, feat: int) -> None:
    """Check how many of ``feat`` features to keep."""
    if not 1 <= k <= feat:
        raise ShapeError(f"k is {k} but a row has {feat} features: k lies between 1 and {feat}.")


def precision(value: object, name: str, X: Any) -> None:
    """Check for one of ``PRECISIONS``, beside float32 features of NumPy or CuPy."""
    if not (isinstance(value, str) and value in PRECISIONS):
        raise UnsupportedError(f'precision is {value!r}: use "tf32" or "bf16", or leave it out.')
    if X.dtype != np.float32:
        raise UnsupportedError(
            f'precision is "{value}" but {name} is {X.dtype}: it is for float32, leave it out.'
        )


# Arrays of a library


class Arrays:
    """Checks of NumPy's and CuPy's arrays, to which those of others are converted, and sequences.

    Its subclass for torch (``register_library``) replaces those that differ, and adds ``cast``.
    """

    array_class: Any = np.ndarray
    floats: frozenset[Any] = frozenset(np.dtype(name) for name in ("float16", "float32", "float64"))
    layout: Any = None  #: of dense tensors; arrays have none
    matrix, code = "A", "A"  #: the matrix in the sentences of errors, and in their code
    order = "in the order of A's data"  #: of values of entries, in errors

    def own_values(self, op: Op, A: Any, values: Any, like: Named) -> Any:
        """Raise DtypeError: they are not of the dtype of ``like``.  Torch's may be cast first."""
        name, X = like
        mend = f"{name}.astype(A.dtype) or A.astype({name}.dtype)"
        raise DtypeError(f"A.data is {A.dtype} but {name} is {X.dtype}: cast one, {mend}.")

    def check(self, name: str, value: Any, arg: Arg, A: Any, size: int, like: Named | None) -> Any:
        """Check an argument that needs ``size`` rows; return an array, or raise what is wrong."""
        if arg.balanced:
            return _balanced(name, value, A, size, like)
        array = self.dense(name, value, A)
        wrong = getattr(self, arg.check)(name, array, arg, A, size, like)
        if wrong:
            raise ShapeError(f"{name} {wrong}.")
        self.kind_and_device(name, array, A)
        narrow = like is not None and arg.widens and like[1].dtype.itemsize == 2
        if like is not None and not (narrow and self.is_float32(array, arg)):
            self.same_dtype(name, array, like, A)
        return self.finished(name, array, arg, narrow)

    def dense(self, name: str, value: Any, A: Any) -> Any:
        """Convert a value to an array, which stays on its device; raise DtypeError if sparse."""
        if isinstance(value, Format):
            product = ", or spgemm(A, S) for row-balanced features" * (value.format == "cbsr")
            dense = f"give a dense array, {name}.toarray(){product}"
            raise DtypeError(f"{name} is a {type(value).__name__}: {dense}.")
        return array_of(name, value, like=A._indices)

    def kind_and_device(self, name: str, array: Any, A: Any) -> None:
        """Check for a dtype of values, and the device of the matrix."""
        checks.value_dtype(f"{name}.dtype", array.dtype)
        _check_device(name, array, A)

    def is_float32(self, array: Any, arg: Arg) -> bool:
        """Return True if an argument is float32, which ``widens`` allows beside 2-byte features."""
        return bool(array.dtype == np.float32)

    def same_dtype(self, name: str, array: Any, like: Named, A: Any) -> None:
        """Check for the dtype of another argument."""
        same_dtype(name, array, *like)

    def finished(self, name: str, array: Any, arg: Arg, narrow: bool) -> Any:
        """Return a checked array as kernels take it: factors contiguous, and not of 2 bytes."""
        if arg.check != "factor":
            return array
        if narrow:
            with on_device_of(array), allocating(f"{name} in float32"):
                array = array.astype(np.float32)
        return contiguous(array)

    # What is wrong with a shape, by ``arg.check``

    def features(self, name: str, x: Any, arg: Arg, A: Any, size: int, like: Named | None) -> str:
        """Return what is wrong with the shape of features."""
        axis, shape = _AXES[arg.rows], tuple(x.shape)
        has = arg.axes.count  # torch.compile sets no guard on a number that ``in`` compares
        if x.ndim == 0:
            return (
                f"is a single {x.dtype}, of shape (): give a matrix, one row per {axis} of "
                f"{self.matrix}"
            )
        if not has(x.ndim):
            hint = f"{name}[:, None]" if x.ndim == 1 else f"{name}.reshape(len({name}), -1)"
            shapes = "(rows, feat)" + " or (rows, heads, feat)" * has(3)
            return f"has shape {shape}: give {shapes}, such as {hint}"
        if shape[0] != size:
            return (
                f"has {shape[0]} rows but {self.matrix} has {size} {axis}s: {name} needs one row "
                f"per {axis} of {self.matrix} ({name}.shape == {shape}, {self.code}.shape == "
                f"{(A.n_rows, A.n_cols)})"
            )
        return self._unlike(x, arg, like)

    def _unlike(self, x: Any, arg: Arg, like: Named | None) -> str:
        """Return what differs behind the rows of two arrays."""
        if like is None or not arg.trailing or x.shape[1:] == like[1].shape[arg.trailing]:
            return ""
        shapes = f"has shape {tuple(x.shape)} but {like[0]} has {tuple(like[1].shape)}"
        return f"{shapes}: give both the same heads and feature width"

    def factor(self, name: str, x: Any, arg: Arg, A: Any, size: int, like: Named | None) -> str:
        """Return what is wrong with the shape of factors."""
        axis = _AXES[arg.rows]
        if x.ndim == 0 and self.layout is None and x.dtype.kind in "iuf":
            xp = namespace(A._indices).__name__.replace("numpy", "np")
            full = f"{xp}.full({size}, {x.item()}, {'A' if like is None else like[0]}.dtype)"
            return f"has shape (): give one factor per {axis} of A, {full} for instance"
        if x.shape == (size,):
            return ""
        of_matrix = f"{self.matrix} ({self.code}.shape == {(A.n_rows, A.n_cols)})"
        return f"has shape {tuple(x.shape)}: give ({size},), one factor per {axis} of {of_matrix}"

    def entries(self, name: str, x: Any, arg: Arg, A: Any, size: int, like: Named | None) -> str:
        """Return what is wrong with the shape of values, or rows, of entries."""
        shape, has = tuple(x.shape), arg.axes.count
        if not has(x.ndim) or shape[0] != size:
            shapes = f"({size},)" if has(1) else f"({size}, feat)"
            shapes += f" or ({size}, heads)" * (has(1) and has(2))
            if not has(1) and x.ndim == 1:
                shapes += f", {name}[:, None] for instance"
            stores = f"has shape {shape} but {self.matrix} stores {size} entries"
            return f"{stores}: give {shapes}, {self.order}"
        if like and arg.alike == "dtype" and x.ndim == 2 and like[1].ndim == 3:
            heads, of_like = shape[1], like[1].shape[1]
            if heads != of_like:
                same = f"give both the same, or {like[0]} of shape (n_cols, feat) for all heads"
                return f"has {heads} heads but {like[0]} has {of_like}: {same}"
        if like and arg.trailing and has(1) and x.shape != like[1].shape:
            return f"has shape {shape} but {like[0]} {tuple(like[1].shape)}: give the same"
        return self._unlike(x, arg, like)

    def scores(self, name: str, x: Any, arg: Arg, A: Any, size: int, like: Named | None) -> str:
        """Return what is wrong with the shape of scores; one head may have an axis or none."""
        each, shape = _ENDS[arg.rows], tuple(x.shape)
        if like is None and x.ndim not in (1, 2):
            return f"has shape {shape}: give ({size},) or ({size}, heads), one score per {each}"
        heads = shape[1:] if like is None else tuple(like[1].shape[arg.trailing])
        shapes = [(size,), (size, 1)] if heads in ((), (1,)) else [(size, *heads)]
        if x.shape == shapes[0] or x.shape == shapes[-1]:  # not ``in``, see ``features``
            return ""
        each += " and head" * bool(heads) + f", {self.order}" * (arg.rows == "entries")
        sizes = f"{self.code}.shape == {(A.n_rows, A.n_cols)}, {self.code}.nnz == {A.nnz}"
        return f"has shape {shape}: give {(size, *heads)}, one score per {each} ({sizes})"

    def vectors(self, name: str, x: Any, arg: Arg, A: Any, size: int, like: Named | None) -> str:
        """Return what is wrong with the shape of one vector for each head; see ``scores``."""
        like_name, features = like or ("", x)
        shapes = self.shapes_of_vectors(tuple(features.shape[1:]))
        if x.shape == shapes[0] or x.shape == shapes[-1]:
            return ""
        row, shape = tuple(features.shape), tuple(x.shape)
        each = "one vector" + " per head" * (len(row) == 3)
        return f"has shape {shape}: give {row[1:]}, {each} ({like_name}.shape == {row})"

    def shapes_of_vectors(self, row: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes of the vectors of features whose rows have that shape."""
        return [row[-1:], (1, row[-1])] if row[:-1] in ((), (1,)) else [row]


ARRAYS = Arrays()
_libraries: dict[type, Arrays] = {}


def register_library(graph: type, library: Arrays) -> None:
    """Check calls whose ``A`` is of that class by ``library``: torch's ``GraphTensors``."""
    _libraries[graph] = library


_AXES: dict[Any, str] = {"rows": "row", "cols": "column"}
#: What scores belong to.
_ENDS: Any = {"rows": "target", "cols": "source", "entries": "stored entry", "vertices": "vertex"}


def _balanced(name: str, S: object, A: Format, size: int, like: Named | None) -> CBSR:
    """Check for row-balanced features, as wide as others."""
    if not isinstance(S, CBSR):
        raise DtypeError(f"{name} is a {type(S).__name__}: give a CBSR, maxk(X, k) for instance.")
    if S.shape[0] != size:
        raise ShapeError(
            f"{name} has {S.n_rows} rows but A has {size} columns: {name} needs one row per "
            f"column of A ({name}.shape == {S.shape}, A.shape == {A.shape})."
        )
    if like is not None and like[1].shape[1] != S.shape[1]:
        raise ShapeError(
            f"{name} has {S.n_cols} columns but {like[0]} has shape {like[1].shape}: give both the "
            "same feature width."
        )
    _check_device(name, S.indices, A)
    return S


def same_dtype(name: str, array: Any, like_name: str, like: Any) -> None:
    """Check for the dtype of another array."""
    if array.dtype != like.dtype:
        raise DtypeError(
            f"{name} is {array.dtype} but {like_name} is {like.dtype}: cast one, "
            f"{name}.astype({like_name}.dtype) for instance."
        )


def _check_device(name: str, array: Array, A: Format) -> None:
    """Check for an array on the device of ``A``."""
    of_A = A._indices
    on_cpu, is_same = type(of_A) is np.ndarray, type(array) is type(of_A)
    if is_same and (on_cpu or array.data.device_id == of_A.data.device_id):
        return  # names of devices take 1 µs
    if device_of(array) != A.device:
        raise DeviceError(
            f"{name} is on {device_of(array)} but A is on {A.device}: move one of them, "
            f'A.to("{device_of(array)}") for instance.'
        )


def structure(A: Format) -> Format:
    """Return ``A`` without its values, so that conversions move less; a CSR or CBSR as it is."""
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
    """Check ``out``, which may overlap no input and no array of ``A``; allocate it for None."""
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
    if not (out.flags.c_contiguous if on_cpu else is_contiguous(out)):
        raise FormatError("out is not C-contiguous: give a fresh array, or none.")
    if on_cpu and not out.flags.aligned:
        raise FormatError("out is not aligned to its dtype: give a fresh array, or none.")
    if on_cpu and not out.flags.writeable:
        raise FormatError("out is read-only: give a writeable array, or none.")
    low, high = _bounds(out)
    places = [_bounds(a) for a in inputs if a is not None]
    for begin, end in places if A is None else (*places, *_bounds_of(A)):
        if low < end and begin < high:
            raise FormatError("out overlaps an input: give an array of its own.")
    return out


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
    """Return the bounds of the arrays of ``A``, and of those built for an SGT; cached."""
    cached: tuple[Array | None, tuple[tuple[int, int], ...]] | None = A.__dict__.get("_bounds")
    if cached is None or cached[0] is not A.data:
        cached = A.data, tuple(map(_bounds, A._arrays().values()))
        object.__setattr__(A, "_bounds", cached)
    return cached[1] if type(A) is not SGT else (*cached[1], *map(_bounds, A._built_arrays()))


def _bounds(a: Any) -> tuple[int, int]:
    """Return the addresses where an array begins and ends; (0, 0) if it has no values."""
    on_cpu, nbytes = isinstance(a, np.ndarray), a.nbytes
    start = a.__array_interface__["data"][0] if on_cpu else a.data.ptr
    if nbytes and not (a.flags.c_contiguous if on_cpu else is_contiguous(a)):
        reach = [stride * (size - 1) for stride, size in zip(a.strides, a.shape, strict=True)]
        low = start + sum(step for step in reach if step < 0)
        return low, start + sum(step for step in reach if step > 0) + a.itemsize
    return (start, start + nbytes) if nbytes else (0, 0)
