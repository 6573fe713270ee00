"""What samples of rows refuse: the class of the error, and a text that says how to mend it."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest
from op_cases import features, matrix, put

import sparsefmt
from sparsefmt import DeviceError, DtypeError, FormatError, ShapeError, UnsupportedError, ops

F16, F32, F64 = np.float16, np.float32, np.float64
A = matrix("power law", F32, np.int32).tocsr()  # 60 x 45, 600 entries
X, G = features(45, 4, F32), features(60, 4, F32)
R, C = features(60, (), F32), features(45, (), F32)
READ_ONLY = np.frombuffer(bytes(960), F32).reshape(60, 4)

#: What replaces the arguments of ``spmm_sampled(A, X, 5)`` by name, error, text
CASES = {
    # A
    "dense": ({"A": np.eye(3)}, DtypeError, "A is a ndarray: give a sparsefmt format"),
    "graph": ({"A": sparsefmt.Graph(A)}, DtypeError, "A is a Graph: give one of its formats"),
    "no A": ({"A": None}, DtypeError, "A is a NoneType"),
    # width
    "width zero": ({"width": 0}, ShapeError, "^width is 0: give the most entries of a row, 1 or m"),
    "width less": ({"width": -3}, ShapeError, "^width is -3: give the most entries of a row"),
    "width of many digits": ({"width": -(10**5000)}, ShapeError, "width is less than any int64"),
    "width float": ({"width": 5.0}, DtypeError, "^width is 5.0: give an integer"),
    "width nan": ({"width": np.nan}, DtypeError, "^width is nan: give an integer"),
    "width bool": ({"width": True}, DtypeError, "^width is True: give an integer"),
    "width numpy bool": ({"width": np.True_}, DtypeError, "True_?: give an integer"),
    "width bool array": ({"width": np.array(True)}, DtypeError, "give an integer"),
    "width none": ({"width": None}, DtypeError, "^width is None: give an integer"),
    "width text": ({"width": "5"}, DtypeError, "^width is '5': give an integer"),
    "width array": ({"width": np.arange(2)}, DtypeError, "^width is array.*: give an integer"),
    "width float array": ({"width": np.array(5.0)}, DtypeError, "^width is array"),
    # words
    "strategy": (
        {"strategy": "first"},
        UnsupportedError,
        '^strategy is \'first\': use "bucket", "fastrand" or "random"\\.$',
    ),
    "strategy none": ({"strategy": None}, UnsupportedError, "strategy is None: use .bucket."),
    "strategy list": ({"strategy": ["bucket"]}, UnsupportedError, r"strategy is \['bucket'\]"),
    "strategy number": ({"strategy": 0}, UnsupportedError, "strategy is 0: use .bucket."),
    # seed
    "seed float": ({"seed": 1.0}, DtypeError, "^seed is 1.0: give an integer"),
    "seed bool": ({"seed": False}, DtypeError, "^seed is False: give an integer"),
    "seed none": ({"seed": None}, DtypeError, "^seed is None: give an integer"),
    "seed text": ({"seed": "1"}, DtypeError, "^seed is '1': give an integer"),
    "seed array": ({"seed": np.arange(2)}, DtypeError, r"^seed is array\(\[0, 1\]\): give an int"),
    # factors
    "mean number": ({"mean": 1}, DtypeError, "^mean is 1: give True or False"),
    "mean text": ({"mean": "no"}, DtypeError, "^mean is 'no': give True or False"),
    "mean none": ({"mean": None}, DtypeError, "^mean is None: give True or False"),
    "rescale number": ({"rescale": 0.0}, DtypeError, "^rescale is 0.0: give True or False"),
    "rescale array": ({"rescale": np.ones(1)}, DtypeError, "^rescale is array"),
    "both": (
        {"mean": True, "rescale": True},
        UnsupportedError,
        "^mean and rescale are both True: the mean of a sample .* leave one out",
    ),
    "row length": (
        {"row_scale": C},
        ShapeError,
        r"row_scale has shape \(45,\): give \(60,\), one factor per row of A",
    ),
    "col length": ({"col_scale": R}, ShapeError, r"col_scale has shape \(60,\): give \(45,\)"),
    "row scalar": ({"row_scale": 2.0}, ShapeError, r"row_scale has shape \(\): give one factor"),
    "row dtype": ({"row_scale": R.astype(F64)}, DtypeError, "row_scale is float64 but X is float3"),
    "col integers": ({"col_scale": np.arange(45)}, DtypeError, "col_scale.dtype is int64"),
    # features
    "1-D": ({"X": X[:, 0]}, ShapeError, r"X has shape \(45,\).*X\[:, None\]"),
    "3-D": ({"X": X[:, None]}, ShapeError, r"X has shape \(45, 1, 4\): give \(rows, feat\)"),
    "0-D": ({"X": F32(1)}, ShapeError, r"X is a single float32, of shape \(\)"),
    "none": ({"X": None}, DtypeError, "X is None: give an array"),
    "rows": ({"X": G}, ShapeError, "X has 60 rows but A has 45 columns: X needs one row"),
    "integers": ({"X": X.astype(int)}, DtypeError, "X.dtype is int64: values are float"),
    "objects": ({"X": X.astype(object)}, DtypeError, "X holds Python objects"),
    "masked": ({"X": np.ma.array(X)}, UnsupportedError, "X is a masked array: fill it"),
    "sparse": ({"X": A}, DtypeError, "X is a CSR: give a dense array"),
    "pair": (
        {"X": X.astype(F64)},
        DtypeError,
        r"^A.data is float32 but X is float64: cast one, X.astype\(A.dtype\) or A.astype\(X.dty",
    ),
    "pair half": (
        {"X": X.astype(ml_dtypes.bfloat16)},
        DtypeError,
        "^A.data is float32 but X is bfloat16: cast one",
    ),
    # out
    "out shape": ({"out": X.copy()}, ShapeError, r"out has shape \(45, 4\): the result has \(60,"),
    "out dtype": ({"out": G.astype(F64)}, DtypeError, "out is float64: the result is float32"),
    "out list": ({"out": [[0.0]]}, DtypeError, "out is a list: give a NumPy or CuPy array"),
    "out strided": ({"out": np.zeros((60, 8), F32)[:, ::2]}, FormatError, "not C-contiguous"),
    "out read-only": ({"out": READ_ONLY}, FormatError, "out is read-only"),
}
#: Of those that ``sample`` takes too.
SAMPLE_CASES = [case for case in CASES if {*CASES[case][0]} <= {"A", "width", "strategy", "seed"}]
RATE_CASES = [case for case in CASES if {*CASES[case][0]} <= {"A", "width"}]


def refused(call, given, changes, error, text):
    options = {**given, **changes}
    args = [options.pop(name) for name in given]
    with pytest.raises(error, match=text) as caught:
        call(*args, **options)
    assert isinstance(caught.value, sparsefmt.SparseFmtError)


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused(case):
    """By the operation, and by ``explain`` before anything runs."""
    given = {"A": A, "X": X, "width": 5}
    refused(ops.spmm_sampled, given, *CASES[case])
    refused(partial(ops.explain, "spmm_sampled"), given, *CASES[case])


@pytest.mark.parametrize("case", SAMPLE_CASES)
def test_bad_input_of_samples_is_refused(case):
    for call in (ops.sample, ops.sample_with_perm):
        refused(call, {"A": A, "width": 5}, *CASES[case])


@pytest.mark.parametrize("case", RATE_CASES)
def test_bad_input_of_rates_is_refused(case):
    refused(ops.sampling_rate, {"A": A, "width": 5}, *CASES[case])


def test_out_may_not_overlap_an_input():
    square = sparsefmt.CSR(np.arange(5), np.arange(4), shape=(4, 4))
    buffer = features(6, 4, F64)
    with pytest.raises(FormatError, match="out overlaps an input: give an array of its own"):
        ops.spmm_sampled(square, buffer[:4], 2, out=buffer[2:])


def test_explain_does_not_run_it():
    out = np.full((60, 4), 7, F32)
    assert ops.explain("spmm_sampled", A, X, 5, out=out).chosen.name == "spmm_sampled_csr_numba"
    assert (out == 7).all()


@pytest.mark.parametrize("width", [np.int8(5), np.uint64(5), np.array(5), 5])
def test_integers_of_numpy_are_integers(width):
    plain = ops.spmm_sampled(A, X, 5, strategy="random", seed=3, mean=True)
    how = {"strategy": "random", "seed": np.uint8(3), "mean": np.True_, "rescale": np.False_}
    assert (ops.spmm_sampled(A, X, width, **how) == plain).all()
    assert ops.sampling_rate(A, width) == ops.sampling_rate(A, 5)


@pytest.mark.parametrize("width", [2**31 - 1, 2**31, 2**63, 10**5000], ids=int.bit_length)
def test_any_width_is_taken(xp, width):
    B = put(xp, A)
    assert ops.sample(B, width, strategy="random") == B
    assert ops.sampling_rate(B, width) == 1.0


def test_seeds_of_any_size_are_taken(xp):
    B = put(xp, A)
    seeds = -(10**5000), 2**64 - 1, np.int64(-1), np.uint64(2**64 - 1)
    first, *others = (ops.sample(B, 3, strategy="random", seed=seed) for seed in seeds)
    assert first != others[0]
    assert others[0] == others[1] == others[2]


def test_a_list_goes_where_the_matrix_is(xp):
    C = put(xp, sparsefmt.CSR([0, 2, 3], [0, 1, 0], shape=(2, 2)))
    found = ops.spmm_sampled(C, [[1.0], [3.0]], 1, rescale=True, row_scale=[2.0, 1.0])
    assert type(found) is type(put(xp, X))
    assert found.tolist() == [[4.0], [1.0]]


def test_scales_of_float32_go_beside_two_bytes(xp):
    B = put(xp, A.with_data(None))
    found = ops.spmm_sampled(B, put(xp, X.astype(F16)), 5, row_scale=put(xp, R))
    assert found.dtype == F16


def test_rounding_to_infinity_does_not_warn(xp):
    """Warnings are errors here."""
    C = put(xp, sparsefmt.CSR([0, 9], np.zeros(9, int), shape=(1, 1)))
    found = ops.spmm_sampled(C, xp.full((1, 4), 6e4, F16), 5, rescale=True)
    assert bool(xp.isinf(found).all())


@pytest.mark.gpu
def test_mixed_devices_are_refused():
    import cupy

    B, x = put(cupy, A), put(cupy, X)
    with pytest.raises(DeviceError, match="X is on cpu but A is on cuda:0"):
        ops.spmm_sampled(B, X, 5)
    with pytest.raises(DeviceError, match="col_scale is on cpu but A is on cuda:0"):
        ops.spmm_sampled(B, x, 5, col_scale=C)
    with pytest.raises(DeviceError, match="out is on cpu but the inputs are on cuda:0"):
        ops.spmm_sampled(B, x, 5, out=G.copy())
