"""Graph: each format once, permutations that carry edge values, threads, devices, pickles."""

import copy
import gc
import pickle
import sys
import weakref
from threading import Barrier, Thread

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from op_cases import host, put

from sparsefmt import COO, CSC, CSR, Graph
from sparsefmt.errors import DeviceError, DtypeError, IndexRangeError, ShapeError, UnsupportedError
from sparsefmt.formats import convert
from sparsefmt.formats.cbsr import CBSR
from sparsefmt.generate import power_law
from sparsefmt.testing import coo, csr, sgt, stored_entries

structures = st.one_of(csr(), coo(unsorted=True), csr().map(CSR.tocsc), sgt())
EMPTY = COO(np.zeros(0, np.int32), np.zeros(0, np.int32), shape=(0, 4))
EDGES = np.array([[3, 0, 1, 0, 3], [1, 1, 0, 2, 2]])  # sources, targets


@given(A=structures, flip=st.booleans(), tile=st.sampled_from([(16, 8), (2, 3)]))
@example(A=EMPTY, flip=True, tile=(2, 3))
def test_every_format_is_the_same_matrix(xp, A, flip, tile):
    graph = Graph(put(xp, A))
    expected = host(put(xp, A).toarray(np.float64))
    if flip:
        graph, expected = graph.transposed, expected.T
    assert graph.shape == (graph.n_rows, graph.n_cols) == expected.shape
    found = (graph.csr, graph.csc, graph.coo, graph.sgt(tile), graph.structure)
    for B in found:
        B.check()
        assert B.device == graph.device
        np.testing.assert_array_equal(host(B.toarray(np.float64)), expected)
    assert [type(B).__name__ for B in found[:4]] == ["CSR", "CSC", "COO", "SGT"]
    assert found[3].tile == tile
    assert host(graph.in_degree).tolist() == host(graph.csr.lengths).tolist()
    assert host(graph.out_degree).tolist() == host(graph.csc.lengths).tolist()
    assert graph.in_degree.dtype == graph.out_degree.dtype == A.index_dtype


@given(A=structures, flip=st.booleans())
def test_what_is_built_is_kept_and_the_transpose_shares_it(xp, A, flip):
    graph = Graph(put(xp, A))
    graph = graph.transposed if flip else graph
    for ask in (
        lambda: graph.coo,
        lambda: graph.sgt((2, 2)),
        lambda: graph.csr_perm,
        lambda: graph.csc_perm,
        lambda: graph.in_degree,
        lambda: graph.out_degree,
        lambda: graph.stats,
        lambda: graph.csr.indices,
        lambda: graph.csc.indices,
        lambda: graph.transposed,
    ):
        first = ask()
        assert ask() is first
    assert graph.stats.nnz == A.nnz
    there = graph.transposed
    assert there.transposed is graph
    assert there.csr.indices is graph.csc.indices
    assert there.csc.indptr is graph.csr.indptr
    assert there.in_degree is graph.out_degree
    assert there.nnz == graph.nnz
    sgt = there.sgt()
    del there
    assert graph.transposed.sgt() is sgt


@given(A=st.one_of(csr(), coo(unsorted=True), csr().map(CSR.tocsc)), flip=st.booleans())
def test_permutations_carry_values_from_the_users_order(xp, A, flip):
    A = put(xp, A.with_data(np.arange(A.nnz, dtype=np.float64)))
    graph = Graph(A).transposed if flip else Graph(A)
    given_order, in_csr_order = host(A.data), host(graph.csr.data)
    assert host(graph.csr_perm).dtype == A.index_dtype
    np.testing.assert_array_equal(given_order[host(graph.csr_perm)], in_csr_order)
    np.testing.assert_array_equal(in_csr_order[host(graph.csc_perm)], host(graph.csc.data))
    negated = graph.with_data(-A.data)
    np.testing.assert_array_equal(host(negated.csr.data), -in_csr_order)
    np.testing.assert_array_equal(host(negated.csc.data), -host(graph.csc.data))
    assert host(graph.coo.data).tolist() == in_csr_order.tolist()


@given(A=structures, flip=st.booleans(), built=st.booleans())
def test_other_values_reach_every_format(xp, A, flip, built):
    graph = Graph(put(xp, A))
    graph = graph.transposed if flip else graph
    if built:
        for G in (graph, graph.transposed):
            _ = [G.coo, G.csc, G.sgt((4, 4)), G.stats]
    values = xp.arange(graph.nnz, dtype=xp.float32) + 1
    expected = sorted(stored_entries(graph.csr.with_data(values[graph.csr_perm])))
    there = graph.with_data(values)
    assert (there.weighted, there.dtype) == (True, np.float32)
    for B in (there.coo, there.csc, there.sgt((4, 4))):
        assert sorted(stored_entries(B)) == expected
    swapped = sorted((j, i, value) for i, j, value in expected)
    for B in (there.transposed.coo, there.transposed.csr, there.transposed.sgt((4, 4))):
        assert sorted(stored_entries(B)) == swapped
    assert there.csr.indices is graph.csr.indices
    assert host(there.csr_perm).tolist() == host(graph.csr_perm).tolist()
    bare = there.with_data(None)
    assert not bare.weighted
    assert bare.csc.data is bare.coo.data is None


def test_values_given_after_with_data_are_still_in_the_users_order(xp):
    graph = Graph.from_edge_index(xp.asarray(EDGES)).with_data(xp.zeros(5))
    weights = xp.asarray([10.0, 20.0, 30.0, 40.0, 50.0])
    for G in (graph, pickle.loads(pickle.dumps(graph)), graph.to("cpu")):
        G = G.with_data(weights if G.device == graph.device else host(weights))
        assert host(G.csr.data).tolist() == [30.0, 10.0, 20.0, 40.0, 50.0]


# PyG's edges


def test_edge_index_is_source_then_target(xp):
    weights = xp.asarray([1.0, 2.0, 3.0, 4.0, 5.0])
    graph = Graph.from_edge_index(xp.asarray(EDGES), weights)
    assert graph.shape == (4, 4)
    expected = np.zeros((4, 4))
    expected[EDGES[1], EDGES[0]] = [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(host(graph.csr.toarray()), expected)
    assert Graph.from_edge_index(xp.asarray(EDGES), num_nodes=9).shape == (9, 9)
    assert Graph.from_edge_index(xp.zeros((2, 0), xp.int64)).shape == (0, 0)
    assert Graph.from_edge_index([[0, 1], [1, 0]]).nnz == 2


def test_tensors_come_in_without_a_copy():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    edges, weights = torch.tensor(EDGES), torch.rand(5)
    graph = Graph.from_edge_index(edges, weights)
    assert isinstance(graph.structure, COO)
    assert graph.structure.col.ctypes.data == edges.data_ptr()
    assert graph.structure.data.ctypes.data == weights.data_ptr()
    with pytest.raises(UnsupportedError, match=r"edge_weight requires grad"):
        Graph.from_edge_index(edges, weights.requires_grad_())


from_edges = Graph.from_edge_index
GRAPH = Graph(COO(EDGES[1], EDGES[0], shape=(4, 4)))
FEATURES = CBSR(np.zeros((3, 1), np.uint8), np.ones((3, 1), np.float32), shape=(3, 2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: from_edges(EDGES.T), ShapeError, r"edge_index has shape \(5, 2\)"),
        (lambda: from_edges(EDGES, num_nodes=3), IndexRangeError, r"edge_index\[0\]\[0\] is 3"),
        (lambda: from_edges(EDGES, np.ones(4)), ShapeError, r"edge_weight has shape \(4,\)"),
        (lambda: from_edges(EDGES, ["a"] * 5), DtypeError, "edge_weight is <U1"),
        (lambda: Graph(FEATURES), UnsupportedError, "structure is a CBSR, which holds features"),
        (lambda: Graph(np.eye(2)), DtypeError, "structure is a ndarray: give a COO"),
        (lambda: Graph(GRAPH), DtypeError, "structure is a Graph"),
        (lambda: GRAPH.with_data(np.ones(4)), ShapeError, r"data has shape \(4,\)"),
        (lambda: GRAPH.with_data(np.ones(5, int)), DtypeError, "data.dtype is int64"),
        (lambda: GRAPH.transposed.with_data(np.ones(6)), ShapeError, r"data has shape \(6,\)"),
        (lambda: GRAPH.sgt((0, 8)), ShapeError, r"tile is \(0, 8\)"),
        (lambda: GRAPH.to("tpu"), DeviceError, "device is 'tpu'"),
    ],
)
def test_what_makes_no_sense_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


# One graph, many users


def counted(monkeypatch, calls):
    """Let every conversion note what it was asked for."""
    for edge, function in convert._EDGES.items():

        def noted(A, want_perm, edge=edge, function=function, **options):
            tiles = ("x".join(map(str, tile)) for tile in options.values())
            calls.append(" ".join([*edge, *tiles]))
            return function(A, want_perm, **options)

        monkeypatch.setitem(convert._EDGES, edge, noted)


def test_threads_that_ask_at_once_build_each_format_once(xp, monkeypatch):
    calls = []
    counted(monkeypatch, calls)
    graph = Graph(put(xp, power_law(300, 3000).T))
    there, n_threads, found = graph.transposed, 16, []
    barrier = Barrier(n_threads)

    def ask():
        barrier.wait()
        parts = [graph.sgt((8, 8)), graph.csc, graph.coo, there.sgt((8, 8))]
        parts += [graph.sgt((16, 8)), graph.out_degree]
        parts += [there.csr_perm, there.csc_perm, graph.csr.indptr]
        found.append([id(part) for part in parts])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [Thread(target=ask) for _ in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == [found[0]] * n_threads
    of_tiles = ["csr sgt 16x8", "csr sgt 8x8", "csr sgt 8x8"]
    assert sorted(calls) == ["coo csr", "csr coo", "csr csc", *of_tiles]


@given(A=structures, flip=st.booleans())
def test_pickles_keep_the_matrix_and_drop_what_was_built(xp, A, flip):
    graph = Graph(put(xp, A))
    graph = graph.transposed if flip else graph
    _ = graph.sgt(), graph.csc_perm, graph.stats
    for there in (pickle.loads(pickle.dumps(graph)), copy.copy(graph), copy.deepcopy(graph)):
        assert "built: nothing" in repr(there)
        assert there.csr == graph.csr
        assert host(there.csr_perm).tolist() == host(graph.csr_perm).tolist()
        assert there.transposed.transposed is there


def test_a_graph_goes_at_once_when_nobody_holds_it(xp):
    gc.disable()
    try:
        graph = Graph(put(xp, power_law(50, 200)))
        _ = graph.transposed.sgt(), graph.stats
        gone = weakref.ref(graph)
        del graph
        assert gone() is None
    finally:
        gc.enable()


def test_what_a_graph_is(xp):
    graph = Graph.from_edge_index(xp.asarray(EDGES), xp.ones(5, xp.float16))
    assert (graph.n_rows, graph.n_cols, graph.nnz) == (4, 4, 5)
    assert (graph.dtype, graph.index_dtype) == (np.float16, np.int64)
    assert graph.to(graph.device) is graph
    head = f"Graph(4 x 4, nnz=5, float16 values, int64 indices, {graph.device}; built: "
    assert repr(graph) == f"{head}nothing)"
    _ = graph.sgt((8, 8)), graph.coo, graph.in_degree
    assert repr(graph) == f"{head}csr, sgt 8x8, coo)"
    assert repr(graph.transposed) == f"{head}csc)"
    there = graph.transposed
    found = there.csr, there.csc, Graph(graph.csr).transposed.structure
    assert [*map(type, found)] == [CSR, CSC, CSC]
    A = put(xp, power_law(40, 200)).tosgt((8, 8))
    assert Graph(A).sgt((8, 8)) is A
    assert Graph(A).transposed.structure == A.tocsr().T


@given(A=structures, flip=st.booleans())
def test_moving_takes_along_what_was_built(A, flip):
    """As ``to`` does it; here each array "moves" by being copied."""
    graph = Graph(A).transposed if flip else Graph(A)
    _ = graph.coo, graph.csc, graph.sgt((2, 2)), graph.in_degree, graph.stats
    there = Graph._on(graph._built.mapped(np.copy), flip)
    assert repr(there) == repr(graph)
    assert there.coo == graph.coo
    assert there.sgt((2, 2)) == graph.sgt((2, 2))
    assert there.coo.col is there.csr.indices
    assert not np.shares_memory(there.csr.indptr, graph.csr.indptr)
    assert there.in_degree.tolist() == graph.in_degree.tolist()
    assert there.stats is not graph.stats
    assert type(there.stats) is type(graph.stats)


@pytest.mark.gpu
@given(A=structures)
def test_moving_between_devices(A):
    graph = Graph(A)
    _ = graph.coo, graph.csc, graph.sgt((2, 2))
    there = graph.to("cuda")
    assert there.device == there.csc.device == "cuda:0"
    assert repr(there).replace("cuda:0", "cpu") == repr(graph)
    back = there.to("cpu")
    assert back.csr == graph.csr
    assert back.sgt((2, 2)) == graph.sgt((2, 2))


@pytest.mark.gpu
def test_values_on_another_device_are_refused():
    with pytest.raises(DeviceError, match="data is on cpu but"):
        GRAPH.to("cuda").with_data(np.ones(5))
