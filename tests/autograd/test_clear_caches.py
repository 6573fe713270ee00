"""After ``sparsefmt.clear_caches()`` all is made again; graphs keep what was built of them."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sparsefmt  # noqa: E402
from sparsefmt import COO, Graph, autograd, nn  # noqa: E402

# torch's tracer itself instantiates the class that it warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def step(graph, layer, x):
    """Return the result of a layer and of an operation of arrays, and gradients."""
    y = layer(x, graph)
    (dx,) = torch.autograd.grad(y.sum(), x)
    A = COO([0, 1, 1], [1, 0, 2], shape=(3, 3)).tocsr()
    return y, dx, torch.from_numpy(A @ np.ones((3, 4), np.float32))


def test_all_is_made_again(device):
    torch.manual_seed(0)
    edge_index = torch.randint(0, 9, (2, 40), device=device)
    x = torch.randn(9, 4, device=device, requires_grad=True)
    layer, graph = nn.GCNConv(4, 3).to(device), Graph.from_edge_index(edge_index, num_nodes=9)
    remembered, before = autograd.as_graph(edge_index, x), step(graph, layer, x)
    csr = graph.csr
    assert autograd.as_graph(edge_index, x) is remembered
    sparsefmt.clear_caches()
    assert autograd.as_graph(edge_index, x) is not remembered
    for mine, wanted in zip(step(graph, layer, x), before, strict=True):
        assert torch.equal(mine, wanted)
    assert graph.csr is csr
    assert torch.equal(layer(x, edge_index), before[0])


def test_compiled_functions_run_on():
    graph = Graph(COO([0, 1, 1], [1, 0, 2], shape=(3, 3)))
    x = torch.randn(3, 4, requires_grad=True)
    compiled = torch.compile(lambda x: autograd.spmm(graph, x), backend="eager", fullgraph=True)
    before = compiled(x)
    sparsefmt.clear_caches()
    assert torch.equal(compiled(x), before)
