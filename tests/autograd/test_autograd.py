"""Products and their gradients where values, degrees or modes are special, and what is kept."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_cases import loop_graph  # noqa: E402
from autograd_cases import make_graph, tensors  # noqa: E402
from torch.autograd import gradcheck  # noqa: E402

import sparsefmt  # noqa: E402
from sparsefmt import COO, CSR, DtypeError, Graph, autograd, nn  # noqa: E402
from sparsefmt.autograd import matmul, own_parts, prepare, propagate, sampled_aggregate, spmm  # noqa: E402
from sparsefmt.autograd.engine.memory import TorchMemory  # noqa: E402
from sparsefmt.autograd.tensors.order import own_values  # noqa: E402
from sparsefmt.autograd.tensors.prepare import graph_tensors, has_tiles  # noqa: E402
from sparsefmt.interop.torch import to_tensor  # noqa: E402

# torch's tracer itself instantiates the class that it warns of.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def test_rows_are_copied_only_where_their_values_lie_apart():
    wide = torch.arange(48.0).view(6, 8)
    of_heads = wide.view(2, 3, 8)
    stay = [wide[:, 2:6], wide[::2], wide[:, 3:4], wide[:1].expand(6, 8), wide[:0], of_heads[:, :2]]
    move = [wide.T, wide[:, ::2], wide[:1, ::2], of_heads[..., :4], of_heads.transpose(1, 2)]
    for rows in (wide, of_heads, *stay):
        assert TorchMemory().rows_in_place(rows) is rows
    for rows in move:
        found = TorchMemory().rows_in_place(rows)
        assert found.is_contiguous()
        assert torch.equal(found, rows)


def test_a_zero_row_scale_has_a_gradient_under_max(device):
    graph = make_graph(7, 5, 20, device=device)
    x, r = tensors(device, (5, 3), (7,))
    zero = torch.zeros_like(r).requires_grad_()
    spmm(graph, x, reduce="max", row_scale=zero).sum().backward()
    expected = spmm(graph, x.detach(), reduce="max").sum(1)
    torch.testing.assert_close(zero.grad, expected)


@pytest.mark.parametrize(
    "function", [spmm, lambda g, x, *a: sampled_aggregate(g, x, 3, *a)], ids=["spmm", "sample"]
)
def test_the_graphs_own_values_are_constants(device, function):
    graph = make_graph(9, 6, 60, weighted=True, device=device)
    (x,) = tensors(device, (6, 3))
    y, z = function(graph, x), function(graph, x, own_values(graph))
    assert torch.equal(y, z)
    assert [kind for kind, _ in y.grad_fn.next_functions if kind is not None] != []
    assert torch.equal(*(torch.autograd.grad(one.sum(), x)[0] for one in (y, z)))


def test_tensors_share_the_graphs_memory_and_die_with_it():
    graph = make_graph(9, 6, 40)
    (x,) = tensors("cpu", (6, 4))
    spmm(graph, x)
    kept = graph._slots.torch[0]
    assert kept.rows.indptr.data_ptr() == graph.csr.indptr.ctypes.data
    assert kept._columns is None  # nobody has asked for a gradient
    prepare(graph)
    assert kept.columns.perm.data_ptr() == graph.csc_perm.ctypes.data
    assert graph._slots.torch[0] is kept


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gradient_that_is_asked_for_does_not_change_an_extremum(device, reduce, dtype):
    graph = make_graph(60, 30, 2000, device=device)
    x, a, r, c = tensors(device, (30, 17), (graph.nnz,), (60,), (30,), dtype=dtype)
    plain = [one.detach() for one in (x, a, r, c)]
    want = spmm(graph, *plain[:2], reduce=reduce, row_scale=plain[2], col_scale=plain[3])
    found = spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)
    assert torch.equal(found, want)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_what_wins_nothing_leaves_no_nan_in_the_gradients(device, reduce):
    """Vertex 3 has no edge; an infinite one, or one of an infinite factor, loses."""
    graph = Graph(COO([0, 0, 1], [0, 1, 2], shape=(3, 4))).to(device)
    lost = -float("inf") if reduce == "max" else float("inf")
    inputs = (
        ([[1.0], [lost], [3.0], [float("nan")]], [1.0, 1, 1], [2.0, 2, lost], [1.0, 1, 1, 1]),
        ([[1.0], [1.0], [3.0], [1.0]], [1.0, lost, 1], [2.0, 2, lost], [1.0, 1, 1, lost]),
        ([[1.0], [1.0], [3.0], [1.0]], [1.0, 1, 1], [2.0, 2, lost], [1.0, lost, 1, lost]),
    )
    for given in inputs:
        x, a, r, c = (torch.tensor(one, device=device, requires_grad=True) for one in given)
        y = spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)
        dx, da, dr, dc = torch.autograd.grad(y.sum(), (x, a, r, c))
        assert dx.flatten().tolist() == [2.0, 0.0, 2.0, 0.0]
        assert da.tolist() == [2.0, 0.0, 6.0]
        assert dr.tolist() == [1.0, 3.0, 0.0]
        assert dc.tolist() == [2.0, 0.0, 6.0, 0.0]


def test_an_empty_row_is_zero_whatever_its_factor_also_with_gradient():
    graph = Graph(CSR([0, 2, 2], [0, 1], shape=(2, 2)))
    r = torch.tensor([2.0, float("inf")], requires_grad=True)
    assert spmm(graph, torch.eye(2), reduce="max", row_scale=r).tolist() == [[2.0, 2.0], [0.0, 0.0]]


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_heads_that_share_their_weights_are_one_product(device, reduce):
    graph = make_graph(7, 6, 30, device=device, weighted=True)
    x, a = tensors(device, (6, 2, 3), (graph.nnz,))
    for weight in (None, a):
        y = spmm(graph, x, weight, reduce=reduce)
        assert y.shape == (7, 2, 3)
        assert torch.equal(y.flatten(1), spmm(graph, x.flatten(1), weight, reduce=reduce))
    assert gradcheck(lambda x, a: spmm(graph, x, a, reduce=reduce), (x, a))


# A part of each vertex's own


def square(device):
    """A square graph, features, and factors of its vertices."""
    return loop_graph(device=device), *tensors(
        device, (7, 5), (7,), (7, 1), dtype=torch.float32, grad=False
    )


def test_where_own_is_0_own_features_add_nothing_in_any_mode(device):
    graph, x, scale, own = square(device)
    edges = torch.arange(7, device=device).expand(2, -1)[:, 1:]  # row 0 has none
    own = own.index_fill(0, edges.new_zeros(1), 0)
    x[0] = float("inf")
    graph = Graph.from_edge_index(edges, torch.ones(6, device=device), num_nodes=7)
    torch._dynamo.reset()
    compiled = torch.compile(propagate, backend="eager")
    assert propagate(graph, x, scale, own).isfinite().all()
    assert compiled(graph, x, scale, own).isfinite().all()
    with torch.autocast(device, dtype=torch.bfloat16):
        assert propagate(graph, x, scale, own).isfinite().all()
    none = torch.zeros(7, 1, dtype=torch.bool, device=device)
    assert propagate(graph, x, scale.requires_grad_(), own, without=none).isfinite().all()
    torch._dynamo.reset()


def test_one_more_than_own_is_a_factor_like_any_in_both_ways(device):
    graph, x, _, own = square(device)
    minus = torch.full_like(own[0], -1)
    x[0] = float("inf")
    y = own_parts.with_own(graph_tensors(graph), (None, None, None, minus), x, one_more=True)
    torch.testing.assert_close(y, autograd.aggregate_with_own(graph, x, 1 + minus), equal_nan=True)
    assert y[0].isnan().all()


def test_tensors_of_a_graph(device):
    graph = loop_graph(device=device)
    found = graph_tensors(graph)
    assert found is graph_tensors(graph)
    assert (found.n_rows, found.n_cols, found.nnz) == (*graph.shape, graph.nnz)
    assert found.csr_values is None
    assert found.rows.indptr.shape == (graph.n_rows + 1,)
    assert found.cached("own", lambda: torch.ones(3)) is found.cached("own", lambda: torch.zeros(3))
    assert not has_tiles(graph)
    for function in (graph_tensors, has_tiles):
        with pytest.raises(DtypeError, match="graph is a CSR: give a"):
            function(graph.csr)


# Values of edges are in the order in which the edges were given: those of graphs and of layers.
# Functions are tried with graphs whose edges are in no order in ``tests/laws``, layers beside PyG's
# in ``tests/nn/test_pyg_arguments.py``.

N, NNZ = 14, 70


def edges():
    """Sources and targets in disorder: hubs, loops, vertices without edges in; none twice."""
    rng = np.random.default_rng(0)
    cells = [(i, j) for i in range(N) for j in range(N) if i % 5 != 1 or i == j == 6]
    return torch.tensor([cells[e] for e in rng.choice(len(cells), NNZ, replace=False)]).T.flip(0)


def shuffled(device="cpu"):
    return Graph.from_edge_index(edges(), num_nodes=N).to(device)


def operands(device):
    """Features of vertices, and a positive value for each edge."""
    made = tensors(device, (N, 6), (NNZ,), grad=False)
    return [one.abs().requires_grad_() for one in made]


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
    wanted = x, w, *layer.parameters()
    steps = ([one, *torch.autograd.grad(one.sin().sum(), wanted)] for one in (y, expected))
    torch.testing.assert_close(*steps)


def test_names_that_leave_are_there_with_a_warning():
    names = [name for names in autograd._LEAVING.values() for name in names.split()]
    assert not {*names} & {*autograd.__all__}
    for name in names:
        with pytest.warns(DeprecationWarning, match=rf"autograd\.{name} leaves .* import it from"):
            assert getattr(autograd, name) is not None


# After ``sparsefmt.clear_caches()`` all is made again; graphs keep what was built of them


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
    assert all(map(torch.equal, step(graph, layer, x), before))
    assert graph.csr is csr
    assert torch.equal(layer(x, edge_index), before[0])
    edge_index.data[0, 0] = (edge_index[0, 0] + 1) % 9  # which counts no version
    sparsefmt.clear_caches()
    changed = Graph.from_edge_index(edge_index.clone(), num_nodes=9)
    assert torch.equal(layer(x, edge_index), layer(x, changed))


def test_compiled_functions_run_on():
    graph = Graph(COO([0, 1, 1], [1, 0, 2], shape=(3, 3)))
    x = torch.randn(3, 4, requires_grad=True)
    compiled = torch.compile(lambda x: autograd.spmm(graph, x), backend="eager", fullgraph=True)
    before = compiled(x)
    sparsefmt.clear_caches()
    assert torch.equal(compiled(x), before)
