"""Models that ask, print, log, hook, copy, exchange, share, branch or change: planned as they are.

Each is planned and computes what the plain model does, or is left alone, and the plan says why.
"""

import copy
import io
import logging
import pickle
import random
from contextlib import redirect_stdout

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import make_graph  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.modules import module as every  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402

from sparsefmt import Graph, optimize  # noqa: E402
from sparsefmt.nn import GATConv, GCNConv, GINConv, SAGEConv, SGConv, TAGConv  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

N, F_IN, HIDDEN = 30, 12, 6
LOG = logging.getLogger(__name__)
HALF = torch.tensor([0.5], dtype=torch.float64)


class Net(nn.Module):
    """Two layers, of which the first is planned away from its own code, and what ``body`` does."""

    def __init__(self, body, graph):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = GCNConv(F_IN, HIDDEN), SAGEConv(HIDDEN, 5)
        self.body, self.graph, self.graphs, self.x = body, graph, [graph], None
        self.options, self.calls, self.seen, self.left_out = {"scale": 2.0}, 0, [], None
        self.numbers, self.log = np.zeros(2), bytearray()
        self.register_buffer("total", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("mask", torch.eye(3).to_sparse())

    def layers(self, x, graph):
        return self.last(self.first(x, graph).relu(), graph)

    def forward(self, x, graph, mask=None):
        y = self.layers(x, graph)
        return y * (1 + float(torch.as_tensor(self.body(self, x, graph, y)).detach()))


def square(seed=0):
    return make_graph(N, N, 120, seed=seed)


def features(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, F_IN, generator=generator, dtype=torch.float64)


def pair(body=lambda *_: 0):
    """A model and its plain twin, of one graph."""
    graph = square()
    plain = Net(body, graph).double()
    planned = Net(body, graph).double()
    planned.load_state_dict(plain.state_dict())
    return planned, plain, graph


def planned_away(layer):
    """Let a plan run a composition that is not the layer's own, whatever it costs."""
    from sparsefmt.model.program import Program

    plan = layer._plan
    plan.left.clear()
    for planned in plan.composition.plans.values():
        tree = next(c.tree for c in planned.plan.candidates if c.tree != planned.plan.own)
        planned.program = Program(tree)


def same(planned, plain, x, graph, **more):
    torch.manual_seed(5)
    found = planned(x, graph, **more)
    torch.manual_seed(5)
    expected = plain(x, graph, **more)
    near = 1e-9 if found.dtype is torch.float64 else 1e-4
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def logs(self, x, graph, y):
    LOG.warning("%s of %s", tuple(x.shape), graph)
    return 0


def remembers(self, x, graph, y):
    self.calls += 1
    self.seen.append(self.calls)
    return self.calls


def counts(self, x, graph, y):
    self.total += 1
    return self.total


def changes_a_mode(self, x, graph, y):
    with torch.no_grad():
        return float(self.first(x, graph).requires_grad)


def catches(self, x, graph, y):
    try:
        self.first(x[:3], graph)
    except ValueError:
        return 1
    return 0


def matches(self, x, graph, y):
    match graph:
        case Graph():
            return 1
    return 0


ASKED = {
    "is": lambda self, x, graph, y: graph is self.graph,
    "same features": lambda self, x, graph, y: x is self.x,
    "id": lambda self, x, graph, y: id(graph) == id(self.graph),
    "grad": lambda self, x, graph, y: x.grad is None,
    "requires grad": lambda self, x, graph, y: y.requires_grad,
    "isinstance": lambda self, x, graph, y: isinstance(x, torch.Tensor),
    "type": lambda self, x, graph, y: type(graph) is Graph,
    "type of a layer": lambda self, x, graph, y: type(self.first) is GCNConv,
    "own forward": lambda self, x, graph, y: "forward" in vars(self.first),
    "getattr": lambda self, x, graph, y: getattr(graph, "no_such_name", 2),
    "hasattr": lambda self, x, graph, y: hasattr(graph, "csr") and getattr(graph, "no", 3) == 3,
    "match": matches,
    "try": catches,
    "grad mode": lambda self, x, graph, y: torch.is_grad_enabled(),
    "no_grad": changes_a_mode,
    "training": lambda self, x, graph, y: self.training,
    "branch on a value": lambda self, x, graph, y: 1 if y.sum() > 0 else 2,
    "item": lambda self, x, graph, y: y.sum().item(),
    "loop": lambda self, x, graph, y: sum(float(row.sum()) for row in y.detach()),
    "print": lambda self, x, graph, y: print(x.shape, graph) or 0,
    "log": logs,
    "dict": lambda self, x, graph, y: self.options["scale"],
    "numpy": lambda self, x, graph, y: np.abs(y.detach().numpy()).max(),
    "random": lambda self, x, graph, y: torch.rand(1),
    "counter": remembers,
    "buffer": counts,
    "other graph": lambda self, x, graph, y: self.first(x, square(1)).sum(),
    "twice": lambda self, x, graph, y: self.first(self.first.bias.new_ones(N, F_IN), graph).sum(),
    "weights": lambda self, x, graph, y: self.first.lin.weight.sum() + self.first.lin(x).sum(),
    "names": lambda self, x, graph, y: len(dict(self.first.named_parameters())),
    "state": lambda self, x, graph, y: len(self.first.state_dict()) + len(list(self.modules())),
    "by name": lambda self, x, graph, y: self.first(edge_index=graph, x=x).sum(),
    "repr": lambda self, x, graph, y: len(repr(self.first)),
}


@pytest.mark.covering("question", "training", one_in=2)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("question", ASKED)
def test_questions_have_the_answers_of_the_plain_model(question, training):
    planned, plain, graph = pair(ASKED[question])
    x = features()
    planned.x = plain.x = x
    found = optimize(planned, graph, x=x, training=training, mode="model")
    assert set(found.layers) == {"first", "last"}
    planned_away(planned.first)
    for model in (planned, plain):
        model.train(training)
    for _ in range(2):
        same(planned, plain, x, graph)
    assert (planned.calls, planned.seen) == (plain.calls, plain.seen)
    assert torch.equal(planned.total, plain.total)
    for model in (planned, plain):
        torch.manual_seed(6)
        model(features(1).requires_grad_(), graph).sum().backward()
    for one, other in zip(planned.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-9)


def test_prints_and_logs_are_those_of_the_plain_model(caplog):
    for body in (ASKED["print"], logs):
        texts = []
        planned, plain, graph = pair(body)
        optimize(planned, graph, x=features())
        for model in (planned, plain):
            caplog.clear()
            with redirect_stdout(io.StringIO()) as out:
                model(features(), graph)
                model(features(), graph)
            texts.append((out.getvalue(), caplog.messages[:]))
        assert texts[0] == texts[1]


# What is done to a model once it is planned


class Wrapped(nn.Module):
    """A map that wraps another, and shows its weight and bias."""

    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, nn.Parameter(torch.ones_like(base.weight))

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x):
        return self.base(x) + x @ self.more.t()


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Scaled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


class Mine(GCNConv):
    """A layer that does more than its class."""

    def forward(self, x, edge_index, edge_weight=None):
        return 2 * super().forward(x, edge_index, edge_weight)


def biased(model):
    new = nn.Linear(F_IN, HIDDEN).double()
    new.load_state_dict({"weight": model.first.lin.weight.data, "bias": torch.ones(HIDDEN)})
    model.first.lin = new


def own_forward(model):
    own = model.first.lin.forward
    model.first.lin.forward = lambda x: own(x) + 1


def own_forward_of_layer(model):
    own = type(model.first).forward
    model.first.forward = lambda x, graph: own(model.first, x, graph) + 1


def set_weight(model):
    torch.manual_seed(11)
    model.first.lin.weight = nn.Parameter(torch.randn(HIDDEN, F_IN, dtype=torch.float64))


def in_place(model):
    with torch.no_grad():
        model.first.lin.weight.mul_(2)
        model.first.bias.add_(1)


CHANGED = {
    "wrapped map": lambda m: setattr(m.first, "lin", Wrapped(m.first.lin)),
    "sequence": lambda m: setattr(m.last, "lin_l", nn.Sequential(m.last.lin_l, nn.Tanh())),
    "subclass of a map": lambda m: setattr(m.first.lin, "__class__", Scaled),
    "biased map": biased,
    "forward of a map": own_forward,
    "forward of a layer": own_forward_of_layer,
    "hook on a map": lambda m: m.first.lin.register_forward_hook(lambda *a: 2 * a[-1]),
    "hook before a map": lambda m: m.last.lin_r.register_forward_pre_hook(lambda m, a: 2 * a[0]),
    "hook on a layer": lambda m: m.first.register_forward_hook(lambda *a: a[-1] + 1),
    "hook before a layer": lambda m: m.first.register_forward_pre_hook(
        lambda m, a: (2 * a[0], a[1])
    ),
    "parametrisation": lambda m: parametrize.register_parametrization(
        m.first.lin, "weight", Doubled()
    ),
    "pruning": lambda m: prune.l1_unstructured(m.first.lin, "weight", 0.5),
    "weight": set_weight,
    "weight in place": in_place,
    "no bias": lambda m: setattr(m.first, "bias", None),
    "flow": lambda m: setattr(m.first, "flow", "target_to_source"),
    "k": lambda m: setattr(m.first, "k", 2),
    "improved": lambda m: setattr(m.first, "improved", True),
    "normalised rows": lambda m: setattr(m.last, "normalize", True),
    "another layer": lambda m: setattr(m, "first", SAGEConv(F_IN, HIDDEN).double()),
    "class of a layer": lambda m: setattr(m.first, "__class__", Mine),
    "one layer twice": lambda m: setattr(m, "layers", lambda x, g: m.first(x, g) + m.first(x, g)),
    "frozen": lambda m: m.first.requires_grad_(False),
    "half": lambda m: m.first.float() and setattr(m, "layers", lambda x, g: m.first(x.float(), g)),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHANGED)
def test_a_changed_model_computes_what_the_plain_one_does(change, when):
    planned, plain, graph = pair()
    x = features()
    if when == "after":
        optimize(planned, graph, x=x, mode="model")
        planned_away(planned.first)
        planned(x, graph)
    for model in (planned, plain):
        torch.manual_seed(7)
        CHANGED[change](model)
    if when == "before":
        found = optimize(planned, graph, x=x, mode="model")
        left = {"first", "last"} - found.layers.keys()
        assert all(f"{name}: runs as it did, since" in found.explain() for name in left)
        assert change != "class of a layer" or "Mine is a class of your own" in found.explain()
    for training in (False, True):
        planned.train(training)
        plain.train(training)
        same(planned, plain, x, graph)


@pytest.mark.parametrize(
    ("layer", "change"),
    [
        (lambda: SGConv(F_IN, 4, K=2), lambda m: setattr(m, "K", 3)),
        (lambda: SGConv(F_IN, 4, K=2), lambda m: setattr(m, "add_self_loops", False)),
        (lambda: TAGConv(F_IN, 4, K=2), lambda m: setattr(m, "normalize", False)),
        (lambda: GINConv(nn.Linear(F_IN, 4)), lambda m: m.eps.fill_(0.5)),
        (lambda: GINConv(nn.Linear(F_IN, 4)), lambda m: setattr(m.eps, "data", HALF)),
        (lambda: GINConv(nn.Linear(F_IN, 4)), lambda m: m.eps.data.fill_(0.5)),
        (lambda: GINConv(nn.Linear(F_IN, 4)), lambda m: setattr(m, "nn", nn.Tanh())),
        (
            lambda: GINConv(nn.Sequential(nn.Linear(F_IN, 4), nn.ReLU())),
            lambda m: m.nn.append(nn.Tanh()),
        ),
        (lambda: GATConv(F_IN, 4), lambda m: setattr(m, "negative_slope", 0.7)),
        (lambda: GATConv(F_IN, 4), lambda m: m.lin.register_forward_hook(lambda *a: 2 * a[-1])),
        (lambda: GATConv(F_IN, 4), lambda m: setattr(m, "res", nn.Linear(F_IN, 4).double())),
    ],
)
def test_options_of_layers_may_change(layer, change):
    graph, x = square(), features()
    torch.manual_seed(2)
    planned = layer().double()
    plain = copy.deepcopy(planned)
    optimize(planned, graph, mode="model")
    planned_away(planned)
    same(planned, plain, x, graph)
    for one in (planned, plain):
        torch.manual_seed(7)
        change(one)
    same(planned, plain, x, graph)


def test_a_longer_list_of_maps_is_refused_as_the_layer_refuses_it():
    graph, layer = square(), TAGConv(F_IN, 4, K=2).double()
    optimize(layer, graph)
    layer.lins.append(nn.Linear(F_IN, 4, bias=False).double())
    with pytest.raises(ValueError, match="zip"):
        layer(features(), graph)


def by_hand(layer):
    twin = object.__new__(type(layer))
    twin.__dict__ = {**vars(layer), "_modules": dict(layer._modules)}
    return twin


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "replica": lambda layer: layer._replicate_for_data_parallel(),
    "dict": by_hand,
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_computes_with_its_own_parameters(name):
    graph, x = square(), features()
    layer = GCNConv(F_IN, HIDDEN).double()
    optimize(layer, graph, x=x)
    planned_away(layer)
    expected = layer(x, graph)
    twin = COPIES[name](layer)
    twin._modules = dict(layer._modules)
    twin.lin, twin.bias = nn.Linear(F_IN, HIDDEN, bias=False).double(), layer.bias
    plain = GCNConv(F_IN, HIDDEN).double()
    plain.lin, plain.bias = twin.lin, layer.bias
    same(twin, plain, x, graph)
    torch.testing.assert_close(layer(x, graph), expected)


def test_parameters_of_a_functional_call_are_those_that_are_given():
    graph, x, layer = square(), features(), GCNConv(F_IN, HIDDEN).double()
    plain = copy.deepcopy(layer)
    optimize(layer, graph, x=x)
    planned_away(layer)
    others = {name: 2 * value.detach() for name, value in layer.named_parameters()}
    found, expected = (
        torch.func.functional_call(one, others, (x, graph)) for one in (layer, plain)
    )
    torch.testing.assert_close(found, expected)


def test_layers_that_models_share_are_planned_for_the_last():
    shared, graph, x = GCNConv(F_IN, F_IN).double(), square(), features()
    plain = copy.deepcopy(shared)
    plans = [optimize(nn.ModuleList([shared]), graph) for _ in range(2)]
    same(shared, plain, x, graph)
    plans[0].restore()
    assert "_plan" in vars(shared)
    plans[1].restore()
    assert "_plan" not in vars(shared)
    same(shared, plain, x, graph)


def test_hooks_hear_what_they_hear_of_the_plain_model():
    """Those for all modules, and those of backward."""
    planned, plain, graph = pair()
    optimize(planned, graph, x=features(), training=True)
    planned_away(planned.first)
    calls = []
    for model in (planned, plain):
        seen = []
        model.first.register_full_backward_hook(lambda *a, seen=seen: seen.append(a[2][0].shape))
        hook = every.register_module_forward_hook(
            lambda module, _, y, seen=seen: seen.append((type(module).__name__, tuple(y.shape)))
        )
        y = model(features().requires_grad_(), graph)
        hook.remove()
        y.sum().backward()
        calls.append(seen)
    assert calls[0] == calls[1]
    assert ("Linear", (N, HIDDEN)) in calls[0]


def test_autocast_and_inference_are_those_of_the_plain_model():
    planned, plain, graph = pair()
    planned, plain, x = planned.float(), plain.float(), features().float()
    optimize(planned, graph, x=x)
    for mode in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.no_grad()):
        with mode:
            torch.testing.assert_close(planned(x, graph), plain(x, graph))


def draws(self, x, graph, y):
    return random.random() + np.random.random() + torch.rand(1)  # noqa: NPY002


def test_planning_draws_from_no_generator_and_leaves_no_trace():
    def states():
        numbers = np.random.get_state()[1]  # noqa: NPY002
        return random.getstate(), numbers.tolist(), torch.get_rng_state().tolist()

    for body in (remembers, draws):
        planned, _, graph = pair(body)
        before = states()
        optimize(planned, graph, x=features(), steps=3, mode="measure").explain()
        assert states() == before
        assert (planned.calls, planned.seen) == (0, [])
        assert all(p.grad is None for p in planned.parameters())


WRITES = {
    "buffer": lambda m: m.total.mul_(2).add_(1),
    "weight": lambda m: m.first.lin.weight.data.mul_(2.0),
    "sparse buffer": lambda m: m.mask.mul_(2),
    "array": lambda m: m.numbers.__iadd__(1),
    "bytes": lambda m: m.log.append(1),
    "list": lambda m: m.seen.append(1),
    "nested": lambda m: m.graphs[0:1] and m.options.setdefault("more", []).append(1),
    "attribute": lambda m: setattr(m, "calls", m.calls + 1),
    "new attribute": lambda m: setattr(m, "new", 1),
    "tensor": lambda m: setattr(m, "left_out", torch.ones(1)),
    "gradient": lambda m: setattr(m.first.bias, "grad", torch.ones(HIDDEN).double()),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_a_forward_writes_while_it_is_planned_is_put_back(name):
    def body(self, x, graph, y):
        WRITES[name](self)
        return 0

    def state(model):
        left_out = ("body", "graph", "graphs")
        plain = {k: repr(v) for k, v in vars(model).items() if k[0] != "_" and k not in left_out}
        tensors = {k: v.to_dense().tolist() for k, v in model.state_dict().items()}
        return plain, tensors, [p.grad is None for p in model.parameters()]

    planned, _, graph = pair(body)
    before = state(planned)
    optimize(planned, graph, x=features())
    assert state(planned) == before
