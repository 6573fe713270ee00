"""Edges of a file in pieces are those of the file as a whole, in its order."""

import numpy as np
import pytest
import scipy.sparse

from sparsefmt import COO, FileFormatError, read, to_scipy, write
from sparsefmt.io import chunks, npz
from sparsefmt.io.chunks import read_chunks


def matrix(*, weighted):
    """A matrix of some entries, not square."""
    rng = np.random.default_rng(0)
    row, col = rng.integers(0, 40, 300), rng.integers(0, 30, 300)
    return COO(row, col, rng.random(300) if weighted else None, shape=(40, 30))


def joined(found):
    """The columns, rows and values of all pieces, and the last shape."""
    parts = [np.concatenate(part) for part in zip(*[one[:2] for one in found], strict=True)]
    weights = [one.weight for one in found if one.weight is not None and len(one.weight)]
    return (*parts, np.concatenate(weights) if weights else None, found[-1].shape)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["g.txt", "g.csv", "g.npz", "csr.npz", "SciPy.npz", "g.mtx"])
def test_pieces_are_the_whole(tmp_path, monkeypatch, name, weighted):
    monkeypatch.setattr(chunks, "LENGTH", 64)
    A = matrix(weighted=weighted)
    write(tmp_path / name, A.tocsr() if name == "csr.npz" else A)
    if name == "SciPy.npz":
        S = to_scipy(A.tocsr())  # with room behind the last pointer, in the last piece and after it
        S.data, S.indices = (np.append(a, a[:50]) for a in (S.data, S.indices))
        scipy.sparse.save_npz(tmp_path / name, S)
    whole = read(tmp_path / name, format="coo")
    found = list(read_chunks(tmp_path / name))
    col, row, weight, shape = joined(found)
    assert shape == whole.shape == (40, 30)
    assert (col == whole.col).all()
    assert (row == whole.row).all()
    assert (weight is None) == (whole.data is None)
    if weight is not None:
        np.testing.assert_allclose(weight, whole.data)
    assert name.endswith((".txt", ".csv")) or len(found) == 5


def test_pieces_are_of_the_file_that_was_verified(tmp_path, monkeypatch):
    A, path = matrix(weighted=True).tocsr(), tmp_path / "csr.npz"
    write(path, A)
    verified = npz.csr_blocks

    def replacing(*args, **options):
        blocks = verified(*args, **options)
        write(path, A.with_data(-A.data))
        return blocks

    monkeypatch.setattr(npz, "csr_blocks", replacing)
    assert (joined(list(read_chunks(path)))[2] == A.data).all()


@pytest.mark.parametrize("name", ["g.txt", "g.npz", "csr.npz"])
def test_a_graph_without_edges_is_one_piece(tmp_path, name):
    A = COO(np.empty(0, np.int64), np.empty(0, np.int64), shape=(5, 5))
    write(tmp_path / name, A.tocsr() if name == "csr.npz" else A)
    found = list(read_chunks(tmp_path / name))
    assert [len(one.source) for one in found] == [0] * len(found)
    assert found[-1].shape == (5, 5)


def test_an_edge_list_without_edges_has_to_say_so(tmp_path):
    (tmp_path / "g.txt").write_text("# nothing\n")
    with pytest.raises(FileFormatError, match="no edge in it"):
        list(read_chunks(tmp_path / "g.txt"))


@pytest.mark.parametrize("kind", ["plain", "SciPy"])
@pytest.mark.parametrize("name", ["indptr", "indices", "shape", "data"])
def test_a_member_that_is_missing_is_missing_in_pieces_too(tmp_path, kind, name):
    S = to_scipy(matrix(weighted=True).tocsr())
    members = {"indptr": S.indptr, "indices": S.indices, "shape": S.shape, "data": S.data}
    del members[name]
    np.savez(tmp_path / "g.npz", **members, **{"format": b"csr"} if kind == "SciPy" else {})
    if (kind, name) == ("plain", "data"):
        assert [piece.weight for piece in read_chunks(tmp_path / "g.npz")] == [None]
        return
    for act in (lambda path: list(read_chunks(path)), read):
        with pytest.raises(FileFormatError, match=rf'g\.npz: member "{name}" is missing'):
            act(tmp_path / "g.npz")
