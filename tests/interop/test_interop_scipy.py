"""scipy.sparse and cupyx.scipy.sparse alone: ``test_interop_sparse`` has what torch shares."""

import re

import numpy as np
import pytest
import scipy.sparse
from test_interop_sparse import FLOATS, FORMATS, SCIPY

from sparsefmt import CSR, Format
from sparsefmt.errors import DeviceError, DtypeError, IndexRangeError, ShapeError, UnsupportedError
from sparsefmt.interop import from_cupyx, from_scipy, to_cupyx, to_scipy
from sparsefmt.interop import scipy as interop_scipy
from sparsefmt.testing import stored_entries

example, assert_shared = SCIPY.example, SCIPY.assert_shared


def foreign(format, dtype="float64"):
    """The same matrix, made with SciPy alone."""
    return SCIPY.make(example(format, dtype))


@pytest.mark.parametrize("format", ["csr", "csc"])
def test_float16_that_scipy_can_store_comes_in(format):
    M = foreign(format, "float16")
    assert from_scipy(M) == example(format, "float16")
    assert_shared(from_scipy(M), M)


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
    with pytest.raises(UnsupportedError, match=f"{dtype}, but scipy.sparse computes in"):
        to_scipy(example(format), dtype=dtype)


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


@pytest.mark.parametrize("format", ["csr", "csc"])
def test_room_behind_the_last_entry_is_left_out(format):
    M = foreign(format)
    M.indices, M.data = np.append(M.indices, [99, 99]), np.append(M.data, [7.0, 7.0])
    A = from_scipy(M)
    assert A == example(format)  # of 6 entries
    assert_shared(A, M)
    M = foreign(format)
    M.indptr = M.indptr.astype(np.int32)  # index arrays of two dtypes meet in int64
    A = from_scipy(M)
    assert A.index_dtype == np.int64
    assert np.shares_memory(A.indices, M.indices)
    assert A == example(format)


# Refusals


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (scipy.sparse.coo_array(np.ones(3)), ShapeError, re.escape("shape (3,): give a 2-D")),
        (scipy.sparse.coo_array(np.ones((2, 2, 2))), ShapeError, re.escape("shape (2, 2, 2)")),
        (scipy.sparse.csr_array(np.eye(2) * 1j), UnsupportedError, "M.data is complex128"),
        (scipy.sparse.csr_array([[2**53 + 1]]), DtypeError, "M.data.*cannot hold exactly"),
    ],
)
def test_from_scipy_refuses(value, error, message):
    with pytest.raises(error, match=message):
        from_scipy(value)


def test_data_that_are_no_numbers_or_too_few_are_refused():
    M = foreign("csr")
    M.data = M.data.astype(object)
    with pytest.raises(DtypeError, match=r"M\.data holds Python objects"):
        from_scipy(M)
    M.data = M.data[:3].astype(float)
    with pytest.raises(ShapeError, match=r"data has shape \(3,\) but the structure stores \(6,\)"):
        from_scipy(M)


def test_indices_beyond_int32_and_unknown_formats_are_refused():
    M = scipy.sparse.coo_array(([1.0], (np.array([0]), np.array([2**40]))), shape=(1, 2**41))
    assert from_scipy(M).col.tolist() == [2**40]
    with pytest.raises(IndexRangeError, match=f"col holds {2**40}, which int32 cannot"):
        from_scipy(M, index_dtype="int32")
    unknown = object.__new__(type("Other", (Format,), {"format": "other"}))
    with pytest.raises(UnsupportedError, match=r"to_scipy got a .*Other: give a COO"):
        to_scipy(unknown)


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
