"""Graphs of several types through PyG's own tools, with our layers in the place of PyG's."""

import io
import os
import pickle
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.nn")

from pyg_cases import assert_same, make  # noqa: E402
from torch_geometric.data import HeteroData  # noqa: E402
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks  # noqa: E402
from torch_geometric.utils import get_embeddings, get_num_hops  # noqa: E402

from sparsefmt import Graph, UnsupportedError, nn  # noqa: E402
from sparsefmt.nn import replace_layers  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:There exist node types:UserWarning"),
]

WIDTHS = {"paper": 6, "author": 4, "place": 3}
CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")
WRITTEN, AT = ("paper", "written", "author"), ("author", "at", "place")


def data(seed=0, sizes=(12, 9, 5), *, device="cpu"):
    """Three types of nodes and four of edges: rectangular, repeated, with isolated nodes."""
    generator = torch.Generator().manual_seed(seed)
    found, sizes = HeteroData(), dict(zip(WIDTHS, sizes, strict=True))
    for name, size in sizes.items():
        found[name].x = torch.randn(size, WIDTHS[name], generator=generator).double()
    for edge_type, count in ((CITES, 30), (WRITES, 25), (WRITTEN, 25), (AT, 11)):
        ends = sizes[edge_type[0]], sizes[edge_type[2]] - 2
        made = [torch.randint(0, n, (count,), generator=generator) for n in ends]
        found[edge_type].edge_index = torch.stack(made)
        found[edge_type].edge_attr = torch.randn(count, 2, generator=generator).double()
    return found.to(device)


def relations(lib):
    """A layer for each relation, of several kinds, most with widths that features tell."""
    return {
        CITES: lib.GCNConv(-1, 8),
        WRITES: lib.SAGEConv((-1, -1), 8),
        WRITTEN: lib.GATConv((-1, -1), 8, heads=2, concat=False, add_self_loops=False),
        AT: lib.SAGEConv((-1, -1), 8, aggr="max"),
    }


def runner(given, *more):
    """Return what runs a model of these types, and draws what waited for a width."""

    def run(model, x=given.x_dict):
        torch.manual_seed(6)
        found = model(x, given.edge_index_dict, *more)
        return {key: y for key, y in found.items() if y is not None}

    return run


def pair(build, run, device):
    """Models with PyG's layers and with ours, with equal parameters."""
    models = []
    for lib in (pyg, nn):
        torch.manual_seed(5)
        models.append(build(lib).double().to(device))
        run(models[-1])
    theirs, ours = models
    state = theirs.state_dict()
    assert list(state) == list(ours.state_dict())
    assert all(torch.equal(one, state[key]) for key, one in ours.state_dict().items())
    ours.load_state_dict(state)
    return theirs, ours


def assert_trains_alike(theirs, ours, run, features):
    """Results, and the gradients of all parameters and features."""
    steps = []
    for model in (theirs, ours):
        leaves = {key: x.detach().clone().requires_grad_() for key, x in features.items()}
        found, wanted = run(model, leaves), [*model.parameters(), *leaves.values()]
        loss = sum((k + 1) * (y**2).sum() for k, y in enumerate(found.values()))
        steps.append((found, torch.autograd.grad(loss, wanted, materialize_grads=True)))
    assert_same(*steps)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "cat", None])
def test_hetero_conv_is_pyg_s(device, aggr):
    given = data(device=device)
    run = runner(given)
    theirs, ours = pair(lambda lib: pyg.HeteroConv(relations(lib), aggr=aggr), run, device)
    if aggr is None:
        assert_same(run(theirs, given.x_dict), run(ours, given.x_dict))
    else:
        assert_trains_alike(theirs, ours, run, given.x_dict)
        graphs = Graph.from_pyg(given)
        assert_same(run(theirs, given.x_dict), ours(given.x_dict, graphs))


class Residual(torch.nn.Module):
    """Layers and maps at several depths, with a convolution of edge features."""

    def __init__(self, lib, kind):
        super().__init__()
        make = {
            "sage": lambda: lib.SAGEConv((-1, -1), 8, aggr="max", normalize=True),
            "gin": lambda: lib.GINConv(torch.nn.Linear(8, 8), train_eps=True),
            "gine": lambda: lib.GINEConv(torch.nn.Linear(8, 8), edge_dim=2),
            "gat": lambda: lib.GATConv((-1, -1), 8, add_self_loops=False, edge_dim=2),
            "gatv2": lambda: lib.GATv2Conv((-1, -1), 4, 2, add_self_loops=False, edge_dim=2),
            "transformer": lambda: lib.TransformerConv((-1, -1), 8, beta=True, edge_dim=2),
        }[kind]
        self.has_edges = kind not in ("sage", "gin")
        self.start = torch.nn.LazyLinear(8)
        self.convs = torch.nn.ModuleList([make(), make()])
        self.own = torch.nn.ModuleDict({"0": torch.nn.LazyLinear(8), "1": torch.nn.Linear(8, 8)})

    def forward(self, x, edge_index, edge_attr):
        x = self.start(x)
        for k, conv in enumerate(self.convs):
            given = (x, edge_index, edge_attr) if self.has_edges else (x, edge_index)
            x = (conv(*given) + self.own[str(k)](x)).relu_()
        return x


@pytest.mark.covering("kind", "aggr", "way", one_in=2)
@pytest.mark.parametrize("way", ["ours", "replaced while lazy", "replaced once drawn"])
@pytest.mark.parametrize("aggr", ["sum", "max"])
@pytest.mark.parametrize("kind", ["sage", "gin", "gine", "gat", "gatv2", "transformer"])
def test_to_hetero_takes_our_layers_as_pyg_s(device, kind, aggr, way):
    given = data(device=device)
    run = runner(given, given.edge_attr_dict)

    def build(lib):
        model = Residual(lib if way == "ours" else pyg, kind)
        model = pyg.to_hetero(model, given.metadata(), aggr=aggr)
        return replace_layers(model).model if lib is nn and "lazy" in way else model

    theirs, ours = pair(build, run, device)
    if "drawn" in way:
        replace_layers(ours)
    assert sum(type(one).__module__ == "sparsefmt.nn" for one in ours.modules()) == 8
    assert_trains_alike(theirs, ours, run, given.x_dict)


def test_loops_between_types_are_refused_by_to_hetero():
    for lib in (pyg, nn):
        model = Residual(lib, "gat")
        model.convs[0].add_self_loops = True
        with pytest.raises(ValueError, match="add_self_loops"):
            pyg.to_hetero(model, data().metadata())


# A class of PyG's as a base of ours

KINDS = sorted(kind for kind in nn.__all__ if kind.endswith("Conv"))
LAYERS = [make(nn, kind, 3, 3) for kind in KINDS]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda one: type(one).__name__)
def test_nothing_public_of_message_passing_is_inherited(layer):
    assert isinstance(layer, pyg.MessagePassing)
    kinds = [one for one in type(layer).__mro__ if one.__module__.startswith("sparsefmt.")]
    ours = {name for kind in kinds for name in vars(kind)}
    public = {name for name in vars(pyg.MessagePassing) if not name.startswith("_")}
    assert public - ours == {"special_args", "SUPPORTS_FUSED_EDGE_INDEX"}
    assert {"__init__", "__repr__", "__setstate__"} <= ours
    assert not hasattr(layer, "inspector")


#: Where layers were when earlier versions pickled them.
OLD_PLACES = {
    "attention": ("AGNNConv",),
    "gat": ("GATConv", "GATv2Conv"),
    "layers": ("GCNConv", "GINConv", "MaxK", "SAGEConv"),
}


@pytest.mark.parametrize("layer", [*LAYERS, nn.MaxK(2)], ids=lambda one: type(one).__name__)
def test_pickles_name_no_file_and_those_of_earlier_versions_load(layer):
    kind = type(layer).__name__
    written = pickle.dumps(layer, protocol=2)  # which writes module and name as lines
    name = f"csparsefmt.nn\n{kind}\n".encode()
    assert type(layer).__module__ == "sparsefmt.nn"
    assert written.count(name) == 1
    old = [place for place, kinds in OLD_PLACES.items() if kind in kinds]
    texts = [written.replace(name, f"csparsefmt.nn.{at}\n{kind}\n".encode()) for at in old]
    torch.save(layer, saved := io.BytesIO())
    saved.seek(0)
    for again in (*map(pickle.loads, (written, *texts)), torch.load(saved, weights_only=False)):
        assert type(again) is type(layer)
        assert str(again) == str(layer)
        state = again.state_dict()
        assert list(state) == list(layer.state_dict())
        assert all(torch.equal(one, state[key]) for key, one in layer.state_dict().items())
    report = replace_layers(torch.nn.Sequential(layer))
    assert report.model[0] is layer
    assert not report.left


def test_tools_that_ask_for_messages_are_refused_or_served():
    model = pyg.Sequential("x, edges", [(nn.GCNConv(3, 4), "x, edges -> x"), torch.nn.ReLU()])
    x, edges = torch.rand(5, 3), torch.tensor([[0, 1, 2], [1, 2, 3]])
    assert get_num_hops(model) == 1
    assert [one.shape for one in get_embeddings(model, x, edges)] == [(5, 4)]
    with pytest.raises(UnsupportedError, match=r"GCNConv.explain is True: .* keep PyG's layer"):
        set_masks(model, torch.rand(3), edges)
    clear_masks(model)
    layer = next(one for one in model.modules() if isinstance(one, nn.GCNConv))
    assert layer.explain is None
    layer.explain = False
    set_masks(model, torch.rand(3), edges)  # which leaves out this layer
    assert layer.explain is False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a copy of the process for each question")
def test_pyg_is_joined_by_a_layer_or_class_and_classes_that_name_it_first_are_refused():
    code = """
import os, sys
from sparsefmt import UnsupportedError, nn
first = nn.GCNConv(3, 4)
assert not any(name.startswith("torch_geometric") for name in sys.modules)
assert type(first).__mro__[-2].__module__.startswith("torch.nn")
from torch_geometric.nn import MessagePassing

if not (child := os.fork()):
    nn.SAGEConv(3, 4)
    assert isinstance(first, MessagePassing)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0

class Lines(MessagePassing):
    lines = 3

kept = []
def define():
    class Late(MessagePassing, nn.GCNConv):
        pass

try:
    define()
except UnsupportedError as error:
    kept.append(error)  # and its traceback the class
    said = "Late names PyG's MessagePassing before a layer of sparsefmt, which is one: "
    assert str(error) == said + "leave it out.", error
else:
    raise SystemExit("taken")

class Both(Lines, nn.GCNConv):
    pass

class Ours(nn.SAGEConv, MessagePassing):
    pass

for kind in (nn.SAGEConv, nn.GATConv, Both, Ours):
    assert isinstance(kind(2, 2), MessagePassing)
assert Both(2, 2).lines == 3
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
