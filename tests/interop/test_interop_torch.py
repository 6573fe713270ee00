"""torch: sparse tensors in and out over the same memory, and tensors as components."""

import re
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given

from sparsefmt import COO, CSC, CSR
from sparsefmt.errors import (
    DeviceError,
    DtypeError,
    FormatError,
    IndexRangeError,
    ShapeError,
    UnsupportedError,
)
from sparsefmt.interop import from_torch, to_torch
from sparsefmt.testing import cbsr, coo, csc, csr, sgt, stored_entries

torch = pytest.importorskip("torch")

# from_torch reads tensors that users made, and torch warns once when they make one.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse .* tensor support is in beta state:UserWarning",
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)

FORMATS = ("coo", "csr", "csc")
DTYPES = ("float16", "bfloat16", "float32", "float64")
INDICES = ("int32", "int64")


def example(format="coo", dtype="float64", index_dtype="int64", weighted=True):
    """3 x 5, not symmetric, an empty row, an explicit zero, ascending."""
    pytest.importorskip("ml_dtypes")
    row = np.array([0, 0, 0, 2, 2], index_dtype)
    col = np.array([1, 2, 4, 0, 3], index_dtype)
    data = np.array([1.5, -2, 0, 4, 0.25]).astype(dtype) if weighted else None
    return COO(row, col, data, shape=(3, 5)).asformat(format)


def foreign(format, dtype="float64", index_dtype="int64"):
    """The same matrix, made with torch alone."""
    dtype, index_dtype = getattr(torch, dtype), getattr(torch, index_dtype)
    values = torch.tensor([1.5, -2, 0, 4, 0.25], dtype=dtype)
    if format == "coo":
        indices = torch.tensor([[0, 0, 0, 2, 2], [1, 2, 4, 0, 3]])
        return torch.sparse_coo_tensor(indices, values, (3, 5))
    if format == "csr":
        indptr, indices = [0, 3, 3, 5], [1, 2, 4, 0, 3]
    else:
        indptr, indices, order = [0, 1, 2, 3, 4, 5], [2, 0, 0, 2, 0], [3, 0, 1, 4, 2]
        values = values[order]
    make = getattr(torch, f"sparse_{format}_tensor")
    return make(
        torch.tensor(indptr, dtype=index_dtype),
        torch.tensor(indices, dtype=index_dtype),
        values,
        (3, 5),
    )


def parts(tensor):
    """Arrays of a format by the names of its fields, as tensors."""
    if tensor.layout == torch.sparse_coo:
        row, col = tensor._indices()
        return {"row": row, "col": col, "data": tensor._values()}
    if tensor.layout == torch.sparse_csr:
        indptr, indices = tensor.crow_indices(), tensor.col_indices()
    else:
        indptr, indices = tensor.ccol_indices(), tensor.row_indices()
    return {"indptr": indptr, "indices": indices, "data": tensor.values()}


def assert_shared(A, tensor):
    for name, theirs in parts(tensor).items():
        assert getattr(A, name).ctypes.data == theirs.data_ptr(), name


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", INDICES)
def test_from_torch_shares_all_arrays(format, dtype, index_dtype):
    tensor = foreign(format, dtype, index_dtype)
    A = from_torch(tensor)
    assert A.index_dtype == ("int64" if format == "coo" else index_dtype)
    assert A == example(format, dtype, A.index_dtype)
    assert_shared(A, tensor)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", INDICES)
def test_to_torch_has_the_layout_dtypes_and_entries_and_shares_them(format, dtype, index_dtype):
    A = example(format, dtype, index_dtype)
    tensor = to_torch(A)
    assert name_of(tensor.layout) == f"sparse_{format}"
    assert tuple(tensor.shape) == A.shape
    assert name_of(tensor.dtype) == dtype
    expected = "int64" if format == "coo" else index_dtype
    assert {name_of(p.dtype) for p in list(parts(tensor).values())[:2]} == {expected}
    assert np.array_equal(tensor.to(torch.float64).to_dense().numpy(), A.toarray("float64"))
    if format == "coo":
        assert tensor._values().data_ptr() == A.data.ctypes.data
    else:
        assert_shared(A, tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_coo_that_came_from_torch_goes_back_without_a_copy(dtype):
    tensor = foreign("coo", dtype)
    back = to_torch(from_torch(tensor))
    assert back._indices().data_ptr() == tensor._indices().data_ptr()
    assert back._values().data_ptr() == tensor._values().data_ptr()


def test_rows_of_one_array_go_to_torch_without_a_copy_in_their_order_only():
    both = np.array([[0, 1, 1], [2, 0, 2]])
    A = COO(both[0], both[1], shape=(3, 3))
    assert to_torch(A)._indices().data_ptr() == both.ctypes.data
    indices = to_torch(A.T)._indices()
    assert indices.data_ptr() != both.ctypes.data
    assert indices.tolist() == both[::-1].tolist()
    A = COO(both[0, :2], both[1, :2], shape=(3, 3))  # of a longer array
    assert to_torch(A)._indices().tolist() == [[0, 1], [2, 0]]


def test_a_matrix_outlives_its_tensor_and_the_other_way_around():
    A, tensor = from_torch(foreign("csr")), to_torch(example("csr"))
    for _ in range(100):
        foreign("csr"), example("csr")
    assert A == example("csr")
    assert np.array_equal(tensor.to_dense().numpy(), example("csr").toarray())


def test_later_changes_of_the_tensor_are_seen():
    values = torch.ones(2)
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), values, (2, 2))
    A = from_torch(tensor)
    values[0] = 99
    assert A.data.tolist() == [99, 1]
    assert A.copy().data.flags.owndata


def test_an_uncoalesced_tensor_keeps_duplicates_and_their_order():
    indices = torch.tensor([[2, 0, 2, 2], [1, 1, 1, 0]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([4.0, 0.0, 2.0, 1.0]), (3, 2))
    assert not tensor.is_coalesced()
    A = from_torch(tensor)
    assert stored_entries(A) == [(2, 1, 4.0), (0, 1, 0.0), (2, 1, 2.0), (2, 0, 1.0)]
    back = to_torch(A)
    assert not back.is_coalesced()
    assert torch.equal(back._indices(), indices)
    assert from_torch(foreign("coo").coalesce()) == example("coo")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_an_unweighted_structure_gets_ones(format, dtype):
    tensor = to_torch(example(format, weighted=False), dtype=dtype)
    assert name_of(tensor.dtype) == (dtype or "float32")
    assert parts(tensor)["data"].tolist() == [1.0] * 5


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_dtype_casts_on_the_way_out(format, dtype, target):
    tensor = to_torch(example(format, dtype), dtype=target)
    assert name_of(tensor.dtype) == target
    assert sorted(parts(tensor)["data"].tolist()) == [-2.0, 0.0, 0.25, 1.5, 4.0]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", INDICES)
def test_dtypes_are_chosen_on_the_way_in(format, dtype, index_dtype):
    A = from_torch(foreign(format), dtype=dtype, index_dtype=index_dtype)
    assert A == example(format, dtype, index_dtype)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("format", FORMATS)
def test_integers_become_float64(format, dtype):
    tensor = foreign(format).to(getattr(torch, dtype))
    A = from_torch(tensor)
    assert A.dtype == np.float64
    assert A.data.tolist() == parts(tensor)["data"].tolist()


@pytest.mark.parametrize("tile", [(16, 8), (2, 3)])
@pytest.mark.parametrize("weighted", [True, False])
def test_sgt_goes_out_as_csr(tile, weighted):
    A = example("csr", weighted=weighted)
    tensor = to_torch(A.tosgt(tile))
    assert tensor.layout == torch.sparse_csr
    assert np.array_equal(tensor.to_dense().numpy(), A.toarray())


@given(A=cbsr(dtype="float32"))
def test_cbsr_goes_out_as_csr(A):
    tensor = to_torch(A)
    assert tensor.layout == torch.sparse_csr
    assert np.array_equal(tensor.to_dense().numpy(), A.toarray())


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "bool"])
def test_a_dense_tensor_becomes_the_csr_of_its_nonzeros(dtype):
    X = torch.tensor([[0, 1, 0], [1, 0, 1]], dtype=getattr(torch, dtype))
    A = from_torch(X)
    assert isinstance(A, CSR)
    assert A.index_dtype == np.int32
    assert A.dtype == (dtype if dtype.startswith("float") else "float64")
    assert A.toarray().tolist() == X.tolist()
    assert from_torch(X, index_dtype="int64").index_dtype == np.int64
    assert from_torch(X, dtype="float32").dtype == np.float32


def test_strides_and_pending_signs_of_dense_tensors_are_kept():
    X = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    assert np.array_equal(from_torch(X.T).toarray(), X.T.numpy())
    X = torch.complex(torch.zeros(2, 2), torch.ones(2, 2)).conj().imag
    assert X.is_neg()
    assert from_torch(X).toarray().tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0), (3, 7)])
@pytest.mark.parametrize("format", FORMATS)
def test_empty_matrices_round_trip(format, shape):
    A = CSR(np.zeros(shape[0] + 1, np.int64), np.zeros(0, np.int64), np.zeros(0), shape=shape)
    A = A.asformat(format)
    tensor = to_torch(A)
    assert tuple(tensor.shape) == shape
    assert from_torch(tensor) == A


@given(A=coo())
def test_round_trip_of_coo_is_exact(A):
    B = from_torch(to_torch(A))
    assert B.with_data(A.data).astype(index_dtype=A.index_dtype) == A
    assert A.data is None or B.dtype == A.dtype


@given(A=csr(duplicates=False, unsorted=False) | csc(duplicates=False, unsorted=False))
def test_round_trip_of_csr_and_csc_is_exact(A):
    B = from_torch(to_torch(A))
    assert B.with_data(A.data) == A
    assert A.data is None or B.dtype == A.dtype


@given(A=sgt(weighted=True, duplicates=False, unsorted=False))
def test_round_trip_of_tiles_keeps_csr_order(A):
    assert from_torch(to_torch(A)) == A.tocsr()


@given(A=csr() | csc())
def test_order_is_checked_as_torch_checks_it(A):
    make = getattr(torch, f"sparse_{A.format}_tensor")
    arrays = [torch.from_dlpack(a) for a in (A.indptr, A.indices)]
    try:
        make(*arrays, torch.ones(A.nnz), A.shape, check_invariants=True)
    except RuntimeError:
        with pytest.raises(FormatError, match="ascending and distinct"):
            to_torch(A)
    else:
        to_torch(A)


@pytest.mark.parametrize("format", ["csr", "csc"])
@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([2, 0], r"indices[1] is 0 after 2, but torch wants"),
        ([1, 1], r"indices[1] is 1 after 1, but torch wants"),
    ],
)
def test_unsorted_and_repeated_indices_are_refused(format, indices, message):
    make = {"csr": CSR, "csc": CSC}[format]
    A = make(np.array([0, 2, 2, 2]), np.array(indices), shape=(3, 3))
    with pytest.raises(FormatError, match=re.escape(message)):
        to_torch(A)
    trusted = to_torch(A, validate="cheap")
    assert parts(trusted)["indices"].tolist() == indices
    assert to_torch(A.tocoo()).coalesce().sum() == 2
    A = CSR(np.array([0, 2]), np.array([2, 0]), np.array([1.0, 2.0]), shape=(1, 3))
    assert to_torch(A.sorted_indices()).to_dense().tolist() == [[2.0, 0.0, 1.0]]  # the mend


@pytest.mark.parametrize("name", ["indptr", "indices", "data"])
def test_read_only_arrays_are_copied(name):
    """torch has no read-only tensors: writing to one would change what is marked as constant."""
    A = example("csr").copy()
    getattr(A, name).flags.writeable = False
    tensor = to_torch(A)
    assert parts(tensor)[name].data_ptr() != getattr(A, name).ctypes.data
    assert from_torch(tensor) == A


@pytest.mark.parametrize("format", FORMATS)
def test_products_agree_and_users_see_no_warning(format):
    A, before = example(format), list(warnings.filters)
    to_torch(A)
    assert warnings.filters == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = to_torch(A)
        from_torch(tensor)
    X = np.arange(10.0).reshape(5, 2)
    assert np.array_equal((tensor @ torch.from_numpy(X)).numpy(), A.toarray() @ X)


# Refusals


@pytest.mark.parametrize("format", FORMATS)
def test_tensors_that_require_grad_are_refused(format):
    tensor = foreign(format).requires_grad_()
    with pytest.raises(UnsupportedError, match=r"requires grad.*tensor\.detach\(\).*autograd"):
        from_torch(tensor)
    assert from_torch(tensor.detach()) == example(format)


def tensors_that_are_refused():
    eye = torch.eye(4)
    flat = torch.tensor([0.0, 1.0])
    coo_of_rows = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2, 3), (4, 3))
    hybrid = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1, 3), (2, 2, 3))
    deep = torch.sparse_coo_tensor(torch.zeros(3, 1, dtype=torch.int64), torch.ones(1), (2, 2, 2))
    return [
        (eye.to_sparse_bsr((2, 2)), UnsupportedError, r"layout is sparse_bsr.*to_sparse_csr"),
        (eye.to_sparse_bsc((2, 2)), UnsupportedError, r"layout is sparse_bsc"),
        (torch.stack([eye, eye]).to_sparse_csr(), UnsupportedError, r"\(2, 4, 4\).*batched"),
        (torch.stack([eye, eye]).to_sparse_csc(), UnsupportedError, r"\(2, 4, 4\).*batched"),
        (coo_of_rows, UnsupportedError, r"\(4, 3\) with 1 dense dimensions"),
        (hybrid, UnsupportedError, r"\(2, 2, 3\) with 1 dense dimensions: hybrid"),
        (deep, UnsupportedError, r"\(2, 2, 2\) with 0 dense dimensions"),
        (torch.eye(2, requires_grad=True), UnsupportedError, "tensor requires grad"),
        (flat, ShapeError, r"shape \(2,\): give a 2-D"),
        (torch.zeros(2, 2, 2), ShapeError, r"shape \(2, 2, 2\): give a 2-D"),
        (eye.to_sparse() * 1j, UnsupportedError, "values is complex64"),
        (eye * 1j, UnsupportedError, "tensor is complex64"),
        (eye.to(torch.float8_e4m3fn), DtypeError, "tensor: numpy cannot take over"),
        (eye.to("meta"), DeviceError, "tensor is on meta"),
        (torch.tensor([[2**53 + 1]]), DtypeError, "cannot hold exactly"),
        (torch.tensor([[2**53 + 1]]).to_sparse(), DtypeError, "values.*cannot hold exactly"),
    ]


@pytest.mark.parametrize("case", range(16))
def test_from_torch_refuses(case):
    tensor, error, message = tensors_that_are_refused()[case]
    with pytest.raises(error, match=message):
        from_torch(tensor)


@pytest.mark.parametrize(
    ("indptr", "indices", "error", "message"),
    [
        ([0, 1, 2], [0, 9], IndexRangeError, r"indices\[1\] is 9 but there are 2 columns"),
        ([0, 1, 2], [-1, 0], IndexRangeError, r"indices\[0\] is -1"),
        ([0, 2, 1], [0, 1], FormatError, "indptr decreases from 2 to 1"),
        ([1, 1, 2], [0, 1], FormatError, r"indptr\[0\] is 1"),
    ],
)
@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_what_torch_was_told_not_to_check_is_checked(layout, indptr, indices, error, message):
    make = getattr(torch, f"sparse_{layout}_tensor")
    tensor = make(
        torch.tensor(indptr),
        torch.tensor(indices),
        torch.ones(2),
        (2, 2),
        check_invariants=False,
    )
    with pytest.raises(error, match=message.replace("columns", "(columns|rows)")):
        from_torch(tensor)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "int32"}, DtypeError, "dtype is int32"),
        ({"dtype": "no such"}, DtypeError, "'no such'"),
        ({"index_dtype": "int8"}, DtypeError, "index_dtype is int8"),
    ],
)
@pytest.mark.parametrize("format", [*FORMATS, "dense"])
def test_from_torch_refuses_dtypes(format, options, error, message):
    tensor = torch.eye(2) if format == "dense" else foreign(format)
    with pytest.raises(error, match=message):
        from_torch(tensor, **options)


def test_dtypes_that_values_do_not_have_or_overflow_are_refused():
    with pytest.raises(DtypeError, match="dtype is int64: values are float16"):
        to_torch(example(), dtype="int64")
    with pytest.raises(DtypeError, match=r"values\[0\] is 100000.*overflows float16"):
        from_torch(torch.tensor([[1e5]]).to_sparse(), dtype="float16")


@pytest.mark.parametrize("format", FORMATS)
def test_without_ml_dtypes_bfloat16_says_what_to_install(monkeypatch, format):
    tensor = foreign(format, "bfloat16")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UnsupportedError, match=r"values is bfloat16.*pip install ml_dtypes"):
        from_torch(tensor)


# Tensors as components: the constructors take whatever speaks DLPack


def test_constructors_share_tensors():
    indptr, indices, data = torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.ones(2)
    A = CSR(indptr, indices, data, shape=(2, 2))
    for mine, theirs in zip((A.indptr, A.indices, A.data), (indptr, indices, data), strict=True):
        assert mine.ctypes.data == theirs.data_ptr()
    B = CSC(indptr, indices, data, shape=(2, 2))
    assert B.data.ctypes.data == data.data_ptr()
    C = COO(indices, indices, data, shape=(2, 2))
    assert C.row.ctypes.data == indices.data_ptr() == C.col.ctypes.data


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("index_dtype", INDICES)
def test_components_keep_their_dtypes(dtype, index_dtype):
    indices = torch.tensor([1, 0], dtype=getattr(torch, index_dtype))
    A = COO(indices, indices, torch.ones(2, dtype=getattr(torch, dtype)), shape=(2, 2))
    assert (A.index_dtype, A.dtype) == (index_dtype, dtype)


def test_components_go_to_torch_without_a_copy_and_come_without_grad():
    A = example("csr")
    for array in (A.indptr, A.indices, A.data):
        assert torch.from_dlpack(array).data_ptr() == array.ctypes.data
    with pytest.raises(DtypeError, match=r"data: .*requires? grad.*detach"):
        A.with_data(torch.ones(5, requires_grad=True))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", INDICES)
def test_cuda_tensors_share_all_arrays(format, dtype, index_dtype):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    tensor = foreign(format, dtype, index_dtype).to("cuda")
    A = from_torch(tensor)
    assert A.device == "cuda:0"
    assert A.to("cpu") == example(format, dtype, A.index_dtype)
    back = to_torch(A)
    for (name, theirs), again in zip(parts(tensor).items(), parts(back).values(), strict=True):
        assert getattr(A, name).data.ptr == theirs.data_ptr() == again.data_ptr(), name


@pytest.mark.gpu
def test_unsorted_indices_are_refused_on_a_gpu():
    A = CSR(np.array([0, 2]), np.array([2, 0]), shape=(1, 3)).to("cuda")
    with pytest.raises(FormatError, match="is 0 after 2"):
        to_torch(A)
