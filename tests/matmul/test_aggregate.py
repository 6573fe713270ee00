"""Which method of aggregation ``auto`` takes; gradients of hubs and where entries move apart."""

from dataclasses import replace

import numpy as np
import pytest
from laws.cases import NAMED
from laws.checks import all_equal, check
from op_cases import DTYPES, INDEX_DTYPES, features, long_rows, matrix, name_of, put

from sparsefmt import ops
from sparsefmt.errors import ShapeError
from sparsefmt.ops.engine.structure import Structure
from sparsefmt.ops.matmul import aggregation
from sparsefmt.ops.matmul import cuda_aggregate as matmul_cuda_aggregate

F32, CASE = np.float32, NAMED["aggregate_backward"]


def test_explain_says_which_method_and_why():
    A, X = matrix("power law", F32, np.int32), features(45, 4, F32)
    found = ops.explain("aggregate", A, X)
    assert found.chosen.name == "spmm_csr_numba"
    assert "method gar: on the CPU conversion and reduction are faster" in str(found)
    assert "method gas: as asked for" in str(ops.explain("aggregate", A, X, method="gas"))
    assert "method gar: the entries are in order" in str(ops.explain("aggregate", A.tocsr(), X))
    assert "method" not in str(ops.explain("spmm", A, X))


@pytest.mark.gpu
def test_auto_scatters_where_a_sort_costs_more():
    A = matrix("power law", F32, np.int32).to("cuda")
    narrow = ops.explain("aggregate", A, put(_cupy(), features(45, 4, F32)))
    assert narrow.chosen.name == "spmm_coo_atomic"
    assert "method gas: atomics are predicted to take" in str(narrow)
    A = long_rows(F32, np.int32).tocoo().to("cuda")
    wide = ops.explain("aggregate", A, _cupy().ones((500, 80_000), F32))
    assert wide.chosen.name == "spmm_csr_balanced"


def _cupy():
    return pytest.importorskip("cupy")


class _OnGpu:
    """What the rule reads of a COO on a GPU."""

    format = "coo"

    def __init__(self, n_rows, nnz):
        self.n_rows, self.nnz, self._indices = n_rows, nnz, None


def test_the_rule_weighs_width_and_rows_against_entries(monkeypatch):
    monkeypatch.setattr(aggregation, "is_cupy", lambda _: True)

    def chosen(n_rows, nnz, feat):
        return aggregation.chosen_method(_OnGpu(n_rows, nnz), np.empty((0, feat), F32))[0]

    rates = aggregation._RATES
    few = int(rates.convert_entry / rates.scatter_byte / 4 / 2)
    assert chosen(10_000, 10**8, few) == "gas"
    assert chosen(10_000, 10**8, 100 * few) == "gar"
    assert chosen(10_000, 100, 100 * few) == "gas"  # where a conversion costs its launches
    far = int(rates.convert_entry / rates.far_byte / 4) + 33
    assert chosen(10**7, 10**8, far) == "gar"
    assert chosen(1000, 10**8, 0) == "gas"


def test_weights_of_vertices_may_be_wider_than_halves(xp):
    A = put(xp, matrix("banded", np.float16, np.int32))
    X = put(xp, features(40, 8, np.float16))
    _, _, dself = ops.aggregate_backward(A, X, X, self_weight=xp.ones(40, F32))
    assert dself.dtype == F32


@pytest.mark.parametrize("dtype", [np.float16, F32], ids=name_of)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
def test_hubs_among_the_sources_are_cut_and_put_together(xp, dtype, index_dtype):
    A = long_rows(dtype, index_dtype).T.tocsr()
    for B in (A, A.with_data(None)):
        for feat in (7, 64, 96):
            check(xp, CASE, B, CASE.arguments(B, dtype, feat=feat))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
def test_entries_may_move_between_both_orders_apart(monkeypatch, dtype, index_dtype):
    """As those of large graphs do; back by the permutation, or its inverse with a transpose."""
    import cupy

    monkeypatch.setattr(matmul_cuda_aggregate, "goes_apart", lambda *_, **__: True)
    for weighted in (True, False):
        A = replace(CASE, weighted=weighted).matrix(dtype, index_dtype=index_dtype)
        B = put(cupy, A)
        for feat in (0, 1, 33, 64, 200):
            args = CASE.arguments(A, dtype, feat=feat)
            check(cupy, CASE, A, args)
            there = {name: put(cupy, value) for name, value in args.items()}
            again = CASE.run(B, there, transposed=ops.transpose(B))
            assert all_equal(cupy, CASE.run(B, there), again)


def test_large_graphs_go_apart():
    """By entries, bytes of features, and whether the way back is the fast one."""

    def apart(nnz, feat, inverse):
        S = Structure(10_000, 10_000, nnz, "int32", *(0,) * 9)
        return matmul_cuda_aggregate.goes_apart(S, "float32", feat, inverse=inverse)

    few = (2_000_000, 64, True), (4_000_000, 999, False), (8_000_000, 9, True)
    many = (2_000_000, 999, True), (4_200_000, 999, False), (8_400_000, 9, False)
    assert [bool(apart(*case)) for case in few + many] == [False] * 3 + [True] * 3


def test_only_a_square_matrix_has_weights_of_vertices():
    A, X, grad = matrix("power law", F32, np.int32), features(45, 4, F32), features(60, 4, F32)
    text = r"self_weight is given but A is \(60, 45\): only a square A has vertices"
    with pytest.raises(ShapeError, match=text):
        ops.aggregate_backward(A, X, grad, self_weight=np.ones(60, F32))
