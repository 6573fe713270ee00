"""Graph.batch: graphs on the diagonal of one, joined from what each has built."""

import pickle

import numpy as np
import pytest
import scipy.sparse
from hypothesis import example, given
from hypothesis import strategies as st
from op_cases import host

from sparsefmt import COO, CSR, DeviceError, DtypeError, Graph, IndexRangeError, ShapeError
from sparsefmt.formats import convert
from sparsefmt.testing import coo, csr, sgt


def formats(weighted):
    options = {"weighted": weighted, "index_dtype": np.int32}
    options |= {"dtype": np.float64} if weighted else {}
    made = csr(max_side=6, **options)
    others = coo(max_side=6, unsorted=True, **options), sgt(max_side=6, **options)
    return st.one_of(made, made.map(CSR.tocsc), *others)


pieces = st.booleans().flatmap(
    lambda weighted: st.lists(st.tuples(formats(weighted), st.booleans()), min_size=1, max_size=5)
)
EMPTY = COO(np.zeros(0, np.int32), np.zeros(0, np.int32), shape=(0, 4))


def graph_of(xp, A, flip=False):
    graph = Graph(A.to("cpu" if xp is np else "cuda"))
    return graph.transposed if flip else graph


def triples(graph):
    """(row, column, value) of each edge, in the order of the graph's structure."""
    csr = graph.to("cpu").csr
    row = np.repeat(np.arange(csr.n_rows), np.diff(csr.indptr))
    data = np.ones(csr.nnz) if csr.data is None else csr.data
    perm = host(graph.csr_perm)
    found = np.empty((3, csr.nnz))
    found[:, perm] = row, csr.indices, data
    return found


@given(given_=pieces)
@example(given_=[(EMPTY, False), (EMPTY, True)])
def test_a_batch_is_the_block_diagonal_of_its_graphs(xp, given_):
    """Its edges are those of each graph one after another, its permutations carry values."""
    graphs = [graph_of(xp, A, flip) for A, flip in given_]
    dense = [host(one.csr.toarray(np.float64)) for one in graphs]
    whole = Graph.batch(graphs)
    expected = scipy.sparse.block_diag([scipy.sparse.coo_array(one) for one in dense]).toarray()
    expected = expected.reshape(whole.shape)  # of nothing SciPy makes another shape
    assert (whole.nnz, whole.weighted) == (sum(g.nnz for g in graphs), graphs[0].weighted)
    found = (whole.csr, whole.csc, whole.coo, whole.sgt(), whole.structure, whole.transposed.csr.T)
    for A in found:
        A.check()
        np.testing.assert_array_equal(host(A.toarray(np.float64)), expected)
    edges, rows, cols = [], 0, 0
    for one in graphs:
        edges.append(triples(one) + np.array([[rows], [cols], [0]]))
        rows, cols = rows + one.n_rows, cols + one.n_cols
    edges = np.concatenate(edges, 1)
    np.testing.assert_array_equal(triples(whole), edges)
    if whole.structure.format == "coo":
        structure = whole.structure.to("cpu")
        np.testing.assert_array_equal([structure.row, structure.col], edges[:2])
    numbered = whole.with_data(xp.arange(whole.nnz, dtype=np.float64))
    assert (host(numbered.csr.data) == host(whole.csr_perm)).all()
    assert (host(numbered.csc.data) == host(numbered.csr.data)[host(whole.csc_perm)]).all()
    pairs = [
        {value: (row, col) for row, col, value in zip(*map(list, map(host, parts)), strict=True)}
        for parts in ((A.row, A.col, A.data) for A in (numbered.csr.tocoo(), numbered.csc.tocoo()))
    ]
    assert pairs[0] == pairs[1]


def graph(n=4, nnz=6, *, weighted=False, index_dtype=np.int32, seed=0):
    rng = np.random.default_rng(seed)
    row, col = rng.integers(0, n, (2, nnz)).astype(index_dtype)
    return Graph(COO(row, col, rng.random(nnz) if weighted else None, shape=(n, n)))


def test_nothing_is_sorted_once_its_graphs_are_built(monkeypatch):
    graphs = [graph(seed=k) for k in range(5)]
    for one in graphs:
        _ = one.csr, one.csc
    for name in ("_by_counting", "numbered_csr", "_coo_to_csr", "_csr_to_csc"):
        monkeypatch.setattr(convert, name, None)
    whole = Graph.batch([*graphs, graphs[0]])
    _ = whole.csr, whole.csc, whole.transposed.csr, whole.structure
    assert "built: csr, csc" in repr(whole)


def test_a_batch_of_batches_is_the_batch_of_all_and_pickles():
    graphs = [graph(seed=k, weighted=True) for k in range(4)]
    whole = Graph.batch(graphs)
    again = pickle.loads(pickle.dumps(whole))
    assert again.csc == whole.csc
    for other in (again, Graph.batch([Graph.batch(graphs[:2]), Graph.batch(graphs[2:])])):
        assert (triples(other) == triples(whole)).all()


def test_a_batch_moves_to_a_device_as_it_is(xp):
    graphs = [graph(seed=k) for k in range(3)]
    device = "cpu" if xp is np else "cuda"
    whole = Graph.batch(graphs).to(device)
    assert (triples(whole) == triples(Graph.batch(graphs))).all()


def test_graphs_of_torch_have_their_edges_joined(xp):
    torch = pytest.importorskip("torch")
    device = "cpu" if xp is np else "cuda"
    made = []
    for k in range(4):
        A = graph(n=k + 2, seed=k).coo
        ids = torch.from_numpy(np.stack([A.col, A.row]).astype(np.int64)).to(device)
        weights = torch.arange(float(A.nnz), device=device) + k
        made.append(Graph.from_edge_index(ids, weights, num_nodes=k + 2))
    whole = Graph.batch(made)
    dense = [scipy.sparse.coo_array(host(one.csr.toarray())) for one in made]
    expected = scipy.sparse.block_diag(dense).toarray()
    assert (host(whole.csr.toarray()) == expected).all()
    values = np.concatenate([np.arange(6) + k for k in range(4)])
    assert (host(whole.structure.data) == values).all()
    assert whole.index_dtype == np.int64


@pytest.mark.gpu
def test_an_id_that_a_graph_does_not_have_is_no_vertex_of_the_next():
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[0, 3], [1, 0]], device="cuda")
    graphs = [Graph.from_edge_index(ids, num_nodes=n) for n in (3, 4)]
    with pytest.raises(IndexRangeError, match="edge_index"):
        _ = Graph.batch(graphs).structure


def test_what_cannot_be_joined_is_refused():
    wide = Graph(COO(np.zeros(1, np.int32), np.zeros(1, np.int32), shape=(2**30, 1)))
    one, weighted, long = graph(), graph(weighted=True), graph(index_dtype=np.int64)
    without = r"values of float64 but graphs\[0\] has no values: give all values"
    for graphs, error, text in (
        ([], ShapeError, "graphs is empty: give one graph or more"),
        (one, DtypeError, "graphs is one Graph: give a list"),
        (3, DtypeError, "graphs is a int: give a list of sparsefmt.Graph"),
        ([one, one.csr], DtypeError, r"graphs\[1\] is a CSR: give a"),
        ([one, weighted], DtypeError, rf"graphs\[1\] has {without}"),
        (
            [one, one, long],
            DtypeError,
            r"graphs\[2\] has int64 indices but graphs\[0\] has int32: make all",
        ),
        ([wide] * 3, IndexRangeError, "int32"),
    ):
        with pytest.raises(error, match=text):
            Graph.batch(graphs)


@pytest.mark.gpu
def test_graphs_on_two_devices_are_refused():
    with pytest.raises(DeviceError, match=r"graphs\[1\] is on cuda:0 but graphs\[0\] on cpu"):
        Graph.batch([graph(), graph().to("cuda")])
