"""Models whose vertices are in another order inside compute, draw and learn what they did."""

import copy
import itertools
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from sparsefmt import COO, Graph, autograd, optimize  # noqa: E402
from sparsefmt.autograd import aggregate_with_own, maxk, spmm  # noqa: E402
from sparsefmt.model import decisions  # noqa: E402
from sparsefmt.nn import AGNNConv, GATConv, GATv2Conv, GCNConv, GINConv, MaxK, SAGEConv  # noqa: E402
from sparsefmt.plan.locality import Locality  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

N, F_IN, WIDTH = 36, 6, 4


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    """Predict that another order pays, whatever it is."""
    costs = {True: 0.0, False: 1e9}
    calls = itertools.count()

    def seconds(plans, reach):
        return costs[next(calls) % 3 > 0 or reach == Locality(())]

    monkeypatch.setattr(decisions, "_seconds", seconds)
    monkeypatch.setattr(decisions, "GAIN", 0.0)
    monkeypatch.setattr(decisions, "FINDING", {"cpu": (0.0, 0.0), "cuda": (0.0, 0.0)})


def edges(seed=0):
    """Sources and targets in disorder: communities whose vertices lie far apart, loops, twins."""
    rng = np.random.default_rng(seed)
    row, col = rng.integers(0, 6, (2, 150)) * 6 + rng.integers(0, 6, 150)
    row, col = np.append(row, rng.integers(0, N, 20)), np.append(col, rng.integers(0, N, 20))
    row[row % 9 == 4] = 8  # vertices without edges in, and a hub
    places = rng.permutation(N)
    return torch.from_numpy(np.stack([places[col], places[row]]))


def square(seed=0, *, weighted=False, sorted_edges=False):
    col, row = edges(seed).numpy()
    values = np.random.default_rng(1).random(len(row)) if weighted else None
    graph = Graph(COO(row, col, values, shape=(N, N)))
    return Graph(graph.csr) if sorted_edges else graph


def features(width=F_IN, *, grad=False, seed=0, rows=N):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=made, dtype=torch.float64).requires_grad_(grad)


def mlp(f_in, f_out):
    return nn.Sequential(nn.Linear(f_in, f_out), nn.ReLU(), nn.Linear(f_out, f_out))


class Table(nn.Module):
    """Adds a row to each vertex's."""

    def __init__(self, width):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(N, width))

    def forward(self, x):
        return x + self.rows


class Written(nn.Module):
    """A model of many parts; ``body`` is its forward."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.gcn, self.sage, self.last = (
            GCNConv(F_IN, WIDTH),
            SAGEConv(F_IN, WIDTH),
            SAGEConv(WIDTH, 3),
        )
        self.gin, self.gat = GINConv(mlp(F_IN, WIDTH), eps=0.25), GATConv(F_IN, WIDTH)
        self.lin, self.skip = nn.Linear(F_IN, WIDTH, bias=False), nn.Linear(F_IN, WIDTH)
        self.norm, self.layer_norm = nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.wide = nn.BatchNorm1d(F_IN), nn.Linear(WIDTH, N)
        self.drop, self.prelu = nn.Dropout(0.4), nn.PReLU(WIDTH)
        self.all = nn.Linear(N, N)
        self.all_norm = nn.LayerNorm(N)
        self.table = nn.Parameter(torch.randn(N, WIDTH))
        self.number = nn.Parameter(torch.randn(N))
        self.each = nn.Parameter(torch.randn(N, WIDTH, WIDTH) / 2)
        self.pairs = nn.Parameter(torch.randn(N, N) / 6)
        self.register_buffer("d", torch.rand(N) + 0.5)
        self.register_buffer("mask", torch.arange(N) % 3 == 0)
        self.register_buffer("weights", torch.rand(edges().shape[1]))

    def forward(self, x, graph):
        return self.body(self, x, graph)


def written(body):
    torch.default_generator.manual_seed(2)
    return Written(body).double()


def hop(m, x, graph):
    """A product with the graph, whose result is in the new order."""
    return spmm(graph, m.lin(x))


BODIES = {
    # Stacks of layers
    "sage": lambda m, x, g: m.last(m.sage(x, g).relu(), g),
    "gcn": lambda m, x, g: m.last(m.gcn(x, g).relu(), g),
    "gin": lambda m, x, g: m.last(m.gin(x, g).relu(), g),
    "gat": lambda m, x, g: m.last(F.elu(m.gat(x, g)), g),
    "keywords": lambda m, x, g: m.last(x=m.sage(x=x, edge_index=g).relu(), edge_index=g),
    "residual": lambda m, x, g: m.last(m.sage(x, g) + m.skip(x), g),
    "batch norm": lambda m, x, g: m.last(m.norm(m.sage(x, g)), g),
    "batch norm of what comes in": lambda m, x, g: m.sage(m.inputs(x), g),
    "layer norm": lambda m, x, g: m.last(m.layer_norm(m.sage(x, g)), g),
    "layer norm of functional": lambda m, x, g: m.last(
        F.layer_norm(m.sage(x, g), (WIDTH,), m.layer_norm.weight), g
    ),
    "layer norm of all rows": lambda m, x, g: m.last(F.layer_norm(m.sage(x, g), (N, WIDTH)), g),
    "dropout": lambda m, x, g: m.last(F.dropout(m.sage(x, g), 0.5, m.training), g),
    "dropout of what comes in": lambda m, x, g: m.sage(F.dropout(x, 0.5, m.training), g),
    "modules of dropout": lambda m, x, g: m.last(m.drop(m.sage(m.drop(m.inputs(x)), g)), g),
    "dropout always": lambda m, x, g: m.last(F.dropout(m.sage(x, g), 0.5), g),
    "dropout never": lambda m, x, g: m.last(F.dropout(m.sage(x, g), 0.5, False), g),
    "noise": lambda m, x, g: m.last(m.sage(x, g) + torch.randn_like(m.skip(x)), g),
    "prelu": lambda m, x, g: m.last(m.prelu(m.sage(x, g)), g),
    "softmax": lambda m, x, g: m.last(m.sage(x, g), g).softmax(1),
    "log softmax": lambda m, x, g: F.log_softmax(m.last(m.sage(x, g), g), dim=-1),
    # What has a row for each vertex, and what looks so
    "buffer": lambda m, x, g: torch.relu(m.d[:, None] * spmm(g, m.d[:, None] * m.lin(x))),
    "scales": lambda m, x, g: spmm(g, m.lin(x), row_scale=m.d, col_scale=m.number),
    "table": lambda m, x, g: m.last(m.sage(x, g) + m.table, g),
    "table alone": lambda m, x, g: spmm(g, m.table) + m.skip(x),
    "number of a vertex": lambda m, x, g: hop(m, x, g) * m.number[:, None],
    "mask of a vertex": lambda m, x, g: spmm(g, torch.where(m.mask[:, None], m.lin(x), m.table)),
    "weights of edges": lambda m, x, g: spmm(g, m.lin(x), m.weights),
    "weights of edges of a layer": lambda m, x, g: m.last(
        m.gcn(x, g, m.weights), g, edge_weight=m.weights
    ),
    "mean": lambda m, x, g: spmm(g, spmm(g, m.lin(x), reduce="mean").relu(), reduce="max"),
    "own": lambda m, x, g: aggregate_with_own(g, m.lin(x), m.d[:, None]),
    "k": lambda m, x, g: autograd.maxk_aggregate(g, maxk(m.lin(x), 3), 2),
    # As wide as there are vertices
    "bias as long as there are vertices": lambda m, x, g: spmm(
        g, spmm(g, m.wide(m.lin(x))) + m.number
    ),
    "rows and columns": lambda m, x, g: spmm(g, m.wide(m.lin(x)) * m.number * m.number[:, None]),
    "square linear": lambda m, x, g: spmm(g, m.all(spmm(g, m.wide(m.lin(x))))),
    "square norm": lambda m, x, g: spmm(g, m.all_norm(spmm(g, m.wide(m.lin(x))))),
    "square norm of functional": lambda m, x, g: spmm(
        g, F.layer_norm(spmm(g, m.wide(m.lin(x))), (N,), m.number)
    ),
    "square squared": lambda m, x, g: (lambda h: spmm(g, h @ h))(spmm(g, m.wide(m.lin(x)))),
    "square squared by name": lambda m, x, g: (lambda h: spmm(g, torch.matmul(h, other=h)))(
        spmm(g, m.wide(m.lin(x)))
    ),
    "square linear by name": lambda m, x, g: (lambda h: spmm(g, F.linear(h, weight=h)))(
        spmm(g, m.wide(m.lin(x)))
    ),
    "square bias by name": lambda m, x, g: (lambda h: spmm(g, F.linear(h, m.pairs, bias=h[:, 0])))(
        spmm(g, m.wide(m.lin(x)))
    ),
    "square turned": lambda m, x, g: spmm(g, spmm(g, m.wide(m.lin(x))).t()),
    "square sums": lambda m, x, g: (lambda h: spmm(g, h.sum(0)[:, None] * h))(
        spmm(g, m.wide(m.lin(x)))
    ),
    "pairs": lambda m, x, g: spmm(g, m.pairs @ spmm(g, m.lin(x))),
    "pairs of features": lambda m, x, g: (lambda h: h @ h.t())(m.sage(x, g)),
    "pairs in a softmax": lambda m, x, g: (lambda h: spmm(g, (h @ h.t()).softmax(1) @ h))(
        m.sage(x, g)
    ),
    "pairs of numbers": lambda m, x, g: (lambda s: spmm(g, (s[:, None] * s).exp()))(
        hop(m, x, g)[:, 0] * 0.1
    ),
    "a vector through a linear layer": lambda m, x, g: (
        lambda h: spmm(g, m.all(h[:, 0])[:, None] * h)
    )(hop(m, x, g)),
    "a vector through a linear function": lambda m, x, g: (
        lambda h: spmm(g, F.linear(h[:, 0], m.pairs)[:, None] * h)
    )(hop(m, x, g)),
    "a vector through a norm": lambda m, x, g: (
        lambda h: spmm(g, m.all_norm(h[:, 0])[:, None] * h)
    )(hop(m, x, g)),
    "a vector in a product": lambda m, x, g: (lambda h: spmm(g, (h[:, 0] @ m.pairs)[:, None] * h))(
        hop(m, x, g)
    ),
    "a vector in a batch of products": lambda m, x, g: spmm(
        g, hop(m, x, g)[:, 0] @ m.pairs[:, :, None].expand(N, N, 3)
    ),
    "a vector's softmax": lambda m, x, g: (
        lambda h: spmm(g, h[:, 0].softmax(0)[:, None] * h.softmax(0))
    )(hop(m, x, g)),
    "a matrix for each vertex": lambda m, x, g: spmm(
        g, (hop(m, x, g)[:, None] @ m.each)[:, 0].contiguous()
    ),
    "a matrix of each vertex": lambda m, x, g: (
        lambda h: spmm(g, (h[:, None] @ (h[:, :, None] * h[:, None]))[:, 0].contiguous())
    )(hop(m, x, g)),
    "as many matrices as vertices": lambda m, x, g: spmm(
        g, (hop(m, x, g) @ m.each)[:, :, 0].contiguous()
    ),
    # Rows that meet others
    "cat": lambda m, x, g: m.last(torch.cat([m.sage(x, g)[:, :2], m.table[:, 2:]], 1), g),
    "cat by name": lambda m, x, g: m.last(
        torch.cat(tensors=(m.sage(x, g)[:, :2], m.skip(x)[:, :2]), dim=-1), g
    ),
    "cat of rows": lambda m, x, g: m.last(
        torch.cat([m.sage(x, g)[: N // 2], m.skip(x)[: N - N // 2]]), g
    ),
    "sum": lambda m, x, g: m.last(m.sage(x, g) - m.sage(x, g).mean(0), g).sum(0),
    "readout": lambda m, x, g: m.last(m.sage(x, g), g)[m.mask].mean(0),
    "some rows": lambda m, x, g: m.last(m.sage(x, g), g)[m.mask],
    "first rows": lambda m, x, g: m.last(m.sage(x, g), g)[:5],
    "one row": lambda m, x, g: m.last(m.sage(x, g) - m.sage(x, g)[3], g),
    "one column": lambda m, x, g: m.last(m.sage(x, g), g)[:, 0],
    "columns": lambda m, x, g: m.last(m.sage(x, g)[:, [3, 0, 2, 1]], g)[:, [0, 1]],
    "last column": lambda m, x, g: m.last(m.sage(x, g), g)[..., -1],
    "columns apart": lambda m, x, g: (
        lambda h: spmm(g, h[:, list(range(WIDTH)) * 9, :, [0] * N][:, :, 0].contiguous())
    )((hop(m, x, g)[:, :, None] * hop(m, x, g)[:, None])[:, :, :, None]),
    "squeezed": lambda m, x, g: m.last(m.sage(x, g), g)[:, :1].squeeze(-1),
    "flipped": lambda m, x, g: m.last(m.sage(x, g).flip(0), g),
    "rolled": lambda m, x, g: m.last(m.sage(x, g).roll(1, 0), g),
    "running sum": lambda m, x, g: m.last(m.sage(x, g).cumsum(0), g),
    "sorted": lambda m, x, g: m.last(m.sage(x, g).sort(0).values, g),
    "reshaped": lambda m, x, g: m.last(m.sage(x, g).reshape(-1).reshape(WIDTH, N).t(), g),
    "heads": lambda m, x, g: m.last(m.sage(x, g).view(N, 2, 2).softmax(2).flatten(1), g),
    "softmax of rows": lambda m, x, g: m.last(m.sage(x, g).softmax(0), g),
    "softmax of rows from behind": lambda m, x, g: m.last(F.softmax(m.sage(x, g), dim=-2), g),
    "normalize": lambda m, x, g: m.last(F.normalize(m.sage(x, g)), g),
    "normalize columns": lambda m, x, g: m.last(F.normalize(m.sage(x, g), dim=0), g),
    "normalize all": lambda m, x, g: m.last(F.normalize(m.sage(x, g), 2.0, (0, 1)), g),
    "detached": lambda m, x, g: m.last(m.sage(x, g) * m.sage(x, g).detach().abs(), g),
    "pooled": lambda m, x, g: m.last(m.sage(x, g) + m.sage(x, g).max(0).values, g),
    "positions": lambda m, x, g: m.last(m.sage(x, g) + torch.arange(x.shape[0])[:, None], g),
    "transposed": lambda m, x, g: spmm(g.transposed, spmm(g, m.lin(x)).relu()),
    "pairs of an edge": lambda m, x, g: spmm(
        g, m.sage(x, g), autograd.edge_softmax(g, autograd.sddmm(g, m.skip(x), m.sage(x, g)))
    ),
    # Results
    "tuple": lambda m, x, g: (m.last(m.sage(x, g), g), m.skip(x), x.shape[0]),
    "dict": lambda m, x, g: {"y": m.last(m.sage(x, g), g), "x": [x * 2, g.n_rows]},
    "what comes in": lambda m, x, g: (x, m.sage(x, g)),
    "same twice": lambda m, x, g: (lambda y: (y, y))(m.last(m.sage(x, g), g)),
    "loss": lambda m, x, g: F.cross_entropy(m.last(m.sage(x, g), g), m.mask.long()),
    "loss of some": lambda m, x, g: F.mse_loss(m.sage(x, g)[m.mask], m.table[m.mask]),
}


def outputs(y):
    return [one for one in pytree.tree_leaves(y) if isinstance(one, torch.Tensor)]


def results(model, *arguments):
    """The results, gradients of what may have one, buffers afterwards, and the next draw."""
    torch.default_generator.manual_seed(7)  # not devices too, for 1 ms
    found = model(*arguments)
    ys = [y for y in outputs(found) if y.requires_grad]
    weights = [torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y) for y in ys]
    loss = sum((y * w).sum() for y, w in zip(ys, weights, strict=True))
    asked = [one for one in outputs(arguments) if one.requires_grad]
    asked += [one for one in model.parameters() if one.requires_grad]
    gradients = torch.autograd.grad(loss, asked, allow_unused=True)
    state = [one.clone() for one in model.buffers()]
    return [*outputs(found), *gradients, *state, torch.rand(1)]


def assert_same(mine, other):
    for one, two in zip(mine, other, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


def ordered(model, graph, *given):
    """Optimize, and check that the vertices are in another order."""
    found = optimize(model, graph, x=given, steps=100, mode="model")
    assert found.ordering.chosen, found.ordering.explain()
    assert not torch.equal(model.forward.order.perm, torch.arange(N))
    return found


def runs_ordered(model):
    """Whether the model as it is has run in the new order."""
    made = model.forward.current().ordered
    return bool(made) and all(function is not None for function in made.values())


def assert_as_written(model, graph, *given, reordered=True, planned=False):
    """Compare training and evaluation, there and back, with the model without a plan."""
    reference = copy.deepcopy(model)
    if planned:  # with a plan, but in the order of the user's
        optimize(reference, graph, x=given, mode="model")
    ordered(model, graph, *given)
    for training in (True, False, True):
        for each in (model, reference):
            each.train(training)
        assert_same(results(model, *given), results(reference, *given))
        assert runs_ordered(model) or not reordered
    for mode in (torch.no_grad, torch.inference_mode):
        found = []
        for each in (model, reference):
            torch.default_generator.manual_seed(1)
            with mode():
                found.append(outputs(each.eval()(*given)))
        assert_same(*found)
    assert_same(results(model, *given), results(reference, *given))


@pytest.mark.parametrize("grad", [False, True], ids=["constant", "learned"])
@pytest.mark.parametrize("name", BODIES)
def test_models_compute_what_they_did(name, grad):
    graph, x = square(), features(grad=grad)
    assert_as_written(written(BODIES[name]), graph, x, graph)


@pytest.mark.parametrize("name", ["sage", "gcn", "gin", "gat", "buffer", "k", "own", "mean"])
def test_a_weighted_graph_keeps_its_values(name):
    graph = square(weighted=True)
    assert_as_written(written(BODIES[name]), graph, features(), graph)


# Layers


class Stack(nn.Module):
    """Layers one after the other, between two that run in the new order."""

    def __init__(self, *layers):
        super().__init__()
        self.first, self.last = SAGEConv(F_IN, WIDTH), SAGEConv(WIDTH, 3)
        self.layers = nn.ModuleList(layers)

    def forward(self, x, graph):
        h = self.first(x, graph).relu()
        for layer in self.layers:
            h = layer(h, graph)
        return self.last(h, graph)


def stack(*layers):
    return Stack(*layers).double()


class Rolled(nn.Module):
    """Each row takes the row before it."""

    def forward(self, x):
        return x.roll(1, 0)


LAYERS = {
    "k": lambda: SAGEConv(WIDTH, WIDTH, k=2),
    "k of gcn": lambda: GCNConv(WIDTH, WIDTH, k=2),
    "samples": lambda: SAGEConv(WIDTH, WIDTH, sample=2),
    "samples in training": lambda: SAGEConv(WIDTH, WIDTH, training_sample=2),
    "samples of gcn": lambda: GCNConv(WIDTH, WIDTH, sample=2),
    "attention": lambda: GATConv(WIDTH, WIDTH // 2, heads=2),
    "attention with dropout": lambda: GATConv(WIDTH, WIDTH // 2, heads=2, dropout=0.5),
    "attention of one head with dropout": lambda: GATConv(WIDTH, WIDTH, dropout=0.5),
    "attention of version 2": lambda: GATv2Conv(WIDTH, WIDTH),
    "attention of version 2 with dropout": lambda: GATv2Conv(WIDTH, WIDTH, dropout=0.5),
    "attention by cosines": AGNNConv,
    "gin": lambda: GINConv(mlp(WIDTH, WIDTH), train_eps=True),
    "gin with a norm": lambda: GINConv(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))),
    "gin with dropout": lambda: GINConv(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))),
    "gin with dropout first": lambda: GINConv(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))),
    "gin with a table": lambda: GINConv(nn.Sequential(nn.Linear(4, 4), Table(4))),
    "gin with a table first": lambda: GINConv(nn.Sequential(Table(4), nn.Linear(4, 4))),
    "gin with a softmax": lambda: GINConv(nn.Sequential(nn.Linear(4, 4), nn.Softmax(0))),
    "gin that rolls": lambda: GINConv(nn.Sequential(nn.Linear(4, 4), Rolled())),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_they_did(name):
    torch.manual_seed(0)
    graph = square()
    assert_as_written(stack(LAYERS[name]()), graph, features(), graph)


def test_maxk_between_layers():
    class Sparse(Stack):
        def __init__(self):
            super().__init__()
            self.maxk = MaxK(2)

        def forward(self, x, graph):
            return self.last(self.maxk(self.first(x, graph)), graph)

    graph = square()
    assert_as_written(Sparse().double(), graph, features(), graph)


class Theirs(nn.Module):
    """Layers of PyG's, called as they are."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, edge_index):
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        return x


def pyg(name, *args, **options):
    conv = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")
    return getattr(conv, name)(*args, **options)


THEIRS = {
    "GCNConv": lambda: pyg("GCNConv", WIDTH, WIDTH),
    "GCNConv-cached": lambda: pyg("GCNConv", WIDTH, WIDTH, cached=True),
    "SAGEConv": lambda: pyg("SAGEConv", WIDTH, WIDTH),
    "SAGEConv-max": lambda: pyg("SAGEConv", WIDTH, WIDTH, aggr="max"),
    "SAGEConv-lstm": lambda: pyg("SAGEConv", WIDTH, WIDTH, aggr="lstm"),
    "SAGEConv-median": lambda: pyg("SAGEConv", WIDTH, WIDTH, aggr="median"),
    "SAGEConv-project": lambda: pyg("SAGEConv", WIDTH, WIDTH, project=True, normalize=True),
    "SAGEConv-sources": lambda: pyg("SAGEConv", WIDTH, WIDTH, flow="target_to_source"),
    "GINConv": lambda: pyg("GINConv", mlp(WIDTH, WIDTH), train_eps=True),
    "GINConv-dropout": lambda: pyg("GINConv", nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))),
    "GINConv-mlp": lambda: pyg("GINConv", pyg("MLP", [4, 4, 4], dropout=0.5)),
    "GATConv": lambda: pyg("GATConv", WIDTH, WIDTH),
    "GATConv-dropout": lambda: pyg("GATConv", WIDTH, WIDTH, dropout=0.5),
    "GATConv-heads": lambda: pyg("GATConv", WIDTH, 2, heads=2, residual=True),
    "SGConv": lambda: pyg("SGConv", WIDTH, WIDTH, K=2),
    "TAGConv": lambda: pyg("TAGConv", WIDTH, WIDTH, K=2),
    "GraphConv": lambda: pyg("GraphConv", WIDTH, WIDTH),
    "GATv2Conv": lambda: pyg("GATv2Conv", WIDTH, WIDTH, dropout=0.3),
}


@pytest.mark.parametrize("name", THEIRS)
def test_layers_of_pygs_compute_what_they_did(name):
    torch.manual_seed(0)
    there = edges()
    if name == "SAGEConv-lstm":  # takes no other
        there = there[:, there[1].argsort(stable=True)]
    model = Theirs(pyg("SAGEConv", F_IN, WIDTH), THEIRS[name](), pyg("GCNConv", WIDTH, 3))
    # A planned GATConv draws the weights that it drops otherwise than PyG's.
    planned = name == "GATConv-dropout"
    assert_as_written(model.double(), there, features(), there, planned=planned)


def test_a_layer_that_keeps_its_first_product_keeps_the_users():
    there, x = edges(), features()
    model = Theirs(pyg("SGConv", F_IN, WIDTH, K=2, cached=True), pyg("GCNConv", WIDTH, 3)).double()
    assert_as_written(model, there, x, there)


def test_pygs_weights_of_edges_stay_with_them():
    class Weighted(Theirs):
        def forward(self, x, edge_index, edge_weight):
            h = self.layers[0](x, edge_index, edge_weight).relu()
            return self.layers[1](h, edge_index)

    there, layers = edges(), (pyg("GCNConv", F_IN, WIDTH), pyg("GCNConv", WIDTH, 3))
    weight = torch.rand(there.shape[1], dtype=torch.float64)
    assert_as_written(Weighted(*layers).double(), there, features(), there, weight)


def test_what_is_made_of_the_edges_by_hand_is_right():
    class Gathers(Theirs):
        def forward(self, x, edge_index):
            h = self.layers[0](x, edge_index)
            source, target = edge_index[0], edge_index[1]
            h = h + torch.zeros_like(h).index_add(0, target, h[source])
            return self.layers[1](h, edge_index)

    there = edges()
    model = Gathers(pyg("SAGEConv", F_IN, WIDTH), pyg("GCNConv", WIDTH, 3)).double()
    assert_as_written(model, there, features(), there)


def test_edges_may_come_before_the_features():
    class Turned(Theirs):
        def forward(self, edge_index, x):
            return super().forward(x, edge_index)

    there, layers = edges(), (pyg("SAGEConv", F_IN, WIDTH), pyg("GCNConv", WIDTH, 3))
    assert_as_written(Turned(*layers).double(), there, there, features())


def test_other_matrices_may_come_before_the_features():
    class Scaled(Theirs):
        def forward(self, scale, x, edge_index):
            return super().forward(x * scale, edge_index)

    there, scale = edges(), features(rows=1)
    layers = pyg("SAGEConv", F_IN, WIDTH), pyg("GCNConv", WIDTH, 3)
    assert_as_written(Scaled(*layers).double(), there, scale, features(), there)


# What was there when the trace was written, and is another at a call


class Extra(Stack):
    """Takes one more argument."""

    def forward(self, x, graph, extra):
        return self.last(self.first(x, graph) * extra[0], graph)


def test_a_container_of_other_shapes_is_not_taken_for_the_same():
    graph, x = square(), features()
    model = Extra().double()
    reference = copy.deepcopy(model)
    given = [(features(WIDTH, rows=1),), (features(WIDTH),), (features(WIDTH, rows=1),)]
    ordered(model, graph, x, graph, given[0])
    for extra in given:
        assert_same(outputs(model(x, graph, extra)), outputs(reference(x, graph, extra)))


@pytest.mark.parametrize("kind", ["buffer", "parameter", "data", "attribute"])
def test_an_attribute_of_another_shape_is_not_taken_for_the_same(kind):
    class Scaled(Stack):
        def __init__(self):
            super().__init__()
            self.scale = None

        def forward(self, x, graph):
            return self.last(self.first(x, graph) * self.scale, graph)

    graph, x = square(), features()
    model = Scaled().double()
    one, two = features(WIDTH, rows=1), features(WIDTH)
    if kind == "buffer":
        del model.scale
        model.register_buffer("scale", one)
    elif kind in ("parameter", "data"):
        del model.scale
        model.scale = nn.Parameter(one)
    else:
        model.scale = one
    reference = copy.deepcopy(model)
    ordered(model, graph, x, graph)
    for each in (model, reference):
        each(x, graph)
        if kind == "parameter":
            each.scale = nn.Parameter(two)
        elif kind == "data":
            each.scale.data = two
        else:
            each.scale = two
    assert_same(outputs(model(x, graph)), outputs(reference(x, graph)))


class Both(nn.Module):
    """Takes two graphs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = SAGEConv(F_IN, WIDTH), SAGEConv(WIDTH, 3)

    def forward(self, x, one, two):
        return self.last(self.first(x, one).relu(), two)


def test_two_graphs_are_told_apart():
    x, (one, two) = features(), (square(), square(1))
    model = Both().double()
    reference = copy.deepcopy(model)
    ordered(model, one, x, one, one)
    for pair in ((one, one), (one, two), (two, one), (two, two), (one, one)):
        assert_same(outputs(model(x, *pair)), outputs(reference(x, *pair)))


def test_two_edge_indices_are_told_apart():
    class TheirBoth(Both):
        def __init__(self):
            super().__init__()
            self.first, self.last = pyg("SAGEConv", F_IN, WIDTH), pyg("GCNConv", WIDTH, 3)

    x, (one, two) = features(), (edges(), edges(1))
    model = TheirBoth().double()
    reference = copy.deepcopy(model)
    ordered(model, one, x, one, two)
    for pair in ((one, two), (two, one), (one, one), (two, two)):
        assert_same(outputs(model(x, *pair)), outputs(reference(x, *pair)))


def test_a_graph_that_is_an_attribute_is_right():
    class Holds(nn.Module):
        def __init__(self, graph):
            super().__init__()
            self.graph = graph
            self.first, self.last = SAGEConv(F_IN, WIDTH), SAGEConv(WIDTH, 3)

        def forward(self, x, graph):
            return self.last(self.first(x, self.graph).relu(), graph)

    one, two, x = square(), square(1), features()
    model = Holds(one).double()
    reference = copy.deepcopy(model)
    reference.graph = one
    ordered(model, one, x, one)
    assert_same(results(model, x, one), results(reference, x, one))
    for each in (model, reference):
        each.graph = two
    assert_same(results(model, x, one), results(reference, x, one))


def test_a_graph_that_is_only_an_attribute_stays():
    class Holds(Stack):
        def __init__(self, graph):
            super().__init__()
            self.graph = graph

        def forward(self, x):
            return self.last(self.first(x, self.graph).relu(), self.graph)

    graph, x = square(), features()
    model = Holds(graph).double()
    expected = results(model, x)
    found = optimize(model, graph, x=x, steps=100, mode="model")
    assert not found.ordering.chosen
    assert_same(results(model, x), expected)


def test_an_edge_index_that_was_written_to_is_another():
    there, x = edges(), features()
    model = Theirs(pyg("SAGEConv", F_IN, WIDTH), pyg("GCNConv", WIDTH, 3)).double()
    reference = copy.deepcopy(model)
    ordered(model, there, x, there)
    model(x, there)
    there[:, :40] = torch.arange(80).view(2, 40) % N
    assert_same(outputs(model(x, there)), outputs(reference(x, there)))


def test_other_graphs_and_features_are_right():
    graph, x = square(), features()
    model = written(BODIES["batch norm"]).eval()
    reference = copy.deepcopy(model)
    ordered(model, graph, x, graph)
    for other in (square(1), graph, square(2), square(sorted_edges=True)):
        for given in (x, features(seed=3), features(seed=4, grad=True), x.clone()):
            assert_same(results(model, given, other), results(reference, given, other))
    model, reference = model.float(), reference.float()
    assert_same(
        [y.double().round(decimals=4) for y in outputs(model(x.float(), graph))],
        [y.double().round(decimals=4) for y in outputs(reference(x.float(), graph))],
    )


def test_features_and_buffers_that_were_written_to_are_others():
    graph, x = square(), features()
    model = written(BODIES["buffer"])
    reference = copy.deepcopy(model)
    ordered(model, graph, x, graph)
    for _ in range(2):
        assert_same(results(model, x, graph), results(reference, x, graph))
        with torch.no_grad():
            x[3] = 0.5
            x.mul_(1.5)
        assert_same(results(model, x, graph), results(reference, x, graph))
        for each in (model, reference):
            each.d.mul_(2)
            each.d[1] = -1
        assert_same(results(model, x, graph), results(reference, x, graph))
        for each in (model, reference):
            each.d = torch.linspace(0, 1, N, dtype=torch.float64)
    x.requires_grad_()
    assert_same(results(model, x, graph), results(reference, x, graph))


def test_many_buffers_are_right():
    class Many(Stack):
        def __init__(self):
            super().__init__()
            for number in range(20):
                self.register_buffer(f"d{number}", torch.rand(N, 1))

        def forward(self, x, graph):
            h = self.first(x, graph)
            for number in range(20):
                h = h * getattr(self, f"d{number}") + 1
            return self.last(h, graph)

    graph, x = square(), features()
    model = Many().double()
    assert_as_written(model, graph, x, graph)
    assert model.forward.settings.is_constant(x)  # the user's are not pushed out by the model's


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_sparse_features_are_right(layout):
    class OfSparse(Stack):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(F_IN, WIDTH))

        def forward(self, x, graph):
            h = spmm(graph, x @ self.w)
            return self.last(h, graph)

    graph, x = square(), features().relu().to_sparse(layout=layout)
    model = OfSparse().double()
    reference = copy.deepcopy(model)
    optimize(model, graph, x=(x, graph), steps=100, mode="model")
    assert_same(results(model, x, graph), results(reference, x, graph))


# The model stays the user's


def test_the_results_that_a_model_gives_besides_are_on_the_way_to_the_others():
    """Gradients at a layer's features, as Grad-CAM takes them."""
    graph, x = square(), features()
    model = written(lambda m, x, g: (lambda h: (m.last(h.relu(), g), h))(m.sage(x, g)))
    reference = copy.deepcopy(model)
    ordered(model, graph, x, graph)
    found = []
    for each in (model, reference):
        y, h = each(x, graph)
        found.append(torch.autograd.grad(y.square().sum(), [h], allow_unused=True))
    assert_same(*found)


def test_gradients_may_be_kept_at_features():
    def body(m, x, g):
        h = m.sage(x, g)
        if m.training:
            h.retain_grad()
        return m.last(h.relu(), g), h

    graph, x = square(), features()
    model = written(body).eval()
    reference = copy.deepcopy(model)
    ordered(model, graph, x, graph)
    found = []
    for each in (model, reference):
        y, h = each.train()(x, graph)
        y.square().sum().backward()
        found.append([h.grad])
    assert_same(*found)


@pytest.mark.parametrize("where", ["sage", "sage.lin_l", "norm", "last", "gin.nn.1", "gin.nn"])
@pytest.mark.parametrize("kind", ["forward", "pre", "backward"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_see_the_users_order(where, kind, when):
    def body(m, x, g):
        return m.last(m.norm(m.sage(x, g) + m.gin(x, g)), g)

    seen = {}

    def hooked(model):
        record = seen.setdefault(id(model), [])
        module = model.get_submodule(where)
        if kind == "forward":
            module.register_forward_hook(lambda _, args, y: record.append(y.detach().clone()))
        elif kind == "pre":
            module.register_forward_pre_hook(lambda _, args: record.append(args[0].detach() * 1))
        else:
            module.register_full_backward_hook(lambda _, dx, dy: record.append(dy[0].clone()))

    graph, x = square(), features(grad=True)
    model = written(body)
    reference = copy.deepcopy(model)
    if when == "before":
        for each in (model, reference):
            hooked(each)
    ordered(model, graph, x, graph)
    if when == "after":
        for each in (model, reference):
            hooked(each)
    for each in (model, reference):
        results(each, x, graph)
        seen[id(each)].clear()
        results(each, x, graph)
    assert_same(seen[id(model)], seen[id(reference)])


def test_hooks_are_called_once_a_call():
    graph, x = square(), features()
    model = written(BODIES["batch norm"])
    ordered(model, graph, x, graph)
    calls = []
    model.norm.register_forward_hook(lambda *_: calls.append(1))
    for training in (True, False, True):
        model.train(training)
        calls.clear()
        model(x, graph)
        assert len(calls) == 1


def test_hooks_for_all_modules_see_the_users_order():
    graph, x = square(), features()
    model = written(BODIES["sage"])
    reference = copy.deepcopy(model)
    ordered(model, graph, x, graph)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, y: seen.append(y) if isinstance(module, SAGEConv) else None
    )
    try:
        with torch.no_grad():
            model(x, graph)
            mine = seen[-2:]
            seen.clear()
            reference(x, graph)
    finally:
        handle.remove()
    assert_same(mine, seen)


def test_a_forward_that_somebody_replaced_is_called_with_the_users_order():
    graph, x = square(), features()
    model = written(lambda m, x, g: m.last(m.skip2(m.sage(x, g)), g))
    model.skip2 = nn.Linear(WIDTH, WIDTH).double()
    model.skip2.forward = lambda h: h.roll(1, 0)
    expected = results(model, x, graph)
    ordered(model, graph, x, graph)
    assert_same(results(model, x, graph), expected)


def clear_first(h):
    h[0] = 0


def by_place(h):
    return h * torch.arange(len(h), dtype=h.dtype)[:, None]


torch.fx.wrap("clear_first")
torch.fx.wrap("by_place")


def test_functions_of_the_users_get_the_users_order():
    graph, x = square(), features()
    assert_as_written(written(lambda m, x, g: m.last(by_place(m.sage(x, g)), g)), graph, x, graph)


def test_functions_of_the_users_may_write_to_what_they_get():
    def body(m, x, g):
        h = m.sage(x, g) * 1
        clear_first(h)
        return m.last(h, g)

    graph, x = square(), features()
    model = written(body)
    reference = copy.deepcopy(model)
    optimize(model, graph, x=(x, graph), steps=100, mode="model")
    assert_same(results(model, x, graph), results(reference, x, graph))


WRITING = {
    "relu": lambda m, x, g: m.last(m.sage(x, g).relu_(), g),
    "functional": lambda m, x, g: m.last(F.relu(m.sage(x, g), inplace=True), g),
    "add": lambda m, x, g: m.last(m.sage(x, g).add_(m.table), g),
    "view": lambda m, x, g: (lambda h: (h[:, 0].zero_(), m.last(h, g))[1])(m.sage(x, g) * 1),
    "rows": lambda m, x, g: (lambda h: (h[:3].zero_(), m.last(h, g))[1])(m.sage(x, g) * 1),
    "mask": lambda m, x, g: m.last(m.sage(x, g).masked_fill_(m.mask[:, None], 0), g),
    "index": lambda m, x, g: m.last(m.sage(x, g).index_fill_(0, torch.tensor([1]), 0), g),
}


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.filterwarnings("ignore:the model runs as it did:UserWarning")
def test_what_writes_in_place_is_right(name):
    graph, x = square(), features()
    model = written(WRITING[name])
    expected = results(copy.deepcopy(model), x, graph)
    optimize(model, graph, x=x, steps=100, mode="model")
    assert_same(results(model, x, graph), expected)


def test_a_result_that_is_written_to_leaves_the_next_as_it_was():
    graph, x = square(), features()
    model = written(lambda m, x, g: (m.last(m.sage(x, g), g), m.d[:, None] * 1, x))
    ordered(model, graph, x, graph)
    with torch.no_grad():
        first = [y.clone() for y in model(x, graph)]
        for y in model(x, graph)[:2]:
            y.fill_(7)
        assert_same(model(x, graph), first)


@pytest.mark.parametrize("name", ["sage", "gcn", "gin", "table", "batch norm", "buffer"])
def test_second_gradients(name):
    graph, x = square(), features(grad=True)
    model = written(BODIES[name])
    reference = copy.deepcopy(model)
    ordered(model, graph, x, graph)
    found = []
    for each in (model, reference):
        given = [x, *each.parameters()]
        y = each(x, graph)
        ramp = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
        first = torch.autograd.grad(
            (y.square() * ramp).sum(), given, create_graph=True, allow_unused=True
        )
        loss = sum(g.square().sum() for g in first if g is not None)
        found.append(torch.autograd.grad(loss, given, allow_unused=True))
    assert_same(*found)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_right(again):
    graph, x = square(), features()
    model = stack()
    reference = copy.deepcopy(model)
    ordered(model, graph, x, graph)
    model(x, graph)
    other = again(model)
    for _ in range(2):
        assert_same(results(other, x, graph), results(reference, x, graph))
    with torch.no_grad():
        other.last.lin_l.weight.zero_()
    assert_same(results(model, x, graph), results(reference, x, graph))


def test_it_can_be_undone_and_done_again():
    graph, x = square(), features()
    model = written(BODIES["batch norm"]).eval()
    expected = results(model, x, graph)
    for _ in range(2):
        found = ordered(model, graph, x, graph)
        assert_same(results(model, x, graph), expected)
        assert runs_ordered(model)
    found.restore()
    assert not any("forward" in vars(module) for module in model.modules())
    assert_same(results(model, x, graph), expected)
    other = square(1)
    changed = results(model, x, other)
    ordered(model, other, x, other)
    assert_same(results(model, x, other), changed)
    assert_same(results(model, x, graph), expected)
    optimize(model, graph)  # without steps: the order is dropped
    assert_same(results(model, x, graph), expected)


def test_it_trains_as_it_did():
    graph, x = square(), features()
    losses = []
    for reordered in (False, True):
        model = written(BODIES["modules of dropout"])
        if reordered:
            ordered(model, graph, x, graph)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        torch.manual_seed(5)
        found = []
        for step in range(6):
            model.train(step % 3 < 2)
            optimizer.zero_grad()
            loss = model(x, graph).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        losses.append(found)
    assert_same(*losses)


def test_optimize_draws_nothing_and_changes_nothing():
    graph, x = square(), features()
    model = written(BODIES["modules of dropout"])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    ordered(model, graph, x, graph)
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", ["auto", "measure"])
@pytest.mark.parametrize("name", ["sage", "tuple", "dict", "loss", "modules of dropout"])
def test_timing_takes_models_of_all_results(name, mode, monkeypatch):
    ticks = itertools.cycle((1.0, 0.5))  # in the user's order, and in the other
    monkeypatch.setattr(decisions.time, "perf_counter", lambda: 0.0)
    real = decisions.seconds_of
    monkeypatch.setattr(decisions, "seconds_of", lambda *a: (real(*a), next(ticks))[1])
    graph, x = square(), features()
    model = written(BODIES[name])
    reference = copy.deepcopy(model)
    found = optimize(model, graph, x=x, steps=100, mode=mode)
    assert found.ordering.chosen
    assert found.ordering.measured
    assert "order of vertices: by community" in str(found)
    assert_same(results(model, x, graph), results(reference, x, graph))


def test_functional_calls_are_right():
    graph, x = square(), features()
    model = written(BODIES["table"])
    reference = copy.deepcopy(model)
    ordered(model, graph, x, graph)
    found = []
    for each in (model, reference):
        others = {name: value.detach() * 1.5 for name, value in each.named_parameters()}
        found.append([torch.func.functional_call(each, others, (x, graph))])
    assert_same(*found)


def test_calls_by_name_and_with_defaults_are_right():
    class Optional(Stack):
        def forward(self, x, graph, edge_weight=None, scale=1.0):
            h = self.first(x, graph, edge_weight=edge_weight) * scale
            return self.last(h, graph, edge_weight=edge_weight)

    graph, x = square(), features()
    weight = torch.rand(graph.nnz, dtype=torch.float64, requires_grad=True)
    model = Optional().double()
    reference = copy.deepcopy(model)
    ordered(model, graph, x, graph)
    for given, named in [
        ((x, graph), {}),
        ((x,), {"graph": graph}),
        ((), {"graph": graph, "x": x}),
        ((x, graph, weight), {}),
        ((x, graph), {"edge_weight": weight, "scale": 2.0}),
    ]:
        assert_same([model(*given, **named)], [reference(*given, **named)])


def test_weights_of_edges_as_an_argument():
    class Weighted(Stack):
        def forward(self, x, graph, edge_weight):
            h = self.first(x, graph, edge_weight=edge_weight)
            return self.last(h, graph, edge_weight=edge_weight)

    graph, x = square(), features()
    weight = torch.rand(graph.nnz, dtype=torch.float64, requires_grad=True)
    assert_as_written(Weighted().double(), graph, x, graph, weight)


def test_as_many_edges_as_vertices():
    """Values of edges that are factors of vertices too."""

    class Ring(Stack):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.rand(N))

        def forward(self, x, graph):
            return self.last(spmm(graph, self.first(x, graph), self.w, row_scale=self.w), graph)

    rng = np.random.default_rng(0)
    places, ring = rng.permutation(N), np.arange(N)
    graph = Graph(COO(places[ring], places[ring // 6 * 6], shape=(N, N)))
    assert_as_written(Ring().double(), graph, features(), graph)


def test_a_mask_that_takes_all_rows_may_take_fewer():
    class Masked(Stack):
        def forward(self, x, graph, mask):
            h = self.first(x, graph)
            return self.last(h - h[mask], graph)

    graph, x = square(), features()
    masks = [torch.ones(N, dtype=torch.bool), torch.arange(N) == 3]
    model = Masked().double()
    reference = copy.deepcopy(model)
    ordered(model, graph, x, graph, masks[0])
    for mask in masks:
        assert_same([model(x, graph, mask)], [reference(x, graph, mask)])


def test_calls_of_ever_other_lengths_keep_no_trace_of_each():
    class Batch(Stack):
        def forward(self, x, graph, batch):
            return self.last(self.first(x, graph), graph)[batch]

    graph, x = square(), features()
    model = Batch().double()
    ordered(model, graph, x, graph, torch.arange(3))
    for length in range(1, 60):
        model(x, graph, torch.arange(length) % N)
    assert len(model.forward.current().ordered) <= 16


def test_wrong_calls_are_refused_as_they_were():
    graph, x = square(), features()
    model = written(BODIES["sage"])
    reference = copy.deepcopy(model)
    ordered(model, graph, x, graph)
    for wrong in (features(5), features(rows=N - 1), x.float(), x[0]):
        with pytest.raises(Exception) as told:  # noqa: PT011
            reference(wrong, graph)
        with pytest.raises(type(told.value)) as found:
            model(wrong, graph)
        assert str(found.value) == str(told.value)


def test_autocast_is_right():
    graph, x = square(), features().float()
    model = written(BODIES["batch norm"]).float().eval()
    reference = copy.deepcopy(model)
    ordered(model, graph, x, graph)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = model(x, graph), reference(x, graph)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=5e-2, atol=5e-2)


def test_parts_of_a_model_that_train_are_told_apart():
    """A model in evaluation whose dropout trains, as for Monte Carlo samples."""
    graph, x = square(), features()
    model = written(BODIES["modules of dropout"]).eval()
    reference = copy.deepcopy(model)
    ordered(model, graph, x, graph)
    assert_same(results(model, x, graph), results(reference, x, graph))
    for each in (model, reference):
        each.drop.train()
    assert_same(results(model, x, graph), results(reference, x, graph))
    for each in (model, reference):
        each.drop.p = 0.0
    assert_same(results(model, x, graph), results(reference, x, graph))


class Beside(nn.Module):
    """Layers beside a linear map, whose hook may give something else."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = SAGEConv(F_IN, F_IN), SAGEConv(F_IN, WIDTH)
        self.context = nn.Linear(F_IN, WIDTH)
        self.double()

    def forward(self, x, graph):
        return self.last(self.conv(x, graph).relu(), graph) + self.context(x)


def test_a_hook_that_gives_one_row_is_not_taken_for_the_layer():
    graph, x, model = square(), features(), Beside()
    model.context.register_forward_hook(lambda *given: given[-1].mean(0, keepdim=True))
    assert_as_written(model, graph, x, graph)


def test_a_norm_over_all_vertices_stays_in_the_users_order():
    graph, x = square(), features()
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm([N, WIDTH]))
    nn.init.normal_(inner[1].weight)
    assert_as_written(stack(GINConv(inner)), graph, x, graph)


def test_a_model_of_one_layer_says_that_it_stays():
    found = optimize(SAGEConv(F_IN, WIDTH).double(), square(), x=features(), steps=100)
    assert "one layer" in found.ordering.explain()
