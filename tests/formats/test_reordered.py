"""Graphs with their vertices in another order: the same edges, in the order in which they came."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from op_cases import host, put

from sparsefmt import COO, DeviceError, DtypeError, Graph, ShapeError
from sparsefmt.reorder import Order
from sparsefmt.testing import coo, csc, csr, sgt

SQUARE = {"rectangular": False}
structures = st.one_of(
    csr(**SQUARE), coo(unsorted=True, **SQUARE), coo(**SQUARE), csc(**SQUARE), sgt(**SQUARE)
)
EMPTY = COO(np.zeros(0, np.int32), np.zeros(0, np.int32), shape=(0, 0))


def order_of(xp, n, seed):
    dtype = (np.int32, np.int64)[seed % 2]
    return Order(xp.asarray(np.random.default_rng(seed).permutation(n).astype(dtype)))


def triples(A):
    """(row, column) of each entry, in the order of the values of ``A``."""
    A = A.to("cpu")
    numbered = A.with_data(np.arange(A.nnz, dtype=np.float64)).tocoo()
    found = np.empty((A.nnz, 2), np.int64)
    found[numbered.data.astype(np.int64)] = np.stack([numbered.row, numbered.col], 1)
    return found


@given(A=structures, seed=st.integers(0, 99), flip=st.booleans(), built=st.booleans())
@example(A=EMPTY, seed=0, flip=False, built=True)
@example(A=EMPTY, seed=0, flip=True, built=False)
def test_every_format_is_the_matrix_in_the_new_order(xp, A, seed, flip, built):
    graph = Graph(put(xp, A))
    graph = graph.transposed if flip else graph
    if built:
        _ = graph.coo, graph.csc, graph.sgt((2, 3)), graph.stats, graph.in_degree
    order = order_of(xp, A.n_rows, seed)
    perm = host(order.perm)
    dense = host(graph.csr.toarray(np.float64))
    expected = dense[perm][:, perm]
    moved = graph.reordered(order)
    for name in ("shape", "nnz", "weighted", "dtype"):
        assert getattr(moved, name) == getattr(graph, name)
    for B in (moved.csr, moved.csc, moved.coo, moved.sgt((2, 3)), moved.structure):
        B.check()
        assert (B.device, B.index_dtype) == (graph.device, A.index_dtype)
        np.testing.assert_array_equal(host(B.toarray(np.float64)), expected)
    for B in (moved.transposed.csr, moved.transposed.csc, moved.transposed.coo):
        np.testing.assert_array_equal(host(B.toarray(np.float64)), expected.T)
    assert host(moved.in_degree).tolist() == host(graph.in_degree)[perm].tolist()
    assert host(moved.out_degree).tolist() == host(graph.out_degree)[perm].tolist()
    np.testing.assert_array_equal(host(graph.csr.toarray(np.float64)), dense)  # as it was


@given(A=structures, seed=st.integers(0, 99), flip=st.booleans())
@example(A=EMPTY, seed=0, flip=False)
def test_edges_keep_the_order_in_which_they_were_given(xp, A, seed, flip):
    graph = Graph(put(xp, A))
    graph = graph.transposed if flip else graph
    order = order_of(xp, A.n_rows, seed)
    moved = graph.reordered(order)
    inverse = host(order.inverse)
    # The numbers of the edges for values, in the user's order, reach both graphs' rows.
    numbers = xp.arange(graph.nnz, dtype=xp.float64)
    assert graph.with_data(numbers).reordered(order).csr == moved.with_data(numbers).csr
    before, after = (one.with_data(numbers).csr.to("cpu").tocoo() for one in (graph, moved))
    ends = [np.empty((graph.nnz, 2), np.int64) for _ in range(2)]
    for where, one in zip(ends, (before, after), strict=True):
        where[one.data.astype(np.int64)] = np.stack([one.row, one.col], 1)
    np.testing.assert_array_equal(inverse[ends[0]], ends[1])
    if A.data is not None:
        given = graph.structure.to("cpu").data
        assert moved.structure.to("cpu").data.tolist() == given.tolist()
        by_perm = host(moved.structure.data)[host(moved.csr_perm)]
        assert host(moved.csr.data).tolist() == by_perm.tolist()
    np.testing.assert_array_equal(inverse[triples(graph.structure)], triples(moved.structure))


@given(A=structures, seed=st.integers(0, 99))
def test_entries_of_a_row_keep_their_order_there_and_back(xp, A, seed):
    graph = Graph(put(xp, A))
    order = order_of(xp, A.n_rows, seed)
    before, after = graph.csr.to("cpu"), graph.reordered(order).csr.to("cpu")
    perm, inverse = host(order.perm), host(order.inverse)
    for p, row in enumerate(perm):
        old = slice(before.indptr[row], before.indptr[row + 1])
        new = slice(after.indptr[p], after.indptr[p + 1])
        assert after.indices[new].tolist() == inverse[before.indices[old]].tolist()
        if A.data is not None:
            assert after.data[new].tolist() == before.data[old].tolist()
    again = graph.reordered(order).reordered(Order(order.inverse))
    for name in ("indptr", "indices"):
        assert host(getattr(again.csr, name)).tolist() == getattr(before, name).tolist()
    assert host(again.csr_perm).tolist() == host(graph.csr_perm).tolist()
    same = graph.reordered(order_of(xp, A.n_rows, seed)).csr
    assert host(same.indices).tolist() == after.indices.tolist()


@pytest.mark.parametrize("n", [0, 2, 3, 4])
def test_what_is_no_order_of_the_vertices_is_refused(xp, n):
    graph = Graph(put(xp, COO(np.array([1]), np.array([0]), shape=(3, 3))))
    with pytest.raises(DtypeError, match=r"^order is a list: give a reorder\.Order\.$"):
        graph.reordered([2, 0, 1])
    with pytest.raises(DtypeError, match="order is a ndarray"):
        graph.reordered(xp.arange(3))
    if n != 3:
        with pytest.raises(ShapeError, match=rf"shape \(3, 3\) and order {n} vertices: give"):
            graph.reordered(order_of(xp, n, 0))
    graph = Graph(put(xp, COO(np.array([1]), np.array([2]), shape=(2, 3))))
    for one in (graph, graph.transposed):
        with pytest.raises(ShapeError, match=f"and order {n} vertices: give one of as many"):
            one.reordered(order_of(xp, n, 0))


@pytest.mark.gpu
def test_an_order_on_another_device_is_refused():
    graph = Graph(COO(np.array([1]), np.array([0]), shape=(3, 3)))
    order = order_of(np, 3, 0)
    for one, other in ((graph.to("cuda"), order), (graph, order.to("cuda"))):
        with pytest.raises(DeviceError):
            one.reordered(other)
