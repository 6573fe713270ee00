"""SpMM by sum against a loop over stored entries in float64, on NumPy and on CuPy."""

import os
import subprocess
import sys

import numpy as np
import pytest
from op_cases import (
    DTYPES,
    FORMATS,
    INDEX_DTYPES,
    LONG_ROWS,
    ROW_LENGTHS,
    features,
    intact,
    matrix,
    name_of,
    poisoned,
    put,
    quick_oracle,
    rows_of,
)

import sparsefmt
from sparsefmt import ops
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
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"},
        check=False,
    )
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
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "SPARSEFMT_DEBUG": debug},
        check=False,
    )
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
