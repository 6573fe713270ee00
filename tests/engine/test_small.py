"""Small work on the CPU, by NumPy's and SciPy's loops, against loops over entries in float64."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from laws.cases import CASES
from laws.checks import check
from op_cases import (
    DTYPES,
    INDEX_DTYPES,
    KINDS,
    ROW_LENGTHS,
    WIDTHS,
    far_apart,
    features,
    matrix,
    name_of,
    put,
    rows_of,
    run_apart,
)

import sparsefmt
from sparsefmt import COO, ops
from sparsefmt.ops.engine import small
from sparsefmt.testing import assert_close, error_bound

pytestmark = pytest.mark.usefixtures("small_work", "one_thread")

over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
#: The loops of each function.
NAMES = {
    **{ops.spmm: "spmm_csr_scipy", ops.sddmm: "sddmm_csr_numpy"},
    **{ops.edge_softmax: "edge_softmax_numpy", ops.gat: "gat_csr_scipy"},
    **dict.fromkeys((ops.edge_softmax_backward, ops.gat_backward, ops.gat_attention)),
}
#: Cases that they take.
SMALL = [
    case
    for case in CASES
    if case.function in NAMES
    and not case.balanced
    and case.format != "sgt"
    and case.options.get("reduce") not in ("max", "min")
    and not case.name.startswith("spmm of heads")
]
SMALL += [
    replace(case, name=f"{case.name} with a slope", options=case.options | {"negative_slope": -0.1})
    for case in SMALL
    if case.name in ("gat of edges", "gat_backward of edges")
]
every_case = pytest.mark.parametrize("case", SMALL, ids=str)


@pytest.mark.covering("kind", "index_dtype", "dtype", "case", one_in=2)
@over_dtypes
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
@every_case
def test_every_kind_of_graph(case, kind, index_dtype, dtype):
    A = case.matrix(dtype, kind, index_dtype=index_dtype)
    args = case.arguments(A, dtype, feat=19)
    check(np, case, A, args)
    if case.format == "csr" and NAMES[case.function]:
        name = case.function.__name__
        assert ops.explain(name, A, **args, **case.options).chosen.name == NAMES[case.function]


@over_dtypes
@pytest.mark.parametrize("feat", WIDTHS)
@pytest.mark.parametrize("case", [case for case in SMALL if case.function is ops.spmm], ids=str)
def test_products_of_every_width(case, feat, dtype):
    for k, lengths in enumerate(ROW_LENGTHS):
        A = case.matrix(dtype, lengths, index_dtype=INDEX_DTYPES[k % 2])
        place = put if k % 2 else far_apart
        check(np, case, A, case.arguments(A, dtype, feat=feat), place=place)


@over_dtypes
@pytest.mark.parametrize("heads", [(), (1,), (7,), (0,)], ids=str)
@pytest.mark.parametrize("case", [case for case in SMALL if case.is_headed], ids=str)
def test_every_number_of_heads(case, heads, dtype):
    case = case.with_heads(heads)
    for kind in ("power law", "isolated rows", "empty"):
        A = case.matrix(dtype, kind)
        for feat in (0, 1, 8, 33):
            check(np, case, A, case.arguments(A, dtype, feat=feat))


def test_products_touch_neither_infinities_nor_nan_at_implicit_zeros():
    A = sparsefmt.CSR([0, 1, 1, 2], [0, 2], np.array([2.0, 0.0], np.float32), shape=(3, 4))
    X = np.array([[1], [np.nan], [np.inf], [np.inf]], np.float32)
    scale = np.array([1, np.inf, 1], np.float32)
    for B in (A, A.tocoo()):
        found = ops.spmm(B, X, row_scale=scale)
        np.testing.assert_array_equal(found[:, 0], [2, 0, np.nan])  # a stored zero does touch


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
    done = run_apart(STEPS, PYTHONPATH=place, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["GCNConv", "SAGEConv", "GATConv"]
    assert not any(tmp_path.iterdir())


def test_a_stored_loop_that_is_left_out_touches_no_infinity():
    ids, one = np.array([0, 0]), np.zeros(2, np.float32)
    A = COO(ids, np.array([0, 1]), shape=(2, 2)).tocsr()
    h = np.array([[np.inf], [1]], np.float32)
    found = ops.gat(A, h, one, one, self_loops=True)
    assert np.isinf(found[0]).all()
