"""Tiles of a planned model: where they are refused, and on a GPU kept or dropped as timed."""

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402

from sparsefmt import COO, Graph, optimize  # noqa: E402
from sparsefmt.autograd import prepare  # noqa: E402
from sparsefmt.autograd.tensors.prepare import has_tiles  # noqa: E402
from sparsefmt.model import decisions, optimizing  # noqa: E402
from sparsefmt.nn import GCNConv, SAGEConv  # noqa: E402

FEAT = 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = GCNConv(FEAT, FEAT), SAGEConv(FEAT, FEAT)

    def forward(self, x, graph):
        return self.last(self.first(x, graph).relu(), graph)


def dense_blocks(device, blocks=256, size=64):
    """A graph of communities in which all know one another: tiles are full."""
    at = np.arange(size)
    row, col = np.repeat(at, size), np.tile(at, size)
    shift = np.repeat(np.arange(blocks) * size, size * size)
    row, col = np.tile(row, blocks) + shift, np.tile(col, blocks) + shift
    n = blocks * size
    return Graph(COO(row.astype(np.int32), col.astype(np.int32), shape=(n, n)).to(device))


def decided(device, dtype=torch.float32, graph=None, steps=10_000, **options):
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


def test_on_the_cpu_there_are_none():
    found, graph, _ = decided("cpu")
    assert not found.tiling.chosen
    assert "tensor cores" in found.tiling.reason
    assert found.tiling.explain() in found.explain()
    assert not has_tiles(graph)


def test_without_steps_nothing_is_decided():
    graph = dense_blocks("cpu", 1)
    found = optimize(Net(), graph, x=torch.randn(graph.shape[1], FEAT))
    assert found.tiling is None
    assert "tiles" not in str(found)


def test_a_model_without_features_is_told_so():
    step = decisions.TimedStep(None, None, [], [], None, 10)
    assert "features" in decisions.decide_tiles(step).reason


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "reason"), [(torch.float32, "high"), (torch.float64, "float64")], ids=str
)
def test_what_would_be_rounded_has_none(dtype, reason):
    found, graph, _ = decided("cuda", dtype)
    assert reason in found.tiling.reason
    assert not has_tiles(graph)


@pytest.mark.gpu
def test_few_steps_do_not_pay_for_them():
    found, graph, _ = decided("cuda", torch.float16, steps=1)
    assert "longer" in found.tiling.reason
    assert not has_tiles(graph)


def clock(monkeypatch, *seconds):
    """Run what is timed, and say that it took so long."""
    times = iter(seconds)
    monkeypatch.setattr(decisions, "BUILDING", (0.0, 0.0))
    monkeypatch.setattr(decisions, "seconds_of", lambda run, like: run() is None or next(times))


@pytest.mark.gpu
def test_tiles_that_pay_are_kept_until_the_plan_is_undone(monkeypatch):
    clock(monkeypatch, 2.0, 2.0, 2.0, 3.0, 1.0, 1.0)
    found, graph, names = decided("cuda", torch.float16, dense_blocks("cuda"))
    assert found.tiling.chosen
    assert found.tiling.seconds > 2.0  # and what the first step took longer
    assert found.tiling.measured == (2.0, 1.0)
    assert any("sgt" in name for name in names)
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
        decided("cuda", torch.float16, graph)
    assert not has_tiles(graph)


@pytest.mark.gpu
def test_tiles_that_do_not_pay_are_dropped(monkeypatch):
    clock(monkeypatch, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0)
    graph = dense_blocks("cuda")
    found, _, names = decided("cuda", torch.float16, graph)
    assert not found.tiling.chosen
    assert found.tiling.measured == (1.0, 2.0)
    assert not has_tiles(graph)
    assert not any("sgt" in name for name in names)


@pytest.mark.gpu
def test_tiles_of_the_users_stay(monkeypatch):
    graph = dense_blocks("cuda")
    prepare(graph, tile=(32, 16))
    found, _, _ = decided("cuda", torch.float16, graph)
    assert "already" in found.tiling.reason
    assert has_tiles(graph)


# Kernels


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_explaining_runs_the_model_as_planned_and_leaves_no_trace(device):
    found, _, _ = decided(device)
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
    found, graph, _ = decided("cpu")
    (step,) = seen
    assert step.plans == list(found.layers.values())
    shapes = {one.nnz for one in step.graphs}
    assert shapes <= {graph.nnz}  # all have loops already
    assert step.graphs
