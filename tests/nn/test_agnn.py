"""AGNN with any beta against PyG's layer, and where a row has nothing to attend to."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")

from autograd_cases import DTYPES  # noqa: E402
from pyg_cases import numbers, outcome  # noqa: E402

from sparsefmt import Graph  # noqa: E402
from sparsefmt.autograd import prepare  # noqa: E402
from sparsefmt.autograd.tensors.prepare import has_tiles  # noqa: E402
from sparsefmt.nn import AGNNConv, transformer  # noqa: E402

N, FEAT = 10, 5
#: How often the loop of each vertex is stored.
LOOPS = {
    "none": np.zeros(N, int),
    "some": np.arange(N) % 3 == 0,
    "all": np.ones(N, int),
    "repeated": np.arange(N) % 4,
}


@pytest.fixture(autouse=True, params=["fused", "composed"])
def way(request, monkeypatch):
    """In one pass, or of the three products that a graph with tiles takes."""
    composed = request.param == "composed"
    monkeypatch.setattr(transformer, "_composing_pays", lambda ends, x: composed)
    return request.param


def edges(loops):
    """Directed, in no order, an edge stored twice; no edge but loops leads to the vertices 1, 5, 9.

    PyG's order: sources, targets.
    """
    rng = np.random.default_rng(1)
    target, source = np.nonzero(rng.random((N, N)) < 0.4)
    keep = (target % 4 != 1) & (target != source)
    twice, own = keep & (target == 0), np.repeat(np.arange(N), LOOPS[loops])
    source, target = (np.r_[end[keep], end[twice], own] for end in (source, target))
    order = rng.permutation(len(own) + keep.sum() + twice.sum())
    return torch.from_numpy(np.stack([source, target])[:, order])


def graph_of(loops, device="cpu"):
    return Graph.from_edge_index(edges(loops), num_nodes=N).to(device)


def features(device, *, dtype=torch.float32, width=FEAT):
    return numbers(N, width, seed=2).to(device, dtype).requires_grad_()


def with_beta(layer, beta):
    with torch.no_grad():
        layer.beta.fill_(beta)
    return layer


def assert_same(mine, other, *, beta=1):
    """As ``assert_close`` of float32, whose scores are rounded as numbers up to ``beta`` are."""
    wide = max(1, abs(beta))
    torch.testing.assert_close(mine, other, rtol=1.3e-6 * wide, atol=1e-5 * wide)


# 100: exp(100) is infinite in float32; -100: the loop is what weighs least.
@pytest.mark.parametrize("beta", [1, -2, 100, -100])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("loops", LOOPS)
def test_it_computes_what_pygs_does_with_its_state(device, loops, add, beta):
    other = with_beta(pyg.AGNNConv(add_self_loops=add), beta).to(device)
    mine = AGNNConv(add_self_loops=add).to(device)
    mine.load_state_dict(other.state_dict())
    x = [features(device).detach()]
    wanted = outcome(other, x, edges(loops).to(device))
    assert_same(outcome(mine, x, graph_of(loops, device)), wanted, beta=beta)


def test_a_fixed_beta_is_not_reset():
    for conv in (AGNNConv, pyg.AGNNConv):
        layer = with_beta(conv(requires_grad=False), 4)
        layer.reset_parameters()
        assert layer.beta.item() == 4


def test_a_vertex_alone_keeps_its_features_or_gives_nothing(device):
    alone = [1, 5, 9]
    x, graph = features(device), graph_of("none", device)
    y = AGNNConv().to(device)(x, graph)
    assert torch.equal(y[alone], x[alone])
    (dx,) = torch.autograd.grad(y[alone].sum(), x)
    torch.testing.assert_close(dx[alone], torch.ones_like(dx[alone]))
    y = AGNNConv(add_self_loops=False).to(device)(x, graph)
    assert not y[alone].any()
    (dx,) = torch.autograd.grad(y[alone].sum(), x)
    assert not dx.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loops", LOOPS)
def test_a_row_of_zeros_is_at_right_angles_to_all(device, loops, dtype, way):
    x = features(device, dtype=dtype).detach()
    x[::2], x[1] = 0, torch.finfo(dtype).tiny  # shorter than what lengths are divided by
    graph, layer = graph_of(loops, device), AGNNConv().to(device, dtype)
    for one in outcome(layer, [x], graph):
        assert one.isfinite().all()
    if dtype.itemsize > 2:  # in float16 PyG divides by 0
        other = pyg.AGNNConv().to(device, dtype)
        assert_same([layer(x, graph)], [other(x, edges(loops).to(device))])
    if dtype is torch.float64 and way == "composed":
        x.requires_grad_()
        (dx,) = torch.autograd.grad(layer(x, graph).square().sum(), x, create_graph=True)
        assert torch.autograd.grad(dx.square().sum(), x)[0].isfinite().all()


def test_thousands_of_stored_loops_count_once(device):
    """The loop has the score 1, the only neighbour 0: within the rounding of a long sum."""
    count = 5000
    stored = torch.zeros(2, count, dtype=torch.long)
    graph = Graph.from_edge_index(torch.cat([stored, torch.tensor([[1], [0]])], 1), num_nodes=2)
    x = torch.eye(2, device=device)
    y = AGNNConv().to(device)(x, graph.to(device))
    expected = torch.stack([torch.softmax(x[0], 0), x[1]])
    bound = count * torch.finfo(x.dtype).eps
    torch.testing.assert_close(y, expected, rtol=bound, atol=0)


def test_the_loops_are_counted_once_for_each_graph(way):
    graph, x, layer = graph_of("some"), features("cpu"), AGNNConv()
    with torch.inference_mode():
        layer(x, graph)
    layer(x, graph).sum().backward()  # tensors born in inference mode could not take part
    parts = graph._slots.torch[0]._cache.parts
    kept = ["('loop scores', torch.float32)", "inverse"]  # edges in disorder
    kept += ["loops missing", "loops of rows"]
    assert sorted(map(str, parts)) == (kept if way == "composed" else [])
    before = dict(parts)
    layer(x, graph)
    assert all(parts[key] is value for key, value in before.items())
    plain = graph_of("some")
    AGNNConv(add_self_loops=False)(x, plain)
    assert set(plain._slots.torch[0]._cache.parts) <= {"inverse"}


@pytest.mark.gpu
def test_a_graph_with_tiles_goes_by_products(way, monkeypatch):
    monkeypatch.setattr(transformer, "_composing_pays", lambda ends, x: has_tiles(ends.graph))
    graph, x = graph_of("some", "cuda"), features("cuda", dtype=torch.float64)
    layer = AGNNConv().to("cuda", torch.float64)
    plain = layer(x, graph)
    prepare(graph, tile=(16, 16))
    y = layer(x, graph)
    torch.testing.assert_close(y, plain)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    dx.sum().backward()
