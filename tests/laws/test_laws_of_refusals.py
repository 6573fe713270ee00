"""What every operation refuses, by the rows of the table: the error names argument and mend."""

import re

import ml_dtypes
import numpy as np
import pytest
from laws.cases import CASES
from laws.options import OPTIONS
from op_cases import put

from sparsefmt import COO, Graph, SparseFmtError, ops
from sparsefmt.errors import DtypeError, FormatError, ShapeError, UnsupportedError
from sparsefmt.ops.engine.table import find, functions

F16, F32, F64 = np.float16, np.float32, np.float64
#: Of each function the call with most arguments.
FULL = {case.function: case for case in sorted(CASES, key=lambda c: len(c.shapes)) if case.oracle}
EXPLAINED = {function: name for name, function in functions().items()}
AXES = {"rows": "row", "cols": "column"}
ENDS = {"rows": "target", "cols": "source", "entries": "stored entry"}


def each_call(chosen=lambda case: True):
    """Parametrise by the full calls of which this holds."""
    cases = [case for case in FULL.values() if chosen(case)]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.function.__name__)


def named(case, name):
    """Return what the table says of an argument."""
    return find(case.rows[0] if case.rows else case.name.split()[0]).named[name]


def given(case, dtype=F32):
    A = case.matrix(dtype)
    return A, case.arguments(A, dtype, feat=4)


def explained(case, A, every):
    """Explain a call; arguments by position as far as there are some, as ``op`` is one too."""
    head, every = [], dict(every)
    for name, parameter in [*case.parameters.items()][1:]:
        if name not in every or parameter.kind is parameter.KEYWORD_ONLY:
            break
        head.append(every.pop(name))
    return ops.explain(EXPLAINED[case.function], A, *head, **every)


def refused(case, A, args, error, text, **options):
    """Refused by the operation, and by ``explain`` before anything runs."""
    calls = [lambda: case.run(A, args, **options)]
    if case.function in EXPLAINED:
        calls.append(lambda: explained(case, A, {**args, **case.options, **options}))
    for call in calls:
        with pytest.raises(error, match=f"(?s){text}") as caught:
            call()
        assert isinstance(caught.value, SparseFmtError)


def of_another_size(case, name, A):
    """Return the text about an argument with one row too many."""
    arg, axis = named(case, name), case.shapes[name][0]
    n = {"rows": A.n_rows, "cols": A.n_cols, "entries": A.nnz}.get(axis)
    return {
        "features": rf"^{name} has \d+ rows but A has {n} {AXES.get(axis)}s: {name} needs one row",
        "factor": rf"^{name} has shape .*: give \({n},\), one factor per {AXES.get(axis)} of A",
        "entries": f"^{name} has shape .* but A stores {n} entries: give",
        "scores": rf"^{name} has shape .*: give \({n}, .*one score per {ENDS.get(axis)}",
        "vectors": f"^{name} has shape .*: give .*, one vector per head",
    }[arg.check]


def tensor_of(v):
    """Return an array as a tensor, whose products would be arrays."""
    return pytest.importorskip("torch").as_tensor(v)


#: What is wrong with an array: the array, the error, and the text behind its name.
FAULTS = {
    "integers": (lambda v: v.astype(int), DtypeError, ".dtype is int64: values are float16"),
    "bools": (lambda v: v > 0, DtypeError, ".dtype is bool: values are float16"),
    "complex": (lambda v: v + 1j, DtypeError, ".dtype is complex"),
    "objects": (lambda v: v.astype(object), DtypeError, " holds Python objects"),
    "masked": (lambda v: np.ma.array(v), UnsupportedError, " is a masked array: fill it"),
    "sparse": (lambda v: COO([0], [0], shape=(1, 1)), DtypeError, " is a COO: give a dense array"),
    "tensor": (lambda v: tensor_of(v), DtypeError, r" is a torch.Tensor: sparsefmt.autograd has "),
    "number": (lambda v: 3.0, ShapeError, r" (is a single float64, of|has) shape \(\)"),
    "none": (lambda v: None, DtypeError, " is None: give an array"),
    "axes": (lambda v: v[..., None, None, None], ShapeError, " has shape"),
    "size": (lambda v: np.concatenate([v, v[:1]]), ShapeError, ""),
    "wider": (lambda v: v.astype(F64), DtypeError, r" is float64 but \w+ is float32: cast one, "),
    "narrower": (lambda v: v.astype(F16), DtypeError, r" is float16 but \w+ is float32: cast one"),
    "unlike": (lambda v: np.concatenate([v, v], -1), ShapeError, " has"),
}
DENSE = [
    pytest.param(case, name, fault, id=f"{case.function.__name__}-{name}-{fault}")
    for case in FULL.values()
    for name in case.shapes
    if name != case.balanced
    for fault in FAULTS
    if not (fault == "none" and named(case, name).optional)
    and not (fault in ("wider", "narrower", "unlike") and not named(case, name).like)
    and not (fault == "unlike" and named(case, name).check != "features")
]


@pytest.mark.parametrize(("case", "name", "fault"), DENSE)
def test_a_wrong_array_is_refused(case, name, fault):
    make, error, text = FAULTS[fault]
    A, args = given(case)
    text = of_another_size(case, name, A) if fault == "size" else f"^{name}{text}"
    refused(case, A, {**args, name: make(args[name])}, error, text)


@each_call()
def test_two_kinds_of_halves_do_not_fit(case):
    A, args = given(case, F16)
    for name, value in args.items():
        if name != case.balanced and named(case, name).like:
            wrong = {**args, name: value.astype(ml_dtypes.bfloat16)}
            refused(case, A, wrong, DtypeError, rf"^{name} is bfloat16 but \w+ is float16")


@each_call(lambda case: case.weighted)
def test_values_of_the_matrix_have_the_dtype_of_the_features(case):
    A, args = given(case)
    args = {name: value.astype(F64) for name, value in args.items()}
    text = r"(A.data is float32 but \w+ is float64|\w+ is float64 but A is float32): cast"
    refused(case, A, args, DtypeError, text)


@each_call(lambda case: case.balanced)
def test_wrong_row_balanced_features_are_refused(case):
    A, args = given(case)
    name = case.balanced
    for wrong, error, text in (
        (args[name].toarray(), DtypeError, f"{name} is a ndarray: give a CBSR|"),
        (A, DtypeError, f"{name} is a CSR: give a (CBSR|dense array)"),
        (args[name][:9], ShapeError, f"{name} has 9 rows but A has 45 columns: {name} needs one"),
    ):
        if case.function is ops.sddmm and isinstance(wrong, np.ndarray):
            continue  # which takes dense features too
        refused(case, A, {**args, name: wrong}, error, text)


@each_call()
def test_what_is_no_matrix_is_refused(case):
    A, args = given(case)
    for wrong, text in (
        (np.eye(3), "A is a ndarray: give a sparsefmt format"),
        (None, "A is a NoneType: give a sparsefmt format"),
        (Graph(A), "A is a Graph: give one of its formats"),
    ):
        refused(case, wrong, args, DtypeError, text)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, id=f"{case.function.__name__}-{name}")
        for case in FULL.values()
        for name in case.parameters
        if name in OPTIONS
    ],
)
def test_wrong_options_are_refused(case, name):
    A, args = given(case)
    for value, error, text in OPTIONS[name]:
        every = {**args, **case.options, name: value}
        calls = [lambda every=every: case.function(A, **every)]
        if case.function in EXPLAINED and name != "order":
            calls.append(lambda every=every: explained(case, A, every))
        for call in calls:
            with pytest.raises(error, match=f"(?s)^{name} is .*{re.escape(text)}"):
                call()


@each_call(lambda case: "self_loops" in case.parameters)
def test_a_rectangle_has_no_loops(case):
    case = next(c for c in CASES if c.function is case.function and not c.square)
    A, args = given(case)
    text = (
        r"self_loops is True but A has shape \(60, 45\): only a square matrix has loops, leave it"
    )
    refused(case, A, args, ShapeError, text, self_loops=True)


OUT = {
    "shape": (lambda y: y[..., :-1].copy(), ShapeError, r"out has shape .*: the result has \("),
    "dtype": (lambda y: y.astype(F64), DtypeError, "out is float64: the result is float32"),
    "list": (lambda y: [[0.0]], DtypeError, "out is a list: give a NumPy or CuPy array"),
    "strided": (lambda y: np.stack([y, y], -1)[..., 0], FormatError, "out is not C-contiguous"),
    "turned": (lambda y: y[::-1], FormatError, "out is not C-contiguous: give a fresh array"),
    "unaligned": (lambda y: late(y), FormatError, "out is not aligned to its dtype: give a fresh"),
    "read-only": (lambda y: read_only(y), FormatError, "out is read-only: give a writeable array"),
}


def late(y):
    memory = np.zeros(y.nbytes + 1, np.uint8)
    return memory[1:].view(y.dtype).reshape(y.shape)


def read_only(y):
    y.flags.writeable = False
    return y


@pytest.mark.parametrize("fault", OUT)
@each_call(lambda case: "out" in case.parameters)
def test_a_wrong_out_is_refused(case, fault):
    make, error, text = OUT[fault]
    A, args = given(case)
    refused(case, A, args, error, text, out=make(np.zeros_like(case.run(A, args)[0])))


@each_call(lambda case: "out" in case.parameters)
def test_a_refused_or_explained_call_leaves_out_alone(xp, case):
    A, args = given(case)
    there = {name: put(xp, value) for name, value in args.items()}
    out = case.run(put(xp, A), there)[0]
    out[...] = 7
    first = next(name for name in args if name != case.balanced)
    with pytest.raises(ShapeError):
        case.run(put(xp, A), {**there, first: xp.zeros(3, np.float32)}, out=out)
    if case.function in EXPLAINED:
        explanation = explained(case, put(xp, A), {**there, **case.options, "out": out})
        assert explanation.chosen.name
        if xp is np:
            assert "the arrays are on the CPU" in str(explanation)
    assert bool((out == 7).all())


@pytest.mark.grid  # loops of float64, which other tests of the rooms compile
@each_call()
def test_lists_go_where_the_matrix_is(xp, case):
    """As float64, without a copy of the matrix; values of another dtype are refused."""
    A = case.matrix(F64)
    args = case.arguments(A, F64, feat=4)
    lists = {n: v.tolist() if n != case.balanced else put(xp, v) for n, v in args.items()}
    there = {n: put(xp, v) for n, v in args.items()}
    for one, other in zip(case.run(put(xp, A), lists), case.run(put(xp, A), there), strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype == F64
        assert one.shape == other.shape


@each_call()
def test_numbers_of_numpy_are_numbers(case):
    kinds = {bool: np.bool_, int: np.int64, float: np.float64, str: str, type(None): lambda v: v}
    A, args = given(case)
    options = {name: kinds[type(value)](value) for name, value in case.options.items()}
    results = case.function(A, **args, **options), case.function(A, **args, **case.options)
    first, second = (r if isinstance(r, tuple) else (r,) for r in results)
    for one, other in zip(first, second, strict=True):
        assert one is other or (one == other if hasattr(one, "format") else (one == other).all())
