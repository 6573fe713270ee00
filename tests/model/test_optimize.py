"""Optimized models compute what they computed: each layer, graph and composition."""

import copy
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import make_graph, results  # noqa: E402
from op_cases import note_calls  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import sparsefmt  # noqa: E402
from sparsefmt import COO, Graph, optimize  # noqa: E402
from sparsefmt import nn as ours  # noqa: E402
from sparsefmt.autograd import spmm  # noqa: E402
from sparsefmt.errors import DtypeError, IndexRangeError, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt.model import composition, layers  # noqa: E402
from sparsefmt.plan import planner  # noqa: E402
from sparsefmt.plan.rules import text_of  # noqa: E402

N = 30


def mlp(f_in, f_out):
    return nn.Sequential(nn.Linear(f_in, f_out), nn.ReLU(), nn.Linear(f_out, f_out))


UPSTREAM = "target_to_source"
OURS = {
    "gcn": ours.GCNConv,
    "sage": ours.SAGEConv,
    "gin": lambda f_in, f_out: ours.GINConv(mlp(f_in, f_out), eps=0.25),
    "gin without eps": lambda f_in, f_out: ours.GINConv(mlp(f_in, f_out)),
    "sg": lambda f_in, f_out: ours.SGConv(f_in, f_out, K=2),
    "sg without loops": lambda f_in, f_out: ours.SGConv(f_in, f_out, K=2, add_self_loops=False),
    "tag": lambda f_in, f_out: ours.TAGConv(f_in, f_out, K=2),
    "gat": ours.GATConv,
    "gat without loops": lambda f_in, f_out: ours.GATConv(f_in, f_out, add_self_loops=False),
    "gat of two heads": lambda f_in, f_out: ours.GATConv(f_in, f_out // 2, heads=2),
    "gat of sums and its own": lambda f_in, f_out: ours.GATConv(f_in, f_out, residual=True),
    "gat upstream": lambda f_in, f_out: ours.GATConv(f_in, f_out, flow=UPSTREAM),
    "gat of two maps": lambda f_in, f_out: ours.GATConv((f_in, f_in), f_out),
    "attention by vectors": ours.GATv2Conv,
    "attention by products": lambda f_in, f_out: ours.TransformerConv(f_in, f_out, beta=True),
    "attention by cosines": lambda f_in, f_out: ours.AGNNConv(),
    "gcn that is improved": lambda f_in, f_out: ours.GCNConv(f_in, f_out, improved=True),
    "gcn without loops": lambda f_in, f_out: ours.GCNConv(f_in, f_out, add_self_loops=False),
    "gcn without degrees": lambda f_in, f_out: ours.GCNConv(f_in, f_out, normalize=False),
    "gcn that is cached": lambda f_in, f_out: ours.GCNConv(f_in, f_out, cached=True),
    "gcn of maxima": lambda f_in, f_out: ours.GCNConv(f_in, f_out, aggr="max"),
    "gcn upstream": lambda f_in, f_out: ours.GCNConv(f_in, f_out, flow=UPSTREAM),
    "sage of sums": lambda f_in, f_out: ours.SAGEConv(f_in, f_out, aggr="sum"),
    "sage of two": lambda f_in, f_out: ours.SAGEConv(f_in, f_out, aggr=["mean", "max"]),
    "sage of unit rows": lambda f_in, f_out: ours.SAGEConv(f_in, f_out, normalize=True),
    "sage without roots": lambda f_in, f_out: ours.SAGEConv(f_in, f_out, root_weight=False),
    "sage of projections": lambda f_in, f_out: ours.SAGEConv(f_in, f_out, project=True),
    "sage upstream": lambda f_in, f_out: ours.SAGEConv(f_in, f_out, flow=UPSTREAM),
    "gin of means": lambda f_in, f_out: ours.GINConv(mlp(f_in, f_out), aggr="mean"),
    "gin upstream": lambda f_in, f_out: ours.GINConv(mlp(f_in, f_out), flow=UPSTREAM),
    "sg that is cached": lambda f_in, f_out: ours.SGConv(f_in, f_out, cached=True),
    "sg upstream": lambda f_in, f_out: ours.SGConv(f_in, f_out, flow=UPSTREAM),
    "tag without degrees": lambda f_in, f_out: ours.TAGConv(f_in, f_out, normalize=False),
    "tag of means": lambda f_in, f_out: ours.TAGConv(f_in, f_out, aggr="mean"),
    "gcn with k": lambda f_in, f_out: ours.GCNConv(f_in, f_out, k=2),
    "gcn of samples": lambda f_in, f_out: ours.GCNConv(f_in, f_out, sample=2),
}
#: Those with options that are planned all the same; the others run as they did.
PLANNED = ("gin without eps", "gat without loops", "sg without loops")
ALONE = [name for name in OURS if " " in name and name not in PLANNED]
THEIRS = ["GCNConv", "SAGEConv", "GINConv", "GATConv", "SGConv", "TAGConv"]


def pyg(name, f_in, f_out):
    conv = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")
    options = {"SGConv": {"K": 2}, "TAGConv": {"K": 2}}.get(name, {})
    if name == "GINConv":
        return conv.GINConv(mlp(f_in, f_out), eps=0.25)
    return getattr(conv, name)(f_in, f_out, **options)


def square(*, weighted=False, seed=0):
    return make_graph(N, N, 120, weighted=weighted, seed=seed)


def edge_index(graph):
    coo = graph.coo
    return torch.from_numpy(np.stack([coo.col, coo.row]).astype(np.int64))


def features(width, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, width, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def assert_same(mine, other):
    torch.testing.assert_close([*mine], [*other], rtol=1e-10, atol=1e-10)


def unplanned(layer):
    """The same layer without its plan."""
    plain = copy.copy(layer)
    vars(plain).pop("_plan", None)
    return plain


def every_composition(layer, graph):
    """Optimize, and run each tree in turn, whatever it costs."""
    yield optimize(layer, graph, mode="model")
    layer._plan.left.clear()
    (planned,) = layer._plan.composition.plans.values()
    for candidate in planned.plan.candidates:
        planned.program = composition.Program(candidate.tree)
        yield text_of(candidate.tree)


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("widths", [(3, 6), (6, 4)])
@pytest.mark.parametrize("name", [name for name in OURS if name not in ALONE])
def test_every_composition_of_our_layers_is_the_layer(name, widths, weighted):
    graph, x = square(weighted=weighted), features(widths[0])
    layer = OURS[name](*widths).double()
    expected = results(copy.deepcopy(layer), x, graph)
    for _ in every_composition(layer, graph):
        assert_same(results(layer, x, graph), expected)


@pytest.mark.parametrize("name", ALONE)
def test_layers_with_other_options_run_as_they_did(name):
    graph, x = square(weighted=True), features(6)
    layer = OURS[name](6, 4).double().eval()  # whose samples are not drawn anew
    expected = results(copy.deepcopy(layer), x, graph)
    found = optimize(layer, graph)
    assert not found.layers
    why = "" if name.startswith("attention") else "its options are computed by its own"
    assert f"runs as it did, since {why}" in found.explain()
    assert_same(results(layer, x, graph), expected)


def test_a_sampled_layer_of_a_model_that_trains_says_why_it_is_not_planned_for_inference():
    layer = ours.SAGEConv(6, 4, sample=2).double()
    assert "goes over samples" in optimize(layer, square(), training=False).explain()


def test_a_planned_layer_still_takes_what_its_expression_does_not_say():
    """Its weights, and features of two ends, by the layer's own way."""
    graph, x = square(), features(6)
    layer = ours.GATConv(6, 4).double()
    planned = copy.deepcopy(layer)
    assert optimize(planned, graph).layers
    for args, more in (
        ((x, graph), {"return_attention_weights": True}),
        ((x, graph, None, (N, N)), {}),
        (((x, None), graph), {}),
        ((x,), {"edge_index": graph, "return_attention_weights": False}),
    ):
        found, expected = (tree_leaves(one(*args, **more)) for one in (planned, layer))
        assert_same(found, expected)


def test_a_layer_without_weights_yet_or_with_edge_features_is_not_planned():
    graph, x = square(), features(6)
    assert not optimize(ours.GATConv(6, 4, edge_dim=2).double(), graph).layers
    layer = ours.GATConv(-1, 4).double()
    optimize(layer, graph)
    first = layer(x, graph)
    assert layer.lin.weight.shape == (4, 6)
    assert_same([layer(x, graph)], [first])


@pytest.mark.parametrize("name", THEIRS)
def test_layers_of_pygs_are_left_and_planned_once_they_are_replaced(name):
    layer, x = pyg(name, 6, 4).double(), features(6)
    edges = edge_index(square())  # with duplicates, and several loops of a vertex
    expected = results(copy.deepcopy(layer), x, edges)
    found = optimize(layer, edges)
    assert not found.layers
    assert "runs as it did, since it is PyG's: exchange it by" in found.explain()
    assert_same(results(layer, x, edges), expected)
    layer = ours.replace_layers(layer).model
    for _ in every_composition(layer, edges):
        assert_same(results(layer, x, edges), expected)


class Net(nn.Module):
    """Two layers with dropout and a norm between, called as PyG's models are."""

    def __init__(self, f_in=12, hidden=8, f_out=3):
        super().__init__()
        self.first, self.last = ours.GCNConv(f_in, hidden), ours.SAGEConv(hidden, f_out)
        self.norm = nn.BatchNorm1d(hidden)

    def forward(self, x, graph):
        h = self.norm(self.first(x, graph)).relu()
        return self.last(nn.functional.dropout(h, 0.5, self.training), graph)


def net():
    torch.manual_seed(3)
    return Net().double()


def test_parameters_buffers_and_names_are_shared():
    """And no number is drawn, as ``test_forwards`` shows."""
    model, graph, x = net(), square(), features(12)
    before = {name: id(value) for name, value in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plan = optimize(model, graph, x=x.detach(), mode="measure")
    assert list(plan.layers) == ["first", "last"]
    assert "CHOSEN" in plan.explain()
    assert {name: id(value) for name, value in model.named_parameters()} == before
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    plan.restore()
    assert not any("_plan" in vars(module) for module in model.modules())


def test_a_stale_plan_is_never_used():
    """Nor are those of other graphs, dtypes and edge weights, as ``test_forwards`` shows."""
    layer, x = ours.GCNConv(12, 4).double(), features(12)
    optimize(layer, square(), x=x.detach())
    arguments = torch.cat([x, x]), make_graph(2 * N, 2 * N, 300)
    torch.testing.assert_close(layer(*arguments), unplanned(layer)(*arguments))


def test_a_wrong_call_is_refused_as_the_layer_refuses_it():
    layer, graph = ours.GCNConv(12, 4).double(), square()
    optimize(layer, graph)
    for x in (features(11), features(12, dtype=torch.float32), features(12)[:5]):
        with pytest.raises(sparsefmt.SparseFmtError):
            layer(x, graph)


def of_inference():
    with torch.inference_mode():
        return torch.ones(N, 12, dtype=torch.float64)


def test_features_of_inference_mode_are_planned_for_inference():
    model, graph, x = net().eval(), square(), of_inference()
    with torch.no_grad():
        expected = model(x, graph)
        assert optimize(model, graph, x=x).layers
        torch.testing.assert_close(model(x, graph), expected)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"model": 3}, DtypeError, "model is a int"),
        ({"graph": [1]}, DtypeError, "graph is a list"),
        ({"mode": "fast"}, UnsupportedError, "mode is 'fast'"),
        ({"x": np.zeros((N, 12))}, DtypeError, r"x is a ndarray: give torch.from_numpy\(x\)"),
        ({"x": 3}, DtypeError, "x is a int: give a torch.Tensor, or a tuple"),
        ({"x": (1,)}, ShapeError, "x holds 1 values, which Net.forward does not take: missing"),
        ({"training": "no"}, DtypeError, "training is 'no': give True, False"),
        ({"x": of_inference()}, UnsupportedError, r"x was made in inference mode, .*x.clone\(\)"),
        ({"x": (of_inference(), 1), "training": True}, UnsupportedError, "x was made in inference"),
        ({"steps": 0}, ShapeError, "steps is 0: give an integer, 1 or more, or None"),
        ({"steps": 1.5}, DtypeError, "steps is 1.5: give an integer"),
        ({"graph": torch.rand(2, 5)}, DtypeError, r"graph has dtype torch.float32: .*long\(\)"),
        ({"graph": torch.ones(3, 5).long()}, ShapeError, r"graph has shape \(3, 5\): an edge_ind"),
    ],
)
def test_wrong_arguments_are_refused_by_name(given, error, text):
    options = {"model": net(), "graph": square(), **given}
    with pytest.raises(error, match=text):
        optimize(options.pop("model"), options.pop("graph"), **options)


@pytest.mark.parametrize("x", [None, features(6).detach()], ids=["without x", "with x"])
def test_a_graph_for_a_layer_of_pygs_is_refused_by_name(x):
    with pytest.raises(DtypeError, match="graph is a Graph, but model is a layer of PyG: give its"):
        optimize(pyg("GCNConv", 6, 4).double(), square(), x=x)


def test_loops_that_are_added_are_those_that_are_missing():
    graph = Graph.from_edge_index(np.array([[0, 0, 1, 2], [0, 0, 2, 1]]), num_nodes=3)
    for which, diagonal in (("all", [3, 1, 1]), ("without", [1, 1, 1])):
        assert layers.with_loops(graph, which).csr.toarray().diagonal().tolist() == diagonal


@pytest.fixture
def timed(monkeypatch):
    """Count the iterations that are timed, in the seconds given, and forget those before."""
    seen, given = [], []

    def seconds(run, like):
        run()
        seen.append(run)
        return given[len(seen) - 1] if given else len(seen) * 1.0

    monkeypatch.setattr(composition, "seconds_of", seconds)
    monkeypatch.setattr(composition, "_REMEMBERED", {})
    monkeypatch.setattr(planner, "SHORT", 0.0)
    return SimpleNamespace(runs=seen, seconds=given)


def test_deciding_takes_four_iterations_once_and_no_call_takes_any(timed):
    timed.seconds += [2.0, 1.0, 0.8, 0.9]
    x = features(6)
    for seed in (0, 0, 0):  # graphs of one structure, at other places
        graph = square(seed=seed)
        layer = ours.GCNConv(6, 8).double()
        plan = optimize(layer, graph)
        assert len(timed.runs) == 4
        found = [c.measured for c in plan.layers[""].candidates if c.measured is not None]
        assert sorted(found) == [0.8, 0.9]  # the faster run of each
        assert plan.layers[""].chosen.measured == 0.8
    layer(x, square(seed=1))
    with torch.no_grad():
        layer(x, graph)
    assert len(timed.runs) == 4


def test_times_are_those_of_one_graph_and_of_the_code_of_one_class(timed):
    around = np.arange(64)
    cols = (np.concatenate([k * around + 1, k * around + 2]) % 64 for k in (1, 5))
    ring, permuted = (Graph(COO(np.tile(around, 2), col, shape=(64, 64))) for col in cols)
    counts = []
    for graph in (ring, ring, permuted):
        optimize(ours.GCNConv(6, 6), graph)
        counts.append(len(timed.runs))
    assert 0 < counts[0] == counts[1] < counts[2]
    assert {key[-2].rpartition(".")[2] for key in composition._REMEMBERED} == {"GCNConv"}


def test_few_times_are_remembered(timed, monkeypatch):
    monkeypatch.setattr(composition, "MAX_REMEMBERED", 3)
    for width in range(6, 12):
        optimize(ours.GCNConv(width, width), square())
    assert len(composition._REMEMBERED) == 3


class Model(nn.Module):
    """Layers by their names, and what a forward does with them."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x, *args):
        return self.run(self, x, *args)


def two_layers():
    run = lambda self, x, graph: self.last(self.first(x, graph), graph)  # noqa: E731
    return Model(run, first=ours.GCNConv(6, 6), last=ours.GCNConv(6, 6))


@pytest.mark.parametrize("call", [1, 3, 9, 12])
def test_an_error_leaves_the_model_as_it_was(monkeypatch, call):
    graph, x = square(), features(6).float()
    for earlier in (False, True):
        model = two_layers()
        if earlier:
            optimize(model, graph, x=x)
        before = [vars(module).get("_plan") for module in model.modules()]
        calls, real = [], composition.seconds_of

        def failing(run, like, calls=calls, real=real):
            calls.append(run)
            if len(calls) == call:
                raise RuntimeError("a kernel failed")
            return real(run, like)

        with monkeypatch.context() as patch:
            patch.setattr(composition, "seconds_of", failing)
            patch.setattr(composition, "_REMEMBERED", {})
            with pytest.raises(RuntimeError, match="a kernel failed"):
                optimize(model, graph, x=x, mode="measure")
            count = len(calls)
            assert [vars(module).get("_plan") for module in model.modules()] == before
            model(x, square(seed=1)).sum().backward()
            assert len(calls) == count  # nothing is timed at a call


def test_what_runs_once_is_shared_after_the_clock_too(timed):
    graph, x = square(), features(6).float()
    found = optimize(ours.GCNConv(6, 8), graph, x=x, steps=1, mode="measure").layers[""]
    least = min(c.measured + c.once for c in found.promoted)
    assert found.chosen.measured + found.chosen.once <= least / 0.97
    slow = replace(found, candidates=tuple(replace(c, once=c.once * 1e9) for c in found.candidates))
    assert slow.chosen.once == 0
    assert replace(slow, runs=None).chosen.measured == min(c.measured for c in slow.promoted)


def test_nested_inputs_and_layers_called_by_name():
    graph, x = square(), features(6).float()
    model = Model(lambda self, pair, g: self.conv(pair[0], edge_index=g), conv=ours.GCNConv(6, 6))
    expected = model([x], graph).detach()
    found = optimize(model, graph, x=([x], graph))
    torch.testing.assert_close(model([x], graph).detach(), expected)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None
    assert found.kernels() == ()


def test_an_input_may_be_none():
    graph, x = square(), features(6).float()
    model = Model(lambda self, x, graph, missing: self.conv(x, graph), conv=ours.GCNConv(6, 6))
    assert optimize(model, graph, x=(x, graph, None)).kernels()


def test_a_plan_is_explained_after_the_model_has_changed():
    graph, x = square(), features(6).float()
    model = two_layers()
    found = optimize(model, graph, x=x)
    model.double()
    assert "kernels: the model does not run as it did" in found.explain()
    model.float()
    found.restore()
    assert "kernels" not in found.explain()


def test_measuring_times_all_that_are_promoted_and_a_model_none(timed):
    found = optimize(ours.GCNConv(6, 8), square(), mode="measure").layers[""]
    iterations = 2 * len(found.promoted)
    assert len(timed.runs) == iterations
    assert all(c.measured is not None for c in found.promoted)
    optimize(ours.GCNConv(6, 8), square(seed=2), mode="model")
    assert len(timed.runs) == iterations


def test_what_does_not_fit_into_memory_is_not_chosen(monkeypatch):
    monkeypatch.setattr(composition, "_REMEMBERED", {})
    real, calls = composition.seconds_of, []

    def seconds(run, like):
        calls.append(run)
        if len(calls) == 1:
            raise MemoryError
        return real(run, like)

    monkeypatch.setattr(composition, "seconds_of", seconds)
    found = optimize(ours.GCNConv(6, 8), square(), mode="measure").layers[""]
    assert sum(c.measured is None for c in found.promoted) == 1
    assert found.chosen.measured is not None


def test_graphs_of_about_one_size_are_planned_once(monkeypatch):
    layer = ours.GCNConv(6, 8).double()
    optimize(layer, square())
    calls = note_calls(monkeypatch, composition, "plan")
    for seed in range(20):
        graph, x = make_graph(N, N, 120 + seed, seed=seed), features(6, seed=seed)
        torch.testing.assert_close(layer(x, graph), unplanned(layer)(x, graph))
    assert len(calls) <= 2  # entries on both sides of a power of two
    assert len(layer._plan.composition.plans) <= composition.MAX_PLANS


def test_attention_drops_the_same_weights_in_every_composition():
    graph, x = square(), features(6)
    layer = ours.GATConv(6, 4, dropout=0.5).double()
    torch.manual_seed(4)
    expected = results(copy.deepcopy(layer), x, graph)
    for _ in every_composition(layer, graph):
        torch.manual_seed(4)
        assert_same(results(layer, x, graph), expected)


def test_a_model_gets_its_edges_as_before():
    def run(self, x, edge_index, edge_weight=None):
        for layer in self.convs:
            h = layer(x, edge_index, edge_weight)
            x = nn.functional.dropout(h.relu(), 0.5, self.training)
        return x

    model = Model(run, convs=nn.ModuleList([ours.GCNConv(6, 8), ours.TAGConv(8, 3, K=2)])).double()
    x, edges = features(6), edge_index(square())
    reference = copy.deepcopy(model)
    fixed = x.detach()  # of which kernels are told as long as it lives
    found = optimize(model, edges, x=fixed, mode="measure")
    assert list(found.layers) == ["convs.0", "convs.1"]
    assert found.kernels()
    weight = torch.rand(edges.shape[1], dtype=torch.float64)
    changed = edges.clone()
    for arguments in ((edges,), (edges[:, :50],), (edges, weight), (changed,), (changed,)):
        found = []
        for each in (reference, model):
            torch.manual_seed(1)
            found.append(each(x, *arguments))
        torch.testing.assert_close(*found)
        changed[:, 0] = 3  # in place: the graph that was made of it is stale


@pytest.mark.filterwarnings("ignore:.*(beta state|invariant checks|to CSR format):UserWarning")
@pytest.mark.parametrize("given", ["graph", "adjacency", "both"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["GCNConv", "SGConv", "TAGConv", "SAGEConv"])
def test_a_sparse_tensor_with_loops_has_pygs_normalisation(kind, weighted, given):
    """A vertex with a loop gets another one there, and none in an ``edge_index``."""
    generator = torch.Generator().manual_seed(8)
    dense = torch.rand(N, N, generator=generator, dtype=torch.float64).tril(3)
    dense[dense < 0.8] = 0
    dense.diagonal()[::2] = 0.7
    adjacency = (dense if weighted else (dense != 0).double()).to_sparse_csr()

    conv, x = getattr(ours, kind)(6, 4), features(6)
    model = Model(lambda self, x, adj: self.conv(x, adj).relu(), conv=conv).double()
    expected = results(copy.deepcopy(model), x, adjacency)
    if given == "graph":
        optimize(model, square())
    else:
        optimize(model, adjacency, x=(x.detach(), adjacency) if given == "both" else None)
    assert_same(results(model, x, adjacency), expected)
    edges, other = edge_index(square()), copy.deepcopy(model)
    del other.conv._plan
    assert_same(results(model, x, edges), results(other, x, edges))


def test_plans_hold_no_graph():
    for layer in (ours.GCNConv(6, 8), ours.GINConv(nn.Linear(6, 8), eps=0.5), ours.GATConv(6, 8)):
        graph = square()
        optimize(layer, graph)
        layer(features(6, dtype=torch.float32), graph)
        gone = weakref.ref(graph)
        del graph
        gc.collect()
        assert gone() is None


def test_a_graph_keeps_nothing_of_a_layer_that_has_gone():
    graph, kept = square(), layers._RESULTS
    for _ in range(3):
        for eps in (0.0, 0.5):
            layer = ours.GINConv(nn.Linear(6, 8), eps=eps)
            optimize(layer, graph)
            layer(features(6, dtype=torch.float32), graph)
    del layer
    gc.collect()
    assert not len(kept[graph]["own", torch.float32])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
def test_a_compiled_model_runs_as_it_is_written():
    model, graph, x = net().eval(), square(), features(12)
    expected = results(copy.deepcopy(model), x, graph)
    optimize(model, graph, x=x.detach())
    torch.compiler.reset()
    assert_same(results(torch.compile(model, backend="eager"), x, graph), expected)


def test_a_layer_that_takes_features_of_two_ends_stays_as_it_is():
    model = Model(lambda self, x, own, g: self.conv((x, own), g), conv=ours.SAGEConv(6, 8))
    graph, x = square(), features(6, dtype=torch.float32).detach()
    expected = model(x, x.clone(), graph)
    optimize(model, graph, x=(x, x.clone(), graph), training=True)
    torch.testing.assert_close(model(x, x.clone(), graph), expected)


@pytest.mark.parametrize("part", ["", "first"])
def test_a_forward_of_the_users_own_stays(part):
    graph, x, model = square(), features(6).float(), two_layers()
    module = model.get_submodule(part)
    own = module.forward
    module.forward = patched = lambda x, graph: 0 * own(x, graph) + 1
    expected = model(x, graph)
    found = optimize(model, graph, x=x, steps=10)
    assert "last" in found.layers
    assert (part == "first") == ("its forward was set by hand" in found.explain())
    torch.testing.assert_close(model(x, graph), expected)
    found.restore()
    assert module.forward is patched
    assert torch.equal(model(x, graph), expected)


def test_an_edge_index_may_be_empty_but_not_out_of_range():
    optimize(ours.GCNConv(6, 6), torch.zeros(2, 0, dtype=torch.int64))
    with pytest.raises(IndexRangeError):
        optimize(ours.GCNConv(6, 6), edge_index(square()) - 1000)


def test_a_model_without_such_layers_says_so():
    model = Model(lambda self, x, graph: spmm(graph, self.lin(x)), lin=nn.Linear(6, 4))
    found = optimize(model, square(), x=features(6).float().detach(), steps=3)
    assert not found.layers
    assert "no layer of it can be planned" in found.explain()


def test_a_layer_whose_vectors_are_computed_is_timed():
    layer = ours.GATConv(8, 8)
    prune.random_unstructured(layer, "att_src", 0.5)
    optimize(layer, square(), x=torch.randn(N, 8), training=True, mode="measure")


def test_a_forward_that_differentiates_hears_of_training():
    def force(self, x, graph):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.conv(x, graph).sum(), x)[0]

    graph, x, model = square(), torch.randn(N, 8), Model(force, conv=ours.GCNConv(8, 1))
    with pytest.raises(RuntimeError) as caught:
        optimize(model.eval(), graph, x=x)
    assert "training=True" in caught.value.__notes__[0]
