"""Memory that conversions take on the CPU: at most 2.5 times input plus output."""

import itertools
import tracemalloc

import numpy as np
import pytest

from sparsefmt import COO, CSR
from sparsefmt.formats import condense, primitives

FACTOR = 2.5
#: What is worked on at a time: an eighth of the library's, and so are the matrices.
PART = primitives.PART // 8
#: Temporaries of a part of the rows, whose number does not grow with the matrix.
PARTS = 4 * 8 * PART
SHAPES = {
    "many rows": (750_000, 50, 100),
    "many columns": (50, 750_000, 100),
    "many of both": (750_000, 750_000, 100),
    "no entry": (750_000, 750_000, 0),
    "no row": (0, 750_000, 0),
    "many entries": (2000, 2000, 187_500),
    "as many": (187_500, 187_500, 187_500),
    "one row": (1, 375_000, 187_500),
    "one cell": (1, 1, 187_500),
}
TILES = [(1, 1), (128, 64), (65_536, 1)]
#: Columns of padding: few rows only.
WIDE = [((1, 65_536), "one row"), ((1, 65_536), "one cell"), ((16, 4096), "many columns")]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(primitives, "PART", PART)
    monkeypatch.setattr(condense, "PART_ENTRIES", condense.PART_ENTRIES // 8)


def example(shape, index_dtype, *, ascending):
    rng = np.random.default_rng(7)
    n_rows, n_cols, nnz = SHAPES[shape]
    row = rng.integers(0, n_rows, nnz).astype(index_dtype)
    col = rng.integers(0, n_cols, nnz).astype(index_dtype)
    A = COO(np.sort(row) if ascending else row, col, shape=(n_rows, n_cols))
    return A, A.with_data(np.ones(nnz, np.float32))


def assert_share(A, goal, *, between=0, **options):
    """Convert ``A`` within its share of input, output and the bytes of the format ``between``."""
    A = A._replace()  # nothing was built of it
    tracemalloc.start()
    B = A.asformat(goal, **options)
    peak = A.nbytes + tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= FACTOR * (A.nbytes + between + B.nbytes) + PARTS, (A, goal, options)
    assert B.nnz == A.nnz


@pytest.mark.covering("shape", "ascending", "index_dtype", one_in=2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_no_conversion_passes_its_share(shape, ascending, index_dtype):
    for A in example(shape, index_dtype, ascending=ascending):
        found = {format: A.asformat(format) for format in ("coo", "csr", "csc", "sgt")}
        for start, goal in itertools.permutations(found, 2):
            by_csr = "sgt" in (start, goal) and "csr" not in (start, goal)
            assert_share(found[start], goal, between=found["csr"].nbytes * by_csr)


@pytest.mark.covering("tile", "shape", "index_dtype", one_in=2)
@pytest.mark.parametrize(("tile", "shape"), [*itertools.product(TILES, SHAPES), *WIDE], ids=str)
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_no_tiles_pass_their_share(shape, tile, index_dtype):
    A = example(shape, index_dtype, ascending=True)[0].tocsr()
    assert_share(A, "sgt", tile=tile)
    assert_share(A.tosgt(tile), "csr")


@pytest.mark.parametrize("distinct", [3, 75_000])
def test_columns_that_are_ranked_pass_no_share(distinct):
    col = np.random.default_rng(7).integers(0, distinct, 150_000) * 2**38
    A = CSR(np.arange(150_001), col, shape=(150_000, 2**60 - 2))
    assert_share(A, "sgt", tile=(1000, 16))


@pytest.mark.parametrize("part", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("first", [0, 5])
def test_parts_join(monkeypatch, part, first):
    monkeypatch.setattr(primitives, "PART", part)
    lengths = np.array([0, 2, 0, 0, 3, 1, 0, 0])
    segment = np.repeat(np.arange(8), lengths)
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    assert primitives.expand(ptr + first, 6).tolist() == segment.tolist()
    for begin, end in itertools.combinations_with_replacement(range(7), 2):
        found = primitives.expand_part(ptr + first, slice(first + begin, first + end))
        assert found.tolist() == segment[begin:end].tolist()
    assert primitives.pointers(segment, 8, np.int32).tolist() == ptr.tolist()
    assert primitives.pointers(10 * segment, 8, np.int64, step=10).tolist() == ptr.tolist()


@pytest.mark.parametrize("part", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("tile", [(1, 1), (3, 2), (16, 8), (50, 1)], ids=str)
def test_parts_of_tiles_join(monkeypatch, part, tile):
    rng = np.random.default_rng(part)
    row, col = rng.integers(0, 40, 300) // 3 * 4, rng.integers(0, 9, 300)
    for A in (COO(row, col, shape=(60, 9)).tocsr(), CSR([0, 9], [4, 1] * 4 + [1], shape=(1, 5))):
        whole = A.tosgt(tile)
        whole.check()
        with monkeypatch.context() as patch:
            patch.setattr(condense, "PART_ENTRIES", part)
            assert A.tosgt(tile) == whole
            whole.check()
            assert whole.tocsr() == A
