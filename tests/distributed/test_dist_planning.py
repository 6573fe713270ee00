"""Models planned for a graph of ranks compute what they did, and all ranks choose alike."""

import math
from copy import deepcopy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from dist_cases import BOUNDS, FEAT, GRAPHS, N, edges_of, numbers, said_of, shared_out, worst
from layer_cases import lost_halo
from ranks import on_ranks
from torch.nn import Linear, Module, ReLU, Sequential

from sparsefmt import nn, optimize
from sparsefmt.distributed import DistGraph, sum_gradients
from sparsefmt.model import optimizing
from sparsefmt.model.program import Program
from sparsefmt.plan.pricing import Constants

WIDE, OUT = 9, 3
#: Name -> a layer of these widths.
LAYERS = {
    "gcn": nn.GCNConv,
    "sage": nn.SAGEConv,
    "gat": nn.GATConv,
    "gat without loops": lambda n_in, n_out: nn.GATConv(n_in, n_out, add_self_loops=False),
    "gin": lambda n_in, n_out: nn.GINConv(Sequential(Linear(n_in, n_out), ReLU())),
    "gin of its own": lambda n_in, n_out: nn.GINConv(Linear(n_in, n_out), 0.5),
    "sg": lambda n_in, n_out: nn.SGConv(n_in, n_out, K=2),
    "sg without loops": lambda n_in, n_out: nn.SGConv(n_in, n_out, K=2, add_self_loops=False),
    "tag": lambda n_in, n_out: nn.TAGConv(n_in, n_out, K=2),
}


class Net(Module):
    """Two layers: one that widens, one that narrows."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = LAYERS[name](FEAT, WIDE), LAYERS[name](WIDE, OUT)
        self.double()

    def forward(self, x, graph):
        return self.last(self.first(x, graph).tanh(), graph)


def of_ranks(group, graph="random", bounds="balanced", **options):
    """The part of a graph that this rank has, its rows, and the whole."""
    edges = edges_of(graph)
    whole, borders, rows, mine = shared_out(group, edges, bounds)
    return DistGraph(edges[:, mine], borders, group, **options), rows, whole


def step(model, x, graph, rows=slice(None)):
    """The result of a model, and the gradients of its parameters and features."""
    model.zero_grad()
    x.grad = None
    y = model(x, graph)
    (y * numbers(N, y.shape[1]).flip(0)[rows]).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def differences(group, name, graph, bounds, constant):
    """Of a step by the choice, and by each composition, from a step of one process."""
    model = Net(name)
    alone = deepcopy(model)
    shared, rows, whole = of_ranks(group, graph, bounds)
    wanted = step(alone, numbers(N, FEAT).requires_grad_(not constant), whole)
    wanted = [wanted[0][rows], None if constant else wanted[1][rows], *wanted[2:]]
    x = numbers(N, FEAT)[rows].clone().requires_grad_(not constant)
    found = optimize(model, shared, x=x, training=True)

    def difference():
        y, grad, *_ = step(model, x, shared, rows)
        sum_gradients(model, group)
        given = [y, grad, *(p.grad for p in model.parameters())]
        return worst(list(zip(given, wanted, strict=True)))

    seen = [difference(), difference()]  # the second with what was kept
    made = [one for plans in found.compositions.values() for one in plans.plans.values()]
    # GAT's own way is alone in sending features that stay once, and no scores.
    assert len(made) == (0 if name == "gin of its own" else 1 if constant and "gat" in name else 2)
    for number in range(max((len(one.plan.candidates) for one in made if one.plan), default=0)):
        for module in model.children():
            module._plan.left.clear()
        for one in made:
            trees = [candidate.tree for candidate in one.plan.candidates] if one.plan else []
            one.program = Program(trees[number % len(trees)])
        seen.append(difference())
    return seen


def all_compositions(group, *case):
    assert max(differences(group, *case)) < 1e-10


@pytest.mark.covering("name", "constant", "graph", one_in=3)
@pytest.mark.parametrize(
    ("count", "graph", "bounds"),
    [(2, "hub", "balanced"), (4, "random", "empty ranks"), (4, "isolated", "one each")],
)
@pytest.mark.parametrize("constant", [False, True], ids=["features that train", "that stay"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_composition_over_ranks_is_the_layer_of_one_process(
    ranks, name, constant, count, graph, bounds
):
    ranks.run(count, all_compositions, name, graph, bounds, constant)


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
@on_ranks(2)
def test_a_planned_model_that_receives_nan_is_found_out(group, name):
    with lost_halo():
        assert max(differences(group, name, "random", "balanced", False)) == math.inf


def choices(group, name, graph, bounds, training):
    """What a rank says of its plan; ranks have constants of their own."""
    (shared, rows, _), rank = of_ranks(group, graph, bounds), dist.get_rank(group)
    real, x = optimizing.constants_of, numbers(N, FEAT)[rows].clone()
    slower = lambda device: scaled(real(device), 10.0**rank)  # noqa: E731
    with patch.object(optimizing, "constants_of", slower):
        found = optimize(Net(name), shared, x=x, training=training, steps=5)
        return [found.explain(), *(str(found).splitlines())]


def scaled(constants, factor):
    """Constants of a device whose products take longer, and whose maps do not."""
    seconds = {
        kind: row if kind == "gemm" else tuple(factor * part for part in row)
        for kind, row in constants.seconds.items()
    }
    return Constants(constants.device, constants.cache, seconds)


@pytest.mark.covering("name", "training", "graph", "bounds", one_in=4)
@pytest.mark.parametrize(("count", "bounds"), [*zip((2, 4, 4, 2), BOUNDS, strict=True)])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_all_ranks_choose_alike_whatever_their_shares_and_constants(
    ranks, name, training, graph, count, bounds
):
    found = ranks.run(count, choices, name, graph, bounds, training)
    assert all(one == found[0] for one in found)
    planned = training or name != "gat"  # which in inference runs as it is
    assert ("CHOSEN" in found[0][0]) == planned
    assert not planned or "since processes share the graph" in found[0][0]


@pytest.mark.parametrize("widths", [(32, 4), (4, 32)])
@pytest.mark.parametrize("name", ["gcn", "sage", "gin", "gat"])
@on_ranks(2, 4)
def test_features_travel_at_the_narrower_width(group, name, widths):
    """And scores of attention with them."""
    shared, rows, _ = of_ranks(group)
    torch.manual_seed(3)
    model = LAYERS[name](*widths).double()
    x = numbers(N, widths[0])[rows].clone().requires_grad_()
    (plan,) = optimize(model, shared, training=True, mode="model").layers.values()
    step(model, x, shared, rows)  # factors of vertices travel once
    before = shared.halo.traffic.nbytes
    step(model, x, shared, rows)
    sent, received = sum(shared.halo.sent), sum(shared.halo.received)
    if shared.halo.gathered is not None:
        sent = (shared.halo.gathered.ranks - 1) * shared.halo.gathered.most
    each = (shared.halo.traffic.nbytes - before) / ((sent + received) * 8)
    assert each <= 5 if name == "gat" else each == 4
    assert plan.chosen.parts["exchange"] > 0


def planned_gcn(group, out, *, given=True):
    """A layer that is planned for features that stay, and these."""
    shared, rows, whole = of_ranks(group)
    x, model = numbers(N, FEAT)[rows].clone(), nn.GCNConv(FEAT, out).double()
    alone = deepcopy(model)
    plan = optimize(model, shared, **({"x": x} if given else {}), training=True)
    return model, alone, plan, x, (shared, rows, whole)


@pytest.mark.parametrize("given", [True, False])
@on_ranks(2)
def test_features_that_stay_travel_once(group, given):
    """Also where the plan was not given them."""
    model, _, plan, x, (shared, *_) = planned_gcn(group, OUT, given=given)
    made = []
    for _ in range(2):
        before = shared.halo.traffic.exchanges
        model(x, shared).sum().backward()
        made.append(shared.halo.traffic.exchanges - before)
    assert (made[0] > 0, made[1]) == (True, 0)
    if given:
        (found,) = plan.layers.values()
        assert "((D·A·D)·H)·W" in found.explain()
        assert found.chosen.parts.get("exchange", 0.0) == 0


@on_ranks(2)
def test_a_plan_forgets_features_that_stay_with_the_graph(group):
    model, alone, _, x, (shared, rows, whole) = planned_gcn(group, WIDE)
    assert worst([(model(x, shared), alone(numbers(N, FEAT), whole)[rows])]) < 1e-10
    x.data.mul_(3)  # nobody counts this
    shared.forget()
    assert worst([(model(x, shared), alone(3 * numbers(N, FEAT), whole)[rows])]) < 1e-10


@on_ranks(2)
def test_features_in_fewer_bytes_are_priced_so(group):
    seconds = []
    for dtype in (None, torch.float16):
        shared, *_ = of_ranks(group, exchange_dtype=dtype)
        plan = optimize(nn.GATConv(FEAT, 4096).double(), shared, training=True)
        seconds.append(plan.layers[""].chosen.parts["exchange"])
    assert seconds[1] < seconds[0]


@on_ranks(2)
def test_a_planned_model_runs_on_other_graphs_copied_and_restored(group):
    other, rows, whole = of_ranks(group, "hub")
    model = Net("gcn")
    wanted = step(deepcopy(model), numbers(N, FEAT).requires_grad_(), whole)[0][rows]
    x = numbers(N, FEAT)[rows].clone().requires_grad_()
    found = optimize(model, of_ranks(group, "random", "one each")[0], training=True)
    on_one = Net("gcn")
    optimize(on_one, whole, training=True)
    runs = [model(x, other), deepcopy(model)(x, other), on_one(x, other)]
    found.restore()
    runs.append(model(x, other))
    assert not any("_plan" in vars(module) for module in model.modules())
    assert worst([(run, wanted) for run in runs]) < 1e-10


class Holding(Module):
    """A model that has its graph."""

    def __init__(self, graph):
        super().__init__()
        self.conv, self.graph = nn.SAGEConv(FEAT, OUT).double(), graph

    def forward(self, x):
        return self.conv(x, self.graph)


@on_ranks(2)
def test_a_plan_explains_the_exchange_to_one_rank_alone(group):
    shared, rows, _ = of_ranks(group)
    model = Holding(shared)
    found = optimize(model, model.graph, x=numbers(N, FEAT)[rows].clone(), training=True)
    assert list(found.layers) == ["conv"]
    if dist.get_rank(group) == 0:
        text = found.explain()
        (head,) = (line for line in text.splitlines() if "composition" in line)
        assert head.split() == ["composition", "predicted", "exchange", "once", "measured"]
        assert "halo = " in text


@on_ranks(3)
def test_ranks_that_ask_for_different_plans_are_refused(group):
    shared, rows, _ = of_ranks(group)
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    x = numbers(N, FEAT)[rows].clone()
    model = Net("gcn")
    frozen, wider = nn.GCNConv(FEAT, OUT), nn.GCNConv(FEAT, WIDE if last else OUT)
    frozen.lin.requires_grad_(not last)
    for word, asked, options in (
        ("steps is 3 on rank 2", model, {"steps": 3 if last else 4, "x": x}),
        ("training is", model, {"training": last}),
        ("x is", model, {"x": x.clone().requires_grad_() if last else x}),
        ("rank 2 cannot", model, {"mode": "fast" if last else "auto"}),
        ("model.lin.weight is", frozen, {"training": True}),
        ("model.bias is", wider, {"training": True}),
        ("mode is", model, {"mode": "fast"}),
    ):
        kind, text = said_of(lambda a=asked, o=options: optimize(a, shared, **o))
        assert kind == ("UnsupportedError" if word == "mode is" else "RankError")
        assert word in text
    assert not any("_plan" in vars(module) for module in model.modules())


@on_ranks(1)
def test_of_one_rank_a_model_is_planned_as_of_one_process(group):
    shared, _, whole = of_ranks(group)
    first, second = (
        optimize(Net("gcn"), one, x=numbers(N, FEAT), training=True, mode="model").explain()
        for one in (shared, whole)
    )
    assert "exchange" not in first
    assert first == second
