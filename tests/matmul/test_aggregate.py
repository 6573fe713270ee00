"""Both methods of aggregation give the same sums, from any format; which one ``auto`` takes."""

import numpy as np
import pytest
from op_cases import features, long_rows, matrix, put

from sparsefmt import ops
from sparsefmt.ops.matmul import aggregation


def test_explain_says_which_method_and_why():
    A, X = matrix("power law", np.float32, np.int32), features(45, 4, np.float32)
    found = ops.explain("aggregate", A, X)
    assert found.chosen.name == "spmm_csr_numba"
    assert "method gar: on the CPU conversion and reduction are faster" in str(found)
    assert "method gas: as asked for" in str(ops.explain("aggregate", A, X, method="gas"))
    assert "method gar: the entries are in order" in str(ops.explain("aggregate", A.tocsr(), X))
    assert "method" not in str(ops.explain("spmm", A, X))


@pytest.mark.gpu
def test_auto_scatters_where_a_sort_costs_more():
    A = matrix("power law", np.float32, np.int32).to("cuda")
    narrow = ops.explain("aggregate", A, put(_cupy(), features(45, 4, np.float32)))
    assert narrow.chosen.name == "spmm_coo_atomic"
    assert "method gas: atomics are predicted to take" in str(narrow)
    A = long_rows(np.float32, np.int32).tocoo().to("cuda")
    wide = ops.explain("aggregate", A, _cupy().ones((500, 80_000), np.float32))
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
        return aggregation.chosen_method(_OnGpu(n_rows, nnz), np.empty((0, feat), np.float32))[0]

    rates = aggregation._RATES
    few = int(rates.convert_entry / rates.scatter_byte / 4 / 2)
    assert chosen(10_000, 10**8, few) == "gas"
    assert chosen(10_000, 10**8, 100 * few) == "gar"
    assert chosen(10_000, 100, 100 * few) == "gas"  # where a conversion costs its launches
    far = int(rates.convert_entry / rates.far_byte / 4) + 33
    assert chosen(10**7, 10**8, far) == "gar"
    assert chosen(1000, 10**8, 0) == "gas"
