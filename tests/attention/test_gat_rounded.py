"""Graph attention whose float32 rows may be rounded to bfloat16 before entries gather them."""

import numpy as np
import pytest
from op_cases import (
    features,
    in_order,
    intact,
    matrix,
    poisoned,
    put,
    rounded,
    rows_of,
)

import sparsefmt
from sparsefmt import ops
from sparsefmt.ops.attention.oracle import (
    gat_backward_bound,
    gat_backward_oracle,
    gat_bound,
    gat_oracle,
)
from sparsefmt.testing import assert_close

F32 = np.dtype(np.float32)
BF16 = {"precision": "bf16"}
#: Loads of 16 and 8 bytes and of single values; heads side by side, and slices of a head.
SHAPES = [
    *[((1,), 32), ((4,), 32), ((8,), 32), ((8,), 8), ((4,), 16), ((2,), 64), ((1,), 128)],
    *[((1,), 200), ((16,), 4), ((3,), 12), ((2,), 7), ((8,), 1), ((4,), 33), ((), 5), ((), 64)],
]
OPTIONS = [
    {},
    {"self_loops": True},
    {"edge_scores": True, "negative_slope": 0.5},
    {"edge_scores": True, "dropout": 0.25, "seed": -3, "self_loops": True},
]


def square(A):
    """The same entries, and a loop at every third vertex, twice at the first two."""
    coo, side = A.tocoo(), max(A.shape)
    loops = np.append(np.arange(0, side, 3), [0, min(1, side - 1)])
    row, col = (np.concatenate([a, loops.astype(a.dtype)]) for a in (coo.row, coo.col))
    return sparsefmt.COO(row, col, shape=(side, side)).tocsr()


def operands(A, heads, feat, options=None):
    """H, el, er, the gradient of the result, and the options, with edge scores if they ask."""
    n, m = A.shape
    H, grad = (features(size, (*heads, feat), F32, seed=size) for size in (m, n))
    el, er = (3 * features(size, heads, F32, seed=size + 1) for size in (m, n))
    options = dict(options or {})
    if options.get("edge_scores"):
        options["edge_scores"] = features(A.nnz, heads, F32, seed=7)
    return H, el, er, grad, options


def check(A, H, el, er, grad, options, *, offset=0):
    """Exactly the attention over rounded rows, up to float32's own rounding; and near the exact."""
    import cupy

    B, arrays = put(cupy, A), [put(cupy, a) for a in (H, el, er)]
    there = {k: put(cupy, v) if k == "edge_scores" else v for k, v in options.items()} | BF16
    shape = A.n_rows, *H.shape[1:]
    flat, buffer = poisoned(cupy, (offset + int(np.prod(shape)),), F32)
    out = flat[offset:].reshape(shape)
    assert ops.explain("gat", B, *arrays, **there).chosen.name == "gat_csr_rounded"
    assert ops.gat(B, *arrays, out=out, **there) is out
    near, bound = rounded(H), 1.02 * gat_bound(A, H, el, er, **options)
    assert_close(out, gat_oracle(A, near, el, er, **options), bound=bound)
    sizes = gat_oracle(A, np.abs(H), el, er, **options)
    assert_close(out, gat_oracle(A, H, el, er, **options), bound=bound + 2.0**-8 * sizes)
    assert intact(cupy, buffer)
    check_gradients(A, (B, *arrays, put(cupy, grad)), there, (H, el, er, grad), options)


def check_gradients(A, args, there, given, options):
    """The sums over columns of rounded gradients, and of rows as they are; and near the exact."""
    name = ops.explain("gat_backward", *args, **there).chosen.name
    assert name == "gat_backward_csr_rounded"
    H, _, _, grad = given
    gathered = rounded(H), rounded(grad)
    expected = gat_backward_oracle(A, *given, gathered=gathered, **options)
    bounds = gat_backward_bound(A, *given, **options)
    found = ops.gat_backward(*args, **there)
    for one, want, limit in zip(found, expected, bounds, strict=False):
        if one is not None:
            assert_close(one, want, bound=1.02 * limit)
    dH = gat_backward_oracle(A, *given, **options)[0]
    sizes = gat_backward_oracle(A, *given[:3], np.abs(grad), **options)[0]
    assert_close(found[0], dH, bound=bounds[0] + 2.0**-8 * sizes)


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
@pytest.mark.parametrize(("heads", "feat"), SHAPES)
def test_every_shape_of_features(heads, feat, options):
    A = matrix("power law", None, np.int32).tocsr()
    A = square(A) if options.get("self_loops") else A
    check(A, *operands(A, heads, feat, options))


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize("format", ["coo", "csc", "sgt"])
def test_other_formats_are_converted(format):
    import cupy

    A = matrix("power law", F32, np.int32).asformat(format)
    H, el, er, grad, options = operands(A, (2,), 8, OPTIONS[2])
    csr, perm = A.tocsr_with_perm()
    args = put(cupy, A), *(put(cupy, a) for a in (H, el, er))
    scores = put(cupy, options["edge_scores"])
    found = ops.gat(*args, **options | {"edge_scores": scores}, **BF16)
    expected = gat_oracle(csr, rounded(H), el, er, **in_order(options, perm))
    bound = gat_bound(csr, H, el, er, **in_order(options, perm))
    assert_close(found, expected, bound=1.02 * bound)
    assert len(ops.gat_backward(*args, put(cupy, grad), **BF16)) == 4


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
