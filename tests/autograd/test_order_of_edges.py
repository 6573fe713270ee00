"""Values of edges are in the order in which the edges were given: each function and each layer."""

import gc
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils import _pytree as pytree  # noqa: E402

from sparsefmt import COO, Graph, autograd, nn  # noqa: E402
from sparsefmt.autograd import matmul  # noqa: E402
from sparsefmt.autograd.tensors.order import own_values  # noqa: E402
from sparsefmt.autograd.tensors.prepare import graph_tensors  # noqa: E402
from sparsefmt.interop.torch import to_tensor  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

N, NNZ, HEADS = 14, 70, 2
LOOPS = {"self_loops": True}


def edges():
    """Sources and targets in disorder: hubs, loops, vertices without edges in; none twice."""
    rng = np.random.default_rng(0)
    cells = [(i, j) for i in range(N) for j in range(N) if i % 5 != 1 or i == j == 6]
    return torch.tensor([cells[e] for e in rng.choice(len(cells), NNZ, replace=False)]).T.flip(0)


def shuffled(device="cpu", **options):
    return Graph.from_edge_index(edges(), num_nodes=N, **options).to(device)


def ordered(graph):
    """The same graph with its edges in CSR order, and where each of them was before."""
    return Graph(graph.csr), to_tensor(graph.csr_perm).long()


def operands(device, dtype=torch.float64):
    made = torch.Generator().manual_seed(0)
    shapes = {
        **{"x": (N, 6), "y": (N, 6), "xh": (N, HEADS, 4), "yh": (N, HEADS, 4), "att": (HEADS, 4)},
        **{"el": (N, HEADS), "er": (N, HEADS), "e": (NNZ,), "eh": (NNZ, HEADS)},
        "ef": (NNZ, 6),
    }
    found = {key: torch.randn(shape, generator=made).double() for key, shape in shapes.items()}
    return {key: one.abs().to(device, dtype).requires_grad_() for key, one in found.items()}


#: Function of a graph -> its call.  Arguments and results of NNZ rows belong to the edges.
CALLS = {
    "spmm": lambda g, x, e: autograd.spmm(g, x, e),
    "spmm-mean": lambda g, x, e: autograd.spmm(g, x, e, reduce="mean"),
    "spmm-max": lambda g, x, e: autograd.spmm(g, x, e, reduce="max"),
    "spmm-heads": lambda g, xh, eh: autograd.spmm(g, xh, eh, reduce="mean"),
    "relational_aggregate": lambda g, x, el, er, e: autograd.relational_aggregate(
        g, x, torch.stack([el[:6], er[:6]]), (e > 0.7).long()
    ),
    "sddmm": lambda g, x, y: autograd.sddmm(g, x, y),
    "sddmm-heads": lambda g, xh, yh: autograd.sddmm(g, xh, yh),
    "edge_softmax": lambda g, e: autograd.edge_softmax(g, e),
    "edge_softmax-heads": lambda g, eh: autograd.edge_softmax(g, eh),
    "gat_aggregate": lambda g, xh, el, er, eh: autograd.gat_aggregate(
        g, xh, el, er, eh, dropout=0.5, seed=3, **LOOPS
    ),
    "gat_of_vectors": lambda g, xh, att, eh: autograd.gat_of_vectors(g, xh, att, att, eh, **LOOPS),
    "gatv2_aggregate": lambda g, xh, yh, att, eh: autograd.gatv2_aggregate(g, xh, yh, att, eh),
    "dot_aggregate": lambda g, xh, yh, eh: autograd.dot_aggregate(
        g, xh, yh, None, eh, dropout=0.5, seed=3
    ),
    "maxk_aggregate": lambda g, x, e: autograd.maxk_aggregate(g, x, 3, e),
    "sampled_aggregate": lambda g, x, e: autograd.sampled_aggregate(
        g, x, 2, e, strategy="random", seed=1
    ),
    "aggregate_with_own": lambda g, x, e: autograd.aggregate_with_own(g, x, x[:, :1], e, k=3),
    "gcn_norm": lambda g, e: autograd.gcn_norm(g, e, self_loops=False)[1],
    "propagate": lambda g, x, el: autograd.propagate(g, x, el[:, 0].detach(), el[:, 1:].detach()),
    "message_aggregate": lambda g, x, ef: autograd.message_aggregate(g, x, ef, message="relu_add"),
    "message_aggregate-mean": lambda g, x, ef: autograd.message_aggregate(
        g, x, ef, message="mul", reduce="mean"
    ),
    "edge_combine": lambda g, x, y: autograd.edge_combine(g, x, y, "sub"),
    "operands": lambda g, x, e: matmul.operands(g, x, e)[1],
}


def arguments(name, device):
    names = CALLS[name].__code__.co_varnames[1 : CALLS[name].__code__.co_argcount]
    return [operands(device)[key] for key in names]


def moved(one, perm):
    return one[perm] if one is not None and one.shape[:1] == (NNZ,) else one


def run(call, graph, args, weight=None):
    """The result and the gradients of the arguments."""
    leaves = [one.detach().requires_grad_() for one in args]
    y = call(graph, *leaves)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)[
        ... if weight is None else weight
    ]
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)]


def assert_moved(found, wanted, perm):
    for one, other in zip(found, wanted, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            torch.testing.assert_close(moved(one, perm), other, rtol=1e-10, atol=1e-10)


def test_no_function_of_edges_is_left_out():
    tried = {name.split("-")[0] for name in CALLS} - {"operands"}
    assert tried == set(autograd.__all__) - {"as_graph", "maxk", "prepare"}


@pytest.mark.parametrize("way", ["plain", "compiled", "transposed", "pickled", "node"])
@pytest.mark.parametrize("name", CALLS)
def test_edges_are_in_the_order_in_which_they_were_given(device, name, way):
    graph, call = shuffled(device), CALLS[name]
    if way == "transposed":
        graph = graph.transposed
    elif way == "pickled":
        graph = pickle.loads(pickle.dumps(graph))
    elif way == "node":
        graph = pytree.tree_map(torch.clone, graph)
        assert isinstance(graph, Graph)
    elif way == "compiled":
        if name in ("gcn_norm", "operands", "relational_aggregate"):
            # The first and the last make graphs, the other only checks.
            return
        autograd.prepare(graph)
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    args = arguments(name, device)
    base, perm = ordered(graph)
    where = slice(None)
    found = run(call, graph, args)
    if found[0].shape[:1] == (NNZ,):
        where = perm
    wanted = run(CALLS[name], base, [moved(one, perm) for one in args], where)
    assert_moved(found, wanted, perm)


@pytest.mark.parametrize(
    "name",
    [
        *("spmm", "spmm-mean", "spmm-heads", "sddmm", "edge_softmax", "edge_softmax-heads"),
        *("message_aggregate", "message_aggregate-mean", "edge_combine"),
    ],
)
def test_second_gradients_are_in_that_order(device, name):
    graph, args = shuffled(device), arguments(name, device)
    assert torch.autograd.gradgradcheck(lambda *args: CALLS[name](graph, *args), args)


def test_a_graphs_own_values_are_in_that_order(device):
    given = operands(device)
    w, x = given["e"].detach(), given["x"]
    graph = shuffled().with_data(w.cpu().numpy()).to(device)
    assert torch.equal(own_values(graph), w)
    assert torch.equal(matmul.operands(graph, x)[1], w)
    assert torch.equal(autograd.spmm(graph, x), autograd.spmm(shuffled(device), x, w))
    loops = autograd.gcn_norm(graph)
    assert_moved([loops[1]], [autograd.gcn_norm(shuffled(device), w)[1]], slice(None))
    assert own_values(shuffled(device)) is None


def test_edges_in_csr_order_are_read_where_they_lie():
    graph = Graph(shuffled().csr)
    args = arguments("spmm", "cpu")
    CALLS["spmm"](graph, *args).sum().backward()
    autograd.edge_softmax(graph, args[1])
    tensors = graph_tensors(graph)
    assert tensors.order is None
    assert not tensors._built.parts
    rows, cols = graph.coo.row, graph.coo.col
    again = Graph(COO(rows, cols, shape=graph.shape))  # given as a COO, but in that order
    autograd.spmm(again, *args)
    assert graph_tensors(again).order is None


def test_gradients_come_after_the_graph_is_dropped(device):
    graph, (x, e) = shuffled(device), arguments("spmm", device)
    _, wanted, weights = run(CALLS["spmm"], graph, (x, e))
    x, e = (one.detach().requires_grad_() for one in (x, e))
    y = autograd.spmm(graph, x, e)
    ramp = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=device).view_as(y)
    del graph
    gc.collect()
    for one, other in zip(
        torch.autograd.grad((y * ramp).sum(), (x, e)), (wanted, weights), strict=True
    ):
        torch.testing.assert_close(one, other)


# Against PyG, called with the same columns of edge_index


def pyg(name, *args, **options):
    conv = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")
    return getattr(conv, name)(*args, **options)


LAYERS = {
    "GCNConv": ("e", (6, 5), {}),
    "GATConv": ("eh", (6, 5), {"heads": 2, "edge_dim": HEADS}),
    "GATConv-plain": ("eh", (6, 5), {"heads": 2, "edge_dim": HEADS, "add_self_loops": False}),
}


@pytest.mark.parametrize("way", ["plain", "compiled"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_takes_the_edges_of_pygs(device, name, way):
    entries, sizes, options = LAYERS[name]
    name = name.split("-")[0]
    other = pyg(name, *sizes, **options).to(device)
    mine = getattr(nn, name)(*sizes, **options).to(device)
    mine.load_state_dict(other.state_dict())
    graph, there = shuffled(device), edges().to(device)
    given = operands(device, torch.float32)
    args = given["x"], given[entries]
    layer = mine
    if way == "compiled":
        autograd.prepare(graph)
        mine(given["x"], graph, given[entries])  # loops are counted before the trace
        layer = torch.compile(mine, fullgraph=True, backend="aot_eager")
    found = run(lambda g, x, e: layer(x, g, e), graph, args)
    wanted = run(lambda _, x, e: other(x, there, e), None, args)
    for one, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("name", ["SAGEConv", "GINConv"])
def test_weighted_sums_of_layers_take_that_order(device, name):
    """PyG's take no weights: against sorted edges."""
    graph, given = shuffled(device), operands(device, torch.float32)
    base, perm = ordered(graph)
    layer = nn.SAGEConv(6, 5) if name == "SAGEConv" else nn.GINConv(torch.nn.Linear(6, 5))
    layer = layer.to(device)
    args = given["x"], given["e"]
    found = run(lambda g, x, e: layer(x, g, edge_weight=e), graph, args)
    wanted = run(
        lambda g, x, e: layer(x, g, edge_weight=e), base, [moved(one, perm) for one in args]
    )
    for one, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(moved(one, perm), expected)


def test_attention_weights_are_pygs(device):
    other, graph, x = pyg("GATConv", 6, 5, heads=2), shuffled(device), operands(device)["x"].float()
    other = other.to(device)
    mine = nn.GATConv(6, 5, heads=2).to(device)
    mine.load_state_dict(other.state_dict())
    there = edges().to(device)
    _, (mine_listed, weights) = mine(x, graph, return_attention_weights=True)
    _, (listed, wanted) = other(x, there, return_attention_weights=True)
    assert torch.equal(mine_listed, listed)
    torch.testing.assert_close(weights, wanted)


def test_scores_of_edges_line_up_with_their_labels(device):
    graph, x = shuffled(device), operands(device)["x"]
    there = edges().to(device)
    torch.testing.assert_close(autograd.sddmm(graph, x, x), (x[there[1]] * x[there[0]]).sum(1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [name for name in CALLS if name not in ("gcn_norm", "operands", "relational_aggregate")]
)
def test_a_captured_step_keeps_that_order(name):
    graph, args = shuffled("cuda"), arguments(name, "cuda")
    autograd.prepare(graph)
    run(CALLS[name], graph, args)  # what it builds once
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(CALLS[name], graph, args)
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        found = run(CALLS[name], graph, args)
    with torch.no_grad():
        for one in args:
            one.mul_(1.5)
    captured.replay()
    wanted = run(CALLS[name], graph, args)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
