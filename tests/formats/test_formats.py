"""Every property and method of every format, on small matrices whose cells are written out."""

import copy
import operator
import pickle
from typing import Any

import numpy as np
import pytest

import sparsefmt
from sparsefmt import CBSR, COO, CSC, CSR, SGT, Format, from_dense
from sparsefmt.errors import DtypeError, UnsupportedError
from sparsefmt.formats import arrays as formats_arrays
from sparsefmt.formats import condense
from sparsefmt.formats.cbsr import column_dtype
from sparsefmt.formats.sgt import DEFAULT_TILE, check_tile, slot_dtype
from sparsefmt.testing import stored_entries

SPARSE = ("coo", "csr", "csc", "sgt")
FORMATS = (*SPARSE, "cbsr")
INDICES = ("int32", "int64")
VALUES = ("float16", "bfloat16", "float32", "float64")
TILES = [(1, 1), (2, 3), (16, 8), (8, 8), (16, 16), (255, 257), (256, 256), (1, 256), (256, 1)]
TILES += [(1, 257), (1, 65536), (65536, 1), (2, 32768)]

#: Rows out of order, an empty row, one cell twice, an explicit zero.
ROW, COL = [2, 0, 1, 0, 2, 2, 4], [1, 3, 0, 0, 1, 4, 5]
DATA = [1.0, 2.0, -3.0, 0.0, 5.0, 6.0, 0.5]
SHAPE = (5, 6)


def dtype_of(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def example(xp, format="coo", *, index="int32", values: str | None = "float32", tile=(2, 2)) -> Any:
    """The matrix above in a format, or a CBSR of the same shape."""
    if format == "cbsr":
        columns = xp.asarray([[0, 5], [1, 2], [4, 5], [0, 1], [3, 4]], np.uint8)
        data = xp.arange(10).reshape(5, 2).astype(dtype_of(values or "float32"))
        return CBSR(columns, data, shape=SHAPE)
    data = None if values is None else xp.asarray(DATA).astype(dtype_of(values))
    A = COO(xp.asarray(ROW, index), xp.asarray(COL, index), data, shape=SHAPE)
    return A.tosgt(tile) if format == "sgt" else A.asformat(format)


def host(a: Any) -> np.ndarray:
    """The array on the CPU, in float64 where it holds floats."""
    a = a.get() if formats_arrays.is_cupy(a) else a
    return a if a.dtype.kind in "iub" else a.astype(np.float64)


def same(a: Any, b: Any) -> bool:
    return np.array_equal(host(a), np.asarray(b))


def oracle(A: Any) -> np.ndarray:
    """Dense, by a loop over the stored entries."""
    X = np.zeros(A.shape)
    for i, j, value in stored_entries(A):
        X[i, j] += value
    return X


def arrays_of(A: Any) -> dict[str, Any]:
    return {name: getattr(A, name) for name in A._array_fields if getattr(A, name) is not None}


EXPECTED = np.zeros(SHAPE)
for i, j, value in zip(ROW, COL, DATA, strict=True):
    EXPECTED[i, j] += value


# What it is


@pytest.mark.parametrize("values", ["float32", None])
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("format", SPARSE)
def test_properties(xp, format, index, values):
    A = example(xp, format, index=index, values=values)
    assert isinstance(A, Format)
    assert (A.format, A.shape, A.n_rows, A.n_cols, A.ndim, A.nnz) == (format, SHAPE, 5, 6, 2, 7)
    assert (A.data is None) == (values is None)
    assert (A.dtype, A.toarray().dtype, A.index_dtype) == (values, np.float32, np.dtype(index))
    assert same(A.toarray(), oracle(A))
    assert A.device == ("cpu" if xp is np else f"cuda:{xp.cuda.runtime.getDevice()}")
    assert A.nbytes == sum(a.nbytes for a in arrays_of(A).values()) > 0
    assert all(type(a) is xp.ndarray for a in arrays_of(A).values())
    A.check()
    A.check("cheap")


def test_properties_of_a_cbsr_and_coordinates_of_a_coo(xp):
    A = example(xp, "cbsr")
    assert (A.format, A.shape, A.k, A.nnz, A.dtype) == ("cbsr", SHAPE, 2, 10, np.float32)
    assert (A.index_dtype, A.nbytes) == (np.uint8, 10 + 40)
    assert same(A.toarray(), oracle(A))
    assert isinstance(A.T, CSC)
    assert A.T.shape == (6, 5)
    assert same(A.T.toarray(), oracle(A).T)
    A = CBSR(xp.zeros((0, 3), np.uint8), xp.zeros((0, 3), np.float16), shape=(0, 5))
    assert (A.k, A.nnz) == (3, 0)  # empty, but as wide
    assert A.tocsr().shape == A.toarray().shape == (0, 5)
    A.check()
    A = example(xp)
    assert all(a is b for a, b in zip(A.coords, (A.row, A.col), strict=True))


@pytest.mark.parametrize(
    ("n_cols", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "int32")],
)
def test_cbsr_stores_columns_in_the_smallest_dtype(xp, n_cols, dtype):
    assert column_dtype(n_cols) == np.dtype(dtype)
    A = CBSR(xp.asarray([[n_cols - 1]], dtype), xp.ones((1, 1)), shape=(1, n_cols))
    assert same(A.tocsr().indices, [n_cols - 1])
    assert A.tocsr().index_dtype == np.int32


@pytest.mark.parametrize(
    ("format", "lengths"), [("csr", [2, 1, 3, 0, 1]), ("csc", [2, 2, 0, 1, 1, 1])]
)
def test_compressed_properties(xp, format, lengths):
    A = example(xp, format)
    assert (A.n_major, A.n_minor) == (SHAPE if format == "csr" else SHAPE[::-1])
    assert same(A.lengths, lengths)
    assert same(A.indptr, np.cumsum([0, *lengths]))


@pytest.mark.parametrize("format", FORMATS)
def test_repr(xp, format):
    A = example(xp, format)
    tile = "tile=(2, 2), " if format == "sgt" else ""
    nnz, index = (10, "uint8") if format == "cbsr" else (7, "int32")
    head = f"{format.upper()}(5 x 6, {tile}nnz={nnz}, "
    assert repr(A) == f"{head}float32 values, {index} indices, {A.device})"
    assert "nnz=7, unweighted, int64 indices" in repr(example(xp, values=None, index="int64"))


# The same matrix in other memory


@pytest.mark.parametrize("format", FORMATS)
def test_a_matrix_equals_its_copies(xp, format):
    A = example(xp, format)
    pickled = (pickle.dumps(A, n) for n in range(2, pickle.HIGHEST_PROTOCOL + 1))
    for B in (A, A.copy(), copy.copy(A), copy.deepcopy(A), *map(pickle.loads, pickled)):
        assert A == B
        assert not A != B
        assert type(B) is type(A)
        assert B.shape == A.shape
        with pytest.raises(AttributeError):
            B.shape = (1, 1)
        B.check()
    B = A.copy()
    for name, a in arrays_of(A).items():
        assert not xp.may_share_memory(a, getattr(B, name))
    B.data[...] = 9
    assert A != B


@pytest.mark.parametrize("format", FORMATS)
def test_matrices_are_frozen_unhashable_and_no_sequences(xp, format):
    A = example(xp, format)
    with pytest.raises(AttributeError, match="data"):
        A.data = None
    with pytest.raises(AttributeError, match="shape"):
        del A.shape
    with pytest.raises(TypeError, match="unhashable"):
        hash(A)
    with pytest.raises(TypeError, match="not iterable"):
        iter(A)
    for call in (lambda: A @ A, lambda: xp.ones((5, 5)) @ A, lambda: xp.ones((5, 6)) * A):
        with pytest.raises(TypeError):
            call()


def changed(A: Any) -> dict[str, Any]:
    """Matrices that differ from ``A`` in one way each."""
    others = {
        "values": A.with_data(A.data + 1),
        "dtype": A.astype(np.float64),
        "shape": A._replace(shape=(A.n_rows, A.n_cols + 1)),
        "none": None,
        "number": 1,
        "format": A.tocsr() if A.format != "csr" else A.tocsc(),
    }
    if A.format != "cbsr":
        others["index dtype"] = A.astype(index_dtype=np.int64)
        others["no values"] = A.with_data(None)
        others["fewer entries"] = A[:2]
    if A.format == "sgt":
        others["tile"] = A.tosgt((4, 4))
    return others


@pytest.mark.parametrize("format", FORMATS)
def test_what_differs_is_not_equal(xp, format):
    A = example(xp, format)
    for what, B in changed(A).items():
        assert A != B, what
        assert not A == B, what
        assert B != A, what
    assert A.__eq__(A.toarray()) is NotImplemented


@pytest.mark.parametrize("values", VALUES)
def test_nan_equals_nan_and_zeros_of_both_signs_are_equal(xp, values):
    def matrix(*data):
        zeros = xp.zeros(len(data), np.int32)
        return COO(zeros, zeros, xp.asarray(data).astype(dtype_of(values)), shape=(1, 1))

    nan = float("nan")
    assert matrix(nan, 1) == matrix(nan, 1)
    assert matrix(nan, 1) != matrix(1, nan)
    assert matrix(nan) != matrix(0)
    assert matrix(0.0) == matrix(-0.0)
    assert matrix(float("inf")) != matrix(float("-inf"))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_matrices_move_between_devices(format):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    A = example(np, format)
    B = A.to("cuda")
    assert B.device == f"cuda:{cupy.cuda.runtime.getDevice()}"
    assert B.to("cuda") is B
    assert B.to(B.device) is B
    assert B.to("cpu") == A
    assert B != A
    assert B == example(cupy, format)


@pytest.mark.parametrize("format", FORMATS)
def test_moving_to_where_it_is_gives_itself(format):
    A = example(np, format)
    assert A.to("cpu") is A
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert A.to(torch.device("cpu")) is A


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("format", FORMATS)
def test_astype_of_values(xp, format, values):
    A = example(xp, format)
    B = A.astype(dtype_of(values))
    assert B.dtype == dtype_of(values)
    assert same(B.toarray(), oracle(A))
    assert B.toarray().dtype == dtype_of(values)
    for name, a in arrays_of(A).items():
        assert name == "data" or getattr(B, name) is a
    assert A.astype(np.float32) == A
    assert A.astype(np.float32).data is A.data
    B.check()


@pytest.mark.parametrize("format", SPARSE)
def test_astype_of_indices(xp, format):
    A = example(xp, format)
    B = A.astype(index_dtype=np.int64)
    assert B.index_dtype == np.int64
    assert B.data is A.data
    assert B.astype(index_dtype="int32") == A
    assert A.astype() == A
    C = A.astype(np.float64, index_dtype=np.int64)
    assert (C.dtype, C.index_dtype) == (np.float64, np.int64)
    for D in (B, C):
        D.check()
        assert same(D.toarray(), EXPECTED)


def test_astype_of_no_values_of_big_endian_ones_and_of_cbsr_columns(xp):
    assert example(xp, values=None).astype(np.float64).data is None
    A = example(np).astype(">f8")
    assert A.dtype == np.float64
    assert A.dtype.isnative
    A = example(xp, "cbsr")
    assert A.astype(np.float64, index_dtype=np.uint8).dtype == np.float64
    with pytest.raises(UnsupportedError, match="stores them as uint8"):
        A.astype(index_dtype=np.int32)


@pytest.mark.parametrize("format", FORMATS)
def test_with_data_shares_the_structure(xp, format):
    A = example(xp, format)
    data = xp.ones(A.data.shape, np.float64)
    B = A.with_data(data)
    assert B.data is data
    for name, a in arrays_of(A).items():
        assert name == "data" or getattr(B, name) is a
    B.check()
    strided = xp.ones((*A.data.shape, 2), np.float32)[..., 0]
    assert A.with_data(strided).data.flags.c_contiguous
    if format != "cbsr":
        assert A.with_data(None).with_data(A.data) == A
        assert same(A.with_data([2.0] * 7).toarray(), 2 * oracle(A.with_data(None)))


# Transposes and slices


@pytest.mark.parametrize("values", ["float32", None])
@pytest.mark.parametrize("format", SPARSE)
def test_transpose(xp, format, values):
    A = example(xp, format, values=values)
    B = A.T
    goal = {"csr": "csc", "csc": "csr"}.get(format, format)
    assert (B.format, B.shape) == (goal, SHAPE[::-1])
    assert same(B.toarray(), oracle(A).T)
    B.check()
    if format == "sgt":
        assert B.tile == A.tile
        assert same(B.T.toarray(), oracle(A))
    else:
        assert B.data is A.data
        assert B.T == A
        assert {*map(id, arrays_of(B).values())} == {*map(id, arrays_of(A).values())}


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "uint64", "int64"])
def test_keys_of_any_integer_dtype(xp, dtype):
    A = COO(xp.arange(300, dtype=np.int32), xp.zeros(300, np.int32), shape=(300, 1)).tocsr()
    A = A.with_data(xp.arange(300.0))
    for key in ([1, 0, 127], [-1, -128] if dtype.startswith("int") else [100]):
        B = A[xp.asarray(key, dtype)]
        assert same(B.toarray()[:, 0], np.arange(300)[key])
        assert B.shape == (len(key), 1)


def test_rows_of_a_cbsr(xp):
    A = example(xp, "cbsr")
    X = oracle(A)
    for key in (slice(1, 3), slice(None, None, -2), [3, 3, -1], [], np.arange(5) > 2):
        place = key if isinstance(key, slice) else np.asarray(key, None if len(key) else int)
        B = A[key if isinstance(key, slice) else xp.asarray(place)]
        assert isinstance(B, CBSR)
        assert B.k == A.k
        assert same(B.toarray(), X[place])
        B.check()


@pytest.mark.parametrize("format", FORMATS)
def test_slices_are_copies_and_all_of_a_matrix_is_the_matrix(xp, format):
    A = example(xp, format)
    before = A.copy()
    A[0:3].data[...] = 7
    assert A == before
    assert A[:] is A
    assert A[:, :] is A
    assert A[()] is A


# How arrays come in


@pytest.mark.parametrize("index", INDICES)
def test_constructors_share_the_arrays_they_are_given(xp, index):
    row, col = xp.asarray(ROW, index), xp.asarray(COL, index)
    data = xp.asarray(DATA)
    A = COO(row, col, data, shape=SHAPE)
    assert all(map(operator.is_, (A.row, A.col, A.data), (row, col, data)))
    for name in ("csr", "csc", "sgt", "cbsr"):
        B = example(xp, name, values="float64")
        static = {"tile": B.tile} if name == "sgt" else {}
        C = type(B)(**arrays_of(B), shape=B.shape, **static)
        for field, a in arrays_of(B).items():
            assert getattr(C, field) is a


def test_lists_come_in_also_empty_ones(xp):
    A = COO(ROW, COL, DATA, shape=list(SHAPE))
    assert (A.index_dtype, A.dtype, A.shape) == (np.int64, np.float64, SHAPE)
    assert same(A.toarray(), EXPECTED)
    assert CSR((0, 1), range(1), shape=(1, 1)).nnz == 1
    assert COO([0], [0], shape=(np.int8(1), np.uint64(1))).shape == (1, 1)
    assert type(COO([0], [0], shape=(np.int8(1), 1)).shape[0]) is int
    A = COO([], [], [], shape=(2, 2))
    assert (A.nnz, A.dtype, A.index_dtype) == (0, np.float64, np.int64)
    assert A.with_data([]).dtype == np.float64
    assert CSR([0, 0, 0], [], shape=(2, 2)).nnz == 0


class Exporter:
    """Any library's array, known by DLPack alone."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


def test_arrays_of_other_libraries_come_in_without_a_copy(xp):
    B = example(xp)
    A = COO(Exporter(B.row), Exporter(B.col), Exporter(B.data), shape=SHAPE)
    assert A == B
    assert type(A.row) is xp.ndarray
    for field in ("row", "data"):
        assert xp.may_share_memory(getattr(A, field), getattr(B, field))


def test_strided_arrays_come_in_as_contiguous_copies(xp):
    pairs = xp.asarray(np.stack([ROW, COL], axis=1), np.int32)
    data = xp.asarray(DATA + DATA)[::2][:0:-1]
    A = COO(pairs[1:, 0], pairs[1:, 1], data, shape=SHAPE)
    assert all(a.flags.c_contiguous for a in arrays_of(A).values())
    assert same(A.row, ROW[1:])
    assert same(A.data, (DATA + DATA)[::2][:0:-1])
    B = example(xp, "cbsr")
    C = CBSR(xp.asfortranarray(B.indices), xp.asfortranarray(B.data), shape=SHAPE)
    assert C == B
    assert C.indices.flags.c_contiguous
    assert same(from_dense(xp.asfortranarray(xp.asarray(EXPECTED))).toarray(), EXPECTED)
    D = example(xp, "sgt")
    fields = {**arrays_of(D), "columns": xp.asfortranarray(D.columns)}
    assert SGT(**fields, shape=SHAPE, tile=D.tile) == D


def test_big_endian_arrays_come_in():
    A = COO(np.array(ROW, ">i4"), np.array(COL, ">i4"), np.array(DATA, ">f8"), shape=SHAPE)
    assert (A.index_dtype, A.dtype) == (np.int32, np.float64)
    assert all(a.dtype.isnative for a in arrays_of(A).values())
    assert A == example(np, values="float64")
    assert same(from_dense(EXPECTED.astype(">f4")).toarray(), EXPECTED)


def test_subclasses_and_read_only_arrays_come_in_as_views(tmp_path):
    path = tmp_path / "data.npy"
    np.save(path, np.asarray(DATA, np.float32))
    stored = np.load(path, mmap_mode="r")
    A = COO(np.asarray(ROW, np.int32), np.asarray(COL, np.int32), stored, shape=SHAPE)
    assert type(A.data) is np.ndarray
    assert np.shares_memory(A.data, stored)
    assert A == example(np)
    assert from_dense(EXPECTED.view(np.matrix)) == from_dense(EXPECTED)
    A = frozen(example(np))
    B = COO(A.row, A.col, A.data, shape=SHAPE)
    assert B.row is A.row
    assert not B.row.flags.writeable
    assert B.copy().row.flags.writeable


def frozen(A: Any) -> Any:
    """``A`` over arrays that cannot be written to."""
    for a in arrays_of(A).values():
        a.setflags(write=False)
    return A


OPERATIONS = {
    "dense": operator.methodcaller("toarray"),
    "dense perm": operator.methodcaller("toarray_with_perm"),
    "csc perm": operator.methodcaller("tocsc_with_perm"),
    "rows": lambda A: A[1:4],
    "T": operator.attrgetter("T"),
    "copy": operator.methodcaller("copy"),
    "int64": lambda A: A if A.format == "cbsr" else A.astype(index_dtype=np.int64),
    "float64": operator.methodcaller("astype", np.float64),
    "float16": lambda A: A.astype(np.float16).tocsc(),
    "check": operator.methodcaller("check"),
    "equal": lambda A: A == A.copy(),
    "sorted": lambda A: A.tocsr().sorted_indices(),
    "reduction": lambda A: A.tosgt((2, 2)).reduction,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("format", FORMATS)
def test_nothing_writes_to_its_input(xp, format, operation):
    A = example(xp, format)
    before = A.copy()
    if xp is np:
        frozen(A)
    OPERATIONS[operation](A)
    assert A == before


# Checks


def test_the_cheap_level_reads_no_index(xp):
    bad = xp.asarray([9], np.int32)
    A = COO(bad, bad, shape=(1, 1), validate="cheap")
    A.check("cheap")
    with pytest.raises(IndexError):
        A.check()
    B = CSR(xp.asarray([0, 1], np.int32), bad, shape=(1, 1), validate="cheap")
    with pytest.raises(IndexError):
        B.check("full")
    with pytest.raises(IndexError):
        CBSR(xp.asarray([[9]], np.uint8), xp.ones((1, 1)), shape=(1, 1), validate="cheap").check()


def test_the_limits_of_a_shape_follow_the_index_dtype(xp):
    largest = 2**31 - 1
    A = COO(xp.full(1, largest - 1, np.int32), xp.zeros(1, np.int32), shape=(largest, largest))
    assert A.astype(index_dtype=np.int64).astype(index_dtype=np.int32) == A
    B = COO(xp.full(1, 2**40, np.int64), xp.zeros(1, np.int64), shape=(2**41, 2**41))
    assert B.T.T == B
    C = CSR(xp.asarray([0, 1]), xp.full(1, 2**40), shape=(1, 2**41))
    assert C.tocoo().tocsr() == C
    assert int(C.tosgt().columns.max()) == 2**40
    assert C.tosgt().tocsr() == C


# Condensed tiles


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("index", INDICES)
def test_every_tile_shape_is_lossless(xp, tile, index):
    A = example(xp, "csr", index=index)
    B = A.tosgt(tile)
    B.check()
    assert B.tile == tile
    cells = tile[0] * tile[1]
    assert B.slots.dtype == slot_dtype(tile) == ("uint8" if cells <= 256 else "uint16")
    assert B.n_windows == -(-5 // tile[0])
    assert B.columns.shape == (B.tile_count, tile[1])
    assert B.tocsr() == A
    assert same(B.toarray(), EXPECTED)
    assert same(B.T.toarray(), EXPECTED.T)
    assert B.data is A.data


@pytest.mark.parametrize("tile", [(1, 65536), (65536, 1), (256, 256), (300, 200)], ids=str)
def test_large_tiles_with_entries_in_every_slot(xp, tile):
    """Slots from end to end of uint16, and columns beyond it."""
    height, width = tile
    rng = np.random.default_rng(0)
    n_rows, n_cols, nnz = 2 * height + 1, 2 * width + 3, 4000
    row = np.concatenate([rng.integers(0, n_rows, nnz), np.repeat([0, height - 1], 2 * width)])
    col = np.concatenate([rng.integers(0, n_cols, nnz), np.tile(np.arange(width), 4)])
    A = COO(*(xp.asarray(a, np.int32) for a in (row, col)), shape=(n_rows, n_cols)).tocsr()
    B = A.tosgt(tile)
    assert B.tocsr() == A
    assert int(B.slots.max()) == height * width - 1 or height > 1
    B.check()


def test_more_tile_columns_than_the_index_dtype_counts(monkeypatch):
    """Padding counts too; simulated with a dtype that ends early: the array would be large."""
    A = example(np, "csr")
    small = type("small", (), {"max": 3})
    expected = A.tosgt((1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(condense.np, "iinfo", lambda dtype: small)
        B = A.tosgt((1, 2))
    assert B == expected
    assert B.index_dtype == np.int32


def test_tiles_are_two_small_positive_integers():
    assert check_tile([np.int64(16), 8]) == (16, 8)
    assert type(check_tile((np.int8(2), 2))[0]) is int
    fields = arrays_of(example(np, "sgt"))
    assert SGT(**fields, shape=SHAPE, tile=[2, 2]).tile == (2, 2)


# Conversions that have edges of their own (every pair has its laws elsewhere)


@pytest.mark.parametrize("format", FORMATS)
def test_named_conversions_are_the_general_one(xp, format):
    A = example(xp, format)
    assert A.tosgt() == A.asformat("sgt", tile=DEFAULT_TILE)
    for name in ("coo", "csr", "csc"):
        assert getattr(A, f"to{name}")() == A.asformat(name)
        B, perm = getattr(A, f"to{name}_with_perm")()
        C, other = A.asformat_with_perm(name)
        assert B == C
        assert same(perm, host(other))
    B, perm = A.tosgt_with_perm((2, 4))
    assert B == A.tosgt((2, 4))
    assert len(perm) == A.nnz
    B, perm = A.asformat_with_perm(format)
    assert B is A is A.asformat(format)
    assert same(perm, np.arange(A.nnz))


def test_the_permutation_of_a_large_cbsr_counts_past_its_columns_dtype(xp):
    A = CBSR(xp.zeros((1000, 1), np.uint8), xp.ones((1000, 1)), shape=(1000, 1))
    assert same(A.asformat_with_perm("cbsr")[1], np.arange(1000))
    assert same(A.tocsr_with_perm()[1], np.arange(1000))


@pytest.mark.parametrize("values", VALUES)
def test_duplicates_add_up_in_the_order_of_their_row(xp, values):
    zeros = xp.zeros(3, np.int32)
    A = COO(zeros, zeros, xp.asarray([1, 2, 4]).astype(dtype_of(values)), shape=(1, 1))
    assert float(A.toarray()[0, 0]) == 7
    assert A.toarray(np.float64).dtype == np.float64


def test_from_dense_takes_a_tile_lists_and_nothing_and_drops_zeros_of_both_signs(xp):
    assert from_dense(xp.ones((3, 3)), "sgt", tile=(2, 2)).tile == (2, 2)
    assert from_dense([[0.0, 1.0]]).nnz == 1
    assert from_dense([[]]).shape == (1, 0)
    for shape in ((0, 3), (3, 0), (0, 0)):
        A = from_dense(xp.zeros(shape, np.float32))
        assert (A.shape, A.nnz) == (shape, 0)
    A = from_dense(xp.asarray([[float("nan"), 0.0], [-0.0, float("inf")]]))
    assert same(A.indices, [0, 1])
    assert bool(xp.isnan(A.data[0]))


# The public names


def test_public_names_resolve_and_are_listed():
    """Which those are, ``tests/golden`` says."""
    assert {*sparsefmt.__all__} <= {*dir(sparsefmt)}
    assert sparsefmt.DtypeError is DtypeError
    with pytest.raises(AttributeError, match=r"module 'sparsefmt' has no attribute 'coo_matrix'"):
        sparsefmt.coo_matrix  # noqa: B018  # the access is what is tested


def test_documentation_says_what_each_format_is():
    for one in (COO, CSR, CSC, CBSR, SGT):
        assert "Parameters" in one.__doc__
        members = [getattr(one, name) for name in dir(one) if not name.startswith("_")]
        assert all(member.__doc__ for member in members if callable(member))


# The kernels that check, without a GPU

KERNEL_TYPES = {"I": ("int", "long long"), "M": ("unsigned char", "long long")}
KERNEL_TYPES |= {"S": ("unsigned short",)}


def kernel_source(name: str, chosen: dict[str, str]) -> str:
    """What CuPy makes of an element-wise kernel, by hand."""
    from sparsefmt.formats import faults

    inputs, outputs, body = faults._KERNELS[name]
    types = {"int64": "long long", **chosen}
    arguments = []
    for parameter in f"{inputs}, {outputs}".split(", "):
        *raw, kind, argument = parameter.split()
        c_type = f"CArray<{types[kind]}, 1, true>" if raw else types[kind]
        arguments.append(f"{c_type} {argument}")
    return (
        f"#include <cupy/carray.cuh>\n{faults._PREAMBLE}\n"
        f'extern "C" __global__ void kernel({", ".join(arguments)}, long long size) {{\n'
        f"CUPY_FOR(i, size) {{\n{body}\n}} }}"
    )


@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize(
    "name", ["in_range", "coordinates", "compressed", "balanced", "tiles", "tiles_order"]
)
def test_checking_kernels_compile(name, wide):
    cupy = pytest.importorskip("cupy", reason="CuPy brings NVRTC and the array class")
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy brings NVRTC")
    from pathlib import Path

    from cuda.pathfinder import find_nvidia_header_directory

    chosen = {name: kinds[-1 if wide else 0] for name, kinds in KERNEL_TYPES.items()}
    include = Path(cupy.__file__).parent / "_core" / "include"
    folders = [include, *include.glob("cupy/_cccl/*"), find_nvidia_header_directory("cudart")]
    program = nvrtc.createProgram(kernel_source(name, chosen), "check.cu", [], [])
    options = ["-arch=sm_80", "--std=c++17", "-DCUPY_NO_CUDA_INCLUDES"]
    try:
        nvrtc.compileProgram(program, [*options, *(f"-I{folder}" for folder in folders)])
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
