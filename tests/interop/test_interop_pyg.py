"""PyG: ``edge_index`` and ``Data``; sources are columns, targets rows."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsefmt import COO, CSC, CSR, SGT, Graph, as_sparse
from sparsefmt.errors import DeviceError, DtypeError, IndexRangeError, ShapeError, UnsupportedError
from sparsefmt.interop import from_edge_index, from_pyg, to_edge_index, to_pyg
from sparsefmt.testing import cbsr, coo, csc, csr, sgt, stored_entries

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse .* tensor support is in beta state:UserWarning",
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)

# 0 -> 1, 2 -> 1, 3 -> 0, 2 -> 1 again, 1 -> 1
EDGES = [[0, 2, 3, 2, 1], [1, 1, 0, 1, 1]]
WEIGHTS = [0.5, 2.0, 0.0, -1.0, 4.0]
ENTRIES = [(1, 0, 0.5), (1, 2, 2.0), (0, 3, 0.0), (1, 2, -1.0), (1, 1, 4.0)]
FORMATS = {"coo": COO, "csr": CSR, "csc": CSC, "sgt": SGT}
INDICES = ("int32", "int64")
DTYPES = ("float16", "bfloat16", "float32", "float64")


def edges(kind="tensor", index_dtype="int64"):
    if kind == "tensor":
        return torch.tensor(EDGES, dtype=getattr(torch, index_dtype))
    return np.array(EDGES, index_dtype)


def weights(kind="tensor", dtype="float32"):
    if kind == "tensor":
        return torch.tensor(WEIGHTS, dtype=getattr(torch, dtype))
    pytest.importorskip("ml_dtypes")
    return np.array(WEIGHTS).astype(dtype)


def address(a):
    return a.data_ptr() if isinstance(a, torch.Tensor) else a.ctypes.data


@pytest.mark.parametrize("kind", ["tensor", "array"])
@pytest.mark.parametrize("index_dtype", INDICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_coo_shares_the_rows_of_edge_index(kind, index_dtype, dtype):
    edge_index, edge_weight = edges(kind, index_dtype), weights(kind, dtype)
    A = from_edge_index(edge_index, edge_weight)
    assert stored_entries(A) == ENTRIES
    assert (A.shape, A.index_dtype, A.dtype.name) == ((4, 4), index_dtype, dtype)
    for ours, theirs in zip((A.col, A.row, A.data), (*edge_index, edge_weight), strict=True):
        assert address(ours) == address(theirs)
    back, values = to_edge_index(A)
    assert index_dtype == "int32" or back.ctypes.data == address(edge_index)
    assert values.ctypes.data == address(edge_weight)
    assert back.tolist() == EDGES
    assert values.astype(float).tolist() == WEIGHTS


@pytest.mark.parametrize("kind", ["tensor", "array"])
@pytest.mark.parametrize("index_dtype", INDICES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_edges_come_in_every_format(kind, index_dtype, weighted, format):
    given_weights = weights(kind) if weighted else None
    A = from_edge_index(edges(kind, index_dtype), given_weights, format=format)
    assert isinstance(A, FORMATS[format])
    assert (A.index_dtype, A.data is not None) == (index_dtype, weighted)
    expected = ENTRIES if weighted else [(row, col, 1.0) for row, col, _ in ENTRIES]
    assert sorted(stored_entries(A)) == sorted(expected)


@pytest.mark.parametrize("as_given", [list, tuple, np.array, torch.tensor])
def test_edges_come_as_lists_pairs_arrays_and_tensors(as_given):
    given_edges = tuple(np.array(part) for part in EDGES) if as_given is tuple else as_given(EDGES)
    assert stored_entries(from_edge_index(given_edges, WEIGHTS)) == ENTRIES


def test_a_pair_of_tensors_is_shared_and_one_of_two_index_dtypes_meets_in_int64():
    source, target = edges()
    A = from_edge_index((source, target))
    assert A.col.ctypes.data == source.data_ptr()
    assert A.row.ctypes.data == target.data_ptr()
    A = from_edge_index((np.array([0, 1], np.int32), np.array([1, 0], np.int64)))
    assert A.index_dtype == np.int64


SHAPES = [(None, (4, 4)), *((n, (n, n)) for n in (4, 9, np.int64(5)))]
SHAPES += [((4, 2), (2, 4)), ([4, 7], (7, 4)), ((6, 2), (2, 6))]


@pytest.mark.parametrize(("num_nodes", "shape"), SHAPES)
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_num_nodes_gives_the_shape(kind, num_nodes, shape):
    assert from_edge_index(edges(kind), num_nodes=num_nodes).shape == shape


@pytest.mark.parametrize("empty", [np.zeros((2, 0), np.int64), torch.zeros((2, 0)).long()])
@pytest.mark.parametrize("num_nodes", [None, 0, 3, (2, 5)])
def test_no_edges_at_all(empty, num_nodes):
    A = from_edge_index(empty, num_nodes=num_nodes)
    shapes = {None: (0, 0), 0: (0, 0), 3: (3, 3), (2, 5): (5, 2)}
    assert (A.nnz, A.shape) == (0, shapes[num_nodes])
    assert to_edge_index(A)[0].shape == (2, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", INDICES)
def test_dtypes_are_chosen_by_keyword(dtype, index_dtype):
    pytest.importorskip("ml_dtypes")
    A = from_edge_index(edges(), weights(), dtype=dtype, index_dtype=index_dtype)
    assert (A.dtype.name, A.index_dtype) == (dtype, index_dtype)
    assert stored_entries(A) == ENTRIES


@pytest.mark.parametrize("weight_dtype", ["int64", "int32", "uint8", "bool"])
def test_integer_weights_become_float64(weight_dtype):
    A = from_edge_index(edges(), torch.ones(5, dtype=getattr(torch, weight_dtype)))
    assert A.dtype == np.float64
    assert A.data.tolist() == [1.0] * 5


@pytest.mark.parametrize("index_dtype", ["uint8", "int16", "uint32"])
def test_other_integers_become_int32(index_dtype):
    A = from_edge_index(np.array(EDGES, index_dtype))
    assert A.index_dtype == np.int32
    assert to_edge_index(A)[0].tolist() == EDGES


def test_a_transposed_edge_index_is_made_contiguous():
    pairs = torch.tensor(EDGES).T.contiguous()
    A = from_edge_index(pairs.T)
    assert A.row.flags.c_contiguous
    assert to_edge_index(A)[0].tolist() == EDGES


@given(A=coo() | csr() | csc() | sgt())
def test_edges_come_in_the_order_of_the_entries(A):
    edge_index, edge_weight = to_edge_index(A)
    assert edge_index.dtype == np.int64
    assert (edge_weight is None) == (A.data is None)
    listed = A if A.format != "sgt" else A.tocsr()
    found = [] if edge_weight is None else edge_weight.astype(float).tolist()
    expected = stored_entries(listed)
    assert edge_index.T.tolist() == [[col, row] for row, col, _ in expected]
    assert found == [value for *_, value in expected] or edge_weight is None


@given(A=coo())
def test_round_trip_of_coo_is_exact(A):
    edge_index, edge_weight = to_edge_index(A)
    B = from_edge_index(edge_index, edge_weight, num_nodes=A.shape[::-1], index_dtype=A.index_dtype)
    assert B == A


@given(A=cbsr(dtype="float64"))
def test_features_have_edges_too(A):
    edge_index, edge_weight = to_edge_index(A)
    assert edge_weight.tolist() == A.data.ravel().tolist()
    assert edge_index[0].tolist() == A.indices.ravel().tolist()


@given(pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_orientation_is_that_of_pyg(pairs):
    """PyG's own SciPy matrix has sources as rows: it is our transpose."""
    from torch_geometric.utils import to_scipy_sparse_matrix

    edge_index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    values = torch.arange(1.0, 1 + len(pairs))
    theirs = to_scipy_sparse_matrix(edge_index, values, num_nodes=10)
    ours = from_edge_index(edge_index, values, num_nodes=10)
    assert np.array_equal(ours.toarray(), theirs.toarray().T)


def test_an_edge_index_object_is_read_with_its_sizes():
    """It wraps a tensor and owns no memory: its own DLPack export points nowhere."""
    from torch_geometric import EdgeIndex

    A = from_edge_index(EdgeIndex(EDGES, sparse_size=(6, 5)), weights())
    assert A.shape == (5, 6)
    assert stored_entries(A) == ENTRIES
    assert from_edge_index(EdgeIndex(EDGES)).shape == (4, 4)
    assert from_edge_index(EdgeIndex(EDGES), num_nodes=7).shape == (7, 7)
    source, target = EdgeIndex(EDGES)
    assert COO(target, source, shape=(4, 4)).row.tolist() == EDGES[1]


# Data


def data(**attributes):
    from torch_geometric.data import Data

    return Data(**{"edge_index": edges(), "num_nodes": 6, **attributes})


@pytest.mark.parametrize("name", ["edge_weight", "edge_attr"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [None, *FORMATS])
def test_a_data_is_read_with_its_weights(name, dtype, format):
    A = from_pyg(data(**{name: weights(dtype=dtype)}), format=format)
    assert isinstance(A, FORMATS[format or "coo"])
    assert (A.shape, A.dtype.name) == ((6, 6), dtype)
    assert sorted(stored_entries(A)) == sorted(ENTRIES)


def test_a_data_is_shared_and_goes_round_without_a_copy():
    graph = data(edge_weight=weights())
    A = from_pyg(graph)
    theirs = *graph.edge_index, graph.edge_weight
    assert [*map(address, (A.col, A.row, A.data))] == [*map(address, theirs)]
    back = to_pyg(A)
    assert back.edge_index.data_ptr() == graph.edge_index.data_ptr()
    assert back.edge_weight.data_ptr() == graph.edge_weight.data_ptr()


def test_edge_weight_goes_before_edge_attr_and_wide_ones_are_no_values():
    A = from_pyg(data(edge_weight=weights(), edge_attr=torch.zeros(5)))
    assert stored_entries(A) == ENTRIES
    for width in (1, 3):
        assert from_pyg(data(edge_attr=torch.ones(5, width))).data is None
    A = from_pyg(data())
    assert A.data is None
    assert to_edge_index(A)[0].tolist() == EDGES
    assert from_pyg(data(num_nodes=None, x=torch.zeros(8, 2))).shape == (8, 8)  # of the features


@pytest.mark.parametrize("layout", ["csr", "coo"])
@pytest.mark.parametrize("weighted", [True, False])
def test_adj_t_is_read_as_it_is(layout, weighted):
    """Its rows are targets already."""
    from torch_geometric.transforms import ToSparseTensor

    distinct = [0, 1, 2, 4]  # PyG merges edges that repeat
    graph = data(edge_index=edges()[:, distinct])
    if weighted:
        graph.edge_weight = weights()[distinct]
    expected = from_pyg(graph).toarray()
    graph = ToSparseTensor(attr="edge_weight", layout=getattr(torch, f"sparse_{layout}"))(graph)
    assert "edge_index" not in graph
    A = from_pyg(graph)
    assert A.format == layout
    assert np.array_equal(A.toarray(), expected)
    assert from_pyg(graph, format="sgt").format == "sgt"


class SparseTensor:
    """What torch_sparse.SparseTensor has that is read here."""

    def __init__(self, indptr, indices, value, sizes):
        self.parts, self.sizes = (indptr, indices, value), sizes

    def csr(self):
        return self.parts

    def sparse_sizes(self):
        return self.sizes


@pytest.mark.parametrize("weighted", [True, False])
def test_a_sparse_tensor_of_torch_sparse_is_shared(weighted):
    indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1])
    value = torch.tensor([1.0, 2.0, 3.0]) if weighted else None
    graph = SimpleNamespace(adj_t=SparseTensor(indptr, indices, value, (2, 3)))
    A = from_pyg(graph)
    assert isinstance(A, CSR)
    assert A.shape == (2, 3)
    assert [*map(address, (A.indptr, A.indices))] == [*map(address, (indptr, indices))]
    assert (A.data is None) != weighted
    assert A.data is None or A.data.ctypes.data == value.data_ptr()
    assert from_pyg(graph, format="coo", index_dtype="int32").index_dtype == np.int32


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_data_is_written(weighted, format, dtype):
    A = from_edge_index(edges(), weights(dtype=dtype) if weighted else None, num_nodes=6)
    A = A.asformat(format)
    graph = to_pyg(A)
    graph.validate()
    assert (graph.num_nodes, graph.edge_index.dtype) == (6, torch.int64)
    assert ("edge_weight" in graph) == weighted
    assert not weighted or str(graph.edge_weight.dtype) == f"torch.{dtype}"
    assert sorted(stored_entries(from_pyg(graph))) == sorted(stored_entries(A))


# Refusals

REFUSED = {
    "edge_index": [
        (np.zeros((5, 2), np.int64), ShapeError, r"shape \(5, 2\): give \(2, n_edges\)"),
        (np.zeros(4, np.int64), ShapeError, r"shape \(4,\): give \(2, n_edges\)"),
        (np.zeros((2, 2, 2), np.int64), ShapeError, r"shape \(2, 2, 2\)"),
        (torch.zeros(3, 4).long(), ShapeError, r"shape \(3, 4\)"),
        (np.zeros((2, 3)), DtypeError, "edge_index is float64: indices are integers"),
        (torch.zeros(2, 3), DtypeError, "edge_index is float32: indices are integers"),
        (np.zeros((2, 3), bool), DtypeError, "edge_index is bool"),
        (np.array([["a"], ["b"]]), DtypeError, "edge_index is <U1"),
        (np.array([[None], [None]]), DtypeError, "edge_index holds Python objects"),
        ([[0, 1], [0]], ShapeError, "edge_index is no array"),
        (None, DtypeError, "edge_index is None"),
        ((np.zeros(2, int),), ShapeError, r"edge_index has 1 parts: give \(source, target\)"),
        ((np.zeros(2, int),) * 3, ShapeError, "edge_index has 3 parts"),
        ((np.zeros(2, int), np.zeros(3, int)), ShapeError, r"parts of shape \(2,\) and \(3,\)"),
        ((np.eye(2, dtype=int),) * 2, ShapeError, r"parts of shape \(2, 2\) and \(2, 2\)"),
        (np.array([[0], [-1]]), IndexRangeError, r"edge_index\[1\]\[0\] is -1 but there are 1"),
        (np.array([[-5], [-1]]), IndexRangeError, r"edge_index\[0\]\[0\] is -5 but there are 0"),
        (torch.eye(2).to_sparse(), UnsupportedError, "edge_index is a sparse tensor"),
        (torch.zeros(2, 2, device="meta").long(), DeviceError, "edge_index is on meta"),
        (np.array([[2**63], [0]], np.uint64), IndexRangeError, "edge_index holds 92233720368"),
    ],
    "edge_weight": [
        (np.ones(4), ShapeError, r"edge_weight has shape \(4,\), expected \(5,\)"),
        (np.ones((5, 1)), ShapeError, r"edge_weight has shape \(5, 1\), expected \(5,\)"),
        (np.float64(1), ShapeError, r"edge_weight has shape \(\)"),
        (np.ones(5) * 1j, UnsupportedError, "edge_weight is complex128"),
        (np.array(list("abcde")), DtypeError, "edge_weight is <U1: give numbers"),
        (np.array([2**53 + 1] * 5), DtypeError, r"edge_weight\[0\] is 9007199254740993"),
        (torch.ones(5, requires_grad=True), UnsupportedError, r"edge_weight\.detach\(\)"),
        (torch.ones(5, device="meta"), DeviceError, "edge_weight is on meta"),
    ],
    "num_nodes": [
        (3, IndexRangeError, r"edge_index\[0\]\[2\] is 3 but there are 3 source vertices"),
        ((4, 1), IndexRangeError, r"edge_index\[1\]\[0\] is 1 but there are 1 target vertices"),
        ((2, 4), IndexRangeError, r"edge_index\[0\]\[1\] is 2 but there are 2 source vertices"),
        (-1, ShapeError, "num_nodes is -1: counts cannot be negative"),
        (True, ShapeError, "num_nodes is True: give an integer"),
        ((4, -2), ShapeError, r"num_nodes is \(4, -2\): counts cannot be negative"),
        (4.0, ShapeError, r"num_nodes is 4\.0: give an integer or \(n_source, n_target\)"),
        ("4", ShapeError, "num_nodes is '4': give an integer"),
        ((4,), ShapeError, r"num_nodes is \(4,\): give an integer"),
        ((4, 4, 4), ShapeError, r"num_nodes is \(4, 4, 4\): give an integer"),
        ((4, None), ShapeError, r"num_nodes is \(4, None\): give an integer"),
    ],
}
CASES = [(name, *case) for name, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("name", "value", "error", "message"), CASES)
def test_arguments_are_checked(name, value, error, message):
    with pytest.raises(error, match=message):
        from_edge_index(**{"edge_index": edges(), name: value})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "bsr"}, UnsupportedError, "format is 'bsr'"),
        ({"format": "cbsr"}, UnsupportedError, "cbsr"),
        ({"dtype": "int8"}, DtypeError, "dtype is int8"),
        ({"index_dtype": "uint8"}, DtypeError, "index_dtype is uint8"),
    ],
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        from_edge_index(edges(), weights(), **options)
    with pytest.raises(error, match=message):
        from_pyg(data(edge_weight=weights()), **options)


def test_indices_that_int32_cannot_hold_are_refused():
    with pytest.raises(IndexRangeError, match=f"edge_index holds {2**33}, which int32 cannot"):
        from_edge_index(np.array([[0], [2**33]]), index_dtype="int32")


def hetero_data():
    """Two relations between authors and papers, one weighted, and one without edges."""
    from torch_geometric.data import HeteroData

    data = HeteroData()
    data["author"].x, data["paper"].num_nodes = torch.ones(4, 3), 5
    data["author", "writes", "paper"].edge_index = edges()
    data["paper", "cites", "paper"].edge_index = edges()
    data["paper", "cites", "paper"].edge_weight = torch.arange(float(edges().shape[1]))
    data["author", "knows", "author"].since = 3
    return data


def test_a_hetero_data_gives_a_matrix_and_a_graph_for_each_edge_type():
    data = hetero_data()
    found, graphs = as_sparse(data), Graph.from_pyg(data)
    assert list(found) == [("author", "writes", "paper"), ("paper", "cites", "paper")] == [*graphs]
    for edge_type, A in found.items():
        source, target = data[edge_type].edge_index.numpy()
        assert A.format == "coo"
        assert A.shape == (5, 4 if edge_type[0] == "author" else 5) == graphs[edge_type].shape
        assert np.array_equal(A.coords, (target, source))
        assert A == graphs[edge_type].structure
    assert not graphs["author", "writes", "paper"].weighted
    weights = data["paper", "cites", "paper"].edge_weight.numpy()
    assert (found["paper", "cites", "paper"].data == weights).all()
    assert {A.format for A in as_sparse(data, "csc").values()} == {"csc"}
    dtypes = {A.dtype for A in from_pyg(data, dtype=np.float64).values()}
    assert dtypes == {None, np.dtype("float64")}


def test_an_adj_t_of_a_hetero_data_has_its_sizes():
    from torch_geometric.transforms import ToSparseTensor

    plain, data = hetero_data(), hetero_data()
    given = ToSparseTensor(attr=None, layout=torch.sparse_csr, remove_edge_index=True)(data)
    found, expected = as_sparse(given), as_sparse(plain)
    for edge_type, A in expected.items():
        assert found[edge_type].format == "csr"
        cells = A.with_data(None).toarray() > 0
        assert np.array_equal(found[edge_type].toarray() > 0, cells)


def test_a_hetero_data_without_sizes_is_refused():
    data = hetero_data()
    del data["author"].x
    with (
        pytest.warns(UserWarning, match="infer"),
        pytest.raises(ShapeError, match=r"data\['author'\] does not"),
    ):
        as_sparse(data)


def with_values(value):
    return SparseTensor(torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]), value, (2, 3))


@pytest.mark.parametrize(
    ("adj_t", "error", "message"),
    [
        *(
            (adj_t, UnsupportedError, " is a sparse tensor or a SparseTensor")
            for adj_t in (3, np.eye(2), SimpleNamespace(csr=1))
        ),
        (with_values(torch.ones(2)), ShapeError, r"\.value has shape \(2,\), expected \(3,\)"),
        (with_values(torch.ones(3, 4)), ShapeError, r"\.value has shape \(3, 4\), expected \(3,\)"),
    ],
)
def test_what_is_no_adj_t_is_refused(adj_t, error, message):
    with pytest.raises(error, match=f"adj_t{message}"):
        from_pyg(SimpleNamespace(adj_t=adj_t))


def test_what_is_no_data_is_refused():
    with pytest.raises(UnsupportedError, match="edge_weight requires grad"):
        from_pyg(data(edge_weight=weights().requires_grad_()))
    with pytest.raises(UnsupportedError, match=r"from_pyg got a torch_geometric.*Data"):
        from_pyg(type(data())(x=torch.ones(2, 2)))
    with pytest.raises(ShapeError, match=r"to_pyg: A has shape \(2, 4\)"):
        to_pyg(from_edge_index(edges(), num_nodes=(4, 2)))


def test_arrays_need_no_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    A = from_edge_index(np.array(EDGES), np.array(WEIGHTS))
    assert stored_entries(A) == ENTRIES


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_data_on_a_gpu_goes_round_without_a_copy(dtype):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    graph = data(edge_weight=weights(dtype=dtype)).to("cuda")
    A = from_pyg(graph)
    assert A.device == "cuda:0"
    assert stored_entries(A) == ENTRIES
    back = to_pyg(A)
    assert back.edge_index.data_ptr() == graph.edge_index.data_ptr()
    assert back.edge_weight.data_ptr() == graph.edge_weight.data_ptr()
    assert from_edge_index(graph.edge_index).shape == (4, 4)
