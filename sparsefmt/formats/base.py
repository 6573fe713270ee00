"""The base class of all formats, and the store of what is built once of a structure."""

import warnings
from _thread import RLock  # ``threading`` has a function around it
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import numpy as np

from . import checks
from .arrays import (
    Array,
    DType,
    allocating,
    as_array,
    contiguous,
    device_of,
    namespace,
    on_device_of,
    to_device,
)

if TYPE_CHECKING:
    from .compressed import COO, CSC, CSR
    from .sgt import SGT

Level = Literal["full", "cheap"]
_UNREAD = (
    'validate="cheap" did not read the indices: one out of range reads foreign memory.  With '
    "SPARSEFMT_DEBUG=1, as here, every operation reads them first."
)
Made = TypeVar("Made")
FormatName = Literal["coo", "csr", "csc", "sgt", "cbsr"]


class Built:
    """What was built of a structure, or of its values: each once, for all that share them.

    What is there is read without a lock.  Who builds holds it, so that nobody else builds too.
    """

    def __init__(self) -> None:
        self.lock = RLock()  # what is built may ask for something else
        self.parts: dict[Hashable, Any] = {}  #: written to under the lock

    def ask(
        self, key: Hashable, build: Callable[[], Made], keep: Callable[[Made], bool] | None = None
    ) -> Made:
        """Return what was built for the key, or build it; ``keep`` may decline to store it."""
        cached: Made | None = self.parts.get(key)  # most calls: hardly anything is None
        if cached is not None:
            return cached
        with self.lock:
            if key in self.parts:
                there: Made = self.parts[key]
                return there
            made = self._run(key, build)
            if keep is None or keep(made):
                self.parts[key] = made
            return made

    def items(self) -> list[tuple[Any, Any]]:
        """List what was built, with its keys."""
        with self.lock:
            return [*self.parts.items()]

    def _run(self, key: Hashable, build: Callable[[], Made]) -> Made:
        """Build what nobody has asked for before, under the lock."""
        return build()


class Shaped:
    """A mixin with ``n_rows`` and ``n_cols``, for a class with a ``shape``."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def shape(self) -> tuple[int, int]:
            """Return the shape ``(n_rows, n_cols)``."""

    @property
    def n_rows(self) -> int:
        """Return the number of rows: target vertices."""
        return self.shape[0]

    @property
    def n_cols(self) -> int:
        """Return the number of columns: source vertices."""
        return self.shape[1]


class Format(Shaped):
    """A sparse matrix as a frozen set of arrays plus a static shape; each format is a dataclass.

    The arrays are all NumPy or all CuPy on one device.  ``data=None`` means an unweighted structure
    (every stored value is 1) and selects the kernels that never read values.
    """

    format: ClassVar[FormatName]
    _array_fields: ClassVar[tuple[str, ...]]

    if TYPE_CHECKING:
        shape: tuple[int, int]

        @property
        def data(self) -> Array | None:
            """Return the values of the stored entries, None for an unweighted structure."""

        @property
        def nnz(self) -> int:
            """Return the number of stored entries."""

        def _check_cheap(self) -> None: ...
        def _check_full(self) -> None: ...

    def __init_subclass__(cls) -> None:
        """Set ``__module__`` to the public import path, so that pickles outlive moves of files."""
        if cls.__module__.startswith(f"{__package__}."):
            cls.__module__ = "sparsefmt"

    def __post_init__(self, validate: Level) -> None:
        """Convert the fields to arrays, without a copy where possible, and check them."""
        checks.level("validate", validate)
        object.__setattr__(self, "shape", checks.shape(self.shape))
        for name in self._array_fields:
            value, is_data = getattr(self, name), name == "data"
            if value is not None or not is_data:
                array = as_array(name, value, empty=np.float64 if is_data else np.int64)
                object.__setattr__(self, name, array)
        self._check_cheap()
        for name, array in self._arrays().items():
            object.__setattr__(self, name, contiguous(array))
        if validate == "full":
            self._check_full()
        elif checks.DEBUG:
            warnings.warn(_UNREAD, stacklevel=3)

    @classmethod
    def _trusted(cls, **fields: Any) -> Self:
        """Build a matrix without any check, of arrays that this package has made."""
        self = object.__new__(cls)
        self.__dict__.update(fields)
        return self

    def _replace(self, **changes: Any) -> Self:
        fields = {**_fields(self), **changes}
        if {*changes} <= {"data"}:
            fields["_of_structure"] = self._built()
        return type(self)._trusted(**fields)

    def _built(self) -> Built:
        """Return the cache of what is built of the structure, shared by all that have it."""
        built: Built | None = self.__dict__.get("_of_structure")
        return self.__dict__.setdefault("_of_structure", Built()) if built is None else built

    def _built_of_values(self) -> Built:
        """Return the cache of what is built of this matrix's values."""
        built: Built = self.__dict__.setdefault("_of_values", Built())
        return built

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields to pickle, without caches."""
        return _fields(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by protocol 2, that of ``torch.save``, what ``torch.load`` may read: plain bytes.

        It calls functions that a library has registered as safe, ``convert.unpickled``, alone.
        """
        if protocol != 2:
            return super().__reduce_ex__(protocol)
        from .convert import unpickled

        arrays = self.to("cpu")._arrays().items()
        fields = {name: (a.dtype.name, a.shape, a.tobytes()) for name, a in arrays}
        return unpickled, (self.format, self.device.partition(":")[0], fields, dict(_static(self)))

    def _arrays(self) -> dict[str, Array]:
        arrays = {name: getattr(self, name) for name in self._array_fields}
        return {name: array for name, array in arrays.items() if array is not None}

    @property
    def _indices(self) -> Array:
        """Return the first array of the format, for its device and index dtype."""
        return getattr(self, self._array_fields[0])

    # What it is

    @property
    def ndim(self) -> int:
        """Return the number of dimensions, always 2."""
        return 2

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Return the dtype of the values, None for an unweighted structure."""
        return None if self.data is None else self.data.dtype

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """Return the dtype of the index arrays: int32 or int64 (CBSR: maybe narrower)."""
        dtype: np.dtype[Any] = self._indices.dtype
        return dtype

    @property
    def device(self) -> str:
        """Return the device: ``"cpu"`` or ``"cuda:<ordinal>"``."""
        return device_of(self._indices)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays together."""
        return sum(int(array.nbytes) for array in self._arrays().values())

    def check(self, level: Level = "full") -> None:
        """Raise if the arrays do not form a valid matrix of this format.

        Parameters
        ----------
        level : "full" or "cheap"
            ``"cheap"`` looks at shapes, dtypes and devices in O(1); ``"full"`` also reads every
            index, with one kernel and one synchronisation on a GPU.

        Raises
        ------
        FormatError, ShapeError, DtypeError, IndexRangeError, DeviceError
        """
        checks.level("level", level)
        self._check_cheap()
        if level == "full":
            self._check_full()

    # The same matrix in other memory

    def to(self, device: str) -> Self:
        """Move the matrix to ``"cpu"``, ``"cuda"`` or ``"cuda:<ordinal>"``; itself if there."""
        moved = {name: to_device(array, device) for name, array in self._arrays().items()}
        unmoved = all(moved[name] is array for name, array in self._arrays().items())
        return self if unmoved else self._replace(**moved)

    def copy(self) -> Self:
        """Copy the matrix and all its arrays."""
        with on_device_of(self._indices), allocating(f"a copy of {self!r}"):
            return self._replace(**{name: array.copy() for name, array in self._arrays().items()})

    def astype(self, dtype: DType = None, *, index_dtype: DType = None) -> Self:
        """Convert values and indices to other dtypes; arrays that have them already are shared.

        Values are rounded; those beyond the range of ``dtype`` become infinite, as in NumPy.

        Parameters
        ----------
        dtype : float16, bfloat16, float32 or float64, optional
            For the values.  An unweighted structure has none and stays unweighted.
        index_dtype : int32 or int64, optional

        Raises
        ------
        IndexRangeError
            If the matrix is too large for ``index_dtype``: no cast of indices is ever lossy.
        DtypeError
            If values or indices cannot have that dtype.
        """
        targets: dict[str, np.dtype[Any]] = {}
        if index_dtype is not None:
            target = checks.index_dtype("index_dtype", index_dtype)
            checks.sizes_fit(self.shape, self.nnz, target)
            arrays = self._arrays().items()
            targets = {name: target for name, array in arrays if array.dtype == self.index_dtype}
        if dtype is not None:
            targets["data"] = checks.value_dtype("dtype", dtype)
        with on_device_of(self._indices), allocating(f"a cast of {self!r}"):
            return self._replace(
                **{
                    name: array.astype(targets[name], copy=False)
                    for name, array in self._arrays().items()
                    if name in targets
                }
            )

    def with_data(self, data: Array | None) -> Self:
        """Return the same structure with other values (shared, not copied), or without.

        ``data`` has one value per stored entry, in this format's own order (SGT: in CSR order).
        """
        if data is not None:
            data = as_array("data", data, empty=np.float64, like=self._indices)
        self._replace(data=data)._check_cheap()
        return self._replace(data=None if data is None else contiguous(data))

    # The same matrix in other formats

    def asformat(self, format: FormatName, **options: Any) -> Any:
        """Convert the matrix to the format of that name; itself if it has it already.

        ``options`` go to the conversion: ``tile=(16, 8)`` for ``"sgt"``.  Values, explicit zeros,
        duplicates and empty rows are kept.
        """
        from . import convert

        return convert.to_format(self, format, **options)

    def asformat_with_perm(self, format: FormatName, **options: Any) -> tuple[Any, Array]:
        """Return ``(B, perm)`` in that format, where ``B.data == A.data[perm]``, weighted or not.

        ``perm`` numbers the entries of a CBSR row by row: ``B.data == A.data.ravel()[perm]``.
        """
        from . import convert

        return convert.to_format_with_perm(self, format, **options)

    def tocoo(self) -> "COO":
        """Convert the matrix to COO, in the order of its entries; shares what it can."""
        result: COO = self.asformat("coo")
        return result

    def tocsr(self) -> "CSR":
        """Convert the matrix to CSR; the entries of a row stay in their order."""
        result: CSR = self.asformat("csr")
        return result

    def tocsc(self) -> "CSC":
        """Convert the matrix to CSC; the entries of a column stay in their order."""
        result: CSC = self.asformat("csc")
        return result

    def tosgt(self, tile: tuple[int, int] = (16, 8)) -> "SGT":
        """Convert the matrix to condensed tiles, ``(height, width)`` each (TC-GNN, section 3)."""
        result: SGT = self.asformat("sgt", tile=tile)
        return result

    def tocoo_with_perm(self) -> tuple["COO", Array]:
        """Return ``tocoo()`` and the permutation of its edge values."""
        return self.asformat_with_perm("coo")

    def tocsr_with_perm(self) -> tuple["CSR", Array]:
        """Return ``tocsr()`` and the permutation of its edge values."""
        return self.asformat_with_perm("csr")

    def tocsc_with_perm(self) -> tuple["CSC", Array]:
        """Return ``tocsc()`` and the permutation of its edge values."""
        return self.asformat_with_perm("csc")

    def tosgt_with_perm(self, tile: tuple[int, int] = (16, 8)) -> tuple["SGT", Array]:
        """Return ``tosgt(tile)`` and the permutation of its edge values."""
        return self.asformat_with_perm("sgt", tile=tile)

    def toarray(self, dtype: DType = None) -> Array:
        """Convert the matrix to a dense array on the same device; duplicates add up.

        ``dtype`` defaults to that of the values, float32 for an unweighted structure.
        """
        from . import convert

        return convert.to_dense(self, dtype)

    def toarray_with_perm(self, dtype: DType = None) -> tuple[Array, Array]:
        """Return ``(X, cells)``: a dense array and the cell of each stored entry in ``X.ravel()``.

        The gradient of the entries is ``dX.ravel()[cells]``.
        """
        from . import convert

        return convert.to_dense(self, dtype), convert.dense_cells(self)

    def __getitem__(self, key: Any) -> Self:
        """Return the rows and columns of slices, masks or integers: ``A[rows]``, ``A[:, cols]``.

        The result is a copy in this format (``A[:, :]`` is ``A`` itself); a COO comes back with its
        rows (or columns) in order.
        """
        from . import convert

        result: Self = convert.take(self, key)
        return result

    def __matmul__(self, X: Array) -> Array:
        """Multiply by a dense ``X`` of shape (n_cols, feat), see ``sparsefmt.ops.spmm``."""
        if isinstance(X, Format):
            return NotImplemented
        from ..ops.matmul.api import spmm  # the only import of an upper storey: the operator's op

        return spmm(self, X)

    __iter__ = None  # a matrix is no sequence: `for row in A` raises
    #: NumPy and CuPy leave ``X @ A`` and ``X * A`` alone instead of looping over elements.
    __array_ufunc__ = None

    def __eq__(self, other: object) -> bool:
        """Compare format, shape, dtypes, device and arrays; NaN equals NaN, and -0.0 equals 0.0."""
        if type(other) is not type(self):
            return NotImplemented
        mine, theirs = self._arrays(), other._arrays()
        if _static(self) != _static(other) or mine.keys() != theirs.keys():
            return False
        return all(_same(array, theirs[name]) for name, array in mine.items())

    __hash__ = None  # type: ignore[assignment]  # arrays are mutable

    def __repr__(self) -> str:
        facts = [f"nnz={self.nnz}", "unweighted" if self.data is None else f"{self.dtype} values"]
        facts += [f"{self.index_dtype} indices", self.device]
        extra = [f"{name}={value}" for name, value in _static(self).items() if name != "shape"]
        return f"{type(self).__name__}({self.n_rows} x {self.n_cols}, {', '.join(extra + facts)})"


def _fields(A: Format) -> dict[str, Any]:
    """Return the fields by name, without caches, whose names begin with an underscore."""
    return {name: value for name, value in A.__dict__.items() if name[0] != "_"}


def _static(A: Format) -> Mapping[str, Any]:
    return {name: value for name, value in _fields(A).items() if name not in A._array_fields}


def _same(a: Array, b: Array) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or device_of(a) != device_of(b):
        return False
    with on_device_of(a), allocating(f"comparing {a.nbytes} bytes"):
        equal = a == b
        if a.dtype.kind not in "iu":
            equal |= (a != a) & (b != b)
        return bool(namespace(a).all(equal))  # synchronize!
