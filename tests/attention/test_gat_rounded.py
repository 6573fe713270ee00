"""Graph attention whose float32 rows may be rounded to bfloat16 before entries gather them."""

import numpy as np
import pytest
from laws.checks import check
from laws.test_laws_of_rounding import CHOSEN, check_rounded
from op_cases import put, rows_of
from test_attention import with_factors

from sparsefmt import ops

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


@pytest.mark.gpu
def test_a_permission_is_taken_where_it_pays():
    import cupy

    many, few = (rows_of([n] * 30, 30, None, np.int32) for n in (8, 1))

    def kernel(A, shape=(4, 16), dtype=F32, **options):
        H, scores = cupy.ones((30, *shape), dtype), cupy.ones((30, *shape[:-1]), dtype)
        given = put(cupy, A), H, scores, scores
        forward = ops.explain("gat", *given, **options)
        backward = ops.explain("gat_backward", *given, H, **options)
        assert forward.chosen.name.removeprefix("gat") == (
            backward.chosen.name.removeprefix("gat_backward")
        )
        return forward

    assert kernel(many, **BF16).chosen.name == "gat_csr_rounded"
    for found, reason in (
        (kernel(few, **BF16), "a row is gathered less than 8 times on average"),
        (kernel(many, (9, 7), **BF16), "rows have less than 64 features"),
        (kernel(many), 'allow bfloat16 with precision="bf16"'),
        (kernel(many, precision="tf32"), 'allow bfloat16 with precision="bf16"'),
        (kernel(many, dtype=np.float16), "only float32 is rounded"),
    ):
        assert found.chosen.name == "gat_csr_balanced"
        assert reason in str(found)
