"""The strategies keep their promises, shrink, and refuse what makes no sense; so do the oracles."""

import doctest
import os
import re
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.vendor.pretty import pretty

import sparsefmt
from sparsefmt import CBSR, COO, CSC, CSR, SGT
from sparsefmt.formats import oracle
from sparsefmt.ops.cbsr import oracle as cbsr_oracle
from sparsefmt.ops.edges import oracle as edges_oracle
from sparsefmt.ops.matmul import oracle as matmul_oracle
from sparsefmt.testing import (
    assert_close,
    assert_same_matrix,
    cbsr,
    coo,
    csc,
    csr,
    dot,
    dot_bound,
    error_bound,
    feature_widths,
    features,
    graphs,
    index_dtypes,
    sgt,
    spmm_oracle,
    stored_entries,
    strategies,
    value_dtypes,
)
from sparsefmt.testing import plugin as testing_plugin
from sparsefmt.testing import space as graph_kinds
from sparsefmt.testing.space import MatrixOptions, Space

ROOT = Path(__file__).resolve().parents[2]
MATRICES = {"coo": coo, "csr": csr, "csc": csc, "sgt": sgt}
CLASSES = {"coo": COO, "csr": CSR, "csc": CSC, "sgt": SGT, "cbsr": CBSR}
KINDS = tuple(graph_kinds.KINDS)
# A search of the same examples each time; enough of them that a feature which may occur does.
# What else would fail is not asked: explaining it takes a quarter of the time.
searching = settings(
    max_examples=2000, derandomize=True, database=None, phases=[Phase.generate, Phase.shrink]
)
every_format = pytest.mark.parametrize("name", MATRICES)


def smallest(strategy, condition):
    return find(strategy, condition, settings=searching)


def drawn(strategy):
    return smallest(strategy, lambda _: True)


def cells(A):
    return [(row, col) for row, col, _ in stored_entries(A)]


def degrees(A):
    return np.bincount([row for row, _ in cells(A)], minlength=A.n_rows)


def is_sorted(A):
    if A.format == "coo":
        return cells(A) == sorted(cells(A))
    return A.tocsr().has_sorted_indices if A.format == "sgt" else A.has_sorted_indices


HAS = {
    "duplicates": lambda A: len(set(cells(A))) < A.nnz,
    "explicit_zeros": lambda A: A.data is not None and bool((A.data == 0).any()),
    "unsorted": lambda A: not is_sorted(A),
    "empty_rows": lambda A: bool((degrees(A) == 0).any()),
    "hubs": lambda A: bool((degrees(A) >= 5).any()),
    "self_loops": lambda A: any(row == col for row, col in cells(A)),
    "rectangular": lambda A: A.n_rows != A.n_cols,
}

# What flags promise


@every_format
@pytest.mark.covering("name", "flag", one_in=2)
@pytest.mark.parametrize("flag", HAS)
def test_a_feature_occurs_unless_its_flag_is_off(name, flag):
    @given(A=MATRICES[name](**{flag: False}))
    def never(A):
        assert not HAS[flag](A)

    never()
    assert HAS[flag](smallest(MATRICES[name](), HAS[flag]))


@every_format
def test_all_flags_off_at_once(name):
    off = MATRICES[name](**dict.fromkeys(HAS, False))

    @given(A=off)
    def never(A):
        assert not any(has(A) for has in HAS.values())

    never()
    assert smallest(off, lambda A: A.nnz > 1)


@every_format
@given(data=st.data())
def test_matrices_are_valid_and_meet_their_options(name, data):
    A = data.draw(MATRICES[name]())
    assert type(A) is CLASSES[name]
    A.check()
    assert max(A.shape) <= 8
    assert A.nnz <= 24
    options = {"dtype": "float64", "index_dtype": np.int64, "shape": (3, 300), "weighted": True}
    A = data.draw(MATRICES[name](**options, min_nnz=2, max_nnz=5))
    assert (A.shape, A.dtype, A.index_dtype) == ((3, 300), np.float64, np.int64)
    assert 2 <= A.nnz <= 5
    shapes = st.tuples(st.just(4), st.integers(2, 3))
    dtypes = st.sampled_from(["float16", "float32"])
    A = data.draw(MATRICES[name](shape=shapes, dtype=dtypes, index_dtype=index_dtypes()))
    assert A.shape in ((4, 2), (4, 3))
    assert A.dtype in (None, np.float16, np.float32)


@given(data=st.data())
def test_options_that_are_met_at_their_limits(data):
    dense = data.draw(csr(shape=(3, 4), duplicates=False, min_nnz=12, max_nnz=12))
    assert len(set(cells(dense))) == 12
    loops = data.draw(coo(shape=(3, 3), duplicates=False, self_loops=False, min_nnz=6))
    assert len(set(cells(loops))) == 6
    capped = data.draw(csc(shape=(3, 9), hubs=False, min_nnz=12))
    assert degrees(capped).tolist() == [4, 4, 4]
    assert degrees(data.draw(csr(shape=(30, 2), empty_rows=False))).min() >= 1
    assert data.draw(coo(shape=(1, 1), min_nnz=30)).nnz >= 30


@given(A=csr(weighted=True), B=csr(weighted=False))
def test_weights_are_there_or_not(A, B):
    assert A.data is not None
    assert B.data is None


def test_weights_are_either_by_default():
    assert smallest(csr(), lambda A: A.data is None).dtype is None
    assert smallest(csr(), lambda A: A.data is not None).dtype == np.float32


@given(A=coo(shape=(2**40, 2**59)))
def test_shapes_beyond_int32_get_int64_indices(A):
    assert A.index_dtype == np.int64
    A.check()


# Values


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("top", [1, 16.0, 100.3, None])
def test_values_stay_within_their_magnitudes(dtype, top):
    pytest.importorskip("ml_dtypes")

    options = {"dtype": dtype, "max_magnitude": top}

    @settings(max_examples=15)
    @given(A=csr(weighted=True, **options), X=features(9, width=8, **options))
    def within(A, X):
        data = np.abs(A.data.astype(np.float64))
        assert np.isfinite(data).all()
        assert (data <= (np.inf if top is None else top * 1.01)).all()
        tiny = 2.0**-14 if dtype == "float16" else 2.0**-1022 if dtype == "float64" else 2.0**-126
        assert ((data == 0) | (data >= (tiny if top is None else 1 / 64))).all()
        assert np.isfinite(X.astype(np.float64)).all()

    within()


@pytest.mark.parametrize("shape", [(2, 3), (9, 20)], ids=["drawn", "seeded"])
def test_special_values_occur_only_when_allowed(shape):
    def draw(**options):
        return features(shape[0], width=shape[1], dtype="float32", **options)

    for is_special in (np.isnan, np.isinf, np.isneginf):
        allowed = draw(**{"allow_nan" if is_special is np.isnan else "allow_infinity": True})
        assert smallest(allowed, lambda X, f=is_special: f(X).any()).shape == shape

    @given(X=draw(), Y=draw(allow_infinity=True), Z=draw(allow_nan=True))
    def never(X, Y, Z):
        assert np.isfinite(X).all()
        assert not np.isnan(Y).any()
        assert not np.isinf(Z).any()

    never()


@given(data=st.data(), dtype=st.sampled_from(["float16", "float32", "float64"]))
def test_features_have_the_asked_shape_and_dtype(data, dtype):
    X = data.draw(features(st.integers(0, 5), width=feature_widths(), dtype=dtype))
    assert X.dtype == dtype
    assert X.shape[0] <= 5
    assert X.shape[1] in strategies.samples.WIDTHS
    assert data.draw(features(3)).shape[0] == 3


@given(
    A=cbsr(shape=(3, 300), k=2),
    B=cbsr(explicit_zeros=False),
    C=cbsr(shape=st.tuples(st.just(2), st.integers(4, 5)), k=4),
)
def test_balanced_rows_are_balanced(A, B, C):
    assert (A.shape, A.k, A.indices.dtype) == ((3, 300), 2, np.uint16)
    A.check()
    B.check()
    assert (B.data != 0).all()
    assert (C.n_rows, C.k) == (2, 4)


# Kinds of graphs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("large", [False, True])
def test_graphs_are_valid_and_store_no_cell_twice(kind, large):
    @settings(max_examples=20, suppress_health_check=[HealthCheck.data_too_large])
    @given(A=graphs(kinds=[kind], large=large, max_side=100 if large else None))
    def valid(A):
        A.check()
        coo = A.tocoo()
        assert len(np.unique(coo.row.astype(np.int64) * A.n_cols + coo.col)) == A.nnz
        assert not large or min(A.shape) >= 50

    valid()


def shape_of(kind):
    """A condition that the kind's name promises, on graphs large enough to show it."""
    return {
        "empty": lambda A: A.nnz == 0,
        "one_row": lambda A: (degrees(A) > 0).sum() == 1,
        "star": lambda A: degrees(A).max() == A.n_cols and degrees(A).min() >= 1,
        "power_law": lambda A: all(
            degree == max(A.n_cols // (row + 1), 1) for row, degree in enumerate(degrees(A))
        ),
        "banded": lambda A: all(abs(row - col) <= 2 for row, col in cells(A)),
        "dense_block": lambda A: A.nnz == len(set(r for r, _ in cells(A))) * max(degrees(A)),
        "isolated_rows": lambda A: (degrees(A) == 0).any() and degrees(A).max() == 3,
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_kind_is_what_its_name_says(kind, data):
    A = data.draw(graphs(kinds=[kind]).filter(lambda A: min(A.shape) >= 6))
    assert shape_of(kind)(A)


def test_graphs_come_in_every_format_and_square_only_if_asked():
    for name in MATRICES:
        assert smallest(graphs(format=None), lambda A, name=name: A.format == name)
        assert drawn(graphs(format=name)).format == name

    @given(A=graphs(rectangular=False, dtype="float16", index_dtype="int64", weighted=True))
    def square(A):
        assert A.n_rows == A.n_cols
        assert (A.dtype, A.index_dtype) == (np.float16, np.int64)

    square()


def test_large_graphs_are_large_and_renamed():
    A = smallest(graphs(kinds=["banded"], large=True), lambda A: not shape_of("banded")(A))
    assert min(A.shape) >= 1000


# Shrinking


@every_format
def test_the_smallest_matrices_are_empty_or_one_cell(name):
    A = smallest(MATRICES[name](), lambda A: A.nnz >= 1)
    assert (A.shape, A.nnz, A.data) == ((1, 1), 1, None)
    A = drawn(MATRICES[name]())
    assert (A.shape, A.nnz, A.index_dtype) == ((0, 0), 0, np.int32)


SMALLEST = [(lambda x: True, 0.0), (lambda x: x != 0, 1.0), (lambda x: x < 0, -1.0)]


@pytest.mark.parametrize(("condition", "value"), [*SMALLEST, (lambda x: x > 2.5, 3.0)])
def test_values_shrink_to_whole_numbers(condition, value):
    A = smallest(csr(weighted=True), lambda A: A.nnz >= 1 and condition(float(A.data[0])))
    assert (A.shape, A.data.tolist(), A.dtype) == ((1, 1), [value], np.float32)


@pytest.mark.parametrize(
    ("flag", "shape", "nnz"),
    [
        ("duplicates", (1, 1), 2),
        ("unsorted", (1, 2), 2),
        ("empty_rows", (1, 0), 0),
        ("hubs", (1, 5), 5),
        ("self_loops", (1, 1), 1),
        ("rectangular", (0, 1), 0),
    ],
)
def test_a_feature_shrinks_to_its_smallest_carrier(flag, shape, nnz):
    A = smallest(csr(), HAS[flag])
    assert A.nnz == nnz
    assert A.shape in (shape, shape[::-1]) if flag == "rectangular" else A.shape == shape


def test_graphs_shrink_in_kind_and_sides():
    A = smallest(graphs(), lambda A: A.nnz >= 5)
    assert A.shape == (1, 5)
    A = smallest(graphs(kinds=["star"], large=True, max_side=40), lambda A: A.nnz >= 1)
    assert A.shape == (20, 20)


def test_features_shrink_to_zeros_and_to_ones_and_balanced_rows_to_one_cell():
    for size, value in ((2, 0), (9, 1)):
        assert (drawn(features(size, width=size, dtype="float32")) == value).all()
    A = smallest(cbsr(), lambda A: A.nnz >= 1)
    assert (A.shape, A.k, A.data.tolist()) == ((1, 1), 1, [[0.0]])


# Arguments

WRONG = {
    **{f"{flag}=1": {flag: 1} for flag in HAS},
    "allow_nan=None": {"allow_nan": None},
    "weighted=2": {"weighted": 2},
    "max_side=-1": {"max_side": -1},
    "max_side=True": {"max_side": True},
    "min_nnz=1.5": {"min_nnz": 1.5},
    "max_nnz='3'": {"max_nnz": "3"},
    "min_nnz=4 is larger than max_nnz=3": {"min_nnz": 4, "max_nnz": 3},
    "max_magnitude=0.5": {"max_magnitude": 0.5},
    "max_magnitude=nan": {"max_magnitude": float("nan")},
    "max_magnitude='big'": {"max_magnitude": "big"},
    "needs values, but weighted=False": {"allow_nan": True, "weighted": False},
    "dtype='float32' needs values": {"dtype": "float32", "weighted": False},
    "dtype is int64": {"dtype": "int64"},
    "'float33'": {"dtype": "float33"},
    "index_dtype is int16": {"index_dtype": np.int16},
    "shape is 3: give two": {"shape": 3},
    "shape is (1, 2, 3): give two": {"shape": (1, 2, 3)},
    "shape is (1.0, 2): give two": {"shape": (1.0, 2)},
    "shape is (-1, 2): sizes": {"shape": (-1, 2)},
    "sizes go to": {"shape": (1, 2**61)},
    "is not square": {"shape": (2, 3), "rectangular": False},
    "shape=(0, 3) cannot meet": {"shape": (0, 3), "min_nnz": 1},
    "shape=(2, 2) cannot meet": {"shape": (2, 2), "min_nnz": 5, "duplicates": False},
    "shape=(3, 0) cannot meet": {"shape": (3, 0), "empty_rows": False},
    "shape=(1, 1) cannot meet": {"shape": (1, 1), "min_nnz": 1, "self_loops": False},
    "shape=(2, 9) cannot meet": {"shape": (2, 9), "min_nnz": 9, "hubs": False},
    "shape=(9, 2) cannot meet": {"shape": (9, 2), "max_nnz": 8, "empty_rows": False},
    "no shape with sides up to max_side=2": {"max_side": 2, "min_nnz": 5, "duplicates": False},
}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        *((partial(MATRICES[name], **WRONG[text]), text) for name in MATRICES for text in WRONG),
        (lambda: sgt(tile=(0, 8)), "tile is (0, 8)"),
        (lambda: sgt(tile="16x8"), "tile is '16x8'"),
        (lambda: cbsr(k=0), "k=0 must be a positive integer"),
        (lambda: cbsr(k=True), "k=True must be a positive integer"),
        (lambda: cbsr(max_side=3, k=4), "max_side=3 leaves no room for k=4"),
        (lambda: cbsr(max_side=0), "max_side=0 leaves no room for k=1"),
        (lambda: graphs(kinds=["tree"]), "must be some of empty, one_row"),
        (lambda: graphs(kinds=[]), "must be some of empty, one_row"),
        (lambda: graphs(kinds="star"), "must be some of empty, one_row"),
        (lambda: graphs(format="cbsr"), "format='cbsr' must be None or one of coo"),
        (lambda: graphs(max_side=-2), "max_side=-2"),
        (lambda: features(-1), "a size is -1"),
        (lambda: features(3, width=2.5), "a size is 2.5"),
        (lambda: features(3, dtype="complex64"), "dtype is complex64"),
        (lambda: features(3, allow_infinity=1), "allow_infinity=1"),
        (lambda: value_dtypes(bfloat16="yes"), "bfloat16='yes'"),
        # What strategies give is refused when it is drawn.
        (lambda: drawn(csr(shape=st.just((2, -3)))), "shape is (2, -3): sizes"),
        (lambda: drawn(csr(shape=st.just((0, 0)), min_nnz=1)), "shape=(0, 0) cannot meet"),
        (lambda: drawn(csr(dtype=st.just("int8"), weighted=True)), "dtype is int8"),
        (
            lambda: drawn(csr(index_dtype="int32", shape=(1, 2**40))),
            "index_dtype=int32 is too small",
        ),
        (lambda: drawn(cbsr(shape=(2, 0))), "leaves no room for k=1"),
        (lambda: drawn(cbsr(shape=(2, 3), k=4)), "leaves no room for k=4"),
        (lambda: drawn(sgt(tile=st.just((1, 0)))), "tile is (1, 0)"),
        (lambda: drawn(features(st.just(-1))), "a size is -1"),
    ],
)
def test_wrong_arguments_are_refused_and_named(make, text):
    with pytest.raises(InvalidArgument, match=re.escape(text)):
        make()


def test_unknown_options_are_type_errors_and_typed_ones_are_read():
    with pytest.raises(TypeError, match="nnz"):
        csr(nnz=3)
    with pytest.raises(TypeError):
        csr((2, 3))
    assert set(MatrixOptions.__annotations__) == {field.name for field in fields(Space)}


def test_bfloat16_comes_with_ml_dtypes(monkeypatch):
    pytest.importorskip("ml_dtypes")
    assert smallest(value_dtypes(), lambda dtype: dtype.name == "bfloat16")
    monkeypatch.setattr("sparsefmt.testing.space.find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match="ml_dtypes"):
        value_dtypes(bfloat16=True)


# Oracles

A = CSR([0, 2, 2, 3], [1, 0, 1], np.array([2.0, 0.0, -1.0]), shape=(3, 2))


def test_oracle_by_hand_stays_off_implicit_zeros():
    X = np.array([[1.0, 10.0], [3.0, 0.5]])
    assert spmm_oracle(A, X).tolist() == [[6.0, 1.0], [0.0, 0.0], [-3.0, -0.5]]
    assert spmm_oracle(A.with_data(None), X).tolist() == [[4.0, 10.5], [0.0, 0.0], [3.0, 0.5]]
    X = np.array([[np.inf], [1.0]])
    assert np.isnan(spmm_oracle(A, X)[0, 0])  # the explicit zero does touch infinity
    assert spmm_oracle(A, X)[1:].tolist() == [[0.0], [-1.0]]


@pytest.mark.parametrize("name", MATRICES)
def test_oracle_reads_every_format(name):
    X = np.array([[1.0, 10.0], [3.0, 0.5]])
    assert spmm_oracle(A.asformat(name), X).tolist() == spmm_oracle(A, X).tolist()
    assert sorted(stored_entries(A.asformat(name))) == sorted(stored_entries(A))


@pytest.mark.parametrize("X", [np.ones((3, 2)), np.ones(2), np.ones((2, 1, 1))], ids=np.shape)
def test_oracle_refuses_features_that_do_not_fit(X):
    for function in (spmm_oracle, error_bound):
        with pytest.raises(sparsefmt.ShapeError, match=r"give \(2, feat\)"):
            function(A, X)


def test_bound_by_hand_is_not_so_wide_that_a_lost_entry_fits():
    X = np.array([[1.0], [3.0]], np.float32)
    eps, tiny = 2.0**-23, 2.0**-126
    expected = [[2 * 2 * (6 * eps + tiny)], [0.0], [2 * (3 * eps + tiny)]]
    assert error_bound(A, X).tolist() == expected
    assert error_bound(A, X, factor=1.0)[0, 0] == expected[0][0] / 2
    assert error_bound(A, X, dtype=np.float16)[0, 0] == 4 * (6 * 2.0**-10 + 2.0**-24)
    X = np.ones((2, 1), np.float32)
    wrong = spmm_oracle(A, X)
    wrong[2] = 0
    with pytest.raises(AssertionError, match=r"1 of 3 cells are off; at \(2, 0\)"):
        assert_close(wrong, spmm_oracle(A, X), bound=error_bound(A, X))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@settings(max_examples=100)
@given(data=st.data())
def test_bound_covers_sums_in_any_order(dtype, data):
    A = data.draw(csr(dtype=dtype, weighted=True))
    X = data.draw(features(A.n_cols, width=2, dtype=dtype))
    Y = np.zeros((A.n_rows, 2), dtype)
    for row, col, value in data.draw(st.permutations(stored_entries(A))):
        Y[row] += dtype(value) * X[col]
    assert_close(Y, spmm_oracle(A, X), bound=error_bound(A, X))


def test_dot_bound_grows_with_the_magnitudes_and_covers_the_law():
    x, y = np.ones((2, 3), np.float32), np.ones((3, 3), np.float32)
    assert 0 < dot_bound(A, x, y) < dot_bound(A, 100 * x, y) < 1e-2
    left, right = dot(spmm_oracle(A, x), y), dot(x, spmm_oracle(A.T, y))
    assert_close(left, right, bound=dot_bound(A, x, y))
    with pytest.raises(AssertionError, match="off"):
        assert_close(left + 0.01, right, bound=dot_bound(A, x, y))


@pytest.mark.parametrize(
    ("actual", "expected"),
    [(np.nan, 1.0), (1.0, np.nan), (np.inf, -np.inf), (np.inf, 1.0), (1.0, np.inf), (1.5, 1.0)],
)
def test_special_values_are_close_to_themselves_only(actual, expected):
    assert_close([expected, actual], [expected, actual], bound=0)
    with pytest.raises(AssertionError, match=r"1 of 2 cells are off; at \(1,\)"):
        assert_close([0, actual], [0, expected], bound=0.25)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (A.T.tocsr(), "shapes differ"),
        (A.with_data(None), "only one is weighted"),
        (A.with_data(np.array([2.0, -0.0, -1.0])), "lacks 1 entries"),
        (CSR([0, 2, 2, 4], [1, 0, 1, 1], [2.0, 0.0, -1.0, -1.0], shape=(3, 2)), "1 others"),
        (CSR([0, 2, 3, 3], [1, 0, 1], [2.0, 0.0, -1.0], shape=(3, 2)), "(2, 1, "),
    ],
)
def test_matrices_that_differ_are_told_apart(other, text):
    with pytest.raises(AssertionError, match=re.escape(text)):
        assert_same_matrix(A, other)


def test_matrices_are_the_same_in_any_format_and_of_one_shape():
    assert_same_matrix(A, A.tosgt((2, 1)))
    assert_same_matrix(A, A.astype(np.float16, index_dtype=np.int64))
    nan = A.with_data(np.full(3, np.nan))
    assert_same_matrix(nan, nan.tocsc())
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_close(np.zeros((1, 2)), np.zeros(2), bound=1)


# Documentation


MODULES = [strategies, oracle, matmul_oracle, edges_oracle, cbsr_oracle]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_of_docstrings_run(module):
    result = doctest.testmod(module)
    assert result.attempted >= 4
    assert result.failed == 0


def in_python(command, cwd=None, **variables):
    """Run a command in a fresh interpreter; what it prints."""
    command, env = [sys.executable, *command], os.environ | variables
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_pasted_example_passes_in_a_new_users_project(tmp_path):
    """A fresh process, which compiles, under hypothesis' own profile and deadline, also in CI."""
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "test_pasted.py").write_text(block, encoding="utf-8")
    (tmp_path / "pytest.ini").touch()  # the settings of no folder above
    command = ["-m", "pytest", "-W", "error", "--hypothesis-profile=default"]
    done = in_python(command, cwd=tmp_path, PYTHONPATH=str(ROOT), PYTEST_ADDOPTS="")
    assert "1 passed" in done


def test_page_names_every_option_and_function():
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    for name in (*MatrixOptions.__annotations__, *MATRICES, *KINDS, "cbsr", "assert_same_matrix"):
        assert name in page
    for strategy in (*MATRICES.values(), cbsr, graphs, features, feature_widths, index_dtypes):
        assert ">>>" in strategy.__doc__


# The plug-in

# A distribution's metadata beside the checkout: what an installation adds for hypothesis to find.
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: sparsefmt-plugin-test\nVersion: 0\n",
    "entry_points.txt": "[hypothesis]\n_ = sparsefmt.testing.plugin:register\n",
}


@pytest.fixture
def python(tmp_path):
    """Run code in a fresh interpreter in which the plug-in counts as installed."""
    folder = tmp_path / "sparsefmt_plugin_test-0.dist-info"
    folder.mkdir()
    for name, text in METADATA.items():
        (folder / name).write_text(text, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    return lambda code: in_python(["-W", "error", "-c", code], PYTHONPATH=paths).split()


def test_importing_hypothesis_loads_no_format_and_no_array_library(python):
    code = """
import sys, hypothesis
print("sparsefmt.testing.plugin" in sys.modules)
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("numpy", "scipy", "cupy")))
print(*sorted(name for name in sys.modules if name.split(".")[0] == "sparsefmt"))
"""
    loaded = "sparsefmt sparsefmt._lazy sparsefmt.testing sparsefmt.testing.plugin"
    assert python(code) == ["True", *loaded.split()]


def test_plug_in_takes_under_five_milliseconds(python):
    code = """
import os, sys, time
os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"
import importlib.metadata, hypothesis.strategies
for _ in range(5):
    for name in [name for name in sys.modules if name.startswith("sparsefmt")]:
        del sys.modules[name]
    start = time.perf_counter()
    import sparsefmt.testing.plugin
    sparsefmt.testing.plugin.register()
    print(time.perf_counter() - start)
"""
    best = min(map(float, python(code)))
    assert best < 0.005, f"{best * 1000:.1f} ms, the best of 5"


ORDERS = [
    "import hypothesis, sparsefmt",
    "import sparsefmt, hypothesis",
    "import sparsefmt; sparsefmt.SGT; sparsefmt.CBSR; import hypothesis",
    "import sparsefmt; sparsefmt.COO; import hypothesis",
    "import hypothesis; from sparsefmt.formats.compressed import CSR; import sparsefmt",
    "import sparsefmt.testing, hypothesis",
    "import hypothesis; from sparsefmt.formats.base import Format; import sparsefmt",
]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a copy of the process for each order")
def test_formats_are_found_by_type_in_every_order_of_imports(python):
    code = f"""
import os, sys, numpy
for order in {ORDERS}:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, order
        continue
    exec(order)
    from hypothesis import Phase, find, settings, strategies as st
    quiet = settings(database=None, derandomize=True, max_examples=1, phases=[Phase.generate])
    for name in ("COO", "CSR", "CSC", "SGT", "CBSR", "Format"):
        kind = getattr(sparsefmt, name)
        print(isinstance(find(st.from_type(kind), lambda A: True, settings=quiet), kind))
    print(any(type(finder).__name__ == "_Watch" for finder in sys.meta_path), flush=True)
    break
"""
    assert python(code) == [*["True"] * 6, "False"] * len(ORDERS)


def test_registering_twice_is_harmless_and_other_modules_are_left_alone(monkeypatch):
    before = list(sys.meta_path)
    for _ in range(2):
        testing_plugin.register()
    assert sys.meta_path == before
    for kind in CLASSES.values():
        assert type(find(st.from_type(kind), lambda A: True, settings=searching)) is kind
    watch = testing_plugin._Watch(["sparsefmt.nothing"])
    assert watch.find_spec("json", None) is watch.find_spec("sparsefmt.nothing", None) is None
    assert not watch.waiting


@settings(max_examples=50)
@given(A=graphs(format=None) | cbsr())
def test_a_printed_example_can_be_pasted(A):
    names = {kind.__name__: kind for kind in CLASSES.values()}
    names |= {"np": np, "array": np.array, "nan": np.nan, "inf": np.inf}
    dtypes = "uint8 uint16 int32 int64 float16 bfloat16 float32 float64".split()
    names |= {name: np.dtype(name) for name in dtypes}
    assert eval(pretty(A), names) == A
