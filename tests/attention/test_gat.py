"""Graph attention and its gradients against lists of entries in float64."""

import itertools
import warnings

import ml_dtypes
import numpy as np
import pytest
from laws.checks import guarded_memory
from op_cases import DTYPES, features, intact, matrix, name_of, put, rows_of

import sparsefmt
from sparsefmt import ops
from sparsefmt.ops.attention import oracle
from sparsefmt.ops.attention.gat import loops as attention_loops
from sparsefmt.testing import assert_close

#: Graphs are small: waking another thread takes longer than they do.
pytestmark = pytest.mark.usefixtures("one_thread")

LOOPS = {"self_loops": True}


def square(kind="power law", index_dtype=np.int32):
    """With stored loops, some twice, and vertices that have none."""
    A = matrix(kind, None, index_dtype).tocoo()
    side, loops = max(A.shape), np.arange(0, max(A.shape), 3)
    row, col = (np.concatenate([a, loops, loops[:2]]).astype(index_dtype) for a in (A.row, A.col))
    return sparsefmt.COO(row, col, shape=(side, side)).tocsr()


def operands(A, heads, feat, dtype, *, spread=3.0, seed=1):
    """H, el, er and the gradient of the result."""
    shapes = (A.n_cols, *heads, feat), (A.n_cols, *heads), (A.n_rows, *heads)
    H, el, er, grad = (
        features(shape[0], shape[1:], np.float64, seed=seed + k)
        for k, shape in enumerate((*shapes, (A.n_rows, *heads, feat)))
    )
    return [a.astype(dtype) for a in (H, spread * el, spread * er, grad)]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("left", "right"), [(1, 0), (-1, 0), (1, -1), (1, 1), (-1, -1)])
def test_gradients_at_large_scores_are_as_exact_as_at_small_ones(xp, dtype, left, right):
    """Where no score is rounded: integers, and a slope of a quarter."""
    A, rng, options = square(), np.random.default_rng(5), {"negative_slope": 0.25, **LOOPS}
    H, el, er, grad = operands(A, (2,), 8, np.float64)
    el, er = (side * 1e4 + rng.integers(-8, 9, a.shape) for side, a in ((left, el), (right, er)))
    wide = np.float64 if dtype == np.float64 else np.float32
    H, el, er, grad = H.astype(dtype), el.astype(wide), er.astype(wide), grad.astype(dtype)
    edges = rng.integers(-8, 9, (A.nnz, 2)).astype(wide)
    given = [put(xp, a) for a in (H, el, er, grad)]
    found = ops.gat_backward(put(xp, A), *given, edge_scores=put(xp, edges), **options)
    expected = oracle.gat_backward_oracle(A, H, el, er, grad, edge_scores=edges, **options)
    P = ops.gat_attention(put(xp, A), *given[1:3], edge_scores=put(xp, edges), **options)
    near = 1e-5 if wide == np.float32 else 1e-13
    exact = oracle.gat_attention_oracle(A, el, er, edge_scores=edges, **options)
    assert_close(P, exact, bound=near)
    # What O and results of 2 bytes are rounded by comes beside; where signs agree der is 0.
    near += 0 if H.itemsize > 2 else 8 * float(ml_dtypes.finfo(dtype).eps)
    scales = [np.abs(want).max() for want in expected]
    for one, want, scale in zip(found, expected, (scales[0], *[scales[3]] * 3), strict=False):
        assert_close(one, want, bound=near * scale)


def test_infinite_slopes_and_nan_are_numbers(xp):
    A = sparsefmt.CSR([0, 2, 3], [0, 1, 0], shape=(2, 2))
    one, zero = put(xp, np.ones((2, 1), np.float32)), put(xp, np.zeros(2, np.float32))
    for slope in (np.inf, -np.inf, np.nan):
        for sign in (1, -1):  # only negative scores meet the slope
            el = put(xp, sign * np.array([1, 2], np.float32))
            found = ops.gat(put(xp, A), one, el, zero, negative_slope=slope)
            expected = np.full((2, 1), 1 if sign > 0 else np.nan)
            assert_close(found, expected, bound=4 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("loops", [False, True])
def test_infinite_scores_and_nan_spread_over_their_row_alone(xp, dtype, loops):
    indices = [0, 1, 2, 0, 2, 1, 3, 2, 4]
    A = sparsefmt.CSR([0, 3, 5, 6, 8, 9, 9], indices, shape=(6, 6))
    el = np.array([0, -np.inf, 1, np.nan, np.inf, 2], dtype)
    H, er = features(6, 4, dtype), np.zeros(6, dtype)
    found = ops.gat(*(put(xp, a) for a in (A, H, el, er)), self_loops=loops)
    got = np.isnan((found.get() if hasattr(found, "get") else found).astype(np.float64)).all(axis=1)
    # Row 2 has -inf alone, 3 a NaN, 4 an infinity.
    assert got.tolist() == [False, False, not loops, True, True, False]
    want = oracle.gat_oracle(A, H, el, er, self_loops=loops)
    assert np.isnan(want).all(axis=1).tolist() == got.tolist()


@pytest.mark.parametrize("options", [{}, {"dropout": 0.3, "seed": 9}], ids=["", "dropout"])
@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, pytest.param(np.float64, marks=pytest.mark.grid)], ids=name_of
)
def test_loops_may_have_scores_of_their_own(monkeypatch, dtype, options):
    """Below ``ops``, whose functions do not take them; no guard is touched."""
    A = square()
    H, el, er, grad = operands(A, (3,), 20, dtype)
    edges, loop_edges = features(A.nnz, (3,), dtype), features(A.n_rows, (3,), dtype)
    inputs = H, el, er, edges, loop_edges
    numbers = options.get("seed", 0), 0.2, options.get("dropout", 0.0), True
    attention_loops.gat_with_statistics(A, *inputs, *numbers)  # compiled
    attention_loops.gat_backward(A, None, None, grad, None, None, None, True, *inputs, *numbers)
    attention_loops.gat_attention(A, el, er, edges, 0.2, True)
    with monkeypatch.context() as patch:
        buffers = guarded_memory(np, patch)
        out, plus, statistics = attention_loops.gat_with_statistics(A, *inputs, *numbers)
        forward = None, None, None
        dH, d_el, d_er, d_loops, d_edges = attention_loops.gat_backward(
            A, None, None, grad, *forward, True, *inputs, *numbers
        )
        P = attention_loops.gat_attention(A, el, er, edges, 0.2, True)
    assert len(buffers) >= 8
    assert all(intact(np, buffer) for buffer in buffers)
    assert out.dtype == plus.dtype == dH.dtype == dtype
    assert statistics.shape == (*er.shape, 4)
    own = {"edge_scores": edges, "loop_edges": loop_edges}
    every = {**own, **options, **LOOPS}
    exact, bound = (f(A, H, el, er, **every) for f in (oracle.gat_oracle, oracle.gat_bound))
    assert_close(out, exact, bound=bound)
    expected = oracle.gat_backward_oracle(A, H, el, er, grad, **every)
    bounds = oracle.gat_backward_bound(A, H, el, er, grad, **every)
    found = dH, d_el, d_er, d_edges, d_loops
    for one, want, limit in zip(found, expected, bounds, strict=True):
        assert_close(one, want, bound=limit)
    stored = {"edge_scores": edges, **LOOPS}
    bound = oracle.gat_attention_bound(A, el, er, **stored)
    assert_close(P, oracle.gat_attention_oracle(A, el, er, **stored), bound=bound)


def test_seeds_differ_and_only_their_low_64_bits_count(xp):
    A = square()
    H, el, er, _ = operands(A, (2,), 8, np.float32)
    args = [put(xp, a) for a in (A, H, el, er)]
    results = [ops.gat(*args, dropout=0.5, seed=seed) for seed in (0, 1, 2**32, 2**63, -1)]
    for a, b in itertools.combinations(results, 2):
        assert bool((a != b).any())
    assert bool((ops.gat(*args, dropout=0.5, seed=2**64 + 1) == results[1]).all())
    assert bool((ops.gat(*args, dropout=0.5, seed=2**64 - 1) == results[4]).all())


def test_the_mask_of_an_entry_and_head_is_its_own(xp):
    """Read off a graph whose rows have one entry: the result is M itself."""
    n, heads = 4000, 8
    A = rows_of([1] * n, 50, None, np.int32)
    zero = [put(xp, np.zeros((rows, heads), np.float32)) for rows in (50, n)]
    one = put(xp, np.ones((50, heads, 1), np.float32))
    for share in (0.1, 0.5, 0.9):
        M = ops.gat(put(xp, A), one, *zero, dropout=share, seed=5)
        expected = oracle.dropout_mask(np.arange(n), heads, dropout=share, seed=5)
        assert_close(M[:, :, 0], expected, bound=expected * 2 * np.finfo(np.float32).eps)
        kept = (expected > 0).mean(axis=0)
        # Six standard deviations of a binomial's share.
        assert (np.abs(kept - (1 - share)) < 6 * np.sqrt(share * (1 - share) / n)).all()


def test_the_oracles_words_are_those_of_the_paper():
    """The first words of known answers (Random123, kat_vectors)."""
    assert oracle.philox(0, 0, 0) == 0x6627E8D5
    # All bits set needs a fourth word that no entry has: the twin in Python integers says the rest.
    numbers = np.array([0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 3])
    for seed in (0, 1, 2**40 + 7, 2**64 - 1):
        words = [_philox(seed, int(n), 5) for n in numbers]
        assert oracle.philox(seed, numbers, 5).tolist() == words


def _philox(seed, counter, stream):
    word = 2**32
    a, b, c, d = counter % word, counter // word, stream, 0
    keys = [seed % word, seed // word]
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q // word ^ b ^ keys[0], q % word, p // word ^ d ^ keys[1], p % word
        keys = [(keys[0] + 0x9E3779B9) % word, (keys[1] + 0xBB67AE85) % word]
    return a


def test_rounding_to_infinity_does_not_warn():
    n = 40
    A = sparsefmt.CSR(np.arange(n + 1), np.zeros(n, int), shape=(n, 1))
    big = [np.full(shape, 6e4, np.float16) for shape in ((1, 4), (n, 4))]
    el, er = np.zeros(1, np.float16), np.zeros(n, np.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dH = ops.gat_backward(A, big[0], el, er, big[1], edge_scores=np.zeros(n, np.float16))[0]
    assert np.isinf(dH).all()
