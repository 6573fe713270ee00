"""Whether a planned step is best captured: told where the device waits for its host."""

import pytest

torch = pytest.importorskip("torch")

from contextlib import nullcontext  # noqa: E402

from sparsefmt import Graph, optimize, power_law  # noqa: E402
from sparsefmt.model import decisions  # noqa: E402
from sparsefmt.nn import GCNConv, capture  # noqa: E402


def planned(device, n, edges, feat=16):
    graph = Graph(power_law(n, edges, seed=0).to(device))
    torch.manual_seed(0)
    model = GCNConv(feat, feat).to(device)
    x = torch.randn(n, feat, device=device)
    return model, graph, x, optimize(model, graph, x=x, steps=1000)


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
    *_, found = planned("cpu", 100, 1000)
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
    model, graph, x, found = planned("cuda", 1_000, 5_000)
    host, whole = found.launching.measured  # who else is on the GPU decides which is longer
    assert 0 < host <= whole
    with torch.no_grad():
        expected = model(x, graph)
        captured = capture(lambda x: model(x, graph), x)
        torch.testing.assert_close(captured(x), expected)


@pytest.mark.gpu
def test_a_large_graph_keeps_the_device_busy():
    *_, found = planned("cuda", 100_000, 5_000_000, feat=512)
    assert not found.launching.chosen
    host, whole = found.launching.measured
    assert 0 < host < whole
