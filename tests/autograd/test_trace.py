"""Modules that users write: which products are found, and that all else stays as it is."""

import copy
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import make_graph  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import sparsefmt  # noqa: E402
from sparsefmt import IndexRangeError, optimize  # noqa: E402
from sparsefmt.autograd import spmm  # noqa: E402
from sparsefmt.model import composition  # noqa: E402
from sparsefmt.nn import GCNConv  # noqa: E402
from sparsefmt.plan.rules import bare  # noqa: E402

N, F_IN = 30, 6


class Written(nn.Module):
    """A model of some parameters; ``body`` is its forward."""

    def __init__(self, graph, body):
        super().__init__()
        self.graph, self.body = graph, body
        self.lin, self.skip = nn.Linear(F_IN, 4, bias=False), nn.Linear(F_IN, 4)
        self.w = nn.Parameter(torch.randn(4, 5) / 2)
        self.register_buffer("d", torch.rand(N) + 0.5)
        self.plain = torch.rand(N, dtype=torch.float64) + 0.5

    def forward(self, x):
        return self.body(self, x)


def as_gcn(self, x):
    return torch.relu(self.d[:, None] * spmm(self.graph, self.d.unsqueeze(-1) * self.lin(x)))


BODIES = {
    "gcn": as_gcn,
    "plain attribute": lambda m, x: spmm(m.graph, m.plain[:, None] * m.lin(x)),
    "view": lambda m, x: (spmm(m.graph, x) * m.d.view(-1, 1)) @ m.lin.weight.t() @ m.w,
    "two hops": lambda m, x: spmm(m.graph, spmm(m.graph, m.lin(x))),
    "sage": lambda m, x: m.lin(spmm(m.graph, x, reduce="mean")) + m.skip(x),
    "bias": lambda m, x: m.skip(spmm(m.graph, x)).tanh() @ m.w,
    "scales": lambda m, x: spmm(m.graph, m.lin(x), row_scale=m.d, col_scale=m.plain),
    "attribute": lambda m, x: sparsefmt.autograd.spmm(m.graph, m.lin(x)),
    "shared": lambda m, x: (lambda h: spmm(m.graph, h) + h)(m.lin(x)),
    "doubled": lambda m, x: (lambda h: h + h)(spmm(m.graph, m.lin(x))),
    "three terms": lambda m, x: (
        m.lin(x) + spmm(m.graph, m.lin(x)) + spmm(m.graph, x) @ m.lin.weight.t()
    ),
}


def square(seed=0):
    return make_graph(N, N, 120, seed=seed)


def features(*, grad=True, rows=N):
    x = torch.randn(rows, F_IN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(grad)


def results(model, *arguments):
    y = model(*arguments)
    asked = [one for one in (*arguments, *model.parameters()) if getattr(one, "requires_grad", 0)]
    return [y, *torch.autograd.grad(y.square().sum(), asked, allow_unused=True)]


def assert_same(mine, other):
    for one, two in zip(mine, other, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", BODIES)
def test_every_composition_of_what_is_written_is_what_is_written(name):
    graph, x = square(), features()
    model = Written(graph, BODIES[name]).double()
    expected = results(copy.deepcopy(model), x)
    plan = optimize(model, graph, x=(x,), mode="model")
    assert len(plan.layers) == 1
    (made,) = plan.compositions.values()
    assert_same(results(model, x), expected)
    planned = list(made.plans.values())
    for candidate in planned[-1].plan.candidates:
        for each in planned:
            each.program = composition.Program(candidate.tree)
        assert_same(results(model, x), expected)
        assert bare(candidate.tree)


def test_what_is_written_is_one_of_its_compositions():
    """Or it could not be timed against them, and nothing would say that it stays."""
    for name in set(BODIES) - {"three terms", "doubled"}:
        model = Written(square(), BODIES[name]).double()
        plan = optimize(model, model.graph, x=(features(),), mode="model")
        (made,) = plan.compositions.values()
        (found, *_) = plan.layers.values()
        assert made.default in {bare(c.tree) for c in found.candidates}, name


class Deep(nn.Module):
    """Layers that are known beside products that are not, with dropout, called with a graph."""

    def __init__(self):
        super().__init__()
        self.first, self.last = GCNConv(F_IN, 8), nn.Linear(8, 3)
        self.norm, self.rate = nn.BatchNorm1d(8), 0.5

    def forward(self, x, graph, scale=None):
        h = F.dropout(self.norm(self.first(x, graph)).relu(), self.rate, self.training)
        y = self.last(spmm(graph, h, reduce="mean"))
        return y if scale is None else scale * y


def deep():
    torch.manual_seed(2)
    return Deep().double()


def test_training_evaluation_and_changed_attributes_are_each_traced_anew():
    graph, x = square(), features()
    model, reference = deep(), deep()
    optimize(model, graph, x=x.detach())
    assert list(model.state_dict()) == list(reference.state_dict())
    for change in (
        lambda m: m.train(),
        lambda m: m.eval(),
        lambda m: setattr(m.train(), "rate", 0.1),
    ):
        found = []
        for each in (model, reference):
            change(each)
            torch.manual_seed(7)
            found.append(results(each, x, graph))
        assert_same(*found)


@pytest.mark.parametrize("change", ["graph", "dtype", "rows", "argument", "name", "autocast"])
def test_a_call_of_another_kind_than_planned_is_right(change):
    graph, x = square(), features()
    model, reference = deep().eval(), deep().eval()
    optimize(model, graph, x=x.detach())
    arguments, named = [x, graph], {}
    if change == "graph":
        arguments[1] = square(seed=1)
    elif change == "dtype":
        model, reference, arguments[0] = model.float(), reference.float(), x.float()
    elif change == "rows":
        arguments = [features(rows=2 * N), make_graph(2 * N, 2 * N, 99)]
    elif change == "argument":
        arguments.append(torch.tensor(3.0).double())
    elif change == "name":
        arguments, named = [x], {"graph": graph}
    with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
        torch.testing.assert_close(model(*arguments, **named), reference(*arguments, **named))


def test_a_copy_is_traced_for_itself():
    graph, x = square(), features()
    model = deep().eval()
    optimize(model, graph, x=x.detach())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.last.weight.zero_()
    assert torch.equal(other(x, graph), other.last.bias.expand(N, 3))
    assert_same(results(model, x, graph), results(deep().eval(), x, graph))


def test_constants_are_computed_once_for_features_that_stay():
    graph, x = square(), features(grad=False)
    model = Written(graph, BODIES["view"]).double()
    reference = copy.deepcopy(model)
    plan = optimize(model, graph, x=(x,), mode="model")
    (found,) = plan.layers.values()
    assert found.chosen.once > 0
    for _ in range(2):
        assert_same(results(model, x), results(reference, x))
        x.mul_(3)
        model.d.add_(1), reference.d.add_(1)


# What cannot be traced


def branches(self, x):
    h = spmm(self.graph, self.lin(x))
    return h if h.sum() > 0 else -h


def lengths(self, x):
    return torch.ones(int(x.abs().max()), dtype=x.dtype).sum() * spmm(self.graph, self.lin(x))


def library(self, x):
    return torch.from_numpy(np.asarray(x)) @ self.lin.weight.t()


def remembers(self, x):
    self.last = spmm(self.graph, self.lin(x))
    return self.last


def draws(self, x):
    return spmm(self.graph, self.lin(x)) * random.random()


def makes(self, x):
    return spmm(self.graph, self.lin(x)) * torch.ones(N, 1, dtype=torch.float64)


def asks_isinstance(self, x):
    h = spmm(self.graph, self.lin(x))
    return h * 10 if isinstance(x, torch.Tensor) else h


def asks_type(self, x):
    return spmm(self.graph, self.lin(x)) * (10 if type(x) is torch.Tensor else 1)


def asks_attribute(self, x):
    return spmm(self.graph, self.lin(x)) * (10 if hasattr(x, "foo") else 1)


def asks_by_match(self, x):
    match x:
        case torch.Tensor():
            return spmm(self.graph, self.lin(x)) * 10
    return spmm(self.graph, self.lin(x))


def asks_by_error(self, x):
    try:
        factor = int(x.shape[0])
    except TypeError:
        factor = 1
    return spmm(self.graph, self.lin(x)) * factor


def asks_gradients(self, x):
    return spmm(self.graph, self.lin(x)) * (10 if torch.is_grad_enabled() else 1)


def frozen(self, x):
    with torch.no_grad():
        h = spmm(self.graph, self.lin(x))
    return h @ self.lin.weight


@torch.no_grad()
def teacher(lin, x):
    return lin(x)


def frozen_by_decorator(self, x):
    return spmm(self.graph, teacher(self.lin, x)) @ self.lin.weight


def narrower(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        return spmm(self.graph, self.lin(x))


def asks_of_a_constant(self, x):
    return spmm(self.graph, self.lin(x)) * (10 if isinstance(self.scale, int) else 1)


def test_isinstance_of_what_is_no_argument_is_traced():
    graph, x = square(), features(grad=False).float()
    model = Written(graph, asks_of_a_constant)
    model.scale = 3
    expected = asks_of_a_constant(model, x)
    assert optimize(model, graph, x=(x,)).layers
    torch.testing.assert_close(model(x), expected)


ASKING = (
    *(asks_isinstance, asks_type, asks_attribute, asks_by_match, asks_by_error, asks_gradients),
    *(frozen, frozen_by_decorator, narrower),
)


@pytest.mark.parametrize("body", ASKING, ids=lambda body: body.__name__)
def test_what_a_trace_would_answer_otherwise_stops_it(body):
    graph, x = square(), features(grad=False).float()
    model = Written(graph, body)
    expected = body(model, x).detach()
    with pytest.warns(UserWarning, match="its trace stopped"):
        optimize(model, graph, x=(x,))
    with torch.no_grad():
        same = body is not asks_gradients
        assert torch.equal(model(x), expected) == same


def test_an_argument_of_none_is_none():
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(6, 4)

        def forward(self, x, graph, mask):
            h = spmm(graph, self.lin(x))
            return h * 0 if mask is not None else h

    graph, x = square(), features(grad=False).float()
    model = Masked()
    expected = model(x, graph, None)
    optimize(model, graph, x=(x, graph, None))
    torch.testing.assert_close(model(x, graph, None), expected)
    assert not model(x, graph, torch.ones(1)).any()


def test_a_forward_of_the_users_own_stays():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = GCNConv(6, 5), GCNConv(5, 4)

        def forward(self, x, graph):
            return self.last(self.first(x, graph), graph)

    graph, x = square(), features(grad=False).float()
    for part in ("", "first"):
        model = Two()
        module = model.get_submodule(part)
        own = module.forward

        def patched(x, graph, own=own):
            return 0 * own(x, graph) + 1

        module.forward = patched
        expected = model(x, graph)
        found = optimize(model, graph, x=x, steps=10)
        assert "last" in found.layers
        torch.testing.assert_close(model(x, graph), expected)
        found.restore()
        assert module.forward is patched
        assert torch.equal(model(x, graph), expected)


def test_a_plan_restores_what_it_has_set():
    shared, graph, x = GCNConv(6, 6), square(), features(grad=False).float()
    models = [torch.nn.ModuleList([shared, GCNConv(6, 6)]) for _ in range(2)]
    plans = [optimize(model[0], graph, x=x) for model in models]
    plans[0].restore()
    assert plans[1].kernels()
    plans[1].restore()
    assert not plans[1].kernels()
    assert len(repr(plans[0])) < 200


def test_edge_index_plans_our_layers_too():
    graph, x = square(), features(grad=False).float()
    edge_index = torch.from_numpy(np.stack([graph.coo.col, graph.coo.row])).long()
    layer = GCNConv(6, 6)
    expected = layer(x, edge_index)
    found = optimize(layer, edge_index, x=x, mode="measure")
    assert found.layers
    assert found.kernels()
    torch.testing.assert_close(layer(x, edge_index), expected)
    empty = torch.zeros(2, 0, dtype=torch.int64)
    assert optimize(GCNConv(6, 6), empty).layers is not None
    with pytest.raises(IndexRangeError):
        optimize(GCNConv(6, 6), edge_index - 1000)


STOPS = {f.__name__: f for f in (branches, lengths, library, remembers, draws, makes)}


@pytest.mark.parametrize("name", STOPS)
def test_a_trace_that_stops_warns_where_and_leaves_the_model_as_it_was(name):
    graph, x = square(), features(grad=False)
    model = Written(graph, STOPS[name]).double()
    before, drawn = {**vars(model)}, random.getstate()
    place = {"remembers": "writes to the model: to last", "draws": "in draws uses random"}
    at = place.get(name, f"in {name}: ")
    with pytest.warns(
        UserWarning, match=f"the model runs as it did, since its trace stopped.*{at}"
    ) as seen:
        plan = optimize(model, graph, x=(x,))
    assert not any("contextlib" in str(one.message) for one in seen)
    branched = any("does not branch" in str(one.message) for one in seen)
    assert branched == (name in ("branches", "lengths"))
    assert random.getstate() == drawn
    assert not plan.layers
    assert vars(model) == before
    random.seed(1)
    found = model(x)
    random.seed(1)
    assert torch.equal(found, STOPS[name](model, x))


def test_what_is_written_in_place_between_products_is_not_moved():
    graph, x = square(), features(grad=False)

    def body(self, x):
        h = x * 1
        y = self.lin(h)
        h.mul_(2)
        return spmm(self.graph, y) + h @ self.lin.weight.t()

    model = Written(graph, body).double()
    expected = body(model, x)
    optimize(model, graph, x=(x,))
    torch.testing.assert_close(model(x), expected)
