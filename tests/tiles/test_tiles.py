"""Products over the tiles of an SGT, on whatever runs them, against loops in float64."""

import pickle
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import (
    DTYPES,
    GUARD,
    INDEX_DTYPES,
    KINDS,
    WIDTHS,
    far_apart,
    features,
    intact,
    matrix,
    name_of,
    poisoned,
    put,
)
from tile_cases import (
    TF32,
    TILES,
    WAYS,
    allowed,
    blocks,
    costs,
    placed,
    product_bound,
    quick,
    quick_products,
    rounding,
    sides,
    used,
    windows,
)

import sparsefmt
from sparsefmt import ops
from sparsefmt.ops.tiles.kernels import MMA_TILE
from sparsefmt.testing import (
    assert_close,
    sddmm_bound,
    sddmm_oracle,
    sgt,
    spmm_oracle,
    value_dtypes,
)
from sparsefmt.testing import features as drawn_features

F16, BF16, F32, F64 = DTYPES
ROW, COLUMN = "row_scale", "col_scale"
SCALES = {ROW: [ROW], COLUMN: [COLUMN], "both": [ROW, COLUMN]}


@pytest.fixture(
    params=[
        "numpy",
        *(pytest.param(f"cupy, {way}", marks=pytest.mark.gpu) for way in WAYS),
    ]
)
def where(request):
    """An array module, and how entries are split where that matters: on a GPU."""
    module, _, way = request.param.partition(", ")
    return pytest.importorskip(module), way or "measured"


@pytest.fixture
def place(where, monkeypatch):
    """The array module, and a function that puts an SGT there."""
    xp, way = where
    return xp, lambda A: placed(xp, A, way, monkeypatch)


def product(xp, A, X, *, shift=0, **options):
    """Into poisoned memory, leaving what is around it."""
    shape = A.n_rows, X.shape[1]
    size = shape[0] * shape[1]
    buffer = xp.full(size + 2 * GUARD + shift, np.nan, X.dtype)
    out = buffer[GUARD + shift : GUARD + shift + size].reshape(shape)
    used(xp, 1e4)  # sums that are NaN are done again
    assert ops.spmm(A, X, out=out, **options) is out
    assert intact(xp, buffer)
    assert bool(xp.isnan(buffer[GUARD : GUARD + shift]).all())
    return out


def check(place, A, X, **options):
    """Against the oracle, with tensor cores where they may run."""
    xp, put_there = place
    there = {k: put(xp, v) if k.endswith("scale") else v for k, v in options.items()}
    found = product(xp, put_there(A), put(xp, X), **there, **allowed(X.dtype))
    assert_close(found, spmm_oracle(A, X, **options), bound=product_bound(A, X, **options))


def check_large(place, A, csr, X, *, scaled=None, exact=None, **options):
    """The same where the oracle would take long; ``csr`` is the matrix that A was made of.

    Or with factors of columns, ``scaled``, in it: A has none of them.  ``exact`` is what ``quick``
    finds, where it is known.
    """
    xp, put_there = place
    more = allowed(X.dtype) | ({} if scaled is None else {"col_scale": scaled})
    found = product(xp, put_there(A), put(xp, X), **options, **more)
    expected, bound = exact or quick(csr, X, **options)
    assert_close(found, expected, bound=bound)


def dots(xp, A, X, Y):
    """Into poisoned memory, leaving what is around it."""
    out, buffer = poisoned(xp, (A.nnz, *X.shape[1:-1]), X.dtype)
    used(xp)
    assert ops.sddmm(A, X, Y, out=out, **allowed(X.dtype)) is out
    assert intact(xp, buffer)
    return out


def check_dots(place, A, X, Y):
    """Against the oracle, with tensor cores where they may run."""
    xp, put_there = place
    found, B = dots(xp, put_there(A), put(xp, X), put(xp, Y)), A.tocsr()
    bound = sddmm_bound(B, X, Y) + rounding(X.dtype, TF32) * sddmm_oracle(B, np.abs(X), np.abs(Y))
    assert_close(found, sddmm_oracle(B, X, Y), bound=bound)


def check_many_dots(place, csr, tile, X, Y, move=put):
    """The same where the oracle would take long; ``move`` puts features where they belong."""
    xp, put_there = place
    found = dots(xp, put_there(csr.tosgt(tile)), move(xp, X), move(xp, Y))
    expected, bound = quick_products(csr, X, Y)
    assert_close(found, expected, bound=bound)


# spmm, every matrix


@pytest.mark.covering("tile", "dtype", "width", one_in=3)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_dtype_and_width(place, tile, dtype, width):
    for index_dtype in INDEX_DTYPES:
        csr = windows(dtype, index_dtype)
        X = features(csr.n_cols, width, dtype)
        for one in (csr, csr.with_data(None)):
            check_large(place, one.tosgt(tile), one, X)


def many_slabs(tile, density, dtype, index_dtype, monkeypatch):
    """A CSR whose windows have up to 45 slabs, all of which go to one block."""
    everything = replace(costs("all", tile[0]), part=1000)
    monkeypatch.setattr("sparsefmt.ops.tiles.costs.measured", lambda *_: everything)
    return slabs(density, dtype, index_dtype)


def slabs(density, dtype, index_dtype):
    rng = np.random.default_rng(0)
    row, col = np.nonzero(rng.uniform(size=(150, 720)) < density)
    data = None if dtype is None else rng.uniform(-1, 1, len(row)).astype(dtype)
    ends = row.astype(index_dtype), col.astype(index_dtype)
    return sparsefmt.COO(*ends, data, shape=(150, 720)).tocsr()


def with_values(csr, values):
    """With those it has, with none, or with the factors of its columns."""
    factors = features(csr.n_cols, (), csr.dtype)
    return csr.with_data({"own": csr.data, "none": None, "factors": factors[csr.indices]}[values])


@cache
def product_of_slabs(density, dtype, values, width):
    """As ``quick``: it goes by neither the tile nor the type of indices."""
    csr = with_values(slabs(density, dtype, np.int32), values)
    return quick(csr, features(csr.n_cols, width, dtype))


@pytest.mark.covering("tile", "dtype", "density", "index_dtype", one_in=7)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("density", [0.02, 0.15, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("tile", TILES[1:], ids=str)
def test_many_slabs(xp, tile, dtype, density, index_dtype, monkeypatch):
    """More than the chip holds at a time, and with more entries than threads."""
    csr = many_slabs(tile, density, dtype, index_dtype, monkeypatch)
    place, c = (xp, lambda A: put(xp, A)), put(xp, features(720, (), dtype))
    for width in (20, 64):
        X = features(720, width, dtype)
        exact = {v: product_of_slabs(density, dtype, v, width) for v in ("own", "none", "factors")}
        for values in ("own", "none"):
            one = with_values(csr, values)
            A = one.tosgt(tile)
            check_large(place, A, one, X, exact=exact[values])
        if dtype != F16:
            check_large(place, A, with_values(csr, "factors"), X, scaled=c, exact=exact["factors"])


@pytest.mark.gpu
def test_many_slabs_go_to_tensor_cores(monkeypatch):
    cupy = pytest.importorskip("cupy")
    A = many_slabs(MMA_TILE, 0.15, F16, np.int32, monkeypatch).tosgt(MMA_TILE).to("cuda")
    X, Y = (cupy.ones((size, 64), F16) for size in A.shape)
    assert explained("spmm", A, Y)[0] == "spmm_sgt_mma"
    assert explained("sddmm", A, X, Y)[0] == "sddmm_sgt_mma"


@pytest.mark.covering("tile", "dtype", "width", one_in=7)
@pytest.mark.parametrize("width", [1, 7, 16, 40, 64, 129])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_well_filled_windows(place, tile, dtype, width):
    """Their values are kept of every cell, but not beside factors of columns."""
    for index_dtype in INDEX_DTYPES:
        csr = blocks(dtype, index_dtype)
        A, X = csr.tosgt(tile), features(csr.n_cols, width, dtype)
        check_large(place, A, csr, X)
        check(place, A, X, col_scale=features(csr.n_cols, 1, dtype)[:, 0])
        X[17] = np.inf
        check_large(place, A, csr, X)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_kind_of_graph(place, tile, kind):
    for dtype in (F32, BF16):
        A = matrix(kind, dtype, np.int32).tosgt(tile)
        for B in (A, A.with_data(None)):
            check(place, B, features(A.n_cols, 19, dtype))
            check(place, B, features(A.n_cols, 40, dtype), reduce="mean")


@pytest.mark.covering("reduce", "scales", "dtype", "weighted", one_in=3)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("weighted", [True, False])
def test_factors_of_rows_and_columns(place, weighted, dtype, scales, reduce):
    for tile in TILES[1:]:
        A = matrix("power law", dtype if weighted else None, np.int32).tosgt(tile)
        sizes = zip((ROW, COLUMN), A.shape, strict=True)
        every = {name: features(size, (), dtype, seed=2) for name, size in sizes}
        X = features(A.n_cols, 40, dtype)
        check(place, A, X, reduce=reduce, **{name: every[name] for name in SCALES[scales]})


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
def test_factors_beside_two_byte_features_may_be_float32(place, dtype):
    A = matrix("power law", dtype, np.int64).tosgt(MMA_TILE)
    r, c = features(A.n_rows, (), F32, seed=2), features(A.n_cols, (), F32, seed=3)
    check(place, A, features(A.n_cols, 40, dtype), row_scale=r, col_scale=c)
    check(place, A, features(A.n_cols, 40, dtype), row_scale=9 * r, reduce="mean")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_float16_takes_factors_of_columns_beyond_its_range(place, dtype):
    """They meet the values in float32, and the features undo them."""
    A = matrix("power law", dtype, np.int32).tosgt(MMA_TILE)
    c = np.full(A.n_cols, 1e6, F32 if np.dtype(dtype).itemsize == 2 else dtype)
    X = (features(A.n_cols, 8, F64) * 1e-6).astype(dtype)
    check(place, A, X, col_scale=c)


@given(A=sgt(tile=st.sampled_from(TILES)), dtype=value_dtypes(), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_matrix_with_any_features(place, A, dtype, data):
    A = A if A.data is None else A.with_data(A.data.astype(dtype))
    X = data.draw(drawn_features(A.n_cols, dtype=dtype, max_magnitude=4))
    reduce = data.draw(st.sampled_from(["sum", "mean"]))
    check(place, A, X, reduce=reduce)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_what_tiles_do_not_take_runs_all_the_same(place, reduce):
    csr = windows(F32)
    X = features(csr.n_cols, 9, F32)
    expected, bound = quick(csr, X, reduce)
    xp, put_there = place
    found = product(xp, put_there(csr.tosgt(MMA_TILE)), put(xp, X), reduce=reduce, precision="tf32")
    assert_close(found, expected, bound=bound)


# Memory


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_may_lie_apart_and_begin_anywhere(place, dtype):
    xp, put_there = place
    csr = windows(dtype)
    A = put_there(csr.tosgt(MMA_TILE))
    for gap, shift in ((1, 0), (8, 8), (5, 3), (0, 1)):
        for width in (1, 6, 33, 64):
            X = features(csr.n_cols, width, dtype)
            there = far_apart(xp, X, gap=gap, shift=shift)
            expected, bound = quick(csr, X)
            assert_close(product(xp, A, there, **allowed(dtype)), expected, bound=bound)


@pytest.mark.parametrize("shift", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_result_may_begin_anywhere(place, dtype, shift):
    xp, put_there = place
    csr = windows(dtype)
    X = features(csr.n_cols, 64, dtype)
    expected, bound = quick(csr, X)
    A = put_there(csr.tosgt(MMA_TILE))
    found = product(xp, A, put(xp, X), shift=shift, **allowed(dtype))
    assert_close(found, expected, bound=bound)


def test_inputs_are_not_changed(place):
    xp, put_there = place
    A = put_there(windows(F32).tosgt(MMA_TILE))
    X, r = put(xp, features(A.n_cols, 7, F32)), xp.ones(A.n_rows, F32)
    before, kept, row = A.copy(), X.copy(), r.copy()
    for reduce in ("sum", "mean"):
        ops.spmm(A, X, reduce=reduce, row_scale=r, precision="tf32")
    assert A == before
    assert bool((X == kept).all())
    assert bool((r == row).all())


# Values that spread where they should not


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_value_stays_in_the_rows_that_store_its_column(place, tile, dtype, bad):
    for weighted in (True, False):
        csr = windows(dtype if weighted else None)
        X = features(csr.n_cols, 33, dtype)
        X[60], X[90, 1], X[120, -1], X[3] = bad, bad, -bad, bad
        assert np.isfinite(quick(csr, X)[0]).any()
        check_large(place, csr.tosgt(tile), csr, X)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_of_the_matrix_stays_in_its_row(place, dtype, bad):
    csr = windows(dtype)
    data = csr.data.copy()
    data[[7, 400, 900]] = bad
    csr = csr.with_data(data)
    check_large(place, csr.tosgt(MMA_TILE), csr, features(csr.n_cols, 33, dtype))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
def test_the_largest_values_stay_finite(place, dtype, weighted):
    """Rounded to 8 bits they would be infinite."""
    csr = windows(dtype if weighted else None)
    X = features(csr.n_cols, 33, dtype)
    cells = np.stack([csr.tocoo().row, csr.indices])
    (_, column), count = np.unique(cells, axis=1, return_counts=True)
    X[np.setdiff1d(column, column[count > 1])[0]] = 3.38e38 if dtype == BF16 else np.finfo(F32).max
    assert np.isfinite(quick(csr, X)[0].astype(F32)).all()
    check_large(place, csr.tosgt(MMA_TILE), csr, X)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_empty_row_is_zero_whatever_its_factor(place, tile, reduce, bad):
    csr = windows(BF16)
    xp, put_there = place
    empty = csr.lengths == 0
    assert empty.any()
    r = np.where(empty, bad, 1).astype(F32)
    X = features(csr.n_cols, 16, BF16)
    options = {"reduce": reduce, "row_scale": put(xp, r)}
    found = product(xp, put_there(csr.tosgt(tile)), put(xp, X), **options)
    assert bool((found[put(xp, np.flatnonzero(empty))] == 0).all())
    assert bool(xp.isfinite(found.astype(F32)).all())
    options["row_scale"] = put(xp, np.full_like(r, bad))
    found = product(xp, put_there(csr.tosgt(tile)), put(xp, X), **options)
    assert bool((found[put(xp, np.flatnonzero(empty))] == 0).all())
    assert not bool(xp.isfinite(found[put(xp, np.flatnonzero(~empty))].astype(F32)).any())


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
def test_two_byte_sums_run_in_float32(place, dtype):
    """4096 ones: adding in float16 or bfloat16 stops at 2048 or 256."""
    xp, put_there = place
    A = put_there(sparsefmt.CSR([0, 4096], np.arange(4096), shape=(1, 4096)).tosgt(MMA_TILE))
    assert float(ops.spmm(A, xp.ones((4096, 8), dtype))[0, 5]) == 4096


# sddmm


@pytest.mark.covering("width", "dtype", one_in=2)
@pytest.mark.parametrize("width", [*WIDTHS, (2, 7), (4, 16), (8, 1), (3, 0), (0, 8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_products_at_the_entries(place, dtype, width):
    for tile in (TILES[0], TILES[1], MMA_TILE):
        for index_dtype in INDEX_DTYPES:
            A = matrix("power law", None, index_dtype).tosgt(tile)
            check_dots(place, A, *sides(A, width, dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_products_at_the_entries_of_every_kind_of_graph(place, tile, kind):
    for dtype in (F32, BF16):
        A = matrix(kind, F64, np.int32).tosgt(tile)
        check_dots(place, A, *sides(A, 19, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_products_of_every_height_and_of_features_that_fill_no_word(place, tile, dtype):
    for index_dtype in INDEX_DTYPES:
        csr = windows(None, index_dtype)
        for width in (1, 3, 7, 17, 40, 64, 129, 300, 600, (2, 24), (3, 5), (8, 8), (1, 128)):
            check_many_dots(place, csr, tile, *sides(csr, width, dtype))


@pytest.mark.covering("tile", "density", one_in=5)
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("tile", TILES[1:], ids=str)
def test_products_at_the_entries_of_many_slabs(xp, tile, density, monkeypatch):
    """More than are on their way at a time, and with more entries than threads."""
    csr = many_slabs(tile, density, None, np.int32, monkeypatch)
    for dtype in (F16, F32):
        for width in (32, 64, 128):
            place = xp, lambda A: put(xp, A)
            check_many_dots(place, csr, tile, *sides(csr, width, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_and_heads_of_products_may_lie_apart_and_begin_anywhere(place, dtype):
    csr = windows(None)
    for gap, shift in ((1, 0), (8, 8), (5, 3), (0, 1)):

        def move(xp, X, gap=gap, shift=shift):
            return far_apart(xp, X, gap=gap, shift=shift)

        for width in (1, 6, 33, 64, (2, 16), (3, 5)):
            check_many_dots(place, csr, MMA_TILE, *sides(csr, width, dtype), move)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=name_of)
def test_other_layouts_of_features_are_copied(place, dtype):
    def heads_last(xp, X):
        return put(xp, np.ascontiguousarray(X.swapaxes(1, 2))).swapaxes(1, 2)

    csr = windows(None)
    check_many_dots(place, csr, MMA_TILE, *sides(csr, (3, 8), dtype), heads_last)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_value_stays_in_the_products_of_its_row_or_column(place, tile, dtype, bad):
    csr = windows(None)
    for width in (33, (2, 8)):
        X, Y = sides(csr, width, dtype)
        X[20], X[90, ..., -1], Y[60], Y[100, ..., 1], Y[3] = bad, -bad, bad, bad, bad
        assert np.isfinite(quick_products(csr, X, Y)[0]).any()
        check_many_dots(place, csr, tile, X, Y)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("width", [4096, (2, 512)], ids=str)
def test_two_byte_products_are_summed_in_float32(place, dtype, width):
    """Ones: adding in float16 or bfloat16 stops at 2048 or 256."""
    csr = windows(None)
    X, Y = (np.ones_like(side) for side in sides(csr, width, dtype))
    xp, put_there = place
    found = dots(xp, put_there(csr.tosgt(MMA_TILE)), put(xp, X), put(xp, Y))
    assert bool((found.astype(F32) == X.shape[-1]).all())


# Laws


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_results_repeat_bit_for_bit(place, dtype):
    xp, put_there = place
    csr = windows(dtype)
    X = put(xp, features(csr.n_cols, 72, dtype))
    A = put_there(csr.tosgt(MMA_TILE))
    first = product(xp, A, X, **allowed(dtype))
    assert all(bool((product(xp, A, X, **allowed(dtype)) == first).all()) for _ in range(5))
    again = put_there(csr.tosgt(MMA_TILE))  # and for another one that is split anew
    assert bool((product(xp, again, X, **allowed(dtype)) == first).all())
    left, right = (put(xp, side) for side in sides(csr, 200, dtype))
    first = dots(xp, A, left, right)
    assert all(bool((dots(xp, B, left, right) == first).all()) for B in (A, A, again))


def test_float32_keeps_its_precision_unless_told(place):
    """Bit for bit what the CSR gives on a GPU, where the sum of each row runs in its order."""
    xp, put_there = place
    csr = windows(F32)
    X = put(xp, features(csr.n_cols, 64, F32) + F32(1000))
    A = put_there(csr.sorted_indices().tosgt(MMA_TILE))
    expected = product(xp, put(xp, csr.sorted_indices()), X)
    assert bool((product(xp, A, X) == expected).all())
    assert bool((A @ X == expected).all())
    Y = put(xp, features(csr.n_rows, 64, F32))
    expected = ops.sddmm(put(xp, csr.sorted_indices()), Y, X)
    assert bool((ops.sddmm(A, Y, X) == expected).all())


def test_other_values_give_other_results(place):
    """Whatever was kept for the first ones."""
    xp, put_there = place
    csr = windows(F32)
    A, X = csr.tosgt(MMA_TILE), features(csr.n_cols, 33, F32)
    check(place, A, X)
    there = put_there(A)
    for data in (csr.data, -csr.data, np.ones_like(csr.data), None, csr.data[::-1].copy()):
        B, (expected, bound) = there.with_data(put(xp, data)), quick(csr.with_data(data), X)
        for _ in range(2):
            assert_close(product(xp, B, put(xp, X), precision="tf32"), expected, bound=bound)


def test_a_matrix_from_another_process_multiplies(place):
    xp, put_there = place
    csr = windows(F32)
    X = put(xp, features(csr.n_cols, 33, F32))
    A = put_there(csr.tosgt(MMA_TILE))
    expected = product(xp, A, X, precision="tf32")
    again = pickle.loads(pickle.dumps(A))
    assert bool((product(xp, again, X, precision="tf32") == expected).all())


# What explain says


def explained(op, *args, **options):
    found = ops.explain(op, *args, **options)
    return found.chosen.name, str(found)


def test_explain_on_the_cpu():
    A, X = windows(F32).tosgt(), features(187, 4, F32)
    name, text = explained("spmm", A, X)
    assert name == "spmm_through_csr"
    assert "not spmm_sgt_mma: the arrays are on the CPU" in text
    for options in ({"precision": "tf32"}, {"reduce": "max"}):
        assert explained("spmm", A, X, **options)[0] == name
    name, text = explained("sddmm", A, features(301, 4, F32), X, precision="tf32")
    assert name == "sddmm_through_csr"
    assert "not sddmm_sgt_csr: the arrays are on the CPU" in text
    assert "not sddmm_sgt_mma: the arrays are on the CPU" in text


@pytest.mark.parametrize("format", ["csr", "coo", "csc"])
def test_explain_says_that_only_tiles_use_tf32(xp, format):
    A, X = put(xp, windows(F32).asformat(format)), put(xp, features(187, 4, F32))
    name, text = explained("spmm", A, X, precision="tf32")
    assert "sgt" not in name
    assert 'precision="tf32" is for tiles, A.tosgt((64, 16)): it changes nothing here' in text
    assert "tf32" not in explained("spmm", A, X)[1]
    Y = put(xp, features(301, 4, F32))
    assert "it changes nothing here" in explained("sddmm", A, Y, X, precision="tf32")[1]
    assert "tf32" not in explained("sddmm", A, Y, X)[1]


@pytest.mark.gpu
def test_explain_on_a_gpu(monkeypatch):
    cupy = pytest.importorskip("cupy")

    def reasons(A, X, **options):
        name, text = explained("spmm", A, cupy.asarray(X), **options)
        assert name == "spmm_sgt_csr", text
        return text

    csr = windows(F32)
    A, X = placed(cupy, csr.tosgt(MMA_TILE), "all", monkeypatch), features(187, 64, F32)
    assert explained("spmm", A, cupy.asarray(X), precision="tf32")[0] == "spmm_sgt_mma"
    text = reasons(A, X)
    assert 'spmm_sgt_mma: tensor cores round float32: allow it with precision="tf32"' in text
    assert "tensor cores would round float64" in reasons(A.astype(F64), X.astype(F64))
    assert "do not take a max" in reasons(A, X, precision="tf32", reduce="max")
    low = csr.tosgt((8, 8)).to("cuda")
    assert "its tiles have 8 rows: it takes 16, 32, 64, 128" in reasons(low, X, precision="tf32")
    half, c = A.astype(F16), cupy.ones(187, F16)
    assert explained("spmm", half, cupy.asarray(X.astype(F16)))[0] == "spmm_sgt_mma"
    assert "leave the range of float16" in reasons(half, X.astype(F16), col_scale=c)
    B = placed(cupy, csr.tosgt(MMA_TILE), "none", monkeypatch)
    assert "its windows are too sparse, or too few: CUDA cores do best" in reasons(
        B, X, precision="tf32"
    )


@pytest.mark.gpu
def test_explain_products_at_the_entries_on_a_gpu(monkeypatch):
    cupy = pytest.importorskip("cupy")

    def asked(A, dtype, heads=(), **options):
        left, right = (cupy.ones((n, *heads, 8), dtype) for n in A.shape)
        return explained("sddmm", A, left, right, **options)

    csr = windows(None)
    A = placed(cupy, csr.tosgt(MMA_TILE), "all", monkeypatch)
    assert asked(A, F16)[0] == asked(A, BF16, (3,))[0] == "sddmm_sgt_mma"
    assert asked(A, F32, precision="tf32")[0] == "sddmm_sgt_mma"
    for dtype, text in ((F32, 'allow it with precision="tf32"'), (F64, "would round float64")):
        name, found = asked(A, dtype)
        assert name == "sddmm_sgt_csr"
        assert text in found
    B = placed(cupy, csr.tosgt(MMA_TILE), "none", monkeypatch)
    name, found = asked(B, F16)
    assert name == "sddmm_sgt_csr"
    assert "its windows are too sparse, or too few: CUDA cores do best" in found


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tensor_cores_take_what_the_split_gives_them(tile, dtype, way, monkeypatch):
    """The tests of products above run what they seem to."""
    cupy = pytest.importorskip("cupy")
    A = placed(cupy, windows(dtype).tosgt(tile), way, monkeypatch)
    X = cupy.asarray(features(187, 7, dtype))
    name, text = explained("spmm", A, X, **allowed(dtype))
    taken = way in ("all", "mix") and tile[0] >= 16 and dtype is not F64
    Y = cupy.asarray(features(301, 7, dtype))
    other, why = explained("sddmm", A, Y, X, **allowed(dtype))
    if taken or way == "none":
        assert name == ("spmm_sgt_mma" if taken else "spmm_sgt_csr"), text
        assert other == ("sddmm_sgt_mma" if taken else "sddmm_sgt_csr"), why


@pytest.mark.gpu
def test_an_older_device_takes_cuda_cores(monkeypatch):
    cupy = pytest.importorskip("cupy")
    from sparsefmt.ops.tiles import cuda as tiles_cuda
    from sparsefmt.ops.tiles import kernels as tiles_kernels

    tiles_kernels.against_device.cache_clear()
    monkeypatch.setattr(tiles_cuda, "CAPABILITY", (99, 0))
    A = placed(cupy, windows(BF16).tosgt(MMA_TILE), "all", monkeypatch)
    name, text = explained("spmm", A, cupy.ones((187, 8), BF16))
    tiles_kernels.against_device.cache_clear()
    assert name == "spmm_sgt_csr"
    assert "it needs compute capability 99.0, cuda:0 has" in text


# GPU only


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_work_runs_on_the_current_stream_and_can_be_captured(way, monkeypatch):
    cupy = pytest.importorskip("cupy")
    csr = windows(F32)
    A = placed(cupy, csr.tosgt(MMA_TILE), way, monkeypatch)
    source, out = cupy.zeros((187, 40), F32), cupy.empty((301, 40), F32)
    r = cupy.ones(301, F32)
    options = {"reduce": "mean", "row_scale": r, "precision": "tf32", "out": out}
    pool = cupy.cuda.MemoryPool()  # the graph's own: what it reads and writes stays its own
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        ops.spmm(A, source, **options)
        stream.synchronize()
        stream.begin_capture()
        ops.spmm(A, source, **options)
        graph = stream.end_capture()
        for seed in range(100):
            fresh = features(187, 40, F32, seed=seed)
            source.set(fresh)
            out.fill(np.nan)
            graph.launch()
            if seed % 10 == 0:
                stream.synchronize()
                expected, bound = quick(csr, fresh, "mean")
                assert_close(out, expected, bound=bound)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [40, 300, (3, 7)], ids=str)
@pytest.mark.parametrize("dtype", [F16, F32], ids=name_of)
def test_so_can_products_at_the_entries(dtype, width, monkeypatch):
    cupy = pytest.importorskip("cupy")
    csr = windows(None)
    A = placed(cupy, csr.tosgt(MMA_TILE), "mix", monkeypatch)
    X, Y = sides(csr, width, dtype)
    left, right = cupy.asarray(X), cupy.zeros(Y.shape, dtype)
    out = cupy.empty((csr.nnz, *X.shape[1:-1]), dtype)
    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        ops.sddmm(A, left, right, out=out, **allowed(dtype))
        stream.synchronize()
        stream.begin_capture()
        ops.sddmm(A, left, right, out=out, **allowed(dtype))
        graph = stream.end_capture()
        for seed in range(10):
            fresh = features(*Y.shape[:1], Y.shape[1:], dtype, seed=seed)
            right.set(fresh)
            out.fill(np.nan)
            graph.launch()
            stream.synchronize()
            expected, bound = quick_products(csr, X, fresh)
            assert_close(out, expected, bound=bound)


@pytest.mark.gpu
def test_two_streams_do_not_wait_for_what_the_other_keeps(monkeypatch):
    cupy = pytest.importorskip("cupy")
    csr = windows(F32)
    A, X = placed(cupy, csr.tosgt(MMA_TILE), "all", monkeypatch), cupy.ones((187, 64), F32)
    expected = ops.spmm(A, X, precision="tf32")
    cupy.cuda.Device().synchronize()
    found = []
    for _ in range(4):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            found.append(ops.spmm(A, X, precision="tf32"))
            stream.synchronize()
    assert all(bool((one == expected).all()) for one in found)
