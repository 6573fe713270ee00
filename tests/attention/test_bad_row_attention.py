"""What attention between rows refuses: the class of the error, and a text that says the mend."""

import warnings

import numpy as np
import pytest
from op_cases import DTYPES, features, matrix, name_of, put, rows_of

import sparsefmt
from sparsefmt import DeviceError, DtypeError, FormatError, ShapeError, ops

F16, F32, F64 = np.float16, np.float32, np.float64
A = matrix("power law", F32, np.int32).tocsr()  # 60 x 45, 600 entries
SQUARE = rows_of([2] * 45, 45, None, np.int32)
K, Q, ATT = features(45, (2, 3), F32), features(60, (2, 3), F32), features(2, 3, F32)
K2, Q2, ATT2 = K[:, 0], Q[:, 0], ATT[0]
E = features(600, (2,), F32)
READ_ONLY = np.frombuffer(bytes(60 * 6 * 4), F32).reshape(60, 2, 3)

#: Of both kinds: keys or left, queries or right, options, error, text with names for the two.
BOTH = {
    "key rows": (Q, Q, {}, ShapeError, "{key} has 60 rows but A has 45 columns: {key} needs one r"),
    "query rows": (K, K, {}, ShapeError, "{query} has 45 rows but A has 60 rows: {query} needs"),
    "key 1-D": (K[:, 0, 0], Q, {}, ShapeError, r"{key} has shape \(45,\): give \(rows, feat\) or"),
    "key 4-D": (K[None], Q, {}, ShapeError, r"{key} has shape \(1, 45, 2, 3\): give \(rows, feat"),
    "key none": (None, Q, {}, DtypeError, "{key} is None: give an array"),
    "widths": (K[..., :2], Q, {}, ShapeError, r"{query} has shape \(60, 2, 3\) but {key} has \(45"),
    "heads": (K, Q2, {}, ShapeError, "{query} has .* give both the same heads and feature width"),
    "dtypes": (K, Q.astype(F64), {}, DtypeError, "{query} is float64 but {key} is float32: cast"),
    "integers": (K.astype(int), Q, {}, DtypeError, "{key}.dtype is int64: values are float"),
    "edges": (
        *(K, Q, {"edge_scores": E[1:]}, ShapeError),
        r"edge_scores has shape \(599, 2\): give \(600, 2\), one score per stored entry and head, "
        r"in the order of A's data \(A.shape == \(60, 45\), A.nnz == 600\)",
    ),
    "edge heads": (K, Q, {"edge_scores": E[:, 0]}, ShapeError, r"\(600,\): give \(600, 2\)"),
    "edges, none": (K2, Q2, {"edge_scores": E}, ShapeError, r"give \(600,\), one score per stored"),
    "edge dtype": (
        *(K, Q, {"edge_scores": E.astype(F64)}, DtypeError),
        "edge_scores is float64 but {key} is float32: cast one",
    ),
    "edge integers": (K, Q, {"edge_scores": E > 0}, DtypeError, "edge_scores.dtype is bool"),
    "dropout 1": (K, Q, {"dropout": 1}, ShapeError, "dropout is 1: give a share from 0 to less"),
    "dropout < 0": (K, Q, {"dropout": -0.1}, ShapeError, "dropout is -0.1: give a share"),
    "dropout NaN": (K, Q, {"dropout": np.nan}, ShapeError, "dropout is nan: give a share"),
    "dropout text": (K, Q, {"dropout": "0.5"}, DtypeError, "dropout is '0.5': give a number"),
    "dropout none": (K, Q, {"dropout": None}, DtypeError, "dropout is None: give a number"),
    "seed": (K, Q, {"seed": 1.0}, DtypeError, r"seed is 1\.0: give an integer"),
    "seed bool": (K, Q, {"seed": True}, DtypeError, "seed is True: give an integer"),
    "seed none": (K, Q, {"seed": None}, DtypeError, "seed is None: give an integer"),
    "loops": (
        *(K, Q, {"self_loops": True}, ShapeError),
        r"self_loops is True but A has shape \(60, 45\): only a square matrix has loops, leave it",
    ),
    "loops text": (K, Q, {"self_loops": "yes"}, DtypeError, "self_loops is 'yes': give True or Fa"),
    "loops 1": (K, Q, {"self_loops": 1}, DtypeError, "self_loops is 1: give True or False"),
}
#: Of the forward operations alone.
OUT = {
    "shape": (K, Q, {"out": Q2}, ShapeError, r"out has shape \(60, 3\): the result has \(60, 2, 3"),
    "dtype": (K, Q, {"out": Q.astype(F64)}, DtypeError, "out is float64: the result is float32"),
    "list": (K, Q, {"out": [[0.0]]}, DtypeError, "out is a list: give a NumPy"),
    "strided": (
        *(K, Q, {"out": np.zeros((60, 2, 6), F32)[..., ::2]}, FormatError),
        "out is not C-contiguous: give a fresh array",
    ),
    "read-only": (K, Q, {"out": READ_ONLY}, FormatError, "out is read-only"),
    "query": (K, Q, {"out": Q}, FormatError, "out overlaps an input: give an array of its own"),
}
#: operation, arguments, options, error, text
CASES = {
    "dense A gatv2": ("gatv2", (np.eye(3), K, Q, ATT), {}, DtypeError, "A is a ndarray: give a sp"),
    "dense A dot": ("dot_attention", (np.eye(3), Q, K), {}, DtypeError, "A is a ndarray"),
    "graph": ("gatv2", (sparsefmt.Graph(A), K, Q, ATT), {}, DtypeError, "A is a Graph: give one"),
    "att shape": (
        *("gatv2", (A, K, Q, ATT[:, :2]), {}, ShapeError),
        r"att has shape \(2, 2\): give \(2, 3\), one vector per head \(left.shape == \(45, 2, 3\)",
    ),
    "att heads": ("gatv2", (A, K, Q, ATT2), {}, ShapeError, r"att has shape \(3,\): give \(2, 3\)"),
    "att without heads": (
        *("gatv2", (A, K2, Q2, ATT), {}, ShapeError),
        r"att has shape \(2, 3\): give \(3,\), one vector \(left",
    ),
    "att none": ("gatv2", (A, K, Q, None), {}, DtypeError, "att is None: give an array"),
    "att dtype": (
        *("gatv2", (A, K, Q, ATT.astype(F64)), {}, DtypeError),
        r"att is float64 but left is float32: cast one, att.astype\(left.dtype\)",
    ),
    "att beside halves": (
        *("gatv2", (A, K.astype(F16), Q.astype(F16), ATT.astype(F64)), {}, DtypeError),
        "att is float64 but left is float16",
    ),
    "att integers": ("gatv2", (A, K, Q, ATT > 0), {}, DtypeError, "att.dtype is bool: values are"),
    "slope": (
        *("gatv2", (A, K, Q, ATT), {"negative_slope": "0.2"}, DtypeError),
        "negative_slope is '0.2': give a number",
    ),
    "slope bool": (
        *("gatv2", (A, K, Q, ATT), {"negative_slope": True}, DtypeError),
        "negative_slope is True: give a number",
    ),
    "values rows": (
        "dot_attention",
        (A, Q, K, Q),
        {},
        ShapeError,
        "values has 60 rows but A has 4",
    ),
    "values width": (
        *("dot_attention", (A, Q, K, K[..., :2]), {}, ShapeError),
        r"values has shape \(45, 2, 2\) but keys has \(45, 2, 3\): give both the same",
    ),
    "values dtype": (
        *("dot_attention", (A, Q, K, K.astype(F64)), {}, DtypeError),
        "values is float64 but keys is float32",
    ),
    "scale NaN": (
        *("dot_attention", (A, Q, K), {"scale": np.nan}, ShapeError),
        "scale is nan: give a finite number, or leave it out",
    ),
    "scale infinite": ("dot_attention", (A, Q, K), {"scale": -np.inf}, ShapeError, "scale is -inf"),
    "scale text": (
        "dot_attention",
        (A, Q, K),
        {"scale": "1"},
        DtypeError,
        "scale is '1': give a n",
    ),
    "scale huge": (
        "dot_attention",
        (A, Q, K),
        {"scale": 10**400},
        DtypeError,
        "that a float holds",
    ),
    "scale array": ("dot_attention", (A, Q, K), {"scale": ATT}, DtypeError, "scale is .*a number"),
    "grad shape": (
        *("gatv2_backward", (A, K, Q, ATT, Q[..., :2]), {}, ShapeError),
        r"grad has shape \(60, 2, 2\) but left has \(45, 2, 3\)",
    ),
    "grad rows": (
        "gatv2_backward",
        (A, K, Q, ATT, K),
        {},
        ShapeError,
        "grad has 45 rows but A has",
    ),
    "grad dtype": (
        *("dot_attention_backward", (A, Q, K, None, Q.astype(F64)), {}, DtypeError),
        "grad is float64 but keys is float32",
    ),
    "grad none": (
        "dot_attention_backward",
        (A, Q, K, K, None),
        {},
        DtypeError,
        "grad is None: giv",
    ),
}


def _both():
    for name, (key, query, options, error, text) in BOTH.items():
        left, dot = ({"key": k, "query": q} for k, q in (("left", "right"), ("keys", "queries")))
        texts = (
            text.replace("{key}", n["key"]).replace("{query}", n["query"]) for n in (left, dot)
        )
        att = ATT2 if key is K2 else ATT
        calls = ("gatv2", (A, key, query, att)), ("dot_attention", (A, query, key))
        for (op, args), one in zip(calls, texts, strict=True):
            yield f"{op} {name}", (op, args, options, error, one)
            more = (*args, None, Q) if op == "dot_attention" else (*args, Q)
            yield f"{op}_backward {name}", (f"{op}_backward", more, options, error, one)


def _out():
    for name, (key, query, options, error, text) in OUT.items():
        yield f"gatv2 out {name}", ("gatv2", (A, key, query, ATT), options, error, text)
        yield f"dot out {name}", ("dot_attention", (A, query, key), options, error, text)


CASES |= dict(_both()) | dict(_out())


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused(case):
    op, args, options, error, text = CASES[case]
    for call in (getattr(ops, op), lambda *a, **o: ops.explain(op, *a, **o)):
        with pytest.raises(error, match=f"(?s){text}"):
            call(*args, **options)


def test_out_may_not_overlap_an_input(xp):
    B, k, q, att = (put(xp, a) for a in (SQUARE, K, Q[:45], ATT))
    wide, edges = xp.ones((45, 2, 3), F32), xp.ones((90, 2), F32)
    one = xp.ones((45, 1), F32)
    calls = {
        "left": lambda: ops.gatv2(B, k, q, att, out=k),
        "right": lambda: ops.gatv2(B, k, q, att, out=q),
        "att": lambda: ops.gatv2(B, one, one, one[:1], out=one),
        "edges": lambda: ops.gatv2(
            B, one, one * 1, one[0] * 1, edge_scores=edges[:, 0], out=edges.ravel()[:45, None]
        ),
        "keys": lambda: ops.dot_attention(B, q, k, out=k),
        "values": lambda: ops.dot_attention(B, q, k, wide, out=wide),
        "indices": lambda: ops.dot_attention(B, one, one, out=B.indices.view(F32)[:45, None]),
    }
    for call in calls.values():
        with pytest.raises(FormatError, match="out overlaps an input: give an array of its own"):
            call()


def test_a_refused_call_leaves_out_alone(xp):
    out = xp.full((60, 2, 3), 7, F32)
    B, k, q, att = (put(xp, a) for a in (A, K, Q, ATT))
    with pytest.raises(ShapeError):
        ops.gatv2(B, k, q, att, dropout=2, out=out)
    with pytest.raises(ShapeError):
        ops.dot_attention(B, q, k, self_loops=True, out=out)
    assert bool((out == 7).all())


def test_explain_runs_nothing():
    out = np.full((60, 2, 3), 7, F32)
    assert ops.explain("gatv2", A, K, Q, ATT, out=out).chosen.name == "gatv2_csr_numba"
    assert ops.explain("dot_attention", A, Q, K, out=out).chosen.name == "dot_attention_csr_numba"
    assert (out == 7).all()


def test_inputs_are_not_written(xp):
    given = [put(xp, a) for a in (A, K, Q, ATT, Q[::-1].copy())]
    edges = put(xp, E)
    before = [a.copy() for a in (*given[1:], edges)]
    ops.gatv2_backward(*given, edge_scores=edges, dropout=0.5)
    B, k, q, _, grad = given
    ops.dot_attention_backward(B, q, k, k, grad, edge_scores=edges, dropout=0.5)
    after = zip(before, (*given[1:], edges), strict=True)
    assert all(bool((a == b).all()) for a, b in after)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if np.dtype(dtype).itemsize == 2])
def test_rounding_to_infinity_does_not_warn(dtype):
    """Sums of gradients that are too large for two bytes."""
    k, q, att, edges = (a.astype(dtype) for a in (K, Q, ATT, E))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        size = 6e4 if dtype is F16 else 3e38
        large = (np.sign(Q) * F32(size)).astype(dtype)
        found = ops.dot_attention_backward(A, q, k, large[:45], large, edge_scores=edges)
        assert not np.isfinite(found[3].astype(F32)).all()
        found = ops.gatv2_backward(A, large[:45], q, att, large, edge_scores=edges)
        assert not np.isfinite(found[2].astype(F32)).all()


@pytest.mark.parametrize("other", DTYPES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_pair_of_dtypes(xp, dtype, other):
    """``att`` and edges' scores may have the features' dtype, or float32 beside two bytes."""
    B, k, q = put(xp, A), *(put(xp, a.astype(dtype)) for a in (K, Q))
    att, edges = (put(xp, a.astype(other)) for a in (ATT, E))
    fits = other is dtype or (np.dtype(dtype).itemsize == 2 and other is F32)
    calls = (
        lambda: ops.gatv2(B, k, q, att),
        lambda: ops.gatv2(B, k, q, att.astype(dtype), edge_scores=edges),
        lambda: ops.dot_attention(B, q, k, edge_scores=edges),
    )
    for call in calls:
        if fits:
            assert call().dtype == dtype
        else:
            with pytest.raises(DtypeError, match=r"(att|edge_scores) is .* but (left|keys) is"):
                call()
    if other is not dtype:
        with pytest.raises(DtypeError, match=r"right is .* but left is"):
            ops.gatv2(B, k, q.astype(other), att)


@pytest.mark.gpu
def test_mixed_devices_are_refused():
    cupy = pytest.importorskip("cupy")
    B, k, q, att = (put(cupy, a) for a in (A, K, Q, ATT))
    for call, text in (
        (lambda: ops.gatv2(A, k, Q, ATT), "left is on cuda:0 but A is on cpu: move one of them"),
        (lambda: ops.gatv2(B, k, Q, att), "right is on cpu but A is on cuda:0"),
        (lambda: ops.gatv2(B, k, q, ATT), "att is on cpu but A is on cuda:0"),
        (lambda: ops.gatv2(B, k, q, att, edge_scores=E), "edge_scores is on cpu but A is on cuda"),
        (lambda: ops.gatv2(B, k, q, att, out=Q), "out is on cpu but the inputs are on cuda:0"),
        (lambda: ops.dot_attention(B, q, k, K), "values is on cpu but A is on cuda:0"),
        (lambda: ops.dot_attention_backward(B, q, k, None, Q), "grad is on cpu but A is on cuda:0"),
    ):
        with pytest.raises(DeviceError, match=text):
            call()
