"""``ops.transpose``: what it holds, beside which matrices it serves, and who may make one."""

import copy
import pickle

import numpy as np
import pytest
from op_cases import FORMATS, features, matrix, put

from sparsefmt import CSR, Graph, ops
from sparsefmt.errors import DtypeError, FormatError

F32 = np.float32


def given(xp, format, index_dtype=np.int32):
    A = put(xp, matrix("power law", F32, index_dtype)).asformat(format)
    return A, put(xp, features(45, 5, F32)), put(xp, features(60, 5, F32))


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("format", FORMATS)
def test_it_holds_the_transpose_and_where_entries_are(xp, format, index_dtype):
    A, *_ = given(xp, format, index_dtype)
    T, B = ops.transpose(A), A.tocsr()
    assert T.csr.with_data(B.data[T.perm]) == B.T.tocsr()
    assert bool((T.inverse[T.perm] == xp.arange(A.nnz)).all())
    assert T.csr.index_dtype == T.perm.dtype == T.inverse.dtype == index_dtype


@pytest.mark.parametrize("format", FORMATS)
def test_gradients_are_the_same_with_it(xp, format):
    A, X, G = given(xp, format)
    T, (_, arg), S = ops.transpose(A), ops.spmm_arg(A, X), ops.maxk(X, 2)
    calls = (
        lambda A, **way: ops.aggregate_backward(A, X, G, **way),
        lambda A, **way: ops.spmm_arg_backward(A, X, arg, G, **way),
        lambda A, **way: [ops.sspmm(A, G, S, deterministic=True, **way).data],
    )
    for B in (A, A.with_data(A.data * 2), A._replace(data=None)):  # they share their indices
        for call in calls:
            for one, other in zip(call(B), call(B, transposed=T), strict=True):
                assert bool((one == other).all())


def test_beside_another_matrix_it_is_refused(xp):
    A, X, G = given(xp, "csr")
    T = ops.transpose(A)
    wide = CSR(A.indptr, A.indices, A.data, shape=(60, 46))
    tall = put(xp, features(46, 5, F32))
    others = A.copy(), A.tocoo(), A.tocsc(), A.astype(index_dtype=np.int64), A[:, ::-1]
    for B in others:
        with pytest.raises(
            FormatError, match=r"made of another matrix than A.*ops\.transpose\(A\)"
        ):
            ops.aggregate_backward(B, X, G, transposed=T)
    with pytest.raises(FormatError, match="another matrix"):
        ops.aggregate_backward(wide, tall, G, transposed=T)
    for bad in (A.T.tocsr(), (A.T.tocsr(), T.perm), Graph(A)):
        with pytest.raises(DtypeError, match=r"give what ops\.transpose\(A\) returned"):
            ops.aggregate_backward(A, X, G, transposed=bad)


def test_only_the_library_makes_one():
    A, *_ = given(np, "csr")
    T = ops.transpose(A)
    with pytest.raises(DtypeError, match=r"call ops\.transpose\(A\)"):
        ops.Transpose(T.csr, T.perm, T.inverse)
    with pytest.raises(AttributeError, match="perm of a Transpose is read-only"):
        T.perm = T.inverse
    assert repr(T) == "<Transpose of a matrix of shape (60, 45), 600 entries>"
    with pytest.raises(DtypeError, match="A is a ndarray: give a sparsefmt format"):
        ops.transpose(np.eye(3))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_goes_with_the_copy_of_its_matrix(again):
    A, X, G = given(np, "csr")
    B, T = again((A, ops.transpose(A)))
    found = ops.aggregate_backward(B, X, G, transposed=T)
    for one, other in zip(found, ops.aggregate_backward(A, X, G), strict=True):
        assert (one == other).all()
