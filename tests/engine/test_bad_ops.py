"""What the operations refuse: the class of the error, and a text that says how to mend it."""

import importlib.util
import os
import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest
from op_cases import DTYPES, features, matrix, name_of, put

import sparsefmt
from sparsefmt import DtypeError, FormatError, ShapeError, UnsupportedError, ops

F32, F64 = np.float32, np.float64
A = matrix("power law", F32, np.int32).tocsr()  # 60 x 45, 600 entries
X, G = features(45, 4, F32), features(60, 4, F32)
X3, G3 = features(45, (2, 3), F32), features(60, (2, 3), F32)
S, S3 = features(600, (), F32), features(600, (3,), F32)
ARG = ops.spmm_arg(A, X)[1]
R, C = features(60, (), F32), features(45, (), F32)
READ_ONLY = np.frombuffer(bytes(960), F32).reshape(60, 4)


def call(op, *args, **options):
    return op, args, options


#: A class of errors, the texts that have it, and the calls that are refused so.
CASES = {
    DtypeError: {
        "A is a ndarray: give a sparsefmt format": call("spmm", np.eye(3), X),
        "A is a Graph: give one of its formats, graph.csr for instance": call(
            "spmm", sparsefmt.Graph(A), X
        ),
        "A is a ndarray": call("scale", np.eye(3)),
        "A is a NoneType": call("aggregate", None, X),
        "X is None: give an array": call("spmm", A, None),
        "X.dtype is int64: values are float": call("spmm", A, X.astype(int)),
        "X holds Python objects": call("spmm", A, X.astype(object)),
        r"^A.data is float32 but X is float64: cast one, "
        r"X.astype\(A.dtype\) or A.astype\(X.dty": call("spmm", A, X.astype(F64)),
        "^A.data is float32 but X is bfloat16: cast one": call(
            "aggregate", A.tocoo(), X.astype(ml_dtypes.bfloat16)
        ),
        "^A.data is float32 but X is": call("spmm_arg", A, X.astype(F64)),
        "^A.data is float32 but X is float64": call(
            "spmm_arg_backward", A, X.astype(F64), ARG, G.astype(F64)
        ),
        "costs is a int: give ops.Costs": call("spmm", A, X, costs=7),
        "costs is a str: give ops": call("sddmm", A, G, X, costs="all"),
        r"row_scale is float64 but X is float32: cast one, row_scale.astype\(X.dtype\)": call(
            "spmm", A, X, row_scale=R.astype(F64)
        ),
        "col_scale.dtype is int": call("spmm", A, X, col_scale=[1] * 45),
        "row is float64 but A.data is": call("scale", A, R.astype(F64)),
        "col.dtype is int64": call("scale", A, None, [1] * 45),
        "col is float64 but row is float32: cast one": call(
            "scale", A.with_data(None), R, C.astype(F64)
        ),
        "out is float64: the result": call("spmm", A, X, out=G.astype(F64)),
        "out is a list: give a NumPy": call("spmm", A, X, out=[[0.0]]),
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
        "X has 60 rows but A has 45 columns: X needs one row": call("spmm", A, G),
        "X is no array": call("spmm", A, [[1.0], [1.0, 2.0]]),
        r"row_scale has shape \(45,\): give \(60,\), one factor per row of A": call(
            "spmm", A, X, row_scale=C
        ),
        r"col_scale has shape \(60,\): give \(45,\), one factor per column of A": call(
            "spmm", A, X, col_scale=R
        ),
        r"row_scale has shape \(\): give one factor per row of A, "
        r"np.full\(60, 2.0, X.dtype\)": call("spmm", A, X, row_scale=2.0),
        r"np.full\(45, 3, A.dtype\)": call("scale", A, None, 3),
        r"row has shape \(45,\): give \(60,\)": call("scale", A, C),
        r"the result has \(60, 4\)": call("spmm", A, X, out=G[:, :3].copy()),
        r"the result has \(600,\)": call("sddmm", A, G, X, out=S3),
        "X has 45 rows but A has 60 rows: X needs one row per row of A": call("sddmm", A, X, X),
        r"Y has shape \(45, 3\) but X has \(60, 4": call("sddmm", A, G, X[:, :3]),
        "give both the same heads and feature width": call("sddmm", A, G3, X),
        r"\(rows, feat\) or \(rows, heads, feat\)": call("sddmm", A, G3[None], X),
        r"A stores 600 entries: give \(600": call("edge_softmax", A, S[1:]),
        r"scores has shape \(1, 600, 3\)": call("edge_softmax", A, S3[None]),
        r"grad has shape \(600, 3\) but probabilities \(600,\)": call(
            "edge_softmax_backward", A, S, S3
        ),
        "what spmm_arg return": call("spmm_arg_backward", A, X, ARG[:, :2], G),
        "grad has 45 rows but A": call("spmm_arg_backward", A, X, ARG, X),
        "grad has shape": call("spmm_arg_backward", A, X, ARG, G[:, :2]),
    },
    UnsupportedError: {
        "reduce is 'median': use": call("spmm", A, X, reduce="median"),
        '^precision is \'tf16\': use "tf32" or "bf16", or leave it out\\.$': call(
            "spmm", A, X, precision="tf16"
        ),
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
    FormatError: {
        "out is not C-contiguous: give a fresh array": call(
            "spmm", A, X, out=np.zeros((60, 8), F32)[:, ::2]
        ),
        "out is read-only": call("spmm", A, X, out=READ_ONLY),
        "out overlaps an input": call("edge_softmax", A, S, out=S),
    },
}


REFUSED = [(*case, error, text) for error in CASES for text, case in CASES[error].items()]
REFUSALS = "op", "args", "options", "error", "text"


@pytest.mark.parametrize(REFUSALS, REFUSED)
def test_bad_input_is_refused(op, args, options, error, text):
    with pytest.raises(error, match=f"(?s){text}"):
        getattr(ops, op)(*args, **options)


def test_out_that_is_not_aligned_is_refused_by_every_operation():
    def late(*shape):
        memory = np.zeros(4 * int(np.prod(shape)) + 1, np.uint8)
        return memory[1:].view(F32).reshape(shape)

    B, H, scores = sparsefmt.CSR(*A._arrays().values(), shape=A.shape), X[:, None], late(A.nnz)
    S, el, er = ops.maxk(X, 2), np.ones((45, 1), F32), np.ones((60, 1), F32)
    calls = [
        lambda: ops.spmm(B, X, out=late(60, 4)),
        lambda: ops.spmm(B.tocoo(), X, out=late(60, 4)),
        lambda: ops.spmm(B.tosgt(), X, out=late(60, 4)),
        lambda: ops.spmm_sampled(B, X, 2, out=late(60, 4)),
        lambda: ops.spgemm(B, S, out=late(60, 4)),
        lambda: ops.sddmm(B, G, X, out=late(A.nnz)),
        lambda: ops.sddmm(B, G, S, out=late(A.nnz)),
        lambda: ops.edge_softmax(B, scores, out=late(A.nnz)),
        lambda: ops.gat(B, H, el, er, out=late(60, 1, 4)),
        lambda: ops.dot_attention(B, G[:, None], H, out=late(60, 1, 4)),
    ]
    for call in calls:
        with pytest.raises(FormatError, match="out is not aligned to its dtype: give a fresh"):
            call()


def _inputs(xp):
    """Square, so that results can lie where inputs do."""
    index = [xp.arange(size, dtype=np.int32) for size in (46, 45)]
    B = sparsefmt.CSR(*index, xp.ones(45, F32), shape=(45, 45))
    memory = xp.ones((46, 4), F32)
    return B, memory


def test_out_may_not_overlap_an_input(xp):
    B, memory = _inputs(xp)
    narrow = B.data[:, None]
    ones = xp.ones(45, F32)
    calls = {
        "features": lambda: ops.spmm(B, memory[:45], out=memory[1:]),
        "apart": lambda: ops.spmm(B, memory[:45, :2], out=memory.ravel()[90:180].reshape(45, 2)),
        "reversed": lambda: ops.spmm(B, memory[:0:-1], out=memory[1:]),
        "values": lambda: ops.spmm(B, xp.ones((45, 1), F32), out=narrow),
        "row factors": lambda: ops.spmm(B, narrow * 1, row_scale=ones, out=ones[:, None]),
        "column factors": lambda: ops.spmm(B, narrow * 1, col_scale=ones, out=ones[:, None]),
        "indices": lambda: ops.spmm(B, narrow * 1, out=B.indices.view(F32)[:, None]),
        "sddmm": lambda: ops.sddmm(B, narrow * 1, ones[:, None], out=ones),
        "scores": lambda: ops.edge_softmax(B, ones, out=ones),
        "grad": lambda: ops.edge_softmax_backward(B, ones * 1, ones, out=ones),
    }
    for call in calls.values():
        with pytest.raises(FormatError, match="out overlaps an input: give an array of its own"):
            call()
    flat = memory.ravel()
    beside = flat[45:90, None]  # begins where the features end
    assert ops.spmm(B, flat[:45, None], out=beside) is beside


def test_a_refused_call_leaves_out_alone(xp):
    B, memory = _inputs(xp)
    out = xp.full((45, 4), 7, F32)
    with pytest.raises(DtypeError):
        ops.spmm(B, memory[:45].astype(np.float64), out=xp.zeros((45, 4)))
    with pytest.raises(ShapeError):
        ops.spmm(B, memory, out=out)
    assert bool((out == 7).all())


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


@pytest.mark.parametrize(REFUSALS, [case for case in REFUSED if case[0] != "scale"])
def test_explain_refuses_what_the_operation_refuses(op, args, options, error, text):
    with pytest.raises(error, match=f"(?s){text}"):
        ops.explain(op, *args, **options)


def test_explain_runs_nothing():
    out = np.full((60, 4), 7, F32)
    assert ops.explain("spmm", A, X, out=out).chosen.name == "spmm_csr_numba"
    assert (out == 7).all()
    assert ops.explain("spmm_arg", A, X).chosen.name == "spmm_csr_numba"
    assert ops.explain("aggregate", A, X, method="gas").chosen.name == "spmm_coo_numba"
    assert (ops.spmm(A, X, out=out) != 7).any()  # and what comes after it runs


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
    done = subprocess.run(
        [sys.executable, "-c", FORKS, pool],
        env={**os.environ, "NUMBA_THREADING_LAYER": "omp"},
        capture_output=True,
        text=True,
    )
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
    A = matrix("power law", values, np.int32).tocsr()
    X = np.ones((A.n_cols, 3), other)
    if xp.__name__ == "cupy":
        A, X = A.to("cuda"), xp.asarray(X)
    for call in (ops.spmm, ops.spmm_arg, ops.aggregate):
        if values is other:
            call(A, X)
        else:
            with pytest.raises(DtypeError, match=r"A\.data is .* but X is"):
                call(A, X)
