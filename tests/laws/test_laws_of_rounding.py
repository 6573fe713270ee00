"""Operations that may round float32 rows to bfloat16 on a GPU, against oracles of rounded rows."""

from dataclasses import replace

import numpy as np
import pytest
from laws.cases import CASES, K, by
from laws.checks import LAYOUTS, check
from op_cases import INDEX_DTYPES, KINDS, ROW_LENGTHS, moved, name_of, put, rounded, rows_of

from sparsefmt import CBSR, UnsupportedError, ops
from sparsefmt.ops.attention import oracle as attention
from sparsefmt.ops.engine.table import functions
from sparsefmt.ops.matmul import cuda as matmul_cuda

F32 = np.dtype(np.float32)
#: Loads of 16, 8, 4 and single values, rows of one slice and of many.
FEATS = [1, 2, 4, 7, 8, 12, 16, 24, 33, 64, 66, 72, 128, 200, 257]
EXPLAINED = {function: name for name, function in functions().items()}
#: What is rounded of the arguments of a function.
ROUNDED = {ops.spmm: "X", ops.gat: "H", ops.sspmm: "dY", ops.gat_backward: ""}
GRADIENTS = "H", "el", "er", "grad"


def of_rounded(case):
    """Return a case whose rows may be rounded, with the oracle of rows that are."""
    name = ROUNDED[case.function]

    def oracle(A, *, precision, **args):
        if name:
            exact, bounds = case.oracle(A, **{**args, name: rounded(args[name])})
        else:  # rows are gathered rounded, and multiplied with as they are
            gathered = rounded(args["H"]), rounded(args["grad"])
            order = (0, 1, 2, 3)[: 3 + ("edge_scores" in args)]
            functions = (
                lambda *a, **o: attention.gat_backward_oracle(*a, gathered=gathered, **o),
                attention.gat_backward_bound,
            )
            exact, bounds = by(*functions, *GRADIENTS, order=order)(A, **args)
        return exact, [1.02 * bound for bound in bounds]

    return replace(case, oracle=oracle, options={**case.options, "precision": "bf16"})


CHOSEN = [
    of_rounded(case)
    for case in CASES
    if case.function in ROUNDED
    and not case.atomics
    and case.options.get("reduce") != "max"
    and not {"max", "min", "heads"} & set(case.name.split())
    and case.format == "csr"
]
every_case = pytest.mark.parametrize("case", CHOSEN, ids=str)


def on_gpu(test):
    fixtures = pytest.mark.usefixtures("rounds_always", "one_thread")
    return every_case(pytest.mark.gpu(fixtures(test)))


def check_rounded(case, A, feat, **places):
    import cupy

    args = case.arguments(A, F32, feat=max(feat, K) if case.balanced else feat)
    there = {name: put(cupy, value) for name, value in args.items()}
    chosen = ops.explain(EXPLAINED[case.function], put(cupy, A), **there, **case.options).chosen
    assert chosen.name.endswith("_rounded")
    check(cupy, case, A, args, **places)


@pytest.mark.parametrize("feat", FEATS)
@on_gpu
def test_every_width(case, feat):
    check_rounded(case, case.matrix(F32), feat)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", [*KINDS, *ROW_LENGTHS, "long"])
@on_gpu
def test_every_kind_of_graph_and_length_of_rows(case, kind, index_dtype):
    A = case.matrix(F32, kind, index_dtype=index_dtype)
    for B in (A, A.T.tocsr()):
        for feat in (19, 64):
            check_rounded(case, B, feat)


@pytest.mark.parametrize("feat", [40, 72, 200])
@on_gpu
def test_wide_slices(monkeypatch, case, feat):
    for limit in ("DENSE_ROWS", "SMALL_BYTES"):
        monkeypatch.setattr(matmul_cuda, limit, -1)
    for kind in (*ROW_LENGTHS, "long"):
        check_rounded(case, case.matrix(F32, kind), feat)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_gpu
def test_arrays_may_lie_anywhere(case, layout):
    for feat in (8, 33):
        check_rounded(case, case.matrix(F32), feat, place=LAYOUTS[layout], matrix=moved)


@pytest.mark.where(lambda case: "out" in case.parameters)
@pytest.mark.parametrize("offset", [1, 2, 4])
@on_gpu
def test_results_may_begin_anywhere(case, offset):
    import cupy

    A = put(cupy, case.matrix(F32))
    args = case.arguments(case.matrix(F32), F32, feat=64)
    there = {name: put(cupy, value) for name, value in args.items()}
    (expected,) = case.run(A, there)
    out = cupy.full(offset + expected.size, np.nan, F32)[offset:].reshape(expected.shape)
    case.run(A, there, out=out)
    cupy.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@every_case
def test_a_permission_is_taken_where_it_pays(case):
    import cupy

    def explained(length=8, feat=64, dtype=F32, **precision):
        A = rows_of([length] * 30, 30, dtype if case.weighted else None, np.int32)
        args = case.arguments(A, dtype, feat=feat // 4 if case.is_headed else feat)
        options = {n: v for n, v in case.options.items() if n != "precision"} | precision
        there = {name: put(cupy, value) for name, value in args.items()}
        return ops.explain(EXPLAINED[case.function], put(cupy, A), **there, **options)

    allowed = {"precision": "bf16"}
    assert explained(**allowed).chosen.name.endswith("_rounded")
    for found, reason in (
        (explained(length=1, **allowed), "a row is gathered less than 8 times on average"),
        (explained(feat=63, **allowed), "rows have less than 64 features"),
        (explained(), 'allow bfloat16 with precision="bf16"'),
        (explained(precision="tf32"), 'allow bfloat16 with precision="bf16"'),
        (explained(dtype=np.float16), "only float32 is rounded"),
    ):
        assert not found.chosen.name.endswith("_rounded")
        assert reason in str(found)


@every_case
def test_on_a_cpu_nothing_is_rounded(case):
    A = case.matrix(F32)
    args = case.arguments(A, F32, feat=64)
    exact = replace(case, options={k: v for k, v in case.options.items() if k != "precision"})
    for one, other in zip(case.run(A, args), exact.run(A, args), strict=True):
        assert np.array_equal(one, other)
    explanation = ops.explain(EXPLAINED[case.function], A, **args, **case.options)
    assert "the arrays are on the CPU" in str(explanation)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", np.float64), ("half", np.float32)])
@every_case
def test_only_float32_is_rounded_and_by_known_words(case, precision, dtype):
    A = case.matrix(dtype)
    case = replace(case, options={**case.options, "precision": precision})
    args = case.arguments(A, dtype, feat=64)
    assert not case.balanced or isinstance(args[case.balanced], CBSR)
    with pytest.raises(UnsupportedError, match=f"^precision is .{precision}.*"):
        case.run(A, args)
