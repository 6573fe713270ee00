"""Laws of layers whose maps a user has exchanged: every map that is not plain is called."""

import copy
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.nn")

from pyg_cases import make  # noqa: E402
from torch.nn import Linear, Module, Sequential, Tanh  # noqa: E402
from torch.nn.modules.module import register_module_forward_hook  # noqa: E402
from torch.nn.utils import parametrizations, prune  # noqa: E402

import sparsefmt  # noqa: E402
from sparsefmt import nn  # noqa: E402
from sparsefmt.autograd import maxk, spmm  # noqa: E402
from sparsefmt.errors import UnsupportedError  # noqa: E402
from sparsefmt.model.maps import read_map  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

N, EDGES, WIDTH, OUT, EDGE_DIM, K = 12, 40, 6, 4, 3, 2


class Doubled(Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Adapted(Module):
    """A map that shows the weight and the bias of another, and adds to it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.added = torch.nn.Parameter(torch.randn_like(base.weight))

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x):
        return self.base(x) + x @ self.added.t()


class Quantised(Module):
    """A map of integers, whose weight and bias are methods, as torch's are."""

    def __init__(self, base):
        super().__init__()
        self.register_buffer("integers", (base.weight.detach() * 8).round().to(torch.int8))
        self.base = [base]

    def weight(self):
        return self.integers.double() / 8

    def bias(self):
        return self.base[0].bias

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight(), self.bias())


def plain_map(base, kind=Linear):
    """A map of torch's, or of that kind, with the same weights."""
    made = kind(base.weight.shape[1], base.weight.shape[0], base.bias is not None).double()
    made.load_state_dict(base.state_dict())
    return made


def hooked(base):
    base.register_forward_hook(lambda module, args, y: 2 * y)
    return base


def globally_hooked(base):
    base.weight.is_doubled = True  # a map that is replaced has the same
    return base


def parametrised(base):
    made = parametrizations.weight_norm(base)
    with torch.no_grad():
        made.parametrizations.weight.original0.mul_(2)
    return made


def biased(base):
    made = Linear(base.weight.shape[1], base.weight.shape[0]).double()
    torch.nn.init.normal_(made.bias)
    return made


KINDS = {
    "subclass": lambda base: plain_map(base, Doubled),
    "wrapper": Adapted,
    "hook": hooked,
    "global hook": globally_hooked,
    "parametrised": parametrised,
    "pruned": lambda base: prune.l1_unstructured(base, "weight", amount=0.5),
    "quantised": Quantised,
    "sequence": lambda base: Sequential(base, Tanh()),
    "bias": biased,
}
#: Class, options, and those that give it features of edges, where it takes them.
LAYERS = {
    "GCNConv": ({}, None),
    "SAGEConv": ({}, None),
    "GINConv": ({}, None),
    "GINEConv": ({"edge_dim": EDGE_DIM}, {}),
    "SGConv": ({"K": 2}, None),
    "TAGConv": ({"K": 2}, None),
    "GATConv": ({"heads": 2, "residual": True}, {"edge_dim": EDGE_DIM}),
    "GATv2Conv": ({"heads": 2, "residual": True}, {"edge_dim": EDGE_DIM}),
    "TransformerConv": ({"heads": 2, "beta": True}, {"edge_dim": EDGE_DIM}),
    "ChebConv": ({}, None),
    "ClusterGCNConv": ({}, None),
    "GraphConv": ({}, None),
    "LEConv": ({}, None),
    "MixHopConv": ({}, None),
    "ResGatedGraphConv": ({}, {"edge_dim": EDGE_DIM}),
    "SSGConv": ({}, None),
}
WEIGHTED = ("GCNConv", "SGConv", "TAGConv", "ChebConv", "GraphConv", "LEConv", "SSGConv")
PARTS = ("GCNConv", "SAGEConv", "GINConv")
#: Of which PyG's run the forward of their maps.
BY_FORWARD = ("TAGConv", "ChebConv", "MixHopConv")
WAYS = ("eager", "weighted", "k=", "mapped=", "sample=", "compiled", "planned", "replaced")


def applies(name, kind, way):
    if name in BY_FORWARD and kind == "global hook" and way == "replaced":
        return False  # which hooks do not see
    if way == "weighted":
        return name in WEIGHTED or LAYERS[name][1]
    if way == "mapped=" and name == "GINConv":
        return False
    return name in PARTS if way.endswith("=") else True


def is_rare(name, kind, way):
    """Tracing takes seconds: few kinds of maps are traced at each commit, of two layers."""
    traced = {"GCNConv": ("hook", "sequence"), "GATConv": ("subclass", "global hook")}
    return way == "compiled" and kind not in traced.get(name, ())


CASES = [
    pytest.param(name, kind, way, marks=[pytest.mark.grid] * is_rare(name, kind, way))
    for name in LAYERS
    for kind in KINDS
    for way in WAYS
    if applies(name, kind, way)
]


def pair(name, way):
    """PyG's layer and ours with equal parameters, and what both are called with."""
    torch.manual_seed(0)
    options, of_edges = LAYERS[name]
    if way == "weighted":
        options = {**options, **(of_edges or {})}
    parts = {"k=": {"k": K}, "mapped=": {"k": K, "maxk_on": "mapped"}, "sample=": {"sample": EDGES}}
    theirs = make(pyg, name, WIDTH, OUT, **options).double()
    ours = make(nn, name, WIDTH, OUT, **options, **parts.get(way, {})).double()
    ours.load_state_dict(theirs.state_dict())
    edge_index = torch.randint(0, N, (2, EDGES))
    args = [torch.randn(N, WIDTH).double(), edge_index]
    if "edge_dim" in options:
        args.append(torch.randn(EDGES, EDGE_DIM).double())
    elif way == "weighted":
        args.append(torch.rand(EDGES).double())
    return theirs.eval(), ours.eval(), args


def maps(layer):
    """The places of a layer's linear maps."""
    for name, module in [*layer.named_modules()]:
        if name and "weight" in module._parameters and module.weight.dim() == 2:
            owner, _, leaf = name.rpartition(".")
            yield layer.get_submodule(owner), leaf, module


def exchange(ours, theirs, kind):
    """Put maps of that kind in both layers, the same modules in each."""
    for (owner, leaf, module), (other, _, _) in zip([*maps(theirs)], [*maps(ours)], strict=True):
        made = KINDS[kind](plain_map(module))
        setattr(owner, leaf, made if leaf == "lin_l" else Called(made))
        setattr(other, leaf, made)


def doubling(kind):
    """A hook of all modules, which doubles what those that are marked return."""
    if kind != "global hook":
        return nullcontext()
    return register_module_forward_hook(lambda module, _, y: 2 * y if is_doubled(module) else None)


def is_doubled(module):
    return getattr(module._parameters.get("weight"), "is_doubled", False)


class Called(Module):
    """A call of a map where PyG's TAGConv runs its forward alone."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def called_parts(layer, name, x, edge_index):
    """The layer with MaxK of mapped features, composed of calls of its maps."""
    if name == "GCNConv":
        layer.lin = Sequential(layer.lin, nn.MaxK(K))
        return layer(x, edge_index)
    graph = sparsefmt.Graph.from_edge_index(edge_index, num_nodes=N)
    lin = layer.lin_l
    # Of a torch Linear MaxK chooses before the bias is added, whoever looks on.
    apart = type(lin).__name__ in ("Linear", "ParametrizedLinear") and lin.bias is not None
    h, bias = (lin(x), 0.0)
    if apart:
        factor = 2 if len(lin._forward_hooks) and read_map(lin) is None else 1
        factor = 2 if is_doubled(lin) else factor
        factor = 1 if hasattr(lin, "weight_mask") or not hasattr(lin, "weight") else factor
        h, bias = factor * torch.nn.functional.linear(x, lin.weight), lin.bias
    return spmm(graph, maxk(h, K), reduce="mean") + bias + layer.lin_r(x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
@pytest.mark.filterwarnings("ignore:.*there are global hooks on modules:UserWarning")  # likewise
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning")  # it
@pytest.mark.parametrize(("name", "kind", "way"), CASES)
def test_an_exchanged_map_is_called(name, kind, way):
    theirs, ours, args = pair(name, way)
    plain = ours(*args).detach()
    if way == "replaced":
        for owner, leaf, module in [*maps(theirs)]:
            setattr(owner, leaf, KINDS[kind](module))
    else:
        exchange(ours, theirs, kind)
    with doubling(kind):
        if way == "mapped=":
            expected = called_parts(theirs, name, *args)
        else:
            expected = theirs(maxk(args[0], K) if way == "k=" else args[0], *args[1:])
        if way == "replaced":
            model = torch.nn.ModuleList([theirs])
            nn.replace_layers(model)
            result = model[0](*args)
        elif way == "compiled":
            torch._dynamo.reset()
            graph = sparsefmt.Graph.from_edge_index(args[1], num_nodes=N)
            result = torch.compile(ours, backend="eager")(args[0], graph, *args[2:])
        else:
            if way == "planned":
                first = {} if name == "GINEConv" else {"x": args[0]}  # which needs more
                sparsefmt.optimize(ours, args[1], **first)
            result = ours(*args)
    torch.testing.assert_close(result, expected)
    assert not torch.allclose(plain, expected), "the exchange changes nothing"


STEPS = ("forward", "message", "aggregate", "update", "propagate", "edge_update", "aggr_module")


@pytest.mark.parametrize("step", ["forward", "message"])
def test_a_step_set_on_a_class_counts(monkeypatch, step):
    model = torch.nn.ModuleList([pyg.GCNConv(4, 4)])
    monkeypatch.setattr(pyg.GCNConv, step, lambda self, x_j, edge_weight: 2 * x_j)
    assert f"its {step} has been set by hand" in nn.replace_layers(model).left["0"]


def test_a_forward_set_on_all_linear_maps_runs(monkeypatch):
    for other in (nn.AGNNConv(), nn.RGCNConv(WIDTH, OUT, 2), nn.FastRGCNConv(WIDTH, OUT, 2)):
        assert not [*other.children()]  # which have none
    layer = nn.GCNConv(4, 4, bias=False)
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: torch.zeros(len(x), 4))
    assert not layer(torch.ones(3, 4), torch.tensor([[0, 1], [1, 2]])).any()


def test_a_method_patched_on_a_class_of_maps_runs(monkeypatch):
    x, edges = torch.ones(3, 4), torch.tensor([[0, 1, 2], [1, 2, 2]])
    gin, sage = nn.GINConv(Sequential(Linear(4, 4))), nn.SAGEConv(4, 4, bias=False)
    sage.lin_l, sage.lin_r = pyg.dense.Linear(4, 4), pyg.dense.Linear(4, 4, bias=False)
    for layer, kind, name in (
        *((gin, Sequential, "forward"), (sage, pyg.dense.Linear, "forward")),
        *((gin, Module, "__call__"), (nn.GCNConv(4, 4, bias=False), Module, "__call__")),
    ):
        expected, own = 2 * layer(x, edges), getattr(kind, name)

        def doubled(*args, own=own, kind=kind):
            y = own(*args)
            return 2 * y if kind in (type(args[0]), Module) else y

        with monkeypatch.context() as patch:
            patch.setattr(kind, name, doubled)
            assert not torch.allclose(layer(x, edges), expected / 2)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GINConv", "GATConv"])
def test_a_step_set_on_an_instance_counts(name, step):
    theirs, ours, args = pair(name, "eager")
    if step == "aggr_module":
        theirs.aggr_module = pyg.MaxAggregation()
    elif hasattr(theirs, step):
        own = getattr(theirs, step)
        setattr(theirs, step, lambda *args, **options: 2 * own(*args, **options))
    else:
        theirs.edge_update = lambda: None
    if step == "edge_update" and name == "GATConv":
        theirs.edge_updater = lambda *args, **options: torch.ones(EDGES + N, 2).double()
    expected = theirs(*args) if step != "edge_update" or name != "GATConv" else None
    model = torch.nn.ModuleList([theirs])
    report = nn.replace_layers(model)
    assert model[0] is theirs
    assert "set by hand" in report.left["0"] or "aggr_module" in report.left["0"]
    if expected is not None:
        sparsefmt.optimize(model[0], args[1], x=args[0])
        torch.testing.assert_close(model[0](*args), expected)
    if step != "forward":
        with pytest.raises(UnsupportedError, match=step):
            setattr(ours, step, pyg.MaxAggregation())


def test_a_map_of_edges_is_called_once_for_edges_and_loops():
    torch.manual_seed(0)
    theirs, ours = (kind.GATConv(4, 2, edge_dim=3) for kind in (pyg, nn))
    ours.load_state_dict(theirs.state_dict())
    edges = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    theirs.lin_edge, ours.lin_edge = edges, copy.deepcopy(edges)
    args = torch.randn(6, 4), torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 4]]), torch.randn(5, 3)
    torch.testing.assert_close(ours(*args), theirs(*args))
    assert ours.lin_edge[1].num_batches_tracked == 1
