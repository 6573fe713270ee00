"""GAT and GATv2 against PyG's layers, their dropout and weights, and what they refuse."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import DTYPES, empty_graph, make_graph  # noqa: E402
from test_agnn import LOOPS, N, edges, graph_of  # noqa: E402
from torch.autograd import gradcheck  # noqa: E402

from sparsefmt import CSR, DeviceError, DtypeError, Graph, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt.nn import GATConv, GATv2Conv  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

F_IN, F_OUT, EDGE_DIM = 6, 5, 3
LAYERS = {"gat": GATConv, "gatv2": GATv2Conv}
BOTH = pytest.mark.parametrize("name", LAYERS)


def theirs(name, *args, **options):
    conv = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")
    layer = getattr(conv, LAYERS[name].__name__)(*args, **options)
    return with_bias(layer)


def with_bias(layer):
    """A bias that shows; a layer's own is 0 at first."""
    if layer.bias is not None:
        torch.nn.init.uniform_(layer.bias)
    return layer


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (GATConv(6, 8), "att_src att_dst bias lin"),
        (GATConv(6, 8, edge_dim=3), "att_src att_dst att_edge bias lin lin_edge"),
        (GATv2Conv(6, 8), "att bias lin_l lin_l lin_r lin_r"),
        (GATv2Conv(6, 8, bias=False), "att lin_l lin_r"),
    ],
)
def test_parameters_come_in_pygs_order(layer, names):
    """By which optimizers number what they keep."""
    assert [name.split(".")[0] for name, _ in layer.named_parameters()] == names.split()


@BOTH
def test_no_vertices_have_gradients_of_zero(name):
    layer, x = LAYERS[name](6, 8, heads=2), torch.zeros(0, 6, requires_grad=True)
    layer(x, empty_graph(0, 0)).sum().backward()
    assert x.grad.shape == (0, 6)
    assert all(not one.grad.any() for one in layer.parameters())


def test_edge_features_that_are_integers_are_to_be_cast():
    layer, graph = GATConv(6, 8, edge_dim=2), make_graph(7, 7, 20)
    attr = torch.ones(graph.nnz, 2, dtype=torch.int64)
    with pytest.raises(DtypeError, match=r"torch.int64: .*edge_attr.to\(torch.float32"):
        layer(torch.ones(7, 6), graph, attr)
    layer(torch.ones(7, 6), graph, attr.to(torch.float32))


@BOTH
@pytest.mark.parametrize("number", ["negative_slope", "dropout"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_of_a_layer_are_finite(name, number, value):
    with pytest.raises(ShapeError, match=f"{number} is {value}: give"):
        LAYERS[name](6, 8, **{number: value})


def features(device="cpu", *, dtype=torch.float32, n=N, width=F_IN, seed=2):
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=made, dtype=torch.float64)
    return x.to(device, dtype).requires_grad_()


def gradients(layer, x, *args):
    """The result, and the gradients of ``x``, of all parameters and of further features."""
    y = layer(x, *args)
    by_name = [one for _, one in sorted(layer.named_parameters())]
    wanted = [x, *by_name, *(one for one in args[1:] if one.requires_grad)]
    return [y, *torch.autograd.grad(y.float().square().sum(), wanted)]


def assert_same(mine, other, *, rtol=1e-5):
    """To that part of the largest value; of a tenth of all for a gradient whose terms cancel."""
    largest = [two.abs().max().item() if two.numel() else 0 for two in other]
    for one, two, own in zip(mine, other, largest, strict=True):
        atol = rtol * max(own, max(largest) / 10)
        torch.testing.assert_close(one, two, rtol=rtol, atol=atol)


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("loops", LOOPS)
@BOTH
def test_it_computes_what_pygs_does_with_its_state(device, name, loops, concat, heads, add):
    options = {"heads": heads, "concat": concat, "add_self_loops": add}
    other = theirs(name, F_IN, F_OUT, **options).to(device)
    mine = LAYERS[name](F_IN, F_OUT, **options).to(device)
    mine.load_state_dict(other.state_dict())
    x = features(device)
    wanted = gradients(other, x, edges(loops).to(device))
    assert_same(gradients(mine, x, graph_of(loops, device)), wanted)


def test_shared_weights_get_both_gradients(device):
    other = theirs("gatv2", F_IN, F_OUT, heads=2, share_weights=True).to(device)
    mine = GATv2Conv(F_IN, F_OUT, heads=2, share_weights=True).to(device)
    mine.load_state_dict(other.state_dict())
    x = features(device)
    wanted = gradients(other, x, edges("some").to(device))
    assert_same(gradients(mine, x, graph_of("some", device)), wanted)


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("loops", LOOPS)
def test_edge_features_count_as_pygs_do(device, loops, heads, add):
    options = {"heads": heads, "edge_dim": EDGE_DIM, "add_self_loops": add}
    other = theirs("gat", F_IN, F_OUT, **options).to(device)
    mine = GATConv(F_IN, F_OUT, **options).to(device)
    mine.load_state_dict(other.state_dict())
    graph, x = graph_of(loops, device), features(device)
    attr = features(device, n=graph.nnz, width=EDGE_DIM, seed=5)
    wanted = gradients(other, x, edges(loops).to(device), attr)

    assert_same(gradients(mine, x, graph, attr), wanted)
    torch.testing.assert_close(mine(x, graph), other(x, edges(loops).to(device)))


def test_one_edge_feature_may_come_without_an_axis(device):
    graph, x = graph_of("some", device), features(device)
    attr = features(device, n=graph.nnz, width=1)
    layer = GATConv(F_IN, F_OUT, edge_dim=1).to(device)
    assert torch.equal(layer(x, graph, attr[:, 0]), layer(x, graph, attr))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"share_weights": True}, {"edge_dim": 2}], ids=str)
@BOTH
def test_a_state_loads_across_and_is_initialised_alike(name, options, bias):
    if (name == "gat") == ("share_weights" in options) and options:
        return  # of the other layer
    options = {**options, "bias": bias, "heads": 3}
    mine, other = LAYERS[name](50, 40, **options), theirs(name, 50, 40, **options)
    fresh = [dict(layer.state_dict()) for layer in (mine, type(other)(50, 40, **options))]
    assert fresh[0].keys() == fresh[1].keys()
    for key, value in fresh[0].items():
        assert value.shape == fresh[1][key].shape, key
        # Uniform of the same bounds: the largest of 120 or more lie close together.
        torch.testing.assert_close(value.abs().max(), fresh[1][key].abs().max(), rtol=0.2, atol=0)
    mine.load_state_dict(other.state_dict())
    x = features(width=50)
    assert_same([mine(x, graph_of("some"))], [other(x, edges("some"))])
    mine.reset_parameters()
    other.load_state_dict(mine.state_dict())
    assert mine.bias is None or not mine.bias.any()
    assert_same([mine(x, graph_of("some"))], [other(x, edges("some"))])


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("edge_dim", [None, 2])
@pytest.mark.parametrize("loops", LOOPS)
def test_the_weights_are_pygs(device, loops, edge_dim, add):
    options = {"heads": 2, "edge_dim": edge_dim, "add_self_loops": add}
    other = theirs("gat", F_IN, F_OUT, **options).to(device)
    mine = GATConv(F_IN, F_OUT, **options).to(device)
    mine.load_state_dict(other.state_dict())
    graph, x, there = graph_of(loops, device), features(device), edges(loops).to(device)
    attr = features(device, n=graph.nnz, width=edge_dim, seed=5) if edge_dim else None
    y, (listed, weights) = mine(x, graph, attr, return_attention_weights=True)
    assert torch.equal(y, mine(x, graph, attr))
    _, (expected, wanted) = other(x, there, attr, return_attention_weights=True)
    assert torch.equal(listed, expected)
    torch.testing.assert_close(weights, wanted)
    weights.square().sum().backward()
    assert x.grad.isfinite().all()


@BOTH
def test_dropout_is_for_training_only(device, name):
    graph, x = graph_of("some", device), features(device).detach()
    layer = LAYERS[name](F_IN, 64, heads=2, dropout=0.5).to(device)
    plain = LAYERS[name](F_IN, 64, heads=2).to(device)
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
        mean = sum(layer(x, graph) for _ in range(400)) / 400
    spread = 5 * x.abs().max() * F_IN**0.5 / 400**0.5  # 5 deviations of a mean
    assert (mean - plain(x, graph)).abs().max() < spread


@pytest.mark.parametrize("add", [True, False])
@BOTH
def test_gradients_agree_with_finite_differences(device, name, add):
    graph, x = graph_of("repeated", device), features(device, dtype=torch.float64)
    options = {"edge_dim": 2} if name == "gat" else {}
    layer = LAYERS[name](F_IN, 2, heads=2, add_self_loops=add, **options)
    layer.to(device, torch.float64)
    attr = features(device, dtype=torch.float64, n=graph.nnz, width=2)
    more = [attr] if options else []
    assert gradcheck(lambda x, *attr: layer(x, graph, *attr), (x, *more), nondet_tol=0)
    (dx,) = torch.autograd.grad(layer(x, graph).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="cannot be differentiated again"):
        dx.sum().backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_small_model_compiles_as_one_graph(device):
    graph, x = graph_of("some", device), features(device)
    attr = features(device, n=graph.nnz, width=2)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = GATConv(F_IN, 4, heads=2, edge_dim=2)
            self.second = GATv2Conv(8, 3, heads=2, concat=False, dropout=0.5)

        def forward(self, x, graph, attr):
            return self.second(torch.relu(self.first(x, graph, attr)), graph)

    model = Model().to(device).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # before and after the eager layer has counted the loops
        mine, wanted = gradients(compiled, x, graph, attr), gradients(model, x, graph, attr)
        assert_same(mine, wanted, rtol=1e-6)
    model.train()
    assert not torch.equal(compiled(x, graph, attr), compiled(x, graph, attr))
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@BOTH
def test_every_dtype(device, name, dtype):
    layer = with_bias(LAYERS[name](F_IN, F_OUT, heads=2)).to(device, dtype)
    wide = LAYERS[name](F_IN, F_OUT, heads=2).to(device, torch.float64)
    wide.load_state_dict(layer.state_dict())
    graph, x = graph_of("some", device), features(device, dtype=dtype)
    y = layer(x, graph)
    assert y.dtype is dtype
    y.float().sum().backward()
    assert all(one.grad.isfinite().all() for one in (x, *layer.parameters()))
    wanted = wide(x.detach().double(), graph)
    # Sums of six products, rounded; scores are off by as much, and exp by that times their size.
    bound = 40 * torch.finfo(dtype).eps * wanted.abs().max()
    assert (y.double() - wanted).abs().max() <= bound


@BOTH
def test_autocast_narrows(device, name):
    graph, x = graph_of("some", device), features(device)
    options = {"edge_dim": 2} if name == "gat" else {}
    layer = LAYERS[name](F_IN, F_OUT, heads=2, **options).to(device)
    attr = [features(device, n=graph.nnz, width=2)] if options else []
    with torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x, graph, *attr)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert all(one.grad.dtype is torch.float32 for one in (x, *attr, *layer.parameters()))
    plain = layer(x, graph, *attr)
    assert (y - plain).abs().max() <= 40 * torch.finfo(torch.bfloat16).eps * plain.abs().max()


@pytest.mark.parametrize("add", [True, False])
@BOTH
def test_graphs_without_edges_or_vertices(device, name, add):
    layer = with_bias(LAYERS[name](F_IN, F_OUT, heads=2, add_self_loops=add)).to(device)
    x = features(device)
    y = layer(x, empty_graph(N, N, device=device))
    lin = layer.lin if name == "gat" else layer.lin_l
    torch.testing.assert_close(y, lin(x) * add + layer.bias)
    y.sum().backward()
    assert x.grad.isfinite().all()
    assert layer(x[:0], empty_graph(0, 0, device=device)).shape == (0, 2 * F_OUT)


def test_edge_features_of_a_graph_without_edges(device):
    layer = GATConv(F_IN, F_OUT, heads=2, edge_dim=2).to(device)
    graph, x = empty_graph(N, N, device=device), features(device)
    attr = torch.zeros(0, 2, device=device)
    y, (_, weights) = layer(x, graph, attr, return_attention_weights=True)
    torch.testing.assert_close(y, layer(x, graph))
    assert torch.equal(weights, weights.new_ones(N, 2))  # each vertex has its loop alone


@BOTH
def test_the_graphs_own_values_are_not_read(device, name):
    graph, x = graph_of("some", device), features(device)
    layer = LAYERS[name](F_IN, F_OUT).to(device)
    csr = graph.to("cpu").csr
    weights = np.full(graph.nnz, np.nan)  # float64, too
    weighted = Graph(CSR(csr.indptr, csr.indices, weights, shape=csr.shape)).to(device)
    assert torch.equal(layer(x, weighted), layer(x, graph))


@BOTH
def test_nothing_is_kept_with_the_graph_but_of_edge_features(name):
    graph, x = graph_of("some"), features()
    gradients(LAYERS[name](F_IN, F_OUT, heads=2), x, graph)
    parts = graph._slots.torch[0]._built.parts
    assert not parts
    if name == "gat":
        layer = GATConv(F_IN, F_OUT, edge_dim=2)
        layer(x, graph, torch.rand(graph.nnz, 2))
        before = dict(parts)
        layer(x, graph, torch.rand(graph.nnz, 2))
        assert before
        assert all(parts[key] is value for key, value in before.items())


@BOTH
def test_bad_input_is_refused(name):
    graph, x, layer = graph_of("some"), features().detach(), LAYERS[name](F_IN, F_OUT)
    for call, error, text in (
        (lambda: layer(x, make_graph(9, 6, 40)), ShapeError, r"graph has shape \(9, 6\): a layer"),
        (lambda: layer(x, graph.csr), DtypeError, "edge_index is a CSR: give a sparsefmt"),
        (lambda: layer(x[1:], graph), ShapeError, "x has 9 rows but the graph has 10 columns"),
        (lambda: layer(x[0], graph), ShapeError, r"x has shape \(6,\): give \(rows, feat\)"),
        (lambda: layer(x.long(), graph), DtypeError, r"x is torch\.int64: give float16"),
        (lambda: layer(x.numpy(), graph), DtypeError, "x is a ndarray: give a torch.Tensor"),
        (lambda: layer(x.to_sparse(), graph), UnsupportedError, "x has layout torch.sparse_coo"),
        (lambda: layer(x.to("meta"), graph), DeviceError, "x is on meta but the graph is on cpu"),
        (lambda: LAYERS[name](2, 2, dropout=1.0), ShapeError, "dropout is 1.0: give a share"),
        (lambda: LAYERS[name](2, 2, dropout=-0.1), ShapeError, "dropout is -0.1: give a share"),
    ):
        with pytest.raises(error, match=text):
            call()


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
    with pytest.raises(DtypeError, match=r"edge_attr is torch\.int64: give floating"):
        layer(x, graph, attr.long())
    with pytest.raises(
        DeviceError, match="edge_attr is on meta but the layer's weights are on cpu"
    ):
        layer(x, graph, attr.to("meta"))


def test_a_repr_tells_the_sizes():
    assert repr(GATConv(2, 3, heads=4)) == "GATConv(2, 3, heads=4)"
    assert repr(GATv2Conv((2, 4), 3)) == "GATv2Conv((2, 4), 3, heads=1)"


@pytest.mark.parametrize("make", [GATConv, GATv2Conv])
@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"heads": 0}, ShapeError, "heads is 0: give 1 or more"),
        ({"heads": "2"}, DtypeError, "heads is '2': give an integer"),
        ({"dropout": None}, DtypeError, "dropout is None: give a number"),
        ({"dropout": 1.0}, ShapeError, "dropout is 1.0"),
        ({"negative_slope": "a"}, DtypeError, "negative_slope is 'a'"),
        ({"negative_slope": 10**400}, ShapeError, "negative_slope is beyond the range of a float"),
        ({"dropout": -(10**5000)}, ShapeError, "dropout is beyond the range of a float"),
        ({"in_channels": -2}, ShapeError, "in_channels is -2: give 1 or more, or -1"),
    ],
)
def test_a_layer_refuses_what_is_no_size_or_number(make, options, error, says):
    with pytest.raises(error, match=says):
        make(**{"in_channels": F_IN, "out_channels": F_OUT} | options)


def test_a_layer_refuses_features_of_another_width():
    graph = graph_of("none", "cpu")
    with pytest.raises(ShapeError, match="x has 1 features but the layer takes"):
        GATConv(F_IN, F_OUT)(torch.ones(graph.n_rows, 1), graph)
