"""Products with row-balanced features, and their gradients, against loops in float64."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws.cases import NAMED
from laws.checks import check
from op_cases import (
    DTYPES,
    INDEX_DTYPES,
    features,
    intact,
    long_rows,
    matrix,
    name_of,
    poisoned,
    put,
    quick_oracle,
    rounded,
    rows_of,
)

import sparsefmt
from sparsefmt import ShapeError, ops
from sparsefmt.ops.cbsr import cuda_sspmm as cbsr_cuda_sspmm
from sparsefmt.ops.cbsr.oracle import sspmm_bound, sspmm_oracle
from sparsefmt.ops.cbsr.windows import WindowSizes
from sparsefmt.reorder import Order, degree_order
from sparsefmt.testing import assert_close, csr, error_bound, spmm_oracle, value_dtypes
from sparsefmt.testing import features as drawn_features

F32, F64 = np.float32, np.float64
#: Columns of one, two and four bytes; k of a row, of half a row, alone, beside and above a warp.
SIZES = [(1, 1), (7, 3), (16, 16), (33, 1), (64, 8), (256, 32), (257, 40), (300, 300), (70_000, 5)]
REDUCTIONS = ["sum", "mean"]


@cache
def balanced(rows, feat, k, dtype):
    return ops.maxk(features(rows, feat, dtype, seed=7), k)


def check_backward(xp, A, S):
    """The gradients in the values of ``S`` and in the edge values."""
    dY = features(A.n_rows, S.n_cols, S.dtype, seed=8)
    B, R, G = (put(xp, one) for one in (A, S, dY))
    expected, bound = (f(A, dY, S) for f in (sspmm_oracle, sspmm_bound))
    for deterministic in (False, True):
        dS = ops.sspmm(B, G, R, deterministic=deterministic)
        assert dS.indices is R.indices
        assert_close(dS.data, expected, bound=bound)
    check(xp, NAMED["sddmm_cbsr"], A, {"X": dY, "Y": S})


def check_gradients_quickly(xp, A, S):
    """``check_backward``, for graphs too large for the oracles."""
    dY = features(A.n_rows, S.n_cols, S.dtype, seed=8)
    places = S.indices.astype(np.int64)
    expected, bound = (np.take_along_axis(a, places, axis=1) for a in quick_oracle(A.T.tocsr(), dY))
    B, G, R = put(xp, A), put(xp, dY), put(xp, S)
    for deterministic in (False, True):
        dS = ops.sspmm(B, G, R, deterministic=deterministic)
        assert_close(dS.data, expected, bound=bound)
    row, products = np.repeat(np.arange(A.n_rows), A.lengths), S.toarray().astype(F64)[A.indices]
    products *= dY.astype(F64)[row]
    eps = 2.0**-7 if S.dtype.name == "bfloat16" else float(np.finfo(S.dtype).eps)
    bound = 2 * (S.k + 1) * eps * np.abs(products).sum(1) + 1e-7 * (eps > 1e-4)
    assert_close(ops.sddmm(B, G, R), products.sum(1), bound=bound)


@pytest.mark.covering("dtype", "feat", one_in=4)
@pytest.mark.parametrize(("feat", "k"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_width_and_dtype(xp, dtype, feat, k):
    A = matrix("power law", dtype, np.int32).tocsr()
    S = balanced(A.n_cols, feat, k, dtype)
    check(xp, NAMED["spgemm"], A, {"S": S})
    check_backward(xp, A, S)


@pytest.mark.covering("dtype", "k", "feat", one_in=2)
@pytest.mark.parametrize("feat", [256, 200])
@pytest.mark.parametrize("k", [3, 7, 8, 12, 16, 24, 32, 36, 64, 96, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_of_many_entries_and_few(xp, dtype, k, feat):
    """Each has ways of its own for every k."""
    many = np.random.default_rng(k).integers(0, 150, 25)
    for n, lengths in enumerate((np.append(many, 900), np.append(many // 10, 90))):
        A = rows_of(lengths, 40, dtype if (n + k) % 3 else None, INDEX_DTYPES[k % 2], seed=k)
        S = balanced(A.n_cols, feat, k, dtype)
        expected, bound = quick_oracle(A, S.toarray())
        out, buffer = poisoned(xp, (A.n_rows, feat), dtype)
        assert_close(ops.spgemm(put(xp, A), put(xp, S), out=out), expected, bound=bound)
        assert intact(xp, buffer)
        check_gradients_quickly(xp, A.T.tocsr(), balanced(A.n_rows, feat, k, dtype))


def test_only_the_places_of_the_features_are_read(xp):
    A, S = put(xp, matrix("power law", F32, np.int32)), put(xp, balanced(45, 20, 4, F32))
    dY = put(xp, features(60, 20, F32))
    bad = S.with_data(xp.full(S.data.shape, np.nan, F64))  # not even of the same dtype
    first, second = (ops.sspmm(A, dY, one, deterministic=True) for one in (bad, S))
    assert first == second


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=name_of)
def test_half_precision_sums_in_float32(xp, dtype):
    """4096 ones: adding in float16 or bfloat16 stops at 2048 or 256."""
    A = put(xp, sparsefmt.CSR([0, 4096], np.zeros(4096, int), shape=(1, 1)))
    S = ops.maxk(xp.ones((1, 5), dtype), 1)
    assert float(ops.spgemm(A, S)[0, 0]) == 4096
    assert float(ops.sspmm(A, xp.ones((1, 5), dtype), S).data[0, 0]) == 4096
    wide = xp.ones((1, 4096), dtype)
    assert float(ops.sddmm(A, wide, ops.maxk(wide, 4096))[17]) == 4096


@pytest.mark.parametrize("reduce", REDUCTIONS)
@given(data=st.data())
def test_it_is_the_product_with_what_maxk_keeps(xp, reduce, data):
    A = data.draw(csr(dtype=value_dtypes(bfloat16=False)), label="A")
    options = {"width": st.integers(1, 9), "allow_nan": True, "allow_infinity": True}
    X = data.draw(drawn_features(A.n_cols, dtype=A.dtype or F32, **options), label="X")
    k = data.draw(st.integers(1, X.shape[1]), label="k")
    S = ops.maxk(xp.asarray(np.round(X)), k)  # rounded: with ties
    dense = S.to("cpu").toarray()
    expected = spmm_oracle(A, dense, reduce=reduce)
    Y = ops.spgemm(put(xp, A), S, reduce=reduce)
    assert_close(Y, expected, bound=error_bound(A, dense, reduce=reduce))


def test_rows_go_in_any_order(xp):
    """Windows of rows, and pieces of windows: hubs, empty rows, and more rows than one window."""
    A = put(xp, long_rows(F32, np.int32))
    S, dY = put(xp, balanced(500, 70, 20, F32)), put(xp, features(A.n_rows, 70, F32))
    expected = ops.sspmm(A, dY, S, deterministic=True).data
    for order in (degree_order(A, descending=False), Order(xp.arange(A.n_rows)[::-1].copy())):
        for row_scale in (None, xp.ones(A.n_rows, F32)):
            dS = ops.sspmm(A, dY, S, row_scale=row_scale, order=order)
            xp.testing.assert_allclose(dS.data, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    ("feat", "k"), [(40, 8), (40, 16), (40, 7), (256, 64), (256, 100), (300, 8)]
)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 3, 40), (50, 2, 2**15)], ids=str)
def test_windows_of_any_size(monkeypatch, dtype, feat, k, sizes):
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cbsr_cuda_sspmm, "window_sizes", lambda *_, **__: WindowSizes(*sizes))
    for index_dtype in INDEX_DTYPES:
        A = matrix("power law", dtype, index_dtype).tocsr()
        check_backward(cupy, A, balanced(A.n_cols, feat, k, dtype))


def test_an_order_of_other_vertices_is_refused():
    A = matrix("power law", F32, np.int32).tocsr()
    args = A, features(60, 8, F32), balanced(45, 8, 3, F32)
    with pytest.raises(ShapeError, match="order is of 45 vertices but there"):
        ops.sspmm(*args, order=Order(np.arange(45)))


#: By windows, and by panels.
KERNELS = {False: "sspmm_csr_windows_rounded", True: "sspmm_csr_panels_rounded"}


def check_rounded(A, S):
    """Exactly the product of rounded rows, up to float32's own rounding."""
    import cupy

    dY = features(A.n_rows, S.n_cols, F32, seed=8)
    expected, bound = (f(A, rounded(dY), S) for f in (sspmm_oracle, sspmm_bound))
    B, G, R = (put(cupy, one) for one in (A, dY, S))
    for deterministic, name in KERNELS.items():
        options = {"precision": "bf16", "deterministic": deterministic}
        assert ops.explain("sspmm", B, G, R, **options).chosen.name == name
        assert_close(ops.sspmm(B, G, R, **options).data, expected, bound=bound)


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize(("feat", "k"), [*SIZES, (200, 64)])
def test_every_width_is_rounded(feat, k):
    A = matrix("power law", F32, np.int32).tocsr()
    check_rounded(A, balanced(A.n_cols, feat, k, F32))


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize("sizes", [WindowSizes(1, 1, 8), WindowSizes(8, 3, 100)], ids=str)
def test_windows_of_any_size_are_rounded(monkeypatch, sizes):
    monkeypatch.setattr(cbsr_cuda_sspmm, "window_sizes", lambda *_, **__: sizes)
    A = rows_of(np.arange(60), 40, F32, np.int32)
    check_rounded(A, balanced(A.n_cols, 72, 8, F32))


def test_windows_of_rounded_rows_are_taller():
    device = cbsr_cuda_sspmm.Chip(227 * 2**10, 228 * 2**10, 50 * 2**20)
    exact, near = (
        cbsr_cuda_sspmm.window_sizes((200_000,) * 2, 10**8, size, 256, 32, device, ordered=False)
        for size in (4, 2)
    )
    assert (exact.height, near.height) == (128, 256)
    assert exact.parts == near.parts
