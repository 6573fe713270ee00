"""What a plan says of captures, orders of vertices and tiles, and that it is right to follow it."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import make_graph  # noqa: E402
from torch import nn  # noqa: E402

from sparsefmt import COO, Graph, optimize, power_law  # noqa: E402
from sparsefmt.autograd import prepare  # noqa: E402
from sparsefmt.autograd.tensors.prepare import has_tiles  # noqa: E402
from sparsefmt.model import decisions, optimizing  # noqa: E402
from sparsefmt.nn import GCNConv, SAGEConv, capture  # noqa: E402

N = 60


def planned(graph=None, feat=16, device="cpu", **options):
    graph = make_graph(N, N, 300, seed=0) if graph is None else Graph(graph.to(device))
    torch.manual_seed(0)
    model = GCNConv(feat, feat).to(device)
    x = torch.randn(graph.n_cols, feat, device=device)
    return model, graph, x, optimize(model, graph, x=x, **options)


@pytest.mark.parametrize(("host", "waits"), [(0.95e-3, True), (0.3e-3, False)])
def test_a_step_that_waits_for_its_launches_is_best_captured(monkeypatch, host, waits):
    """And none of a device that is busy; on a GPU that need not be there."""
    monkeypatch.setattr(decisions, "times_of", lambda *_: (host, 1.0e-3))
    like = SimpleNamespace(is_cuda=True)
    found = decisions.decide_capture(decisions.TimedStep(None, like, [], [], nullcontext, 10))
    assert found.chosen == waits
    if waits:
        assert "nn.capture" in found.explain()
        assert "0.950 ms" in found.explain()
    else:
        assert "busy" in found.reason


def test_on_the_cpu_nothing_is_captured_and_there_are_no_tiles():
    found, graph, _ = tiled("cpu")
    for decision, reason in ((found.launching, "CPU"), (found.tiling, "tensor cores")):
        assert not decision.chosen
        assert reason in decision.reason
        assert decision.explain() in found.explain()
    assert not has_tiles(graph)
    assert "capture: none" in str(found)


def test_without_features_nothing_is_decided():
    step = decisions.TimedStep(None, None, [], [], nullcontext, 10)
    for decide in (decisions.decide_capture, decisions.decide_tiles):
        assert "features" in decide(step).reason


@pytest.mark.gpu
def test_a_small_graph_waits_and_a_captured_model_runs_what_was_planned():
    model, graph, x, found = planned(power_law(1_000, 5_000, seed=0), device="cuda", steps=1000)
    host, whole = found.launching.measured  # who else is on the GPU decides which is longer
    assert 0 < host <= whole
    with torch.no_grad():
        expected = model(x, graph)
        captured = capture(lambda x: model(x, graph), x)
        torch.testing.assert_close(captured(x), expected)


@pytest.mark.gpu
def test_a_large_graph_keeps_the_device_busy():
    graph = power_law(100_000, 5_000_000, seed=0)
    *_, found = planned(graph, 512, "cuda", steps=1000)
    assert not found.launching.chosen
    host, whole = found.launching.measured
    assert 0 < host < whole


def test_a_graph_that_caches_hold_stays():
    *_, found = planned(steps=100, mode="model")
    assert not found.ordering.chosen
    assert found.ordering.order is None
    assert "caches answer" in found.ordering.reason
    assert "order of vertices: stays" in found.explain()


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [
        ((2.0, 1.0, 1.0), "by community pays"),
        ((2.0, 1.0, 1.99), "another gains too little"),
        ((1.001, 0.9, 0.95), "by community pays"),
        ((1.001, 1.0, 1.0), "caches answer"),
        ((1e-9, 1e-10, 1e-10), "to find another takes longer"),
    ],
)
def test_an_order_that_is_predicted_to_pay_is_the_users_to_take(monkeypatch, seconds, reason):
    times = iter(seconds)
    monkeypatch.setattr(decisions, "_products", lambda *_: next(times))
    model, graph, x, found = planned(steps=100, mode="model")
    ordering = found.ordering
    assert reason in ordering.reason
    assert ordering.chosen == ("pays" in reason)
    if ordering.chosen:
        assert ordering.predicted == (seconds[0], seconds[2])
        assert "ms a step as it is" in found.explain()
        order, expected = ordering.order, model(x, graph)
        perm, inverse = (torch.as_tensor(one).long() for one in (order.perm, order.inverse))
        y = model(x[perm], graph.reordered(order))
        torch.testing.assert_close(y[inverse], expected, rtol=1e-4, atol=1e-5)


def test_an_edge_index_is_ordered_as_its_graph(monkeypatch):
    times = iter((2.0, 1.0, 1.0))
    monkeypatch.setattr(decisions, "_products", lambda *_: next(times))
    edges = torch.randint(N, (2, 300))
    found = optimize(GCNConv(8, 8), edges, x=torch.randn(N, 8), steps=100, mode="model")
    assert len(found.ordering.order) == N


# Tiles: refused, and on a GPU kept or dropped as timed

FEAT = 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = GCNConv(FEAT, FEAT), SAGEConv(FEAT, FEAT)

    def forward(self, x, graph):
        return self.last(self.first(x, graph).relu(), graph)


def dense_blocks(device, blocks=256, size=64):
    """A graph of communities in which all know one another: tiles are full."""
    n = blocks * size
    row = np.repeat(np.arange(n, dtype=np.int32), size)
    col = row // size * size + np.tile(np.arange(size, dtype=np.int32), n)
    return Graph(COO(row, col, shape=(n, n)).to(device))


def tiled(device, dtype=torch.float32, graph=None, steps=10_000, **options):
    graph = dense_blocks(device, 4) if graph is None else graph
    torch.manual_seed(0)
    model = Net().to(device, dtype)
    x = torch.randn(graph.shape[1], FEAT, device=device, dtype=dtype)
    expected = model(x, graph)
    found = optimize(model, graph, x=x, training=True, steps=steps, **options)
    near = 0.05 if dtype is torch.float16 else 1e-4
    torch.testing.assert_close(model(x, graph), expected, rtol=near, atol=near)
    names = {kernel.chosen.name for kernel in found.kernels()}
    return found, graph, names


def test_without_steps_nothing_is_decided():
    graph = dense_blocks("cpu", 1)
    found = optimize(Net(), graph, x=torch.randn(graph.shape[1], FEAT))
    assert found.tiling is None
    assert "tiles" not in str(found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "steps", "reason"),
    [
        *((torch.float32, 10_000, "high"), (torch.float64, 10_000, "float64")),
        (torch.float16, 1, "longer"),
    ],
    ids=str,
)
def test_what_would_be_rounded_has_none_nor_have_few_steps_that_do_not_pay(dtype, steps, reason):
    found, graph, _ = tiled("cuda", dtype, steps=steps)
    assert reason in found.tiling.reason
    assert not has_tiles(graph)


@pytest.mark.gpu
@pytest.mark.parametrize("pays", [True, False])
def test_tiles_that_pay_are_kept_until_the_plan_is_undone(monkeypatch, pays):
    first, last = (2.0, 1.0) if pays else (1.0, 2.0)
    times = iter([*[first] * 3, 3.0 if pays else last, *[last] * 2])
    monkeypatch.setattr(decisions, "BUILDING", (0.0, 0.0))
    monkeypatch.setattr(decisions, "seconds_of", lambda run, like: run() is None or next(times))
    found, graph, names = tiled("cuda", torch.float16, dense_blocks("cuda"))
    assert found.tiling.chosen == pays
    assert found.tiling.measured == (first, last)
    assert any("sgt" in name for name in names) == has_tiles(graph) == pays
    if pays:
        assert found.tiling.seconds > 2.0  # and what the first step took longer
    found.restore()
    assert not has_tiles(graph)


@pytest.mark.gpu
def test_an_error_while_tiles_are_timed_drops_them(monkeypatch):
    calls = []

    def failing(run, like):
        calls.append(run)
        if len(calls) > 3:
            raise RuntimeError("a kernel failed")
        return 1.0

    graph = dense_blocks("cuda")
    monkeypatch.setattr(decisions, "seconds_of", failing)
    monkeypatch.setattr(decisions, "BUILDING", (0.0, 0.0))
    with pytest.raises(RuntimeError, match="a kernel failed"):
        tiled("cuda", torch.float16, graph)
    assert not has_tiles(graph)


@pytest.mark.gpu
def test_tiles_of_the_users_stay(monkeypatch):
    graph = dense_blocks("cuda")
    prepare(graph, tile=(32, 16))
    found, _, _ = tiled("cuda", torch.float16, graph)
    assert "already" in found.tiling.reason
    assert has_tiles(graph)


def test_explaining_runs_the_model_as_planned_and_leaves_no_trace(device):
    found, _, _ = tiled(device)
    assert found.kernels() == ()  # the features are gone
    graph = dense_blocks(device, 4)
    model, x = Net().to(device), torch.randn(graph.shape[1], FEAT, device=device)
    found = optimize(model, graph, x=x)
    plans = dict(found.layers)
    found.kernels()  # what is computed once of a graph
    names = [kernel.op for kernel in found.kernels()]
    assert "spmm" in names
    assert len(names) == len({str(kernel) for kernel in found.kernels()})
    assert "kernels of a forward:" in found.explain()
    assert str(found.kernels()[0]) in found.explain()
    assert found.layers == plans
    assert all(p.grad is None for p in model.parameters())


def test_the_graphs_that_layers_multiply_with_are_found(monkeypatch):
    seen = []
    monkeypatch.setattr(optimizing, "decide_tiles", lambda step: seen.append(step))
    found, graph, _ = tiled("cpu")
    (step,) = seen
    assert step.plans == list(found.layers.values())
    shapes = {one.nnz for one in step.graphs}
    assert shapes <= {graph.nnz}  # all have loops already
    assert step.graphs
