"""Attention of every kind: numbers of heads, factors of scores, and scores far from zero."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws.cases import ATTENTION, ATTENTION_GRADIENTS, CASES, HEADS, PAIRS, by
from laws.checks import check, placed
from laws.test_laws_of_rounding import CHOSEN, check_rounded
from op_cases import DTYPES, name_of

from sparsefmt import ops
from sparsefmt.testing import csr

#: Graphs are small: waking another thread takes longer than they do.
pytestmark = pytest.mark.usefixtures("one_thread")

F16, BF16, F32, F64 = DTYPES
#: Heads and features, of which there may be none; () for features without an axis for heads.
SHAPES = [((1,), 32), ((4,), 32), ((2,), 7), ((1,), 128), ((3,), 40), ((8,), 1), ((), 5), ((), 16)]
SHAPES += [((1,), 300), ((2,), 513), ((1,), 0), ((0,), 8), ((), 0)]
FACTORS = [("negative_slope", value) for value in (-2, 0, 1, np.float32(3), 1e-30)]
FACTORS += [("scale", value) for value in (-1, 0, np.float32(0.5), 1e-30)]


def chosen(case, **options):
    """Return the options that an operation takes."""
    return {name: value for name, value in options.items() if name in case.parameters}


def of_keys(case):
    """Return a case of dot products whose values are the keys."""
    shapes = {name: shape for name, shape in case.shapes.items() if name != "values"}
    places = (0, 1, 4)[: 2 + bool(case.entries)]
    oracle = by(*ATTENTION, *PAIRS[:4])
    if "grad" in shapes:
        oracle = by(*ATTENTION_GRADIENTS, *PAIRS, order=places)
    options, entries = case.options | {"values": None}, (2,) * bool(case.entries)
    name = f"{case.name} of keys"
    return replace(case, name=name, shapes=shapes, oracle=oracle, options=options, entries=entries)


def with_factors(case):
    """Return a case whose scores have a slope or scale, and that draws another mask."""
    options = {**case.options, "self_loops": False}
    options |= chosen(case, negative_slope=-0.1, scale=-0.3, dropout=0.25, seed=-3)
    return replace(case, name=f"{case.name} with factors", options=options, square=False)


KINDS = [case for case in CASES if case.name.startswith(("gat", "dot_attention"))]
KINDS += [of_keys(case) for case in KINDS if case.name.startswith("dot")]
KINDS += [
    replace(
        case,
        name="gat_attention of edges",
        shapes={**case.shapes, "edge_scores": HEADS},
        options={"self_loops": True},
        square=True,
    )
    for case in KINDS
    if case.function is ops.gat_attention
]
OF_EDGES = [case for case in KINDS if "edge_scores" in case.shapes]
EVERY = KINDS + [with_factors(case) for case in OF_EDGES]
FAR = [case for case in KINDS if {"el", "edge_scores"} & {*case.shapes}]
PAIRWISE = [case for case in KINDS if "keys" in case.shapes or "left" in case.shapes]


@pytest.mark.covering("dtype", "feat", "case", one_in=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("heads", "feat"), SHAPES)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_dtype_and_shape_of_features(xp, case, heads, feat, dtype):
    case = case.with_heads(heads)
    A = case.matrix(dtype, "banded" if feat > 200 else "power law")
    check(xp, case, A, case.arguments(A, dtype, feat=feat))


@pytest.mark.parametrize(("name", "value"), FACTORS)
@pytest.mark.parametrize("case", OF_EDGES, ids=str)
def test_every_slope_and_scale(xp, case, name, value):
    case = replace(case, options=case.options | chosen(case, **{name: value}))
    A = case.matrix()
    if name in case.parameters:
        check(xp, case, A, case.arguments(A, feat=8))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shift", [-1e4, 0, 1e4])
@pytest.mark.parametrize("case", FAR, ids=str)
def test_scores_far_from_zero_overflow_nothing(xp, case, dtype, shift):
    A = case.matrix(dtype)
    args = case.arguments(A, dtype, feat=8)
    for name in ("edge_scores",) if "edge_scores" in args else ("el", "er"):
        scores = args[name].astype(F64)
        args[name] = (np.sign(scores) * 1e4 if shift == 0 else 4 * scores + shift).astype(dtype)
    check(xp, case, A, args)


@pytest.mark.parametrize("dtype", [F32, F64], ids=name_of)
@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_products_far_from_zero_overflow_nothing(xp, case, dtype):
    A = case.matrix(dtype)
    args = case.arguments(A, dtype, feat=8)
    far = {name: 100 * args[name] for name in ("queries", "keys", "left", "right") if name in args}
    case = replace(case, options=case.options | chosen(case, scale=1.0))
    check(xp, case, A, args | far)


@pytest.mark.parametrize("share", [0.0, 1e-12, 1 - 1e-12, 1 - 2.0**-40])
@pytest.mark.parametrize("case", [case for case in KINDS if "out" in case.parameters], ids=str)
def test_a_share_of_almost_all_or_nothing(xp, case, share):
    """One that rounds to 2**32 of 2**32 words drops all but the last of them."""
    A, args = placed(xp, case)
    options = [case.options | {"dropout": dropout, "seed": 1} for dropout in (share, 0.0)]
    first, plain = (replace(case, options=one).run(A, args)[0] for one in options)
    assert bool((first == (plain if share < 0.5 else 0)).all())


@pytest.mark.parametrize("case", [case for case in OF_EDGES if "grad" in case.shapes], ids=str)
def test_one_head_may_have_an_axis_or_none(xp, case):
    case = case.with_heads(())
    A, args = placed(xp, case, feat=8)
    small = [name for name in ("el", "er", "att", "edge_scores") if name in args]

    def headed(names):
        last = {"el", "er", "edge_scores"}
        axis = {name: value[:, None] if name in last else value[..., None, :]
                for name, value in args.items()}  # fmt: skip
        return {name: axis[name] if name in names else value for name, value in args.items()}

    whole = case.run(A, headed(args))
    for count in range(len(small) + 1):
        for names in combinations(small, count):
            inputs = headed(names)
            results = case.run(A, inputs)
            shapes = [value.shape for name, value in inputs.items() if name != "grad"]
            assert [result.shape for result in results] == shapes
            for result, same in zip(results, whole, strict=True):
                assert bool((result.ravel() == same.ravel()).all())


@pytest.mark.parametrize(
    "dtype", [F16, BF16, F32, pytest.param(F64, marks=pytest.mark.grid)], ids=name_of
)
@pytest.mark.parametrize("operation", ["gat", "gatv2", "dot"])
@given(data=st.data(), heads=st.sampled_from([(), (1,), (3,)]), feat=st.sampled_from([1, 5, 16]))
def test_any_graph_against_the_oracle(operation, dtype, data, heads, feat):
    cases = [case for case in KINDS if case.name.split("_")[0].split()[0] == operation]
    case, loops = data.draw(st.sampled_from(cases)), data.draw(st.booleans())
    A = data.draw(csr(weighted=False, rectangular=not loops, index_dtype=np.int32))
    options = chosen(
        case,
        dropout=data.draw(st.sampled_from([0.0, 0.3, 0.99])),
        seed=data.draw(st.integers(0, 2**32 - 1)),
        negative_slope=data.draw(st.sampled_from([0.2, 0.0, -1.0, 2.0])),
        scale=data.draw(st.sampled_from([None, 0.0, -1.0, 2.0])),
        self_loops=loops,
    )
    case = replace(case, options=case.options | options).with_heads(heads)
    check(np, case, A, case.arguments(A, dtype, feat=feat, seed=options.get("seed", 0)))


#: Loads of 16 and 8 bytes and of single values; heads side by side, and slices of a head.
SHAPES_ROUNDED = [
    *[((1,), 32), ((4,), 32), ((8,), 32), ((8,), 8), ((4,), 16), ((2,), 64), ((1,), 128)],
    *[((1,), 200), ((16,), 4), ((3,), 12), ((2,), 7), ((8,), 1), ((4,), 33), ((), 5), ((), 64)],
]
ROUNDED = [case for case in CHOSEN if case.name.startswith("gat")]
ROUNDED += [with_factors(case) for case in ROUNDED]
every_rounded = pytest.mark.parametrize("case", ROUNDED, ids=str)


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize(("heads", "feat"), SHAPES_ROUNDED)
@every_rounded
def test_every_shape_of_features_that_are_rounded(case, heads, feat):
    case = case.with_heads(heads)
    check_rounded(case, case.matrix(F32), feat)


@pytest.mark.gpu
@pytest.mark.usefixtures("rounds_always")
@pytest.mark.parametrize("format", ["coo", "csc", "sgt"])
@every_rounded
def test_other_formats_are_converted_and_rounded(case, format):
    import cupy

    A = case.matrix(F32, format=format)
    check(cupy, case, A, case.arguments(A, feat=8))
