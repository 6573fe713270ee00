"""Sparse matrices of SciPy, CuPy and torch: memory is shared, entries are kept as they are."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from sparsefmt import COO, CSR
from sparsefmt.errors import DtypeError, FormatError, IndexRangeError
from sparsefmt.interop import from_cupyx, from_scipy, from_torch, to_cupyx, to_scipy, to_torch
from sparsefmt.testing import cbsr, coo, csc, csr, sgt, stored_entries

torch = pytest.importorskip("torch")

# Users make sparse tensors, and torch warns once when they make one.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse .* tensor support is in beta state:UserWarning",
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)

FORMATS = ("coo", "csr", "csc")
FLOATS = ("float32", "float64")
INDICES = ("int32", "int64")
COMPRESSED = {"csr": ("crow_indices", "col_indices"), "csc": ("ccol_indices", "row_indices")}


def parts_of_scipy(M):
    names = ("row", "col", "data") if M.format == "coo" else ("indptr", "indices", "data")
    return {name: getattr(M, name) for name in names}


def parts_of_torch(tensor):
    """Arrays of a format by the names of its fields, as tensors."""
    if tensor.layout == torch.sparse_coo:
        row, col = tensor._indices()
        return {"row": row, "col": col, "data": tensor._values()}
    names = COMPRESSED[str(tensor.layout).removeprefix("torch.sparse_")]
    indptr, indices = (getattr(tensor, name)() for name in names)
    return {"indptr": indptr, "indices": indices, "data": tensor.values()}


def made_by_scipy(A, kind="array"):
    make = getattr(scipy.sparse, f"{A.format}_{kind}")
    if A.format == "coo":
        return make((A.data, (A.row, A.col)), shape=A.shape)
    return make((A.data, A.indices, A.indptr), shape=A.shape)


def made_by_torch(A, device="cpu"):
    """Of tensors that the matrix shares on the CPU; a COO has indices of 8 bytes."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    *indices, data = A._arrays().values()
    indices = [*map(torch.from_numpy, indices)]
    if data.dtype.name == "bfloat16":
        data = torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    data = torch.as_tensor(data)
    if A.format == "coo":
        return torch.sparse_coo_tensor(torch.stack(indices).long(), data, A.shape).to(device)
    return getattr(torch, f"sparse_{A.format}_tensor")(*indices, data, A.shape).to(device)


def address(a):
    if isinstance(a, torch.Tensor):
        return a.data_ptr()
    return a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr


@dataclass(frozen=True)
class Library:
    """What a library has, and how to look at it."""

    name: str
    read: Callable[..., Any]
    write: Callable[..., Any]
    make: Callable[..., Any]  #: its own object of a format's arrays
    parts: Callable[..., dict[str, Any]]
    dtypes: tuple[str, ...] = FLOATS
    ascends: bool = False  #: whether CSR and CSC ascend and are distinct in it

    def __str__(self):
        return self.name

    def example(self, format="coo", dtype="float64", index_dtype="int64", weighted=True):
        """3 x 5, not symmetric, an empty row, an explicit zero; disorder where there may be."""
        pytest.importorskip("ml_dtypes")
        row, col = np.array([[0, 0, 2, 2, 2, 0], [4, 1, 3, 3, 0, 2]], index_dtype)
        if self.ascends:
            row, col = np.array([[0, 0, 0, 2, 2, 2], [1, 2, 4, 0, 1, 3]], index_dtype)
        data = np.array([1.5, -2, 0, 4, 0.25, 8]).astype(dtype) if weighted else None
        return COO(row, col, data, shape=(3, 5)).asformat(format)

    def assert_shared(self, A, other):
        for name, theirs in self.parts(other).items():
            assert address(getattr(A, name)) == address(theirs), name


ALL = ("float16", "bfloat16", *FLOATS)
SCIPY = Library("scipy", from_scipy, to_scipy, made_by_scipy, parts_of_scipy)
TORCH = Library("torch", from_torch, to_torch, made_by_torch, parts_of_torch, ALL, ascends=True)
MATRICES = replace(SCIPY, name="scipy's matrices", make=partial(made_by_scipy, kind="matrix"))
LIBRARIES = [SCIPY, TORCH, MATRICES]
ON_A_GPU = [
    Library("cupyx", from_cupyx, to_cupyx, lambda A: to_cupyx(A.to("cuda")), parts_of_scipy),
    replace(TORCH, name="torch on a GPU", make=partial(made_by_torch, device="cuda")),
]
LIBRARIES += [pytest.param(one, marks=pytest.mark.gpu) for one in ON_A_GPU]
every_library = pytest.mark.parametrize("library", LIBRARIES, ids=str)
on_the_cpu = pytest.mark.parametrize("library", [SCIPY, TORCH], ids=str)
every_format = pytest.mark.parametrize("format", FORMATS)


@every_library
@every_format
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("index_dtype", INDICES)
def test_both_ways_share_all_arrays(library, format, dtype, index_dtype):
    """But torch's COO has one array of indices of 8 bytes, into which another's are copied."""
    if dtype not in library.dtypes:
        return
    A = library.example(format, dtype, index_dtype)
    theirs = library.make(A)
    B = library.read(theirs)
    assert B.to("cpu") == A.astype(index_dtype=B.index_dtype)
    assert stored_entries(B) == stored_entries(A)  # their order, duplicates and explicit zeros
    library.assert_shared(B, theirs)
    one_array = library.ascends and format == "coo"
    for source in (B, A) if B.device == "cpu" else (B,):
        written = library.write(source)
        assert isinstance(written, scipy.sparse.sparray) or library.read is not from_scipy
        assert str(getattr(written, "layout", format)).endswith(format)
        assert tuple(written.shape) == A.shape
        assert str(written.dtype).removeprefix("torch.") == dtype
        again = library.read(written)
        assert again.index_dtype == ("int64" if one_array else source.index_dtype)
        assert again.to("cpu") == source.to("cpu").astype(index_dtype=again.index_dtype)
        assert address(again.data) == address(source.data)
        if not one_array or source is B:
            library.assert_shared(source, written)


@on_the_cpu
@every_format
@pytest.mark.parametrize("dtype", [None, *ALL])
def test_an_unweighted_structure_gets_ones(library, format, dtype):
    if dtype not in (None, *library.dtypes):
        return
    A = library.example(format, weighted=False)
    found = library.parts(library.write(A, dtype=dtype))["data"]
    assert str(found.dtype).removeprefix("torch.") == (dtype or "float32")
    assert found.tolist() == [1.0] * 6
    assert library.read(library.write(A)).with_data(None) == A


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "uint64"])
@every_format
@on_the_cpu
def test_integers_become_float64(library, format, dtype):
    A = TORCH.example(format)  # without duplicates, which SciPy would add up
    A = A.with_data(np.ones(A.nnz))
    theirs = library.make(A)
    cast = theirs.astype(dtype) if library is SCIPY else theirs.to(getattr(torch, dtype))
    assert library.read(cast) == A


@on_the_cpu
@every_format
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("index_dtype", INDICES)
def test_dtypes_are_chosen_on_the_way_in(library, format, dtype, index_dtype):
    theirs = library.make(library.example(format))
    A = library.read(theirs, dtype=dtype, index_dtype=index_dtype)
    assert A == library.example(format, dtype, index_dtype)


@pytest.mark.parametrize("tile", [(16, 8), (2, 3)])
@pytest.mark.parametrize("weighted", [True, False])
@on_the_cpu
def test_tiles_go_out_as_csr(library, tile, weighted):
    A = library.example("csr", weighted=weighted)
    B = library.read(library.write(A.tosgt(tile)))
    assert B.with_data(A.data) == A
    assert np.array_equal(B.toarray(), A.toarray())


@on_the_cpu
@given(A=cbsr(dtype="float32"))
def test_features_go_out_as_csr(library, A):
    B = library.read(library.write(A))
    assert (B.format, B.nnz) == ("csr", A.nnz)
    assert np.array_equal(B.toarray(), A.toarray())


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0), (3, 7)])
@every_format
@on_the_cpu
def test_empty_matrices_round_trip(library, format, shape):
    A = CSR(np.zeros(shape[0] + 1, np.int64), np.zeros(0, np.int64), np.zeros(0), shape=shape)
    theirs = library.write(A.asformat(format))
    assert tuple(theirs.shape) == shape
    assert library.read(theirs) == A.asformat(format)


@on_the_cpu
@given(data=st.data())
def test_a_round_trip_is_exact(library, data):
    """Of tiles in CSR order."""
    ordered = {"duplicates": False, "unsorted": False} if library.ascends else {}
    dtypes = {} if library.ascends else {"dtype": st.sampled_from(library.dtypes)}
    A = data.draw(coo(**dtypes) | csr(**dtypes, **ordered) | csc(**dtypes, **ordered)
                  | sgt(**dtypes, **ordered))  # fmt: skip
    B = library.read(library.write(A))
    A = A.tocsr() if A.format == "sgt" else A
    assert B.with_data(A.data).astype(index_dtype=A.index_dtype) == A
    if A.data is not None:
        assert B.dtype == A.dtype
        assert np.array_equal(A.data, B.data)


@on_the_cpu
def test_later_changes_are_seen_and_memory_outlives_its_owner(library):
    theirs = library.make(library.example("csr").copy())
    A = library.read(theirs)
    library.parts(theirs)["data"][0] = 99
    assert A.data[0] == 99
    assert not np.shares_memory(A.copy().data, A.data)
    A, written = library.read(library.make(library.example("csr").copy())), library.write(A)
    for _ in range(100):
        library.make(library.example("csr").copy())
    assert A == library.example("csr")
    assert library.read(written).data[0] == 99


@pytest.mark.parametrize(
    ("name", "place", "value", "error", "message"),
    [
        ("indices", 0, 99, IndexRangeError, r"indices\[0\] is 99 but there are \d (columns|rows)"),
        ("indices", 1, -1, IndexRangeError, r"indices\[1\] is -1 but there are \d (columns|rows)"),
        ("indptr", 1, 9, FormatError, "indptr decreases from 9 to"),
        ("indptr", 0, 1, FormatError, r"indptr\[0\] is 1: the first pointer must be 0"),
        ("indptr", -1, 9, FormatError, r"indptr\[-1\] is 9\b"),
    ],
)
@pytest.mark.parametrize("format", ["csr", "csc"])
@on_the_cpu
def test_what_the_library_does_not_check_is_checked(
    library, format, name, place, value, error, message
):
    theirs = library.make(library.example(format).copy())
    library.parts(theirs)[name][place] = value
    with pytest.raises(error, match=message):
        library.read(theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int32"}, "dtype is int32: values are float16"),
        ({"dtype": "complex64"}, "dtype is complex64"),
        ({"dtype": "no such"}, "'no such', which is no"),
        ({"index_dtype": "int8"}, "index_dtype is int8"),
        ({"index_dtype": "int16"}, "index_dtype is int16"),
        ({"index_dtype": "float64"}, "index_dtype is float64"),
    ],
)
@pytest.mark.parametrize("format", [*FORMATS, "dense"])
@on_the_cpu
def test_dtypes_that_there_are_not_are_refused(library, format, options, message):
    theirs = torch.eye(2) if format == "dense" else library.make(library.example(format))
    read = from_torch if format == "dense" else library.read
    with pytest.raises(DtypeError, match=message):
        read(theirs, **options)


@pytest.mark.parametrize("dtype", ["int64", "no such"])
@on_the_cpu
def test_dtypes_that_no_values_have_are_refused_on_the_way_out(library, dtype):
    with pytest.raises(DtypeError, match=f"dtype is {dtype}|'{dtype}', which is no"):
        library.write(library.example(), dtype=dtype)
