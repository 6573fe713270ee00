"""Values of entries are in the order of the matrix that is given, whichever its format.

``tests/laws`` compare each operation with its oracle on entries in no order, in all formats.
Here is what has no oracle there, matrices that are made of results, and what transposes hold.
"""

import copy
import pickle

import numpy as np
import pytest
from laws.cases import CASES
from op_cases import FORMATS, features, host, matrix, put

from sparsefmt import Graph, ops
from sparsefmt.errors import DtypeError, FormatError
from sparsefmt.ops.engine.explain import explaining

EPS = np.finfo(np.float32).eps
#: Public names that compute nothing at entries, or are tried so in their room.
OTHERS = {"Costs", "Transpose", "compile_all", "explain", "sampling_rate", "transpose", "maxk"}
OTHERS |= {"gcn_norm", "gcn_norm_backward", "sample", "scale"}


def winners(A, X, grad, reduce="max"):
    """Return maxima or minima, the values of the entries that they come from, and gradients."""
    Y, places = ops.spmm_arg(A, X, reduce=reduce)
    values = np.append(host(A.data), 0)[host(places)]  # -1 leads to 0
    return Y, values, *ops.spmm_arg_backward(A, X, places, grad)


def sampled(A, X, grad):
    """Return a sample and the values at the entries that it says it is of."""
    B, perm = ops.sample_with_perm(A, 3, strategy="random", seed=2)
    return B.indptr, B.indices, B.data, A.data[perm]


CALLS = {
    "spmm_arg": winners,
    "spmm_arg_backward": lambda *args: winners(*args, reduce="min"),
    "sample_with_perm": sampled,
}


def test_no_operation_is_left_out():
    in_laws = {case.function.__name__ for case in CASES if case.oracle}
    assert in_laws | {*CALLS} | OTHERS == {*ops.__all__}


@pytest.mark.parametrize("format", ["coo", "csc", "sgt"])
@pytest.mark.parametrize("name", CALLS)
def test_entries_are_in_the_order_of_the_matrix(xp, name, format):
    A = matrix("shuffled", np.float32, np.int32).asformat(format)
    B, perm = A.tocsr_with_perm()
    assert (format == "sgt") == (perm == np.arange(A.nnz)).all()
    X, grad = (put(xp, features(n, (8,), np.float32)) for n in A.shape[::-1])
    results, expected = (CALLS[name](put(xp, one), X, grad) for one in (A, B))
    for one, other in zip(map(host, results), map(host, expected), strict=True):
        own = name != "sample_with_perm" and one.shape[:1] == (A.nnz,)
        np.testing.assert_allclose(one[perm] if own else one, other, rtol=64 * EPS, atol=64 * EPS)


@pytest.mark.usefixtures("small_work")
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("format", ["coo", "csr", "csc", "sgt"])
def test_results_are_values_of_the_same_matrix(xp, format, weighted):
    """``A.with_data`` of a result is the matrix of the results."""
    A = matrix("shuffled", np.float32 if weighted else None, np.int32).asformat(format)
    X, Y = (features(n, (8,), np.float32) for n in A.shape)
    products, pattern = X @ Y.T, A.with_data(np.ones(A.nnz)).toarray()
    B, X, Y = put(xp, A), put(xp, X), put(xp, Y)
    for out in (None, put(xp, np.full(A.nnz, np.nan, np.float32))):
        s = ops.sddmm(B, X, Y, out=out)
        assert out is None or s is out
        with explaining():  # the call runs all the same
            np.testing.assert_array_equal(host(ops.sddmm(B, X, Y)), host(s))
        dense = B.with_data(s).to("cpu").toarray()
        np.testing.assert_allclose(dense, products * pattern, rtol=64 * EPS, atol=64 * EPS)
    p = B.with_data(ops.edge_softmax(B, s)).to("cpu").toarray()
    np.testing.assert_allclose(p.sum(1), pattern.any(1), rtol=64 * EPS)


@pytest.mark.parametrize("format", ["coo", "csc"])
def test_a_matrix_without_entries_has_no_order(xp, format):
    A = put(xp, matrix("empty", np.float32, np.int32).asformat(format))
    assert (host(ops.spmm_arg(A, put(xp, features(3, (4,), np.float32)))[1]) == -1).all()


def transposable(xp, format, index_dtype=np.int32):
    A = put(xp, matrix("power law", np.float32, index_dtype)).asformat(format)
    return A, put(xp, features(45, 5, np.float32)), put(xp, features(60, 5, np.float32))


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("format", FORMATS)
def test_a_transpose_holds_the_transpose_and_where_entries_are(xp, format, index_dtype):
    A, *_ = transposable(xp, format, index_dtype)
    T, B = ops.transpose(A), A.tocsr()
    assert T.csr.with_data(B.data[T.perm]) == B.T.tocsr()
    assert bool((T.inverse[T.perm] == xp.arange(A.nnz)).all())
    assert T.csr.index_dtype == T.perm.dtype == T.inverse.dtype == index_dtype


@pytest.mark.parametrize("format", FORMATS)
def test_gradients_are_the_same_with_a_transpose(xp, format):
    A, X, G = transposable(xp, format)
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


def test_a_transpose_beside_another_matrix_is_refused(xp):
    A, X, G = transposable(xp, "csr")
    T = ops.transpose(A)
    wide, tall = A._replace(shape=(60, 46)), put(xp, features(46, 5, np.float32))
    others = A.copy(), A.tocoo(), A.tocsc(), A.astype(index_dtype=np.int64), A[:, ::-1]
    for B, Y in [*((B, X) for B in others), (wide, tall)]:
        with pytest.raises(FormatError, match=r"made of another matrix than A.*\.transpose\(A\)"):
            ops.aggregate_backward(B, Y, G, transposed=T)
    for bad in (A.T.tocsr(), (A.T.tocsr(), T.perm), Graph(A)):
        with pytest.raises(DtypeError, match=r"give what ops\.transpose\(A\) returned"):
            ops.aggregate_backward(A, X, G, transposed=bad)


def test_only_the_library_makes_a_transpose():
    A, *_ = transposable(np, "csr")
    T = ops.transpose(A)
    with pytest.raises(DtypeError, match=r"call ops\.transpose\(A\)"):
        ops.Transpose(T.csr, T.perm, T.inverse)
    with pytest.raises(AttributeError, match="perm of a Transpose is read-only"):
        T.perm = T.inverse
    assert repr(T) == "<Transpose of a matrix of shape (60, 45), 600 entries>"
    with pytest.raises(DtypeError, match="A is a ndarray: give a sparsefmt format"):
        ops.transpose(np.eye(3))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_a_transpose_goes_with_the_copy_of_its_matrix(again):
    A, X, G = transposable(np, "csr")
    B, T = again((A, ops.transpose(A)))
    found = ops.aggregate_backward(B, X, G, transposed=T)
    for one, other in zip(found, ops.aggregate_backward(A, X, G), strict=True):
        assert (one == other).all()
