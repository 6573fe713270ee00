"""What graph attention refuses: the class of the error, and a text that says how to mend it."""

import warnings

import ml_dtypes
import numpy as np
import pytest
from op_cases import features, matrix, put

import sparsefmt
from sparsefmt import DeviceError, DtypeError, FormatError, ShapeError, ops
from sparsefmt.ops.attention.oracle import gat_oracle

F16, F32, F64 = np.float16, np.float32, np.float64
A = matrix("power law", F32, np.int32).tocsr()  # 60 x 45, 600 entries
B = matrix("banded", None, np.int32).tocsr()  # 40 x 40
H, G = features(45, (2, 4), F32), features(60, (2, 4), F32)
EL, ER, E = features(45, (2,), F32), features(60, (2,), F32), features(600, (2,), F32)
READ_ONLY = np.frombuffer(bytes(4 * G.size), F32).reshape(G.shape)
SQUARE = features(40, (2, 4), F32), features(40, (2,), F32), features(40, (2,), F32)

#: What replaces the arguments of ``gat(A, H, EL, ER)`` by name, error, text
CASES = {
    # A
    "dense": ({"A": np.eye(3)}, DtypeError, "A is a ndarray: give a sparsefmt format"),
    "graph": ({"A": sparsefmt.Graph(A)}, DtypeError, "A is a Graph: give one of its formats"),
    # H
    "H 1-D": (
        {"H": H[:, 0, 0]},
        ShapeError,
        r"H has shape \(45,\): give \(rows, feat\) or \(rows,",
    ),
    "H 4-D": ({"H": H[None]}, ShapeError, r"H has shape \(1, 45, 2, 4\): give \(rows, feat\) or"),
    "H scalar": ({"H": 3.0}, ShapeError, r"H is a single float64, of shape \(\)"),
    "H none": ({"H": None}, DtypeError, "H is None: give an array"),
    "H by rows": ({"H": G}, ShapeError, "H has 60 rows but A has 45 columns: H needs one row per"),
    "H integers": ({"H": H.astype(int)}, DtypeError, "H.dtype is int64: values are float16"),
    "H complex": ({"H": H + 1j}, DtypeError, "H.dtype is complex64"),
    "H objects": ({"H": H.astype(object)}, DtypeError, "H holds Python objects"),
    "H masked": ({"H": np.ma.array(H)}, NotImplementedError, "H is a masked array: fill it"),
    "H sparse": ({"H": A}, DtypeError, "H is a CSR: give a dense array"),
    # scores
    "el by rows": (
        {"el": ER},
        ShapeError,
        r"el has shape \(60, 2\): give \(45, 2\), one score per source and head \(A.shape == \(60,"
        r" 45\), A.nnz == 600\)",
    ),
    "er by columns": (
        {"er": EL},
        ShapeError,
        r"er has shape \(45, 2\): give \(60, 2\), one score per target and head",
    ),
    "el heads": ({"el": EL[:, :1]}, ShapeError, r"el has shape \(45, 1\): give \(45, 2\)"),
    "el 1-D": ({"el": EL[:, 0]}, ShapeError, r"el has shape \(45,\): give \(45, 2\)"),
    "er 3-D": ({"er": ER[:, :, None]}, ShapeError, r"er has shape \(60, 2, 1\): give \(60, 2\)"),
    "el scalar": ({"el": 1.0}, ShapeError, r"el has shape \(\): give \(45, 2\)"),
    "er none": ({"er": None}, DtypeError, "er is None: give an array"),
    "el without heads": (
        {"H": H[:, 0]},
        ShapeError,
        r"el has shape \(45, 2\): give \(45,\), one score per source \(A",
    ),
    "el float64": (
        {"el": EL.astype(F64)},
        DtypeError,
        r"^el is float64 but H is float32: cast one, el.astype\(H.dtype\) for instance",
    ),
    "er float16": ({"er": ER.astype(F16)}, DtypeError, "^er is float16 but H is float32: cast one"),
    "el bfloat16 beside float16": (
        {"H": H.astype(F16), "el": EL.astype(ml_dtypes.bfloat16), "er": ER.astype(F16)},
        DtypeError,
        "^el is bfloat16 but H is float16",
    ),
    "er float64 beside float16": (
        {"H": H.astype(F16), "er": ER.astype(F64)},
        DtypeError,
        "^er is float64 but H is float16",
    ),
    "el integers": ({"el": EL.astype(int)}, DtypeError, "el.dtype is int64: values are float16"),
    "er bools": ({"er": ER > 0}, DtypeError, "er.dtype is bool: values are float16"),
    # edge scores
    "edges length": (
        {"edge_scores": E[1:]},
        ShapeError,
        r"edge_scores has shape \(599, 2\): give \(600, 2\), one score per stored entry and head,"
        r" in the order of A's data \(A.shape == \(60, 45\), A.nnz == 600\)",
    ),
    "edges heads": (
        {"edge_scores": E[:, :1]},
        ShapeError,
        r"has shape \(600, 1\): give \(600, 2\)",
    ),
    "edges 1-D": ({"edge_scores": E[:, 0]}, ShapeError, r"has shape \(600,\): give \(600, 2\)"),
    "edges scalar": ({"edge_scores": 0.5}, ShapeError, r"edge_scores has shape \(\): give"),
    "edges float64": (
        {"edge_scores": E.astype(F64)},
        DtypeError,
        "^edge_scores is float64 but H is float32",
    ),
    "edges integers": ({"edge_scores": E.astype(int)}, DtypeError, "edge_scores.dtype is int64"),
    # numbers
    "slope text": ({"negative_slope": "0.2"}, DtypeError, "negative_slope is '0.2': give a number"),
    "slope none": ({"negative_slope": None}, DtypeError, "negative_slope is None: give a number"),
    "slope bool": ({"negative_slope": True}, DtypeError, "negative_slope is True: give a number"),
    "slope complex": ({"negative_slope": 1j}, DtypeError, "negative_slope is 1j: give a number"),
    "slope numpy complex": ({"negative_slope": np.complex64(1)}, DtypeError, "give a number"),
    "slope array": ({"negative_slope": np.ones(1)}, DtypeError, "negative_slope is array"),
    "slope huge": ({"negative_slope": 10**400}, DtypeError, "give a number that a float holds"),
    "dropout of many digits": ({"dropout": 10**5000}, DtypeError, "dropout is larger than any"),
    "dropout one": (
        {"dropout": 1.0},
        ShapeError,
        "dropout is 1.0: give a share from 0 to less tha",
    ),
    "dropout two": ({"dropout": 2}, ShapeError, "dropout is 2: give a share from 0 to less than 1"),
    "dropout less": ({"dropout": -0.1}, ShapeError, "dropout is -0.1: give a share from 0"),
    "dropout nan": ({"dropout": np.nan}, ShapeError, "dropout is nan: give a share from 0"),
    "dropout inf": ({"dropout": np.inf}, ShapeError, "dropout is inf: give a share from 0"),
    "dropout text": ({"dropout": "half"}, DtypeError, "dropout is 'half': give a number"),
    "dropout array": ({"dropout": np.zeros(2)}, DtypeError, "dropout is array"),
    "dropout bool": ({"dropout": False}, DtypeError, "dropout is False: give a number"),
    "seed float": ({"seed": 1.0}, DtypeError, "seed is 1.0: give an integer"),
    "seed none": ({"seed": None}, DtypeError, "seed is None: give an integer"),
    "seed bool": ({"seed": True}, DtypeError, "seed is True: give an integer"),
    "seed array": (
        {"seed": np.arange(2)},
        DtypeError,
        r"seed is array\(\[0, 1\]\): give an integer",
    ),
    # loops
    "loops of a rectangle": (
        {"self_loops": True},
        ShapeError,
        r"self_loops is True but A has shape \(60, 45\): only a square matrix has loops, leave it",
    ),
    "loops number": ({"self_loops": 1}, DtypeError, "self_loops is 1: give True or False"),
    "loops text": ({"self_loops": "no"}, DtypeError, "self_loops is 'no': give True or False"),
    "loops none": ({"self_loops": None}, DtypeError, "self_loops is None: give True or False"),
    # out
    "out shape": (
        {"out": G[:, :1].copy()},
        ShapeError,
        r"out has shape \(60, 1, 4\): the result has",
    ),
    "out flat": ({"out": G.reshape(60, 8)}, ShapeError, r"the result has \(60, 2, 4\)"),
    "out dtype": ({"out": G.astype(F64)}, DtypeError, "out is float64: the result is float32"),
    "out list": ({"out": [[0.0]]}, DtypeError, "out is a list: give a NumPy or CuPy array"),
    "out strided": (
        {"out": np.zeros((60, 2, 8), F32)[:, :, ::2]},
        FormatError,
        "out is not C-contiguous: give a fresh array",
    ),
    "out read-only": ({"out": READ_ONLY}, FormatError, "out is read-only: give a writeable array"),
}
#: More of ``gat_backward``, whose ``grad`` is the result's
GRADIENT_CASES = {
    "grad none": ({"grad": None}, DtypeError, "grad is None: give an array"),
    "grad rows": (
        {"grad": H},
        ShapeError,
        "grad has 45 rows but A has 60 rows: grad needs one row",
    ),
    "grad heads": (
        {"grad": G[:, :1]},
        ShapeError,
        r"grad has shape \(60, 1, 4\) but H has \(45, 2, 4\): give both the same heads and feature",
    ),
    "grad flat": ({"grad": G.reshape(60, 8)}, ShapeError, r"grad has shape \(60, 8\) but H has"),
    "grad float64": ({"grad": G.astype(F64)}, DtypeError, "^grad is float64 but H is float32"),
    "grad integers": ({"grad": G.astype(int)}, DtypeError, "grad.dtype is int64"),
}
#: Of ``gat_attention``, which has no features to tell the heads
ATTENTION_CASES = {
    "el 3-D": (
        {"el": EL[:, :, None]},
        ShapeError,
        r"el has shape \(45, 2, 1\): give \(45,\) or \(45",
    ),
    "el scalar": (
        {"el": 0.5},
        ShapeError,
        r"el has shape \(\): give \(45,\) or \(45, heads\), one",
    ),
    "el none": ({"el": None}, DtypeError, "el is None: give an array"),
    "el rows": (
        {"el": ER},
        ShapeError,
        r"el has shape \(60, 2\): give \(45, 2\), one score per sou",
    ),
    "el integers": ({"el": EL.astype(int)}, DtypeError, "el.dtype is int64"),
    "er heads": ({"er": ER[:, 0]}, ShapeError, r"er has shape \(60,\): give \(60, 2\), one score"),
    "er float64": (
        {"er": ER.astype(F64)},
        DtypeError,
        "^er is float64 but el is float32: cast one",
    ),
    "edges": (
        {"edge_scores": E[:, 0]},
        ShapeError,
        r"edge_scores has shape \(600,\): give \(600, 2",
    ),
    "edges float16": (
        {"edge_scores": E.astype(F16)},
        DtypeError,
        "^edge_scores is float16 but el is float32",
    ),
    "dense": ({"A": np.eye(3)}, DtypeError, "A is a ndarray: give a sparsefmt format"),
    "slope": ({"negative_slope": "x"}, DtypeError, "negative_slope is 'x': give a number"),
    "loops": ({"self_loops": True}, ShapeError, "self_loops is True but A has shape"),
}


def refused(op, given, changes, error, text):
    """By the operation, and by ``explain`` before anything runs."""
    options = {**given, **changes}
    args = [options.pop(name) for name in given]
    for call in (getattr(ops, op), lambda *args, **options: ops.explain(op, *args, **options)):
        with pytest.raises(error, match=f"(?s){text}"):
            call(*args, **options)


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused(case):
    given = {"A": A, "H": H, "el": EL, "er": ER}
    refused("gat", given, *CASES[case])
    if "out" not in CASES[case][0]:
        refused("gat_backward", {**given, "grad": G}, *CASES[case])


@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_bad_gradients_are_refused(case):
    given = {"A": A, "H": H, "el": EL, "er": ER, "grad": G}
    refused("gat_backward", given, *GRADIENT_CASES[case])


@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_bad_scores_of_an_attention_are_refused(case):
    refused("gat_attention", {"A": A, "el": EL, "er": ER}, *ATTENTION_CASES[case])


def test_out_may_not_overlap_an_input(xp):
    C, features_, el, er = (put(xp, a) for a in (B, SQUARE[0][:, :, :1].copy(), *SQUARE[1:]))
    edges = put(xp, np.zeros((C.nnz, 2), F32))
    half = [a.astype(F16) for a in (features_, el, er)]
    calls = {
        "H": lambda: ops.gat(C, features_, el, er, out=features_),
        "el": lambda: ops.gat(C, features_, el, er, out=el[:, :, None]),
        "er": lambda: ops.gat(C, features_, el, er, out=er[:, :, None]),
        "widened scores": lambda: ops.gat(C, *half, out=half[1][:, :, None]),
        "edges": lambda: ops.gat(
            C, features_, el, er, edge_scores=edges, out=edges[:40].reshape(40, 2, 1)
        ),
        "indices": lambda: ops.gat(
            C, features_, el, er, out=C.indices[:80].view(F32).reshape(40, 2, 1)
        ),
    }
    for call in calls.values():
        with pytest.raises(FormatError, match="out overlaps an input: give an array of its own"):
            call()


def test_a_refused_call_leaves_out_and_inputs_alone(xp):
    args = [put(xp, a) for a in (A, H, EL, ER)]
    before, out = [a.copy() for a in args[1:]], xp.full(G.shape, 7, F32)
    for options in ({"dropout": 1.0}, {"self_loops": True}, {"edge_scores": args[2]}):
        with pytest.raises(ShapeError):
            ops.gat(*args, out=out, **options)
    ops.gat_backward(*args, put(xp, G), dropout=0.5)
    assert bool((out == 7).all())
    assert all(bool((a == b).all()) for a, b in zip(args[1:], before, strict=True))


def test_explain_runs_nothing():
    out = np.full(G.shape, 7, F32)
    assert ops.explain("gat", A, H, EL, ER, out=out).chosen.name == "gat_csr_numba"
    assert (out == 7).all()
    found = ops.explain("gat_backward", A, H, EL, ER, G, edge_scores=E)
    assert found.chosen.name == "gat_backward_csr_numba"
    assert "the arrays are on the CPU" in str(found)


def test_numbers_of_numpy_are_numbers():
    args = B, *SQUARE
    plain = ops.gat(*args, negative_slope=0.5, dropout=0.5, seed=3, self_loops=True)
    options = {"negative_slope": F32(0.5), "dropout": F16(0.5), "seed": np.uint8(3)}
    assert (ops.gat(*args, **options, self_loops=np.True_) == plain).all()


def test_nearly_all_may_be_dropped(xp):
    """A share that rounds to 2**32 of 2**32 words drops all but the last of them."""
    args = [put(xp, a) for a in (A, H, EL, ER)]
    found = ops.gat(*args, dropout=1 - 2.0**-40)
    assert bool((found == 0).all())


def test_a_list_goes_where_the_matrix_is(xp):
    C = sparsefmt.CSR([0, 2, 3], [0, 1, 0], shape=(2, 2))
    lists = [[1.0], [3.0]], [0.5, 0.25], [0.0, 1.0]
    found = ops.gat(put(xp, C), *lists, edge_scores=[0.0, 1.0, 2.0])
    assert type(found) is type(put(xp, H))
    assert found.dtype == F64
    expected = gat_oracle(C, *(np.array(a) for a in lists), edge_scores=np.array([0.0, 1.0, 2.0]))
    # Of three terms, each near 1.
    assert abs(float(found[0, 0]) - expected[0, 0]) < 64 * np.finfo(F64).eps


def test_rounding_to_infinity_does_not_warn():
    n = 40
    C = sparsefmt.CSR(np.arange(n + 1), np.zeros(n, int), shape=(n, 1))
    big = [np.full(shape, 6e4, F16) for shape in ((1, 4), (n, 4))]
    el, er = np.zeros(1, F16), np.zeros(n, F16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dH = ops.gat_backward(C, big[0], el, er, big[1], edge_scores=np.zeros(n, F16))[0]
    assert np.isinf(dH).all()


@pytest.mark.gpu
def test_mixed_devices_are_refused():
    import cupy

    there = [put(cupy, a) for a in (A, H, EL, ER)]
    for k, name in enumerate(("H", "el", "er"), start=1):
        mixed = [*there[:k], (A, H, EL, ER)[k], *there[k + 1 :]]
        with pytest.raises(DeviceError, match=f"{name} is on cpu but A is on cuda:0"):
            ops.gat(*mixed)
    with pytest.raises(DeviceError, match="edge_scores is on cpu but A is on cuda:0"):
        ops.gat(*there, edge_scores=E)
    with pytest.raises(DeviceError, match="grad is on cpu but A is on cuda:0"):
        ops.gat_backward(*there, G)
    with pytest.raises(DeviceError, match="out is on cpu but the inputs are on cuda:0"):
        ops.gat(*there, out=G.copy())
    with pytest.raises(DeviceError, match="el is on cpu but A is on cuda:0"):
        ops.gat_attention(there[0], EL, there[3])
