"""AGNN against PyG's layer, against a dense softmax, and where a row has nothing to attend to."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import DTYPES, empty_graph, make_graph  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

from sparsefmt import CSR, DeviceError, DtypeError, Graph, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt.autograd import prepare  # noqa: E402
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
    monkeypatch.setattr(transformer, "has_tiles", lambda graph: composed)
    return request.param


def theirs(**options):
    conv = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")
    return conv.AGNNConv(**options)


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


def features(device, *, dtype=torch.float32, n=N):
    x = torch.randn(n, FEAT, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x.to(device, dtype).requires_grad_()


def with_beta(layer, beta):
    with torch.no_grad():
        layer.beta.fill_(beta)
    return layer


def gradients(layer, x, *args):
    """The result, and the gradients of the features and of all parameters."""
    y = layer(x, *args)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])]


def assert_same(mine, other, *, beta=1):
    """As ``assert_close`` of float32, whose scores are rounded as numbers up to ``beta`` are."""
    wide = max(1, abs(beta))
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1.3e-6 * wide, atol=1e-5 * wide)


def dense_result(x, loops, beta, *, own):
    """Of each vertex by itself, in float64 on the CPU."""
    x, out = x.detach().double().cpu(), []
    source, target = edges(loops)
    if own:
        source, target = source[source != target], target[source != target]
    for i in range(N):
        js = torch.cat([source[target == i], torch.tensor([i] * own, dtype=torch.long)])
        scores = beta * torch.cosine_similarity(x[i][None], x[js], dim=1)
        out.append(torch.softmax(scores, 0) @ x[js])
    return torch.stack(out)


# 100: exp(100) is infinite in float32; -100: the loop is what weighs least.
@pytest.mark.parametrize("beta", [1, -2, 100, -100])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("loops", LOOPS)
def test_it_computes_what_pygs_does_with_its_state(device, loops, add, beta):
    other = with_beta(theirs(add_self_loops=add), beta).to(device)
    mine = AGNNConv(add_self_loops=add).to(device)
    mine.load_state_dict(other.state_dict())
    x = features(device)
    wanted = gradients(other, x, edges(loops).to(device))
    assert_same(gradients(mine, x, graph_of(loops, device)), wanted, beta=beta)


def test_a_state_loads_across():
    for requires_grad in (True, False):
        mine, other = AGNNConv(requires_grad), theirs(requires_grad=requires_grad)
        other.load_state_dict(with_beta(mine, 3).state_dict())
        assert other.beta.item() == 3
        mine.load_state_dict(with_beta(other, 4).state_dict())
        assert mine.beta.item() == 4
        for kind in ("named_parameters", "named_buffers"):
            assert dict(getattr(mine, kind)()) == dict(getattr(other, kind)())
        for layer in (mine, other):
            layer.reset_parameters()
        assert mine.beta.item() == other.beta.item() == (1 if requires_grad else 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("loops", LOOPS)
def test_every_dtype_gives_the_softmax_of_each_row(device, loops, add, dtype):
    beta, x = 1.5, features(device, dtype=dtype)
    layer = with_beta(AGNNConv(add_self_loops=add), beta).to(device)
    y = layer(x, graph_of(loops, device))
    assert y.dtype is dtype
    # A score is off by at most 4 eps beta, so is the sum of its row; 2 eps for P and the result.
    bound = (8 * beta + 2) * torch.finfo(dtype).eps * x.abs().max().item()
    error = (y.detach().double().cpu() - dense_result(x, loops, beta, own=add)).abs().max()
    assert error <= bound


@pytest.mark.covering("way", "loops", "add", one_in=2)
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("loops", LOOPS)
def test_gradients_agree_with_finite_differences(device, loops, add, way):
    graph, x = graph_of(loops, device), features(device, dtype=torch.float64)
    layer = AGNNConv(add_self_loops=add).to(device, torch.float64)
    beta = torch.tensor([1.5], dtype=torch.float64, device=device, requires_grad=True)

    def call(x, beta):
        return torch.func.functional_call(layer, {"beta": beta}, (x, graph))

    assert gradcheck(call, (x, beta), nondet_tol=0)
    if way == "composed":
        assert gradgradcheck(call, (x, beta), nondet_tol=0)
        return
    (dx,) = torch.autograd.grad(call(x, beta).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="dot_aggregate cannot be differentiated again"):
        dx.sum().backward()


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


def test_graphs_without_edges_vertices_or_features(device):
    for add in (True, False):
        layer = AGNNConv(add_self_loops=add).to(device)
        x = features(device)
        y = layer(x, empty_graph(N, N, device=device))
        assert torch.equal(y, x if add else torch.zeros_like(x))
        y.sum().backward()
        assert x.grad.eq(float(add)).all()
        assert layer(x[:0], empty_graph(0, 0, device=device)).shape == (0, FEAT)
        assert layer(x[:, :0], graph_of("some", device)).shape == (N, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loops", LOOPS)
def test_a_row_of_zeros_is_at_right_angles_to_all(device, loops, dtype, way):
    x = features(device, dtype=dtype).detach()
    x[::2], x[1] = 0, torch.finfo(dtype).tiny  # shorter than what lengths are divided by
    graph, x = graph_of(loops, device), x.requires_grad_()
    layer = AGNNConv().to(device, dtype)
    for one in gradients(layer, x, graph):
        assert one.isfinite().all()
    if dtype.itemsize > 2:  # in float16 PyG divides by 0
        other = theirs().to(device, dtype)
        assert_same([layer(x, graph)], [other(x, edges(loops).to(device))])
    if dtype is torch.float64 and way == "composed":
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


@pytest.mark.parametrize("add", [True, False])
def test_autocast_narrows_the_products_alone(device, add):
    graph, x = graph_of("some", device), features(device)
    layer = AGNNConv(add_self_loops=add).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x, graph)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype is layer.beta.grad.dtype is torch.float32
    bound = 10 * torch.finfo(torch.bfloat16).eps * x.abs().max()  # as above, with beta = 1
    assert (y - layer(x, graph)).abs().max() <= bound


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("add", [True, False])
def test_it_compiles_as_one_graph(device, add):
    graph, x = graph_of("some", device), features(device)
    layer = AGNNConv(add_self_loops=add).to(device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # before and after the eager layer has counted the loops
        assert_same(gradients(compiled, x, graph), gradients(layer, x, graph))
    torch._dynamo.reset()


def test_the_loops_are_counted_once_for_each_graph(way):
    graph, x, layer = graph_of("some"), features("cpu"), AGNNConv()
    with torch.inference_mode():
        layer(x, graph)
    gradients(layer, x, graph)  # tensors born in inference mode could not take part
    parts = graph._slots.torch[0]._built.parts
    kept = ["('loop scores', torch.float32)", "inverse"]  # edges in disorder
    kept += ["loops missing", "loops of rows"]
    assert sorted(map(str, parts)) == (kept if way == "composed" else [])
    before = dict(parts)
    layer(x, graph)
    assert all(parts[key] is value for key, value in before.items())
    plain = graph_of("some")
    AGNNConv(add_self_loops=False)(x, plain)
    assert set(plain._slots.torch[0]._built.parts) <= {"inverse"}


def test_the_graphs_own_values_are_not_read(device):
    graph, x, layer = graph_of("some", device), features(device), AGNNConv().to(device)
    weights = np.full(graph.nnz, np.nan)  # float64, too
    csr = graph.to("cpu").csr
    weighted = Graph(CSR(csr.indptr, csr.indices, weights, shape=csr.shape)).to(device)
    assert torch.equal(layer(x, weighted), layer(x, graph))


def test_a_fixed_beta_has_no_gradient():
    layer, x = with_beta(AGNNConv(requires_grad=False), 2), features("cpu")
    assert not list(layer.parameters())
    y = layer(x, graph_of("some"))
    torch.testing.assert_close(y, with_beta(AGNNConv(), 2)(x, graph_of("some")))
    y.sum().backward()
    assert x.grad.any()
    assert not layer.beta.requires_grad


@pytest.mark.parametrize("add", [True, False])
def test_bad_input_is_refused(add):
    graph, x, layer = graph_of("some"), features("cpu").detach(), AGNNConv(add_self_loops=add)
    for call, error, text in (
        (lambda: layer(x, make_graph(9, 6, 40)), ShapeError, r"graph has shape \(9, 6\): a layer"),
        (lambda: layer(x, graph.csr), DtypeError, "edge_index is a CSR: give a sparsefmt"),
        (
            lambda: layer(x, edges("some") * 1.0),
            DtypeError,
            "edge_index is a .* tensor of .*: give a sparsefmt.Graph",
        ),
        (lambda: layer(x[1:], graph), ShapeError, "x has 9 rows but the graph has 10 col"),
        (lambda: layer(x[0], graph), ShapeError, r"x has shape \(5,\): give \(rows, feat\)"),
        (lambda: layer(x[:, None], graph), ShapeError, r"shape \(10, 1, 5\): AGNN.* no static"),
        (lambda: layer(x[None], edges("some")), ShapeError, r"x has shape \(1, 10, 5\): AGNNConv"),
        (lambda: layer(x.long(), graph), DtypeError, r"x is torch\.int64: give float16"),
        (lambda: layer(x.to(torch.complex64), graph), DtypeError, r"x is torch\.complex64: give"),
        (lambda: layer(x.numpy(), graph), DtypeError, "x is a ndarray: give a torch.Tensor"),
        (lambda: layer(x.to_sparse(), graph), UnsupportedError, "x has layout torch.sparse_coo"),
        (lambda: layer(x.to("meta"), graph), DeviceError, "x is on meta but the graph is on cpu"),
        (lambda: torch.func.vmap(lambda x: layer(x, graph))(x[None]), UnsupportedError, "a loop"),
    ):
        with pytest.raises(error, match=text):
            call()


@pytest.mark.gpu
def test_a_graph_with_tiles_goes_by_products(way, monkeypatch):
    monkeypatch.undo()
    graph, x = graph_of("some", "cuda"), features("cuda", dtype=torch.float64)
    layer = AGNNConv().to("cuda", torch.float64)
    plain = layer(x, graph)
    prepare(graph, tile=(16, 16))
    y = layer(x, graph)
    torch.testing.assert_close(y, plain)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    dx.sum().backward()


def test_a_repr_is_pygs():
    assert repr(AGNNConv(requires_grad=False)) == "AGNNConv()"
