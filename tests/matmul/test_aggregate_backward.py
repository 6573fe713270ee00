"""Both gradients of an aggregation in one pass, against sums over the entries in float64."""

import numpy as np
import pytest
from op_cases import (
    DTYPES,
    INDEX_DTYPES,
    features,
    in_data_order,
    long_rows,
    matrix,
    name_of,
    put,
)

from sparsefmt import ops
from sparsefmt.errors import DtypeError, ShapeError
from sparsefmt.ops.engine.structure import Structure
from sparsefmt.ops.matmul import cuda_aggregate as matmul_cuda_aggregate
from sparsefmt.testing import stored_entries

F32, F64 = np.float32, np.float64


def as_float64(value):
    return np.asarray(value.get() if hasattr(value, "get") else value).astype(F64)


def expected(A, X, grad, own=None):
    """``[(gradient, sizes of its sums)]`` in float64; A is no SGT."""
    x, g = X.astype(F64), grad.astype(F64)
    row, col = np.array([entry[:2] for entry in stored_entries(A)], int).reshape(-1, 2).T
    values = np.ones(A.nnz) if A.data is None else A.data.astype(F64)
    messages, products = values[:, None] * g[row], g[row] * x[col]
    dX, size = np.zeros(x.shape), np.zeros(x.shape)
    np.add.at(dX, col, messages)
    np.add.at(size, col, np.abs(messages))
    found = [(products.sum(1), np.abs(products).sum(1))]
    if own is not None:
        beside = own.astype(F64)[:, None] * g
        dX, size = dX + beside, size + np.abs(beside)
        found.append(((g * x).sum(1), np.abs(g * x).sum(1)))
    return [(dX, size), *found]


def assert_right(results, wanted, dtype, terms):
    eps = 2.0**-7 if np.dtype(dtype).name == "bfloat16" else float(np.finfo(dtype).eps)
    accumulated = eps + terms * float(np.finfo(F32).eps) if eps > 1e-4 else terms * eps
    assert len(results) == len(wanted)
    for result, (exact, size) in zip(results, wanted, strict=True):
        assert result.dtype == dtype
        assert result.shape == exact.shape
        bound = (2 * eps + 2 * accumulated) * size + (size > 0) * 1e-7 * (eps > 1e-4)
        assert (np.abs(as_float64(result) - exact) <= bound).all()


def check(xp, A, width, dtype, *, own=False, transform=put, keep=False):
    B = in_data_order(A)
    X, grad = features(B.n_cols, width, dtype), features(B.n_rows, width, dtype, seed=2)
    weight = features(B.n_rows, (), dtype, seed=3) if own else None
    args = put(xp, A), transform(xp, X), transform(xp, grad)
    given = {"transposed": ops.transpose(args[0])} if keep else {}
    results = ops.aggregate_backward(*args, self_weight=put(xp, weight), **given)
    longest = int(B.tocsc().lengths.max(initial=0))
    assert_right(results, expected(B, X, grad, weight), dtype, longest + width + 1)
    return results


def test_weights_of_vertices_may_be_wider_than_halves(xp):
    A = put(xp, matrix("banded", np.float16, np.int32))
    X = put(xp, features(40, 8, np.float16))
    _, _, dself = ops.aggregate_backward(A, X, X, self_weight=xp.ones(40, F32))
    assert dself.dtype == F32


@pytest.mark.parametrize("dtype", [np.float16, F32], ids=name_of)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
def test_hubs_among_the_sources_are_cut_and_put_together(xp, dtype, index_dtype):
    A = long_rows(dtype, index_dtype).T.tocsr()
    for width in (7, 64, 96):
        check(xp, A, width, dtype)
        check(xp, A.with_data(None), width, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
def test_entries_may_move_between_both_orders_apart(xp, monkeypatch, dtype, index_dtype):
    """As those of large graphs do; back by the permutation, or its inverse with a transpose."""
    monkeypatch.setattr(matmul_cuda_aggregate, "goes_apart", lambda *_, **__: True)
    for weighted in (dtype, None):
        A = matrix("power law", weighted, index_dtype).tocsr()
        for width in (0, 1, 33, 64, 200):
            first, second = (check(xp, A, width, dtype, keep=keep) for keep in (False, True))
            for one, other in zip(first, second, strict=True):
                assert bool((one == other).all())


def test_large_graphs_go_apart():
    """By entries, bytes of features, and whether the way back is the fast one."""

    def apart(nnz, feat, inverse):
        S = Structure(10_000, 10_000, nnz, "int32", *(0,) * 9)
        return matmul_cuda_aggregate.goes_apart(S, "float32", feat, inverse=inverse)

    for nnz, feat, inverse in (
        (2_000_000, 64, True),
        (4_000_000, 999, False),
        (8_000_000, 9, True),
    ):
        assert not apart(nnz, feat, inverse)
    for nnz, feat, inverse in ((2_000_000, 999, True), (4_200_000, 999, False), (8_400_000, 9, 0)):
        assert apart(nnz, feat, inverse)


def test_bad_weights_of_vertices_are_refused():
    A = matrix("banded", F32, np.int32)
    X = features(40, 4, F32)
    with pytest.raises(ShapeError, match=r"self_weight has shape \(39,\): give \(40,\)"):
        ops.aggregate_backward(A, X, X, self_weight=np.ones(39, F32))
    with pytest.raises(DtypeError, match="self_weight is float64 but X is float32"):
        ops.aggregate_backward(A, X, X, self_weight=np.ones(40))


def test_only_a_square_matrix_has_weights_of_vertices():
    A, X, grad = matrix("power law", F32, np.int32), features(45, 4, F32), features(60, 4, F32)
    text = r"self_weight is given but A is \(60, 45\): only a square A has vertices"
    with pytest.raises(ShapeError, match=text):
        ops.aggregate_backward(A, X, grad, self_weight=np.ones(60, F32))
