"""Orders are permutations, apply as dense permutations do, and raise the tile density."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from op_cases import host

from sparsefmt import (
    COO,
    CSR,
    DeviceError,
    DtypeError,
    FormatError,
    IndexRangeError,
    ShapeError,
    UnsupportedError,
)
from sparsefmt.formats.cbsr import CBSR
from sparsefmt.generate import banded, power_law_with_labels
from sparsefmt.reorder import Order, community_order, degree_order, rcm_order
from sparsefmt.stats import summarize
from sparsefmt.testing import coo, csr, sgt

ORDERS = {"degree": degree_order, "rcm": rcm_order, "community": community_order}
matrices = st.one_of(csr(dtype="float64"), coo(dtype="float64"), csr().map(CSR.tocsc), sgt())
square = csr(rectangular=False, hubs=True)
NOTHING = CSR(np.zeros(1, np.int64), np.zeros(0, np.int64), shape=(0, 0))
LOOP = CSR(np.array([0, 2]), np.array([0, 0]), shape=(1, 1))


def on(xp, A):
    return A.to("cpu" if xp is np else "cuda")


def drawn_order(data, n, dtype=np.int32):
    return Order(np.array(data.draw(st.permutations(range(n))), dtype))


@pytest.mark.parametrize("name", ORDERS)
@settings(max_examples=25)
@given(A=square)
@example(A=NOTHING)
@example(A=LOOP)
def test_every_order_is_a_permutation_and_its_inverse(xp, name, A):
    A = on(xp, A)
    order = ORDERS[name](A)
    perm, inverse = host(order.perm), host(order.inverse)
    assert sorted(perm.tolist()) == list(range(A.n_rows)) == perm[inverse].tolist()
    found = order.perm.dtype, order.device, len(order)
    assert found == (A.index_dtype, A.device, A.n_rows)


@given(A=matrices, axis=st.sampled_from(["both", "rows", "columns"]), data=st.data())
def test_applying_permutes_as_a_dense_matrix_would(xp, A, axis, data):
    if axis == "both":
        A = A[: min(A.shape), : min(A.shape)]
    order = drawn_order(data, A.n_cols if axis == "columns" else A.n_rows)
    perm = order.perm
    X = host(A.toarray())
    X = X if axis == "columns" else X[perm]
    X = X if axis == "rows" else X[:, perm]
    B = on(xp, order).apply(on(xp, A), axis)
    assert type(B) is type(A)
    np.testing.assert_array_equal(host(B.toarray()), X)
    B.check()


@given(A=matrices, axis=st.sampled_from(["rows", "columns"]), data=st.data())
def test_the_permutation_carries_edge_values(xp, A, axis, data):
    order = drawn_order(data, A.n_cols if axis == "columns" else A.n_rows)
    values = np.arange(A.nnz, dtype=np.float64)
    A = on(xp, A.with_data(values))
    B, perm = on(xp, order).apply_with_perm(A, axis)
    np.testing.assert_array_equal(host(B.data), host(A.data[perm]))
    assert sorted(host(perm).tolist()) == list(range(A.nnz))


@given(n=st.integers(0, 9), data=st.data())
def test_features_come_back(xp, n, data):
    order = on(xp, drawn_order(data, n))
    X = xp.arange(n * 3).reshape(n, 3)
    Y = order.apply_features(X)
    np.testing.assert_array_equal(host(Y), host(X)[host(order.perm)])
    np.testing.assert_array_equal(host(order.undo_features(Y)), host(X))


@given(A=csr(hubs=True, empty_rows=True), descending=st.booleans())
def test_degrees_are_in_order_and_ties_too(xp, A, descending):
    perm = host(degree_order(on(xp, A), descending=descending).perm)
    keys = np.diff(A.indptr)[perm] * (-1 if descending else 1)
    assert [*zip(keys, perm, strict=True)] == sorted(zip(keys, perm, strict=True))
    B = on(xp, CSR(np.array([0, 1, 4]), np.array([2, 0, 1, 2]), shape=(2, 3)))
    assert host(degree_order(B).apply(B, "rows").lengths).tolist() == [3, 1]


def test_rcm_undoes_a_shuffle_of_a_band(xp):
    A = banded(200, 2)
    shuffled = Order(np.random.default_rng(0).permutation(200)).apply(A).tocsr()
    assert summarize(shuffled).bandwidth > 50
    assert summarize(rcm_order(on(xp, shuffled)).apply(on(xp, shuffled))).bandwidth < 4


@pytest.mark.parametrize(("name", "gain"), [("community", 1.8), ("rcm", 1.2)])
def test_orders_raise_the_tile_density_of_shuffled_communities(xp, name, gain):
    A, labels = power_law_with_labels(2000, 40_000, inside=0.9, community=100, seed=3)
    A = on(xp, A)
    before = A.tosgt((16, 8)).tile_density
    after = ORDERS[name](A).apply(A).tosgt((16, 8)).tile_density
    assert after >= gain * before
    if name == "community":  # 19 changes at least; a shuffle has about 1900
        planted = labels[host(community_order(A).perm)]
        assert (planted[1:] != planted[:-1]).sum() < 60


def test_the_seed_decides_the_order(xp):
    A = on(xp, power_law_with_labels(500, 2500, seed=1)[0])
    perms = [host(community_order(A, seed=seed).perm).tolist() for seed in (0, 0, 1)]
    assert perms[0] == perms[1] != perms[2]


@pytest.mark.gpu
def test_both_devices_find_the_same_communities():
    A = power_law_with_labels(2000, 20_000, seed=1)[0]
    there = community_order(A.to("cuda")).perm.get()
    assert there.tolist() == community_order(A).perm.tolist()


def test_vertices_without_links_and_no_rounds_keep_their_places(xp):
    A = on(xp, CSR(np.zeros(5, np.int32), np.zeros(0, np.int32), shape=(4, 4)))
    assert host(community_order(A).perm).tolist() == [0, 1, 2, 3]
    assert host(community_order(on(xp, banded(6, 1)), rounds=0).perm).tolist() == list(range(6))


def test_inputs_are_not_changed(xp):
    A = on(xp, power_law_with_labels(200, 900)[0].tocsr())
    copy = A.copy()
    for order in ORDERS.values():
        order(A).apply(A)
    assert A == copy


def test_moving_an_order_and_the_entries_of_a_coo(xp):
    A = on(xp, COO(np.array([2, 0]), np.array([1, 2]), np.array([5.0, 6.0]), shape=(3, 3)))
    order = on(xp, Order(np.array([2, 0, 1])))
    B = order.apply(A)
    assert host(B.data).tolist() == [5.0, 6.0]
    assert (host(B.row).tolist(), host(B.col).tolist()) == ([0, 1], [2, 0])
    assert order.to(order.device) is order
    assert repr(order) == f"Order(3 vertices, int64, {order.device})"


@pytest.mark.parametrize(
    ("perm", "error", "message"),
    [
        ([0, 2, 2], FormatError, "perm never names vertex 1"),
        ([0, 3, 1], IndexRangeError, r"perm\[1\] is 3 but there are 3 vertices"),
        ([0, -1], IndexRangeError, r"perm\[1\] is -1"),
        ([[0, 1]], ShapeError, "perm has shape"),
        ([0.0, 1.0], DtypeError, "perm.dtype is float64"),
        ([True, False], DtypeError, "perm.dtype is bool"),
    ],
)
def test_what_is_no_permutation_is_refused(xp, perm, error, message):
    with pytest.raises(error, match=message):
        Order(xp.asarray(perm))


THREE = Order(np.array([2, 0, 1]))
WIDE = CSR(np.zeros(4, np.int64), np.zeros(0, np.int64), shape=(3, 5))
FEATURES = CBSR(np.zeros((3, 1), np.uint8), np.ones((3, 1), np.float32), shape=(3, 2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: THREE.apply(WIDE), ShapeError, r"shape \(3, 5\) but both of 3 .* takes axis="),
        (lambda: THREE.apply(WIDE, "columns"), ShapeError, "columns of 3 vertices are ordered"),
        (lambda: THREE.apply(WIDE.T, "rows"), ShapeError, "rows of 3 vertices"),
        (lambda: THREE.apply(WIDE, "diagonal"), UnsupportedError, "axis is 'diagonal'"),
        (lambda: THREE.apply(FEATURES), UnsupportedError, r"A is a CBSR.*apply_features"),
        (lambda: THREE.apply(np.eye(3)), UnsupportedError, "A is a ndarray"),
        (lambda: THREE.apply_features(np.ones((4, 2))), ShapeError, r"X has shape \(4, 2\) but 3"),
        (lambda: THREE.undo_features(np.ones(())), ShapeError, r"X has shape \(\)"),
        (lambda: rcm_order(WIDE), ShapeError, "this order is of a square matrix"),
        (lambda: community_order(WIDE), ShapeError, "this order is of a square matrix"),
        (lambda: degree_order(FEATURES), UnsupportedError, "A is a CBSR"),
        (lambda: degree_order([1, 2]), UnsupportedError, "A is a list"),
        (lambda: community_order(LOOP, seed=-1), UnsupportedError, "seed is -1"),
        (lambda: community_order(LOOP, seed=0.5), UnsupportedError, "seed is 0.5"),
        (lambda: community_order(LOOP, rounds=-1), ShapeError, "rounds is -1"),
        (lambda: community_order(LOOP, rounds="all"), ShapeError, "rounds is 'all'"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_too_many_vertices_are_refused_before_work_begins():
    side = (1 << 26) + 1
    nothing = np.zeros(0, np.int32)
    A = CSR._trusted(indptr=nothing, indices=nothing, data=None, shape=(side, side))
    with pytest.raises(UnsupportedError, match="community_order takes 67108864 at most"):
        community_order(A)


@pytest.mark.gpu
def test_mixed_devices_are_refused():
    A = banded(3, 1).to("cuda")
    with pytest.raises(DeviceError, match="A is on cuda:0 but the order is on cpu"):
        THREE.apply(A)
    with pytest.raises(DeviceError, match="X is on cuda:0"):
        THREE.apply_features(A.toarray())
