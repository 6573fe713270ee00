"""Ways to call PyG's layers: cached graphs, sparse features, every kind of graph, edge weights."""

import copy
import gc
import inspect
import sys
import weakref

import pytest

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.nn", reason="torch-geometric is not installed")

import pyg_cases  # noqa: E402
from op_cases import note_calls  # noqa: E402
from pyg_cases import SparseTensor, assert_same, make, numbers, outcome  # noqa: E402
from torch.nn import Linear  # noqa: E402
from torch_geometric import EdgeIndex  # noqa: E402
from torch_geometric.data import Data  # noqa: E402

from sparsefmt import DtypeError, FormatError, Graph, ShapeError, UnsupportedError, nn  # noqa: E402
from sparsefmt.autograd import as_graph, edge_softmax, spmm  # noqa: E402
from sparsefmt.formats import convert, primitives  # noqa: E402
from sparsefmt.model.state import is_graph  # noqa: E402
from sparsefmt.nn import _loops  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*(beta state|invariant checks|to CSR format):UserWarning"),
]

N, FEAT, OUT = 8, 5, 4
UPSTREAM = "target_to_source"


def edges(seed=1):
    """Distinct ones without loops, so that every kind of graph holds them."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.randperm(N * N, generator=generator)[:24]
    source, target = place // N, place % N
    return torch.stack([source, target])[:, source != target]


def distinct(device="cpu"):
    """The same, and loops of some vertices."""
    return torch.cat([edges(), torch.tensor([[0, 3, 5], [0, 3, 5]])], 1).to(device)


def both(name, **options):
    return pyg_cases.both(lambda library: make(library, name, FEAT, OUT, **options))


def sparse(given, layout, values=None):
    values = given.new_ones(given.shape[1]).double() if values is None else values
    A = torch.sparse_coo_tensor(given.flip(0), values, (N, N)).coalesce()
    if layout == "coo":
        return A
    if layout != "SparseTensor":
        return getattr(A, f"to_sparse_{layout}")()
    A = A.to_sparse_csr()
    return SparseTensor(A.crow_indices(), A.col_indices(), A.values(), (N, N))


LSTM = {"aggr_kwargs": {"aggrs_kwargs": [{}, {"in_channels": FEAT, "out_channels": FEAT}]}}
REDUCTIONS = [
    *(("SAGEConv", aggr) for aggr in ("mean", "max", ["mean", "max"], ["add"], "softmax")),
    *(("SAGEConv", aggr) for aggr in (["median", "lstm"], pyg.aggr.MeanAggregation())),
    *(("GINConv", "max"), ("GINConv", pyg.aggr.MaxAggregation())),
    ("SAGEConv", pyg.aggr.SoftmaxAggregation()),
]


@pytest.mark.parametrize("layout", ["coo", "csr", "SparseTensor"])
@pytest.mark.parametrize(("name", "aggr"), REDUCTIONS, ids=str)
def test_values_of_a_sparse_tensor_count_where_they_do_in_pyg(name, aggr, layout):
    """Those of torch_sparse are dropped."""
    mine, theirs = both(name, aggr=aggr, **(LSTM if "lstm" in str(aggr) else {}))
    mine.load_state_dict(theirs.state_dict())
    given, x = edges(), numbers(N, FEAT)
    A = sparse(given, layout, numbers(given.shape[1], seed=4).abs())
    B = given[:, (given[1] * N + given[0]).argsort()] if layout == "SparseTensor" else A
    assert_same(mine(x, A), theirs(x, B))
    assert_same(mine((x, x), A), theirs((x, x), B))


@pytest.mark.parametrize("kind", ["edges", "graph"])
def test_an_lstm_takes_edges_in_any_order(kind):
    mine, theirs = both("SAGEConv", aggr="lstm")
    mine.load_state_dict(theirs.state_dict())
    given, x = edges(), numbers(N, FEAT)
    w = numbers(given.shape[1], seed=4)
    order = given[1].argsort(stable=True)
    assert not order.equal(torch.arange(len(order)))
    graph = Graph.from_edge_index(given, num_nodes=N) if kind == "graph" else given
    assert_same(mine(x, graph), theirs(x, given[:, order]))
    assert_same(mine(x, graph, edge_weight=w), mine(x, given[:, order], edge_weight=w[order]))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["GCNConv", "SGConv"])
def test_the_first_graph_serves_all_calls_of_a_cached_layer(name, weighted):
    mine, theirs = both(name, cached=True)
    x, weight = numbers(N, FEAT), numbers(edges().shape[1], seed=5).abs()
    for given in (edges(), edges(3), edges()):
        for w in (weight, None) if weighted else (None, weight):
            assert_same(mine(x, given, w), theirs(x, given, w))
        weight.mul_(weight)  # which nothing cached sees
    copied = copy.deepcopy(mine)
    assert_same(copied(x, edges(3)), theirs(x, edges(3)))
    for layer in (mine, theirs):
        torch.manual_seed(3)
        layer.reset_parameters()
    assert_same(mine(x, edges(3)), theirs(x, edges(3)))
    for layer in both(name, cached=True):
        traced = weight.clone().requires_grad_()
        layer(x, edges(), traced).sum().backward()
        assert traced.grad.any()


@pytest.mark.covering("name", "options", "aggr", "layout", one_in=3)
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize(
    "aggr", ["sum", "mean", "max", "min", pyg.aggr.MeanAggregation(), pyg.aggr.MaxAggregation()]
)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("GCNConv", {}), ("GCNConv", {"improved": True}), ("GCNConv", {"cached": True})),
        *(("GCNConv", {"add_self_loops": False}), ("GCNConv", {"normalize": False})),
        *(("SGConv", {}), ("SGConv", {"cached": True}), ("SGConv", {"add_self_loops": False})),
        *(("TAGConv", {}), ("TAGConv", {"normalize": False})),
        *(("SSGConv", {}), ("MixHopConv", {"powers": [2]})),
        ("GraphConv", {}),
    ],
    ids=str,
)
def test_sparse_tensors_with_loops_get_those_that_pyg_adds(name, options, aggr, layout):
    given = distinct()
    for values in (None, numbers(given.shape[1], seed=4).abs() + 0.1):
        A, steps = sparse(given, layout, values), []
        layers = both(name, aggr=aggr, **options)
        for layer in layers:
            x = numbers(N, FEAT).requires_grad_()
            layer(x, A)
            y = layer(x, A)
            wanted = [*layer.parameters(), *([] if "cached" in options else [x])]
            loss = (y * numbers(N, OUT, seed=6)).sum()
            steps.append([y, *torch.autograd.grad(loss, wanted)])
        assert_same(*steps)
        if not options:
            batch = numbers(2, N, FEAT)
            assert_same(layers[0](batch, A), torch.stack([layers[1](one, A) for one in batch]))


def test_samples_and_maxk_of_a_sparse_tensor_with_loops_get_the_same_ones():
    given = torch.cat([edges(), torch.tensor([[0, 3], [0, 3]])], 1)
    A, x = sparse(given, "csr", numbers(given.shape[1], seed=4).abs()), numbers(N, FEAT)
    for options in ({"k": FEAT}, {"sample": N, "training_sample": N}):
        mine, theirs = both("GCNConv")
        made = nn.GCNConv(FEAT, OUT, **options).double()
        made.load_state_dict(mine.state_dict())
        assert_same(made(x, A), theirs(x, A))


def test_a_cached_layer_keeps_a_sparse_tensor_apart_and_trains():
    mine, _ = both("GCNConv")
    mine.cached = True
    x, given = numbers(N, FEAT), edges()
    A = sparse(given, "SparseTensor")
    assert_same(mine(x, given), mine(x, A))
    assert mine._cached_edge_index is not None
    assert mine._cached_adj_t is not None
    w = torch.ones(given.shape[1], dtype=torch.float64, requires_grad=True)
    mine.reset_parameters()
    for _ in range(2):  # PyG's breaks at the second backward
        mine(x, given, w).sum().backward()
    assert w.grad.any()
    assert list(mine.state_dict()) == ["bias", "lin.weight"]


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_gcn_takes_sparse_features(layout):
    mine, theirs = both("GCNConv")
    dense = numbers(N, FEAT).relu()
    x = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()
    steps = []
    for layer, given in ((mine, x), (theirs, dense)):
        y = layer(given, edges())
        loss = (y * numbers(*y.shape, seed=3)).sum()
        steps.append([y, *torch.autograd.grad(loss, layer.lin.weight)])
    assert_same(*steps)


@pytest.mark.parametrize("name", ["GCNConv", "SGConv", "TAGConv", "SAGEConv", "GINConv"])
def test_messages_flow_upstream_along_every_graph_but_a_sparse_one(name):
    (mine, _), x, given = both(name, flow=UPSTREAM), numbers(N, FEAT), edges()
    expected = mine(x, given)  # that of PyG's, as in ``test_pyg_arguments``
    mine.flow = "source_to_target"
    assert_same(mine(x, given.flip(0)), expected)
    mine.flow = "up"
    with pytest.raises(ShapeError, match="flow is 'up': give 'source_to_target' or"):
        mine(x, given)
    mine.flow = UPSTREAM
    with pytest.raises(UnsupportedError, match=r"a sparse matrix, .* give its transpose"):
        mine(x, sparse(given, "csr"))


@pytest.mark.parametrize("loops", [[], [0, 3], [0, 3, 3]])
def test_ends_of_edges_are_asked_for_again_only_where_a_vertex_has_several_loops(
    monkeypatch, loops
):
    calls = note_calls(monkeypatch, _loops, "rows_and_columns")
    given = torch.cat([edges(), torch.tensor([loops, loops]).long()], 1)
    graph = Graph.from_edge_index(given, num_nodes=N)
    mine, theirs = both("GCNConv")
    for _ in range(2):
        assert_same(mine(numbers(N, FEAT), graph), theirs(numbers(N, FEAT), given))
    assert len(calls) == (2 if len(loops) == 3 else 1)


def test_of_several_loops_the_last_counts_as_in_pyg():
    mine, theirs = both("GCNConv")
    given = torch.tensor([[0, 1, 1, 0, 2, 1], [0, 1, 1, 0, 1, 1]])
    x, w = numbers(N, FEAT), numbers(6, seed=4).abs().requires_grad_()
    assert_same(mine(x, given), theirs(x, given))
    assert_same(mine(x, given, w), theirs(x, given, w))
    own = Graph.from_edge_index(given, w.detach(), num_nodes=N)
    assert_same(mine(x, own), theirs(x, given, w))
    for form in ({}, {"k": OUT}, {"training_sample": 9}):
        layer = make(nn, "GCNConv", FEAT, OUT, **form).double()
        for weight in (w, (w * torch.tensor([0, 0, 1, 1, 1, 1])).detach().requires_grad_()):
            (found,) = torch.autograd.grad(layer(x, given, weight).square().sum(), weight)
            # Vertex 0 has loops alone, of which the last weighs 1, whatever its weight.
            assert (found.abs() < 1e-12).tolist() == [True, True, True, True, False, False], form


@pytest.mark.parametrize("shape", [(0, N, FEAT), (2, 0, N, FEAT)])
def test_gine_takes_a_batch_of_none(shape):
    x, given = numbers(*shape).requires_grad_(), edges()
    gine = nn.GINEConv(Linear(FEAT, OUT)).double()
    y = gine(x, given, numbers(given.shape[1], FEAT))
    assert y.shape == (*shape[:-1], OUT)
    y.sum().backward()
    assert x.grad.shape == shape


def test_calls_that_cannot_be_are_refused():
    x, given = numbers(N, FEAT), edges()
    e, kinds = numbers(given.shape[1], FEAT), ("GCN", "SG", "SAGE", "TAG", "GINE")
    gcn, sg, sage, tag, gine = (make(nn, f"{kind}Conv", FEAT, OUT).double() for kind in kinds)
    choosing = nn.GCNConv(FEAT, OUT, k=2).double()
    plain = nn.GCNConv(FEAT, OUT, normalize=False).double()
    for layer, args, error, text in (
        (gcn, ((x, x), given), ShapeError, "x is a tuple but the layer takes one"),
        (choosing, (x[None], given), UnsupportedError, "MaxK chooses from the row"),
        (sg, (x.to_sparse(), given), UnsupportedError, "x has layout"),
        (sage, (x, given, e[:, 0]), DtypeError, "edge weights by name, edge_w"),
        (plain, (x, given, e[:, :1]), ShapeError, "edge_weight has shape .* one weight for each"),
        (tag, (x, given, e), ShapeError, "one weight for each edge"),
        (gine, (x, given), DtypeError, "edge_attr is None: GINEConv adds"),
        (gine, (x, given, e[:, 0]), ShapeError, r"edge_attr has shape .* edge_attr\[:, None"),
        (gine, (x, given, e[:, :2]), ShapeError, "or the layer edge_dim=2, which maps them"),
        (gine, (x, given, e.float()), DtypeError, "edge_attr is torch.float32 but"),
        (gine, (x, given, e[1:]), ShapeError, "edge_attr has shape .* stores"),
        (gine, (x, given, e.tolist()), DtypeError, "edge_attr is a list: give a torch.Tensor"),
    ):
        with pytest.raises(error, match=text):
            layer(*args)


def test_aggregations_that_pyg_alone_has_need_pyg(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.nn.resolver", None)
    says = r"aggr is 'lstm', which no kernel computes: give one of .* pip install torch-geometric"
    with pytest.raises(UnsupportedError, match=says):
        nn.SAGEConv(FEAT, OUT, aggr="lstm")


FLAGS = [
    (kind, name)
    for kind, layer in vars(pyg).items()
    if kind in nn.__all__ and isinstance(layer, type)
    for name, one in inspect.signature(layer.__init__).parameters.items()
    if isinstance(one.default, bool) or name == "add_self_loops"
]


@pytest.mark.parametrize(("kind", "flag"), FLAGS)
@pytest.mark.parametrize("value", [3, "no", None, torch.tensor(True)], ids=repr)
def test_a_flag_is_true_or_false(kind, flag, value):
    if kind == "GCNConv" and flag == "add_self_loops" and value is None:
        assert nn.GCNConv(FEAT, OUT, add_self_loops=None).add_self_loops
        return
    with pytest.raises(DtypeError, match=f"^{flag} is .*: give True or False.$"):
        make(nn, kind, FEAT, OUT, **{flag: value})


def test_features_of_edges_and_of_other_widths_are_refused_by_their_names():
    x, given, wide = numbers(N, FEAT), edges(), numbers(N, OUT)
    attr = numbers(given.shape[1], 3)
    gated, of_edges = (make(nn, "ResGatedGraphConv", FEAT, OUT, edge_dim=k) for k in (None, 3))
    pair = make(nn, "EdgeConv", FEAT, OUT).double()
    for call, error, text in (
        (lambda: gated.double()(x, given, attr), ShapeError, "the layer has edge_dim=None and the"),
        (lambda: of_edges.double()(x, given), ShapeError, "edge_attr has shape None but the layer"),
        (lambda: of_edges(x, given, attr[1:]), ShapeError, "edge_attr has shape .*, 3. but"),
        (lambda: of_edges(x, given, attr.tolist()), DtypeError, "edge_attr is a list: give"),
        (lambda: pair((x, None), given), DtypeError, r"x\[1\] is None: a message is of both"),
        (lambda: pair((x, wide), given), ShapeError, r"x\[1\] has 4 features but x\[0\] has 5"),
        (
            lambda: make(nn, "GatedGraphConv", 2, 2).double()(x, given),
            ShapeError,
            "takes 2 at most",
        ),
    ):
        with pytest.raises(error, match=text):
            call()
    with pytest.raises(UnsupportedError, match="combine_root is 'self_loop' beside features of"):
        nn.SimpleConv(combine_root="self_loop")((x, x.clone()), given)


def test_a_histogram_counts_the_vertices_of_all_batches():
    batches = [Data(edge_index=edges(seed), num_nodes=N) for seed in (1, 2, 3)]
    counts = [batch.edge_index[1].bincount(minlength=N).bincount(minlength=N) for batch in batches]
    found = nn.PNAConv.get_degree_histogram(batches)
    assert torch.equal(found, sum(counts)[: len(found)])
    assert torch.equal(found, pyg.PNAConv.get_degree_histogram(batches))


# PyG's other graphs in the place of ours: ``EdgeIndex`` and ``adj_t``, remembered like others

LAYERS = ["GCNConv", "SAGEConv", "GATConv", "GATv2Conv", "AGNNConv", "GINConv", "SGConv", "TAGConv"]
#: Of which PyG's ``gcn_norm`` adds a loop to each vertex of a torch's sparse tensor.
LOOPED = ["GCNConv", "SGConv", "APPNP", "SSGConv", "GCN2Conv", "MixHopConv", "FAConv"]
LAYERS += [*LOOPED[2:], "LGConv", "ChebConv", "ARMAConv", "ClusterGCNConv", "GraphConv", "LEConv"]
LAYERS += ["SimpleConv", "GatedGraphConv", "ResGatedGraphConv", "EdgeConv", "PNAConv"]
#: Layers that read the features of the first one.
FIRST = ("FAConv", "GCN2Conv")


def sorted_by(order, device="cpu", *, cached=False, sizes=(N, N)):
    given = distinct(device)
    given = given[:, torch.argsort(given[0 if order == "row" else 1], stable=True)]
    found = EdgeIndex(given, sort_order=order, sparse_size=sizes)
    return found.fill_cache_() if cached else found


LAYOUTS = ("coo", "csr", "csc")
GRAPHS = {
    "unsorted": lambda device: EdgeIndex(distinct(device), sparse_size=(N, N)),
    "int32": lambda device: distinct(device).int(),
    "without sizes": lambda device: sorted_by("col", device, sizes=(None, None)),
    "by targets": lambda device: sorted_by("col", device),
    "by targets, cached": lambda device: sorted_by("col", device, cached=True),
    "by sources": lambda device: sorted_by("row", device),
    "by sources, cached": lambda device: sorted_by("row", device, cached=True),
    **{name: lambda device, name=name: sparse(distinct(device), name) for name in LAYOUTS},
    "SparseTensor": lambda device: SparseTensor(  # without values
        *sparse(distinct(device), "SparseTensor").csr()[:2], None, (N, N)
    ),
}


def layer_of(name, device):
    torch.manual_seed(0)
    return make(nn, name, FEAT, OUT).double().to(device)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_every_layer_takes_every_graph_of_pygs(device, kind, name):
    """To torch's sparse tensors GCN and SG add a loop beside those that they hold, as PyG does."""
    x, given = [numbers(N, FEAT, seed=1, device=device)], distinct(device)
    layer, other = (layer_of(name, device) for _ in range(2))
    more = {"x_0": numbers(N, FEAT, seed=8, device=device)} if name in FIRST else {}
    if name in LOOPED and kind in LAYOUTS:
        other.add_self_loops = False
        given = torch.cat([given, torch.arange(N, device=device).expand(2, N)], 1)
    expected = outcome(other, x, Graph.from_edge_index(given, num_nodes=N), more)
    assert_same(outcome(layer, x, GRAPHS[kind](device), more), expected)


@pytest.mark.parametrize("kind", GRAPHS)
def test_functions_take_them_and_graphs_are_remembered(device, kind):
    given, x = GRAPHS[kind](device), numbers(N, FEAT, device=device)
    graph = as_graph(given, x)
    assert graph.shape == (N, N)
    torch.testing.assert_close(spmm(given, x), spmm(graph, x))
    assert edge_softmax(given, x.new_zeros(graph.nnz)).shape == (graph.nnz,)
    assert as_graph(given, x) is graph
    assert is_graph(given)
    assert not is_graph(GRAPHS[kind](device))
    if kind in ("by targets", "unsorted", "csr", "coo", "csc"):
        kept = weakref.ref(graph)
        del given, graph
        gc.collect()
        assert kept() is None  # a graph goes with its tensor


def test_graphs_that_change_in_place_make_others(device):
    given, x = sparse(distinct(device), "csr"), numbers(N, FEAT, device=device)
    before = spmm(given, x)
    given.values().mul_(2)
    torch.testing.assert_close(spmm(given, x), 2 * before)
    given = EdgeIndex(distinct(device))
    graph = as_graph(given, x)
    given.as_tensor()[0, 0] = 0
    assert as_graph(given, x) is not graph


@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("cached", [False, True])
def test_what_is_sorted_is_not_sorted_again(monkeypatch, order, cached):
    """By targets it is CSR, by sources CSC; both ways one sort is left, that of the transpose."""
    calls = note_calls(monkeypatch, convert, "_by_counting")
    searched = note_calls(monkeypatch, primitives, "pointers")
    graph = as_graph(sorted_by(order, cached=cached), torch.zeros(N, 1))
    assert graph.structure.format == {"col": "csr", "row": "csc"}[order]
    _ = graph.csr
    assert len(calls) == (order == "row")
    _ = graph.csc
    assert len(calls) == 1
    assert len(searched) == (not cached)
    weights = torch.arange(float(graph.nnz))
    kept = Graph.from_edge_index(sorted_by(order), weights)
    for A in (kept.csr, kept.csc, kept.structure):
        A.check()
    assert (kept.csr.toarray() == kept.csc.toarray()).all()
    assert kept.csr.data.tolist() == weights.numpy()[kept.csr_perm].tolist()
    assert kept.csc.data.tolist() == kept.csr.data[kept.csc_perm].tolist()


def test_an_edge_index_that_contradicts_itself_is_refused_or_read_anew():
    given = EdgeIndex(torch.tensor([[0, 1, 2], [2, 0, 1]]), sparse_size=(3, 3))
    given._sort_order = sorted_by("col")._sort_order
    with pytest.raises(FormatError, match="sort_order='col' but its targets do not ascend"):
        Graph.from_edge_index(given)
    given = EdgeIndex(torch.tensor([[0, 1, 2], [0, 0, 1]]), sparse_size=(3, 3), sort_order="col")
    given.fill_cache_()
    given.as_tensor()[1, 1] = 1  # its pointers are of other edges now
    assert Graph.from_edge_index(given).csr.indptr.tolist() == [0, 1, 3, 3]


def test_values_with_gradients_are_refused():
    given = sparse(distinct(), "csr").requires_grad_()
    with pytest.raises(UnsupportedError, match="requires grad"):
        spmm(given, torch.zeros(N, 1))


@pytest.mark.parametrize("layer", [nn.SAGEConv, nn.GATConv])
def test_entries_of_an_adj_t_that_repeat_are_added_up(layer):
    repeated = torch.sparse_coo_tensor(torch.tensor([[1, 1, 1], [0, 0, 2]]), torch.ones(3), (3, 3))
    conv, x = layer(4, 2), torch.randn(3, 4)
    torch.testing.assert_close(conv(x, repeated), conv(x, repeated.coalesce()))
