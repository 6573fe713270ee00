"""What every operation must satisfy on NumPy and CuPy, once for each row of the table."""

import math
from dataclasses import replace

import ml_dtypes
import numba
import numpy as np
import pytest
from laws.cases import CASES, MASK, NAMED, NOT_REPEATED, TORCH_ALONE, VARIANTS, K
from laws.checks import LAYOUTS, SHORT_ROWS, all_equal, arrays_of, check, guarded_memory, placed
from op_cases import DTYPES, FORMATS, KINDS, LONG_ROWS, ROW_LENGTHS, intact, moved, name_of, put

from sparsefmt import CSR, ops
from sparsefmt.errors import DeviceError, FormatError
from sparsefmt.ops.engine.call import question
from sparsefmt.ops.engine.table import find, operations
from sparsefmt.testing import assert_close

pytestmark = pytest.mark.usefixtures("one_thread")

#: Features: none, one, odd, aligned to a vector or not, and more than a team of lanes reads.
FEATS = [0, 1, 7, 16, 33, 64, 129]
REPLAYS = 100
#: The others are of float32's loops and kernels, and the oracle has each dtype.
ALL_DTYPES = [
    dtype if dtype is np.float32 else pytest.param(dtype, marks=pytest.mark.grid)
    for dtype in DTYPES
]
ALL_INDEX_DTYPES = [np.int32, pytest.param(np.int64, marks=pytest.mark.grid)]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_oracle = pytest.mark.parametrize("case", [c for c in CASES if c.oracle], ids=str)
every_function = pytest.mark.parametrize(
    "case", [c for c in CASES if c.oracle and c.name not in VARIANTS], ids=str
)
every_dtype = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)


def repeated(case):
    """Return options with which results repeat."""
    return {"deterministic": True} if case.function is ops.sspmm else {}


def test_every_row_has_a_case():
    rows = {row for case in CASES for row in case.rows or (case.name,)}
    names = {op.name for op in operations()} | {"spmm_sampled_dx"}  # which autograd adds
    assert not rows & (TORCH_ALONE | NOT_REPEATED)
    assert rows | TORCH_ALONE | NOT_REPEATED == names


class Listener:
    """A question that notes the rows which are called, and lets all run."""

    def __init__(self):
        self.rows = set()

    def __bool__(self):
        return False  # it takes no remarks

    def runs(self, row, *args, **options):
        self.rows.add(row.name)
        return True


@every_case
def test_a_case_runs_its_rows(xp, case):
    A, args = placed(xp, case)
    listener = Listener()
    token = question.set(listener)
    try:
        case.run(A, args)
    finally:
        question.reset(token)
    assert listener.rows >= set(case.rows or (case.name,))


@pytest.mark.where(lambda case, feat: feat >= K or not case.balanced)  # MaxK keeps one or more
@pytest.mark.covering("feat", "case", one_in=2)
@pytest.mark.parametrize("feat", FEATS)
@every_dtype
@every_oracle
def test_every_dtype_and_width(xp, case, dtype, feat):
    A = case.matrix(dtype)
    check(xp, case, A, case.arguments(A, dtype, feat=feat))


@pytest.mark.covering("kind", "format", "case", one_in=4)
@pytest.mark.parametrize("index_dtype", ALL_INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
@every_function
def test_every_kind_of_graph_and_format(xp, case, format, kind, index_dtype):
    A = case.matrix(np.float32, kind, index_dtype=index_dtype, format=format)
    check(xp, case, A, case.arguments(A, feat=6))


@pytest.mark.covering("lengths", "case", one_in=2)
@pytest.mark.parametrize("lengths", ROW_LENGTHS)
@every_dtype
@every_function
def test_rows_and_columns_end_anywhere(xp, case, dtype, lengths):
    for A in (case.matrix(dtype, lengths), case.matrix(dtype, lengths).T.asformat(case.format)):
        check(xp, case, A, case.arguments(A, dtype, feat=10))


@pytest.mark.covering("of_columns", "case", one_in=2)
@pytest.mark.parametrize("of_columns", [False, True])
@every_dtype
@every_function
def test_rows_or_columns_that_many_blocks_share(xp, case, dtype, of_columns):
    """Over 10 000 entries."""
    A = case.matrix(dtype, "long")
    A = A.T.asformat(case.format) if of_columns else A
    check(xp, case, A, case.arguments(A, dtype, feat=8))


def rows_of_equals(case, count, dtype, feat):
    """Return a matrix with ``count`` equal entries, all in row 0 and column 1, and arguments."""
    ptr, indices = np.array([0, count, count], np.int32), np.ones(count, np.int32)
    data = np.full(count, 0.05, dtype) if case.weighted else None
    A = CSR(ptr, indices, data, shape=(2, 2)).asformat(case.format)
    args = case.arguments(A, dtype, feat=feat)
    for arg in args.values():
        arrays_of(arg)[-1].fill(dtype(0.05))
    return A, args


long_counts = pytest.mark.parametrize("count", [10**6, pytest.param(10**7, marks=pytest.mark.grid)])


@pytest.mark.where(lambda case: case.function is not ops.spmm_sampled)  # a sample is no such
@pytest.mark.where(lambda case: "self_loops" not in case.options)  # function, nor a loop more
@long_counts
@pytest.mark.parametrize("feat", [4, 6], ids=["small", "compiled"])
@every_dtype
@every_function
def test_long_rows_round_like_short_ones(case, dtype, feat, count):
    """Errors on the CPU grow as the logarithm of a row's length, and not as its length.

    In the number of equal entries results are ``a + b n``, or ``a / n``.
    """
    options = {name: value for name, value in case.options.items() if name not in MASK}
    case, few, results = replace(case.with_heads((1,)), options=options), 8, []
    info = ml_dtypes.finfo(dtype)
    for n in (few, 2 * few):
        results.append(case.expected(*rows_of_equals(case, n, dtype, feat)))
    A, args = rows_of_equals(case, count, dtype, feat)
    for result, (one, bound), (two, _) in zip(case.run(A, args), *results, strict=True):
        one, bound, two = (a[:2].astype(np.float64) for a in (one, bound, two))
        exact = one + (two - one) * (count / few - 1)
        exact = np.where(np.isclose(two, one / 2, rtol=1e-12), one * few / count, exact)
        sure = abs(one) > bound  # sums of what cancels are not compared
        sure &= (abs(exact) >= info.smallest_normal) & (abs(exact) <= info.max)
        error = abs(result[:2].astype(np.float64) - exact)
        assert (error <= math.log2(count) * info.eps * abs(exact))[sure].all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("feat", [4, 6], ids=["small", "compiled"])
@every_function
def test_long_rows_are_infinite_where_short_ones_are(case, feat, value):
    """One of the features, at each entry."""
    kept = {name: value for name, value in case.options.items() if name not in MASK}
    case, signs = replace(case, options=kept), []
    for count in (400, 3000):
        A, args = rows_of_equals(case, count, np.float32, feat)
        for arg in args.values():
            features = arrays_of(arg)[-1]
            if features.ndim > 1:
                features[..., 1] = value
                break
        with np.errstate(all="ignore"):
            results = case.run(A, args)
        signs.append([np.where(np.isfinite(a), 0, np.sign(a)) for a in results])
    for short, long in zip(*signs, strict=True):
        np.testing.assert_array_equal(short[:2], long[:2])


@long_counts
@every_dtype
def test_gradients_of_attention_values_add_up_over_a_long_row(dtype, count):
    """The terms of that of ``att`` have one sign: features as well as their scores differ in it."""
    case = replace(NAMED["gatv2_backward"].with_heads((1,)), options={})
    results = []
    for n in (8, count):
        ptr, indices = np.array([0, n, n], np.int32), np.arange(n, dtype=np.int32) % 2
        A = CSR(ptr, indices, None, shape=(2, 2))
        args = case.arguments(A, dtype, feat=4)
        for name, arg in args.items():
            arg.fill(dtype(0.1))
            if name == "left":
                arg[:] = np.array([0.5, -0.5], dtype)[:, None, None]
        results.append(case.expected(A, args) if n == 8 else case.run(A, args))
    bound = math.log2(count) * ml_dtypes.finfo(dtype).eps
    for (exact, _), result in zip(*results, strict=True):
        assert (abs(result.astype(np.float64) - exact) <= bound * abs(exact)).all()


def test_a_row_of_many_ones_is_counted():
    """Over 2**24 of them float32 has no next number."""
    A, args = rows_of_equals(NAMED["spmm unweighted"], 2**25, np.float32, 1)
    assert ops.spmm(A, np.ones_like(args["X"]))[0] == 2**25
    assert ops.spmm_sampled(A, np.ones_like(args["X"]), width=2**25 - 2)[0] == 2**25 - 2


@pytest.mark.covering("layout", "case", one_in=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
@every_function
def test_arrays_may_lie_anywhere(xp, case, dtype, layout):
    """Those of the matrix too: not aligned to 16 bytes."""
    A = case.matrix(dtype)
    for feat in (6, 16):
        args = case.arguments(A, dtype, feat=feat)
        matrix = moved if A.format == "csr" else put
        check(xp, case, A, args, place=LAYOUTS[layout], matrix=matrix)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=name_of)
@every_oracle
def test_factors_and_scores_may_be_float32_beside_two_bytes(xp, case, dtype):
    arg_of = find(case.rows[0] if case.rows else case.name.split()[0]).named
    wide = {name for name in case.shapes if name in arg_of and arg_of[name].widens}
    A = case.matrix(dtype)
    args = case.arguments(A, dtype, feat=8)
    if wide and wide < set(args):
        both = case.arguments(A, np.float32, feat=8)
        args = {name: both[name] if name in wide else value for name, value in args.items()}
        check(xp, case, A, dict(sorted(args.items(), key=lambda one: one[0] in wide)))


@pytest.mark.covering("feat", "case", one_in=2)
@pytest.mark.parametrize("feat", [7, 32])
@every_dtype
@every_oracle
def test_everything_is_written_and_nothing_beside_it(xp, monkeypatch, case, dtype, feat):
    """What an operation allocates, its results among it, is full of NaN between guard bands."""
    A = case.matrix(dtype)
    args = case.arguments(A, dtype, feat=feat)
    expected = case.expected(A, args)
    B, there = put(xp, A), {name: put(xp, value) for name, value in args.items()}
    case.run(B, there)  # which compiles, and builds what is built once
    with monkeypatch.context() as patch:
        buffers = guarded_memory(xp, patch)
        results = case.run(B, there)
    assert all(intact(xp, buffer) for buffer in buffers)
    for result, (exact, bound) in zip(results, expected, strict=True):
        assert_close(result, exact, bound=bound)


@every_case
def test_inputs_are_not_changed(xp, case):
    A, args = placed(xp, case)
    before = [a.copy() for a in (A, *args.values())]
    case.run(A, args)
    assert all_equal(xp, (A, *args.values()), before)


#: numba compiles each loop anew for arrays that are read-only.
FEW = ("spmm sum", "sddmm", "maxk", "edge_softmax of 2 axes", "gat")


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.grid] * (c.name not in FEW), id=c.name) for c in CASES],
)
def test_inputs_may_be_read_only(case):
    A, args = placed(np, case)
    expected = case.run(A, args)
    for arg in args.values():
        for array in arrays_of(arg):
            array.flags.writeable = False
    assert all_equal(np, case.run(A, args), expected)


@pytest.mark.where(lambda case: case.is_mixed and not case.reads_all)
@every_case
def test_what_no_entry_reads_reaches_nothing(xp, case):
    """NaN of columns that none names, and of rows without entries, changes no bit."""
    A = case.matrix(np.float32, "isolated rows", format="coo")
    A = type(A)(A.row, A.col // 2, A.data, shape=A.shape).asformat(case.format)
    used = {"rows": A.tocsr().lengths > 0, "cols": np.zeros(A.n_cols, bool)}
    used["cols"][A.tocsr().indices] = True
    args = case.arguments(A, feat=12)
    lost = {name: value.copy() for name, value in args.items()}
    for name, value in lost.items():
        if case.shapes[name][0] in used:
            arrays_of(value)[-1][~used[case.shapes[name][0]]] = np.nan
    B = put(xp, A)
    first, second = (
        case.run(B, {name: put(xp, value) for name, value in each.items()}, **repeated(case))
        for each in (args, lost)
    )
    for place, (a, b) in enumerate(zip(first, second, strict=True)):
        if case.function is ops.gat_backward and place:  # products with a vertex's own features
            here = xp.asarray(used["cols" if place == 1 else "rows"])
            a, b = a[here], b[here]
        assert all_equal(xp, [a], [b]) or (case.atomics and bool(xp.isfinite(b).all()))


#: The arrays of column indices, and where there are none.
OF_COLUMNS = {"csr": "indices", "csc": "indices", "coo": "col"}


@pytest.mark.parametrize("case", [c for c in CASES if "out" in c.parameters], ids=str)
def test_out_may_overlap_no_input(xp, case):
    """Neither an argument nor an array of the matrix."""
    A, args = placed(xp, case, feat=8)
    result = case.run(A, args)[0]
    arrays = {name: value for name, value in args.items() if name != case.balanced}
    if A.format in OF_COLUMNS:
        arrays["A"] = getattr(A, OF_COLUMNS[A.format])
    for name, array in arrays.items():
        buffer = xp.zeros(result.nbytes + array.nbytes, np.uint8)
        inside = buffer[: array.nbytes].view(array.dtype).reshape(array.shape)
        inside[...] = array
        out = buffer[: result.nbytes].view(result.dtype).reshape(result.shape)
        B = replace(A, **{OF_COLUMNS[A.format]: inside}) if name == "A" else A
        with pytest.raises(FormatError, match="out overlaps an input: give an array of its own"):
            case.run(B, args if name == "A" else {**args, name: inside}, out=out)


@pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(c, n, id=f"{c}-{n}") for c in CASES if c.oracle for n in c.linear],
)
def test_it_is_linear(xp, case, name):
    A = case.matrix()
    args, others = (case.arguments(A, feat=9, seed=seed) for seed in (0, 1))
    sums = {**args, name: args[name] - np.float32(3) * others[name]}
    B, results = put(xp, A), []
    for one in (args, {**args, name: others[name]}, sums):
        results.append(case.run(B, {n: put(xp, v) for n, v in one.items()}))
    terms = A.lengths.max() + A.T.tocsr().lengths.max() + 9
    sizes = [np.abs(exact).max(initial=1) for exact, _ in case.expected(A, args)]
    for a, b, both, size in zip(*results, sizes, strict=True):
        bound = 8 * terms * np.finfo(np.float32).eps * size
        exact = a - 3 * b
        assert_close(both, exact if xp is np else exact.get(), bound=np.full(both.shape, bound))


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.oracle and c.shapes and not c.numbered and not c.reads_all],
    ids=str,
)
def test_numbers_of_vertices_do_not_matter(xp, case):
    A = case.matrix(format="coo")
    args = case.arguments(A, feat=9)
    rng = np.random.default_rng(5)
    places = {"rows": rng.permutation(A.n_rows), "cols": rng.permutation(A.n_cols)}
    back = {axis: np.argsort(place) for axis, place in places.items()}
    row = back["rows"][A.row].astype(A.row.dtype)
    moved_to = type(A)(row, back["cols"][A.col].astype(row.dtype), A.data, shape=A.shape)
    named = {n: v[places[case.shapes[n][0]]] if case.shapes[n][0] in places else v
             for n, v in args.items()}  # fmt: skip
    check(xp, case, moved_to, named)
    expected = case.expected(A, args)
    for (there, _), (here, bound) in zip(case.expected(moved_to, named), expected, strict=True):
        for axis in ("rows", "cols"):
            if here.shape[0] == A.shape[axis == "cols"]:
                assert_close(there, here[places[axis]], bound=bound[places[axis]])


@pytest.mark.parametrize("case", [c for c in CASES if "transposed" in c.parameters], ids=str)
def test_a_transpose_that_is_there_already_changes_nothing(xp, case):
    A, args = placed(xp, case)
    again = case.run(A, args, transposed=ops.transpose(A))
    if not case.name.startswith("sspmm"):  # by atomics on a GPU without one
        assert all_equal(xp, case.run(A, args), again)
    elif xp is np:
        assert_close(case.run(A, args)[0], again[0], bound=np.full(again[0].shape, 1e-5))


@pytest.mark.where(lambda case, xp: xp == "numpy" or not case.atomics)
@every_case
@every_dtype
def test_results_repeat_bit_for_bit(xp, case, dtype):
    """On the CPU with any number of threads too; rows are cut among blocks."""
    A, args = placed(xp, case, dtype, LONG_ROWS)
    first = case.run(A, args, **repeated(case))
    assert first
    try:
        for count in (1, 1, *[numba.config.NUMBA_NUM_THREADS] * 3):
            numba.set_num_threads(count)
            assert all_equal(xp, case.run(A, args, **repeated(case)), first)
    finally:
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


SUMS = ("message_aggregate_backward add", "message_aggregate_backward copy_edge")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case.is_mixed], ids=str)
def test_mixed_devices_are_refused(case):
    import cupy

    A = case.matrix(np.float32, SHORT_ROWS)
    args = case.arguments(A)
    there = {name: put(cupy, value) for name, value in args.items()}
    for mixed in ((put(cupy, A), args), (A, there)):
        with pytest.raises(DeviceError, match="on cuda:0"):
            case.run(*mixed)
    for name, value in args.items():
        if case.name in SUMS and name in ("X", "E"):
            continue  # which their gradients do not read
        with pytest.raises(DeviceError, match=f"{name} is on cpu but A is on cuda:0"):
            case.run(put(cupy, A), {**there, name: value})


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if not c.converts], ids=str)
def test_work_runs_on_the_current_stream_and_can_be_captured(case):
    """The first call may read sizes on the host, and cut rows into chunks."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    options = repeated(case)
    with stream:
        A, args = placed(cupy, case)
        if "transposed" in case.parameters:
            options["transposed"] = ops.transpose(A)
        for _ in range(2):
            case.run(A, args, **options)
        stream.synchronize()
        stream.begin_capture()
        captured = case.run(A, args, **options)
        graph = stream.end_capture()
        for seed in range(REPLAYS):
            fresh = case.arguments(case.matrix(np.float32, SHORT_ROWS), seed=seed)
            for name, value in fresh.items():
                for there, values in zip(arrays_of(args[name]), arrays_of(value), strict=True):
                    there.set(values)
            for result in captured:
                result.fill(np.nan if result.dtype.kind == "f" else 0)
            graph.launch()
            if seed % 10 == 0:
                stream.synchronize()
                again = case.run(A, args, **options)
                if case.atomics:
                    cupy.testing.assert_allclose(captured[0], again[0], rtol=1e-3, atol=1e-4)
                else:
                    assert all_equal(cupy, captured, again)
