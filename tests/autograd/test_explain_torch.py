"""``ops.explain`` of the functions of a graph and tensors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import make_graph  # noqa: E402
from laws.calls import Ops  # noqa: E402
from op_cases import run_apart  # noqa: E402

from sparsefmt import autograd, ops  # noqa: E402
from sparsefmt.errors import DtypeError, ShapeError, UnsupportedError  # noqa: E402

N, FEAT, NNZ = 12, 4, 40

#: Function -> its arguments behind the graph, its options, and the kernel that runs on the CPU.
CASES = {
    "spmm": ((lambda x, e: (x,)), {}, "spmm_csr_embedding_bag"),
    "sddmm": ((lambda x, e: (x, x)), {}, "sddmm_csr_numpy"),
    "edge_softmax": ((lambda x, e: (e,)), {}, "edge_softmax_numpy"),
    "maxk_aggregate": ((lambda x, e: (x, 2)), {"reduce": "mean"}, "spgemm_csr_cbsr_numba"),
    "sampled_aggregate": ((lambda x, e: (x, 2)), {}, "spmm_sampled_csr_numba"),
    "gat_aggregate": ((lambda x, e: (x, x[:, 0], x[:, 1])), {}, "gat_csr_scipy"),
    "gatv2_aggregate": ((lambda x, e: (x, x, x[0])), {}, "attend_csr_numba"),
    "dot_aggregate": ((lambda x, e: (x, x, x)), {}, "attend_csr_numba"),
    "gcn_norm": ((lambda x, e: (e,)), {}, "gcn_norm_csr_numba"),
    "message_aggregate": ((lambda x, e: (x, e[:, None] + x[0])), {}, "message_aggregate_numba"),
    "edge_combine": ((lambda x, e: (x, x)), {}, "edge_combine_numba"),
    "propagate": ((lambda x, e: (x, x[:, 0].contiguous(), x[:1, 0])), {}, "spmm_csr_embedding_bag"),
    "aggregate_with_own": ((lambda x, e: (x, x[:1, 0])), {}, "spmm_csr_embedding_bag"),
}


@pytest.fixture
def graph():
    return make_graph(N, N, NNZ)


@pytest.fixture
def x():
    return torch.rand(N, FEAT)


@pytest.mark.parametrize("name", CASES)
def test_explain_names_the_kernel_of_a_function(graph, x, name):
    arguments, options, kernel = CASES[name]
    args = arguments(x, torch.rand(graph.nnz))
    found = ops.explain(name, graph, *args, **options)
    assert found.chosen.name == kernel
    assert f"runs {kernel} (" in str(found)


@pytest.mark.parametrize("name", CASES)
def test_explain_runs_the_function_and_nothing_else(graph, x, name):
    arguments, options, _ = CASES[name]
    args = arguments(x, torch.rand(graph.nnz))
    call = getattr(autograd, name)
    call(graph, *args, **options)  # what is kept with a graph is made once
    with Ops() as plain:
        call(graph, *args, **options)
    with Ops() as explained:
        ops.explain(name, graph, *args, **options)
    assert explained.names == plain.names


def test_every_function_that_is_explained_has_a_case():
    assert {*CASES} == {*autograd._EXPLAINED} <= {*autograd.__all__}


def test_sizes_decide_where_bags_would_add_up_one_entry_at_a_time(graph, monkeypatch):
    x = torch.rand(N, FEAT, dtype=torch.float64)
    assert ops.explain("spmm", graph, x).chosen.name == "spmm_csr_embedding_bag"
    assert ops.explain("spmm", graph, x, reduce="max").chosen.name == "spmm_csr_numba"
    monkeypatch.setattr("sparsefmt.ops.engine.small.MOST", -1)
    assert ops.explain("spmm", graph, x).chosen.name == "spmm_csr_numba"


def test_products_of_arrays_are_the_same_whether_torch_is_there(graph, x):
    assert ops.explain("spmm", graph.csr, x.numpy()).chosen.name == "spmm_csr_scipy"


def test_the_graph_and_the_tensors_may_be_named(graph, x):
    assert ops.explain("spmm", graph=graph, x=x).chosen.name == "spmm_csr_embedding_bag"
    assert ops.explain("spmm", graph, x=x).chosen.name == "spmm_csr_embedding_bag"


@pytest.mark.parametrize("name", ["maxk", "spmv", "prepare", "__all__", None, ["spmm"]])
def test_explain_refuses_an_unknown_function_and_lists_the_known_ones(graph, x, name):
    with pytest.raises(UnsupportedError, match=r"op is .*: use one of .*gat_aggregate.*, spmm, wh"):
        ops.explain(name, graph, x)


def test_explain_refuses_what_the_function_refuses(graph, x):
    with pytest.raises(DtypeError, match=r"spmm cannot be called so .*'foo'.*: it takes graph, x"):
        ops.explain("spmm", graph, x, foo=1)
    with pytest.raises(ShapeError, match="x has 11 rows but the graph has 12 columns"):
        ops.explain("spmm", graph, x[1:])


def test_arrays_still_go_to_the_operations(graph):
    with pytest.raises(DtypeError, match="A is a Graph"):
        ops.explain("spmm", graph, np.ones((N, FEAT), np.float32))


def test_torch_is_loaded_when_a_function_is_asked_for():
    code = (
        "import sys, sparsefmt.autograd\n"
        "from sparsefmt.ops.engine import explain\n"
        "assert explain._of_graphs and 'torch' not in sys.modules\n"
        "explain._function_of_graphs('spmm')\n"
        "assert 'torch' in sys.modules"
    )
    done = run_apart(code)
    assert done.returncode == 0, done.stderr
