"""What is said of another order of a graph's vertices, and that it is right to follow it."""

import pytest

torch = pytest.importorskip("torch")

from autograd_cases import make_graph  # noqa: E402

from sparsefmt import optimize  # noqa: E402
from sparsefmt.model import decisions  # noqa: E402
from sparsefmt.nn import GCNConv  # noqa: E402

N = 60


def planned(**options):
    graph, x = make_graph(N, N, 300, seed=0), torch.randn(N, 8)
    torch.manual_seed(0)
    model = GCNConv(8, 8)
    return model, graph, x, optimize(model, graph, x=x, steps=100, mode="model", **options)


def test_a_graph_that_caches_hold_stays():
    *_, found = planned()
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
    model, graph, x, found = planned()
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
