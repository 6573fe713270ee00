"""Products over the tiles of an SGT, on whatever runs them, against sums in float64.

On a CPU an SGT runs on its CSR, as tests/laws shows: what follows is of GPUs, split in each way.
"""

from dataclasses import replace
from functools import cache

import laws.checks
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import (
    DTYPES,
    INDEX_DTYPES,
    KINDS,
    WIDTHS,
    features,
    intact,
    matrix,
    name_of,
    poisoned,
    put,
)
from tile_cases import (
    SDDMM,
    SPMM,
    TILES,
    WAYS,
    allowed,
    blocks,
    costs,
    dots,
    placed,
    product,
    sides,
    used,
    windows,
)

import sparsefmt
from sparsefmt import ops
from sparsefmt.ops.tiles.kernels import MMA_TILE
from sparsefmt.testing import assert_close, sgt, value_dtypes
from sparsefmt.testing import features as drawn_features

F16, BF16, F32, F64 = DTYPES
ROW, COLUMN = "row_scale", "col_scale"
SCALES = {ROW: [ROW], COLUMN: [COLUMN], "both": [ROW, COLUMN]}
HEADS = [(2, 7), (4, 16), (8, 1), (3, 0), (0, 8), (2, 24), (3, 5), (8, 8), (1, 128)]
ON_GPU = [pytest.param(f"cupy, {way}", marks=pytest.mark.gpu) for way in WAYS]
on_cpu_too = pytest.mark.parametrize("place", ["numpy", *ON_GPU], indirect=True)


@pytest.fixture(params=ON_GPU)
def place(request, monkeypatch):
    """An array module, and a function that puts an SGT there, to be split in a way."""
    module, _, way = request.param.partition(", ")
    xp = pytest.importorskip(module)
    return xp, lambda A: placed(xp, A, way or "measured", monkeypatch)


def check(place, A, tile, args, *, layout=put, oracle=None, **options):
    """Check SDDMM, or SpMM if there is no Y, with tensor cores where they may run."""
    xp, put_there = place
    case = SDDMM if "Y" in args else SPMM
    options |= allowed(args["X"].dtype)

    def tiles(xp, A):
        A = put_there(A)
        used(xp, 1e4)  # sums that are NaN are done again
        return A

    case = replace(case, options=options, oracle=oracle or case.oracle)
    laws.checks.check(xp, case, A.tosgt(tile), args, place=layout, matrix=tiles)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_dtype_and_width(place, tile, dtype, width):
    for index_dtype in INDEX_DTYPES:
        A = windows(dtype, index_dtype)
        for B in (A, A.with_data(None)):
            check(place, B, tile, {"X": features(A.n_cols, width, dtype)})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_products_at_the_entries_of_every_tile_dtype_and_width(place, tile, dtype):
    """Features that fill no word too."""
    for index_dtype in INDEX_DTYPES:
        A = windows(None, index_dtype)
        for width in (*WIDTHS, 3, 17, 40, 129, 300, 600, *HEADS):
            check(place, A, tile, sides(A, width, dtype))


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


#: Whether there are values, and factors of columns.
VALUES = {"own": (True, False), "none": (False, False), "factors": (False, True)}


@cache
def product_of_slabs(density, dtype, values, width):
    """Compute the product, which goes by neither the tile nor the type of indices."""
    weighted, scaled = VALUES[values]
    A = slabs(density, dtype, np.int32)
    scales = {COLUMN: features(720, (), dtype)} if scaled else {}
    return product(A if weighted else A.with_data(None), features(720, width, dtype), **scales)


@pytest.mark.gpu
@pytest.mark.covering("tile", "dtype", "density", "index_dtype", one_in=4)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("density", [0.02, 0.15, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("tile", TILES[1:], ids=str)
def test_many_slabs(tile, dtype, density, index_dtype, monkeypatch):
    """More than the chip holds at a time, and with more entries than threads."""
    A = many_slabs(tile, density, dtype, index_dtype, monkeypatch)
    place = pytest.importorskip("cupy"), lambda B: B.to("cuda")
    for width in (20, 64):
        for values, (weighted, scaled) in VALUES.items():
            if scaled and dtype == F16:
                continue
            args = {"X": features(720, width, dtype)}
            args |= {COLUMN: features(720, (), dtype)} if scaled else {}
            exact = product_of_slabs(density, dtype, values, width)
            B = A if weighted else A.with_data(None)
            check(place, B, tile, args, oracle=lambda *_, exact=exact, **__: exact)


@pytest.mark.gpu
@pytest.mark.covering("tile", "density", one_in=3)
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("tile", TILES[1:], ids=str)
def test_products_at_the_entries_of_many_slabs(tile, density, monkeypatch):
    """More than are on their way at a time, and with more entries than threads."""
    A = many_slabs(tile, density, None, np.int32, monkeypatch)
    place = pytest.importorskip("cupy"), lambda B: B.to("cuda")
    for dtype in (F16, F32):
        for width in (32, 64, 128):
            check(place, A, tile, sides(A, width, dtype))


@pytest.mark.gpu
def test_many_slabs_go_to_tensor_cores(monkeypatch):
    cupy = pytest.importorskip("cupy")
    A = many_slabs(MMA_TILE, 0.15, F16, np.int32, monkeypatch).tosgt(MMA_TILE).to("cuda")
    X, Y = (cupy.ones((size, 64), F16) for size in A.shape)
    assert explained("spmm", A, Y)[0] == "spmm_sgt_mma"
    assert explained("sddmm", A, X, Y)[0] == "sddmm_sgt_mma"


@pytest.mark.covering("tile", "dtype", "width", one_in=3)
@pytest.mark.parametrize("width", [1, 7, 16, 40, 64, 129])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_well_filled_windows(place, tile, dtype, width):
    """Their values are kept of every cell, but not beside factors of columns."""
    for index_dtype in INDEX_DTYPES:
        A = blocks(dtype, index_dtype)
        X = features(A.n_cols, width, dtype)
        check(place, A, tile, {"X": X})
        check(place, A, tile, {"X": X, COLUMN: features(A.n_cols, (), dtype)})
        X[17] = np.inf
        check(place, A, tile, {"X": X})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_kind_of_graph(place, tile, kind):
    for dtype in (F32, BF16):
        A = matrix(kind, dtype, np.int32)
        for B in (A, A.with_data(None)):
            check(place, B, tile, {"X": features(A.n_cols, 19, dtype)})
            check(place, B, tile, {"X": features(A.n_cols, 40, dtype)}, reduce="mean")
        check(place, A, tile, sides(A, 19, dtype))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("weighted", [True, False])
def test_factors_of_rows_and_columns(place, weighted, dtype, scales, reduce):
    A = matrix("power law", dtype if weighted else None, np.int32)
    sizes = zip((ROW, COLUMN), A.shape, strict=True)
    every = {name: features(size, (), dtype, seed=2) for name, size in sizes}
    args = {"X": features(A.n_cols, 40, dtype)} | {name: every[name] for name in SCALES[scales]}
    for tile in TILES[1:]:
        check(place, A, tile, args, reduce=reduce)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
def test_factors_beside_two_byte_features_may_be_float32(place, dtype):
    A = matrix("power law", dtype, np.int64)
    r, c = features(A.n_rows, (), F32, seed=2), features(A.n_cols, (), F32, seed=3)
    X = features(A.n_cols, 40, dtype)
    check(place, A, MMA_TILE, {"X": X, ROW: r, COLUMN: c})
    check(place, A, MMA_TILE, {"X": X, ROW: 9 * r}, reduce="mean")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_float16_takes_factors_of_columns_beyond_its_range(place, dtype):
    """They meet the values in float32, and the features undo them."""
    A = matrix("power law", dtype, np.int32)
    c = np.full(A.n_cols, 1e6, F32 if np.dtype(dtype).itemsize == 2 else dtype)
    X = (features(A.n_cols, 8, F64) * 1e-6).astype(dtype)
    check(place, A, MMA_TILE, {"X": X, COLUMN: c})


@on_cpu_too
@given(A=sgt(tile=st.sampled_from(TILES)), dtype=value_dtypes(), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_matrix_with_any_features(place, A, dtype, data):
    A = A if A.data is None else A.with_data(A.data.astype(dtype))
    X = data.draw(drawn_features(A.n_cols, dtype=dtype, max_magnitude=4))
    check(place, A, A.tile, {"X": X}, reduce=data.draw(st.sampled_from(["sum", "mean"])))


#: Rows so far apart that begin so late, and features that are copied.
APART = ((1, 0), (8, 8), (5, 3), (0, 1))
LAYOUTS = {f"apart {gap}, {shift}": laws.checks.apart(gap, shift) for gap, shift in APART}
LAYOUTS |= {"heads last": laws.checks.LAYOUTS["heads last"]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_and_heads_may_lie_apart_and_begin_anywhere(place, dtype, layout):
    A = windows(dtype)
    for width in (1, 6, 33, 64):
        X = features(A.n_cols, width, dtype)
        check(place, A, MMA_TILE, {"X": X}, layout=LAYOUTS[layout])
    for width in (1, 6, 33, 64, (2, 16), (3, 5), (3, 8)):
        check(place, A, MMA_TILE, sides(A, width, dtype), layout=LAYOUTS[layout])


@pytest.mark.parametrize("shift", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_result_may_begin_anywhere(place, dtype, shift):
    xp, put_there = place
    A, X = windows(dtype), features(187, 64, dtype)
    (expected,), (bound,) = product(A, X)
    flat, buffer = poisoned(xp, (shift + expected.size,), dtype)
    out = flat[shift:].reshape(expected.shape)
    ops.spmm(put_there(A.tosgt(MMA_TILE)), put(xp, X), out=out, **allowed(dtype))
    assert_close(out, expected, bound=bound)
    assert intact(xp, buffer)
    assert bool(xp.isnan(flat[:shift]).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_value_stays_in_the_rows_that_store_its_column(place, tile, dtype, bad):
    A, X = windows(dtype), features(187, 33, dtype)
    X[60], X[90, 1], X[120, -1], X[3] = bad, bad, -bad, bad
    assert np.isfinite(product(A, X)[0]).any()
    for B in (A, A.with_data(None)):
        check(place, B, tile, {"X": X})
    for width in (33, (2, 8)):
        X, Y = sides(A, width, dtype).values()
        X[20], X[90, ..., -1], Y[60], Y[100, ..., 1], Y[3] = bad, -bad, bad, bad, bad
        assert np.isfinite(dots(A, X, Y)[0]).any()
        check(place, A, tile, {"X": X, "Y": Y})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_of_the_matrix_stays_in_its_row(place, dtype, bad):
    A = windows(dtype)
    A.data[[7, 400, 900]] = bad
    check(place, A, MMA_TILE, {"X": features(A.n_cols, 33, dtype)})


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
def test_the_largest_values_stay_finite(place, dtype, weighted):
    """Rounded to 8 bits they would be infinite."""
    A = windows(dtype if weighted else None)
    X = features(A.n_cols, 33, dtype)
    cells = np.stack([A.tocoo().row, A.indices])
    (_, column), count = np.unique(cells, axis=1, return_counts=True)
    X[np.setdiff1d(column, column[count > 1])[0]] = 3.38e38 if dtype == BF16 else np.finfo(F32).max
    assert np.isfinite(product(A, X)[0][0].astype(F32)).all()
    check(place, A, MMA_TILE, {"X": X})


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_empty_row_is_zero_whatever_its_factor(place, tile, reduce, bad):
    A, X = windows(BF16), features(187, 16, BF16)
    empty = A.lengths == 0
    assert empty.any()
    check(place, A, tile, {"X": X, ROW: np.where(empty, bad, 1).astype(F32)}, reduce=reduce)
    xp, put_there = place
    scale = {ROW: put(xp, np.full(A.n_rows, bad, F32))}
    y = ops.spmm(put_there(A.tosgt(tile)), put(xp, X), reduce=reduce, **scale)
    assert bool((y[put(xp, np.flatnonzero(empty))] == 0).all())
    assert not bool(xp.isfinite(y[put(xp, np.flatnonzero(~empty))].astype(F32)).any())


@pytest.mark.parametrize("dtype", [F16, BF16], ids=name_of)
def test_two_byte_sums_run_in_float32(place, dtype):
    """Of ones: adding in float16 or bfloat16 stops at 2048 or 256."""
    xp, put_there = place
    A = put_there(sparsefmt.CSR([0, 4096], np.arange(4096), shape=(1, 4096)).tosgt(MMA_TILE))
    assert float(ops.spmm(A, xp.ones((4096, 8), dtype))[0, 5]) == 4096
    A = put_there(windows(None).tosgt(MMA_TILE))
    for width in ((4096,), (2, 512)):
        X, Y = (xp.ones((size, *width), dtype) for size in A.shape)
        assert bool((ops.sddmm(A, X, Y).astype(F32) == width[-1]).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_results_repeat_bit_for_bit_and_inputs_are_not_changed(place, dtype):
    xp, put_there = place
    tiles = windows(dtype).tosgt(MMA_TILE)
    A, again = put_there(tiles), put_there(tiles.copy())  # which is split anew
    X, Y = (put(xp, features(size, 72, dtype)) for size in A.shape)
    before = A.copy(), X.copy(), Y.copy()
    calls = (
        lambda A: ops.spmm(A, Y, row_scale=X[:, 0], **allowed(dtype)),
        lambda A: ops.sddmm(A, X, Y, **allowed(dtype)),
    )
    for call in calls:
        first = call(A)
        for B in (A, A, A, again):
            used(xp, 1e4)
            assert bool((call(B) == first).all())
    assert laws.checks.all_equal(xp, (A, X, Y), before)


@on_cpu_too
def test_float32_keeps_its_precision_unless_told(place):
    """Bit for bit what the CSR gives on a GPU, where the sum of each row runs in its order."""
    xp, put_there = place
    csr = windows(F32).sorted_indices()
    X, Y = (put(xp, features(n, 64, F32)) for n in csr.shape)
    Y += F32(1000)
    A, B = put_there(csr.tosgt(MMA_TILE)), put(xp, csr)
    for found in (ops.spmm(A, Y), A @ Y):
        assert bool((found == ops.spmm(B, Y)).all())
    assert bool((ops.sddmm(A, X, Y) == ops.sddmm(B, X, Y)).all())


@on_cpu_too
def test_other_values_give_other_results(place):
    """Whatever was kept for the first ones."""
    xp, put_there = place
    csr, X = windows(F32), features(187, 33, F32)
    A = put_there(csr.tosgt(MMA_TILE))
    for data in (csr.data, -csr.data, np.ones_like(csr.data), None, csr.data[::-1].copy()):
        B, ((expected,), (bound,)) = A.with_data(put(xp, data)), product(csr.with_data(data), X)
        for _ in range(2):
            assert_close(ops.spmm(B, put(xp, X), precision="tf32"), expected, bound=bound)


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
    A = put(xp, windows(F32).asformat(format))
    X, Y = (put(xp, features(size, 4, F32)) for size in (187, 301))
    for op, args in (("spmm", (X,)), ("sddmm", (Y, X))):
        name, text = explained(op, A, *args, precision="tf32")
        assert "sgt" not in name
        assert 'precision="tf32" is for tiles, A.tosgt((64, 16)): it changes nothing here' in text
        assert "tf32" not in explained(op, A, *args)[1]


@pytest.mark.gpu
def test_explain_on_a_gpu(monkeypatch):
    cupy = pytest.importorskip("cupy")

    def kernels(A, dtype, text="", **options):
        """Return the kernels of both products, or of SpMM if the options are its own."""
        X, Y = (cupy.ones((size, 64), dtype) for size in A.shape)
        calls = [("spmm", Y), ("sddmm", X, Y)][: 1 if {*options} - {"precision"} else 2]
        results = [explained(op, A, *args, **options) for op, *args in calls]
        assert all(text in found for _, found in results)
        return {name.removeprefix(op) for (name, _), (op, *_) in zip(results, calls, strict=True)}

    csr, tf32 = windows(F32), {"precision": "tf32"}
    A, low = placed(cupy, csr.tosgt(MMA_TILE), "all", monkeypatch), csr.tosgt((8, 8)).to("cuda")
    half, c = A.astype(F16), cupy.ones(187, F16)
    assert kernels(A, F32, **tf32) == kernels(half, F16) == {"_sgt_mma"}
    X, Y = (cupy.ones((size, 3, 8), BF16) for size in A.shape)
    assert explained("sddmm", A, X, Y)[0] == "sddmm_sgt_mma"
    for text, B, dtype, options in (
        ('tensor cores round float32: allow it with precision="tf32"', A, F32, {}),
        ("tensor cores would round float64", A.astype(F64), F64, {}),
        ("do not take a max", A, F32, {**tf32, "reduce": "max"}),
        ("its tiles have 8 rows: it takes 16, 32, 64, 128", low, F32, tf32),
        ("leave the range of float16", half, F16, {COLUMN: c}),
    ):
        assert kernels(B, dtype, text=text, **options) == {"_sgt_csr"}
    A, text = placed(cupy, csr.tosgt(MMA_TILE), "none", monkeypatch), "its windows are too sparse"
    text += ", or too few: CUDA cores do best"
    assert kernels(A, F32, text=text, **tf32) == {"_sgt_csr"}


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tensor_cores_take_what_the_split_gives_them(tile, dtype, way, monkeypatch):
    """The tests of products above run what they seem to."""
    cupy = pytest.importorskip("cupy")
    A = placed(cupy, windows(dtype).tosgt(tile), way, monkeypatch)
    X, Y = (cupy.asarray(features(n, 7, dtype)) for n in A.shape)
    taken = way in ("all", "mix") and tile[0] >= 16 and dtype is not F64
    for op, args in (("spmm", (Y,)), ("sddmm", (X, Y))):
        name, text = explained(op, A, *args, **allowed(dtype))
        if taken or way == "none":
            assert name == (f"{op}_sgt_mma" if taken else f"{op}_sgt_csr"), text


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


CAPTURED = [("spmm", way, F32, 40) for way in WAYS]
CAPTURED += [("sddmm", "mix", dtype, width) for dtype in (F16, F32) for width in (40, 300, (3, 7))]


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "way", "dtype", "width"), CAPTURED)
def test_work_runs_on_the_current_stream_and_can_be_captured(op, way, dtype, width, monkeypatch):
    cupy = pytest.importorskip("cupy")
    A = windows(dtype if op == "spmm" else None)
    args = {ROW: features(301, (), dtype), "X": features(187, width, dtype)}
    case, options, shape = SPMM, {"reduce": "mean"} | allowed(dtype), (301, width)
    if op == "sddmm":
        args = sides(A, width, dtype)
        case, options, shape = SDDMM, allowed(dtype), (A.nnz, *args["X"].shape[1:-1])
    case, (last, source) = replace(case, options=options), list(args.items())[-1]
    B = placed(cupy, A.tosgt(MMA_TILE), way, monkeypatch)
    there, out = {n: cupy.asarray(v) for n, v in args.items()}, cupy.empty(shape, dtype)
    pool = cupy.cuda.MemoryPool()  # the graph's own: what it reads and writes stays its own
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        case.run(B, there, out=out)
        stream.synchronize()
        stream.begin_capture()
        case.run(B, there, out=out)
        graph = stream.end_capture()
        for seed in range(100):
            args[last] = features(*source.shape[:1], source.shape[1:], dtype, seed=seed)
            there[last].set(args[last])
            out.fill(np.nan)
            graph.launch()
            if seed % 10 == 0:
                stream.synchronize()
                ((expected, bound),) = case.expected(A, args)
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
