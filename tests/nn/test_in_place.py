"""What a layer gives may be written to in place, as of PyG's: ``F.relu_(conv(x, edge_index))``."""

import pytest

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")

from op_cases import note_calls  # noqa: E402
from pyg_cases import assert_same, both, numbers, outcome  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from sparsefmt import Graph, autograd, nn  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

N, FEAT, HEADS = 7, 6, 3
RELATIONS = 2

LAYERS = {
    "gcn": lambda lib: lib.GCNConv(FEAT, 5),
    "gcn as it is": lambda lib: lib.GCNConv(FEAT, 5, normalize=False, bias=False),
    "sage": lambda lib: lib.SAGEConv(FEAT, 5),
    "sage without own": lambda lib: lib.SAGEConv(FEAT, 5, root_weight=False, aggr="max"),
    "gin": lambda lib: lib.GINConv(torch.nn.Linear(FEAT, 5)),
    "gin of nothing": lambda lib: lib.GINConv(torch.nn.Identity(), train_eps=True),
    "sg": lambda lib: lib.SGConv(FEAT, 5, K=2),
    "tag": lambda lib: lib.TAGConv(FEAT, 5, K=2),
    "gat": lambda lib: lib.GATConv(FEAT, 5),
    "gat with heads": lambda lib: lib.GATConv(FEAT, 5, heads=HEADS),
    "gat without bias": lambda lib: lib.GATConv(FEAT, 5, heads=HEADS, bias=False),
    "gat of means": lambda lib: lib.GATConv(FEAT, 5, heads=HEADS, concat=False, bias=False),
    "gat with residual": lambda lib: lib.GATConv(FEAT, 5, heads=HEADS, residual=True),
    "gat without loops": lambda lib: lib.GATConv(FEAT, 5, add_self_loops=False),
    "gatv2": lambda lib: lib.GATv2Conv(FEAT, 5, heads=HEADS),
    "gatv2 without bias": lambda lib: lib.GATv2Conv(FEAT, 5, bias=False),
    "transformer": lambda lib: lib.TransformerConv(FEAT, 5, heads=HEADS),
    "transformer without own": lambda lib: lib.TransformerConv(FEAT, 5, root_weight=False),
    "agnn": lambda lib: lib.AGNNConv(),
    "appnp": lambda lib: lib.APPNP(2, 0.2),
    "arma": lambda lib: lib.ARMAConv(FEAT, 5, act=None),
    "cheb": lambda lib: lib.ChebConv(FEAT, 5, 3),
    "edge mean": lambda lib: lib.EdgeConv(torch.nn.Linear(2 * FEAT, 5), aggr="mean"),
    "gated": lambda lib: lib.GatedGraphConv(FEAT, 2),
    "graph": lambda lib: lib.GraphConv(FEAT, 5),
    "le": lambda lib: lib.LEConv(FEAT, 5),
    "lg": lambda lib: lib.LGConv(),
    "mixhop": lambda lib: lib.MixHopConv(FEAT, 5),
    "resgated": lambda lib: lib.ResGatedGraphConv(FEAT, 5, root_weight=False, bias=False),
    "simple": lambda lib: lib.SimpleConv(),
    "ssg": lambda lib: lib.SSGConv(FEAT, 5, 0.2, K=2),
    "rgcn": lambda lib: lib.RGCNConv(FEAT, 5, RELATIONS),
    "fast rgcn": lambda lib: lib.FastRGCNConv(FEAT, 5, RELATIONS, root_weight=False, bias=False),
    "gine": lambda lib: lib.GINEConv(torch.nn.Linear(FEAT, 5), edge_dim=2),
    "gat of edges": lambda lib: lib.GATConv(FEAT, 5, heads=HEADS, edge_dim=2, bias=False),
    "gatv2 of edges": lambda lib: lib.GATv2Conv(FEAT, 5, edge_dim=2, bias=False),
    "transformer of edges": lambda lib: lib.TransformerConv(FEAT, 5, edge_dim=2, root_weight=False),
}
BIPARTITE = {
    "sage": lambda lib: lib.SAGEConv((FEAT, 4), 5),
    "gin": lambda lib: lib.GINConv(torch.nn.Identity()),
    "gat": lambda lib: lib.GATConv((FEAT, 4), 5, heads=HEADS, bias=False),
    "gatv2": lambda lib: lib.GATv2Conv((FEAT, 4), 5, heads=HEADS, bias=False),
    "transformer": lambda lib: lib.TransformerConv((FEAT, 4), 5, root_weight=False),
}


def scaled_by(y):
    return y.mul_(torch.linspace(-1, 2, y.numel(), device=y.device, dtype=y.dtype).view_as(y))


CHANGES = {
    "relu_": F.relu_,
    "ReLU": torch.nn.ReLU(inplace=True),
    "elu_": F.elu_,
    "mul_": scaled_by,  # whose operand torch keeps, but for a constant
    "of a part": lambda y: y[:, ::2].zero_() is None or y,
    "twice": lambda y: F.relu_(y.add_(1)),
}


def edges(device):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(N - 1, (2, 20), generator=generator).to(device)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_result_changes_in_place_as_pygs(device, name, change):
    given, x, layers = {}, [numbers(N, FEAT, device=device)], both(LAYERS[name], device)
    if "rgcn" in name:
        given["edge_type"] = (torch.arange(20) % RELATIONS).to(device)
    if getattr(layers[0], "edge_dim", None) or name == "gine":
        given["edge_attr"] = numbers(20, 2, device=device, seed=4)
    assert_same(*(outcome(one, x, edges(device), given, change=CHANGES[change]) for one in layers))


@pytest.mark.parametrize("name", BIPARTITE)
def test_so_does_that_of_two_sets_of_vertices(device, name):
    width = FEAT if name == "gin" else 4
    x = [numbers(N, FEAT, device=device), numbers(N - 1, width, device=device, seed=2)]
    layers = both(BIPARTITE[name], device)
    assert_same(*(outcome(one, x, edges(device), change=F.relu_) for one in layers))


FUNCTIONS = {
    "gat": lambda e, h: autograd.gat_aggregate(e, h, h[..., 0], h[..., 1], dropout=0.5, seed=3),
    "gatv2": lambda e, h: autograd.gatv2_aggregate(e, h, h, torch.ones_like(h[0])),
    "dot": lambda e, h: autograd.dot_aggregate(e, h, h, dropout=0.5, seed=3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(N, HEADS, FEAT), (N, FEAT)])
def test_gradients_are_those_out_of_place(device, name, shape):
    """Dropout leaves out the same weights when the result is computed again."""
    index, found = edges(device), []
    for change in (F.relu, F.relu_):
        h = numbers(*shape, device=device).requires_grad_()
        y = change(FUNCTIONS[name](index, h))
        loss = (y * numbers(*shape, device=device, seed=7)).sum()
        first = torch.autograd.grad(loss, h, retain_graph=True)
        found.append([y.detach(), *first, *torch.autograd.grad(loss, h)])
    assert all(map(torch.equal, *found))


def test_a_result_that_nobody_writes_to_is_not_computed_again(device, monkeypatch):
    calls = note_calls(monkeypatch, autograd.attention, "GAT_OF_VECTORS_WITH_STATISTICS")
    x = numbers(N, FEAT, device=device).requires_grad_()
    conv = nn.GATConv(FEAT, 5, heads=HEADS).double().to(device)
    conv(x, edges(device)).relu().sum().backward()
    assert len(calls) == 1
    conv(x, edges(device)).relu_().sum().backward()
    assert len(calls) == 3


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(
    "name", ["gat with heads", "gatv2 without bias", "transformer without own"]
)
def test_traced_code_may_write_in_place(name):
    graph = Graph.from_edge_index(edges("cpu"), num_nodes=N)
    autograd.prepare(graph)
    layer = LAYERS[name](nn).double()
    found, x = [], numbers(N, FEAT).requires_grad_()
    torch._dynamo.reset()
    traced = torch.compile(lambda x: F.relu_(layer(x, graph)), fullgraph=True, backend="aot_eager")
    for run in (lambda x: layer(x, graph).relu(), traced):
        y = run(x)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), x)])
    assert_same(*found)


def test_what_backward_reads_may_not_change(device):
    """Features are not the result: torch's check of them stays."""
    x = numbers(N, FEAT, device=device).requires_grad_()
    h = x * 1
    y = autograd.dot_aggregate(edges(device), h, h)
    h.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
