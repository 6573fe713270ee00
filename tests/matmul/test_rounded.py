"""Products of float32 features that may be rounded to bfloat16, against a loop in float64."""

import numpy as np
import pytest
from op_cases import (
    INDEX_DTYPES,
    KINDS,
    LONG_ROWS,
    ROW_LENGTHS,
    far_apart,
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

from sparsefmt import UnsupportedError, ops
from sparsefmt.ops.matmul import cuda as matmul_cuda
from sparsefmt.testing import assert_close, error_bound, spmm_oracle

F32 = np.dtype(np.float32)


def check(A, X, reduce="sum", *, out=None, **scales):
    """Exactly the product of rounded features, up to float32's own rounding."""
    import cupy

    found, buffer = poisoned(cupy, (A.n_rows, X.shape[1]), F32) if out is None else out
    there = {name: put(cupy, value) for name, value in scales.items()}
    given = put(cupy, X) if isinstance(X, np.ndarray) else X
    options = {"reduce": reduce, "precision": "bf16", **there}
    assert ops.explain("spmm", put(cupy, A), given, **options).chosen.name == "spmm_csr_rounded"
    assert ops.spmm(put(cupy, A), given, out=found, **options) is found
    near = rounded(X if isinstance(X, np.ndarray) else X.get())
    if scales:
        expected, bound = spmm_oracle(A, near, **scales), error_bound(A, near, **scales)
    else:
        expected, bound = quick_oracle(A, near, reduce)
    assert_close(found, expected, bound=bound)
    assert intact(cupy, buffer)


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_graph(kind, weighted, index_dtype):
    A = matrix(kind, F32 if weighted else None, index_dtype).tocsr()
    check(A, features(A.n_cols, 19, F32))


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("width", [1, 2, 4, 7, 8, 12, 16, 24, 33, 64, 66, 72, 128, 200, 257])
def test_every_width_and_length_of_rows(width, reduce):
    for k, lengths in enumerate(ROW_LENGTHS.values()):
        A = rows_of(lengths, 37, F32 if k % 3 else None, INDEX_DTYPES[k % 2], seed=k)
        check(A, features(37, width, F32), reduce)


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize("width", [1, 8, 40, 130])
@pytest.mark.parametrize("weighted", [True, False])
def test_rows_that_many_blocks_share(weighted, width):
    A = long_rows(F32 if weighted else None, np.int32)
    check(A, features(A.n_cols, width, F32))


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize("width", [40, 72, 200])
@pytest.mark.parametrize("weighted", [True, False])
def test_wide_slices(monkeypatch, weighted, width):
    for limit in ("DENSE_ROWS", "SMALL_BYTES"):
        monkeypatch.setattr(matmul_cuda, limit, -1)
    for k, lengths in enumerate([LONG_ROWS, *ROW_LENGTHS.values()]):
        A = rows_of(lengths, 37, F32 if weighted else None, INDEX_DTYPES[k % 2], seed=k)
        check(A, features(37, width, F32))


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize("names", [["row_scale"], ["col_scale"], ["row_scale", "col_scale"]])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("width", [5, 64])
def test_scales_stay_as_they_are(width, weighted, names):
    A = matrix("power law", F32 if weighted else None, np.int32).tocsr()
    sizes = {"row_scale": A.n_rows, "col_scale": A.n_cols}
    scales = {name: features(sizes[name], 1, F32)[:, 0] for name in names}
    check(A, features(A.n_cols, width, F32), **scales)


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
def test_rows_of_features_may_lie_anywhere():
    import cupy

    A = matrix("power law", F32, np.int32).tocsr()
    for width in (8, 20, 33):
        X = features(A.n_cols, width, F32)
        for gap, shift in ((3, 0), (0, 1), (8, 4)):
            check(A, far_apart(cupy, X, gap=gap, shift=shift))
        check(A, cupy.asfortranarray(cupy.asarray(X)))


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("width", [4, 8, 64])
def test_the_result_may_begin_anywhere(width, offset):
    import cupy

    A = matrix("power law", F32, np.int32).tocsr()
    _, buffer = poisoned(cupy, (A.n_rows * width + offset,), F32)
    begin = (len(buffer) - A.n_rows * width - offset) // 2 + offset
    out = buffer[begin : begin + A.n_rows * width].reshape(A.n_rows, width)
    check(A, features(A.n_cols, width, F32), out=(out, buffer))


@pytest.mark.gpu
def test_special_values_stay_special():
    import cupy

    A = rows_of([1, 1, 1, 1], 4, None, np.int32)
    X = np.array([[np.inf], [np.nan], [-np.inf], [-0.0]], F32)
    found = matmul_cuda.spmm_rounded(put(cupy, A), cupy.asarray(X)).get()
    np.testing.assert_array_equal(found, X[A.indices])


@pytest.mark.gpu
def test_a_permission_is_taken_where_it_pays():
    import cupy

    many = rows_of([8] * 30, 30, F32, np.int32)
    few = rows_of([1] * 30, 30, F32, np.int32)

    def kernel(A, width=64, **options):
        return ops.explain("spmm", put(cupy, A), cupy.ones((30, width), F32), **options)

    assert kernel(many, precision="bf16").chosen.name == "spmm_csr_rounded"
    for found, reason in (
        (kernel(few, precision="bf16"), "a row is gathered less than 8 times on average"),
        (kernel(many, 63, precision="bf16"), "rows have less than 64 features"),
        (kernel(many, precision="bf16", reduce="max"), "a max is one of the features as they are"),
        (kernel(many), 'allow bfloat16 with precision="bf16"'),
        (kernel(many, precision="tf32"), 'allow bfloat16 with precision="bf16"'),
    ):
        assert found.chosen.name == "spmm_csr_balanced"
        assert reason in str(found)


def test_on_a_cpu_nothing_is_rounded():
    A = rows_of([8] * 30, 30, F32, np.int32)
    X = features(30, 9, F32)
    np.testing.assert_array_equal(ops.spmm(A, X, precision="bf16"), ops.spmm(A, X))
    assert "the arrays are on the CPU" in str(ops.explain("spmm", A, X, precision="bf16"))


def test_only_float32_is_rounded():
    A = rows_of([8] * 30, 30, np.float64, np.int32)
    with pytest.raises(UnsupportedError, match='precision is "bf16" but X is float64'):
        ops.spmm(A, features(30, 9, np.float64), precision="bf16")
