"""What GAT and GATv2 drop, keep and refuse; their results are in ``test_pyg_arguments``."""

import pytest

torch = pytest.importorskip("torch")

from autograd_cases import empty_graph  # noqa: E402
from test_agnn import N, graph_of  # noqa: E402

from sparsefmt import DeviceError, DtypeError, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt.nn import GATConv, GATv2Conv  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

F_IN, F_OUT, EDGE_DIM = 6, 5, 3
LAYERS = {"gat": GATConv, "gatv2": GATv2Conv}
BOTH = pytest.mark.parametrize("name", LAYERS)


def features(device="cpu", *, dtype=torch.float32, n=N, width=F_IN, seed=2):
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=made, dtype=torch.float64)
    return x.to(device, dtype).requires_grad_()


def test_one_edge_feature_may_come_without_an_axis(device):
    graph, x = graph_of("some", device), features(device)
    attr = features(device, n=graph.nnz, width=1)
    layer = GATConv(F_IN, F_OUT, edge_dim=1).to(device)
    assert torch.equal(layer(x, graph, attr[:, 0]), layer(x, graph, attr))


@BOTH
def test_dropout_is_for_training_only(device, name):
    graph, x = graph_of("some", device), features(device).detach()
    layer = LAYERS[name](F_IN, 8, heads=2, dropout=0.5).to(device)
    plain = LAYERS[name](F_IN, 8, heads=2).to(device)
    plain.load_state_dict(layer.state_dict())
    torch.manual_seed(7)
    first, second = layer(x, graph), layer(x, graph)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(layer(x, graph), first)
    layer.eval()
    assert torch.equal(layer(x, graph), plain(x, graph))
    layer.train()
    with torch.no_grad():
        mean = sum(layer(x, graph) for _ in range(100)) / 100
    spread = 5 * x.abs().max() * F_IN**0.5 / 100**0.5  # 5 deviations of a mean
    assert (mean - plain(x, graph)).abs().max() < spread


@pytest.mark.parametrize("options", [{}, {"add_self_loops": False}, {"edge_dim": 2}], ids=str)
@BOTH
def test_second_gradients_are_refused_but_those_of_products(device, name, options):
    graph, x = graph_of("repeated", device), features(device)
    layer = LAYERS[name](F_IN, 2, heads=2, **options).to(device)
    attr = [features(device, n=graph.nnz, width=2)] if "edge_dim" in options else []
    (dx,) = torch.autograd.grad(layer(x, graph, *attr).square().sum(), x, create_graph=True)
    if attr and name == "gatv2":  # of products, which ``test_pyg_attention`` checks
        dx.sum().backward()
        return
    with pytest.raises(UnsupportedError, match="cannot be differentiated again"):
        dx.sum().backward()


def test_edge_features_of_a_graph_without_edges(device):
    layer = GATConv(F_IN, F_OUT, heads=2, edge_dim=2).to(device)
    graph, x = empty_graph(N, N, device=device), features(device)
    attr = torch.zeros(0, 2, device=device)
    y, (_, weights) = layer(x, graph, attr, return_attention_weights=True)
    torch.testing.assert_close(y, layer(x, graph))
    assert torch.equal(weights, weights.new_ones(N, 2))  # each vertex has its loop alone


@BOTH
def test_nothing_is_kept_with_the_graph_but_of_edge_features(name):
    graph, x = graph_of("some"), features()
    LAYERS[name](F_IN, F_OUT, heads=2)(x, graph).sum().backward()
    parts = graph._slots.torch[0]._cache.parts
    assert not parts
    if name == "gat":
        layer = GATConv(F_IN, F_OUT, edge_dim=2)
        layer(x, graph, torch.rand(graph.nnz, 2))
        before = dict(parts)
        layer(x, graph, torch.rand(graph.nnz, 2))
        assert before
        assert all(parts[key] is value for key, value in before.items())


def test_bad_edge_features_are_refused():
    graph, x = graph_of("some"), features().detach()
    plain, layer = GATConv(F_IN, F_OUT), GATConv(F_IN, F_OUT, edge_dim=3)
    one = GATConv(F_IN, F_OUT, edge_dim=1)
    attr = torch.rand(graph.nnz, 3)
    for call, text in (
        (lambda: plain(x, graph, attr), "has no edge_dim"),
        (lambda: layer(x, graph, attr[1:]), "edge_attr has shape"),
        (lambda: layer(x, graph, attr[:, 0]), rf"edge_attr has shape \({graph.nnz},\): give"),
        (lambda: one(x, graph, attr[1:, 0]), rf"has shape \({graph.nnz - 1},\): give"),
        (lambda: layer(x, graph, attr[None]), rf"edge_attr has shape \(1, {graph.nnz}, 3\): give"),
        (lambda: layer(x, graph, attr[:, :2]), rf"give \({graph.nnz}, 3\)"),
    ):
        with pytest.raises(ShapeError, match=text):
            call()
    with pytest.raises(DtypeError, match="edge_attr is a ndarray"):
        layer(x, graph, attr.numpy())
    with pytest.raises(
        DtypeError, match=r"is torch\.int64: give floating.*edge_attr.to\(torch.float32"
    ):
        layer(x, graph, attr.long())
    with pytest.raises(
        DeviceError, match="edge_attr is on meta but the layer's weights are on cpu"
    ):
        layer(x, graph, attr.to("meta"))
