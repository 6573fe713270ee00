"""Graphs of DGL and NetworkX: edges run from columns to rows."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsefmt import COO, CSC, CSR, SGT
from sparsefmt.errors import DtypeError, FormatError, ShapeError, UnsupportedError
from sparsefmt.interop import from_dgl, from_networkx, to_dgl, to_networkx
from sparsefmt.testing import cbsr, coo, csc, csr, sgt, stored_entries

networkx = pytest.importorskip("networkx")
torch = pytest.importorskip("torch")

FORMATS = {"coo": COO, "csr": CSR, "csc": CSC, "sgt": SGT}
GRAPHS = (networkx.Graph, networkx.DiGraph, networkx.MultiGraph, networkx.MultiDiGraph)

# NetworkX


def test_an_edge_is_an_entry_at_row_target_and_column_source():
    """Nodes are counted in the order of the graph."""
    G = networkx.DiGraph([("a", "b"), ("c", "b")])
    A = from_networkx(G)
    assert list(G.nodes) == ["a", "b", "c"]
    assert stored_entries(A) == [(1, 0, 1.0), (1, 2, 1.0)]
    assert A.data is None
    G = networkx.DiGraph()
    G.add_nodes_from(["z", "a", 5, (1, 2)])
    G.add_edge((1, 2), "a", weight=3)
    A = from_networkx(G)
    assert A.shape == (4, 4)
    assert stored_entries(A) == [(1, 3, 3.0)]


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", [None, "float16", "float32", "float64"])
def test_graphs_come_in_every_format(kind, format, index_dtype, dtype):
    G = kind()
    G.add_weighted_edges_from([(0, 1, 0.5), (1, 1, 2.0), (3, 0, -4.0)])
    A = from_networkx(G, format=format, index_dtype=index_dtype, dtype=dtype)
    assert isinstance(A, FORMATS[format])
    assert (A.index_dtype, A.dtype) == (index_dtype, dtype or "float64")
    assert np.array_equal(A.toarray("float64"), networkx.to_numpy_array(G).T)


def test_an_undirected_graph_is_symmetric_and_a_self_loop_one_entry():
    G = networkx.Graph([(0, 1), (1, 1), (1, 2)])
    A = from_networkx(G)
    assert stored_entries(A) == [(1, 0, 1.0), (1, 1, 1.0), (2, 1, 1.0), (0, 1, 1.0), (1, 2, 1.0)]
    X = A.toarray()
    assert np.array_equal(X, X.T)


@pytest.mark.parametrize("kind", [networkx.MultiGraph, networkx.MultiDiGraph])
def test_parallel_edges_stay_apart(kind):
    G = kind()
    G.add_weighted_edges_from([("u", "v", 1), ("u", "v", 2)])
    A = from_networkx(G)
    assert A.nnz == (4 if kind is networkx.MultiGraph else 2)
    assert A.data[:2].tolist() == [1.0, 2.0]


def test_edges_without_the_attribute_weigh_one():
    G = networkx.DiGraph([(0, 1), (1, 2)])
    G.edges[1, 2]["weight"] = 0.5
    assert from_networkx(G).data.tolist() == [1.0, 0.5]
    assert from_networkx(G, weight="cost").data is None
    assert from_networkx(G, weight=None).data is None
    G.edges[0, 1]["cost"] = 7
    assert from_networkx(G, weight="cost").data.tolist() == [7.0, 1.0]
    for value in (True, 3, 2.5, np.float32(0.5), np.int8(-3)):  # numbers of any kind
        G.edges[0, 1]["weight"] = value
        assert from_networkx(G).data.tolist() == [float(value), 0.5]


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("n", [0, 1, 3])
def test_graphs_without_edges(kind, n):
    A = from_networkx(networkx.empty_graph(n, create_using=kind))
    assert (A.shape, A.nnz, A.data) == ((n, n), 0, None)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_matrix_becomes_a_directed_graph(format, weighted, dtype):
    pytest.importorskip("ml_dtypes")
    data = np.array([0.5, 0.0, -2.0]).astype(dtype) if weighted else None
    A = COO(np.array([2, 0, 1]), np.array([0, 0, 2]), data, shape=(4, 4)).asformat(format)
    G = to_networkx(A)
    assert type(G) is networkx.DiGraph
    assert list(G.nodes) == [0, 1, 2, 3]
    weight = {"weight"} if weighted else set()
    assert all(attributes.keys() == weight for *_, attributes in G.edges(data=True))
    found = [(v, u, w) for u, v, w in G.edges(data="weight", default=1.0)]
    assert sorted(found) == sorted(stored_entries(A))
    assert all(type(w) is float for *_, w in found)


def test_the_attribute_has_the_wanted_name_and_parallel_edges_come_back():
    A = COO([0], [1], [2.0], shape=(2, 2))
    assert to_networkx(A, weight="cost").edges[1, 0] == {"cost": 2.0}
    assert from_networkx(to_networkx(A, weight="cost"), weight="cost").data.tolist() == [2.0]
    A = COO([0, 0], [1, 1], [1.0, 2.0], shape=(2, 2))  # entries that repeat
    G = to_networkx(A, multigraph=True)
    assert type(G) is networkx.MultiDiGraph
    assert stored_entries(from_networkx(G)) == stored_entries(A)


distinct = {"rectangular": False, "duplicates": False}
structures = coo(rectangular=False) | csr(rectangular=False) | csc(rectangular=False)


@given(A=structures | sgt(**distinct))
def test_round_trip_keeps_every_entry(A):
    B = from_networkx(to_networkx(A, multigraph=A.format != "sgt"))
    assert B.shape == A.shape
    assert sorted(stored_entries(B)) == sorted(stored_entries(A))


@given(A=cbsr(shape=(4, 4)))
def test_features_become_graphs_too(A):
    assert to_networkx(A).number_of_edges() == A.nnz


@given(
    kind=st.sampled_from(GRAPHS),
    pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(-9, 9))),
)
def test_matrices_agree_with_those_of_networkx(kind, pairs):
    G = kind()
    G.add_nodes_from(range(7))
    G.add_weighted_edges_from(pairs)
    assert np.array_equal(from_networkx(G).toarray(), networkx.to_numpy_array(G).T)


@pytest.mark.parametrize(
    ("weight", "options", "error", "message"),
    [
        ("heavy", {}, DtypeError, "edge_weight is <U"),
        (1j, {}, UnsupportedError, "edge_weight is complex128"),
        (object(), {}, DtypeError, "edge_weight holds Python objects"),
        ([1.0, 2.0], {}, DtypeError, "'weight' of some edges is not one number"),
        (2**53 + 1, {}, DtypeError, "cannot hold exactly"),
        (2**70, {}, DtypeError, "edge_weight holds Python objects"),
        (1.5, {"format": "bsr"}, UnsupportedError, "format is 'bsr'"),
        (1.5, {"index_dtype": "int8"}, DtypeError, "index_dtype is int8"),
        (1.5, {"dtype": "int8"}, DtypeError, "dtype is int8"),
    ],
)
def test_weights_and_options_are_checked(weight, options, error, message):
    G = networkx.DiGraph([(0, 1), (1, 2)])
    G.edges[0, 1]["weight"] = weight
    with pytest.raises(error, match=message):
        from_networkx(G, **options)


@pytest.mark.parametrize(
    ("A", "error", "message"),
    [
        (COO([0], [1], shape=(2, 3)), ShapeError, r"to_networkx: A has shape \(2, 3\)"),
        (COO([0, 0], [1, 1], shape=(2, 2)), FormatError, r"2 entries in 1 cells: use multigraph"),
    ],
)
def test_to_networkx_refuses(A, error, message):
    with pytest.raises(error, match=message):
        to_networkx(A)


# DGL


class DGLGraph:
    """What is read of a dgl.DGLGraph with one edge type; DGL's rows are sources."""

    def __init__(self, source, target, n_source, n_target, *, bipartite=False, edge_ids=True):
        self.ends = (torch.as_tensor(source), torch.as_tensor(target))
        self.sizes = (n_source, n_target)
        self.canonical_etypes = [("user", "plays", "game") if bipartite else ("_N", "_E", "_N")]
        self.edata = {}
        self.edge_ids = edge_ids

    def num_src_nodes(self, ntype):
        assert ntype == self.canonical_etypes[0][0]
        return self.sizes[0]

    def num_dst_nodes(self, ntype):
        assert ntype == self.canonical_etypes[0][2]
        return self.sizes[1]

    def edges(self, order):
        assert order == "eid"
        return self.ends

    def adj_tensors(self, fmt):
        major, minor = self.ends if fmt == "csr" else self.ends[::-1]
        n_major = self.sizes[0 if fmt == "csr" else 1]
        edge = torch.argsort(major, stable=True)
        indptr = torch.zeros(n_major + 1, dtype=major.dtype)
        indptr[1:] = torch.cumsum(torch.bincount(major, minlength=n_major), 0)
        indices = minor[edge]
        if not self.edge_ids:
            assert torch.equal(edge, torch.arange(len(edge)))
            edge = edge[:0]
        self.last = indptr, indices, edge
        return self.last


def dgl_graph(**options):
    """0 -> 1, 2 -> 1, 1 -> 0, 2 -> 1 again."""
    g = DGLGraph([0, 2, 1, 2], [1, 1, 0, 1], 3, 3, **options)
    g.edata["w"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return g


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("weight", ["w", None])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_a_dgl_graph_comes_in_every_format(format, weight, dtype, index_dtype):
    A = from_dgl(dgl_graph(), weight=weight, format=format, dtype=dtype, index_dtype=index_dtype)
    assert isinstance(A, FORMATS[format])
    assert (A.dtype, A.index_dtype) == (dtype if weight else None, index_dtype)
    values = [1.0, 2.0, 3.0, 4.0] if weight else [1.0] * 4
    expected = list(zip([1, 1, 0, 1], [0, 2, 1, 2], values, strict=True))
    assert sorted(stored_entries(A)) == sorted(expected)
    assert (A.data is None) == (weight is None)
    assert format != "coo" or stored_entries(A) == expected


@pytest.mark.parametrize("format", ["coo", "csr", "csc"])
def test_a_bipartite_dgl_graph_has_destinations_as_rows(format):
    g = DGLGraph([0, 3, 1], [1, 0, 1], 4, 2, bipartite=True)
    A = from_dgl(g, format=format)
    assert A.shape == (2, 4)
    assert sorted(stored_entries(A)) == [(0, 3, 1.0), (1, 0, 1.0), (1, 1, 1.0)]


def test_edges_of_a_dgl_graph_are_shared_and_in_order_without_ids():
    g = dgl_graph()
    A = from_dgl(g, weight="w")
    for ours, theirs in zip((A.col, A.row, A.data), (*g.ends, g.edata["w"]), strict=True):
        assert ours.ctypes.data == theirs.data_ptr()
    g = DGLGraph([2, 0, 1], [0, 1, 1], 3, 3, edge_ids=False)
    g.edata["w"] = torch.tensor([1.0, 2.0, 3.0])
    A = from_dgl(g, weight="w", format="csr")
    assert stored_entries(A) == [(0, 2, 1.0), (1, 0, 2.0), (1, 1, 3.0)]
    assert A.data.ctypes.data == g.edata["w"].data_ptr()


@pytest.mark.parametrize("format", ["csr", "csc"])
def test_the_arrays_that_dgl_keeps_are_shared(format):
    g = dgl_graph()
    A = from_dgl(g, format=format)
    assert A.indptr.ctypes.data == g.last[0].data_ptr()
    assert A.indices.ctypes.data == g.last[1].data_ptr()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": "v"}, FormatError, r"weight is 'v' but g\.edata holds \['w'\]"),
        ({"edata": torch.ones(4, 1)}, ShapeError, r"shape \(4, 1\), expected \(4,\)"),
        ({"edata": torch.ones(3)}, ShapeError, r"shape \(3,\), expected \(4,\)"),
        ({"edata": torch.ones(4, requires_grad=True)}, UnsupportedError, "requires grad"),
        ({"edata": torch.ones(4) * 1j}, UnsupportedError, "complex64"),
        ({"etypes": []}, UnsupportedError, "g has 0 edge types"),
        ({"etypes": [1, 2]}, UnsupportedError, r"g has 2 edge types: .*from_dgl\(g\[etype\]\)"),
    ],
)
@pytest.mark.parametrize("format", ["coo", "csr"])
def test_a_dgl_graph_is_checked(change, error, message, format):
    g = dgl_graph()
    g.edata["w"] = change.get("edata", g.edata["w"])
    g.canonical_etypes = change.get("etypes", g.canonical_etypes)
    with pytest.raises(error, match=message):
        from_dgl(g, weight=change.get("weight", "w"), format=format)


@pytest.fixture
def dgl(monkeypatch):
    """A stand-in for dgl that keeps what dgl.graph is called with."""

    def graph(structure, *, num_nodes):
        return SimpleNamespace(structure=structure, num_nodes=num_nodes, edata={})

    monkeypatch.setitem(sys.modules, "dgl", SimpleNamespace(graph=graph))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("format", "theirs"), [("csr", "csc"), ("csc", "csr")])
def test_compressed_formats_go_to_dgl_without_a_copy(dgl, format, theirs, weighted):
    A = from_dgl(dgl_graph(), weight="w" if weighted else None, format=format)
    g = to_dgl(A, weight="v")
    kind, (indptr, indices, edge) = g.structure
    assert (kind, g.num_nodes, len(edge)) == (theirs, 3, 0)
    assert indptr.data_ptr() == A.indptr.ctypes.data
    assert indices.data_ptr() == A.indices.ctypes.data
    assert list(g.edata) == (["v"] if weighted else [])
    assert not weighted or g.edata["v"].data_ptr() == A.data.ctypes.data


def test_a_coo_goes_to_dgl_as_source_and_target_and_sgt_as_csr(dgl):
    A = from_dgl(dgl_graph(), weight="w")
    source, target = to_dgl(A).structure
    assert (source.tolist(), target.tolist()) == ([0, 2, 1, 2], [1, 1, 0, 1])
    assert source.data_ptr() == A.col.ctypes.data
    A = from_dgl(dgl_graph(), weight="w", format="sgt")
    kind, (_, indices, _) = to_dgl(A).structure
    assert kind == "csc"
    assert indices.tolist() == A.tocsr().indices.tolist()


@pytest.mark.parametrize(
    ("A", "error", "message"),
    [
        (COO([0], [1], shape=(2, 3)), ShapeError, "to_dgl: A has shape (2, 3)"),
        (np.eye(2), UnsupportedError, "to_dgl got a numpy.ndarray"),
    ],
)
def test_to_dgl_refuses(dgl, A, error, message):
    with pytest.raises(error, match=re.escape(message)):
        to_dgl(A)


@pytest.mark.gpu
def test_a_graph_on_a_gpu_is_not_moved_in_secret():
    from sparsefmt.errors import DeviceError

    with pytest.raises(DeviceError, match=r"to_networkx: A is on cuda:0"):
        to_networkx(COO([0], [1], shape=(2, 2)).to("cuda"))
