"""``sspmm`` whose float32 gradients may be rounded to bfloat16, against loops in float64."""

import numpy as np
import pytest
from op_cases import features, matrix, put, rounded, rows_of

from sparsefmt import ops
from sparsefmt.ops.cbsr import cuda_sspmm as cbsr_cuda_sspmm
from sparsefmt.ops.cbsr.oracle import sspmm_bound, sspmm_oracle
from sparsefmt.ops.cbsr.windows import WindowSizes
from sparsefmt.testing import assert_close

F32 = np.dtype(np.float32)
BF16 = {"precision": "bf16"}
#: By windows, and by panels.
WAYS = {False: "sspmm_csr_windows_rounded", True: "sspmm_csr_panels_rounded"}
SIZES = [(1, 1), (7, 3), (16, 16), (33, 1), (64, 8), (256, 32), (200, 64), (257, 40), (300, 300)]


def balanced(A, feat, k):
    return ops.maxk(features(A.n_cols, feat, F32, seed=7), k)


def check(A, S):
    """Exactly the product of rounded rows, up to float32's own rounding."""
    import cupy

    dY = features(A.n_rows, S.n_cols, F32, seed=8)
    expected, bound = (f(A, rounded(dY), S) for f in (sspmm_oracle, sspmm_bound))
    B, G, R = (put(cupy, one) for one in (A, dY, S))
    for deterministic, name in WAYS.items():
        options = BF16 | {"deterministic": deterministic}
        assert ops.explain("sspmm", B, G, R, **options).chosen.name == name
        assert_close(ops.sspmm(B, G, R, **options).data, expected, bound=bound)


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize(("feat", "k"), [*SIZES, (70_000, 5)])
def test_every_width(feat, k):
    A = matrix("power law", F32, np.int32).tocsr()
    check(A, balanced(A, feat, k))


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize("sizes", [WindowSizes(1, 1, 8), WindowSizes(8, 3, 100)], ids=str)
def test_windows_of_any_size(monkeypatch, sizes):
    monkeypatch.setattr(cbsr_cuda_sspmm, "window_sizes", lambda *_, **__: sizes)
    A = rows_of(np.arange(60), 40, F32, np.int32)
    check(A, balanced(A, 72, 8))


def test_windows_of_rounded_rows_are_taller():
    device = cbsr_cuda_sspmm.Chip(227 * 2**10, 228 * 2**10, 50 * 2**20)
    exact, near = (
        cbsr_cuda_sspmm.window_sizes((200_000,) * 2, 10**8, size, 256, 32, device, ordered=False)
        for size in (4, 2)
    )
    assert (exact.height, near.height) == (128, 256)
    assert exact.parts == near.parts
