"""Products with several heads: a value of each for every entry, features of each or of all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import (
    DTYPES,
    FORMATS,
    INDEX_DTYPES,
    KINDS,
    far_apart,
    features,
    in_data_order,
    intact,
    long_rows,
    matrix,
    name_of,
    poisoned,
    put,
    quick_oracle,
)

from sparsefmt import ops
from sparsefmt.errors import DtypeError, FormatError, ShapeError, UnsupportedError
from sparsefmt.formats.oracle import float64
from sparsefmt.ops import explain, spmm
from sparsefmt.ops.engine import small
from sparsefmt.ops.matmul.oracle import by_heads, error_bound, spmm_oracle
from sparsefmt.testing import coo

F32, F64 = np.float32, np.float64
#: Side by side, not aligned, of few heads and many, none, wider than a sub-warp reads.
SHAPES = [(1, 7), (2, 16), (4, 8), (3, 5), (8, 64), (5, 33), (0, 4), (4, 0), (2, 257)]


@pytest.fixture(params=["loops", "small"])
def way(request, monkeypatch):
    """Run the compiled loops on the CPU, or those that SciPy brings."""
    monkeypatch.setattr(small, "MOST", -1 if request.param == "loops" else 1 << 40)


def check(xp, A, shape, dtype, *, shared=False, transform=put, **scales):
    """Sums and means of a matrix against the oracle."""
    B = in_data_order(A)
    X = features(B.n_cols, shape[1:] if shared else shape, dtype)
    values = features(B.nnz, shape[0], dtype, seed=2)
    x, a = transform(xp, X), put(xp, values)
    for reduce in ("sum", "mean"):
        how = {"reduce": reduce, **scales}
        y = spmm(
            put(xp, A), x, values=a, reduce=reduce, **{k: put(xp, r) for k, r in scales.items()}
        )
        assert y.dtype == dtype
        assert y.shape == (A.n_rows, *shape)
        exact = by_heads(spmm_oracle, B, X, values, **how)
        bound = by_heads(error_bound, B, X, values, **how)
        assert (np.abs(float64(y) - exact) <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
def test_every_dtype_and_number_of_heads(xp, dtype, index_dtype):
    A = matrix("power law", None, index_dtype).tocsr()
    for shape in SHAPES:
        check(xp, A, shape, dtype)
    check(xp, A, (4, 12), dtype, shared=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_graph(xp, way, kind):
    A = matrix(kind, F32, np.int32)
    r, c = features(A.n_rows, (), F32, seed=3), features(A.n_cols, (), F32, seed=4)
    check(xp, A, (3, 20), F32)
    check(xp, A, (3, 20), F32, shared=True)
    check(xp, A, (4, 8), F32, row_scale=r, col_scale=c)


@pytest.mark.parametrize("format", [*FORMATS, "cbsr"])
def test_values_are_in_the_order_of_every_format(xp, format):
    A = matrix("power law", F32, np.int32)
    if format != "cbsr":
        check(xp, A.asformat(format), (3, 6), F32)
        return
    S = ops.maxk(features(30, 9, F32), 3)
    values, X = features(90, 2, F32), features(9, (2, 5), F32)
    found = spmm(put(xp, S), put(xp, X), values=put(xp, values))
    exact = by_heads(spmm_oracle, S.tocsr(), X, values)
    assert np.allclose(float64(found), exact, atol=1e-5)
    one = spmm(put(xp, S), put(xp, X[:, 0].copy()), values=put(xp, values[:, 0].copy()))
    assert np.allclose(float64(one), exact[:, 0], atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_hubs_are_cut_and_put_together(xp, way, shared):
    A = long_rows(None, np.int32)
    for shape in ((3, 20), (2, 33)):
        X = features(A.n_cols, shape[1:] if shared else shape, F32)
        values = features(A.nnz, shape[0], F32, seed=2)
        for reduce in ("sum", "mean"):
            found = spmm(put(xp, A), put(xp, X), values=put(xp, values), reduce=reduce)
            for h in range(shape[0]):
                own = X if shared else X[:, h]
                exact, bound = quick_oracle(A.with_data(values[:, h]), own, reduce)
                assert (np.abs(float64(found[:, h]) - exact) <= bound).all()


@given(A=coo(), shape=st.tuples(st.integers(1, 4), st.integers(0, 9)))
def test_a_product_is_adjoint_to_that_of_the_transpose_and_to_dots(xp, A, shape):
    """``<A X, G>`` is ``<X, A' G>``, and ``<values, dots of G and X>``."""
    X, grad = features(A.n_cols, shape, F64), features(A.n_rows, shape, F64, seed=2)
    values = features(A.nnz, shape[0], F64, seed=3)
    S, x, g, a = (put(xp, one) for one in (A.with_data(None), X, grad, values))
    whole = float((spmm(S, x, values=a) * g).sum())
    assert float((spmm(S.T, g, values=a) * x).sum()) == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert float((ops.sddmm(S, g, x) * a).sum()) == pytest.approx(whole, rel=1e-9, abs=1e-9)


def test_rows_may_lie_apart_and_anywhere(xp):
    A = matrix("power law", None, np.int32).tocsr()
    for shape, gap, shift in (((4, 16), 4, 0), ((4, 16), 3, 0), ((2, 32), 4, 1), ((3, 2), 2, 2)):
        check(
            *(xp, A, shape, F32),
            transform=lambda xp, X, gap=gap, shift=shift: far_apart(xp, X, gap=gap, shift=shift),
        )


@pytest.mark.parametrize("kind", ["isolated rows", "power law", "empty"])
def test_everything_is_written_and_nothing_beside_it(xp, way, kind):
    A = matrix(kind, None, np.int32)
    for shape in ((3, 7), (2, 64)):
        X, values = features(A.n_cols, shape, F32), features(A.nnz, shape[0], F32, seed=2)
        out, buffer = poisoned(xp, (A.n_rows, *shape), F32)
        given_ = put(xp, A), put(xp, X)
        assert spmm(*given_, values=put(xp, values), out=out) is out
        assert bool((out == spmm(*given_, values=put(xp, values))).all())
        assert intact(xp, buffer)


def test_heads_that_share_their_values_are_one_product(xp):
    """Maxima, tiles and all else of a product are theirs too."""
    for format in FORMATS:
        A = matrix("power law", F32, np.int32).asformat(format)
        X = features(45, (3, 5), F32)
        for reduce in ("sum", "mean", "max", "min"):
            out, buffer = poisoned(xp, (60, 3, 5), F32)
            how = {"reduce": reduce, "out": out}
            found = spmm(put(xp, A), put(xp, X), **how)
            flat = spmm(put(xp, A), put(xp, X.reshape(45, 15)), reduce=reduce)
            assert found is out
            assert bool((out.reshape(60, 15) == flat).all()) or format == "coo"
            assert intact(xp, buffer)


def test_one_value_each_takes_the_place_of_the_matrix_own(xp):
    for format in FORMATS:
        A = matrix("power law", F32, np.int32).asformat(format)
        X, values = features(45, 6, F32), features(600, (), F32, seed=2)
        found = spmm(put(xp, A), put(xp, X), values=put(xp, values))
        exact = spmm_oracle(in_data_order(A).with_data(values), X)
        assert np.allclose(float64(found), exact, atol=1e-5)


def test_no_implicit_zero_touches_infinity(xp, way):
    A = matrix("isolated rows", None, np.int32).tocsr()
    X, values = features(30, (2, 4), F32), features(50, 2, F32, seed=2)
    X[int(A.indices[0])] = np.inf
    found = float64(spmm(put(xp, A), put(xp, X), values=put(xp, values)))
    touched = np.unique(np.repeat(np.arange(90), A.lengths)[A.indices == A.indices[0]])
    assert np.isfinite(np.delete(found, touched, axis=0)).all()
    assert not np.isfinite(found[touched]).any()


A0 = matrix("power law", F32, np.int32).tocsr()
X0, V0 = features(45, (3, 4), F32), features(600, 3, F32)
BAD = {
    "heads": ({"X": X0[:, :2]}, ShapeError, "values has 3 heads but X has 2: give both the same"),
    "entries": ({"values": V0[:9]}, ShapeError, r"values has shape \(9, 3\) but A stores 600"),
    "axes": ({"values": V0[..., None]}, ShapeError, r"give \(600,\) or \(600, heads\)"),
    "4-D": ({"X": X0[None]}, ShapeError, r"give \(rows, feat\) or \(rows, heads, feat\)"),
    "dtype": ({"values": V0.astype(F64)}, DtypeError, "values is float64 but X is float32"),
    "max": ({"reduce": "max"}, UnsupportedError, "for one head at a time"),
    "out": ({"out": X0}, ShapeError, r"out has shape \(45, 3, 4\): the result has \(60, 3, 4\)"),
    "overlap": ({"out": np.zeros((60, 3, 4), F32)[::-1]}, FormatError, "out is not C-contiguous"),
    "scale": ({"row_scale": np.ones(3, F32)}, ShapeError, r"row_scale has shape \(3,\)"),
    "precision": ({"precision": "fp8"}, UnsupportedError, "precision is 'fp8'"),
    "costs": ({"costs": 7}, DtypeError, "costs is a int"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    options, error, text = BAD[case]
    given_ = {"X": X0, "values": V0, **options}
    for call in (spmm, lambda *a, **k: explain("spmm", *a, **k)):
        with pytest.raises(error, match=text):
            call(A0, **given_)


def test_explain_says_who_takes_heads(xp):
    found = explain("spmm", put(xp, A0), put(xp, X0), values=put(xp, V0), precision="bf16")
    assert found.chosen.deterministic
    names = {kernel.name: text for kernel, text in found.rejected}
    assert "spmm_csr_rounded" in names
    assert found.chosen.name in ("spmm_csr_balanced", "spmm_csr_numba")


SHARED = {
    "turned": (lambda: np.zeros((60, 4, 3), F32).transpose(0, 2, 1), FormatError, "C-contiguous"),
    "axes": (lambda: np.zeros((60, 4, 3), F32), ShapeError, r"the result has \(60, 3, 4\)"),
    "flat": (lambda: np.zeros((60, 12), F32), ShapeError, r"the result has \(60, 3, 4\)"),
    "list": (lambda: [1], DtypeError, "out is a list"),
    "overlap": (lambda: WIDE[:60], FormatError, "out overlaps an input"),
}
WIDE = np.ones((60, 3, 4), F32)


@pytest.mark.parametrize("case", SHARED)
def test_bad_out_of_heads_that_share_their_values_is_refused(case):
    make, error, text = SHARED[case]
    with pytest.raises(error, match=text):
        spmm(A0, WIDE[:45], out=make())
