"""``as_sparse``: one reader for whatever other libraries have, and arrays as components."""

import subprocess
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from test_interop_graphs import DGLGraph

import sparsefmt
from sparsefmt import COO, CSC, CSR, SGT, Graph, interop
from sparsefmt.errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from sparsefmt.interop import as_sparse
from sparsefmt.testing import cbsr, coo, csc, csr, sgt

networkx = pytest.importorskip("networkx")
torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.data")

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse .* tensor support is in beta state:UserWarning",
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)

FORMATS = {"coo": COO, "csr": CSR, "csc": CSC, "sgt": SGT}
X = np.array([[0.0, 1.0, 0.0], [2.0, 0.0, 3.0], [0.0, 0.0, 4.0]])


def digraph():
    G = networkx.DiGraph()
    G.add_nodes_from(range(3))
    G.add_weighted_edges_from((c, r, X[r, c]) for r, c in np.argwhere(X).tolist())
    return G


def data():
    row, col = X.nonzero()
    edge_index, weight = map(torch.from_numpy, (np.stack([col, row]), X[row, col]))
    return pyg.Data(edge_index=edge_index, edge_weight=weight, num_nodes=3)


SOURCES = {
    "numpy": (lambda: X, "csr"),
    "integers": (lambda: X.astype(int), "csr"),
    "scipy csr_array": (lambda: scipy.sparse.csr_array(X), "csr"),
    "scipy csc_array": (lambda: scipy.sparse.csc_array(X), "csc"),
    "scipy coo_array": (lambda: scipy.sparse.coo_array(X), "coo"),
    "scipy csr_matrix": (lambda: scipy.sparse.csr_matrix(X), "csr"),
    "scipy lil_matrix": (lambda: scipy.sparse.lil_matrix(X), "csr"),
    "scipy dia_array": (lambda: scipy.sparse.dia_array(X), "csr"),
    "torch dense": (lambda: torch.from_numpy(X), "csr"),
    "torch coo": (lambda: torch.from_numpy(X).to_sparse(), "coo"),
    "torch csr": (lambda: torch.from_numpy(X).to_sparse_csr(), "csr"),
    "torch csc": (lambda: torch.from_numpy(X).to_sparse_csc(), "csc"),
    "networkx": (digraph, "coo"),
    "pyg": (data, "coo"),
    **{name.upper(): (partial(sparsefmt.from_dense, X, name), name) for name in FORMATS},
    "Graph": (lambda: Graph(sparsefmt.from_dense(X, "csc")), "csc"),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("format", [None, *FORMATS])
def test_everything_comes_in_every_format(source, format):
    make, nearest = SOURCES[source]
    A = as_sparse(make(), format)
    assert isinstance(A, FORMATS[format or nearest])
    assert np.array_equal(A.toarray(), X)


@given(A=coo() | csr() | csc() | sgt() | cbsr())
def test_formats_pass_through(A):
    assert as_sparse(A) is A
    assert as_sparse(A, A.format) is A


def test_memory_is_shared():
    M = scipy.sparse.csr_array(X)
    assert np.shares_memory(as_sparse(M).data, M.data)
    tensor = torch.from_numpy(X).to_sparse_csr()
    assert as_sparse(tensor).data.ctypes.data == tensor.values().data_ptr()


def test_a_dgl_graph_is_known_by_its_class(monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", SimpleNamespace(DGLGraph=DGLGraph))
    A = as_sparse(DGLGraph([0, 1], [2, 2], 3, 3))
    assert A.shape == (3, 3)
    assert A.row.tolist() == [2, 2]


@pytest.mark.parametrize("value", [None, 3, "graph.mtx", [[1.0]], {0: [1]}, object(), np.float64])
def test_the_error_lists_what_is_accepted(value):
    with pytest.raises(UnsupportedError, match="as_sparse got a") as caught:
        as_sparse(value)
    for known in ("scipy.sparse.sparray", "torch.Tensor", "networkx.Graph", "dgl.DGLGraph"):
        assert known in str(caught.value)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.ones(3), ShapeError, r"shape \(3,\): give a 2-D"),
        (np.ones((2, 2, 2)), ShapeError, r"shape \(2, 2, 2\): give a 2-D"),
        (np.eye(2) * 1j, UnsupportedError, "x is complex128"),
        (np.array([["a"]]), DtypeError, "x is <U1"),
        (np.array([[None]]), DtypeError, "x holds Python objects"),
        (pyg.HeteroData(), UnsupportedError, "a HeteroData without edges"),
        (torch.eye(2, requires_grad=True), UnsupportedError, "requires grad"),
    ],
)
def test_readers_refuse_in_their_own_words(value, error, message):
    with pytest.raises(error, match=message):
        as_sparse(value)


@pytest.mark.parametrize("format", ["bsr", "dense", "", 3, "cbsr"])
def test_formats_that_are_unknown_or_of_features_are_refused(format):
    with pytest.raises(UnsupportedError, match="cbsr" if format == "cbsr" else "format is"):
        as_sparse(X, format)


def test_only_loaded_libraries_are_asked():
    code = (
        "import sys, numpy, sparsefmt.interop as interop\n"
        "interop.as_sparse(numpy.eye(3), 'coo')\n"
        "names = {'torch', 'cupy', 'networkx', 'dgl', 'torch_geometric', 'scipy.sparse'}\n"
        "print(*sorted(names & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_module_names_its_functions():
    assert sorted(interop.__all__) == interop.__all__
    for name in interop.__all__:
        function = getattr(interop, name)
        assert function.__name__ == name
        assert "Parameters\n" in function.__doc__


# Each library's functions: what they take, and what they need

TAKES = {
    "from_scipy": r"from_scipy got a .*: .*from_dense",
    "from_cupyx": "from_cupyx got a .*give a cupyx",
    "from_torch": r"from_torch got a .*give a torch\.Tensor",
    "from_networkx": r"from_networkx got a .*give a networkx\.Graph",
    "from_dgl": r"from_dgl got a .*give a dgl\.DGLGraph",
    "from_pyg": "from_pyg got a .*neither edge_index nor adj_t, give a graph",
    "to_scipy": "to_scipy got a .*give a COO, CSR, CSC",
    "to_cupyx": "to_cupyx got a .*give a COO, CSR",
    "to_torch": "to_torch got a .*give a COO, CSR, CSC",
    "to_networkx": "to_networkx got a .*give a COO",
    "to_dgl": "to_dgl got a .*give a COO",
    "to_edge_index": "to_edge_index got a .*give a COO, CSR, CSC",
    "to_pyg": "to_edge_index got a .*give a COO, CSR, CSC",
}
NEEDS = {
    "from_cupyx": ("cupy", r"pip install 'sparsefmt\[cuda13\]'"),
    "to_cupyx": ("cupy", r"pip install 'sparsefmt\[cuda13\]'"),
    "to_torch": ("torch", r"pip install 'sparsefmt\[torch\]'"),
    "to_networkx": ("networkx", "pip install networkx"),
    "to_dgl": ("dgl", r"to_dgl needs DGL: see https://www\.dgl\.ai"),
    "to_pyg": ("torch_geometric.data", "pip install torch-geometric"),
}


@pytest.mark.parametrize("value", [None, 3.0, [[1.0]], {0: [1]}, np.eye(2)], ids=type)
@pytest.mark.parametrize("name", TAKES)
def test_what_a_function_does_not_take_is_refused(monkeypatch, name, value):
    monkeypatch.setitem(sys.modules, "dgl", ModuleType("dgl"))
    with pytest.raises(UnsupportedError, match=TAKES[name]):
        getattr(interop, name)(value)


@pytest.mark.parametrize("name", NEEDS)
def test_without_its_library_the_error_says_what_to_install(monkeypatch, name):
    module, text = NEEDS[name]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DeviceError if module == "cupy" else UnsupportedError, match=text):
        getattr(interop, name)(sparsefmt.from_dense(X) if name.startswith("to") else None)


@pytest.mark.gpu
def test_cupy_components_are_shared_and_dense_arrays_read():
    import cupy

    indices = cupy.array([1, 0])
    A = COO(indices, indices, shape=(2, 2))
    assert A.row.data.ptr == indices.data.ptr
    B = as_sparse(cupy.asarray(X))
    assert B.device == "cuda:0"
    assert np.array_equal(B.toarray().get(), X)
