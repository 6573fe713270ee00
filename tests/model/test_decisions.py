"""What a plan says of captures and of the order of vertices, and that it is right to follow it."""

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from autograd_cases import make_graph  # noqa: E402

from sparsefmt import Graph, optimize, power_law  # noqa: E402
from sparsefmt.model import decisions  # noqa: E402
from sparsefmt.nn import GCNConv, capture  # noqa: E402

N = 60


def planned(graph=None, feat=16, device="cpu", **options):
    graph = make_graph(N, N, 300, seed=0) if graph is None else Graph(graph.to(device))
    torch.manual_seed(0)
    model = GCNConv(feat, feat).to(device)
    x = torch.randn(graph.n_cols, feat, device=device)
    return model, graph, x, optimize(model, graph, x=x, **options)


def decided(monkeypatch, host, whole):
    """What is decided of a step of these times, on a GPU that need not be there."""
    monkeypatch.setattr(decisions, "times_of", lambda *_: (host, whole))
    like = type("Like", (), {"is_cuda": True})()
    return decisions.decide_capture(decisions.TimedStep(None, like, [], [], nullcontext, 10))


def test_a_step_that_waits_for_its_launches_is_best_captured(monkeypatch):
    found = decided(monkeypatch, 0.95e-3, 1.0e-3)
    assert found.chosen
    assert "nn.capture" in found.explain()
    assert "0.950 ms" in found.explain()


def test_a_device_that_is_busy_needs_no_capture(monkeypatch):
    found = decided(monkeypatch, 0.3e-3, 1.0e-3)
    assert not found.chosen
    assert "busy" in found.reason


def test_on_the_cpu_nothing_is_captured():
    *_, found = planned(steps=1000)
    assert not found.launching.chosen
    assert "CPU" in found.launching.reason
    assert found.launching.explain() in found.explain()
    assert "capture: none" in str(found)


def test_without_features_nothing_is_decided():
    step = decisions.TimedStep(None, None, [], [], nullcontext, 10)
    found = decisions.decide_capture(step)
    assert "features" in found.reason


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


# Orders of vertices


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
