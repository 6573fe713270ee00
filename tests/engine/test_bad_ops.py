"""What the operations refuse: the class of the error, and a text that says how to mend it."""

import importlib.util
import os
import warnings

import numpy as np
import pytest
from op_cases import DTYPES, features, matrix, name_of, put, run_apart

import sparsefmt
from sparsefmt import DtypeError, FormatError, ShapeError, UnsupportedError, ops

F32, F64 = np.float32, np.float64
A = matrix("power law", F32, np.int32).tocsr()  # 60 x 45, 600 entries
X, G = features(45, 4, F32), features(60, 4, F32)
X3, G3 = features(45, (2, 3), F32), features(60, (2, 3), F32)
S, S3 = features(600, (), F32), features(600, (3,), F32)
ARG = ops.spmm_arg(A, X)[1]
R, C = features(60, (), F32), features(45, (), F32)


def call(op, *args, **options):
    return op, args, options


#: A class of errors, the texts that have it, and the calls that are refused so.  What is wrong with
#: any argument of any function is in tests/laws.
CASES = {
    DtypeError: {
        "A is a ndarray": call("scale", np.eye(3)),
        r"^A.data is float32 but X is float64: cast one, "
        r"X.astype\(A.dtype\) or A.astype\(X.dty": call("spmm", A, X.astype(F64)),
        "^A.data is float32 but X is float64": call(
            "spmm_arg_backward", A, X.astype(F64), ARG, G.astype(F64)
        ),
        "costs is a int: give ops.Costs": call("spmm", A, X, costs=7),
        r"row_scale is float64 but X is float32: cast one, row_scale.astype\(X.dtype\)": call(
            "spmm", A, X, row_scale=R.astype(F64)
        ),
        "row is float64 but A.data is": call("scale", A, R.astype(F64)),
        "col.dtype is int64": call("scale", A, None, [1] * 45),
        "col is float64 but row is float32: cast one": call(
            "scale", A.with_data(None), R, C.astype(F64)
        ),
        r"out is a MaskedArray: give a NumPy or CuPy array, np.asarray\(out\) for instance": call(
            "spmm", A, X, out=np.ma.array(G)
        ),
        "out is a matrix: give": call("spmm", A, X, out=G.view(np.matrix)),
        "arg is int64 but A.indices is int32": call(
            "spmm_arg_backward", A, X, ARG.astype(np.int64), G
        ),
    },
    ShapeError: {
        r"X has shape \(45,\).*X\[:, None\]": call("spmm", A, X[:, 0]),
        r"give \(rows, feat\) or \(rows, heads, feat\)": call("spmm", A, X3[None]),
        r"X is a single float32, of shape \(\): give a matrix, one row per column of A\.$": call(
            "spmm", A, F32(1)
        ),
        "X is a single int64.* one row per row of A": call("sddmm", A, 3, X),
        "X is a single <U1": call("spmm", A, "X"),
        "X is no array": call("spmm", A, [[1.0], [1.0, 2.0]]),
        r"row_scale has shape \(\): give one factor per row of A, "
        r"np.full\(60, 2.0, X.dtype\)": call("spmm", A, X, row_scale=2.0),
        r"np.full\(45, 3, A.dtype\)": call("scale", A, None, 3),
        r"row has shape \(45,\): give \(60,\)": call("scale", A, C),
        "give both the same heads and feature width": call("sddmm", A, G3, X),
        r"grad has shape \(600, 3\) but probabilities \(600,\)": call(
            "edge_softmax_backward", A, S, S3
        ),
        "what spmm_arg return": call("spmm_arg_backward", A, X, ARG[:, :2], G),
        "grad has 45 rows but A": call("spmm_arg_backward", A, X, ARG, X),
        "grad has shape": call("spmm_arg_backward", A, X, ARG, G[:, :2]),
    },
    UnsupportedError: {
        'use "tf32"': call("sddmm", A, G, X, precision=["tf32"]),
        '^precision is "tf32" but X is float16: it is for float32, leave it out\\.$': call(
            "spmm", A.tosgt().with_data(None), X.astype(np.float16), precision="tf32"
        ),
        '^precision is "tf32" but X is float64': call(
            "sddmm", A, G.astype(F64), X.astype(F64), precision="tf32"
        ),
        '^precision is "tf32" but Y is float64': call(
            "sddmm", A, G.astype(F64), ops.maxk(X.astype(F64), 2), precision="tf32"
        ),
    },
}


REFUSED = [(*case, error, text) for error in CASES for text, case in CASES[error].items()]


@pytest.mark.parametrize(("op", "args", "options", "error", "text"), REFUSED)
def test_bad_input_is_refused_and_so_is_its_explanation(op, args, options, error, text):
    with pytest.raises(error, match=f"(?s){text}"):
        getattr(ops, op)(*args, **options)
    if op != "scale":
        with pytest.raises(error, match=f"(?s){text}"):
            ops.explain(op, *args, **options)


def test_out_may_not_overlap_an_input(xp):
    """Square, so that results can lie where inputs do; tests/laws has those that begin there."""
    index = [xp.arange(size, dtype=np.int32) for size in (46, 45)]
    B, memory = sparsefmt.CSR(*index, xp.ones(45, F32), shape=(45, 45)), xp.ones((46, 4), F32)
    calls = {
        "features": lambda: ops.spmm(B, memory[:45], out=memory[1:]),
        "apart": lambda: ops.spmm(B, memory[:45, :2], out=memory.ravel()[90:180].reshape(45, 2)),
        "reversed": lambda: ops.spmm(B, memory[:0:-1], out=memory[1:]),
        "values": lambda: ops.spmm(B, xp.ones((45, 1), F32), out=B.data[:, None]),
    }
    for call in calls.values():
        with pytest.raises(FormatError, match="out overlaps an input: give an array of its own"):
            call()
    flat = memory.ravel()
    beside = flat[45:90, None]  # begins where the features end
    assert ops.spmm(B, flat[:45, None], out=beside) is beside


@pytest.mark.parametrize("op", ["spmv", "scale", "maxk", None, ["spmm"]])
def test_explain_refuses_what_has_no_kernels_to_choose_from(op):
    with pytest.raises(UnsupportedError, match=r"op is .*: use one of aggregate, .*spmm.*kernels"):
        ops.explain(op, A, X)


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        ((), {}, "spmm cannot be called so .*'A'.*: it takes A, X, values, reduce, row_scale"),
        ((A,), {}, "spmm cannot be called so .*'X'"),
        ((A, X), {"foo": 3}, "spmm cannot be called so .*'foo'"),
        ((A, X, "max"), {}, "spmm cannot be called so .*too many positional"),
    ],
)
def test_explain_refuses_arguments_that_the_operation_does_not_take(args, options, text):
    with pytest.raises(DtypeError, match=text):
        ops.explain("spmm", *args, **options)


def test_rounding_to_infinity_does_not_warn():
    B, half = A.with_data(None), np.full((60, 4), 6e4, np.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isinf(ops.spmm(B, half[:45])).any()
        assert np.isinf(ops.sddmm(B, half, half[:45])).all()


FORKS = """
import os, sys
import numpy as np
import sparsefmt
from sparsefmt import UnsupportedError, ops
from sparsefmt.ops.engine import small

if sys.argv[1] != "small":
    small.MOST = -1
A, X = sparsefmt.from_dense(np.eye(3, dtype=np.float32)), np.ones((3, 2), np.float32)
if sys.argv[1] != "unused":
    ops.spmm(A, X)
else:
    import sparsefmt.ops.engine.loops
child = os.fork()
if not child:
    try:
        ops.spmm(A, X)
        os._exit(0)
    except UnsupportedError as error:
        os._exit(3 if '"spawn"' in str(error) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.parametrize(("pool", "status"), [("used", 3), ("unused", 0), ("small", 0)])
def test_a_fork_of_a_process_with_a_pool_is_refused(pool, status):
    if importlib.util.find_spec("numba.np.ufunc.omppool") is None:
        pytest.skip("this numba has no OpenMP pool, whose threads do not survive a fork")
    done = run_apart(FORKS, pool, NUMBA_THREADING_LAYER="omp")
    assert done.stdout.split() == [str(status)], done.stderr


def test_two_sparse_factors_are_no_spmm():
    with pytest.raises(TypeError, match="unsupported operand"):
        A @ A


def test_a_dense_left_factor_is_refused():
    with pytest.raises(TypeError, match=r"unsupported operand|does not support ufuncs"):
        X.T @ A


def test_a_list_goes_where_the_matrix_is(xp):
    B = put(xp, A)
    Y = ops.spmm(B.with_data(None), [[1.0]] * 45, row_scale=[2.0] * 60)
    assert type(Y) is type(put(xp, X))
    assert Y.dtype == np.float64


@pytest.mark.parametrize("other", DTYPES, ids=name_of)
@pytest.mark.parametrize("values", DTYPES, ids=name_of)
def test_values_of_another_dtype_are_refused(xp, values, other):
    """Every pair: NumPy holds ``np.dtype("float64") == None``, which once let float64 pass."""
    A = put(xp, matrix("power law", values, np.int32).tocsr())
    X = put(xp, np.ones((A.n_cols, 3), other))
    for call in (ops.spmm, ops.spmm_arg, ops.aggregate):
        if values is other:
            call(A, X)
        else:
            with pytest.raises(DtypeError, match=r"A\.data is .* but X is"):
                call(A, X)
