"""Values of edges are in the order in which the edges were given: those of graphs and of layers.

Functions are tried with graphs whose edges are in no order in ``tests/laws``, layers beside PyG's
in ``tests/nn/test_pyg_arguments.py``.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sparsefmt import COO, Graph, autograd, nn  # noqa: E402
from sparsefmt.autograd import matmul  # noqa: E402
from sparsefmt.autograd.tensors.order import own_values  # noqa: E402
from sparsefmt.autograd.tensors.prepare import graph_tensors  # noqa: E402
from sparsefmt.interop.torch import to_tensor  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

N, NNZ = 14, 70


def edges():
    """Sources and targets in disorder: hubs, loops, vertices without edges in; none twice."""
    rng = np.random.default_rng(0)
    cells = [(i, j) for i in range(N) for j in range(N) if i % 5 != 1 or i == j == 6]
    return torch.tensor([cells[e] for e in rng.choice(len(cells), NNZ, replace=False)]).T.flip(0)


def shuffled(device="cpu"):
    return Graph.from_edge_index(edges(), num_nodes=N).to(device)


def operands(device, dtype=torch.float64):
    """Features of vertices, and a positive value for each edge."""
    made = torch.Generator().manual_seed(0)
    shapes = (N, 6), (NNZ,)
    return [
        torch.randn(shape, generator=made).abs().to(device, dtype).requires_grad_()
        for shape in shapes
    ]


def test_a_graphs_own_values_are_in_that_order(device):
    x, w = operands(device)
    w = w.detach()
    graph = shuffled().with_data(w.cpu().numpy()).to(device)
    assert torch.equal(own_values(graph), w)
    assert torch.equal(matmul.operands(graph, x)[1], w)
    assert torch.equal(autograd.spmm(graph, x), autograd.spmm(shuffled(device), x, w))
    torch.testing.assert_close(
        autograd.gcn_norm(graph)[1], autograd.gcn_norm(shuffled(device), w)[1]
    )
    assert own_values(shuffled(device)) is None


def test_edges_in_csr_order_are_read_where_they_lie():
    graph, (x, w) = Graph(shuffled().csr), operands("cpu")
    autograd.spmm(graph, x, w).sum().backward()
    autograd.edge_softmax(graph, w)
    tensors = graph_tensors(graph)
    assert tensors.order is None
    assert not tensors._cache.parts
    rows, cols = graph.coo.row, graph.coo.col
    again = Graph(COO(rows, cols, shape=graph.shape))  # given as a COO, but in that order
    autograd.spmm(again, x, w)
    assert graph_tensors(again).order is None


@pytest.mark.parametrize("name", ["SAGEConv", "GINConv"])
def test_weighted_sums_of_layers_take_that_order(device, name):
    """PyG's take no weights: against sorted edges."""
    graph, (x, w) = shuffled(device), operands(device)
    layer = nn.SAGEConv(6, 5) if name == "SAGEConv" else nn.GINConv(torch.nn.Linear(6, 5))
    layer, order = layer.to(device, torch.float64), to_tensor(graph.csr_perm).long()
    y = layer(x, graph, edge_weight=w)
    expected = layer(x, Graph(graph.csr), edge_weight=w[order])
    torch.testing.assert_close(y, expected)
    wanted = x, w, *layer.parameters()
    torch.testing.assert_close(
        *(torch.autograd.grad(one.sin().sum(), wanted) for one in (y, expected))
    )
