"""torch alone: ``test_interop_sparse`` has what SciPy shares; and tensors as components."""

import sys
import warnings

import numpy as np
import pytest
from hypothesis import given
from test_interop_sparse import ALL as DTYPES
from test_interop_sparse import FORMATS, TORCH
from test_interop_sparse import parts_of_torch as parts

from sparsefmt import COO, CSC, CSR, Graph, autograd
from sparsefmt.errors import (
    DeviceError,
    DtypeError,
    FormatError,
    ShapeError,
    SparseFmtError,
    UnsupportedError,
)
from sparsefmt.interop import from_torch, to_torch
from sparsefmt.testing import csc, csr, stored_entries

torch = pytest.importorskip("torch")

# from_torch reads tensors that users made, and torch warns once when they make one.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse .* tensor support is in beta state:UserWarning",
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)
INDICES = ("int32", "int64")
example = TORCH.example


def foreign(format, dtype="float64"):
    return TORCH.make(example(format, dtype))


def test_rows_of_one_array_go_to_torch_without_a_copy_in_their_order_only():
    both = np.array([[0, 1, 1], [2, 0, 2]])
    A = COO(both[0], both[1], shape=(3, 3))
    assert to_torch(A)._indices().data_ptr() == both.ctypes.data
    indices = to_torch(A.T)._indices()
    assert indices.data_ptr() != both.ctypes.data
    assert indices.tolist() == both[::-1].tolist()
    A = COO(both[0, :2], both[1, :2], shape=(3, 3))  # of a longer array
    assert to_torch(A)._indices().tolist() == [[0, 1], [2, 0]]


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
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_dtype_casts_on_the_way_out(format, dtype, target):
    tensor = to_torch(example(format, dtype), dtype=target)
    assert tensor.dtype == getattr(torch, target)
    assert sorted(parts(tensor)["data"].tolist()) == [-2.0, 0.0, 0.25, 1.5, 4.0, 8.0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "bool"])
def test_a_dense_tensor_becomes_the_csr_of_its_nonzeros(dtype):
    X = torch.tensor([[0, 1, 0], [1, 0, 1]], dtype=getattr(torch, dtype))
    A = from_torch(X)
    assert isinstance(A, CSR)
    assert (A.index_dtype, A.dtype) == ("int32", dtype if dtype.startswith("float") else "float64")
    assert A.toarray().tolist() == X.tolist()
    assert from_torch(X, index_dtype="int64").index_dtype == np.int64
    assert from_torch(X, dtype="float32").dtype == np.float32


def test_strides_and_pending_signs_of_dense_tensors_are_kept():
    X = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    assert np.array_equal(from_torch(X.T).toarray(), X.T.numpy())
    X = torch.complex(torch.zeros(2, 2), torch.ones(2, 2)).conj().imag
    assert X.is_neg()
    assert from_torch(X).toarray().tolist() == [[-1, -1], [-1, -1]]


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
@pytest.mark.parametrize("indices", [[2, 0], [1, 1]])
def test_unsorted_and_repeated_indices_are_refused(format, indices):
    make = {"csr": CSR, "csc": CSC}[format]
    A, (first, second) = make(np.array([0, 2, 2, 2]), np.array(indices), shape=(3, 3)), indices
    with pytest.raises(
        FormatError, match=rf"indices\[1\] is {second} after {first}, but torch wants"
    ):
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


def test_tensors_with_a_tangent_are_refused():
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2, 2), torch.ones(2, 2))
        sparse = torch.ones(2, 2).to_sparse()  # which has none, and is taken as ever
        assert from_torch(sparse).nnz == len(autograd.spmm(sparse, torch.ones(2, 1))) ** 2
        for make in (from_torch, lambda tensor: COO([0, 1], [1, 0], tensor[0], shape=(2, 2))):
            with pytest.raises(SparseFmtError, match="detach"):
                make(dual)
        with pytest.raises(UnsupportedError, match=r"edge_weight.* has a tangent"):
            Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), dual[0])


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


def test_dtypes_that_values_overflow_are_refused():
    with pytest.raises(DtypeError, match=r"values\[0\] is 100000.*overflows float16"):
        from_torch(torch.tensor([[1e5]]).to_sparse(), dtype="float16")


@pytest.mark.parametrize("format", FORMATS)
def test_without_ml_dtypes_bfloat16_says_what_to_install(monkeypatch, format):
    tensor = foreign(format, "bfloat16")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UnsupportedError, match=r"values is bfloat16.*pip install ml_dtypes"):
        from_torch(tensor)


# Tensors as components: the constructors take whatever speaks DLPack


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("index_dtype", INDICES)
def test_constructors_share_tensors(dtype, index_dtype):
    indptr, indices = torch.tensor([[0, 1, 2], [1, 0, 0]], dtype=getattr(torch, index_dtype))
    places = {"indptr": indptr, "indices": indices[:2]}
    data = torch.ones(2, dtype=getattr(torch, dtype))
    ends = {"row": places["indices"], "col": indptr[:2]}
    for make, names in ((CSR, places), (CSC, places), (COO, ends)):
        A = make(**names, data=data, shape=(2, 2))
        assert (A.index_dtype, A.dtype) == (index_dtype, dtype)
        for name, theirs in (names | {"data": data}).items():
            assert getattr(A, name).ctypes.data == theirs.data_ptr()


def test_components_go_to_torch_without_a_copy_and_come_without_grad():
    A = example("csr")
    for array in (A.indptr, A.indices, A.data):
        assert torch.from_dlpack(array).data_ptr() == array.ctypes.data
    with pytest.raises(DtypeError, match=r"data: .*requires? grad.*detach"):
        A.with_data(torch.ones(5, requires_grad=True))


@pytest.mark.gpu
def test_unsorted_indices_are_refused_on_a_gpu():
    A = CSR(np.array([0, 2]), np.array([2, 0]), shape=(1, 3)).to("cuda")
    with pytest.raises(FormatError, match="is 0 after 2"):
        to_torch(A)
