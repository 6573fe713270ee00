"""scipy.sparse and cupyx.scipy.sparse: memory shared, entries kept as they are."""

import re

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given

from sparsefmt import COO, CSR, Format
from sparsefmt.errors import (
    DeviceError,
    DtypeError,
    FormatError,
    IndexRangeError,
    ShapeError,
    UnsupportedError,
)
from sparsefmt.interop import from_cupyx, from_scipy, to_cupyx, to_scipy
from sparsefmt.interop import scipy as interop_scipy
from sparsefmt.testing import cbsr, coo, csc, csr, sgt, stored_entries

FORMATS = ("coo", "csr", "csc")
FLOATS = ("float32", "float64")
INDICES = ("int32", "int64")


def example(format="coo", dtype="float64", index_dtype="int64", weighted=True):
    """3 x 5, not symmetric, an empty row, a duplicate, an explicit zero, columns out of order."""
    row = np.array([0, 0, 2, 2, 2, 0], index_dtype)
    col = np.array([4, 1, 3, 3, 0, 2], index_dtype)
    data = np.array([1.5, -2, 0, 4, 0.25, 8]).astype(dtype) if weighted else None
    return COO(row, col, data, shape=(3, 5)).asformat(format)


def foreign(format, dtype="float64", index_dtype="int64", kind="array"):
    """The same matrix, made with SciPy alone."""
    A = example(format, dtype, index_dtype)
    make = getattr(scipy.sparse, f"{format}_{kind}")
    if format == "coo":
        M = make((A.data, (A.row, A.col)), shape=A.shape)
    else:
        M = make((A.data, A.indices, A.indptr), shape=A.shape)
    return M


def parts(M):
    names = ("row", "col", "data") if M.format == "coo" else ("indptr", "indices", "data")
    return {name: getattr(M, name) for name in names}


def assert_shared(A, M):
    for name, theirs in parts(M).items():
        assert np.shares_memory(getattr(A, name), theirs), name


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["array", "matrix"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index_dtype", INDICES)
def test_from_scipy_shares_all_arrays(format, kind, dtype, index_dtype):
    M = foreign(format, dtype, index_dtype, kind)
    A = from_scipy(M)
    assert (A.format, A.shape, A.dtype) == (format, (3, 5), dtype)
    assert_shared(A, M)


@pytest.mark.parametrize("format", ["csr", "csc"])
def test_float16_that_scipy_can_store_comes_in(format):
    M = foreign(format, "float16")
    assert from_scipy(M) == example(format, "float16")
    assert_shared(from_scipy(M), M)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index_dtype", INDICES)
def test_to_scipy_shares_all_arrays(format, dtype, index_dtype):
    A = example(format, dtype, index_dtype)
    M = to_scipy(A)
    assert isinstance(M, scipy.sparse.sparray)
    assert (M.format, M.shape, M.dtype) == (format, A.shape, A.dtype)
    assert {array.dtype.name for array in list(parts(M).values())[:2]} == {index_dtype}
    assert_shared(A, M)
    B = from_scipy(M)
    assert B == A
    assert stored_entries(B) == stored_entries(A)  # their order, duplicates and explicit zeros
    assert 0.0 in B.data


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [None, *FLOATS])
def test_an_unweighted_structure_gets_ones(format, dtype):
    M = to_scipy(example(format, weighted=False), dtype=dtype)
    assert M.dtype == (dtype or "float32")
    assert M.data.tolist() == [1.0] * 6
    assert np.array_equal(M.toarray(), example(format, weighted=False).toarray())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("target", FLOATS)
def test_half_precision_is_widened_when_asked_and_else_refused(format, dtype, target):
    pytest.importorskip("ml_dtypes")
    A = example(format, dtype)
    M = to_scipy(A, dtype=target)
    assert M.dtype == target
    assert np.array_equal(M.toarray(), A.toarray("float64"))
    with pytest.raises(UnsupportedError, match=f"{dtype}.*float32 and float64 only.*dtype="):
        to_scipy(A)


@pytest.mark.parametrize("format", ["bsr", "lil", "dok", "dia"])
@pytest.mark.parametrize("kind", ["array", "matrix"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_other_scipy_formats_become_csr(format, kind, dtype):
    X = np.zeros((4, 6), dtype)
    X[0, 1], X[0, 5], X[3, 0], X[2, 2] = 1, -2, 3, 4
    A = from_scipy(getattr(scipy.sparse, f"{format}_{kind}")(X))
    assert isinstance(A, CSR)
    assert A.dtype == dtype
    assert np.array_equal(A.toarray(), X)


def test_zeros_stored_in_the_blocks_of_a_bsr_are_entries():
    blocks = (np.array([[[0.0, 1.0], [2.0, 0.0]]]), np.array([1]), np.array([0, 1]))
    A = from_scipy(scipy.sparse.bsr_array(blocks, shape=(2, 4)))
    assert stored_entries(A) == [(0, 2, 0.0), (0, 3, 1.0), (1, 2, 2.0), (1, 3, 0.0)]


@pytest.mark.parametrize("tile", [(16, 8), (2, 3)])
@pytest.mark.parametrize("weighted", [True, False])
def test_sgt_goes_out_as_csr(tile, weighted):
    A = example("csr", weighted=weighted)
    M = to_scipy(A.tosgt(tile))
    assert M.format == "csr"
    assert from_scipy(M).indices.tolist() == A.indices.tolist()
    assert np.array_equal(M.toarray(), A.toarray())


@given(A=cbsr(dtype="float32"))
def test_cbsr_goes_out_as_csr(A):
    M = to_scipy(A)
    assert M.format == "csr"
    assert M.nnz == A.nnz
    assert np.array_equal(M.toarray(), A.toarray())


@pytest.mark.parametrize("format", ["csr", "csc"])
def test_room_behind_the_last_entry_is_left_out(format):
    M = foreign(format)
    M.indices, M.data = np.append(M.indices, [99, 99]), np.append(M.data, [7.0, 7.0])
    A = from_scipy(M)
    assert A.nnz == 6
    assert A == example(format)
    assert_shared(A, M)
    M = foreign(format)
    M.indptr = M.indptr.astype(np.int32)  # index arrays of two dtypes meet in int64
    A = from_scipy(M)
    assert A.index_dtype == np.int64
    assert np.shares_memory(A.indices, M.indices)
    assert A == example(format)


@pytest.mark.parametrize("given_dtype", ["bool", "int8", "uint8", "int32", "int64", "uint64"])
@pytest.mark.parametrize("format", FORMATS)
def test_integers_become_float64(format, given_dtype):
    M = getattr(scipy.sparse, f"{format}_array")(np.array([[0, 1, 0], [1, 0, 1]], given_dtype))
    A = from_scipy(M)
    assert A.dtype == np.float64
    assert A.toarray().tolist() == [[0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("dtype", ["float16", *FLOATS])
@pytest.mark.parametrize("index_dtype", INDICES)
@pytest.mark.parametrize("format", FORMATS)
def test_dtypes_are_chosen_by_keyword(format, dtype, index_dtype):
    A = from_scipy(foreign(format), dtype=dtype, index_dtype=index_dtype)
    assert (A.dtype, A.index_dtype) == (dtype, index_dtype)
    assert np.array_equal(A.toarray("float64"), example(format).toarray("float64"))


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0), (3, 7)])
@pytest.mark.parametrize("format", FORMATS)
def test_empty_matrices_round_trip(format, shape):
    A = from_scipy(getattr(scipy.sparse, f"{format}_array")(shape))
    assert (A.shape, A.nnz) == (shape, 0)
    assert to_scipy(A).shape == shape


@given(A=coo(dtype="float64") | csr(dtype="float32") | csc(dtype="float64"))
def test_round_trip_is_exact(A):
    B = from_scipy(to_scipy(A))
    assert B.with_data(A.data) == A
    assert A.data is None or np.array_equal(A.data, B.data)


@given(A=sgt(dtype="float64", weighted=True))
def test_round_trip_of_tiles_keeps_csr_order(A):
    assert from_scipy(to_scipy(A)) == A.tocsr()


def test_later_changes_of_the_other_object_are_seen():
    M = foreign("csr")
    A = from_scipy(M)
    M.data[0] = 99
    assert A.data[0] == 99
    assert A.copy().data.base is None


# Refusals


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (scipy.sparse.coo_array(np.ones(3)), ShapeError, re.escape("shape (3,): give a 2-D")),
        (scipy.sparse.coo_array(np.ones((2, 2, 2))), ShapeError, re.escape("shape (2, 2, 2)")),
        (scipy.sparse.csr_array(np.eye(2) * 1j), UnsupportedError, "M.data is complex128"),
        (
            scipy.sparse.csr_array(np.array([[2**53 + 1]])),
            DtypeError,
            "M.data.*cannot hold exactly",
        ),
    ],
)
def test_from_scipy_refuses(value, error, message):
    with pytest.raises(error, match=message):
        from_scipy(value)


@pytest.mark.parametrize(
    ("name", "place", "value", "error", "message"),
    [
        ("indices", 0, 99, IndexRangeError, r"indices\[0\] is 99 but there are 5 columns"),
        ("indices", 1, -1, IndexRangeError, r"indices\[1\] is -1 but there are 5 columns"),
        ("indptr", 1, 9, FormatError, "indptr decreases from 9 to 3"),
        ("indptr", 0, 1, FormatError, r"indptr\[0\] is 1: the first pointer must be 0"),
        ("indptr", -1, 9, FormatError, r"indptr\[-1\] is 9\b"),
    ],
)
def test_what_scipy_does_not_check_is_checked(name, place, value, error, message):
    M = foreign("csr")
    getattr(M, name)[place] = value
    with pytest.raises(error, match=message):
        from_scipy(M)


def test_data_that_are_no_numbers_or_too_few_are_refused():
    M = foreign("csr")
    M.data = M.data.astype(object)
    with pytest.raises(DtypeError, match=r"M\.data holds Python objects"):
        from_scipy(M)
    M.data = M.data[:3].astype(float)
    with pytest.raises(ShapeError, match=r"data has shape \(3,\) but the structure stores \(6,\)"):
        from_scipy(M)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "int32"}, DtypeError, "dtype is int32: values are float16"),
        ({"dtype": "complex64"}, DtypeError, "dtype is complex64"),
        ({"dtype": "no such"}, DtypeError, "'no such', which is no"),
        ({"index_dtype": "int16"}, DtypeError, "index_dtype is int16"),
        ({"index_dtype": "float64"}, DtypeError, "index_dtype is float64"),
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_from_scipy_refuses_dtypes(format, options, error, message):
    with pytest.raises(error, match=message):
        from_scipy(foreign(format), **options)


def test_indices_beyond_int32_and_unknown_formats_are_refused():
    M = scipy.sparse.coo_array(([1.0], (np.array([0]), np.array([2**40]))), shape=(1, 2**41))
    assert from_scipy(M).col.tolist() == [2**40]
    with pytest.raises(IndexRangeError, match=f"col holds {2**40}, which int32 cannot"):
        from_scipy(M, index_dtype="int32")
    unknown = object.__new__(type("Other", (Format,), {"format": "other"}))
    with pytest.raises(UnsupportedError, match=r"to_scipy got a .*Other: give a COO"):
        to_scipy(unknown)


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [
        ("float16", UnsupportedError, "float16, but scipy.sparse computes in"),
        ("int64", DtypeError, "dtype is int64"),
        ("no such", DtypeError, "'no such', which is no"),
    ],
)
def test_to_scipy_refuses_dtypes(dtype, error, message):
    with pytest.raises(error, match=message):
        to_scipy(example(), dtype=dtype)


# CuPy


@pytest.mark.parametrize("format", FORMATS)
def test_cupyx_takes_the_path_of_scipy(monkeypatch, format):
    """SciPy stands in for cupyx, whose classes have the same names and constructors."""
    A = example(format)
    monkeypatch.setattr(interop_scipy, "_cupyx_sparse", lambda: scipy.sparse)
    monkeypatch.setattr(interop_scipy, "is_cupy", lambda array: True)
    M = to_cupyx(A)
    assert M.format == format
    assert_shared(A, M)
    assert from_cupyx(M) == A


def test_matrices_on_a_gpu_are_not_moved_in_secret(monkeypatch):
    monkeypatch.setattr(interop_scipy, "is_cupy", lambda array: True)
    with pytest.raises(DeviceError, match=r'to_scipy: A is on cpu: move it with A\.to\("cpu"\)'):
        to_scipy(example())
    monkeypatch.undo()
    with pytest.raises(DeviceError, match=re.escape('A.to("cuda") or use to_scipy')):
        to_cupyx(example())


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index_dtype", INDICES)
def test_cupyx_shares_all_arrays(format, dtype, index_dtype):
    A = example(format, dtype, index_dtype).to("cuda")
    M = to_cupyx(A)
    assert (M.format, M.shape, M.dtype) == (format, A.shape, A.dtype)
    B = from_cupyx(M)
    assert B == A
    for name in parts(M):
        assert getattr(B, name).data.ptr == getattr(A, name).data.ptr


@pytest.mark.gpu
def test_cupyx_refuses_half_precision_and_dia_becomes_csr():
    import cupyx.scipy.sparse

    with pytest.raises(UnsupportedError, match=r"float16, but scipy.sparse computes"):
        to_cupyx(example("csr", "float16").to("cuda"))
    A = from_cupyx(cupyx.scipy.sparse.eye(4, format="dia"))
    assert isinstance(A, CSR)
    assert np.array_equal(A.toarray().get(), np.eye(4))


@pytest.mark.gpu
def test_to_scipy_refuses_a_gpu():
    with pytest.raises(DeviceError, match=re.escape("to_scipy: A is on cuda:0")):
        to_scipy(example().to("cuda"))
