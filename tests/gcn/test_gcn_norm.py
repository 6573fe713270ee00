"""The normalisation of GCN against loops in float64, and its gradient against complex steps."""

import numpy as np
import pytest
from hypothesis import given
from op_cases import DTYPES, INDEX_DTYPES, long_rows, name_of, put, rows_of

from sparsefmt import COO, CSR, DtypeError, Graph, ShapeError, ops
from sparsefmt.formats.oracle import float64
from sparsefmt.testing import assert_close, coo, index_dtypes, stored_entries

LOOPS = pytest.mark.parametrize("self_loops", [True, False])
KINDS = ["empty", "no vertices", "one vertex", "power law", "banded", "dense block", "isolated"]


def square(kind, dtype, index_dtype=np.int32, *, seed=0):
    """In no order, not symmetric, some loops stored, some of them twice; values of either sign."""
    rng = np.random.default_rng(seed)
    n, row, col = {
        "empty": (4, [], []),
        "no vertices": (0, [], []),
        "one vertex": (1, [0, 0], [0, 0]),
        "power law": (50, np.minimum(rng.zipf(1.6, 400) - 1, 49), rng.integers(0, 50, 400)),
        "banded": (40, np.repeat(np.arange(40), 2), np.arange(80) // 2 * 7 % 40),
        "dense block": (32, *np.indices((16, 16)).reshape(2, -1)),
        "isolated": (90, rng.integers(0, 9, 50) * 10, rng.integers(0, 30, 50)),
    }[kind]
    order = rng.permutation(len(row))
    data = None if dtype is None else rng.integers(-4, 12, len(row)).astype(dtype) / dtype(4)
    row, col = (np.asarray(a, index_dtype)[order] for a in (row, col))
    return COO(row, col, None if data is None else data.astype(dtype), shape=(n, n))


def oracle(entries, values, n, *, self_loops):
    """Values of the entries and, if asked for, of the loops; complex ones too."""
    degree, has_loop = [0] * n, [False] * n
    for (i, j, _), a in zip(entries, values, strict=True):
        degree[i] += a
        has_loop[i] |= i == j
    degree = [d + (self_loops and not has) for d, has in zip(degree, has_loop, strict=True)]
    s = [0 if np.real(d) <= 0 else np.sqrt(1 / d) for d in degree]
    found = [s[i] * a * s[j] for (i, j, _), a in zip(entries, values, strict=True)]
    own = [0 if has else s[v] ** 2 for v, has in enumerate(has_loop)]
    return np.array(found + own * self_loops)


def in_order_of_coo(A, result):
    """The entries of the result as a COO has them: those of ``A``, then the loops."""
    entries = stored_entries(result)
    if A.format == "coo" or len(entries) == A.nnz:
        return entries
    ends = A.indptr[1:] + np.arange(A.n_rows)
    own = set(ends.tolist())
    return [one for k, one in enumerate(entries) if k not in own] + [entries[k] for k in ends]


def bound_of(A, expected):
    """Of sums that are exact: two inverse roots, two products, one rounding."""
    dtype = np.dtype(np.float32) if A.data is None else A.dtype
    eps = 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)
    return (eps + 8 * min(eps, 2.0**-23)) * np.abs(expected) + (6e-8 if eps > 2.0**-20 else 0)


def check(xp, A, *, self_loops):
    """Every value and place; ``A`` is a COO or CSR whose sums are exact in float32."""
    before = A.copy()
    B = ops.gcn_norm(put(xp, A), self_loops=self_loops)
    assert B.format == A.format
    assert B.dtype == (A.dtype or np.float32)
    assert B.index_dtype == A.index_dtype
    B.check()
    entries, found = stored_entries(A), in_order_of_coo(A.to("cpu"), B)
    places = [(i, j) for i, j, _ in entries] + [(v, v) for v in range(A.n_rows)] * self_loops
    assert [(i, j) for i, j, _ in found] == places
    expected = oracle(entries, [a for *_, a in entries], A.n_rows, self_loops=self_loops)
    assert_close(np.array([b for *_, b in found]), expected, bound=bound_of(A, expected))
    assert A == before
    return B


def loop_places(A):
    """Of the values of the result: entries, then loops."""
    n = A.n_rows
    if A.format == "coo":
        return np.arange(A.nnz), A.nnz + np.arange(n)
    shift = np.repeat(np.arange(n), A.lengths)
    return np.arange(A.nnz) + shift, A.indptr[1:] + np.arange(n)


def gradient_oracle(A, grad, *, self_loops):
    """``sum over the result of grad[k] db[k] / da[e]``, by a complex step at each entry."""
    entries = stored_entries(A)
    values = np.array([a for *_, a in entries], np.complex128)
    found = np.zeros(A.nnz)
    for e in range(A.nnz):
        values[e] += 1e-30j
        b = oracle(entries, values, A.n_rows, self_loops=self_loops)
        found[e] = (grad * b.imag).sum() / 1e-30
        values[e] = values[e].real
    return found


def check_backward(xp, A, *, self_loops, seed=5):
    n = A.n_rows * self_loops
    dtype = np.dtype(np.float32) if A.data is None else A.dtype
    grad = np.random.default_rng(seed).uniform(-1, 1, A.nnz + n).astype(dtype)
    in_order = float64(grad)
    if self_loops:
        in_order = in_order[np.concatenate(loop_places(A)).astype(int)]
    found = ops.gcn_norm_backward(put(xp, A), put(xp, grad), self_loops=self_loops)
    expected = gradient_oracle(A, in_order, self_loops=self_loops)
    eps = 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)
    scale = np.abs(expected).max(initial=1)
    assert_close(found, expected, bound=eps * np.abs(expected) + 200 * min(eps, 2.0**-23) * scale)
    assert (found.dtype, found.shape) == (dtype, (A.nnz,))


@LOOPS
@pytest.mark.parametrize("format", ["coo", "csr"])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("dtype", [None, *DTYPES], ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_graph_and_dtype(xp, kind, dtype, index_dtype, format, self_loops):
    check(xp, square(kind, dtype, index_dtype).asformat(format), self_loops=self_loops)


@LOOPS
@pytest.mark.parametrize("format", ["coo", "csr"])
@pytest.mark.parametrize("dtype", [None, *DTYPES], ids=name_of)
@pytest.mark.parametrize("kind", ["empty", "no vertices", "one vertex", "banded", "isolated"])
def test_gradients_are_those_of_complex_steps(xp, kind, dtype, format, self_loops):
    for index_dtype in INDEX_DTYPES:
        A = square(kind, dtype, index_dtype).asformat(format)
        check_backward(xp, A, self_loops=self_loops)


@LOOPS
@given(
    A=coo(rectangular=False, dtype=np.float64, index_dtype=index_dtypes(), max_side=6, max_nnz=14)
)
def test_any_small_graph(xp, A, self_loops):
    if A.data is not None:  # sums of eighths are exact in any order
        A = A.with_data(np.round(A.data * 8) / 8)
    for B in (A, A.tocsr()):
        check(xp, B, self_loops=self_loops)
        check_backward(xp, B, self_loops=self_loops)


@LOOPS
@pytest.mark.parametrize("dtype", [None, np.float32], ids=name_of)
def test_hubs_and_runs_of_one_row(xp, dtype, self_loops):
    """Rows that blocks and teams share, and the runs of them that a sorted COO has."""
    A = long_rows(dtype, np.int32)
    data = None if dtype is None else np.round(np.abs(A.data) * 8) / 8
    csr = CSR(A.indptr, A.indices, data, shape=(A.n_rows, A.n_rows))
    coo_, shuffled = csr.tocoo(), np.random.default_rng(1).permutation(csr.nnz)
    data = None if dtype is None else data[shuffled]
    for B in (csr, coo_, COO(coo_.row[shuffled], coo_.col[shuffled], data, shape=csr.shape)):
        check(xp, B, self_loops=self_loops)


@pytest.mark.parametrize("format", ["csc", "sgt"])
def test_other_formats_give_a_csr_and_gradients_in_their_own_order(xp, format):
    coo_ = square("power law", np.float64)
    A = coo_.asformat(format)
    there = put(xp, A)
    B = ops.gcn_norm(there)
    csr, perm = A.tocsr_with_perm()
    assert B == ops.gcn_norm(put(xp, csr))
    grad = put(xp, np.random.default_rng(0).random(B.nnz))
    found = float64(ops.gcn_norm_backward(there, grad))
    expected = float64(ops.gcn_norm_backward(put(xp, csr), grad))
    assert_close(found[perm], expected, bound=1e-14)  # atomics
    unweighted = put(xp, A.with_data(None))
    assert ops.gcn_norm_backward(unweighted, grad.astype(np.float32)).shape == (A.nnz,)


def test_row_balanced_features_of_a_square_matrix(xp):
    S = ops.maxk(np.random.default_rng(0).random((9, 9)), 3)
    B = ops.gcn_norm(put(xp, S))
    assert B == ops.gcn_norm(put(xp, S.tocsr()))
    grad = put(xp, np.ones(B.nnz))
    found = ops.gcn_norm_backward(put(xp, S), grad)
    assert found.shape == (9, 3)
    expected = float64(ops.gcn_norm_backward(put(xp, S.tocsr()), grad))
    assert_close(found.ravel(), expected, bound=1e-14)


def test_without_loops_the_indices_are_shared(xp):
    for format in ("coo", "csr"):
        A = put(xp, square("banded", np.float32).asformat(format))
        B = ops.gcn_norm(A, self_loops=False)
        assert all(getattr(A, name) is getattr(B, name) for name in A._array_fields[:2])


def test_a_degree_that_is_not_positive_gives_zeros(xp):
    """Row 0 sums to -2 (with its loop to -1), row 1 to exactly 0, row 2 to 4."""
    A = COO([0, 1, 1, 2, 2], [1, 0, 1, 2, 0], np.array([-2, 1, -1, 3, 1], np.float32), shape=(3, 3))
    B = ops.gcn_norm(put(xp, A))
    assert B.data.tolist() == [0, 0, 0, 0.75, 0, 0, 0, 0]
    found = ops.gcn_norm_backward(put(xp, A), xp.ones(8, np.float32))
    assert found.tolist()[:3] == [0, 0, 0]


def test_infinite_and_nan_weights_stay_in_their_rows_and_columns(xp):
    data = np.array([np.inf, np.nan, 1, 1], np.float32)
    A = COO([0, 1, 2, 3], [1, 2, 3, 2], data, shape=(4, 4))
    for B in (A, A.tocsr()):
        values = float64(ops.gcn_norm(put(xp, B), self_loops=False).data)
        assert np.isnan(values[:2]).all()
        assert values[2:].tolist() == [1, 1]


def test_counts_and_float16_do_not_overflow(xp):
    """100 000 entries of one row: float16 ends at 65 504."""
    n = 100_000
    A = COO(np.zeros(n, np.int32), np.arange(n, dtype=np.int32), shape=(n, n))
    for data in (None, np.ones(n, np.float16)):
        for B in (A.with_data(data), A.with_data(data).tocsr()):
            values = float64(ops.gcn_norm(put(xp, B)).data)
            assert values[0] == pytest.approx(1 / n, rel=1e-2)
            assert values[1] == pytest.approx(n**-0.5, rel=2e-3)


def test_explain_names_the_kernels():
    A = square("banded", np.float32)
    for B, name in ((A, "coo_numba"), (A.tocsr(), "csr_numba"), (A.tocsc(), "csr_numba")):
        assert ops.explain("gcn_norm", B).chosen.name == f"gcn_norm_{name}"
    grad = np.ones(A.nnz + 40, np.float32)
    assert ops.explain("gcn_norm_backward", A, grad).chosen.name == "gcn_norm_backward_numba"


def test_bad_input_is_refused():
    A = square("banded", np.float32)
    grad = np.ones(A.nnz + 40, np.float32)
    for call, error, text in (
        (lambda: ops.gcn_norm(rows_of([1, 2], 5, None, np.int32)), ShapeError, r"shape \(2, 5\)"),
        (lambda: ops.gcn_norm(np.eye(3)), DtypeError, "A is a ndarray: give a sparsefmt format"),
        (lambda: ops.gcn_norm(Graph(A)), DtypeError, "A is a Graph"),
        (lambda: ops.gcn_norm(A, self_loops=1), DtypeError, "self_loops is 1: give True or False"),
        (lambda: ops.gcn_norm_backward(A, grad[:-1]), ShapeError, r"give \(120,\)"),
        (lambda: ops.gcn_norm_backward(A, grad, self_loops=False), ShapeError, r"give \(80,\)"),
        (lambda: ops.gcn_norm_backward(A, grad.astype(int)), DtypeError, "grad.dtype"),
        (lambda: ops.gcn_norm_backward(A, grad.astype(float)), DtypeError, "result is float32"),
        (lambda: ops.gcn_norm_backward(A.T[:, :3], grad), ShapeError, "as many columns as rows"),
    ):
        with pytest.raises(error, match=text):
            call()
