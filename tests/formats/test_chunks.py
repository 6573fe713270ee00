"""How rows are cut into chunks, by NumPy, on a GPU, and on a simulated one."""

import numpy as np
import pytest
from test_formats import same
from test_simulated_gpu import gpu  # noqa: F401

from sparsefmt.formats import chunks
from sparsefmt.formats.chunks import CHUNKS_PER_BLOCK, LONG_ROW, PIECE

LONGEST = [0, 1, 9, 3000, 40_000]


def rows(n_rows: int, longest: int, index: str) -> np.ndarray:
    """``indptr`` of empty rows, rows of a piece and a bit, and hubs, which blocks cut."""
    rng = np.random.default_rng(longest)
    lengths = rng.integers(0, min(longest, 30) + 1, n_rows)
    lengths[: n_rows // 30 + 1] = longest
    lengths[n_rows // 2 : n_rows // 2 + 5] = 0
    return np.concatenate([[0], np.cumsum(lengths)]).astype(index)


def check(xp, monkeypatch, longest, index, *, wave):
    """The same as by NumPy in waves of so many blocks."""
    count = chunks._block_count
    for n_rows in (0, 1, 2, 31, 700):
        indptr = rows(n_rows, longest, index)
        found = chunks.chunks(xp.asarray(indptr), int(indptr[-1]))
        with monkeypatch.context() as patch:
            patch.setattr(chunks, "_block_count", lambda t, p, wave, of=wave: count(t, p, of))
            expected = chunks.chunks(indptr, int(indptr[-1]))
        for array, other in zip(found.arrays(), expected.arrays(), strict=True):
            assert array.dtype == other.dtype
            assert same(array, other)


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("multiprocessors", [1, 3])
@pytest.mark.parametrize("longest", LONGEST)
def test_a_gpu_cuts_rows_as_numpy_does(gpu, monkeypatch, longest, multiprocessors, index):  # noqa: F811
    monkeypatch.setattr(chunks, "RESIDENT_BLOCKS", 2)
    monkeypatch.setattr(chunks, "multiprocessors", lambda device: multiprocessors)
    check(gpu, monkeypatch, longest, index, wave=2 * multiprocessors)


@pytest.mark.gpu
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("longest", LONGEST)
def test_a_real_one_does_too(monkeypatch, longest, index):
    cupy = pytest.importorskip("cupy")
    wave = chunks.RESIDENT_BLOCKS * chunks.multiprocessors(0)
    check(cupy, monkeypatch, longest, index, wave=wave)


@pytest.mark.parametrize("longest", LONGEST)
@pytest.mark.parametrize("n_rows", [0, 1, 31, 700])
def test_chunks_are_equal_shares_of_all_pieces(longest, n_rows):
    """Of each block; a block begins where a row does, unless the row is long."""
    indptr = rows(n_rows, longest, "int32")
    found = chunks.chunks(indptr, int(indptr[-1]))
    row, entry = found.start.T
    assert (row[0], entry[0]) == (0, indptr[0])
    assert (row[-1], entry[-1]) == (n_rows, indptr[-1])
    assert (entry >= indptr[row]).all()
    pieces = np.maximum(-(-np.diff(indptr) // PIECE), 1)
    before = np.concatenate([[0], np.cumsum(pieces)])[row] + (entry - indptr[row]) // PIECE
    share = np.diff(before).reshape(-1, CHUNKS_PER_BLOCK)
    assert (share >= 0).all()
    full = share[share.cumsum(1) < share.sum(1, keepdims=True)]
    assert (full == np.repeat(share[:, 0], (share.cumsum(1) < share.sum(1)[:, None]).sum(1))).all()
    begins, cuts = found.start[::CHUNKS_PER_BLOCK], found.slot >= 0
    assert (cuts == (begins[:, 1] > indptr[begins[:, 0]])).all()
    assert (np.diff(indptr)[begins[cuts, 0]] > LONG_ROW).all()
    assert found.cut.tolist() == np.flatnonzero(cuts).tolist()
    assert found.long.tolist() == np.flatnonzero(np.diff(indptr) > LONG_ROW).tolist()
    assert found.longest == np.diff(indptr).max(initial=0)


@pytest.mark.parametrize("wave", [1, 3, 924])
@pytest.mark.parametrize("total", [0, 1, 63, 64, 127, 128, 1000, 10**5, 10**8])
def test_blocks_are_whole_waves_unless_their_chunks_would_have_few_pieces(total, wave):
    blocks = chunks._block_count(total, chunks.PIECES, wave)
    few = 2 * CHUNKS_PER_BLOCK
    assert blocks == 1 or blocks * few <= total
    assert blocks % wave == 0 or blocks == max(total // few, 1)
    assert blocks < wave or total / blocks < 2 * chunks.PIECES * CHUNKS_PER_BLOCK
