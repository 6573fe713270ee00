"""Sums of messages with features of their entries, both gradients, and combinations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import (
    DTYPES,
    FORMATS,
    INDEX_DTYPES,
    KINDS,
    ROW_LENGTHS,
    WIDTHS,
    far_apart,
    features,
    in_data_order,
    intact,
    long_rows,
    matrix,
    moved,
    name_of,
    poison_results,
    poisoned,
    put,
    rows_of,
)

from sparsefmt import ops
from sparsefmt.errors import DtypeError, FormatError, ShapeError, UnsupportedError
from sparsefmt.formats.oracle import float64
from sparsefmt.ops import edge_combine, explain, message_aggregate, message_aggregate_backward
from sparsefmt.ops.messages import api
from sparsefmt.ops.messages.oracle import (
    combine_oracle,
    message_bound,
    message_gradients_oracle,
    message_oracle,
)
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


def check(xp, A, width, dtype, *, transform=put, keep=False, messages=MESSAGES):
    """Every message and combination of a matrix against the oracle."""
    B = in_data_order(A)
    X, E = features(B.n_cols, width, dtype), features(B.nnz, width, dtype, seed=2)
    grad = features(B.n_rows, width, dtype, seed=3)
    S = put(xp, A)
    x, w, g = (transform(xp, one) for one in (X, E, grad))
    kept = {"transposed": ops.transpose(S)} if keep else {}
    for message in messages:
        for reduce in REDUCTIONS:
            how = {"message": message, "reduce": reduce}
            y = message_aggregate(S, x, w, **how)
            assert y.dtype == dtype
            assert_near(y, message_oracle(B, X, E, **how), message_bound(B, X, E, **how))
            dX, dE = message_aggregate_backward(S, x, w, g, **how, **kept)
            check_gradients(B, X, E, grad, how, dX, dE)
    for op in COMBINATIONS:
        exact = combine_oracle(B, grad, X, op)
        size = combine_oracle(B, abs(grad), abs(X), "add" if op == "sub" else op)
        assert_near(edge_combine(S, g, x, op), exact, 2 * spacing(dtype) * size + 1e-7)


def check_gradients(B, X, E, grad, how, dX, dE):
    exact = message_gradients_oracle(B, X, E, grad, **how)
    sizes = message_gradients_oracle(B, abs(X), abs(E), abs(grad), **how)
    eps = spacing(grad.dtype)
    longest = int(B.tocsc().lengths.max(initial=0))
    tiny = 1e-7 * (eps > 1e-4)
    terms = 2 + longest * (1 if eps < 1e-4 else 2.0**-13)
    if how["message"] == "copy_edge":
        assert dX is None
    else:
        assert_near(dX, exact[0], 4 * terms * eps * sizes[0] + longest * tiny)
    assert_near(dE, exact[1], 4 * eps * sizes[1] + tiny)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
def test_every_dtype_and_width(xp, dtype, index_dtype):
    A = matrix("power law", None, index_dtype)
    for width in WIDTHS:
        check(xp, A.tocsr(), width, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_graph(xp, kind):
    for weighted, width in ((F32, 20), (None, 6), (None, 65)):
        check(xp, matrix(kind, weighted, np.int32), width, F32)


@pytest.mark.parametrize("lengths", ROW_LENGTHS)
def test_every_length_of_rows(xp, lengths):
    A = rows_of(ROW_LENGTHS[lengths], 30, None, np.int32)
    check(xp, A, 33, F32)
    check(xp, A.T.tocsr(), 32, F32, messages=("relu_add",))


@pytest.mark.parametrize("format", FORMATS)
def test_features_of_every_format_are_in_its_own_order(xp, format):
    A = matrix("power law", F32, np.int32).asformat(format)
    check(xp, A, 12, F32)
    check(xp, A, 5, F32, keep=True)


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


def test_rows_may_lie_apart_and_anywhere(xp):
    A = matrix("power law", None, np.int32).tocsr()
    for width, gap, shift in ((64, 4, 0), (64, 3, 0), (64, 4, 1), (62, 2, 2), (7, 1, 0)):
        check(
            xp,
            A,
            width,
            F32,
            transform=lambda xp, X, gap=gap, shift=shift: far_apart(xp, X, gap=gap, shift=shift),
        )
    X, E = features(45, 16, F32), features(A.nnz, 16, F32, seed=2)
    found = message_aggregate(moved(xp, A), xp.asarray(X), xp.asarray(E))
    assert_near(found, message_oracle(A, X, E), message_bound(A, X, E))


@pytest.mark.parametrize("width", [7, 64, 200])
def test_everything_is_written_and_nothing_beside_it(xp, width, monkeypatch):
    """Outputs begin as NaN between guard bands."""
    buffers = poison_results(xp, monkeypatch, api)
    for kind in ("isolated rows", "power law", "empty"):
        check(xp, matrix(kind, None, np.int32), width, F32)
    assert len(buffers) == 3 * (2 * (4 + 4 + 3) + 3)
    assert all(intact(xp, buffer) for buffer in buffers)


def test_out_takes_the_result(xp):
    A = put(xp, matrix("power law", None, np.int32))
    X, E = put(xp, features(45, 9, F32)), put(xp, features(600, 9, F32, seed=2))
    L = put(xp, features(60, 9, F32, seed=3))
    out, buffer = poisoned(xp, (60, 9), F32)
    assert message_aggregate(A, X, E, out=out) is out
    assert bool((out == message_aggregate(A, X, E)).all())
    assert intact(xp, buffer)
    out, buffer = poisoned(xp, (600, 9), F32)
    assert edge_combine(A, L, X, "sub", out=out) is out
    assert bool((out == edge_combine(A, L, X, "sub")).all())
    with pytest.raises(FormatError, match="out overlaps an input"):
        message_aggregate(A, X, E, out=E[:60])


def test_no_implicit_zero_touches_infinity(xp):
    """Nor do entries of other rows, nor places behind the last entry of a piece."""
    A = matrix("isolated rows", None, np.int32)
    X, E = features(30, 4, F32), features(50, 4, F32, seed=2)
    row = int(A.row[0])
    E[A.row == row] = np.inf
    found = np.asarray(
        float64(message_aggregate(put(xp, A), put(xp, X), put(xp, E), message="add"))
    )
    assert np.isinf(found[row]).all()
    assert np.isfinite(np.delete(found, row, axis=0)).all()


A0 = matrix("power law", F32, np.int32).tocsr()
X0, E0, G0 = features(45, 4, F32), features(600, 4, F32), features(60, 4, F32)
BAD = {
    "dense": ((None, X0, E0), {}, DtypeError, "A is a NoneType"),
    "rows of X": ((A0, G0, E0), {}, ShapeError, "X has 60 rows but A has 45 columns"),
    "no X": ((A0, None, E0), {}, DtypeError, "X"),
    "rows of E": ((A0, X0, G0), {}, ShapeError, r"E has shape \(60, 4\) but A stores 600 entries"),
    "vector": ((A0, X0, E0[:, 0]), {}, ShapeError, r"give \(600, feat\), E\[:, None\] for"),
    "width": ((A0, X0, E0[:, :3]), {}, ShapeError, r"X has shape \(45, 4\) but E has \(600, 3\)"),
    "dtype": ((A0, X0, E0.astype(F64)), {}, DtypeError, "X is float32 but E is float64"),
    "integers": ((A0, X0, E0.astype(int)), {}, DtypeError, "E.dtype is int64"),
    "message": (
        (A0, X0, E0),
        {"message": "sub"},
        UnsupportedError,
        'message is .sub.: use "mul", "add"',
    ),
    "max": ((A0, X0, E0), {"reduce": "max"}, UnsupportedError, r'spmm\(\.\.\., reduce="max"\)'),
    "reduce": ((A0, X0, E0), {"reduce": "prod"}, UnsupportedError, "reduce is 'prod': use"),
    "out": ((A0, X0, E0), {"out": X0}, ShapeError, r"out has shape \(45, 4\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    args, options, error, text = BAD[case]
    for call in (message_aggregate, lambda *a, **k: explain("message_aggregate", *a, **k)):
        with pytest.raises(error, match=text):
            call(*args, **options)


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


def test_explain_says_that_they_are_deterministic(xp):
    A, X, E, grad = (put(xp, one) for one in (A0, X0, E0, G0))
    for found in (
        explain("message_aggregate", A, X, E),
        explain("message_aggregate_backward", A, X, E, grad),
        explain("edge_combine", A, grad, X),
    ):
        assert found.chosen.deterministic
