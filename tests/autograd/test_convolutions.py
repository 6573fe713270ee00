"""Sums with own parts in one node: layers' results and gradients are those of three nodes."""

from copy import deepcopy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sparsefmt import Graph, ShapeError, UnsupportedError, nn  # noqa: E402
from sparsefmt.autograd import own_parts  # noqa: E402
from sparsefmt.interop.pyg import from_edge_index  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
LAYERS = {
    "gcn": lambda a, b: nn.GCNConv(a, b),
    "gcn without bias": lambda a, b: nn.GCNConv(a, b, bias=False),
    "sage": lambda a, b: nn.SAGEConv(a, b),
    "sage without bias": lambda a, b: nn.SAGEConv(a, b, bias=False),
    "gin": lambda a, b: nn.GINConv(torch.nn.Linear(a, b), eps=0.25),
    "gin of two maps": lambda a, b: nn.GINConv(
        torch.nn.Sequential(torch.nn.Linear(a, 7), torch.nn.Tanh(), torch.nn.Linear(7, b))
    ),
    "gin of another map": lambda a, b: nn.GINConv(
        torch.nn.Sequential(torch.nn.Sigmoid(), torch.nn.Linear(a, b))
    ),
}
WIDTHS = [(12, 5), (8, 8), (4, 16), (64, 24), (3, 1)]


def edges(n, count, seed=0):
    """Random edges, a loop of vertex 1, one hub; vertices from n // 2 on have no in-neighbours."""
    rng = np.random.default_rng(seed)
    found = rng.integers(0, n, (2, count))
    found[1] %= n // 2
    found[1, : count // 3] = 0
    found[:, -1] = 1
    return torch.from_numpy(found)


def graph_of(device, n=60, count=900, *, weighted=False, dtype=torch.float64):
    index = edges(n, count).to(device)
    weight = None
    if weighted:
        generator = torch.Generator().manual_seed(3)
        weight = torch.rand(count, generator=generator).to(device, dtype)
    return Graph(from_edge_index(index, weight, num_nodes=n))


@pytest.fixture
def by_steps(monkeypatch):
    """Runs a function where the factors of own parts count as no constants."""

    def run(function, *args):
        with monkeypatch.context() as here:
            here.setattr(own_parts, "_are_constant", lambda *_: False)
            return function(*args)

    return run


def everything(layer, x, graph, *, again=False):
    """The result, all gradients and, if ``again``, those of a function of the gradients."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    leaves = [leaf for leaf in (x, *layer.parameters()) if leaf.requires_grad]
    y = layer(x, graph)
    loss = y.double().square().mean()
    first = torch.autograd.grad(loss, leaves, create_graph=again)
    if not again:
        return [y, *first]
    total = sum(one.square().sum() for one in first)
    return [y, *first, *torch.autograd.grad(total, leaves, allow_unused=True)]


def assert_alike(found, wanted, tolerance=1e-9):
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def case(name, widths, device, dtype=torch.float64):
    torch.manual_seed(0)
    layer = LAYERS[name](*widths).to(device, dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    return layer, torch.randn(60, widths[0], dtype=dtype, device=device, requires_grad=True)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("name", LAYERS)
def test_one_node_gives_what_steps_give(by_steps, name, widths, weighted, device):
    layer, x = case(name, widths, device)
    graph = graph_of(device, weighted=weighted)
    assert_alike(everything(layer, x, graph), by_steps(everything, layer, x, graph))
    with torch.no_grad():
        assert_alike([layer(x, graph)], [by_steps(layer, x, graph)])
    bare = x.detach()  # other ways where features have no gradient
    assert_alike(everything(layer, bare, graph), by_steps(everything, layer, bare, graph))


@pytest.mark.parametrize("widths", [(12, 5), (4, 16)])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_one_node_have_gradients(by_steps, name, widths, device):
    layer, x = case(name, widths, device)
    graph = graph_of(device, weighted=True)
    found = everything(layer, x, graph, again=True)
    assert_alike(found, by_steps(lambda: everything(layer, x, graph, again=True)))


@pytest.mark.parametrize("name", LAYERS)
def test_frozen_parameters_get_no_gradient(by_steps, name, device):
    for frozen in range(len(list(case(name, (12, 5), device)[0].parameters()))):
        layer, x = case(name, (12, 5), device)
        list(layer.parameters())[frozen].requires_grad_(False)
        graph = graph_of(device)
        assert_alike(everything(layer, x, graph), by_steps(everything, layer, x, graph))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", ["hub", "cut", "empty"])
def test_one_node_is_as_right_as_steps_in_narrow_dtypes(by_steps, kind, name, dtype):
    layer, x = case(name, (64, 24), "cuda", dtype)
    x = (x.detach() / 64).requires_grad_()  # sums of 7 000 entries stay in float16's range
    n, count = {"hub": (60, 900), "cut": (60, 400_000), "empty": (60, 0)}[kind]
    graph = (
        graph_of("cuda", n, count)
        if count
        else Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64, device="cuda"), num_nodes=n)
    )
    found, steps = everything(layer, x, graph), by_steps(everything, layer, x, graph)
    exact = everything(deepcopy(layer).double(), x.detach().double().requires_grad_(), graph)
    eps = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    largest = max(one.norm() for one in exact)  # some are 0, but for what rounding leaves
    for mine, other, one in zip(found, steps, exact, strict=True):
        allowed = 4 * (other.double() - one).norm() + eps * (one.norm() + largest / 100)
        assert (mine.double() - one).norm() <= allowed


def test_own_features_that_add_nothing_are_not_read(device):
    layer, x = case("gcn", (4, 4), device)
    graph = graph_of(device)  # vertex 1 stores a loop: none is added
    with torch.no_grad():
        layer.lin.weight.copy_(torch.eye(4))
        x[59] = torch.inf  # nobody's neighbour may be it
    index = edges(60, 900)
    reached = set(index[1][index[0] == 59].tolist()) | {59}
    y = layer(x, graph)
    rows = torch.tensor([row for row in range(60) if row not in reached])
    assert y[rows].isfinite().all()


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("frozen", [(), ("att_src", "att_dst", "bias")], ids=str)
def test_second_gradients_of_attention_are_refused(frozen, heads, device):
    torch.manual_seed(0)
    layer = nn.GATConv(5, 4, heads=heads).double().to(device)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    x = torch.randn(60, 5, dtype=torch.float64, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x, graph_of(device)).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="gat_of_vectors"):
        torch.autograd.grad(dx.square().sum(), layer.lin.weight)


def test_parameters_of_another_shape_are_refused(device):
    graph, x = graph_of(device), torch.randn(60, 8, dtype=torch.float64, device=device)
    layer = nn.GCNConv(8, 4).double().to(device)
    layer.bias = torch.nn.Parameter(x.new_ones(1))
    with pytest.raises(ShapeError, match="bias has shape"):
        layer(x, graph)
    gin = nn.GINConv(torch.nn.Identity()).to(device)
    gin.eps = x.new_tensor(0.5)
    with pytest.raises(ShapeError, match="own has shape"):
        gin(x, graph)


def test_each_vertex_may_have_an_eps_of_its_own(device):
    layer, x = nn.GINConv(torch.nn.Identity()).double().to(device), case("gin", (8, 8), device)[1]
    eps = layer.eps.detach().clone()
    graph, factors = graph_of(device), torch.linspace(-1, 1, 60, dtype=x.dtype, device=device)
    y = layer(x, graph)
    layer.eps = factors[:, None]
    assert_alike([layer(x, graph)], [y + (factors - eps)[:, None] * x])


def test_own_parts_are_added_before_halves_are_rounded():
    layer = nn.GINConv(torch.nn.Identity()).half()
    graph = Graph.from_edge_index(torch.tensor([[1, 2], [0, 0]]), num_nodes=3)
    x = torch.tensor([[-2e4], [3.5e4], [3.5e4]]).half()
    with torch.no_grad():
        assert layer(x, graph)[0, 0] == float(x.float().sum())
