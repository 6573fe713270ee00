"""GCN's normalisation for PyTorch: values, gradients, and the graph that is kept."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from math import inf

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_cases import loop_graph  # noqa: E402
from autograd_cases import DTYPES, empty_graph, entries, make_graph, tensors  # noqa: E402

from sparsefmt import COO, Graph, UnsupportedError, ops  # noqa: E402
from sparsefmt.autograd import gcn_norm, prepare, sddmm, spmm  # noqa: E402
from sparsefmt.interop.torch import from_tensor, to_tensor  # noqa: E402
from sparsefmt.nn import GCNConv  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
LOOPS = pytest.mark.parametrize("self_loops", [True, False])
#: Of sums that atomics make in another order each time, of up to 100 terms of about 1.
ATOMICS = 100 * torch.finfo(torch.float64).eps


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


# Values


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


@LOOPS
@pytest.mark.parametrize("n", [0, 1, 5])
def test_without_vertices_or_entries(device, n, self_loops):
    graph = empty_graph(n, n, device=device)
    w = weights(graph)
    for given in (None, w):
        _, values = check(graph, given, self_loops=self_loops)
        assert values.tolist() == [1] * (n * self_loops)  # of each loop alone
    (found,) = torch.autograd.grad(values.sum(), w)
    assert found.shape == (0,)


@LOOPS
def test_of_a_transpose(device, self_loops):
    graph = loop_graph(device=device)
    w = weights(graph)
    for flipped in (graph.transposed, graph.with_data(from_tensor("w", w.detach())).transposed):
        check(flipped, None, self_loops=self_loops)
        check(flipped, w, self_loops=self_loops)


def test_strides_change_nothing(device):
    graph = loop_graph(device=device)
    w = weights(graph, grad=False)
    twice = torch.stack([w, w], 1)[:, 0].requires_grad_()
    plain = w.clone().requires_grad_()
    _, values = gcn_norm(graph, twice)
    _, expected = gcn_norm(graph, plain)
    assert torch.equal(values, expected)
    one = torch.ones((), dtype=w.dtype, device=device).expand(values.shape)  # of stride 0
    (found,), (wanted,) = (
        torch.autograd.grad(b, a, one) for b, a in ((values, twice), (expected, plain))
    )
    torch.testing.assert_close(found, wanted, rtol=ATOMICS, atol=ATOMICS)


def test_forward_repeats_bit_by_bit(device):
    graph = make_graph(300, 300, 9000, device=device)
    w = weights(graph, torch.float32)
    first = gcn_norm(graph, w)[1]
    assert all(torch.equal(gcn_norm(graph, w)[1], first) for _ in range(5))


# Gradients


@LOOPS
def test_gradients_are_those_of_finite_differences(device, self_loops):
    for graph in (loop_graph(device=device), make_graph(9, 9, 40, device=device)):
        w = weights(graph)
        torch.autograd.gradcheck(
            lambda w, graph=graph: gcn_norm(graph, w, self_loops=self_loops)[1],
            (w,),
            nondet_tol=ATOMICS if device == "cuda" else 0,
        )


@LOOPS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_those_of_the_operation_on_arrays(device, dtype, self_loops):
    graph = loop_graph(device=device)
    w = weights(graph, dtype)
    _, values = gcn_norm(graph, w, self_loops=self_loops)
    (grad,) = tensors(device, values.shape, dtype=dtype, grad=False)
    (found,) = torch.autograd.grad(values, w, grad)
    csr, array = graph.csr.with_data(from_tensor("w", w.detach())), from_tensor("grad", grad)
    expected = to_tensor(ops.gcn_norm_backward(csr, array, self_loops=self_loops))
    units = 100 * torch.finfo(dtype).eps if device == "cuda" else 0  # atomics
    torch.testing.assert_close(found, expected, rtol=units, atol=units)


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


@LOOPS
def test_products_with_it_are_those_of_gcnconv(device, self_loops):
    """But for several loops of a vertex, of which one counts in the layer where it adds loops."""
    graph = loop_graph()
    if self_loops:
        row, col = graph.coo.row, graph.coo.col
        places = np.where(row == col, row, graph.n_rows + np.arange(graph.nnz))
        kept = np.unique(places, return_index=True)[1]
        graph = Graph(COO(row[kept], col[kept], shape=graph.shape))
    graph = graph.to(device)
    layer = GCNConv(4, 3, add_self_loops=self_loops, bias=False).to(device, torch.float64)
    w, (x,) = weights(graph), tensors(device, (graph.n_cols, 4))
    normalised, values = gcn_norm(graph, w, self_loops=self_loops)
    y, expected = spmm(normalised, layer.lin(x), values), layer(x, graph, w)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        torch.autograd.grad(y.sin().sum(), (x, w)),
        torch.autograd.grad(expected.sin().sum(), (x, w)),
    )


@LOOPS
def test_it_is_pygs(device, self_loops):
    gcn_conv = pytest.importorskip(
        "torch_geometric.nn.conv.gcn_conv", reason="torch-geometric is not installed"
    )
    rng = np.random.default_rng(0)
    dense = (rng.random((12, 12)) < 0.3) * (np.arange(12) % 4 != 1)[:, None]
    dense[3, 3] = dense[5, 5] = True  # PyG counts the last loop of a vertex alone
    graph = Graph(COO(*np.nonzero(dense), shape=(12, 12))).to(device)
    w = weights(graph)
    rows, cols = (one.to(device) for one in entries(graph))
    places, theirs = gcn_conv.gcn_norm(
        torch.stack([cols, rows]), w, num_nodes=12, add_self_loops=self_loops
    )
    normalised, values = gcn_norm(graph, w, self_loops=self_loops)
    mine = [one.to(device) for one in entries(normalised)]
    empty = w.new_zeros(12, 12)
    expected = empty.index_put((places[1], places[0]), theirs, accumulate=True)
    found = empty.index_put(tuple(mine), values, accumulate=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.sin().sum(), w), torch.autograd.grad(expected.sin().sum(), w)
    )


@LOOPS
def test_a_second_derivative_is_refused(device, self_loops):
    graph = loop_graph(device=device)
    w = weights(graph)
    _, values = gcn_norm(graph, w, self_loops=self_loops)
    (first,) = torch.autograd.grad(values.square().sum(), w, create_graph=True)
    assert first.isfinite().all()
    with pytest.raises(UnsupportedError, match="gradient of gcn_norm cannot be differentiated"):
        torch.autograd.grad(first.sum(), w)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_mode_refuses_what_adds_up_by_atomics(device):
    graph = loop_graph(device=device)
    w = weights(graph)
    _, values = gcn_norm(graph, w)
    if device == "cpu":
        assert torch.autograd.grad(values.sum(), w)[0].isfinite().all()
        return
    with pytest.raises(UnsupportedError, match=r"adds up by atomics.* compose spmm"):
        torch.autograd.grad(values.sum(), w)


# The graph with the loops


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
