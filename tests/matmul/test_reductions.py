"""Maximum and minimum, which entry won, and the way back to it, against loops in float64."""

import numpy as np
import pytest
from laws.cases import NAMED
from laws.checks import check
from op_cases import (
    DTYPES,
    INDEX_DTYPES,
    REDUCTIONS,
    ROW_LENGTHS,
    far_apart,
    features,
    host,
    long_rows,
    matrix,
    name_of,
    put,
    rows_of,
)

import sparsefmt
from sparsefmt import ops
from sparsefmt.testing import assert_close, error_bound, spmm_oracle, stored_entries


def check_winners(xp, A, X, reduce, **scales):
    """Each winner holds the result, lies in its row, and is the lowest that does."""
    there = {name: put(xp, value) for name, value in scales.items()}
    Y, arg = (host(a) for a in ops.spmm_arg(put(xp, A), put(xp, X), reduce=reduce, **there))
    assert_close(
        Y,
        spmm_oracle(A, X, reduce=reduce, **scales),
        bound=error_bound(A, X, reduce=reduce, **scales),
    )
    assert arg.dtype == A.index_dtype
    wide = X.dtype if X.dtype.itemsize >= 4 else np.float32  # what a product is computed in
    c = np.ones(A.n_cols, wide) if "col_scale" not in scales else scales["col_scale"].astype(wide)
    values = np.ones(A.nnz, wide) if A.data is None else A.data.astype(wide)
    products = (values * c[A.indices])[:, None] * X.astype(wide)[A.indices]
    for i in range(A.n_rows):
        start, stop = A.indptr[i], A.indptr[i + 1]
        if start == stop:
            assert (arg[i] == -1).all()
        else:
            pick = np.argmax if reduce == "max" else np.argmin  # NaN wins, then the lowest
            assert arg[i].tolist() == (start + pick(products[start:stop], axis=0)).tolist()


@pytest.mark.parametrize("reduce", REDUCTIONS[1:])
def test_a_row_without_entries_is_zero_whatever_its_factor(xp, reduce):
    A = sparsefmt.CSR([0, 0, 1], [0], shape=(2, 1))
    r = put(xp, np.array([np.inf, -2.0]))
    Y = ops.spmm(put(xp, A), xp.full((1, 2), -3.0), reduce=reduce, row_scale=r)
    assert Y.tolist() == [[0.0, 0.0], [6.0, 6.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_nan_wins_and_infinities_compare(xp, reduce, dtype):
    A = rows_of([4, 3, 0, 2, 1, 20], 9, None, np.int32)
    X = features(9, 19, dtype)
    X[np.random.default_rng(0).random(X.shape) < 0.1] = np.nan
    X[np.random.default_rng(1).random(X.shape) < 0.2] = np.inf
    X[np.random.default_rng(2).random(X.shape) < 0.2] = -np.inf
    check(xp, NAMED[f"spmm {reduce}"], A, {"X": X})
    check_winners(xp, A, X, reduce)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("width", [0, 1, 7, 64, 130])
def test_the_winner_is_the_entry_that_the_result_comes_from(xp, reduce, dtype, index_dtype, width):
    for kind in ("power law", "isolated rows", "no columns", "star"):
        A = matrix(kind, dtype, index_dtype).tocsr()
        check_winners(xp, A, features(A.n_cols, width, dtype), reduce)
    A = matrix("power law", None, index_dtype).tocsr()
    c = features(A.n_cols, (), dtype, seed=3)
    r = features(A.n_rows, (), dtype, seed=2)
    check_winners(xp, A, features(A.n_cols, width, dtype), reduce, row_scale=r, col_scale=c)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_ties_go_to_the_lowest_entry(xp, reduce, dtype):
    A = rows_of(ROW_LENGTHS["every length"], 5, None, np.int32)  # many repeated columns
    check_winners(xp, A, np.round(features(5, 40, dtype) * 2).astype(dtype), reduce)
    A = long_rows(None, np.int32)
    _, arg = ops.spmm_arg(put(xp, A), xp.zeros((A.n_cols, 3), dtype), reduce=reduce)
    first = np.where(A.lengths > 0, A.indptr[:-1], -1)
    assert (host(arg) == first[:, None]).all()


def test_winners_are_numbered_in_the_order_of_the_values(xp):
    A = matrix("power law", np.float32, np.int32)
    X = put(xp, features(A.n_cols, 6, np.float32))
    Y, arg = ops.spmm_arg(put(xp, A.tocsr()), X)
    wanted = np.append(host(A.tocsr().data), 0)[host(arg)]  # -1 leads to 0
    for format in ("coo", "csc", "sgt"):
        B = A.asformat(format)
        again, own = ops.spmm_arg(put(xp, B), X)
        assert bool((again == Y).all())
        assert (np.append(host(B.data), 0)[host(own)] == wanted).all()


def backward_oracle(A, X, arg, grad, r, c):
    """Gradients and the sums of the magnitudes of what adds up in them."""
    entries = stored_entries(A)
    dX, dA = np.zeros(X.shape), np.zeros(A.nnz)
    sizes = np.zeros(X.shape), np.zeros(A.nnz)
    for i, f in np.argwhere(arg >= 0).tolist():
        e = int(arg[i, f])
        _, j, a = entries[e]
        share = float(r[i]) * float(c[j]) * float(grad[i, f])
        dX[j, f] += a * share
        dA[e] += share * float(X[j, f])
        sizes[0][j, f] += abs(a * share)
        sizes[1][e] += abs(share * float(X[j, f]))
    return (dX, dA), sizes


def check_gradients(xp, A, width, dtype, *, scaled):
    eps = 2.0**-7 if np.dtype(dtype).name == "bfloat16" else float(np.finfo(dtype).eps)
    X, grad = features(A.n_cols, width, dtype), features(A.n_rows, width, dtype, seed=7)
    scales = {
        "row_scale": features(A.n_rows, (), dtype, seed=2) if scaled else None,
        "col_scale": features(A.n_cols, (), dtype, seed=3) if scaled else None,
    }
    there = {name: put(xp, value) for name, value in scales.items()}
    arg = ops.spmm_arg(put(xp, A), put(xp, X), **there)[1]
    apart = far_apart(xp, X), arg, far_apart(xp, grad, gap=1)
    found = ops.spmm_arg_backward(put(xp, A), *apart, **there)
    r, c = (
        np.ones(size) if one is None else one
        for one, size in zip(scales.values(), A.shape, strict=True)
    )
    expected, sizes = backward_oracle(A, X, host(arg), grad, r, c)
    for got, want, size in zip(found, expected, sizes, strict=True):
        terms = max(A.n_rows, width)
        assert_close(got, want, bound=terms * eps * size + 1e-7 * (eps > 1e-4))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_gradients_go_to_the_winners(xp, dtype, index_dtype, weighted, scaled):
    A = matrix("power law", dtype if weighted else None, index_dtype).tocsr()
    for width in (0, 1, 12, 16, 21, 64):
        check_gradients(xp, A, width, dtype, scaled=scaled)


@pytest.mark.parametrize("width", [8, 33])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
def test_gradients_of_columns_that_many_blocks_share(xp, index_dtype, width):
    A = rows_of(np.ones(10_000, int), 3, np.float32, index_dtype)
    check_gradients(xp, A, width, np.float32, scaled=True)


def test_winners_may_begin_anywhere(xp):
    A = put(xp, matrix("power law", np.float32, np.int32).tocsr())
    X, grad = (put(xp, features(size, 64, np.float32)) for size in (A.n_cols, A.n_rows))
    arg = ops.spmm_arg(A, X)[1]
    buffer = xp.empty(arg.size + 1, arg.dtype)
    buffer[1:] = arg.ravel()
    once = ops.spmm_arg_backward(A, X, arg, grad)
    again = ops.spmm_arg_backward(A, X, buffer[1:].reshape(arg.shape), grad)
    assert all(bool((a == b).all()) for a, b in zip(once, again, strict=True))
