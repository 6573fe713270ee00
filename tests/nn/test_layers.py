"""What every layer does beside PyG's results (``test_pyg_arguments``): dtypes, traces, refusals."""

import copy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import DTYPES, empty_graph, make_graph  # noqa: E402
from test_agnn import N, graph_of  # noqa: E402
from torch.autograd import gradcheck  # noqa: E402
from torch.nn import Linear, ReLU, Sequential  # noqa: E402

from sparsefmt import CSR, DeviceError, DtypeError, Graph, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt import nn as ours  # noqa: E402
from sparsefmt.nn import transformer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

FEAT, OUT, EDGE_DIM, TYPES = 6, 8, 3, 2
SAMPLES = {"sample": 3, "training_sample": 4}
#: Layers with MaxK and samples.
PARTS = {
    "gcn": lambda **options: ours.GCNConv(FEAT, OUT, **options),
    "sage": lambda **options: ours.SAGEConv(FEAT, OUT, **options),
    "gin": lambda **options: ours.GINConv(Linear(FEAT, OUT), eps=0.25, **options),
}
OPTIONS = {
    f"{name} {words}": partial(make, **options)
    for name, make in PARTS.items()
    for words, options in (("with k", {"k": 3}), ("of samples", SAMPLES))
}
WEIGHTED = PARTS | {
    "sg": lambda **options: ours.SGConv(FEAT, OUT, K=2, **options),
    "tag": lambda **options: ours.TAGConv(FEAT, OUT, K=2, **options),
    **OPTIONS,
}


class First(torch.nn.Module):
    """A layer that reads the features of the first one too, which are those of ``x`` here."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, edge_index, edge_weight=None):
        return self.layer(x, x, edge_index, edge_weight)


#: Layers of sums that take weights of edges, and of messages, which take none.
SUMS = {
    "appnp": lambda: ours.APPNP(2, 0.2),
    "arma": lambda: ours.ARMAConv(FEAT, OUT, 2, 2),
    "cheb": lambda: ours.ChebConv(FEAT, OUT, 3),
    "gated": lambda: ours.GatedGraphConv(OUT, 2),
    "gcn2": lambda: First(ours.GCN2Conv(FEAT, 0.2)),
    "graph": lambda: ours.GraphConv(FEAT, OUT),
    "le": lambda: ours.LEConv(FEAT, OUT),
    "lg": lambda: ours.LGConv(),
    "mixhop": lambda: ours.MixHopConv(FEAT, OUT // 2, [1, 2]),
    "simple": lambda: ours.SimpleConv("mean", combine_root="sum"),
    "ssg": lambda: ours.SSGConv(FEAT, OUT, 0.2, K=2),
}
MESSAGES = {
    "cluster": lambda: ours.ClusterGCNConv(FEAT, OUT, 0.5),
    "edge": lambda: ours.EdgeConv(Linear(2 * FEAT, OUT)),
    "fa": lambda: First(ours.FAConv(FEAT)),
    "pna": lambda: ours.PNAConv(
        FEAT, OUT, ["mean", "max"], ["identity", "linear"], torch.tensor([1, 2, 1])
    ),
    "resgated": lambda: ours.ResGatedGraphConv(FEAT, OUT),
}
WEIGHTED |= SUMS
ATTENTION = {
    "gat": lambda: ours.GATConv(FEAT, 4, heads=2, edge_dim=EDGE_DIM),
    "gatv2": lambda: ours.GATv2Conv(FEAT, 4, heads=2, edge_dim=EDGE_DIM),
    "transformer": lambda: ours.TransformerConv(FEAT, 4, heads=2, edge_dim=EDGE_DIM),
    "plain gat": lambda: ours.GATConv(FEAT, 4, heads=2),
    "plain gatv2": lambda: ours.GATv2Conv(FEAT, 4, heads=2),
    "agnn": lambda: ours.AGNNConv(),
    "agnn of products": lambda: ours.AGNNConv(),
    "agnn without loops": lambda: ours.AGNNConv(add_self_loops=False),
}
LAYERS = WEIGHTED | {
    "deep gin": lambda: ours.GINConv(Sequential(Linear(FEAT, 7), ReLU(), Linear(7, OUT))),
    "gine": lambda: ours.GINEConv(Linear(FEAT, OUT), edge_dim=EDGE_DIM),
    "rgcn": lambda: ours.RGCNConv(FEAT, OUT, TYPES),
    **MESSAGES,
    **ATTENTION,
}
#: Layers of no maps, whose results are as wide as features.
NARROW = {"appnp", "lg", "simple", *(name for name in ATTENTION if "agnn" in name)}
#: With options that the others have not, where tracing meets other code.
COMPILED = OPTIONS | {
    "gcn": lambda: PARTS["gcn"](improved=True, add_self_loops=False),
    "sage": lambda: PARTS["sage"](aggr=["mean", "max"], normalize=True, project=True),
    "gin": lambda: PARTS["gin"](aggr="mean"),
    "sg": lambda: WEIGHTED["sg"](add_self_loops=False),
    "tag": lambda: WEIGHTED["tag"](normalize=False),
    "gatv2": lambda: ours.GATv2Conv(FEAT, 4, heads=2, concat=False, dropout=0.5),
    **{name: make for name, make in ATTENTION.items() if name == "gat" or "agnn" in name},
    # The others make graphs of their own, which breaks a trace.
    **{name: make for name, make in (SUMS | MESSAGES).items() if name not in ("edge", "fa", "pna")},
    "edge": lambda: ours.EdgeConv(Linear(2 * FEAT, OUT), aggr="mean"),
}
#: Of layers with MaxK and with samples, and of sums, a few are traced at each commit.
RARE = {"gcn of samples", "sage with k", "gin of samples", *SUMS} - {"arma", "cheb"}
TRACED = [pytest.param(name, marks=[pytest.mark.grid] * (name in RARE)) for name in COMPILED]


@pytest.fixture(params=LAYERS)
def name(request):
    return request.param


@pytest.fixture(autouse=True)
def by_products(request, monkeypatch):
    """Compose AGNN of three products, as for a graph with tiles, where a case says so."""
    if "of products" in request.node.name:
        monkeypatch.setattr(transformer, "_composing_pays", lambda ends, x: True)


def made(name, device="cpu", dtype=torch.float32, *, layers=LAYERS):
    torch.manual_seed(4)
    return layers[name]().to(device, dtype)


def numbers(*shape, device="cpu", dtype=torch.float32, seed=2):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(device, dtype).requires_grad_()


def beside(layer, name, count, **place):
    """Arguments of a layer beside features and graph."""
    if name == "rgcn":
        return {"edge_type": torch.arange(count, device=place.get("device")) % TYPES}
    if name in WEIGHTED:
        return {"edge_weight": numbers(count, seed=3, **place).detach().abs().requires_grad_()}
    wide = getattr(layer, "edge_dim", None) or name == "gine"
    return {"edge_attr": numbers(count, EDGE_DIM, seed=3, **place)} if wide else {}


def gradients(layer, x, graph, more):
    """Return the result, and the gradients of features, parameters and what lies beside."""
    torch.manual_seed(3)
    y = layer(x, graph, **more)
    wanted = [x, *layer.parameters(), *(one for one in more.values() if one.requires_grad)]
    return [y, *torch.autograd.grad(y.float().square().sum(), wanted, materialize_grads=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_the_result_of_float64_but_for_rounding(device, name, dtype):
    layer, graph = made(name, device, dtype), graph_of("some", device)
    place = {"device": device, "dtype": dtype}
    x, more = numbers(N, FEAT, **place), beside(layer, name, graph.nnz, **place)
    y, *found = gradients(layer, x, graph, more)
    assert y.dtype is dtype
    assert all(one.isfinite().all() for one in found)
    if "with k" in name:
        return  # narrow features may tie
    wide = {k: v.detach().double() if v.is_floating_point() else v for k, v in more.items()}
    torch.manual_seed(3)
    expected = copy.deepcopy(layer).double()(x.detach().double(), graph, **wide)
    pairs = [(y, expected)]
    if hasattr(layer, "heads"):
        of_edges = {"return_attention_weights": True}
        weights = layer(x, graph, **more, **of_edges)[1][1]
        exact = copy.deepcopy(layer).double()(x.detach().double(), graph, **wide, **of_edges)[1][1]
        assert weights.dtype is dtype
        pairs.append((weights, exact))
    for one, exact in pairs:
        # Sums of some products, rounded; scores are off by as much, and exp by that times their
        # size.
        bound = 40 * torch.finfo(dtype).eps * exact.abs().max()
        assert (one.double() - exact).abs().max() <= bound


@pytest.mark.covering("name", "dtype", "narrow", one_in=2)
@pytest.mark.parametrize("narrow", ["nothing", "features", "all"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_narrows_the_result_and_no_gradient(device, name, dtype, narrow):
    """Also of features of two bytes beside parameters of four."""
    layer, graph = made(name, device), graph_of("some", device)
    x, more = numbers(N, FEAT, device=device), beside(layer, name, graph.nnz, device=device)
    torch.manual_seed(3)
    expected = layer(x, graph, **more).detach()
    if narrow != "nothing":
        x = x.detach().to(dtype).requires_grad_()
    if narrow == "all" and "edge_type" not in more:
        more = {key: one.detach().to(dtype).requires_grad_() for key, one in more.items()}
    for returned in [{}, {"return_attention_weights": True}] if hasattr(layer, "heads") else [{}]:
        torch.manual_seed(3)
        with torch.autocast(device, dtype=dtype):
            y = layer(x, graph, **more, **returned)
        y = y[0] if returned else y
        assert y.dtype is dtype
        y.float().sum().backward()
        leaves = [*layer.parameters(), x, *(one for one in more.values() if one.requires_grad)]
        assert all(one.grad is None or one.grad.dtype is one.dtype for one in leaves)
        if "with k" not in name:
            bound = 40 * torch.finfo(dtype).eps * expected.abs().max()
            assert (y - expected).abs().max() <= bound


@pytest.mark.parametrize("trained", [False, True])
def test_autocast_takes_layers_of_the_other_two_bytes(device, name, trained):
    layer, graph = made(name, device, torch.float16), graph_of("some", device)
    x = numbers(N, FEAT, device=device).detach().half().requires_grad_(trained)
    more = beside(layer, name, graph.nnz, device=device, dtype=torch.float16)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x, graph, **more)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    grads = [one.grad for one in layer.parameters() if one.grad is not None]
    assert all(one.dtype is torch.float16 for one in grads)


@pytest.mark.parametrize("name", OPTIONS, indirect=True)
def test_gradients_that_pyg_has_not_agree_with_finite_differences(device, name):
    """Those of other layers are PyG's."""
    layer, graph = made(name, device, torch.float64), graph_of("repeated", device)
    place = {"device": device, "dtype": torch.float64}
    x, more = numbers(N, FEAT, **place), beside(layer, name, graph.nnz, **place)

    def drawn(x, w=None):
        torch.manual_seed(3)
        return layer(x, graph, edge_weight=w)

    noise = 1e-12 if device == "cuda" else 0  # atomics
    given = x, more["edge_weight"].detach().add(0.5).requires_grad_()
    for training in (False, True) if "samples" in name else (True,):
        layer.train(training)
        assert gradcheck(drawn, given[: 1 + training], nondet_tol=noise)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", TRACED, indirect=True)
def test_a_layer_compiles_as_one_graph(device, name):
    layer, graph = made(name, device, layers=COMPILED), graph_of("some", device)
    x = numbers(N, FEAT, device=device)
    more = {} if name in WEIGHTED else beside(layer, name, graph.nnz, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    # Twice, before and after the eager layer has kept its factors; or in both modes.
    for training in (False, True) if "samples" in name else (True, True):
        layer.train(training)
        found, expected = (gradients(one, x, graph, more) for one in (compiled, layer))
        torch.testing.assert_close(found, expected)
    torch._dynamo.reset()


def test_no_vertices_have_gradients_of_zero(device, name):
    layer, x = made(name, device), numbers(0, FEAT, device=device)
    y = layer(x, empty_graph(0, 0, device=device), **beside(layer, name, 0, device=device))
    assert y.shape == (0, FEAT if name in NARROW | {"fa", "gcn2"} else OUT)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert all(not one.grad.any() for one in layer.parameters())


@pytest.mark.parametrize("name", ATTENTION, indirect=True)
def test_attention_reads_none_of_the_graphs_own_values(device, name):
    layer, graph, x = made(name, device), graph_of("some", device), numbers(N, FEAT, device=device)
    csr = graph.to("cpu").csr
    values = np.full(csr.nnz, np.nan)  # float64, too
    weighted = Graph(CSR(csr.indptr, csr.indices, values, shape=csr.shape)).to(device)
    more = beside(layer, name, graph.nnz, device=device)
    assert torch.equal(layer(x, weighted, **more), layer(x, Graph(csr).to(device), **more))


WIDE = torch.ones(N, N + 1).to_sparse()
SEVERAL = torch.zeros(3, 2, dtype=torch.long)


@pytest.mark.parametrize("wrong", [None, [[0], [1]], torch.ones(2, 3), SEVERAL, SEVERAL[0]])
def test_what_is_no_graph_is_refused_by_the_arguments_name(name, wrong):
    with pytest.raises(DtypeError, match=r"^edge_index is a .*: give a sparsefmt.Graph, such as"):
        made(name)(numbers(N, FEAT), wrong)


@pytest.mark.parametrize("name", sorted(LAYERS.keys() - {"rgcn"}), indirect=True)
def test_features_that_do_not_fit_are_refused(name):
    layer, graph, x = made(name), graph_of("some"), numbers(N, FEAT).detach()
    more = {} if name in WEIGHTED else beside(layer, name, graph.nnz)
    cases = [
        (lambda: (x[1:], graph), ShapeError, "x has 9 rows but the graph has 10 col"),
        (lambda: (x[0], graph), ShapeError, r"x has shape \(6,\): give \(rows, feat\)"),
        (lambda: (x.long(), graph), DtypeError, r"x is torch\.int64: give float16"),
        (lambda: (x.to(torch.complex64), graph), DtypeError, r"x is torch\.complex64: give"),
        (lambda: (x.numpy(), graph), DtypeError, "x is a ndarray: give a torch.Tensor"),
        (lambda: (x.tolist(), graph), DtypeError, "x is a list: give a torch.Tensor"),
        (lambda: (x.to("meta"), graph), DeviceError, "x is on meta but the graph is on cpu"),
        (lambda: (x, make_graph(9, 6, 40)), ShapeError, r"^graph has shape \(9, 6\): a layer"),
        (lambda: (x, graph.csr), DtypeError, "edge_index is a CSR: give a sparsefmt"),
        (lambda: (x, WIDE), ShapeError, rf"^edge_index has shape \({N}, {N + 1}\): a layer needs"),
    ]
    if "gcn" not in name:
        cases.append((lambda: (x.to_sparse(), graph), UnsupportedError, "x has layout torch.sp"))
    if name not in NARROW:
        wide = "x is torch.float64 but the layer's weights are"
        cases.append((lambda: (x.double(), graph), DtypeError, wide))
        few = (lambda: (x[:, 1:], graph), ShapeError, "x has 5 features but")
        cases += [few] if name != "gated" else []  # which fills them up
    for given, error, text in cases:
        with pytest.raises(error, match=text):
            layer(*given(), **more)
    if name not in NARROW:
        with pytest.raises(DeviceError, match="weights are on meta: move one"):
            layer.to("meta")(x, graph, **more)


@pytest.mark.parametrize("name", WEIGHTED, indirect=True)
def test_a_bad_edge_weight_is_named(name):
    layer, graph, x = made(name), graph_of("some"), numbers(N, FEAT)
    w = torch.ones(graph.nnz)
    for weight, error, text in (
        (w.long(), DtypeError, r"edge_weight is torch\.int64: give float16"),
        (w.bool(), DtypeError, r"edge_weight is torch\.bool: give float16"),
        (w.double(), DtypeError, r"edge_weight is torch\.float64 but x is torch\.float32"),
        (w.numpy(), DtypeError, "edge_weight is a ndarray: give a torch.Tensor"),
        (w.tolist(), DtypeError, "edge_weight is a list: give a torch.Tensor"),
        (w[:, None], ShapeError, "edge_weight has shape"),
        (w[1:], ShapeError, "edge_weight has shape"),
        (w.to("meta"), DeviceError, "edge_weight is on meta"),
    ):
        with pytest.raises(error, match=text):
            layer(x, graph, edge_weight=weight)


@pytest.mark.parametrize("options", [{}, {"k": 1}, {"sample": 1}], ids=str)
def test_a_loop_that_is_not_added_adds_nothing(device, options):
    """Vertex 0 has a loop and holds inf; vertex 1 has none, and reads it."""
    graph = Graph.from_edge_index(torch.tensor([[0, 0], [0, 1]]), num_nodes=3).to(device)
    w = torch.ones(2, device=device, requires_grad=True)
    x = torch.tensor([[float("inf")], [1.0], [2.0]], device=device, requires_grad=True)
    layer = ours.GCNConv(1, 1, **options).to(device).eval()
    torch.nn.init.ones_(layer.lin.weight)
    for weight in (None, w):
        y = layer(x, graph, edge_weight=weight)
        assert y[:, 0].tolist() == [float("inf"), float("inf"), 2.0]
        (found,) = torch.autograd.grad(y[2].sum(), x)
        assert found.isfinite().all()


# Between two sets of vertices; results are PyG's in ``test_pyg_arguments``

OF_TARGETS = 3
PAIRS = {
    "sage": lambda: ours.SAGEConv(FEAT, OUT),
    "sage of two widths": lambda: ours.SAGEConv((FEAT, OF_TARGETS), OUT),
    "gin": lambda: ours.GINConv(Linear(FEAT, OUT), train_eps=True),
    "gat": lambda: ours.GATConv(FEAT, OUT, heads=2),
    "gat of two widths": lambda: ours.GATConv((FEAT, OF_TARGETS), OUT, heads=2, concat=False),
    "gatv2": lambda: ours.GATv2Conv(FEAT, OUT, heads=2),
    "gatv2 of two widths": lambda: ours.GATv2Conv((FEAT, OF_TARGETS), OUT),
    "gatv2 with one weight": lambda: ours.GATv2Conv(FEAT, OUT, share_weights=True),
}


def ends(name, device="cpu", dtype=torch.float64):
    """Features of 9 sources and of 5 targets, and edges."""
    wide = OF_TARGETS if "two widths" in name else FEAT
    x = tuple(numbers(n, k, device=device, dtype=dtype) for n, k in ((9, FEAT), (5, wide)))
    return x, torch.stack([torch.arange(40) % n for n in (9, 5)]).to(device)


@pytest.mark.parametrize("name", [name for name in OPTIONS if "gcn" not in name], indirect=True)
def test_maxk_and_samples_between_one_set_are_those_of_the_layer(device, name):
    """A tuple of other tensors goes another way than one tensor."""
    layer, x = made(name, device, torch.float64), numbers(N, FEAT, device=device).double()
    graph = graph_of("some", device)
    layer.eval()
    torch.testing.assert_close(layer((x, x.clone()), graph), layer(x, graph))


@pytest.mark.parametrize("name", PAIRS, indirect=True)
def test_autocast_narrows_both_ends(device, name):
    x, edges = ends(name, device, torch.float32)
    layer = made(name, device, layers=PAIRS)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x, edges)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert all(one.grad.dtype is torch.float32 for one in x)


@pytest.mark.parametrize("name", ["sage", "gin", "gat", "gatv2"], indirect=True)
def test_ends_that_do_not_fit_are_refused(name):
    mine, (x, given) = made(name, dtype=torch.float64, layers=PAIRS), ends(name)
    graph = Graph.from_edge_index(given, num_nodes=(9, 5))
    for call, error, text in (
        (lambda: mine(x[0], graph), ShapeError, "graph has shape .5, 9.: a layer .* x_target"),
        (lambda: mine((*x, x[0]), graph), ShapeError, "x has 3 parts: give"),
        (lambda: mine(x[::-1], graph), ShapeError, r"x\[0\] has shape .5, 6. but .* 9 columns"),
        (lambda: mine((x[0], x[0]), graph), ShapeError, r"x\[1\] has shape .* 5 rows"),
        (lambda: mine((x[0], "x"), graph), DtypeError, r"x\[1\] is a str: give a torch.Tensor"),
        (lambda: mine((None, x[1]), graph), DtypeError, r"x\[0\] is a NoneType"),
        (lambda: mine((x[0].long(), x[1]), graph), DtypeError, r"x\[0\] is torch.int64"),
        (lambda: mine((x[0].to_sparse(), x[1]), graph), UnsupportedError, r"x\[0\] has layout"),
        (lambda: mine((x[0], x[1][:, :3]), graph), ShapeError, r"x\[1\] has 3 features but"),
        (lambda: mine((x[0], x[1].float()), graph), DtypeError, r"x\[1\] is torch.float32 but"),
        (lambda: mine(x, graph, size=(9, 6)), ShapeError, "features of targets have shape .5,"),
        (lambda: mine((x[0], None), graph, size=(9, 6)), ShapeError, "the graph has 5 targets"),
        (lambda: mine(x, given, size=(8, 5)), ShapeError, "features of sources have shape .9, "),
        (lambda: mine(x, graph, size=9), ShapeError, "size is 9: give .n_source, n_target."),
        (lambda: mine(x, graph, size=(9, True)), ShapeError, "size is .9, True.: give"),
        (lambda: mine(x, graph, size=(9, -1)), ShapeError, "counts cannot be negative"),
    ):
        with pytest.raises(error, match=text):
            call()
    if name == "gatv2":
        with pytest.raises(DtypeError, match=r"x\[1\] is None: scores are of both ends"):
            mine((x[0], None), given)


@pytest.mark.parametrize(
    ("n", "nnz", "feat", "dtype", "pays"),
    [
        (1_000, 99_999, 128, torch.float32, False),  # a small graph
        (10_000, 100_000, 16, torch.float16, True),
        (1_000, 100_000, 63, torch.float32, False),  # narrow features and long rows
        (1_000, 100_000, 64, torch.float32, True),
        (1_000, 100_000, 127, torch.bfloat16, False),
    ],
)
def test_tiles_are_used_where_three_operations_take_less_time(
    n, nnz, feat, dtype, pays, monkeypatch
):
    x, ends = torch.zeros(n, feat, dtype=dtype), SimpleNamespace(graph=None)
    ends.tensors = SimpleNamespace(nnz=nnz, n_rows=n)
    for has in (False, True):
        monkeypatch.setattr(transformer, "has_tiles", lambda graph, has=has: has)
        assert transformer._composing_pays(ends, x) == (has and pays)
