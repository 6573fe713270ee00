"""Sums of messages with features of their entries, both gradients, and combinations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import (
    INDEX_DTYPES,
    features,
    long_rows,
    matrix,
    name_of,
    put,
)

from sparsefmt import ops
from sparsefmt.errors import DtypeError, FormatError, ShapeError, UnsupportedError
from sparsefmt.formats.oracle import float64
from sparsefmt.ops import edge_combine, message_aggregate, message_aggregate_backward
from sparsefmt.testing import coo

F32, F64 = np.float32, np.float64
MESSAGES, REDUCTIONS, COMBINATIONS = (
    ("mul", "add", "relu_add", "copy_edge"),
    ("sum", "mean"),
    ("add", "sub", "mul"),
)


def spacing(dtype):
    return 2.0**-7 if np.dtype(dtype).name == "bfloat16" else float(np.finfo(dtype).eps)


def assert_near(found, exact, bound):
    assert found.shape == exact.shape
    assert (np.abs(float64(found) - exact) <= bound).all()


@given(A=coo(), width=st.integers(0, 9), message=st.sampled_from(MESSAGES))
def test_gradients_are_adjoint_to_the_sum(xp, A, width, message):
    """``<Y, G>`` is ``<X, dX>`` and ``<E, dE>``, of products; of sums what both add up to."""
    X, E = features(A.n_cols, width, F64), features(A.nnz, width, F64, seed=2)
    grad = features(A.n_rows, width, F64, seed=3)
    how = {"message": message}
    S, x, w, g = (put(xp, one) for one in (A.with_data(None), X, E, grad))
    whole = float((message_aggregate(S, x, w, **how) * g).sum())
    dX, dE = message_aggregate_backward(S, x, w, g, **how)
    of_edges = float((w * dE).sum())
    of_vertices = of_edges if dX is None else float((x * dX).sum())
    parts = of_edges if message in ("mul", "copy_edge") else of_edges + of_vertices
    assert parts == pytest.approx(whole, rel=1e-9, abs=1e-9)
    if message == "mul":
        assert of_vertices == pytest.approx(whole, rel=1e-9, abs=1e-9)


@pytest.mark.covering("dtype", "index_dtype", one_in=2)
@pytest.mark.parametrize("dtype", [np.float16, F32, F64], ids=name_of)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
def test_hubs_are_cut_and_put_together(xp, dtype, index_dtype):
    for A in (long_rows(None, index_dtype), long_rows(None, index_dtype).T.tocsr()):
        X = features(A.n_cols, 40, dtype)
        E, grad = features(A.nnz, 40, dtype, seed=2), features(A.n_rows, 40, dtype, seed=3)
        row, col = np.repeat(np.arange(A.n_rows), A.lengths), A.indices
        wide = [one.astype(F64) for one in (X, E, grad)]
        for width in (7, 33, 40):
            x, w, g = (put(xp, np.ascontiguousarray(one[:, :width])) for one in (X, E, grad))
            xs, ws, gs = (one[:, :width] for one in wide)
            eps = spacing(dtype)
            for reduce in REDUCTIONS:
                how = {"message": "mul", "reduce": reduce}
                share = np.maximum(A.lengths, 1)[:, None] if reduce == "mean" else 1
                y, size = np.zeros(gs.shape), np.zeros(gs.shape)
                np.add.at(y, row, xs[col] * ws)
                np.add.at(size, row, np.abs(xs[col] * ws))
                terms = A.lengths[:, None] * (1 if eps < 1e-4 else 2.0**-13) + 2
                found = message_aggregate(put(xp, A), x, w, **how)
                assert_near(found, y / share, 2 * terms * eps * size / share + 1e-6)
                dX, dE = message_aggregate_backward(put(xp, A), x, w, g, **how)
                given_ = (gs / share)[row]
                exact, size = np.zeros(xs.shape), np.zeros(xs.shape)
                np.add.at(exact, col, given_ * ws)
                np.add.at(size, col, np.abs(given_ * ws))
                bound = 4 * (2 + 1e4 * min(eps, 1e-7) / eps) * eps * size + 1e-5
                assert_near(dX, exact, bound)
                assert_near(dE, given_ * xs[col], 4 * eps * np.abs(given_ * xs[col]) + 1e-7)


A0 = matrix("power law", F32, np.int32).tocsr()
X0, E0, G0 = features(45, 4, F32), features(600, 4, F32), features(60, 4, F32)


def test_bad_gradients_and_combinations_are_refused():
    with pytest.raises(ShapeError, match="grad has 45 rows but A has 60 rows"):
        message_aggregate_backward(A0, X0, E0, X0)
    with pytest.raises(DtypeError, match="X is float32 but grad is float64"):
        message_aggregate_backward(A0, X0, E0, G0.astype(F64))
    other = matrix("dense block", F32, np.int32)
    with pytest.raises(FormatError, match="transposed was made of another matrix"):
        message_aggregate_backward(A0, X0, E0, G0, transposed=ops.transpose(other))
    with pytest.raises(UnsupportedError, match="call sddmm"):
        edge_combine(A0, G0, X0, "dot")
    with pytest.raises(UnsupportedError, match=r'op is .div.: use "add", "sub"'):
        edge_combine(A0, G0, X0, "div")
    with pytest.raises(ShapeError, match=r"right has shape \(45, 3\) but left has \(60, 4\)"):
        edge_combine(A0, G0, X0[:, :3])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: message_aggregate(A0, None, E0), DtypeError, "X"),
        (
            lambda: message_aggregate(A0, X0, E0, reduce="max"),
            UnsupportedError,
            r'spmm\(\.\.\., reduce="max"\)',
        ),
        (
            lambda: message_aggregate_backward(
                A0, X0, E0, G0, transposed=ops.transpose(matrix("dense block", F32, np.int32))
            ),
            FormatError,
            "transposed was made of another matrix",
        ),
        (lambda: edge_combine(A0, G0, X0, "dot"), UnsupportedError, "call sddmm"),
    ],
)
def test_what_another_function_does_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
