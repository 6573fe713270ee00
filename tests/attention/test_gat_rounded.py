"""Graph attention whose float32 rows may be rounded to bfloat16 before entries gather them."""

import numpy as np
import pytest
from laws.checks import check
from laws.test_laws_of_rounding import CHOSEN, check_rounded
from test_attention import with_factors

F32 = np.dtype(np.float32)
BF16 = {"precision": "bf16"}
#: Loads of 16 and 8 bytes and of single values; heads side by side, and slices of a head.
SHAPES = [
    *[((1,), 32), ((4,), 32), ((8,), 32), ((8,), 8), ((4,), 16), ((2,), 64), ((1,), 128)],
    *[((1,), 200), ((16,), 4), ((3,), 12), ((2,), 7), ((8,), 1), ((4,), 33), ((), 5), ((), 64)],
]
CASES = [case for case in CHOSEN if case.name.startswith("gat")]
CASES += [with_factors(case) for case in CASES]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize(("heads", "feat"), SHAPES)
@every_case
def test_every_shape_of_features(case, heads, feat):
    case = case.with_heads(heads)
    check_rounded(case, case.matrix(F32), feat)


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize("format", ["coo", "csc", "sgt"])
@every_case
def test_other_formats_are_converted(case, format):
    import cupy

    A = case.matrix(F32, format=format)
    check(cupy, case, A, case.arguments(A, feat=8))
