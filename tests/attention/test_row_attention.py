"""Attention between rows, GATv2's and that of dot products, against lists of entries in float64."""

import warnings

import numpy as np
import pytest
from op_cases import DTYPES, features, host, matrix, name_of, put, rows_of
from test_gat import square

import sparsefmt
from sparsefmt import ops
from sparsefmt.ops.attention import oracle
from sparsefmt.testing import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")

#: GATv2; dot products with values; with keys that are the values.
SCORES = ["additive", "dot", "keys"]
LOOPS = {"self_loops": True}


def operands(A, scores, heads, feat, dtype, *, spread=1.5, seed=1):
    """Queries, keys, values and att as the oracle takes them, and the gradient of the result."""
    rows = (A.n_rows,), (A.n_cols,), (A.n_cols,), (), (A.n_rows,)
    q, k, v, att, grad = (
        np.random.default_rng(seed + n).uniform(-1, 1, (*size, *heads, feat))
        for n, size in enumerate(rows)
    )
    q, k, v, att, grad = (a.astype(dtype) for a in (spread * q, spread * k, v, att, grad))
    additive = scores == "additive"
    return [q, k, v if scores == "dot" else None, att if additive else None], grad


def forward(xp, A, arrays, **options):
    A, (q, k, v, att) = put(xp, A), (put(xp, a) for a in arrays)
    options |= {n: put(xp, v) for n, v in options.items() if n == "edge_scores"}
    if att is None:
        return ops.dot_attention(A, q, k, v, **options)
    return ops.gatv2(A, k, q, att, **options)


def backward(xp, A, arrays, grad, **options):
    """The gradients of queries, keys, values, att and edge scores."""
    A, (q, k, v, att) = put(xp, A), (put(xp, a) for a in arrays)
    options |= {n: put(xp, v) for n, v in options.items() if n == "edge_scores"}
    grad = put(xp, grad)
    if att is None:
        dq, dk, dv, dedges = ops.dot_attention_backward(A, q, k, v, grad, **options)
        return dq, dk, dv, None, dedges
    dk, dq, datt, dedges = ops.gatv2_backward(A, k, q, att, grad, **options)
    return dq, dk, None, datt, dedges


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_infinite_scores_and_nan_spread_over_their_row_alone(xp, dtype, scores):
    A = sparsefmt.CSR([0, 3, 5, 6, 8, 9, 9], np.zeros(9, int), shape=(6, 1))
    arrays, _ = operands(A, scores, (), 4, dtype)
    own = np.array([0, -np.inf, 1, -np.inf, -np.inf, np.inf, np.nan, 2, 3], dtype)
    found = as_float64(forward(xp, A, arrays, edge_scores=own))
    lost = np.isnan(found).all(axis=1)
    assert lost.tolist() == [False, True, True, True, False, False]
    assert np.isfinite(found[~lost]).all()


#: Rows of a lane's, of a warp's and of many blocks' entries, and of none.
#: Long rows are cut where they have over 2 048 entries; on a GPU, blocks of theirs combine, too.
MASKED_LENGTHS = [1, 9, 0, 40, 2_500, 2, 0, 1, 9, 40, 2_500, 3]
MASKED_LENGTHS_GPU = [33_000 if length == 2_500 else length for length in MASKED_LENGTHS]
MASKED_SHAPES = [(np.float32, (2,), 16), (np.float16, (), 7), (np.float64, (), 3)]
MASKED_SHAPES += [(np.float32, (1,), 300)]


def as_float64(value):
    return np.asarray(host(value)).astype(np.float64)


@pytest.mark.parametrize("loops", [{}, LOOPS], ids=["stored", "self_loops"])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(("dtype", "heads", "feat"), MASKED_SHAPES)
def test_rows_may_begin_with_scores_of_minus_infinity(xp, dtype, heads, feat, scores, loops):
    """All but their last; where that is too a row is NaN, and 0 only where it has no entries."""
    lengths = MASKED_LENGTHS if xp is np else MASKED_LENGTHS_GPU
    n = len(lengths)
    A = rows_of(lengths, n if loops else 500, None, np.int32)
    arrays, grad = operands(A, scores, heads, feat, dtype, spread=0.5)
    lost = (np.arange(n) >= 7) & (np.arange(n) < 11)
    of_sums = np.float64 if dtype == np.float64 else np.float32
    own, last = np.full((A.nnz, *heads), -np.inf, of_sums), A.indptr[1:] - 1
    own[last[~lost]] = 0.5
    lost &= not loops
    low = {"edge_scores": np.where(np.isinf(own), of_sums(-1e4), own), **loops}
    found = as_float64(forward(xp, A, arrays, edge_scores=own, **loops))
    assert (np.isnan(found).reshape(n, -1) == lost[:, None]).all()
    expected = oracle.attend_oracle(A, *arrays, **low)
    bound = oracle.attend_bound(A, *arrays, **low)
    assert_close(found[~lost], expected[~lost], bound=bound[~lost])
    dq, dk, _, _, dedges = backward(xp, A, arrays, grad, edge_scores=own, **loops)
    kept, apart = np.repeat(~lost, lengths), np.ones(A.n_cols, bool)
    apart[A.indices[~kept]] = False
    found = (dq, ~lost), (dk, apart), (dedges, kept)
    expected = oracle.attend_backward_oracle(A, *arrays, grad, **low)
    bounds = oracle.attend_backward_bound(A, *arrays, grad, **low)
    for n, (gradient, some) in zip((0, 1, 4), found, strict=True):
        assert_close(as_float64(gradient)[some], expected[n][some], bound=bounds[n][some])
    assert np.isnan(as_float64(dq)[lost]).all() or scores != "additive"


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(("dtype", "heads", "feat"), MASKED_SHAPES)
def test_infinite_features_reach_no_further_than_entries(xp, dtype, heads, feat, scores):
    """Nor does what vertices have that none names, nor come those without entries by anything."""
    lengths = [0, 1, 0, 9, 40, 0, 0, 8, *[0] * 300, 3, 700, *[0] * 9, 16, 0, 5, *[0] * 40]
    A = rows_of(lengths, 60, None, np.int32)
    A = sparsefmt.CSR(A.indptr, (A.indices // 2 * 2).astype(np.int32), shape=A.shape)
    (q, k, v, att), grad = operands(A, scores, heads, feat, dtype)
    row = np.repeat(np.arange(A.n_rows), lengths)
    clean = forward(xp, A, [q, k, v, att]), *backward(xp, A, [q, k, v, att], grad)
    empty = np.asarray(lengths) == 0
    for bad in (np.inf, np.nan, -np.inf):
        with np.errstate(invalid="ignore"):
            q[empty], grad[empty], k[1::2] = bad, bad, bad
            if v is not None:
                v[1::2] = bad
        arrays = [q, k, v, att]
        found = forward(xp, A, arrays), *backward(xp, A, arrays, grad)
        for one, other in zip(found, clean, strict=True):
            assert one is None or bool((one == other).all())
    named, was = A.indices[-1], k.copy()
    k[named] = np.inf
    rows = ~np.isin(np.arange(A.n_rows), row[A.indices == named])
    cols = ~np.isin(np.arange(A.n_cols), A.indices[~rows[row]])
    found = forward(xp, A, [q, k, v, att]), *backward(xp, A, [q, k, v, att], grad)
    for some, one, other in zip((rows, rows, cols, cols), found, clean, strict=False):
        if one is not None:
            assert (as_float64(one)[some] == as_float64(other)[some]).all()
    k[named], grad[row[-1]] = was[named], np.inf
    _, dk, dv, _, _ = backward(xp, A, [q, k, v, att], grad)
    cols = ~np.isin(np.arange(A.n_cols), A.indices[row == row[-1]])
    for one, other in zip((dk, dv), clean[2:4], strict=True):
        if one is not None:
            assert (as_float64(one)[cols] == as_float64(other)[cols]).all()


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("scores", ["dot", "keys"])
@pytest.mark.parametrize(("heads", "feat"), [((2,), 8), ((), 5), ((1,), 300)])
def test_large_scores_that_nothing_rounds_cost_no_accuracy(xp, heads, feat, scores, sign):
    """Small integers beside 100 * 100: backward finds what forward weighed with."""
    for A in (square(), rows_of([5, 2000, 0, 17], 50, None, np.int32)):
        (q, k, v, _), grad = operands(A, scores, heads, feat, np.float32, spread=1)
        q, k = np.round(q), np.round(k)
        q[..., 0], k[..., 0] = 100, 100 * sign
        grad[..., 0] = 0  # sums of hundreds that cancel tell of rounding alone
        own = features(A.nnz, heads, np.float32)
        arrays, options = [q, k, v, None], {"scale": 1.0, "edge_scores": np.round(2 * own)}
        found = forward(xp, A, arrays, **options), *backward(xp, A, arrays, grad, **options)
        expected = oracle.attend_oracle(A, *arrays, **options)
        expected = expected, *oracle.attend_backward_oracle(A, *arrays, grad, **options)
        for n, (one, exact) in enumerate(zip(found, expected, strict=True)):
            if one is not None:
                first = 1 if n in (1, 2) else 0  # of queries and keys
                one, exact = (a[..., first:] for a in (one, exact))
                size = max(1, np.abs(exact).max())  # that of the factors of what cancels
                assert np.abs(as_float64(one) - exact).max() <= 1e-5 * size


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if np.dtype(dtype).itemsize == 2])
def test_rounding_to_infinity_does_not_warn(dtype):
    """Sums of gradients that are too large for two bytes."""
    A = matrix("power law", None, np.int32).tocsr()
    size = np.float32(6e4 if dtype is np.float16 else 3e38)
    for scores in ("dot", "additive"):
        (q, k, v, att), _ = operands(A, scores, (2,), 3, dtype)
        large = (np.sign(q.astype(np.float32)) * size).astype(dtype)
        given = {"dot": (q, k, large[:45], att), "additive": (q, large[:45], v, att)}
        arrays = [*given[scores]]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            edges = features(A.nnz, (2,), np.float64).astype(dtype)
            found = backward(np, A, arrays, large, edge_scores=edges)
            place = 4 if scores == "dot" else 3
        assert not np.isfinite(found[place].astype(np.float32)).all()
