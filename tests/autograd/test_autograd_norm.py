"""GCN's normalisation for PyTorch: values, gradients, and the graph that is kept."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from math import inf

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_cases import loop_graph  # noqa: E402
from autograd_cases import DTYPES, make_graph, tensors  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from sparsefmt import ops  # noqa: E402
from sparsefmt.autograd import gcn_norm, prepare, sddmm, spmm  # noqa: E402
from sparsefmt.interop.torch import from_tensor, to_tensor  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
LOOPS = pytest.mark.parametrize("self_loops", [True, False])
# torch's tracer itself instantiates the class that it warns of.
TRACED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def weights(graph, dtype=torch.float64, *, grad=True):
    """Positive, so that every degree of a row with entries has a root."""
    (found,) = tensors(graph.device, (graph.nnz,), grad=False)
    return (found.abs() + 0.1).to(dtype).requires_grad_(grad)


def check(graph, w, *, self_loops):
    """The structure and the bits of ``ops.gcn_norm``, with ``w`` or the graph's own values."""
    own = graph if w is None else graph.with_data(from_tensor("w", w.detach()))
    expected = ops.gcn_norm(own.csr, self_loops=self_loops)
    normalised, values = gcn_norm(graph, w, self_loops=self_loops)
    assert normalised.csr.with_data(None) == expected.with_data(None)
    assert normalised.csr.index_dtype == graph.index_dtype
    assert torch.equal(values[to_tensor(normalised.csr_perm)], to_tensor(expected.data))
    assert values.dtype is to_tensor(expected.data).dtype
    assert values.requires_grad == (w is not None and w.requires_grad)
    return normalised, values


@LOOPS
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", [None, *DTYPES], ids=str)
def test_it_is_the_operation_on_arrays(device, dtype, index_dtype, self_loops):
    """Loops once, twice and not at all, empty rows; given weights, own values and none."""
    for graph in (
        loop_graph(device=device, index_dtype=index_dtype),
        make_graph(70, 70, 900, device=device, index_dtype=index_dtype),
    ):
        w = None if dtype is None else weights(graph, dtype)
        normalised, _ = check(graph, w, self_loops=self_loops)
        assert normalised.nnz == graph.nnz + graph.n_rows * self_loops
        if w is not None:
            own = graph.with_data(from_tensor("w", w.detach()))
            check(own, None, self_loops=self_loops)
            check(own, 2 * w, self_loops=self_loops)  # which go before its own


def composed(graph, w):
    """Without loops, of the functions that the errors name."""
    degree = spmm(graph, w.new_ones(graph.n_cols, 1), w)
    s = degree.masked_fill(degree <= 0, inf).rsqrt()
    return w * sddmm(graph, s, s)


def test_the_functions_that_errors_name_do_the_same_and_have_second_derivatives(device):
    graph = loop_graph(device=device)
    w = weights(graph)
    both = gcn_norm(graph, w, self_loops=False)[1], composed(graph, w)
    torch.testing.assert_close(*both)
    first = [torch.autograd.grad(one.sin().sum(), w, create_graph=True)[0] for one in both]
    torch.testing.assert_close(*first)
    assert torch.autograd.grad(first[1].square().sum(), w)[0].any()


def test_the_graph_with_loops_is_made_once(device):
    graph = loop_graph(device=device)
    normalised, _ = gcn_norm(graph)
    assert gcn_norm(graph, weights(graph))[0] is normalised
    assert not normalised.weighted
    assert gcn_norm(graph, self_loops=False)[0] is graph
    flipped = graph.transposed
    assert gcn_norm(flipped)[0] is gcn_norm(flipped)[0]
    assert gcn_norm(flipped)[0] is not normalised


def test_threads_get_one_graph(device):
    graph = make_graph(300, 300, 9000, device=device)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: gcn_norm(graph)[0], range(32)))
    assert all(one is found[0] for one in found)


def test_nothing_keeps_a_graph_alive_or_the_values_of_a_call(device):
    gc.disable()  # so that a cycle would be seen
    try:
        graph = loop_graph(device=device)
        w = weights(graph)
        normalised, values = gcn_norm(graph, w)
        prepare(normalised)
        alive = [weakref.ref(one) for one in (graph, graph._built, normalised, normalised._built)]
        alive += [weakref.ref(one) for one in (w, values)]
        del w, values
        assert [one() is None for one in alive] == [False] * 4 + [True] * 2
        del graph, normalised
        assert all(one() is None for one in alive)
    finally:
        gc.enable()


@TRACED
def test_it_compiles_as_one_graph(device):
    """Of a graph of which nothing has been made."""
    graph = loop_graph(device=device)
    w, x = weights(graph), torch.rand(7, 3, dtype=torch.float64, device=device, requires_grad=True)

    def function(w, x):
        normalised, values = gcn_norm(graph, w)
        return normalised, spmm(normalised, x, values), gcn_norm(graph)[1]

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    (found, y, ones), (normalised, expected, wanted) = compiled(w, x), function(w, x)
    assert found is normalised
    torch.testing.assert_close(ones, wanted)
    steps = ([one, *torch.autograd.grad(one.sin().sum(), (w, x))] for one in (y, expected))
    torch.testing.assert_close(*steps)


@TRACED
def test_graphs_whose_loops_are_made_share_one_compilation(device):
    """The second graph makes sizes symbolic; from there on nothing is compiled again."""
    counter = CompileCounterWithBackend("aot_eager")

    def function(graph, w, x):
        normalised, values = gcn_norm(graph, w)
        return spmm(normalised, x, values)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for n in range(6, 12):
        graph = make_graph(n, n, 10 * n, device=device)
        for one in (graph, gcn_norm(graph)[0]):
            prepare(one)
        w = weights(graph)
        x = torch.rand(n, 3, dtype=torch.float64, device=device, requires_grad=True)
        both = (run(graph, w, x) for run in (compiled, function))
        steps = ([y, *torch.autograd.grad(y.sum(), (w, x))] for y in both)
        torch.testing.assert_close(*steps)
    assert counter.frame_count == 2


def test_under_autocast_it_is_in_float32(device):
    graph = loop_graph(device=device)
    half = weights(graph, torch.bfloat16)
    own = graph.with_data(from_tensor("w", half.detach()))
    with torch.autocast(device, dtype=torch.bfloat16):
        values, (normalised, same) = gcn_norm(graph, half)[1], gcn_norm(own)
        y = spmm(normalised, torch.ones(7, 2, device=device), values)
    assert y.dtype is torch.bfloat16
    assert torch.equal(values, gcn_norm(graph, half.float())[1])
    assert torch.equal(values, same)
    (result,) = torch.autograd.grad(values.sum(), half)
    assert result.dtype is torch.bfloat16
