"""Attention between rows, GATv2's and that of dot products, against lists of entries in float64."""

import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import (
    DTYPES,
    features,
    in_order,
    intact,
    matrix,
    name_of,
    poisoned,
    put,
    rows_of,
)

import sparsefmt
from sparsefmt import ops
from sparsefmt.ops.attention.oracle import (
    attend_backward_bound,
    attend_backward_oracle,
    attend_bound,
    attend_oracle,
    dropout_mask,
)
from sparsefmt.testing import assert_close, csr, value_dtypes

pytestmark = pytest.mark.usefixtures("one_thread")

#: GATv2; dot products with values; with keys that are the values.
SCORES = ["additive", "dot", "keys"]
#: Heads and features; () for features without an axis for heads.
SHAPES = [((1,), 32), ((4,), 32), ((2,), 7), ((1,), 128), ((3,), 40), ((8,), 1), ((), 5), ((), 16)]
WIDE_SHAPES = [((1,), 300), ((2,), 513)]
EMPTY_SHAPES = [((1,), 0), ((0,), 8), ((), 0)]
#: ``slope`` and ``scale`` are of one kind of scores each.
OPTIONS = [
    {},
    {"edge_scores": True, "slope": 0.5, "scale": -0.3},
    {"dropout": 0.4, "seed": 11},
    {"edge_scores": True, "dropout": 0.25, "seed": -3, "slope": -0.1, "scale": 2},
]
LOOPS = {"self_loops": True}
NAMES = ["queries", "keys", "values", "att", "edge_scores"]


def square(kind="power law", index_dtype=np.int32):
    """With stored loops, some twice, and vertices that have none."""
    A = matrix(kind, None, index_dtype).tocoo()
    side, loops = max(A.shape), np.arange(0, max(A.shape), 3)
    row, col = (np.concatenate([a, loops, loops[:2]]).astype(index_dtype) for a in (A.row, A.col))
    return sparsefmt.COO(row, col, shape=(side, side)).tocsr()


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


def options_of(A, arrays, options, *, seed=7):
    """Those of these arrays' operation; ``edge_scores=True`` replaced by scores."""
    options = dict(options)
    slope, scale = options.pop("slope", None), options.pop("scale", None)
    if slope is not None and arrays[3] is not None:
        options["negative_slope"] = slope
    if scale is not None and arrays[3] is None:
        options["scale"] = scale
    if options.get("edge_scores") is True:
        scores = features(A.nnz, arrays[1].shape[1:-1], np.float64, seed=seed)
        options["edge_scores"] = scores.astype(arrays[1].dtype)
    return options


def there(xp, options):
    return {k: put(xp, v) if k == "edge_scores" else v for k, v in options.items()}


def forward(xp, A, arrays, **options):
    A, (q, k, v, att), options = put(xp, A), (put(xp, a) for a in arrays), there(xp, options)
    if att is None:
        return ops.dot_attention(A, q, k, v, **options)
    return ops.gatv2(A, k, q, att, **options)


def backward(xp, A, arrays, grad, **options):
    """The gradients in the order of ``NAMES``."""
    A, (q, k, v, att), options = put(xp, A), (put(xp, a) for a in arrays), there(xp, options)
    grad = put(xp, grad)
    if att is None:
        dq, dk, dv, dedges = ops.dot_attention_backward(A, q, k, v, grad, **options)
        return dq, dk, dv, None, dedges
    dk, dq, datt, dedges = ops.gatv2_backward(A, k, q, att, grad, **options)
    return dq, dk, None, datt, dedges


def check(xp, A, arrays, grad, **options):
    """Forward into poisoned memory, and the gradients: every element right."""
    (B, perm), keys = A.tocsr_with_perm(), arrays[1]
    out, buffer = poisoned(xp, grad.shape, keys.dtype)
    assert forward(xp, A, arrays, out=out, **options) is out
    *found, dedges = backward(xp, A, arrays, grad, **options)
    found.append(None if dedges is None else dedges[put(xp, perm)])
    options = in_order(options, perm)  # that of the CSR, which numbers what dropout draws
    bound = attend_bound(B, *arrays, **options)
    assert_close(out, attend_oracle(B, *arrays, **options), bound=bound)
    assert intact(xp, buffer)
    check_gradients(found, B, arrays, grad, **options)


def check_gradients(found, A, arrays, grad, **options):
    given = *arrays, options.get("edge_scores")
    assert [None if a is None else a.dtype for a in found] == [
        None if a is None else a.dtype for a in given
    ]
    expected = attend_backward_oracle(A, *arrays, grad, **options)
    bounds = attend_backward_bound(A, *arrays, grad, **options)
    for name, one, want, limit in zip(NAMES, found, expected, bounds, strict=True):
        if one is not None:
            try:
                assert_close(one, want, bound=limit)
            except AssertionError as error:
                raise AssertionError(f"gradient of {name}: {error}") from error


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("heads", "feat"), SHAPES)
def test_every_dtype_and_shape_of_features(xp, heads, feat, dtype, scores):
    A = matrix("power law", None, np.int32).tocsr()
    arrays, grad = operands(A, scores, heads, feat, dtype)
    first = (SHAPES.index((heads, feat)) + DTYPES.index(dtype)) % 2
    for options in OPTIONS[first::2]:
        check(xp, A, arrays, grad, **options_of(A, arrays, options))


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("heads", "feat"), WIDE_SHAPES)
def test_many_features(xp, heads, feat, dtype, scores):
    A = square("banded")
    arrays, grad = operands(A, scores, heads, feat, dtype, spread=0.5)
    check(xp, A, arrays, grad, **options_of(A, arrays, OPTIONS[3]), **LOOPS)


@pytest.mark.parametrize("loops", [{}, LOOPS], ids=["stored", "self_loops"])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("shape", EMPTY_SHAPES)
def test_no_heads_and_no_features(xp, shape, scores, loops):
    A = square()
    arrays, grad = operands(A, scores, *shape, np.float32)
    check(xp, A, arrays, grad, **options_of(A, arrays, OPTIONS[1]), **loops)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shift", [-1e4, 0, 1e4])
def test_scores_far_from_zero_overflow_nothing(xp, dtype, shift, scores):
    A = square()
    arrays, grad = operands(A, scores, (2,), 8, dtype)
    own = features(A.nnz, (2,), np.float64)
    own = (np.sign(own) * 1e4 if shift == 0 else 4 * own + shift).astype(dtype)
    for loops in (False, True):
        check(xp, A, arrays, grad, edge_scores=own, self_loops=loops)


@pytest.mark.parametrize("scores", SCORES)
def test_products_far_from_zero_overflow_nothing(xp, scores):
    A = square()
    arrays, grad = operands(A, scores, (2,), 8, np.float64, spread=100)
    options = {} if scores == "additive" else {"scale": 1.0}
    check(xp, A, arrays, grad, **options)
    arrays, grad = (
        [None if a is None else a.astype(np.float32) for a in b] for b in (arrays, grad)
    )
    check(xp, A, arrays, np.stack(grad), **options)


@pytest.mark.parametrize("slope", [-2, 0, 1, np.float32(3), 1e-30])
def test_every_slope(xp, slope):
    A = square()
    arrays, grad = operands(A, "additive", (2,), 8, np.float32)
    check(xp, A, arrays, grad, negative_slope=slope, dropout=0.5, **LOOPS)


@pytest.mark.parametrize("scale", [-1, 0, np.float32(0.5), 1e-30])
def test_every_scale(xp, scale):
    A = square()
    arrays, grad = operands(A, "dot", (2,), 8, np.float32)
    check(xp, A, arrays, grad, scale=scale, dropout=0.5, **LOOPS)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_infinite_scores_and_nan_spread_over_their_row_alone(xp, dtype, scores):
    A = sparsefmt.CSR([0, 3, 5, 6, 8, 9, 9], np.zeros(9, int), shape=(6, 1))
    arrays, _ = operands(A, scores, (), 4, dtype)
    own = np.array([0, -np.inf, 1, -np.inf, -np.inf, np.inf, np.nan, 2, 3], dtype)
    found = forward(xp, A, arrays, edge_scores=own)
    found = (found.get() if hasattr(found, "get") else found).astype(np.float64)
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
    return np.asarray(value.get() if hasattr(value, "get") else value).astype(np.float64)


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
    expected, bound = attend_oracle(A, *arrays, **low), attend_bound(A, *arrays, **low)
    assert_close(found[~lost], expected[~lost], bound=bound[~lost])
    dq, dk, _, _, dedges = backward(xp, A, arrays, grad, edge_scores=own, **loops)
    kept, apart = np.repeat(~lost, lengths), np.ones(A.n_cols, bool)
    apart[A.indices[~kept]] = False
    found = (dq, ~lost), (dk, apart), (dedges, kept)
    expected = attend_backward_oracle(A, *arrays, grad, **low)
    bounds = attend_backward_bound(A, *arrays, grad, **low)
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
        expected = attend_oracle(A, *arrays, **options)
        expected = expected, *attend_backward_oracle(A, *arrays, grad, **options)
        for n, (one, exact) in enumerate(zip(found, expected, strict=True)):
            if one is not None:
                first = 1 if n in (1, 2) else 0  # of queries and keys
                one, exact = (a[..., first:] for a in (one, exact))
                size = max(1, np.abs(exact).max())  # that of the factors of what cancels
                assert np.abs(as_float64(one) - exact).max() <= 1e-5 * size


def test_one_head_may_have_an_axis_or_none(xp):
    A = matrix("power law", None, np.int32).tocsr()
    (q, k, _, att), grad = operands(A, "additive", (), 8, np.float32)
    own = features(A.nnz, (), np.float32)
    for of_att, of_edges in itertools.product((False, True), repeat=2):
        vector, edges = att[None] if of_att else att, own[:, None] if of_edges else own
        found = backward(xp, A, [q, k, None, vector], grad, edge_scores=edges)
        given = q, k, None, vector, edges
        assert [a is None or a.shape for a in found] == [a is None or a.shape for a in given]
        headed = [q[:, None], k[:, None], None, vector]
        whole = backward(xp, A, headed, grad[:, None], edge_scores=edges)
        pairs = zip(found, whole, strict=True)
        assert all(a is None or bool((a.ravel() == b.ravel()).all()) for a, b in pairs)


# Laws of attention and of the mask


@pytest.mark.parametrize("scores", SCORES)
def test_forward_and_backward_have_one_mask(xp, scores):
    """Read off rows of one entry, whose attention is 1: the result is M times a value of 1."""
    n, heads, share = 2000, 4, 0.3
    A = rows_of([1] * n, 50, None, np.int32)
    (q, k, v, att), _ = operands(A, scores, (heads,), 2, np.float32)
    values = k if v is None else v
    values[...] = 1
    grad = np.ones((n, heads, 2), np.float32)
    options = {"dropout": share, "seed": 5}
    expected = dropout_mask(np.arange(n), heads, dropout=share, seed=5)
    found = forward(xp, A, [q, k, v, att], **options)
    eps = float(np.finfo(np.float32).eps)
    assert_close(found[:, :, 0], expected, bound=4 * eps * expected)
    _, dk, dv, _, _ = backward(xp, A, [q, k, v, att], grad, **options)
    sums = np.zeros((50, heads))
    np.add.at(sums, A.indices, expected)
    count = np.bincount(A.indices, minlength=50)[:, None]
    # With one entry in each row no score has a gradient: what comes back is M, summed.
    bound = (4 + count) * eps * (sums + 40 * count)
    assert_close((dk if dv is None else dv)[:, :, 0], sums, bound=bound)


@pytest.mark.parametrize("share", [0.0, 1e-12, 1 - 1e-12])
def test_a_share_of_almost_all_or_nothing(xp, share):
    A = square()
    arrays, _ = operands(A, "dot", (2,), 8, np.float32)
    found = forward(xp, A, arrays, dropout=share, seed=1)
    plain = forward(xp, A, arrays)
    assert bool((found == (plain if share < 0.5 else 0)).all())


def test_keys_are_the_values_that_are_left_out(xp):
    A = square()
    (q, k, _, _), grad = operands(A, "keys", (2,), 8, np.float64)
    bound = 2 * attend_bound(A, q, k)
    one, two = forward(xp, A, [q, k, None, None]), forward(xp, A, [q, k, k, None])
    assert_close(one, two, bound=bound)
    dk, parts = (backward(xp, A, [q, k, v, None], grad) for v in (None, k))
    bound = 2 * attend_backward_bound(A, q, k, None, None, grad)[1]
    assert_close(dk[1], parts[1] + parts[2], bound=bound)


def test_a_slope_of_one_leaves_the_targets_without_gradient(xp):
    """Scores are sums then of what is the source's and what is the row's, which softmax ignores."""
    A = square()
    arrays, grad = operands(A, "additive", (2,), 8, np.float64)
    dq = backward(xp, A, arrays, grad, negative_slope=1)[0]
    bound = attend_backward_bound(A, *arrays, grad, negative_slope=1)[0]
    assert_close(dq, np.zeros_like(grad), bound=bound)


@pytest.mark.parametrize("scores", SCORES)
def test_gradients_are_what_differences_say(scores):
    """The oracle itself, in float64."""
    A = square("banded")
    arrays, grad = operands(A, scores, (2,), 3, np.float64)
    options = options_of(A, arrays, OPTIONS[3]) | LOOPS
    found = attend_backward_oracle(A, *arrays, grad, **options)
    step, rng = 1e-6, np.random.default_rng(3)
    for n, name in enumerate(NAMES):
        given = [*arrays, options["edge_scores"]]
        if given[n] is None:
            continue
        way = rng.uniform(-1, 1, given[n].shape)
        values = []
        for sign in (1, -1):
            there = [a + sign * step * way if m == n else a for m, a in enumerate(given)]
            every = {**options, "edge_scores": there[4]}
            values.append((attend_oracle(A, *there[:4], **every) * grad).sum())
        slope, size = (values[0] - values[1]) / (2 * step), np.abs(found[n] * way).sum()
        # Rounding of the sums over the step, and the third derivative times its square.
        assert abs(slope - (found[n] * way).sum()) <= 1e-7 * (1 + size), name


# Properties


@given(data=st.data(), scores=st.sampled_from(SCORES), heads=st.sampled_from([(), (1,), (3,)]))
def test_any_graph_against_the_oracle(data, scores, heads):
    loops = data.draw(st.booleans())
    A = data.draw(csr(weighted=False, rectangular=not loops))
    feat, dtype = data.draw(st.sampled_from([1, 5, 16])), data.draw(value_dtypes())
    seed = data.draw(st.integers(0, 2**32 - 1))
    arrays, grad = operands(A, scores, heads, feat, dtype, seed=seed)
    options = {
        "dropout": data.draw(st.sampled_from([0.0, 0.3, 0.99])),
        "seed": seed,
        "slope": data.draw(st.sampled_from([0.2, 0.0, -1.0, 2.0])),
        "scale": data.draw(st.sampled_from([None, 0.0, -1.0, 2.0])),
        "self_loops": loops,
    }
    options |= {"edge_scores": True} if data.draw(st.booleans()) else {}
    check(np, A, arrays, grad, **options_of(A, arrays, options))


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
