"""GAT, GATv2 and Transformer in float64: weights as PyG's, what is dropped, kept and refused."""

import pytest

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")

import pyg_cases  # noqa: E402
from op_cases import note_calls  # noqa: E402
from pyg_cases import SparseTensor, assert_same, numbers, outcome  # noqa: E402
from test_agnn import edges as edges_of  # noqa: E402
from test_agnn import graph_of  # noqa: E402
from torch.autograd import gradgradcheck  # noqa: E402
from torch_geometric import EdgeIndex  # noqa: E402

from sparsefmt import DeviceError, DtypeError, ShapeError, nn  # noqa: E402
from sparsefmt.nn import _attention  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*(beta state|invariant checks):UserWarning"),
]

N, WIDTH, OUT, EDGE_DIM = 10, 6, 5, 3
NAMES = ("GATConv", "GATv2Conv", "TransformerConv")
EACH = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def both(name, *args, **options):
    return pyg_cases.both(lambda library: getattr(library, name)(*args, **options))


def random(*shape, seed=1):
    return numbers(*shape, seed=seed).requires_grad_()


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("loops", [True, False])
@EACH
def test_weights_of_a_sparse_matrix_are_a_sparse_matrix(name, loops, layout):
    options = {} if name == "TransformerConv" else {"add_self_loops": loops}
    mine, other = both(name, WIDTH, OUT, heads=2, **options)
    source, target = torch.unique(edges_of("some"), dim=1)
    places = torch.stack([target, source])
    adj_t = torch.sparse_coo_tensor(places, torch.ones(len(source)), (N, N)).coalesce()
    adj_t = adj_t if layout == "coo" else adj_t.to_sparse_csr()
    x = random(N, WIDTH)
    (y, (A, weights)), (y_2, (A_2, weights_2)) = (
        one(x, adj_t, return_attention_weights=True) for one in (mine, other)
    )
    assert A.layout == A_2.layout == adj_t.layout
    assert A.shape == A_2.shape
    assert_same([y, A.to_dense(), weights], [y_2, A_2.to_dense(), weights_2])
    assert_same(*(torch.autograd.grad(w.square().sum(), x)[0] for w in (weights, weights_2)))
    if loops and layout == "csr":  # a SparseTensor has the same as its values
        A = SparseTensor(adj_t.crow_indices(), adj_t.col_indices(), None, (N, N))
        found, (looped, values) = mine(x, A, return_attention_weights=True)
        assert looped == (name != "TransformerConv")
        assert_same([found, values], [y, weights])


@EACH
def test_weights_of_an_edge_index_that_is_sorted_are_pygs(name):
    mine, other = both(name, WIDTH, OUT, heads=2)
    given, x = edges_of("some"), random(N, WIDTH)
    given = given[:, torch.argsort(given[1], stable=True)]
    given = EdgeIndex(given, sort_order="col", sparse_size=(N, N))
    (y, (listed, p)), (y_2, (listed_2, p_2)) = (
        one(x, given, return_attention_weights=True) for one in (mine, other)
    )
    assert_same([y, p], [y_2, p_2])
    assert torch.equal(torch.Tensor(listed), torch.Tensor(listed_2))


@pytest.mark.parametrize("edge_dim", [None, EDGE_DIM])
@EACH
def test_weights_are_left_out_as_pygs_are(name, edge_dim):
    layers = both(name, WIDTH, OUT, heads=2, edge_dim=edge_dim, dropout=0.5)
    edges, x = edges_of("some"), [numbers(N, WIDTH)]
    given = {} if edge_dim is None else {"edge_attr": numbers(edges.shape[1], edge_dim, seed=5)}
    returned = given | {"return_attention_weights": True}
    assert_same(*(outcome(one, x, edges, returned) for one in layers))
    assert_same(*(one.eval()(x[0], edges, **given) for one in layers))


@pytest.mark.parametrize("name", ["GATv2Conv", "TransformerConv"])
def test_gradients_of_edge_features_are_differentiable_again(name):
    layer = getattr(nn, name)(3, 2, 2, edge_dim=2)
    given = torch.tensor([[0, 1, 2, 2], [1, 0, 1, 1]])
    inputs = random(3, 3), random(4, 2, seed=2)
    assert gradgradcheck(lambda x, attr: layer(x, given, attr), inputs)


@EACH
def test_features_of_vertices_are_summed_in_one_product_for_all_heads(name, monkeypatch):
    calls = note_calls(monkeypatch, _attention, "spmm")
    layer, given = getattr(nn, name)(WIDTH, OUT, 3, dropout=0.5), edges_of("some")
    layer(random(N, WIDTH), given, return_attention_weights=True)
    assert [x.shape for _, x, *_ in calls] == [(N, 3, OUT)]


def test_one_edge_feature_may_come_without_an_axis(device):
    graph, x = graph_of("some", device), numbers(N, WIDTH, device=device)
    attr = numbers(graph.nnz, 1, seed=2, device=device)
    layer = nn.GATConv(WIDTH, OUT, edge_dim=1).to(device)
    assert torch.equal(layer(x, graph, attr[:, 0]), layer(x, graph, attr))


@EACH
def test_dropout_is_for_training_only(device, name):
    graph, x = graph_of("some", device), numbers(N, WIDTH, device=device)
    layer, plain = (getattr(nn, name)(WIDTH, 8, 2, dropout=p).to(device) for p in (0.5, 0.0))
    plain.load_state_dict(layer.state_dict())
    torch.manual_seed(7)
    first, second = layer(x, graph), layer(x, graph)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(layer(x, graph), first)
    assert torch.equal(layer.eval()(x, graph), plain(x, graph))


@EACH
def test_nothing_is_kept_with_the_graph_but_of_edge_features(name):
    graph, x = graph_of("some"), random(N, WIDTH)
    getattr(nn, name)(WIDTH, OUT, heads=2)(x, graph).sum().backward()
    parts = graph._slots.torch[0]._cache.parts
    assert not parts
    if name == "GATConv":
        layer = nn.GATConv(WIDTH, OUT, edge_dim=2)
        layer(x, graph, torch.rand(graph.nnz, 2))
        before = dict(parts)
        layer(x, graph, torch.rand(graph.nnz, 2))
        assert before
        assert all(parts[key] is value for key, value in before.items())


def test_features_that_do_not_fit_are_refused():
    given, x = edges_of("some"), random(N, WIDTH)
    n = given.shape[1]
    attr = random(n, EDGE_DIM)
    gat, single, without = (nn.GATConv(WIDTH, OUT, edge_dim=k) for k in (EDGE_DIM, 1, None))
    plain, layer = nn.TransformerConv(WIDTH, OUT), nn.TransformerConv(WIDTH, OUT, edge_dim=EDGE_DIM)
    loops = nn.GATv2Conv(WIDTH, OUT, edge_dim=EDGE_DIM, fill_value=torch.ones(2))
    no_edge_dim = r"but .* no edge_dim .* edge_dim=%d, or leave edge_attr out"
    for mine, args, error, text in (
        *(
            (one, (x, given, a), ShapeError, rf"shape \(\d+,{end}\) {no_edge_dim % width}")
            for one in (plain, without, nn.GATv2Conv(WIDTH, OUT))
            for a, end, width in ((attr, " 3", 3), (attr[:, 0], "", 1))
        ),
        (plain, (x, given, [1.0]), DtypeError, "edge_attr is a list: give a torch.Tensor"),
        (layer, (x, given), ShapeError, "edge_attr is None but the layer has edge_dim=3"),
        (layer, (x, given, attr[:, :2]), ShapeError, r"give \(\d+, 3\)"),
        (gat, (x, given, attr[1:]), ShapeError, "edge_attr has shape"),
        (gat, (x, given, attr[:, 0]), ShapeError, rf"edge_attr has shape \({n},\): give"),
        (gat, (x, given, attr[None]), ShapeError, rf"edge_attr has shape \(1, {n}, 3\): give"),
        (gat, (x, given, attr.long()), DtypeError, r"is torch\.int64: .*edge_attr.to\(torch.fl"),
        (gat, (x, given, attr.to("meta")), DeviceError, "is on meta but the layer's weights are"),
        (single, (x, given, attr[1:, 0]), ShapeError, rf"has shape \({n - 1},\): give"),
        (layer, ((x, None), given, attr), DtypeError, r"x\[1\] is None"),
        (loops, (x, given, attr), ShapeError, r"fill_value has shape \(2,\) but edges have 3"),
        (plain, (x[None], given), ShapeError, "TransformerConv takes no static features"),
        (without, (x[None], given), ShapeError, "x has shape .* no static"),
    ):
        with pytest.raises(error, match=text):
            mine(*args)
