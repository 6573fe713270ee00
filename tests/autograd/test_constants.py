"""What a trace takes for constant: nothing is frozen that the forward reads, or kept of it."""

import copy
import datetime
import gc
import time
import warnings
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import make_graph  # noqa: E402
from torch import nn  # noqa: E402

from sparsefmt import Graph, optimize  # noqa: E402
from sparsefmt.autograd import spmm  # noqa: E402
from sparsefmt.model.trace import MAX_STOPS, TracedForward  # noqa: E402

N, F_IN = 30, 6
FACTOR = 2.0
FACTORS, SETTINGS = [2.0], SimpleNamespace(factor=2.0)


@dataclass
class Options:
    factor: float = 2.0


class Slotted:
    __slots__ = ("factor",)
    share = 2.0

    def __init__(self):
        self.factor = 2.0

    def half(self):
        return self.share * FACTOR


def indirect():
    return (lambda: FACTOR)()


class Scaled(nn.Module):
    """A product that is planned, times what ``body`` reads."""

    share = 2.0

    def __init__(self, body):
        super().__init__()
        self.lin, self.drop = nn.Linear(F_IN, 4, bias=False), nn.Dropout(0.25)
        self.graph, self.body = make_graph(N, N, 120, seed=0), body
        self.namespace = SimpleNamespace(factor=2.0, inner=SimpleNamespace(factors=[2.0]))
        self.held, self.named, self.chosen = [2.0], {"k": 2.0}, {2.0}
        self.ordered, self.queue, self.nested = OrderedDict(k=2.0), deque([2.0]), ([2.0],)
        self.options, self.slotted, self.array = Options(), Slotted(), np.array([2.0])
        self.scalar, self.around, self.count = torch.tensor(2.0), [self], 0
        self.register_buffer("b", torch.ones(N, 1, dtype=torch.float64))

    def forward(self, x):
        return spmm(self.graph, self.lin(x)) * self.body(self)


def features():
    return torch.randn(N, F_IN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def closure():
    number, held = 2.0, [2.0]

    def write():
        nonlocal number
        number, held[0] = 5.0, 7.0

    return lambda m: number * held[0], lambda m: write()


def glob(name, value):
    return lambda m: globals().update({name: value})


READS = {
    "namespace": (lambda m: m.namespace.factor, lambda m: setattr(m.namespace, "factor", 3.0)),
    "nested": (lambda m: m.namespace.inner.factors[0], lambda m: m.namespace.inner.factors.sort()),
    "list": (lambda m: m.held[0], lambda m: m.held.insert(0, 3.0)),
    "dict": (lambda m: m.named["k"], lambda m: m.named.update(k=3.0)),
    "ordered": (lambda m: m.ordered["k"], lambda m: m.ordered.update(k=3.0)),
    "deque": (lambda m: m.queue[0], lambda m: m.queue.appendleft(3.0)),
    "set": (lambda m: max(m.chosen), lambda m: m.chosen.add(3.0)),
    "list in a tuple": (lambda m: m.nested[0][0], lambda m: m.nested[0].insert(0, 3.0)),
    "dataclass": (lambda m: m.options.factor, lambda m: setattr(m.options, "factor", 3.0)),
    "slots": (lambda m: m.slotted.factor, lambda m: setattr(m.slotted, "factor", 3.0)),
    "array": (lambda m: float(m.array[0]), lambda m: m.array.fill(3.0)),
    "tensor": (lambda m: m.scalar.item(), lambda m: m.scalar.add_(1)),
    "layer": (lambda m: m.drop.p, lambda m: setattr(m.drop, "p", 0.5)),
    "graph": (
        lambda m: m.graph.nnz,
        lambda m: setattr(m, "graph", make_graph(N, N, 90, seed=1)),
    ),
    "integer to float": (lambda m: isinstance(m.count, float), lambda m: setattr(m, "count", 0.0)),
    "global": (lambda m: FACTOR, glob("FACTOR", 3.0)),
    "global behind calls": (lambda m: indirect(), glob("FACTOR", 4.0)),
    "global in a method": (lambda m: m.slotted.half(), glob("FACTOR", 5.0)),
    "function": (lambda m: indirect(), glob("indirect", lambda: 6.0)),
    "global list": (lambda m: FACTORS[0], lambda m: FACTORS.insert(0, 3.0)),
    "global object": (lambda m: SETTINGS.factor, lambda m: setattr(SETTINGS, "factor", 3.0)),
    "class": (lambda m: Slotted.share, lambda m: setattr(Slotted, "share", 3.0)),
    "own class": (lambda m: m.share, lambda m: setattr(Scaled, "share", 3.0)),
    "closure": closure(),
}


@pytest.fixture
def restored():
    before = {name: copy.copy(globals()[name]) for name in ("FACTOR", "FACTORS", "SETTINGS")}
    function = indirect
    yield
    globals().update(before, indirect=function)
    Slotted.share = Scaled.share = 2.0


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("name", READS)
def test_what_the_forward_reads_is_traced_anew_when_it_changes(name):
    read, change = READS[name]
    x = features()
    model = Scaled(read).double()
    if name == "nested":
        model.namespace.inner.factors = [4.0, 3.0]
    assert len(optimize(model, model.graph, x=(x,), mode="model").layers) == 1
    for _ in range(2):
        torch.testing.assert_close(model(x), Scaled.forward(model, x))
        traces = len(model.forward.made)
        model(x)
        assert len(model.forward.made) == traces  # and not at each call
        change(model)


CHANGING = {
    "time.time": lambda m: time.time(),
    "perf_counter": lambda m: perf_counter(),
    "datetime": lambda m: datetime.datetime.now().microsecond,
    "numpy.random": lambda m: np.random.rand(),  # noqa: NPY002 - what users write
    "torch": lambda m: torch.rand(1).item(),
}


@pytest.mark.parametrize("name", CHANGING)
def test_numbers_of_a_clock_or_a_generator_are_refused(name):
    model = Scaled(CHANGING[name]).double()
    with pytest.warns(UserWarning, match=r"test_constants.py:\d+, in"):
        assert not optimize(model, model.graph, x=(features(),)).layers
    assert "forward" not in vars(model)


def view(m):
    return m.b[:2].mul_(2.0).sum()


WRITES = {
    "b": lambda m: m.b.mul_(2.0),
    "b ": view,
    "lin.weight": lambda m: m.lin.weight.data.mul_(2.0).sum(),
    "scalar": lambda m: m.scalar.mul_(1.0).item(),
    "held": lambda m: m.held.append(1.0) or 1.0,
    "named": lambda m: m.named.update(k=5.0) or 1.0,
    "queue": lambda m: m.queue.append(1.0) or 1.0,
    "chosen": lambda m: m.chosen.add(1.0) or 1.0,
    "namespace": lambda m: setattr(m.namespace, "factor", 5.0) or 1.0,
    "count": lambda m: setattr(m, "count", m.count + 1) or 1.0,
}


def state(model):
    plain = {k: v for k, v in vars(model).items() if k[0] != "_"}
    plain = {k: v for k, v in plain.items() if k not in ("graph", "around", "forward")}
    tensors = {k: v.tolist() for k, v in model.state_dict().items()}
    return {k: repr(v) for k, v in plain.items()}, tensors


@pytest.mark.parametrize("name", WRITES)
def test_a_forward_that_writes_to_the_model_is_refused_and_undone(name):
    model = Scaled(WRITES[name]).double()
    before = state(model)
    with pytest.warns(UserWarning, match=f"writes to the model: to {name.strip()}"):
        assert not optimize(model, model.graph, x=(features(),)).layers
    assert state(model) == before


def test_what_only_evaluation_writes_is_undone_too():
    model = Scaled(lambda m: 1.0 if m.training else m.b.mul_(2.0)).double()
    before = state(model)
    with pytest.warns(UserWarning, match="writes to the model: to b"):
        optimize(model, model.graph, x=(features(),))
    assert state(model) == before


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (iter([2.0]), "changes of a list_iterator cannot be seen"),
        ([*range(5_000)], "too much to be compared"),
        (np.zeros(5_000), "make it a buffer"),
        (np.random.default_rng(0), "would be drawn once"),
    ],
)
def test_an_attribute_that_cannot_be_compared_is_refused_by_name(value, text):
    model = Scaled(lambda m: 2.0).double()
    model.held = value
    with pytest.warns(UserWarning, match=rf"Scaled\.held, and .*{text}"):
        assert not optimize(model, model.graph, x=(features(),)).layers


def test_a_model_that_stops_again_and_again_is_left_alone():
    model, x = Scaled(lambda m: m.held[0]).double(), features()
    optimize(model, model.graph, x=(x,), mode="model")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(2 * MAX_STOPS):
            model.held = [float(number), iter([])]
            torch.testing.assert_close(model(x), Scaled.forward(model, x))
    assert len(seen) == MAX_STOPS


def test_a_trace_holds_no_graph_and_goes_with_it():
    model, x = Scaled(lambda m: m.graph.nnz).double(), features()
    optimize(model, model.graph, x=(x,), mode="model")
    traced = model.forward
    assert isinstance(traced, TracedForward)
    gone, before = weakref.ref(model.graph), len(traced.made)
    model.graph = Graph(make_graph(N, N, 90, seed=1).csr)
    gc.collect()
    assert gone() is None
    assert len(traced.made) < before
    torch.testing.assert_close(model(x), Scaled.forward(model, x))
