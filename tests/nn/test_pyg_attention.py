"""GAT, GATv2, AGNN and Transformer against PyG's layers, option by option, in float64."""

import pytest

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")

from test_agnn import edges  # noqa: E402
from test_pyg_graphs import SparseTensor  # noqa: E402
from torch.autograd import gradgradcheck  # noqa: E402
from torch.nn.parameter import UninitializedParameter  # noqa: E402
from torch_geometric import EdgeIndex  # noqa: E402

from sparsefmt import DtypeError, Graph, ShapeError, UnsupportedError, nn  # noqa: E402
from sparsefmt.nn import _attention  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*(beta state|invariant checks):UserWarning"),
]

N, WIDTH, OUT, EDGE_DIM = 10, 6, 5, 3
NAMES = ("GATConv", "GATv2Conv", "TransformerConv")
EACH = pytest.mark.parametrize("name", NAMES)

FILLS = ("mean", "add", "min", "max", "mul", 0.5, torch.tensor([0.5, -1.0, 2.0]))
OF_BOTH = [
    {},
    {"heads": 3},
    {"heads": 3, "concat": False},
    {"negative_slope": 0.7},
    {"add_self_loops": False},
    {"bias": False},
    {"residual": True, "heads": 2},
    {"residual": True, "heads": 2, "concat": False, "add_self_loops": False},
    *({"heads": 2, "edge_dim": EDGE_DIM, "fill_value": fill} for fill in FILLS),
    {"heads": 2, "edge_dim": EDGE_DIM, "add_self_loops": False, "residual": True},
    {"edge_dim": 1, "concat": False},
]
OF_TRANSFORMER = [
    {},
    {"heads": 3},
    {"heads": 3, "concat": False},
    {"beta": True, "heads": 2},
    {"beta": True, "heads": 2, "concat": False, "edge_dim": EDGE_DIM},
    {"heads": 2, "edge_dim": EDGE_DIM},
    {"heads": 3, "edge_dim": 1, "bias": False},
    {"root_weight": False, "beta": True, "edge_dim": EDGE_DIM},
    {"root_weight": False, "bias": False},
]
OPTIONS = {
    "GATConv": OF_BOTH,
    "GATv2Conv": [*OF_BOTH, {"share_weights": True}, {"share_weights": True, "edge_dim": 2}],
    "TransformerConv": OF_TRANSFORMER,
}
CASES = pytest.mark.parametrize(
    ("name", "options"), [(name, one) for name in NAMES for one in OPTIONS[name]], ids=str
)
FEW = pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GATConv", {"residual": True, "heads": 2, "edge_dim": EDGE_DIM, "fill_value": 0.5}),
        ("GATv2Conv", {"heads": 2, "edge_dim": EDGE_DIM, "concat": False, "fill_value": 0.5}),
        ("GATv2Conv", {"residual": True}),
        ("GATv2Conv", {"share_weights": True}),
        ("TransformerConv", {"beta": True, "heads": 2, "edge_dim": EDGE_DIM, "concat": False}),
        ("TransformerConv", {"root_weight": False}),
    ],
    ids=str,
)


@pytest.fixture(autouse=True)
def in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def both(name, *args, seed=0, **options):
    """Ours and PyG's, drawn at the same seed; the bias shows."""
    made = []
    for module in (nn, pyg):
        torch.manual_seed(seed)
        layer = getattr(module, name)(*args, **options)
        if getattr(layer, "bias", None) is not None:
            torch.nn.init.uniform_(layer.bias)
        made.append(layer)
    return made


def random(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def bipartite(n_source, n_target):
    """Directed, with an edge stored twice, in no order; the last target has no edges."""
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(n_source, (20,), generator=generator)
    target = torch.randint(n_target - 1, (20,), generator=generator)
    given = torch.stack([source, target])
    return torch.cat([given, given[:, :3], torch.tensor([[2, 2], [2, 2]])], 1)


def attributes(options, given):
    width = options.get("edge_dim")
    return () if width is None else (random(given.shape[1], width, seed=5),)


def leaves(value):
    """The tensors of a result: features, or these with the edges and their weights."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for part in value for one in leaves(part)]


def is_lazy(parameter):
    return isinstance(parameter, UninitializedParameter)


def everything(layer, x, given, *attr, **more):
    """The result, and the gradients of all that has one."""
    inputs = [one for one in (x if isinstance(x, tuple) else (x,)) if one is not None]
    own = [one for _, one in sorted(layer.named_parameters()) if not is_lazy(one)]
    wanted = [*inputs, *attr, *own]
    found = leaves(layer(x, given, *attr, **more))
    loss = sum(
        (one * torch.linspace(-1, 1, one.numel()).view_as(one)).sum()
        for one in found
        if one.is_floating_point()
    )
    return [*found, *torch.autograd.grad(loss, wanted, allow_unused=True)]


def assert_same(mine, other):
    assert len(mine) == len(other)
    largest = max(two.abs().max().item() for two in other if two is not None and two.numel())
    for one, two in zip(mine, other, strict=True):
        if two is None or one is None:  # what does not count at all has no gradient
            assert all(each is None or not each.any() for each in (one, two))
            continue
        assert one.dtype == two.dtype
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-11 * max(largest, 1))


def check_between_two_sets(name, options, shape):
    mine, other = both(name, (WIDTH, WIDTH if "share_weights" in options else 4), OUT, **options)
    given = bipartite(*shape)
    x = random(shape[0], WIDTH), random(shape[1], mine.in_channels[1], seed=2)
    attr = attributes(options, given)
    for more in ({}, {"return_attention_weights": True}):
        found = [everything(one, x, given, *attr, **more) for one in (mine, other)]
        assert_same(*found)


@CASES
def test_each_option_counts_between_two_sets(name, options):
    check_between_two_sets(name, options, (9, 6))


@FEW
def test_there_may_be_more_targets_than_sources(name, options):
    """Where PyG itself breaks if features of loops are reduced ones."""
    check_between_two_sets(name, options, (6, 9))


@EACH
def test_weights_of_a_graph_are_those_of_its_edge_index(name):
    layer, given = both(name, WIDTH, OUT, heads=2, edge_dim=EDGE_DIM)[0], edges("repeated")
    x, attr = random(N, WIDTH), random(given.shape[1], EDGE_DIM)
    graph, more = Graph.from_edge_index(given, num_nodes=N), {"return_attention_weights": True}
    expected = everything(layer, x, given, attr, **more)
    assert_same(everything(layer, x, graph, attr, **more), expected)
    assert_same(leaves(layer(x, graph, attr)), expected[:1])


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("loops", [True, False])
@EACH
def test_weights_of_a_sparse_matrix_are_a_sparse_matrix(name, loops, layout):
    options = {} if name == "TransformerConv" else {"add_self_loops": loops}
    mine, other = both(name, WIDTH, OUT, heads=2, **options)
    source, target = torch.unique(edges("some"), dim=1)
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
    gradients = (torch.autograd.grad(w.square().sum(), x)[0] for w in (weights, weights_2))
    assert_same(*([one] for one in gradients))


@EACH
def test_weights_of_a_sparse_tensor_are_its_values(name):
    layer, x = both(name, WIDTH, OUT, heads=2)[0], random(N, WIDTH)
    dense = torch.zeros(N, N).index_put(tuple(edges("some").flip(0)), torch.ones(()))
    A = dense.to_sparse_csr()
    y, (_, weights) = layer(x, A, return_attention_weights=True)
    A = SparseTensor(A.crow_indices(), A.col_indices(), None, (N, N))
    found, (looped, values) = layer(x, A, return_attention_weights=True)
    assert looped == (name != "TransformerConv")
    assert_same([found, values], [y, weights])


@EACH
def test_weights_of_an_edge_index_that_is_sorted_are_pygs(name):
    mine, other = both(name, WIDTH, OUT, heads=2)
    given, x = edges("some"), random(N, WIDTH)
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
    options = {"heads": 2, "edge_dim": edge_dim, "dropout": 0.5}
    mine, other = both(name, WIDTH, OUT, **options)
    given, x = edges("some"), random(N, WIDTH)
    attr, found = attributes(options, given), []
    for layer in (mine, other):
        torch.manual_seed(7)
        found.append(everything(layer, x, given, *attr, return_attention_weights=True))
    assert_same(*found)
    assert_same(*(leaves(one.eval()(x, given, *attr)) for one in (mine, other)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, "autocast"], ids=str)
@EACH
def test_edge_features_may_be_narrow(name, dtype):
    layer, given = both(name, WIDTH, OUT, heads=2, edge_dim=EDGE_DIM)[0].float(), edges("some")
    x, attr = random(N, WIDTH).float().detach(), random(given.shape[1], EDGE_DIM).float().detach()
    more = {"return_attention_weights": True}
    y, (_, weights) = layer(x, given, attr, **more)
    if dtype == "autocast":
        narrow = torch.bfloat16
        with torch.autocast("cpu", narrow):
            found, (_, of_edges) = layer(x, given, attr, **more)
    else:
        narrow, layer = dtype, layer.to(dtype)
        found, (_, of_edges) = layer(x.to(dtype), given, attr.to(dtype), **more)
    assert found.dtype == of_edges.dtype == narrow
    # A few operations on numbers about 1, of which the largest rounds most.
    bound = 8 * torch.finfo(narrow).eps * y.abs().max().item()
    torch.testing.assert_close(found.float(), y, rtol=0, atol=bound)
    torch.testing.assert_close(of_edges.float(), weights, rtol=0, atol=bound)


@pytest.mark.parametrize("name", ["GATv2Conv", "TransformerConv"])
def test_gradients_of_edge_features_are_differentiable_again(name):
    layer = getattr(nn, name)(3, 2, 2, edge_dim=2)
    given = torch.tensor([[0, 1, 2, 2], [1, 0, 1, 1]])
    inputs = random(3, 3), random(4, 2, seed=2)
    assert gradgradcheck(lambda x, attr: layer(x, given, attr), inputs)


@EACH
def test_features_of_vertices_are_summed_in_one_product_for_all_heads(name, monkeypatch):
    heads, shapes, product = 3, [], _attention.spmm

    def counted(graph, x, *others):
        shapes.append(tuple(x.shape))
        return product(graph, x, *others)

    monkeypatch.setattr(_attention, "spmm", counted)
    layer, given = getattr(nn, name)(WIDTH, OUT, heads, dropout=0.5), edges("some")
    layer(random(N, WIDTH), given, return_attention_weights=True)
    assert shapes == [(N, heads, OUT)]


@EACH
def test_hooks_of_the_map_of_edges_are_called(name):
    layer, given = both(name, WIDTH, OUT, heads=2, edge_dim=EDGE_DIM)[0], edges("some")
    x, attr = random(N, WIDTH), random(given.shape[1], EDGE_DIM)
    expected = layer(x, given, attr)
    layer.lin_edge.register_forward_hook(lambda module, args, y: y.neg())
    assert_same([layer(x, given, -attr)], [expected])


@pytest.mark.parametrize("channels", [-1, (-1, -1), (WIDTH, -1)])
@FEW
def test_channels_may_be_those_of_the_first_features(name, options, channels):
    options = {**options, **({"edge_dim": -1} if options.get("edge_dim") == EDGE_DIM else {})}
    if "share_weights" in options and channels == (WIDTH, -1):
        return
    mine, other = both(name, channels, OUT, **options)
    assert isinstance(next(iter(mine.state_dict().values())), torch.Tensor)
    given = edges("some")
    x = random(N, WIDTH)
    if isinstance(channels, tuple):
        x = x, random(N, WIDTH, seed=2)
    attr = attributes({"edge_dim": EDGE_DIM} if options.get("edge_dim") == -1 else options, given)
    found = []
    for layer in (mine, other):
        torch.manual_seed(5)
        with torch.no_grad():
            found.append(layer(x, given, *attr))
    assert_same([found[0]], [found[1]])
    if options.get("root_weight", True):  # whose map is not met without
        assert not any(map(is_lazy, mine.parameters()))
        assert_same([*mine.state_dict().values()], [*other.state_dict().values()])
    assert_same(everything(mine, x, given, *attr), everything(other, x, given, *attr))


@pytest.mark.parametrize(
    ("name", "options", "error", "says"),
    [
        ("GATConv", {"fill_value": "median"}, UnsupportedError, "fill_value is 'median': give one"),
        (
            "GATConv",
            {"fill_value": None},
            DtypeError,
            "None: give one of 'mean', .* a number, or a t",
        ),
        ("GATv2Conv", {"fill_value": True}, DtypeError, "fill_value is True: give one of 'mean'"),
        ("GATConv", {"fill_value": float("inf")}, ShapeError, "fill_value is inf: give a finite"),
        ("GATv2Conv", {"edge_dim": 0}, ShapeError, "edge_dim is 0: give 1 or more, or -1"),
        ("TransformerConv", {"heads": 0}, ShapeError, "heads is 0: give 1 or more"),
        ("TransformerConv", {"aggr": "max"}, UnsupportedError, "aggr is 'max': TransformerConv"),
        ("GATConv", {"aggr": "lstm"}, UnsupportedError, "aggr is 'lstm': GATConv has no"),
        ("GATv2Conv", {"dropout": 1}, ShapeError, "dropout is 1: give a share"),
    ],
)
def test_what_cannot_be_is_refused_by_name(name, options, error, says):
    with pytest.raises(error, match=says):
        getattr(nn, name)(WIDTH, OUT, **options)


def test_features_that_do_not_fit_are_refused():
    given, x = edges("some"), random(N, WIDTH)
    attr = random(given.shape[1], EDGE_DIM)
    plain, layer = nn.TransformerConv(WIDTH, OUT), nn.TransformerConv(WIDTH, OUT, edge_dim=EDGE_DIM)
    loops = nn.GATv2Conv(WIDTH, OUT, edge_dim=EDGE_DIM, fill_value=torch.ones(2))
    for call, error, text in (
        *(
            (lambda one=one, a=a: one(x, given, a), ShapeError, text)
            for one in (plain, nn.GATConv(WIDTH, OUT), nn.GATv2Conv(WIDTH, OUT))
            for a, text in (
                (
                    attr,
                    r"shape \(\d+, 3\) but .* no edge_dim .* edge_dim=3, or leave edge_attr out",
                ),
                (attr[:, 0], r"shape \(\d+,\) but .* edge_dim=1, or leave edge_attr out"),
            )
        ),
        (lambda: plain(x, given, [1.0]), DtypeError, "edge_attr is a list: give a torch.Tensor"),
        (lambda: layer(x, given), ShapeError, "edge_attr is None but the layer has edge_dim=3"),
        (lambda: layer(x, given, attr[:, :2]), ShapeError, r"give \(\d+, 3\)"),
        (lambda: layer((x, None), given, attr), DtypeError, r"x\[1\] is None"),
        (
            lambda: loops(x, given, attr),
            ShapeError,
            r"fill_value has shape \(2,\) but edges have 3",
        ),
        (lambda: plain(x[None], given), ShapeError, "TransformerConv takes no static features"),
        (lambda: nn.GATConv(WIDTH, OUT)(x[None], given), ShapeError, "x has shape .* no static"),
    ):
        with pytest.raises(error, match=text):
            call()
