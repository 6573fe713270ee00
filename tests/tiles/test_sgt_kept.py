"""What stays with the structure of an SGT once it was built: its split, and its CSR."""

import copy
import pickle
import threading

import numpy as np
import pytest
from op_cases import features, put
from tile_cases import costs, windows

import sparsefmt
from sparsefmt import ops
from sparsefmt.ops.tiles.costs import Costs
from sparsefmt.testing import assert_close, error_bound, spmm_oracle

F32 = np.float32
TILE = (64, 16)


def tiled():
    return windows(F32).tosgt(TILE)


def test_a_split_is_kept_with_the_structure(xp):
    A = put(xp, tiled())
    B = A.with_data(None)  # before anything was built
    P = A.split()
    assert A.split(Costs()) is P
    assert B.split() is P
    assert A.with_data(-A.data).split() is P
    assert A.astype(np.float64).split() is P
    assert A.split(Costs(part=2)) is not P
    assert A.split(Costs(part=2)) is A.split(Costs(part=2))


def test_a_split_is_not_kept_where_the_structure_is_another(xp):
    A = put(xp, tiled())
    P = A.split(costs("all", 64))
    others = [A.copy(), A.astype(index_dtype=np.int64), A[:100], A.T, A.tocsr().tosgt(TILE)]
    for B in others:
        assert B.split(costs("all", 64)) is not P
    assert A.astype(index_dtype=np.int64).split(costs("all", 64)).items.dtype == np.int64


@pytest.mark.gpu
def test_nothing_kept_follows_to_another_device():
    A = tiled()
    P = A.split()
    B = A.to("cuda")
    assert B.split() is not P
    assert B._structure().device == "cuda:0"
    assert B._structure() is B._structure()
    assert B.to("cuda") is B


@pytest.mark.parametrize("protocol", [2, pickle.DEFAULT_PROTOCOL])
def test_nothing_kept_is_pickled(protocol):
    A = tiled()
    before = len(pickle.dumps(A, protocol))
    A.split()
    A._structure()
    assert len(pickle.dumps(A, protocol)) == before
    for again in (pickle.loads(pickle.dumps(A, protocol)), copy.deepcopy(A)):
        assert again == A
        assert {name for name in vars(again) if name[0] == "_"} == set()
        assert again._structure() == A._structure()
        assert again.split().share == A.split().share


def test_the_structure_is_the_csr_that_it_was_made_of(xp):
    csr = put(xp, windows(F32))
    A = csr.tosgt(TILE)
    assert A._structure().indices is csr.indices
    assert A._structure().data is None
    assert A.with_data(None)._structure() is A._structure()
    for B in (A.copy(), pickle.loads(pickle.dumps(A))):
        assert B._structure() == csr.with_data(None)
        assert B._structure() is B._structure()


def test_the_structure_of_a_constructed_one_is_built():
    A = tiled()
    B = sparsefmt.SGT(**A._arrays(), shape=A.shape, tile=A.tile)
    assert B._structure() == A._structure()


def test_what_is_kept_takes_no_part_in_comparing_or_counting_bytes():
    A, B = tiled(), tiled()
    nbytes, text = A.nbytes, repr(A)
    A.split()
    assert A == B
    assert (A.nbytes, repr(A)) == (nbytes, text)


def test_threads_get_the_same_one():
    A = tiled()
    together, found = threading.Barrier(8), []

    def ask():
        together.wait()
        found.append(A.with_data(None).split())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(one) for one in found}) == 1


def test_a_split_that_fails_is_not_kept(monkeypatch):
    A = tiled()

    def fails(*_):
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("sparsefmt.ops.tiles.split.split", fails)
        with pytest.raises(MemoryError, match="no room"):
            A.split()
    assert A.split().nnz == A.nnz


@pytest.mark.parametrize("op", ["spmm", "sddmm"])
def test_a_result_does_not_overwrite_the_structure_that_is_kept(op):
    csr = sparsefmt.CSR(
        np.arange(65, dtype=np.int32), np.arange(64, dtype=np.int32), shape=(64, 64)
    )
    A, X = csr.tosgt(TILE), np.ones((64, 1), F32)
    out = csr.indices.view(F32)
    operands, out = ((X,), out[:, None]) if op == "spmm" else ((X, X), out)
    with pytest.raises(sparsefmt.FormatError, match="out overlaps an input"):
        getattr(ops, op)(A, *operands, out=out)
    perm = A.split(costs("all", 64)).perm
    assert len(perm) == 64
    with pytest.raises(sparsefmt.FormatError, match="out overlaps an input"):
        getattr(ops, op)(A, *operands, out=perm.view(F32).reshape(out.shape))


def test_a_result_does_not_overwrite_what_a_split_leaves():
    A, X = tiled().with_data(None), np.ones((187, 1), F32)
    split = A.split(costs("mix", 64))
    for array in (split.rest_perm, split.rest.indices):
        with pytest.raises(sparsefmt.FormatError, match="out overlaps an input"):
            ops.spmm(A, X, out=array[: A.n_rows, None].view(F32))
    assert ops.spmm(A, X, out=np.empty((A.n_rows, 1), F32)).shape == (A.n_rows, 1)


def test_tiles_may_be_empty(xp):
    """A format allows columns that no entry uses, and so whole tiles and windows of them."""
    order, slots = np.array([1, 0, 2]), np.array([2, 1, 0], np.uint8)
    columns = np.array([[0, 3], [4, -1], [1, 2], [3, 4], [0, 2], [3, -1]])
    tile_ptr, window_ptr = np.array([0, 0, 0, 2, 2, 2, 3]), np.array([0, 2, 4, 4, 6])
    values = np.array([0.5, -2, 3], F32)
    A = sparsefmt.SGT(
        window_ptr, columns, tile_ptr, slots, order, values, shape=(7, 5), tile=(2, 2)
    )
    X = features(5, 9, F32)
    result = ops.spmm(put(xp, A), put(xp, X))
    assert_close(result, spmm_oracle(A, X), bound=error_bound(A, X))
