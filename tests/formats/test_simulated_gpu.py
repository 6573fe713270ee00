"""The GPU branches of the format layer on a machine without a GPU: see ``host_cupy``."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import host_cupy
import numpy as np
import pytest
from test_bad_input import CASES, cbsr, csr, refuse, sgt
from test_formats import EXPECTED, SPARSE, example, host, oracle, same
from test_split import COSTS, TILES, skewed, split_on

from sparsefmt import COO, CSR, from_dense
from sparsefmt.errors import FormatError, IndexRangeError
from sparsefmt.formats import arrays as formats_arrays
from sparsefmt.formats import chunks, condense, convert, faults, primitives
from sparsefmt.ops.tiles import slab_kernels, split

pytestmark = pytest.mark.skipif(host_cupy.COMPILER is None, reason="no g++ to compile kernels with")

CACHED = [
    faults._kernel,
    primitives._expand_kernel,
    primitives._search_kernel,
    primitives._pack_kernel,
    primitives._take_kernel,
    convert._to_dense_kernel,
    chunks._pieces_kernel,
    chunks._starts_kernel,
    *(
        kernel
        for module in (condense, slab_kernels)
        for kernel in vars(module).values()
        if hasattr(kernel, "cache_clear")
    ),
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The simulated CuPy, in the place of the real one."""
    cupy = host_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for kernel in CACHED:
        kernel.cache_clear()
    yield cupy
    for kernel in CACHED:
        kernel.cache_clear()


#: Simulated arrays are NumPy arrays: what a list or a scalar becomes there says nothing of CuPy.
INDEX_FAULTS = [case for case in CASES if case[0] in (FormatError, IndexRangeError)]


@pytest.mark.parametrize(("error", "text", "build"), INDEX_FAULTS)
def test_the_gpu_half_of_a_check_finds_the_same_fault(gpu, error, text, build):
    refuse(error, text, build, gpu)


def test_the_lowest_place_of_the_first_kind_is_reported(gpu):
    for make in (csr, cbsr, sgt):
        make(gpu).check()
    with pytest.raises(FormatError, match=r"decreases from 3 to 1 at position 2"):
        csr(gpu, indptr=[0, 3, 1, 0, 9], indices=[7, -1], shape=(4, 2))
    A = COO(*(gpu.asarray([0, 5, 7, -1], np.int64) for _ in "rc"), shape=(9, 6), validate="cheap")
    B = A._replace(row=gpu.asarray([0, 5, 7, 1], np.int64))
    with pytest.raises(IndexError, match=r"row\[3\] is -1 but there are 9 rows"):
        A.check()
    with pytest.raises(IndexError, match=r"col\[2\] is 7 but there are 6 columns"):
        B.check()


def random_faults(rng: np.random.Generator, A) -> dict[str, np.ndarray]:
    """One array of a tiled matrix with a few places changed."""
    name = rng.choice(["window_ptr", "columns", "tile_ptr", "slots", "order"])
    array = host(getattr(A, name)).copy()
    for place in rng.integers(0, array.size, rng.integers(1, 3)):
        other = array.flat[rng.integers(0, array.size)]
        array.flat[place] = rng.choice([other, max(int(array.flat[place]) - 1, 0)])
    return {str(name): array}


def outcome(A) -> str:
    try:
        A.check()
    except (FormatError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return "valid"


def test_both_halves_agree_on_every_damaged_tile(gpu):
    """Where they call it valid, it is lossless."""
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        n_rows, n_cols, nnz = rng.integers(1, 12, 3)
        arrays = (rng.integers(0, n, nnz).astype(np.int32) for n in (n_rows, n_cols))
        A = COO(*arrays, shape=(n_rows, n_cols)).tocsr().tosgt((int(rng.integers(1, 4)), 2))
        bad = A._replace(**random_faults(rng, A))
        moved = {name: gpu.asarray(array) for name, array in bad._arrays().items()}
        found = outcome(bad)
        assert outcome(bad._replace(**moved)) == found
        refused += found != "valid"
        if found == "valid":
            again = bad.tocsr().tosgt(bad.tile)
            assert again.tocsr() == bad.tocsr()
            assert again.tile_count <= bad.tile_count
    assert 100 < refused < 400


@pytest.mark.parametrize("values", ["float16", "float32", "float64", None])
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("target", SPARSE)
@pytest.mark.parametrize("source", SPARSE)
def test_conversions_agree_with_numpy(gpu, source, target, index, values):
    A = example(gpu, source, index=index, values=values)
    B, perm = A.asformat_with_perm(target)
    B.check()
    assert B.device == "cuda:0"
    assert isinstance(perm, gpu.ndarray)
    expected, _ = example(np, source, index=index, values=values).asformat_with_perm(target)
    assert B.to("cpu") == expected
    assert A.asformat(target) == B
    assert same(B.toarray(), oracle(expected))
    if values is not None:
        assert same(host(B.data), host(A.data)[host(perm)])


def test_other_operations_stay_on_the_device(gpu):
    A = example(gpu, "csr")
    for B in (A[1:4], A[:, [1, 0]], A.T, A.copy(), A.astype(np.float64), A.sorted_indices()):
        assert B.device == "cuda:0"
        B.check()
    assert example(gpu, "cbsr").tocsr().device == "cuda:0"
    assert from_dense(gpu.asarray(EXPECTED)).device == "cuda:0"
    assert same(A.lengths, [2, 1, 3, 0, 1])
    assert A == A.copy()


def test_matrices_move_and_stay(gpu):
    A = example(np, "sgt")
    B = A.to("cuda")
    assert B.device == "cuda:0"
    assert B.to("cuda:0") is B
    assert B.to("cpu") == A
    assert B != A
    assert formats_arrays.as_array("a", B.order) is B.order


def test_rows_of_many_entries_expand(gpu):
    """More entries than a warp's run, in segments of every length."""
    lengths = np.random.default_rng(0).integers(0, 90, 200)
    lengths[50:60] = 0
    ptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    row = primitives.expand(gpu.asarray(ptr), int(ptr[-1]))
    assert same(row, np.repeat(np.arange(200), lengths))
    indices = gpu.zeros(int(ptr[-1]), np.int32)
    assert CSR(gpu.asarray(ptr), indices, shape=(200, 1)).tocoo().tocsr().nnz == ptr[-1]


@pytest.mark.covering("tile", "costs", "index", one_in=6)
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_entries_are_split_as_by_numpy(gpu, tile, costs, index):
    split_on(gpu, skewed(1, (300, 200), 4000, index), tile, costs)


@pytest.mark.parametrize("seed", range(20))
def test_any_size_is_split_as_by_numpy(gpu, seed):
    rng = np.random.default_rng(seed)
    shape, nnz = rng.integers(1, 400, 2), rng.integers(0, 3000)
    tile = TILES[rng.integers(0, len(TILES))]
    split_on(gpu, skewed(seed, tuple(shape.tolist()), nnz), tile, COSTS[seed % len(COSTS)])


#: Columns or tiles of a window beyond the threads of a block; the last windows are empty.
WIDE = [((16, width), (40, 900)) for width in (1, 300)]
WIDE += [((32, 700), (20, 3000)), ((64, 5), (500, 2500))]


@pytest.mark.covering("tile", "costs", "index", one_in=2)
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize(("tile", "shape"), WIDE, ids=str)
def test_windows_wider_than_a_block_are_split_as_by_numpy(gpu, tile, shape, costs, index):
    rng = np.random.default_rng(0)
    row, col = (rng.integers(0, size, 6000).astype(index) for size in shape)
    A = COO(row, col, shape=(shape[0] + 2 * tile[0], shape[1])).tocsr()
    split_on(gpu, A, tile, costs)


def test_what_a_block_takes_is_placed_behind_the_stretches_before(gpu):
    """Of 2000 tiles those far behind hold enough; and one window in the middle holds nothing."""
    dense = np.repeat(np.arange(1700, 1790), 16)
    row = np.concatenate([np.arange(2000) % 16, np.arange(len(dense)) % 16])
    col = np.concatenate([np.arange(2000), dense])
    A = COO(np.concatenate([row, row + 32]), np.concatenate([col, col]), shape=(48, 2000)).tocsr()
    found = split_on(gpu, A, (16, 1), replace(COSTS[0], slab=90, again=8))
    assert np.unique(found.columns).tolist() == list(range(1700, 1790))


def test_a_sample_is_split_as_by_numpy(gpu, monkeypatch):
    monkeypatch.setattr(split, "SAMPLE", 3)
    for costs in COSTS:
        split_on(gpu, skewed(1, (300, 200), 4000), (16, 16), costs)


# Tiles


def by_chunks(gpu, monkeypatch, A: CSR, tile: tuple[int, int], entries: int) -> None:
    """The same tiles as those of NumPy, made of at least so many entries at a time."""
    expected = A.tosgt(tile)
    monkeypatch.setattr(condense, "CHUNK_ENTRIES", entries)
    monkeypatch.setattr(condense, "PART_ENTRIES", entries)
    assert A.to("cuda").tosgt(tile).to("cpu") == expected == A.tosgt(tile)


@pytest.mark.parametrize("entries", [1, 16, 100, 799, 800, 801])
@pytest.mark.parametrize("tile", [(1, 1), (4, 4), (16, 7), (3, 300), (64, 16), (500, 2)], ids=str)
def test_tiles_are_written_wholly(gpu, monkeypatch, tile, entries):
    """Into poisoned memory; of 800 entries, with windows in the middle and at the end empty."""
    rng = np.random.default_rng(0)
    row, col = (rng.integers(0, size, 800) for size in (150, 90))
    A = COO(row + row // 30 * 40, col, shape=(600, 90)).tocsr()
    by_chunks(gpu, monkeypatch, A, tile, entries)


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (40, 7)])
def test_tiles_of_nothing_have_an_end(gpu, monkeypatch, shape, index):
    A = CSR(np.zeros(shape[0] + 1, index), np.zeros(0, index), shape=shape)
    by_chunks(gpu, monkeypatch, A, (16, 8), 1)


@pytest.mark.parametrize(("n_rows", "looks"), [(4, False), (5, True)])
def test_words_that_are_wide_enough_need_no_look_at_the_windows(gpu, monkeypatch, n_rows, looks):
    """Columns of 60 bits; windows of a row, and entries, of two or of three."""
    asked = []
    monkeypatch.setattr(condense, "to_device", lambda a, device: asked.append(device) or a.get())
    col = 2**59 - np.arange(n_rows)
    A = CSR(np.arange(n_rows + 1), col, shape=(n_rows, 2**59 + 1))
    B = A.to("cuda").tosgt((1, 2))
    assert bool(asked) == looks
    assert B.columns.tolist() == [[one, -1] for one in col]
    assert B.order.tolist() == list(range(n_rows))


# Moving


def test_what_is_sent_together_lies_apart_and_keeps_its_shape(gpu):
    sent = [np.arange(3, dtype=np.uint8), np.zeros((0, 4), np.int64), np.arange(8).reshape(2, 4)]
    copies = []
    gpu.asarray = lambda a: copies.append(a.nbytes) or np.array(a).view(gpu.ndarray)
    found = formats_arrays.send(sent, like=gpu.zeros(1))
    assert copies == [256]
    for one, other in zip(found, sent, strict=True):
        assert isinstance(one, gpu.ndarray)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert same(one, other)
    left = formats_arrays.send(sent, like=sent[0])
    assert all(one is other for one, other in zip(left, sent, strict=True))
