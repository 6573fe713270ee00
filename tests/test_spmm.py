"""SpMM against a loop over stored entries in float64, on NumPy and on CuPy."""

import os
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import sparsefmt
from sparsefmt import ops
from sparsefmt.ops import _jit, _registry, matmul
from sparsefmt.testing import assert_close, error_bound, spmm_oracle

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
WIDTHS = [0, 1, 7, 16, 33, 64, 128, 257]
FORMATS = ["coo", "csr", "csc", "sgt"]
GUARD = 64


def matrix(kind, dtype, index_dtype, *, seed=0):
    """A non-symmetric COO of the named kind with its entries in no order."""
    rng = np.random.default_rng(seed)
    shape, row, col = KINDS[kind](rng)
    order = rng.permutation(len(row))
    data = None if dtype is None else rng.uniform(-1, 1, len(row)).astype(dtype)
    row, col = (np.asarray(a, index_dtype)[order] for a in (row, col))
    return sparsefmt.COO(row, col, data, shape=shape)


def _random(n_rows, n_cols, nnz):
    return lambda rng: (
        (n_rows, n_cols),
        rng.integers(0, n_rows, nnz),
        rng.integers(0, n_cols, nnz),
    )


def _power_law(rng):
    row = np.minimum(rng.zipf(1.6, 600) - 1, 59)
    return (60, 45), row, rng.integers(0, 45, 600)


KINDS = {
    "empty": lambda rng: ((4, 3), [], []),
    "no rows": lambda rng: ((0, 3), [], []),
    "no columns": lambda rng: ((3, 0), [], []),
    "one row": _random(1, 20, 30),
    "one column": _random(20, 1, 15),
    "star": lambda rng: ((50, 400), np.zeros(400, int), np.arange(400)),
    "power law": _power_law,
    "banded": lambda rng: ((40, 40), np.repeat(np.arange(40), 2), np.arange(80) // 2 * 7 % 40),
    "dense block": lambda rng: ((32, 32), *np.indices((16, 16)).reshape(2, -1)),
    "isolated rows": lambda rng: ((90, 30), rng.integers(0, 9, 50) * 10, rng.integers(0, 30, 50)),
}


def features(rows, width, dtype, *, seed=1):
    return np.random.default_rng(seed).uniform(-1, 1, (rows, width)).astype(dtype)


def poisoned(xp, shape, dtype):
    """An output full of NaN between two guard bands, and the whole buffer."""
    size = int(np.prod(shape))
    buffer = xp.full(size + 2 * GUARD, np.nan, dtype)
    return buffer[GUARD : GUARD + size].reshape(shape), buffer


def check(xp, A, X):
    """``A @ X`` into poisoned memory: every element right, no guard touched."""
    if xp.__name__ == "cupy":
        A, X = A.to("cuda"), xp.asarray(X)
    out, buffer = poisoned(xp, (A.n_rows, X.shape[1]), X.dtype)
    assert ops.spmm(A, X, out=out) is out
    assert_close(out, spmm_oracle(A, X), bound=error_bound(A, X))
    assert bool(xp.isnan(buffer[:GUARD]).all() and xp.isnan(buffer[len(buffer) - GUARD :]).all())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("format", FORMATS)
def test_every_width_and_dtype(xp, format, dtype, width):
    A = matrix("power law", dtype, np.int32).asformat(format)
    check(xp, A, features(A.n_cols, width, dtype))


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_kind_of_graph(xp, format, kind, weighted, index_dtype):
    A = matrix(kind, np.float32 if weighted else None, index_dtype).asformat(format)
    check(xp, A, features(A.n_cols, 19, np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_sparse_features_times_a_dense_weight(xp, dtype):
    S = ops.maxk(features(30, 50, dtype), 7)
    check(xp, S, features(50, 12, dtype))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_implicit_zero_never_touches_a_bad_value(xp, format, bad):
    A = matrix("isolated rows", np.float32, np.int32)
    A = sparsefmt.COO(A.row, A.col // 2, A.data, shape=A.shape).asformat(format)
    X = features(30, 5, np.float32)
    X[15:] = bad
    check(xp, A, X)


@pytest.mark.parametrize("format", FORMATS)
def test_an_explicit_zero_does_touch_a_bad_value(xp, format):
    A = sparsefmt.COO([0], [1], np.zeros(1, np.float32), shape=(2, 2)).asformat(format)
    X = xp.asarray(np.full((2, 1), np.inf, np.float32))
    Y = (A.to("cuda") if xp.__name__ == "cupy" else A) @ X
    assert bool(xp.isnan(Y[0, 0]))
    assert float(Y[1, 0]) == 0


@pytest.mark.parametrize("format", ["csr", "csc", "sgt"])
def test_results_repeat_bit_for_bit(xp, format):
    A = matrix("power law", np.float32, np.int32).asformat(format)
    X = xp.asarray(features(A.n_cols, 33, np.float32))
    A = A.to("cuda") if xp.__name__ == "cupy" else A
    first = A @ X
    assert all(bool((A @ X == first).all()) for _ in range(5))


def test_inputs_are_not_changed(xp):
    A = matrix("power law", np.float32, np.int32)
    A = A.to("cuda") if xp.__name__ == "cupy" else A
    X = xp.asarray(features(A.n_cols, 8, np.float32))
    before, kept = A.copy(), X.copy()
    for format in FORMATS:
        A.asformat(format) @ X
    assert A == before
    assert bool((X == kept).all())


def test_features_need_not_be_contiguous(xp):
    A = matrix("power law", np.float64, np.int32).tocsr()
    wide = features(2 * A.n_cols, 20, np.float64)
    X = wide[::2, 1:18:3]
    A = A.to("cuda") if xp.__name__ == "cupy" else A
    assert_close(A @ xp.asarray(wide)[::2, 1:18:3], spmm_oracle(A, X), bound=error_bound(A, X))


def test_a_hub_beside_rows_of_two(xp):
    row = np.concatenate([np.zeros(80_000, np.int32), np.repeat(np.arange(1, 500), 2)])
    col = np.arange(len(row)) % 777
    A = sparsefmt.COO(row.astype(np.int32), col.astype(np.int32), shape=(500, 777)).tocsr()
    X = features(777, 3, np.float64)
    expected = np.zeros((500, 3))
    np.add.at(expected, row, X[col])
    Y = (A.to("cuda") if xp.__name__ == "cupy" else A) @ xp.asarray(X)
    assert_close(Y, expected, bound=error_bound(A, X))


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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["spmm_csr_rows", "spmm_csr_balanced"])
def test_each_csr_kernel_by_itself(name, kind):
    cupy = pytest.importorskip("cupy")
    (kernel,) = (k for k in _registry._kernels["spmm"] if k.name == name)
    A = matrix(kind, np.float64, np.int64).tocsr()
    for width in WIDTHS:
        X = features(A.n_cols, width, np.float64)
        out, buffer = poisoned(cupy, (A.n_rows, width), np.float64)
        kernel.run(A.to("cuda"), cupy.asarray(X), out)
        assert_close(out, spmm_oracle(A, X), bound=error_bound(A, X))
        guards = buffer[:GUARD], buffer[len(buffer) - GUARD :]
        assert all(bool(cupy.isnan(guard).all()) for guard in guards)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_features_need_not_be_aligned(offset):
    cupy = pytest.importorskip("cupy")
    A = matrix("power law", np.float32, np.int32).tocsr()
    X = features(A.n_cols, 64, np.float32)
    memory = cupy.empty(X.size + offset, np.float32)
    shifted = memory[offset:].reshape(X.shape)
    shifted[...] = cupy.asarray(X)
    Y = A.to("cuda") @ shifted
    assert_close(Y, spmm_oracle(A, X), bound=error_bound(A, X))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 16, 64, 100])
def test_rows_that_many_sub_warps_and_blocks_share(width):
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    lengths = np.concatenate([[20_000, 0, 0, 1], np.zeros(9_000, int), rng.integers(0, 300, 400)])
    row = np.repeat(np.arange(len(lengths)), lengths)
    col = rng.integers(0, 500, len(row))
    data = rng.uniform(-1, 1, len(row))
    A = sparsefmt.COO(row, col, data, shape=(len(lengths), 500)).tocsr()
    X = features(500, width, np.float64)
    expected = np.zeros((len(lengths), width))
    np.add.at(expected, row, data[:, None] * X[col])
    Y = A.to("cuda") @ cupy.asarray(X)
    assert_close(Y, expected, bound=2 * error_bound(A, X))


def test_counts_beyond_32_bits_go_to_the_kernel_without_them():
    large = SimpleNamespace(nnz=2**31, n_rows=1)
    (reason,) = matmul._counts_in_32_bits(large, features(1, 4, np.float32))
    assert reason == "2147483648 entries, 1 rows x 4 features: too many for 32-bit counts"
    assert f"constexpr int ITEMS = {matmul.ITEMS};" in _jit.source("spmm.cu")


def test_explain_takes_what_the_operation_takes():
    A = matrix("one column", np.float64, np.int32).tocsr()
    assert ops.explain("spmm", A, [[1.0]]).chosen.name == "spmm_csr_numba"


def test_explain_warns_of_a_conversion_at_each_call():
    A = matrix("power law", np.float32, np.int32)
    text = str(ops.explain("spmm", A.tosgt(), features(A.n_cols, 4, np.float32)))
    assert "spmm runs spmm_through_csr" in text
    assert "converts to CSR at each call" in text


def test_explain_refuses_an_unknown_operation():
    with pytest.raises(sparsefmt.UnsupportedError, match="op is 'spmv': use one of spmm"):
        ops.explain("spmv")


A = matrix("power law", np.float32, np.int32).tocsr()
X = features(45, 4, np.float32)
BAD = {
    "sparse": (np.eye(3), X, {}, sparsefmt.DtypeError, "A is a ndarray: give a sparsefmt format"),
    "1-D": (A, X[:, 0], {}, sparsefmt.ShapeError, r"X has shape \(45,\).*X\[:, None\]"),
    "3-D": (A, X[None], {}, sparsefmt.ShapeError, r"X has shape \(1, 45, 4\)"),
    "0-D": (A, np.float32(1), {}, sparsefmt.ShapeError, r"X has shape \(\)"),
    "rows": (A, X[1:], {}, sparsefmt.ShapeError, "X has 44 rows but A has 45 columns"),
    "integers": (A, X.astype(int), {}, sparsefmt.DtypeError, "X.dtype is int64: values are float"),
    "complex": (A, X + 1j, {}, sparsefmt.DtypeError, "X.dtype is complex64"),
    "objects": (A, X.astype(object), {}, sparsefmt.DtypeError, "X holds Python objects"),
    "pair": (
        A,
        X.astype(np.float64),
        {},
        sparsefmt.UnsupportedError,
        "no kernel can run this spmm.*A.data is float32 but X is float64: cast one",
    ),
    "out shape": (
        A,
        X,
        {"out": np.zeros((60, 3), np.float32)},
        sparsefmt.ShapeError,
        r"out has shape \(60, 3\): the result has \(60, 4\)",
    ),
    "out dtype": (A, X, {"out": np.zeros((60, 4))}, sparsefmt.DtypeError, "out is float64"),
    "out list": (A, X, {"out": [[0.0]]}, sparsefmt.DtypeError, "out is a list: give a NumPy"),
    "out strided": (
        A,
        X,
        {"out": np.zeros((60, 8), np.float32)[:, ::2]},
        sparsefmt.FormatError,
        "out must be C-contiguous",
    ),
    "out read-only": (
        A,
        X,
        {"out": np.frombuffer(bytes(960), np.float32).reshape(60, 4)},
        sparsefmt.FormatError,
        "writeable",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    left, right, options, error, text = BAD[case]
    with pytest.raises(error, match=f"(?s){text}"):
        ops.spmm(left, right, **options)


def test_out_may_not_overlap_an_input():
    A = sparsefmt.CSR(np.arange(46, dtype=np.int32), np.arange(45, dtype=np.int32), shape=(45, 45))
    X = features(46, 4, np.float32)
    with pytest.raises(sparsefmt.FormatError, match="out overlaps an input"):
        ops.spmm(A, X[:45], out=X[1:])


def test_two_sparse_factors_are_no_spmm():
    with pytest.raises(TypeError, match="unsupported operand"):
        A @ A


def test_a_dense_left_factor_is_refused():
    with pytest.raises(TypeError, match=r"unsupported operand|does not support ufuncs"):
        X.T @ A


@pytest.mark.gpu
def test_mixed_devices_are_refused():
    cupy = pytest.importorskip("cupy")
    with pytest.raises(sparsefmt.DeviceError, match="X is on cuda:0 but A is on cpu"):
        ops.spmm(A, cupy.asarray(X))
    with pytest.raises(sparsefmt.DeviceError, match="out is on cpu but the inputs are on cuda:0"):
        ops.spmm(A.to("cuda"), cupy.asarray(X), out=np.zeros((60, 4), np.float32))


@pytest.mark.gpu
def test_work_runs_on_the_current_stream_and_can_be_captured():
    cupy = pytest.importorskip("cupy")
    ops.compile_all()
    B, source = A.to("cuda"), cupy.asarray(X)
    out = cupy.empty((60, 4), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        ops.spmm(B, source, out=out)
        graph = stream.end_capture()
        for seed in range(100):
            fresh = features(45, 4, np.float32, seed=seed)
            source.set(fresh)
            out.fill(np.nan)
            graph.launch()
            if seed % 10 == 0:
                stream.synchronize()
                assert_close(out, spmm_oracle(A, fresh), bound=error_bound(A, fresh))


@pytest.mark.gpu
def test_coo_on_a_gpu_says_that_it_uses_atomics():
    cupy = pytest.importorskip("cupy")
    found = ops.explain("spmm", A.tocoo().to("cuda"), cupy.asarray(X))
    assert not found.chosen.deterministic
    assert "atomics: not deterministic" in str(found)


@pytest.mark.gpu
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_fault_inside_a_kernel_names_it_under_debug(debug):
    code = (
        "import cupy, numpy as np, sparsefmt as sf\n"
        "i = cupy.array([0, 1], np.int32)\n"
        "A = sf.CSR(i, i[:1].copy(), shape=(1, 2)); A.indices[0] = 2**30\n"
        "try:\n"
        "    A @ cupy.ones((2, 64), np.float32)\n"
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
    assert ("named spmm_csr_balanced" in run.stdout) == (debug == "1"), run.stdout + run.stderr


@pytest.mark.gpu
def test_out_of_memory_leaves_the_process_working():
    cupy = pytest.importorskip("cupy")
    pool = cupy.get_default_memory_pool()
    n = 1 << 20
    big = sparsefmt.CSR(cupy.zeros(n + 1, np.int32), cupy.zeros(0, np.int32), shape=(n, 4))
    limit = pool.get_limit()
    pool.set_limit(size=pool.used_bytes() + (1 << 20))
    try:
        with pytest.raises(sparsefmt.OutOfMemoryError, match="Out of memory"):
            big @ cupy.ones((4, 64), np.float32)
    finally:
        pool.set_limit(size=limit)
    assert (big @ cupy.ones((4, 1), np.float32)).shape == (n, 1)
