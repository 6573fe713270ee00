"""Small work on the CPU, by NumPy's and SciPy's loops, against loops over entries in float64."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from op_cases import (
    DTYPES,
    INDEX_DTYPES,
    KINDS,
    ROW_LENGTHS,
    WIDTHS,
    far_apart,
    features,
    in_order,
    intact,
    matrix,
    name_of,
    poisoned,
    rows_of,
)

import sparsefmt
from sparsefmt import COO, ops
from sparsefmt.ops.attention.oracle import (
    gat_attention_bound,
    gat_attention_oracle,
    gat_backward_bound,
    gat_backward_oracle,
    gat_bound,
    gat_oracle,
)
from sparsefmt.ops.edges.oracle import (
    edge_softmax_backward_bound,
    edge_softmax_backward_oracle,
)
from sparsefmt.ops.engine import small
from sparsefmt.testing import (
    assert_close,
    edge_softmax_bound,
    edge_softmax_oracle,
    error_bound,
    sddmm_bound,
    sddmm_oracle,
    spmm_oracle,
)

pytestmark = pytest.mark.usefixtures("small_work", "one_thread")

over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
over_indices = pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
over_kinds = pytest.mark.parametrize("kind", KINDS)
GAT_OPTIONS = [
    {},
    {"edge_scores": True, "negative_slope": 0.5},
    {"edge_scores": True, "dropout": 0.25, "seed": -3, "negative_slope": -0.1},
]


def check_spmm(A, X, **options):
    """Into poisoned memory: every element right, no guard touched."""
    out, buffer = poisoned(np, (A.n_rows, X.shape[1]), X.dtype)
    assert ops.spmm(A, X, out=out, **options) is out
    assert_close(out, spmm_oracle(A, X, **options), bound=error_bound(A, X, **options))
    assert intact(np, buffer)


@pytest.mark.covering("format", "kind", "index_dtype", "dtype", one_in=3)
@over_dtypes
@over_indices
@over_kinds
@pytest.mark.parametrize("format", ["csr", "coo", "csc"])
def test_products_of_every_kind_of_graph(format, kind, index_dtype, dtype):
    for weighted in (dtype, None):
        A = matrix(kind, weighted, index_dtype).asformat(format)
        X = features(A.n_cols, 19, dtype)
        check_spmm(A, X)
        scales = features(A.n_rows, (), dtype, seed=5), features(A.n_cols, (), dtype, seed=6)
        check_spmm(A, X, row_scale=scales[0], col_scale=scales[1])
        if format == "csr":
            check_spmm(A, X, reduce="mean", row_scale=scales[0])
            assert ops.explain("spmm", A, X).chosen.name == "spmm_csr_scipy"


@over_dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_products_of_every_width(width, dtype):
    for k, lengths in enumerate(ROW_LENGTHS.values()):
        A = rows_of(lengths, 37, dtype if k % 3 else None, INDEX_DTYPES[k % 2], seed=k)
        X = features(37, width, dtype)
        check_spmm(A, X if k % 2 else far_apart(np, X), reduce=("sum", "mean")[k % 2])


def test_products_touch_neither_infinities_nor_nan_at_implicit_zeros():
    A = sparsefmt.CSR([0, 1, 1, 2], [0, 2], np.array([2.0, 0.0], np.float32), shape=(3, 4))
    X = np.array([[1], [np.nan], [np.inf], [np.inf]], np.float32)
    scale = np.array([1, np.inf, 1], np.float32)
    for B in (A, A.tocoo()):
        found = ops.spmm(B, X, row_scale=scale)
        np.testing.assert_array_equal(found[:, 0], [2, 0, np.nan])  # a stored zero does touch


@over_dtypes
@over_indices
@over_kinds
def test_dot_products_of_every_kind_of_graph(kind, index_dtype, dtype):
    A = matrix(kind, None, index_dtype).tocsr()
    for width in (0, 1, 33, (3, 16), (0, 4), (2, 0)):
        X, Y = features(A.n_rows, width, dtype), features(A.n_cols, width, dtype, seed=2)
        out, buffer = poisoned(np, (A.nnz, *X.shape[1:-1]), dtype)
        ops.sddmm(A, far_apart(np, X) if X.size else X, Y, out=out)
        assert_close(out, sddmm_oracle(A, X, Y), bound=sddmm_bound(A, X, Y))
        assert intact(np, buffer)
        assert ops.explain("sddmm", A, X, Y).chosen.name == "sddmm_csr_numpy"


@over_dtypes
@over_indices
@over_kinds
def test_softmax_of_every_kind_of_graph(kind, index_dtype, dtype):
    A = matrix(kind, None, index_dtype).tocsr()
    for heads in ((), (1,), (7,), (0,)):
        scores = (3 * features(A.nnz, heads, np.float64)).astype(dtype)
        found = ops.edge_softmax(A, scores)
        assert_close(found, edge_softmax_oracle(A, scores), bound=edge_softmax_bound(A, scores))
        grad = features(A.nnz, heads, dtype, seed=2)
        bound = edge_softmax_backward_bound(A, found, grad)
        expected = edge_softmax_backward_oracle(A, found, grad)
        assert_close(ops.edge_softmax_backward(A, found, grad), expected, bound=bound)
    assert ops.explain("edge_softmax", A, scores).chosen.name == "edge_softmax_numpy"


def gat_arguments(A, shape, dtype, options):
    """H, el, er, the gradient of the result, and options with their scores."""
    rows = (A.n_cols, shape), (A.n_cols, shape[:-1]), (A.n_rows, shape[:-1]), (A.n_rows, shape)
    arrays = [features(n, s, np.float64, seed=k).astype(dtype) for k, (n, s) in enumerate(rows)]
    if options.get("edge_scores"):
        scores = features(A.nnz, shape[:-1], np.float64, seed=7).astype(dtype)
        options = {**options, "edge_scores": scores}
    return arrays, options


@pytest.mark.covering("self_loops", "kind", "index_dtype", "dtype", one_in=3)
@over_dtypes
@over_indices
@over_kinds
@pytest.mark.parametrize("self_loops", [False, True])
def test_gat_of_every_kind_of_graph(self_loops, kind, index_dtype, dtype):
    A = matrix(kind, None, index_dtype).tocsr()
    if self_loops:
        side, coo = max(A.shape), A.tocoo()
        A = sparsefmt.COO(coo.row, coo.col, shape=(side, side)).tocsr()
    for k, shape in enumerate([(4, 8), (7,), (1, 33), (3, 1), (2, 0)]):
        given = {**GAT_OPTIONS[k % 3], "self_loops": self_loops}
        (H, el, er, grad), options = gat_arguments(A, shape, dtype, given)
        out, buffer = poisoned(np, (A.n_rows, *shape), dtype)
        ops.gat(A, H, el, er, out=out, **options)
        assert_close(
            out, gat_oracle(A, H, el, er, **options), bound=gat_bound(A, H, el, er, **options)
        )
        assert intact(np, buffer)
        found = ops.gat_backward(A, H, el, er, grad, **options)
        expected = gat_backward_oracle(A, H, el, er, grad, **options)
        bounds = gat_backward_bound(A, H, el, er, grad, **options)
        for one, want, limit in zip(found, expected, bounds, strict=False):
            if one is not None:
                assert_close(one, want, bound=limit)
        options = {name: options[name] for name in options if name not in ("dropout", "seed")}
        wide = (a.astype(np.promote_types(a.dtype, np.float32)) for a in (el, er))
        bound = gat_attention_bound(A, *wide, **options)
        found = ops.gat_attention(A, el, er, **in_order(options, np.arange(A.nnz)))
        assert_close(found, gat_attention_oracle(A, el, er, **options), bound=bound)
    assert ops.explain("gat", A, H, el, er).chosen.name == "gat_csr_scipy"


def test_a_score_of_nan_or_infinity_makes_its_row_nan_and_no_other():
    A = sparsefmt.CSR([0, 2, 3, 3], [0, 1, 2], shape=(3, 3))
    H, er = np.ones((3, 1), np.float32), np.zeros(3, np.float32)
    for bad in (np.nan, np.inf):
        el = np.array([bad, 0, 0], np.float32)
        found = ops.gat(A, H, el, er)
        np.testing.assert_array_equal(found[:, 0], [np.nan, 1, 0])
        d_el = ops.gat_backward(A, H, el, er, H)[1]
        assert np.isfinite(d_el[2])


@over_dtypes
def test_both_ways_agree_and_each_repeats_bit_for_bit(monkeypatch, dtype):
    A = matrix("power law", dtype, np.int32).tocsr()
    X = features(A.n_cols, 16, dtype)
    calls = {"small": ops.spmm(A, X), "again": ops.spmm(A, X)}
    np.testing.assert_array_equal(calls["small"], calls["again"])
    monkeypatch.setattr(small, "MOST", -1)
    assert ops.explain("spmm", A, X).chosen.name == "spmm_csr_numba"
    bound = 2 * error_bound(A, X)
    assert_close(calls["small"], ops.spmm(A, X).astype(np.float64), bound=bound)


def test_large_work_goes_to_the_compiled_loops():
    A = rows_of(np.full(1 << 14, 8), 1000, None, np.int32)
    narrow, wide = (np.ones((1000, feat), np.float32) for feat in (16, 64))
    for name, arguments in (("spmm", ()), ("sddmm", (np.ones((1 << 14, 64), np.float32),))):
        small_one = ops.explain(name, A, *(a[:, :16] for a in arguments), narrow)
        large_one = ops.explain(name, A, *arguments, wide)
        assert small_one.chosen.name.endswith(("scipy", "numpy"))
        assert large_one.chosen.name == f"{name}_csr_numba"
        assert "more than the 4194304 of small work" in str(large_one)
    H, scores = np.ones((1000, 8, 64), np.float32), np.ones((1000, 8), np.float32)
    targets = np.ones((1 << 14, 8), np.float32)
    assert ops.explain("gat", A, H, scores, targets).chosen.name == "gat_csr_numba"
    assert ops.explain("gat", A, H[..., :8], scores, targets).chosen.name == "gat_csr_scipy"
    scores = np.ones((A.nnz, 40), np.float32)
    assert ops.explain("edge_softmax", A, scores).chosen.name == "edge_softmax_numba"


STEPS = """
import sys
import torch
import sparsefmt
from sparsefmt import nn

graph = sparsefmt.Graph.from_edge_index(torch.tensor([[0, 1, 2, 2], [1, 0, 0, 2]]), num_nodes=3)
for kind in (nn.GCNConv, nn.SAGEConv, nn.GATConv):
    x = torch.rand(3, 8, requires_grad=True)
    kind(8, 4)(x, graph).square().sum().backward()
    assert x.grad.abs().sum() > 0
    print(kind.__name__, *sorted({"numba", "scipy.sparse", "cupy"} & set(sys.modules)))
"""


def test_a_small_step_of_training_compiles_nothing(tmp_path):
    pytest.importorskip("torch")
    place = str(Path(sparsefmt.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        env=os.environ | {"PYTHONPATH": place, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["GCNConv", "SAGEConv", "GATConv"]
    assert not any(tmp_path.iterdir())


def test_a_stored_loop_that_is_left_out_touches_no_infinity():
    ids, one = np.array([0, 0]), np.zeros(2, np.float32)
    A = COO(ids, np.array([0, 1]), shape=(2, 2)).tocsr()
    h = np.array([[np.inf], [1]], np.float32)
    found = ops.gat(A, h, one, one, self_loops=True)
    assert np.isinf(found[0]).all()
