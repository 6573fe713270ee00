"""Memory that conversions take on the CPU: at most 2.5 times input plus output."""

import itertools
import tracemalloc

import numpy as np
import pytest

from sparsefmt import COO
from sparsefmt.formats import primitives

FACTOR = 2.5
#: Temporaries of a part of the rows, whose number does not grow with the matrix.
PARTS = 4 * 8 * primitives.PART
SHAPES = {
    "many rows": (6_000_000, 50, 100),
    "many columns": (50, 6_000_000, 100),
    "many of both": (6_000_000, 6_000_000, 100),
    "no entry": (6_000_000, 6_000_000, 0),
    "many entries": (2000, 2000, 2_000_000),
    "as many": (1_500_000, 1_500_000, 1_500_000),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_no_conversion_passes_its_share(shape, ascending, index_dtype):
    rng = np.random.default_rng(7)
    n_rows, n_cols, nnz = SHAPES[shape]
    row = rng.integers(0, n_rows, nnz).astype(index_dtype)
    col = rng.integers(0, n_cols, nnz).astype(index_dtype)
    A = COO(np.sort(row) if ascending else row, col, shape=(n_rows, n_cols))
    for given in (A, A.with_data(np.ones(nnz, np.float32))):
        for start, goal in itertools.permutations(("coo", "csr", "csc"), 2):
            B = given.asformat(start)
            tracemalloc.start()
            C = B.asformat(goal)
            peak = B.nbytes + tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= FACTOR * (B.nbytes + C.nbytes) + PARTS, (start, goal)
            assert C.nnz == nnz


@pytest.mark.parametrize("part", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("first", [0, 5])
def test_parts_join(monkeypatch, part, first):
    monkeypatch.setattr(primitives, "PART", part)
    lengths = np.array([0, 2, 0, 0, 3, 1, 0, 0])
    segment = np.repeat(np.arange(8), lengths)
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    assert primitives.expand(ptr + first, 6).tolist() == segment.tolist()
    assert primitives.pointers(segment, 8, np.int32).tolist() == ptr.tolist()
    assert primitives.pointers(10 * segment, 8, np.int64, step=10).tolist() == ptr.tolist()
