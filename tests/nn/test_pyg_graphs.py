"""PyG's other graphs in the place of ours: ``EdgeIndex`` and ``adj_t``, remembered like others."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric", reason="torch-geometric is not installed")

from pyg_cases import make  # noqa: E402
from torch_geometric import EdgeIndex  # noqa: E402

from sparsefmt import FormatError, Graph, UnsupportedError, nn  # noqa: E402
from sparsefmt.autograd import as_graph, edge_softmax, spmm  # noqa: E402
from sparsefmt.formats import primitives  # noqa: E402
from sparsefmt.model.state import is_graph  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*(beta state|invariant checks):UserWarning"),
]

N, WIDTH, EDGES = 11, 4, 50
LAYERS = ("GCNConv", "SAGEConv", "GATConv", "GATv2Conv", "AGNNConv", "GINConv", "SGConv", "TAGConv")


class SparseTensor:
    """What torch_sparse.SparseTensor has that is read here."""

    def __init__(self, indptr, indices, value, sizes, looped=False):
        self.parts, self.sizes, self.looped = (indptr, indices, value), sizes, looped

    def csr(self):
        return self.parts

    def sparse_sizes(self):
        return self.sizes

    def set_diag(self):
        return SparseTensor(*self.parts, self.sizes, looped=True)

    def set_value(self, value, layout):
        assert layout == "coo"
        return self.looped, value


def distinct(device="cpu"):
    """Distinct ones, so that every layout holds them."""
    generator = torch.Generator().manual_seed(3)
    place = torch.randperm(N * N, generator=generator)[:EDGES]
    return torch.stack([place // N, place % N]).to(device)


def sorted_by(order, device="cpu", *, cached=False, sizes=(N, N)):
    given = distinct(device)
    given = given[:, torch.argsort(given[0 if order == "row" else 1], stable=True)]
    found = EdgeIndex(given, sort_order=order, sparse_size=sizes)
    return found.fill_cache_() if cached else found


def adj_t(layout, device="cpu"):
    source, target = distinct(device)
    ones = torch.ones(EDGES, device=device)
    A = torch.sparse_coo_tensor(torch.stack([target, source]), ones, (N, N)).coalesce()
    if layout == "SparseTensor":
        A = A.to_sparse_csr()
        return SparseTensor(A.crow_indices(), A.col_indices(), None, (N, N))
    return A if layout == "coo" else getattr(A, f"to_sparse_{layout}")()


GRAPHS = {
    "unsorted": lambda device: EdgeIndex(distinct(device), sparse_size=(N, N)),
    "int32": lambda device: distinct(device).int(),
    "without sizes": lambda device: sorted_by("col", device, sizes=(None, None)),
    "by targets": lambda device: sorted_by("col", device),
    "by targets, cached": lambda device: sorted_by("col", device, cached=True),
    "by sources": lambda device: sorted_by("row", device),
    "by sources, cached": lambda device: sorted_by("row", device, cached=True),
    **{name: lambda device, name=name: adj_t(name, device) for name in ("coo", "csr", "csc")},
    "SparseTensor": lambda device: adj_t("SparseTensor", device),
}


def layer_of(name, device):
    torch.manual_seed(0)
    return make(nn, name, WIDTH, 3).to(device)


def gradients(layer, x, graph):
    y = layer(x, graph)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    return [y, *torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()])]


def expected_layer_and_edges(name, kind, device):
    """To torch's sparse tensors GCN and SG add a loop beside those that they hold, as PyG does."""
    layer, given = layer_of(name, device), distinct(device)
    if name in ("GCNConv", "SGConv") and kind in ("coo", "csr", "csc"):
        layer.add_self_loops = False
        given = torch.cat([given, torch.arange(N, device=device).expand(2, N)], 1)
    return layer, given


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_every_layer_takes_every_graph_of_pygs(device, kind, name):
    x = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(1))
    x = x.to(device).requires_grad_()
    layer = layer_of(name, device)
    other, given = expected_layer_and_edges(name, kind, device)
    expected = gradients(other, x, Graph.from_edge_index(given, num_nodes=N))
    found = gradients(layer, x, GRAPHS[kind](device))
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", GRAPHS)
def test_functions_take_them_and_graphs_are_remembered(device, kind):
    given, x = GRAPHS[kind](device), torch.randn(N, WIDTH, device=device)
    graph = as_graph(given, x)
    assert graph.shape == (N, N)
    torch.testing.assert_close(spmm(given, x), spmm(graph, x))
    assert edge_softmax(given, x.new_zeros(EDGES)).shape == (EDGES,)
    assert as_graph(given, x) is graph
    assert is_graph(given)
    assert not is_graph(GRAPHS[kind](device))
    if kind in ("by targets", "unsorted", "csr", "coo", "csc"):
        kept = weakref.ref(graph)
        del given, graph
        gc.collect()
        assert kept() is None  # a graph goes with its tensor


def test_graphs_that_change_in_place_make_others(device):
    given, x = adj_t("csr", device), torch.randn(N, WIDTH, device=device)
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
    from sparsefmt.formats import convert

    calls = []
    sort = convert._by_counting
    monkeypatch.setattr(convert, "_by_counting", lambda *a: calls.append(a) or sort(*a))
    searched = []
    pointers = primitives.pointers
    monkeypatch.setattr(
        primitives, "pointers", lambda *a, **k: searched.append(a) or pointers(*a, **k)
    )
    graph = as_graph(sorted_by(order, cached=cached), torch.zeros(N, 1))
    assert graph.structure.format == {"col": "csr", "row": "csc"}[order]
    _ = graph.csr
    assert len(calls) == (order == "row")
    _ = graph.csc
    assert len(calls) == 1
    assert len(searched) == (not cached)
    weights = torch.arange(float(EDGES))
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
    given = adj_t("csr").requires_grad_()
    with pytest.raises(UnsupportedError, match="requires grad"):
        spmm(given, torch.zeros(N, 1))


@pytest.mark.parametrize("layer", [nn.SAGEConv, nn.GATConv])
def test_entries_of_an_adj_t_that_repeat_are_added_up(layer):
    repeated = torch.sparse_coo_tensor(torch.tensor([[1, 1, 1], [0, 0, 2]]), torch.ones(3), (3, 3))
    conv, x = layer(4, 2), torch.randn(3, 4)
    torch.testing.assert_close(conv(x, repeated), conv(x, repeated.coalesce()))
