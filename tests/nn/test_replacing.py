"""``replace_layers``: which layers of a PyG model it exchanges, and what it says of the others."""

import copy
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.nn")

from pyg_cases import assert_same, numbers, outcome  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402
from torch_geometric.nn.aggr import MinAggregation  # noqa: E402
from torch_geometric.nn.dense.linear import Linear as PygLinear  # noqa: E402

from sparsefmt import nn  # noqa: E402
from sparsefmt.errors import DtypeError, ShapeError  # noqa: E402
from sparsefmt.nn import replace_layers  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

N, EDGES, TYPES = 14, 50, 4


X, ATTR = numbers(N, 6), numbers(EDGES, 3, seed=1)
GENERATOR = torch.Generator().manual_seed(0)
INDEX = torch.randint(0, N - 2, (2, EDGES), generator=GENERATOR)
KINDS = torch.randint(0, TYPES, (EDGES,), generator=GENERATOR)
OF_EDGES, OF_TYPES = {"edge_attr": ATTR}, {"edge_type": KINDS}
MODELS = {
    "GCN": lambda: pyg.GCN(6, 8, 3, 4, norm="batch", jk="cat"),
    "GraphSAGE": lambda: pyg.GraphSAGE(6, 8, 2, aggr="max"),
    "GIN": lambda: pyg.GIN(6, 8, 2, train_eps=True),
    "GAT": lambda: pyg.GAT(6, 8, 2, heads=2),
    "GATv2": lambda: pyg.GAT(6, 8, 2, v2=True, residual=True),
    "lazy": lambda: pyg.GraphSAGE(-1, 8, 2),
}
LAYERS = {
    "GCN": (lambda: pyg.GCNConv(6, 8, improved=True, bias=False), {}),
    "turned": (lambda: pyg.GCNConv(6, 8, flow="target_to_source"), {}),
    "SAGE": (lambda: pyg.SAGEConv((6, 6), 8, aggr=["mean", "max"], project=True), {}),
    "GIN": (lambda: pyg.GINConv(torch.nn.Sequential(torch.nn.Linear(6, 8)), eps=0.3), {}),
    "GINE": (lambda: pyg.GINEConv(torch.nn.Linear(6, 8), train_eps=True, edge_dim=3), OF_EDGES),
    "GAT": (lambda: pyg.GATConv(6, 8, heads=2, concat=False, residual=True), {}),
    "GATv2": (lambda: pyg.GATv2Conv(6, 8, share_weights=True, edge_dim=3), OF_EDGES),
    "AGNN": (lambda: pyg.AGNNConv(requires_grad=False), {}),
    "Transformer": (lambda: pyg.TransformerConv(6, 8, heads=2, beta=True), {}),
    "SG": (lambda: pyg.SGConv(6, 8, K=2), {}),
    "TAG": (lambda: pyg.TAGConv(6, 8, K=2, bias=False), {}),
    "RGCN": (lambda: pyg.RGCNConv(6, 8, TYPES, num_blocks=2, root_weight=False), OF_TYPES),
    "APPNP": (lambda: pyg.APPNP(3, 0.2, add_self_loops=False), {}),
    "ARMA": (lambda: pyg.ARMAConv(6, 8, 2, 3, shared_weights=True, act=torch.nn.PReLU()), {}),
    "Cheb": (lambda: pyg.ChebConv(6, 8, 3, normalization="rw", bias=False), {}),
    "Edge": (lambda: pyg.EdgeConv(torch.nn.Linear(12, 8), aggr="mean"), {}),
    "FA": (lambda: pyg.FAConv(6, eps=0.3), {"x_0": X}),
    "GatedGraph": (lambda: pyg.GatedGraphConv(8, 2, bias=False), {}),
    "GCN2": (lambda: pyg.GCN2Conv(6, 0.2, 0.7, 3, shared_weights=False), {"x_0": X}),
    "Graph": (lambda: pyg.GraphConv(6, 8, aggr="mean", bias=False), {}),
    "LE": (lambda: pyg.LEConv(6, 8, bias=False), {}),
    "LG": (lambda: pyg.LGConv(normalize=False), {}),
    "MixHop": (lambda: pyg.MixHopConv(6, 8, [0, 2], bias=False), {}),
    "PNA": (
        lambda: pyg.PNAConv(
            *(6, 8, ["mean", "std"], ["identity", "linear"], torch.tensor([1, 3, 2]), 3, 2, 2),
            **{"act": torch.nn.PReLU(), "train_norm": True},
        ),
        OF_EDGES,
    ),
    "ResGated": (lambda: pyg.ResGatedGraphConv(6, 8, torch.nn.Tanh(), edge_dim=3), OF_EDGES),
    "Simple": (lambda: pyg.SimpleConv(["mean", "max"], combine_root="cat"), {}),
    "SSG": (lambda: pyg.SSGConv(6, 8, 0.3, K=2), {}),
    "FastRGCN": (lambda: pyg.FastRGCNConv(6, 8, TYPES, num_bases=3), OF_TYPES),
}


@pytest.mark.parametrize("name", MODELS)
def test_basic_models_keep_their_parameters_and_results(name):
    theirs = MODELS[name]().double()
    if name == "lazy":
        theirs(X, INDEX)
    ours = copy.deepcopy(theirs)
    before = [id(one) for one in ours.parameters()]
    report = replace_layers(ours)
    assert report.model is ours
    assert len(report.replaced) == len(theirs.convs)
    assert not report.left
    assert [id(one) for one in ours.parameters()] == before
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(type(one).__module__ == "sparsefmt.nn" for one in ours.convs)
    assert repr(ours) == repr(theirs)
    assert_same(*(outcome(model, [X], INDEX) for model in (theirs, ours)))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_over_all_options(name):
    make, given = LAYERS[name]
    theirs = make().double()
    network, state = getattr(theirs, "nn", None), torch.random.get_rng_state()
    report = replace_layers(theirs)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert report.replaced == {"": type(theirs).__name__}
    ours = report.model
    assert repr(ours) == repr(theirs)
    assert getattr(ours, "nn", None) is network
    shared = zip(theirs.parameters(), ours.parameters(), strict=True)
    assert all(one is other for one, other in shared)
    assert_same(*(outcome(model, [X], INDEX, given) for model in (theirs, ours)))


class OwnConv(pyg.GCNConv):
    """A class of the user's."""


def hooked(layer, register="register_forward_hook", part=""):
    getattr(layer.get_submodule(part), register)(lambda *_: None)
    return layer


class Scaled(PygLinear):
    """A map of the user's, such as one of low rank."""


def having(layer, name, value):
    setattr(layer, name, value)
    return layer


def parametrised(layer):
    parametrizations.weight_norm(layer.lin)
    return layer


def set_by_hand(layer):
    layer.lin.forward = lambda x: 2 * x
    return layer


def with_sums_doubled(layer):
    reduce = layer.aggr_module.reduce
    layer.aggr_module.reduce = lambda *args, **options: 2 * reduce(*args, **options)
    return layer


def with_plain_bias(layer):
    del layer.bias
    layer.bias = torch.ones(8)
    return layer


def run(layer):
    layer(X.float(), INDEX)
    return layer


GCN = partial(pyg.GCNConv, 6, 8)
LEFT = {
    "map": (lambda: having(GCN(), "lin", Scaled(6, 8)), "its lin is a Scaled"),
    "map's hook": (lambda: hooked(pyg.SGConv(6, 8), part="lin"), "its lin has"),
    "its gradients": (
        lambda: hooked(pyg.GATConv(6, 8), "register_full_backward_hook", "lin"),
        "its lin has hooks",
    ),
    "lazy map's hook": (
        lambda: hooked(pyg.GCNConv(-1, 8), "register_forward_pre_hook", "lin"),
        "its lin has hooks",
    ),
    "by hand": (lambda: set_by_hand(GCN()), "its lin has hooks, or a method set"),
    "aggregation's method": (
        lambda: with_sums_doubled(pyg.SAGEConv(6, 8)),
        "its aggr_module has hooks, or a method set by hand",
    ),
    "plain bias": (
        lambda: with_plain_bias(GCN()),
        "its bias is a tensor set by hand, no parameter or buffer",
    ),
    "other module": (
        lambda: having(GCN(), "aggr_module", MinAggregation()),
        "its aggregation is 'add' but its aggr_module MinAggregation()",
    ),
    "mode": (
        lambda: pyg.SAGEConv(6, 8, aggr=["mean", "max"], aggr_kwargs={"mode": "sum"}),
        "its aggregations are put together by 'sum'",
    ),
    "cached": (lambda: run(GCN(cached=True)), "it has cached its graph; replace"),
    "cached x": (lambda: run(pyg.SGConv(6, 8, cached=True)), "it has cached its graph; replace"),
    "no such layer": (lambda: pyg.MFConv(6, 8), "sparsefmt.nn has no such layer"),
    "own class": (lambda: OwnConv(6, 8), "its class is not PyG's own"),
    "hooks": (lambda: hooked(GCN()), "it has forward hooks"),
    "messages": (
        lambda: hooked(GCN(), "register_message_forward_hook"),
        "it has hooks on its messages",
    ),
    "explained": (lambda: having(GCN(), "explain", True), "its explanation is asked for"),
    "parametrised": (lambda: parametrised(GCN()), "GCNConv: its lin is a ParametrizedLinear, not"),
    "aggregation": (lambda: pyg.SAGEConv(6, 8, aggr="median"), "its aggregation is 'median'"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_says_why(case):
    make, text = LEFT[case]
    layer = make()
    report = replace_layers(layer)
    assert report.model is layer
    assert not report.replaced
    assert text in report.left[""]
    inside = torch.nn.ModuleDict({"inner": torch.nn.ModuleList([layer, pyg.GCNConv(6, 8)])})
    report = replace_layers(inside)
    assert inside["inner"][0] is layer
    assert report.replaced == {"inner.1": "GCNConv"}
    assert repr(report).splitlines() == [
        "replaced 1 layers, left 1",
        "  inner.1: GCNConv",
        f"  inner.0 left: {report.left['inner.0']}",
    ]


def test_cached_layers_that_have_not_run_are_exchanged():
    report = replace_layers(pyg.GCNConv(6, 8, cached=True))
    assert report.model.cached
    assert repr(report) == "replaced 1 layers, left 0\n  the model: GCNConv"


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_layers_that_refuse_features_of_edges_are_named(name):
    make = getattr(pyg, name)
    text = f"{name}, which refuses edge_attr as its edge_dim is None: call it without"
    assert text in repr(replace_layers(make(6, 8)))
    model = torch.nn.ModuleDict({"a": make(6, 8), "b": make(6, 8, edge_dim=3)})
    report = replace_layers(model)
    assert list(report.remarks) == ["a"]
    assert report.replaced == {"a": name, "b": name}
    model["b"].float()(X.float(), INDEX, ATTR.float())
    with pytest.raises(ShapeError, match="edge_attr"):
        model["a"](X.float(), INDEX, ATTR.float())


def test_sequential_and_layers_in_two_places():
    layer = pyg.GCNConv(6, 6)
    step = layer, "x, edge_index -> x"
    model = pyg.Sequential("x, edge_index", [step, torch.nn.ReLU(), step]).double()
    expected = model(X, INDEX)
    report = replace_layers(model)
    assert len(report.replaced) == 2
    assert torch.allclose(model(X, INDEX), expected, rtol=0, atol=1e-12)
    found = {id(one) for one in model.modules() if isinstance(one, nn.GCNConv)}
    assert len(found) == 1


def with_our_layers(x, edge_index):
    step = "x, edge_index -> x"
    steps = [(pyg.GCNConv(6, 8), step), torch.nn.ReLU(), (pyg.MFConv(8, 8), step)]
    model = pyg.Sequential("x, edge_index", steps)
    print(replace_layers(model))  # "module_2 left: MFConv: sparsefmt.nn has no such layer"
    return model(x, edge_index)


def test_the_page_of_training_says_what_is_printed(capsys):
    assert with_our_layers(X.float(), INDEX).shape == (N, 8)
    assert "module_2 left: MFConv: sparsefmt.nn has no such layer" in capsys.readouterr().out


def test_an_optimizer_made_before_goes_on_and_modes_travel():
    model = pyg.GCN(6, 8, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_layers(model)
    before = model(X, INDEX).detach()
    model(X, INDEX).sum().backward()
    optimizer.step()
    assert not torch.allclose(model(X, INDEX), before)
    model = pyg.GAT(6, 8, 2, dropout=0.5).eval()
    replace_layers(model)
    assert not any(one.training for one in model.modules())


def test_what_is_no_model_is_refused():
    with pytest.raises(DtypeError, match="model is a list: give a torch"):
        replace_layers([pyg.GCNConv(6, 8)])
