"""SpMM by sum against a loop over stored entries in float64, on NumPy and on CuPy."""

from dataclasses import replace

import numpy as np
import pytest
from laws.cases import NAMED
from laws.checks import check
from op_cases import (
    DTYPES,
    FORMATS,
    INDEX_DTYPES,
    LONG_ROWS,
    REDUCTIONS,
    ROW_LENGTHS,
    features,
    in_data_order,
    intact,
    matrix,
    name_of,
    poisoned,
    put,
    quick_oracle,
    rows_of,
    run_apart,
)

import sparsefmt
from sparsefmt import ops
from sparsefmt.errors import ShapeError, UnsupportedError
from sparsefmt.formats.oracle import float64
from sparsefmt.ops.matmul import cuda as matmul_cuda
from sparsefmt.testing import assert_close, error_bound, spmm_oracle


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("width", [40, 72, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("weighted", [True, False])
def test_wide_slices(monkeypatch, weighted, dtype, width, reduce):
    """What large dense graphs take, on small ones."""
    import cupy

    for limit in ("DENSE_ROWS", "SMALL_BYTES"):
        monkeypatch.setattr(matmul_cuda, limit, -1)
    for k, lengths in enumerate([LONG_ROWS, *ROW_LENGTHS.values()]):
        A = rows_of(lengths, 37, dtype if weighted else None, INDEX_DTYPES[k % 2], seed=k)
        X = features(37, width, dtype)
        out, buffer = poisoned(cupy, (A.n_rows, width), dtype)
        ops.spmm(put(cupy, A), put(cupy, X), reduce=reduce, out=out)
        expected, bound = quick_oracle(A, X, reduce)
        assert_close(out, expected, bound=bound)
        assert intact(cupy, buffer)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_sparse_features_times_a_dense_weight(xp, dtype):
    S, X = ops.maxk(features(30, 50, dtype), 7), features(50, 12, dtype)
    assert_close(put(xp, S) @ put(xp, X), spmm_oracle(S, X), bound=error_bound(S, X))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("width", [8, 16, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_bad_value_stays_in_the_rows_that_store_its_column(xp, dtype, width, bad):
    """A kernel that multiplies a window of rows by a tile must not spread 0 * Inf."""
    for k, lengths in enumerate(ROW_LENGTHS.values()):
        A = rows_of(lengths, 37, dtype if k % 2 else None, np.int32, seed=k)
        X = features(37, width, dtype)
        X[3], X[20, 1], X[36, -1] = bad, bad, -bad
        with np.errstate(invalid="ignore"):
            expected, bound = quick_oracle(A, X)
        assert_close(put(xp, A) @ put(xp, X), expected, bound=bound)


@pytest.mark.parametrize("format", FORMATS)
def test_an_explicit_zero_does_touch_a_bad_value(xp, format):
    A = sparsefmt.COO([0], [1], np.zeros(1, np.float32), shape=(2, 2)).asformat(format)
    Y = put(xp, A) @ put(xp, np.full((2, 1), np.inf, np.float32))
    assert bool(xp.isnan(Y[0, 0]))
    assert float(Y[1, 0]) == 0


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=name_of)
def test_half_precision_sums_in_float32(xp, dtype):
    """4096 ones: adding in float16 or bfloat16 stops at 2048 or 256."""
    A = sparsefmt.CSR([0, 4096], np.zeros(4096, int), shape=(1, 1))
    for B in (A, A.tocoo()):
        assert float((put(xp, B) @ xp.ones((1, 8), dtype))[0, 5]) == 4096


def test_a_hub_beside_rows_of_two(xp):
    A = rows_of(np.concatenate([[80_000], np.full(499, 2)]), 777, None, np.int32)
    X = features(777, 3, np.float64)
    expected, bound = quick_oracle(A, X)
    assert_close(put(xp, A) @ put(xp, X), expected, bound=bound)


def test_threads_may_multiply_at_once():
    """Under numba's workqueue too, which aborts the process when two threads enter it."""
    code = (
        "import threading, numpy as np, sparsefmt as sf\n"
        "A = sf.power_law(2000, 40_000).tocsr()\n"
        "X = np.ones((2000, 32), np.float32)\n"
        "expected = A @ X\n"
        "right = []\n"
        "def multiply():\n"
        "    for _ in range(100):\n"
        "        for B in (A, A.tocoo()):\n"
        "            right.append(np.array_equal(B @ X, expected))\n"
        "threads = [threading.Thread(target=multiply) for _ in range(4)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(len(right), all(right))\n"
    )
    run = run_apart(code, NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS="2")
    assert run.stdout.split() == ["800", "True"], run.stderr


def test_explain_names_the_kernel_and_why_not_the_others():
    A = matrix("power law", np.float32, np.int32)
    found = ops.explain("spmm", A.tocsr(), features(A.n_cols, 4, np.float32))
    assert found.chosen.name == "spmm_csr_numba"
    text = str(found)
    assert "spmm runs spmm_csr_numba (deterministic)" in text
    assert "not spmm_csr_balanced: the arrays are on the CPU" in text
    assert "not spmm_through_csr: A is CSR already" in text


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_explain_takes_what_the_operation_takes(reduce):
    """A COO on the CPU is sorted for a sum too: adding entry by entry took longer at each width."""
    A = matrix("one column", np.float64, np.int32).tocsr()
    assert ops.explain("spmm", A, [[1.0]]).chosen.name == "spmm_csr_numba"
    found = ops.explain("spmm", A.tocoo(), [[1.0]], reduce=reduce, row_scale=np.ones(20))
    assert found.chosen.name == "spmm_through_csr"
    assert ("scattering does not take a max" in str(found)) == (reduce == "max")


def test_explain_warns_of_a_conversion_at_each_call():
    A = matrix("power law", np.float32, np.int32)
    text = str(ops.explain("spmm", A.tocsc(), features(A.n_cols, 4, np.float32)))
    assert "spmm runs spmm_through_csr" in text
    assert "converts to CSR at each call" in text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_explain_on_a_gpu_says_which_kernel_is_deterministic(dtype):
    cupy = pytest.importorskip("cupy")
    A = matrix("power law", dtype, np.int32)
    found = ops.explain("spmm", A.tocsr().to("cuda"), cupy.asarray(features(45, 64, dtype)))
    assert found.chosen.name == "spmm_csr_balanced", str(found)
    found = ops.explain("spmm", A.to("cuda"), cupy.asarray(features(45, 4, dtype)))
    assert "atomics: not deterministic" in str(found)
    assert not found.chosen.deterministic


@pytest.mark.gpu
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_fault_inside_a_kernel_names_it_under_debug(debug):
    code = (
        "import cupy, numpy as np, sparsefmt as sf\n"
        "i = cupy.array([0, 1], np.int32)\n"
        "A = sf.CSR(i, i[:1].copy(), shape=(1, 2)); A.indices[0] = 2**30\n"
        "from sparsefmt.ops.matmul.cuda import spmm\n"
        "X = cupy.ones((2, 64), np.float32)\n"
        "try: A @ X if sf.formats.checks.DEBUG else None\n"
        "except sf.IndexRangeError: print('refused')\n"
        "try: spmm(A, X, None, None, None, None)\n"
        "except sf.KernelLaunchError as e: print('named', e)\n"
        "try: cupy.cuda.Device().synchronize()\n"
        "except cupy.cuda.runtime.CUDARuntimeError as e: print('late')\n"
    )
    run = run_apart(code, SPARSEFMT_DEBUG=debug)
    for text in ("refused", "named spmm_csr_balanced"):
        assert (text in run.stdout) == (debug == "1"), run.stdout + run.stderr


@pytest.mark.gpu
def test_out_of_memory_leaves_the_process_working():
    cupy = pytest.importorskip("cupy")
    pool = cupy.get_default_memory_pool()
    n = 1 << 20
    big = sparsefmt.CSR(cupy.zeros(n + 1, np.int32), cupy.zeros(0, np.int32), shape=(n, 4))
    limit = pool.get_limit()
    pool.free_all_blocks()  # what earlier tests have left would do
    pool.set_limit(size=pool.used_bytes() + (1 << 20))
    try:
        with pytest.raises(sparsefmt.OutOfMemoryError, match="Out of memory"):
            big @ cupy.ones((4, 64), np.float32)
    finally:
        pool.set_limit(size=limit)
    assert (big @ cupy.ones((4, 1), np.float32)).shape == (n, 1)


@pytest.mark.gpu
def test_special_values_stay_special_where_products_are_rounded():
    import cupy

    A = rows_of([1, 1, 1, 1], 4, None, np.int32)
    X = np.array([[np.inf], [np.nan], [-np.inf], [-0.0]], np.float32)
    found = matmul_cuda.spmm_rounded(put(cupy, A), cupy.asarray(X)).get()
    np.testing.assert_array_equal(found, X[A.indices])


@pytest.mark.gpu
def test_a_maximum_is_not_rounded():
    import cupy

    A, X = put(cupy, rows_of([8] * 30, 30, np.float32, np.int32)), cupy.ones((30, 64), np.float32)
    found = ops.explain("spmm", A, X, precision="bf16", reduce="max")
    assert found.chosen.name == "spmm_csr_balanced"
    assert "a max is one of the features as they are" in str(found)


# Several heads: a value of each for every entry, features of each or of all

#: Side by side, not aligned, of few heads and many, none, wider than a sub-warp reads.
HEADS = [(1, 7), (2, 16), (4, 8), (3, 5), (8, 64), (5, 33), (0, 4), (4, 0), (2, 257)]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
def test_every_dtype_and_number_of_heads(xp, dtype, index_dtype, reduce):
    for case in (NAMED["spmm of heads"], NAMED["spmm of heads scaled"]):
        A = case.matrix(dtype, index_dtype=index_dtype)
        for heads, feat in HEADS:
            each = replace(case, options={"reduce": reduce}).with_heads((heads,))
            check(xp, each, A, each.arguments(A, dtype, feat=feat))


def test_heads_that_share_their_values_are_one_product(xp):
    """Maxima, tiles and all else of a product are theirs too."""
    for format in FORMATS:
        A = put(xp, matrix("power law", np.float32, np.int32)).asformat(format)
        X = put(xp, features(45, (3, 5), np.float32))
        for reduce in REDUCTIONS:
            out, buffer = poisoned(xp, (60, 3, 5), np.float32)
            assert ops.spmm(A, X, reduce=reduce, out=out) is out
            flat = ops.spmm(A.tocsr(), X.reshape(45, 15), reduce=reduce)
            assert bool((out.reshape(60, 15) == flat).all()) or format == "coo"
            assert intact(xp, buffer)


def test_one_value_each_takes_the_place_of_the_matrix_own(xp):
    for format in FORMATS:
        A = matrix("power law", np.float32, np.int32).asformat(format)
        X, values = features(45, 6, np.float32), features(600, (), np.float32, seed=2)
        found = ops.spmm(put(xp, A), put(xp, X), values=put(xp, values))
        exact = spmm_oracle(in_data_order(A).with_data(values), X)
        assert np.allclose(float64(found), exact, atol=1e-5)


def test_heads_of_their_own_are_summed_alone():
    A, X = matrix("power law", np.float32, np.int32).tocsr(), features(45, (3, 4), np.float32)
    values = features(600, 3, np.float32)
    for call in (ops.spmm, lambda *a, **k: ops.explain("spmm", *a, **k)):
        with pytest.raises(UnsupportedError, match="for one head at a time"):
            call(A, X, values=values, reduce="max")
        with pytest.raises(ShapeError, match="values has 3 heads but X has 2: give both the same"):
            call(A, X[:, :2], values=values)
