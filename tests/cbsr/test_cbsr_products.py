"""Products with row-balanced features, and their gradients, against loops in float64."""

from functools import cache

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
    far_apart,
    features,
    in_data_order,
    intact,
    long_rows,
    matrix,
    moved,
    name_of,
    poisoned,
    put,
    quick_oracle,
    rows_of,
)

import sparsefmt
from sparsefmt import DtypeError, FormatError, ShapeError, UnsupportedError, ops
from sparsefmt.ops.cbsr import cuda_sspmm as cbsr_cuda_sspmm
from sparsefmt.ops.cbsr.oracle import (
    sddmm_cbsr_bound,
    sddmm_cbsr_oracle,
    spgemm_bound,
    spgemm_oracle,
    sspmm_bound,
    sspmm_oracle,
)
from sparsefmt.ops.cbsr.windows import WindowSizes
from sparsefmt.reorder import Order, degree_order
from sparsefmt.testing import assert_close, csr, dot, error_bound, spmm_oracle, value_dtypes
from sparsefmt.testing import features as drawn_features

F32, F64 = np.float32, np.float64
#: Columns of one, two and four bytes; k of a row, of half a row, alone, beside and above a warp.
SIZES = [(1, 1), (7, 3), (16, 16), (33, 1), (64, 8), (256, 32), (257, 40), (300, 300), (70_000, 5)]
REDUCTIONS = ["sum", "mean"]


@cache
def balanced(rows, feat, k, dtype):
    return ops.maxk(features(rows, feat, dtype, seed=7), k)


def on(xp, options):
    return {name: v if isinstance(v, str) else put(xp, v) for name, v in options.items()}


def check_forward(xp, A, S, **options):
    """Into poisoned memory: every element right, no guard touched."""
    out, buffer = poisoned(xp, (A.n_rows, S.n_cols), S.dtype)
    assert ops.spgemm(put(xp, A), put(xp, S), out=out, **on(xp, options)) is out
    assert_close(out, spgemm_oracle(A, S, **options), bound=spgemm_bound(A, S, **options))
    assert intact(xp, buffer)


def check_backward(xp, A, S, place=put, **options):
    """The gradients in the values of ``S`` and in the edge values."""
    dY = features(A.n_rows, S.n_cols, S.dtype, seed=8)
    B, R, G = put(xp, A), put(xp, S), place(xp, dY)
    expected, bound = (f(A, dY, S, **options) for f in (sspmm_oracle, sspmm_bound))
    for deterministic in (False, True):
        dS = ops.sspmm(B, G, R, deterministic=deterministic, **on(xp, options))
        assert dS.indices is R.indices
        assert_close(dS.data, expected, bound=bound)
    out, buffer = poisoned(xp, A.nnz, S.dtype)
    assert ops.sddmm(B, G, R, out=out) is out
    A = in_data_order(A)
    assert_close(out, sddmm_cbsr_oracle(A, dY, S), bound=sddmm_cbsr_bound(A, dY, S))
    assert intact(xp, buffer)


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
    check_forward(xp, A, S)
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


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_kind_of_graph_and_format(xp, format, kind, index_dtype):
    A = matrix(kind, F32 if len(kind) % 2 else None, index_dtype).asformat(format)
    S = balanced(A.n_cols, 19, 6, F32)
    for reduce in REDUCTIONS:
        check_forward(xp, A, S, reduce=reduce)
        check_backward(xp, A, S, reduce=reduce)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_factors_of_rows_and_columns(xp, reduce, dtype, weighted):
    A = matrix("power law", dtype if weighted else None, np.int32).tocsr()
    S = balanced(A.n_cols, 40, 11, dtype)
    r, c = features(A.n_rows, (), dtype, seed=2), features(A.n_cols, (), dtype, seed=3)
    for scales in ({"row_scale": r}, {"col_scale": c}, {"row_scale": r, "col_scale": c}):
        check_forward(xp, A, S, reduce=reduce, **scales)
        check_backward(xp, A, S, reduce=reduce, **scales)


@pytest.mark.covering("reduce", "dtype", "feat", one_in=4)
@pytest.mark.parametrize(("feat", "k"), [(40, 9), (130, 33), (300, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_rows_that_many_blocks_share(xp, reduce, dtype, feat, k):
    """Those of the matrix forward, those of its transpose backward."""
    for index_dtype in INDEX_DTYPES:
        A = long_rows(dtype, index_dtype)
        S = balanced(A.n_cols, feat, k, dtype)
        expected, bound = quick_oracle(A, S.toarray(), reduce)
        Y = ops.spgemm(put(xp, A), put(xp, S), reduce=reduce)
        assert_close(Y, expected, bound=bound)
        check_gradients_quickly(xp, A.T.tocsr(), balanced(A.n_rows, feat, k, dtype))


@pytest.mark.parametrize(("feat", "k"), [(2, 1), (10, 7), (66, 16)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_end_anywhere_in_a_window(xp, dtype, feat, k):
    for n, lengths in enumerate(ROW_LENGTHS.values()):
        A = rows_of(lengths, 37, dtype if n % 3 else None, INDEX_DTYPES[n % 2], seed=n)
        S = balanced(37, feat, k, dtype)
        expected, bound = quick_oracle(A, S.toarray())
        for B in (put(xp, A), moved(xp, A)):
            assert_close(ops.spgemm(B, put(xp, S)), expected, bound=bound)


@pytest.mark.parametrize(("feat", "k"), [(6, 6), (33, 5), (64, 32)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_may_lie_apart_and_begin_anywhere(xp, dtype, feat, k):
    A = matrix("power law", dtype, np.int64).tocsr()
    S = balanced(A.n_cols, feat, k, dtype)
    for gap, shift in ((1, 0), (8, 8), (5, 3)):
        place = lambda xp, X: far_apart(xp, X, gap=gap, shift=shift)  # noqa: B023, E731
        check_backward(xp, A, S, place=place)
    check_backward(xp, A, S, place=lambda xp, X: put(xp, X[::-1].copy())[::-1])

    def late(a):
        buffer = xp.empty(a.size + 1, a.dtype)
        buffer[1:] = put(xp, a.ravel())
        return buffer[1:].reshape(a.shape)

    R = sparsefmt.CBSR(late(S.indices), late(S.data), shape=S.shape)
    Y = ops.spgemm(put(xp, A), R)
    assert_close(Y, spgemm_oracle(A, S), bound=spgemm_bound(A, S))


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a_transpose_may_be_given(xp, reduce):
    A = put(xp, matrix("power law", F32, np.int32).tocsr())
    S, dY = put(xp, balanced(45, 20, 4, F32)), put(xp, features(60, 20, F32))
    options = {"reduce": reduce, "deterministic": True}
    given = ops.sspmm(A, dY, S, transposed=ops.transpose(A), **options)
    assert given == ops.sspmm(A, dY, S, **options)


def test_only_the_places_of_the_features_are_read(xp):
    A, S = put(xp, matrix("power law", F32, np.int32)), put(xp, balanced(45, 20, 4, F32))
    dY = put(xp, features(60, 20, F32))
    bad = S.with_data(xp.full(S.data.shape, np.nan, F64))  # not even of the same dtype
    first, second = (ops.sspmm(A, dY, one, deterministic=True) for one in (bad, S))
    assert first == second


# Values that spread where they should not


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_stored_never_touches_a_bad_value(xp, bad, dtype):
    A = matrix("power law", dtype, np.int32).tocsr()
    A.data[::50] = bad
    S = balanced(A.n_cols, 40, 3, dtype)
    check_forward(xp, A, S)
    check_backward(xp, A, S)
    S = S.with_data(np.where(np.arange(45)[:, None] == 7, bad, S.data.astype(F64)).astype(dtype))
    check_forward(xp, matrix("power law", dtype, np.int32), S)
    dY = features(A.n_rows, 40, dtype)
    dY[:, 5] = bad
    expected, bound = sddmm_cbsr_oracle(A, dY, S), sddmm_cbsr_bound(A, dY, S)
    assert_close(ops.sddmm(put(xp, A), put(xp, dY), put(xp, S)), expected, bound=bound)


def test_an_empty_row_or_column_is_zero_whatever_its_factor(xp):
    A = sparsefmt.CSR([0, 0, 1], [1], shape=(2, 2))
    S = put(xp, sparsefmt.CBSR(np.array([[0], [1]], np.uint8), np.ones((2, 1)), shape=(2, 2)))
    bad = put(xp, np.array([np.inf, 1]))
    Y = ops.spgemm(put(xp, A), S, row_scale=bad)
    assert Y.tolist() == [[0, 0], [0, 1]]
    dS = ops.sspmm(put(xp, A), xp.ones((2, 2)), S, col_scale=bad, row_scale=bad)
    assert dS.data.tolist() == [[0], [1]]


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=name_of)
def test_half_precision_sums_in_float32(xp, dtype):
    """4096 ones: adding in float16 or bfloat16 stops at 2048 or 256."""
    A = put(xp, sparsefmt.CSR([0, 4096], np.zeros(4096, int), shape=(1, 1)))
    S = ops.maxk(xp.ones((1, 5), dtype), 1)
    assert float(ops.spgemm(A, S)[0, 0]) == 4096
    assert float(ops.sspmm(A, xp.ones((1, 5), dtype), S).data[0, 0]) == 4096
    wide = xp.ones((1, 4096), dtype)
    assert float(ops.sddmm(A, wide, ops.maxk(wide, 4096))[17]) == 4096


# Laws


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


@pytest.mark.parametrize("reduce", REDUCTIONS)
@given(data=st.data())
def test_gradients_are_adjoint_to_the_product(xp, reduce, data):
    """``<Y, dY>`` is linear in the values of ``S``, and in those of ``A``."""
    A = data.draw(csr(dtype=F64, weighted=True), label="A")
    X = data.draw(drawn_features(A.n_cols, width=st.integers(1, 9), dtype=F64), label="X")
    S = ops.maxk(X, data.draw(st.integers(1, X.shape[1]), label="k"))
    dY = features(A.n_rows, X.shape[1], F64)
    B, G, R = (put(xp, one) for one in (A, dY, S))
    left = dot(ops.spgemm(B, R, reduce=reduce), dY)
    dS = ops.sspmm(B, G, R, reduce=reduce)
    size = dot(spgemm_oracle(A.with_data(np.abs(A.data)), S.with_data(np.abs(S.data))), np.abs(dY))
    bound = 8 * (A.nnz + 2) * np.finfo(F64).eps * size
    assert_close(dot(dS.data, S.data), left, bound=bound)
    if reduce == "sum":
        assert_close(dot(ops.sddmm(B, G, R), A.data), left, bound=bound + 16 * A.nnz * S.k * 2e-16)


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


@pytest.mark.gpu
def test_the_outer_product_can_be_captured():
    cupy = pytest.importorskip("cupy")
    A, S = matrix("power law", F32, np.int32).tocsr(), balanced(45, 40, 8, F32)
    B, R, dY = A.to("cuda"), S.to("cuda"), cupy.empty((A.n_rows, 40), F32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        ops.sspmm(B, dY, R)  # the first use cuts the matrix into windows, with a sync
        stream.synchronize()
        stream.begin_capture()
        dS = ops.sspmm(B, dY, R).data
        graph = stream.end_capture()
        for seed in range(10):
            G = features(A.n_rows, 40, F32, seed=seed)
            dY.set(G)
            graph.launch()
            stream.synchronize()
            assert_close(dS, sspmm_oracle(A, G, S), bound=sspmm_bound(A, G, S))


# What is refused

A = matrix("power law", F32, np.int32).tocsr()  # 60 x 45, 600 entries
S = balanced(45, 8, 3, F32)
G, R, C = features(60, 8, F32), features(60, (), F32), features(45, (), F32)
SHORT = {"order": Order(np.arange(45))}

#: operation, arguments, options, error, text
CASES = {
    "dense A": ("spgemm", (np.eye(3), S), {}, DtypeError, "A is a ndarray: give a sparsefmt"),
    "dense S": ("spgemm", (A, G), {}, DtypeError, r"S is a ndarray: give a CBSR, maxk\(X, k\)"),
    "CSR S": ("sspmm", (A, G, A), {}, DtypeError, "S is a CSR: give a CBSR"),
    "rows": ("spgemm", (A, S[:9]), {}, ShapeError, "S has 9 rows but A has 45 columns: S needs"),
    "rows back": ("sspmm", (A, G, S[:9]), {}, ShapeError, "S has 9 rows but A has 45 columns"),
    "pair": ("spgemm", (A, S.astype(F64)), {}, DtypeError, "S is float64 but A is float32: cast"),
    "pair back": ("sspmm", (A, G.astype(F64), S), {}, DtypeError, "dY is float64 but A is float32"),
    "pair sddmm": ("sddmm", (A, G.astype(F64), S), {}, DtypeError, "Y is float32 but X is float64"),
    "reduce": (
        "spgemm",
        (A, S),
        {"reduce": "max"},
        UnsupportedError,
        '.max.: use "sum" or "mean"',
    ),
    "reduce back": ("sspmm", (A, G, S), {"reduce": None}, UnsupportedError, "reduce is None"),
    "row factors": ("spgemm", (A, S), {"row_scale": C}, ShapeError, r"row_scale has shape \(45,\)"),
    "factor dtype": (
        "spgemm",
        (A, S),
        {"col_scale": C.astype(F64)},
        DtypeError,
        r"col_scale is float64 but S is float32: cast one, col_scale.astype\(S.dtype\)",
    ),
    "out": ("spgemm", (A, S), {"out": G[:, :3]}, ShapeError, r"the result has \(60, 8\)"),
    "overlap": ("sddmm", (A, G, S), {"out": A.data}, FormatError, "out overlaps an input"),
    "dY rows": ("sspmm", (A, G[:45], S), {}, ShapeError, "dY has 45 rows but A has 60 rows"),
    "width": (
        "sspmm",
        (A, G[:, :5], S),
        {},
        ShapeError,
        r"S has 8 columns but dY has shape \(60, 5",
    ),
    "heads": ("sddmm", (A, G[:, None], S), {}, ShapeError, r"X has shape \(60, 1, 8\)"),
    "width sddmm": ("sddmm", (A, G[:, :5], S), {}, ShapeError, "Y has 8 columns but X has shape"),
    "order": ("sspmm", (A, G, S), {"order": [0]}, DtypeError, "order is a list: give a reorder"),
    "order of others": ("sspmm", (A, G, S), SHORT, ShapeError, "order is of 45 vertices but there"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused(case):
    op, args, options, error, text = CASES[case]
    with pytest.raises(error, match=f"(?s){text}"):
        getattr(ops, op)(*args, **options)
