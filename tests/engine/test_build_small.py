"""The build in one launch, its blocks on threads of the host: the same as by NumPy and SciPy."""

import host_cuda
import numpy as np
import pytest

from sparsefmt import Graph
from sparsefmt.formats import chunks
from sparsefmt.formats.chunks import CHUNKS_PER_BLOCK
from sparsefmt.interop.pyg import from_edge_index
from sparsefmt.ops.engine import build
from sparsefmt.ops.engine.build import Findings

pytestmark = pytest.mark.skipif(host_cuda.COMPILER is None, reason="no C++ compiler")

MULTIPROCESSORS = 2
WAVE = MULTIPROCESSORS * build.RESIDENT_BLOCKS
TYPES = {"int32": "int", "int64": "long long"}
PARAMETERS = (
    "const INDEX *target, *source; char* rows; Report* report; char* columns; Report* other; "
    "long long *scratch, *progress; long long step, n_rows, n_cols; int nnz, share; "
    "Layout at, of_columns; int wave, count;"
)
CALL = (
    "build_small<INDEX>(p.target, p.source, p.rows, p.report, p.columns, p.other, p.scratch, "
    "p.progress, p.step, p.n_rows, p.n_cols, p.nnz, p.share, p.at, p.of_columns, p.wave, p.count)"
)


@pytest.fixture
def on_host(monkeypatch):
    """Have the launcher run its kernel on the host."""

    def load(name, types, *, file):
        index = TYPES[types[0]]
        cpp = PARAMETERS.replace("INDEX", index), CALL.replace("INDEX", index)
        return host_cuda.Kernel(file, build._PARAMETERS[name], *cpp)

    monkeypatch.setattr(build, "_load", load)
    monkeypatch.setattr(build, "multiprocessors", lambda device: MULTIPROCESSORS)
    caches = build.small, build.layout
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


class Built:
    """One direction in memory of the host, from ``begin`` on: of so many rows and entries."""

    def __init__(self, at, n_rows, nnz, memory, begin):
        self.at, self.index, self.memory, self.begin = at, at.index_dtype, memory, begin
        self.n_rows, self.nnz = n_rows, nnz
        self.report = np.zeros(8, np.int64)

    def part(self, place, count, dtype):
        first = self.begin - self.memory.ctypes.data + place
        return self.memory[first : first + count * np.dtype(dtype).itemsize].view(dtype)

    def check(self, csr, perm):
        """Compare with a CSR, and with the cut of its rows by NumPy."""
        at, found = self.at, Findings(*map(int, self.report[: len(Findings._fields)]))
        assert found.done
        n_rows, nnz = self.n_rows, self.nnz
        assert (self.part(at.indptr, n_rows + 1, self.index) == csr.indptr).all()
        assert (self.part(at.indices, nnz, self.index) == csr.indices).all()
        assert (self.part(at.perm, nnz, self.index) == perm).all()
        lengths = np.diff(csr.indptr)
        inverse = self.part(at.inverse, n_rows, np.float32)
        assert (inverse == (1 / np.maximum(lengths, 1)).astype(np.float32)).all()
        row = np.repeat(np.arange(n_rows), lengths)
        if at.scale:  # of rows, not of the transpose
            own = 1 - np.bincount(row[csr.indices == row], minlength=n_rows)
            scale, square = (
                self.part(place, n_rows, np.float32) for place in (at.scale, at.square)
            )
            np.testing.assert_allclose(scale, (lengths + own) ** -0.5, rtol=2e-7)
            np.testing.assert_allclose(square, own / (lengths + own), rtol=2e-7)
        cut = chunks.chunks(csr.indptr, csr.nnz)
        sizes = cut.blocks, len(cut.cut), len(cut.long), cut.longest
        assert (found.blocks, found.cuts, found.longs, found.longest) == sizes
        assert found.blocks <= at.blocks
        assert found.cuts <= at.n_cuts
        start = self.part(at.start, 2 * ((at.blocks + 1) * CHUNKS_PER_BLOCK + 1), self.index)
        start, n = start.reshape(-1, 2), len(cut.start)
        assert (start[:n] == cut.start).all()
        assert (start[n:] == (n_rows, nnz)).all()
        slot, borders = self.part(at.slot, at.blocks + 1, np.int32), len(cut.slot)
        assert (slot[:borders] == cut.slot).all()
        assert (slot[borders:] == -1).all()
        cuts = self.part(at.cut, at.n_cuts, np.int32)
        assert (cuts[: found.cuts] == cut.cut).all()
        assert (cuts[found.cuts :] == at.blocks).all()
        assert (self.part(at.long, found.longs, self.index) == cut.long).all()
        assert found.moved == (perm != np.arange(nnz)).any()
        assert found.loops == (csr.indices == row).any()


def aligned(size, alignment):
    """Make poisoned memory, and give the address from which so many bytes are aligned."""
    memory = np.full(size + alignment, 0x7B, np.uint8)
    return memory, -(-memory.ctypes.data // alignment) * alignment


def run(edge_index, n_source, n_target, *, both, progress):
    """Build it on the host; all memory but ``progress`` begins poisoned."""
    index, sizes = edge_index.dtype.name, (n_target, n_source, edge_index.shape[1])
    how = build.small(*map(build.room_for, sizes), index, 0, both=both)
    (memory, begin), (scratch, room) = aligned(how.size, 16), aligned(how.scratch, 128)
    nnz, behind = sizes[-1], begin + how.rows.size
    rows = Built(how.rows, n_target, nnz, memory, begin)
    columns = Built(how.columns, n_source, nnz, memory, behind) if both else None
    reports = rows.report.ctypes.data, columns.report.ctypes.data if both else 0
    ids = edge_index[1].ctypes.data, edge_index[0].ctypes.data
    how(ids, sizes, begin, reports, room, progress.ctypes.data, 0)
    for held, first, size in ((memory, begin, how.size), (scratch, room, how.scratch)):
        assert (held[first - held.ctypes.data + size :] == 0x7B).all()
    return rows, columns


def check(monkeypatch, edge_index, n_source, n_target, *, both=True):
    progress = np.zeros(build.SMALL_BLOCKS, np.int64)
    run(np.zeros_like(edge_index[:, :40]), 9, 9, both=both, progress=progress)  # its steps stay
    rows, columns = run(edge_index, n_source, n_target, both=both, progress=progress)
    valid = np.where((edge_index >= 0) & (edge_index < [[n_source], [n_target]]), edge_index, 0)
    graph = Graph(from_edge_index(valid, num_nodes=(n_source, n_target)))
    count = chunks._block_count
    monkeypatch.setattr(chunks, "_block_count", lambda t, p, wave: count(t, p, WAVE))
    rows.check(graph.csr, graph.csr_perm)
    if both:
        columns.check(graph.csc.T, graph.csc_perm)
    return rows


CASES = {
    "one": (1, 1, 1),
    "few": (7, 9, 40),
    "some": (50, 300, 1500),
    "wide": (70_000, 300, 2000),
    "hub": (400, 3000, 9000),
}


@pytest.mark.covering("index", "case", one_in=2)  # 4 s each: 256 threads that wait for each other
@pytest.mark.parametrize("index", TYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_small_build_is_the_sort_and_the_cut_of_the_formats(on_host, monkeypatch, case, index):
    n_source, n_target, nnz = CASES[case]
    rng = np.random.default_rng(nnz)
    edge_index = rng.integers(0, [[n_source], [n_target]], (2, nnz)).astype(index)
    if case == "hub":
        edge_index[1, ::3], edge_index[0, ::2] = n_target // 3, n_source - 1
    check(monkeypatch, edge_index, n_source, n_target)


def test_there_is_room_for_a_few_more():
    counts = np.arange(5000)
    rooms = np.array([build.room_for(int(count)) for count in counts])
    assert (rooms[:17] == counts[:17]).all()
    assert (rooms >= counts).all()
    assert (rooms <= 1.125 * counts).all()
    assert len(set(rooms[1024:2048])) == 9


def test_words_of_one_place_serve_builds_of_many_and_few_blocks(on_host):
    """Steps that a launch has left there let no later one pass too soon."""
    rng, progress = np.random.default_rng(0), np.zeros(build.SMALL_BLOCKS, np.int64)
    for nnz in (2000, 40, 1500):
        first = next(build._first_steps) + build.STEPS
        run(rng.integers(0, 300, (2, nnz)), 300, 300, both=True, progress=progress)
        assert first < progress.max() < first + build.STEPS


def test_rows_alone_and_edges_in_order(on_host, monkeypatch):
    edge_index = np.sort(np.random.default_rng(0).integers(0, 60, (2, 700)), axis=1)
    check(monkeypatch, edge_index, 60, 60, both=False)
    loops = np.stack([np.arange(300)] * 2)
    check(monkeypatch, loops, 300, 300)


@pytest.mark.parametrize(("side", "value"), [(0, -1), (0, 60), (1, -(2**62)), (1, 2**40)])
def test_a_wrong_id_is_reported_and_counts_as_vertex_0(on_host, monkeypatch, side, value):
    edge_index = np.random.default_rng(0).integers(1, 60, (2, 700))
    edge_index[side, 23] = value
    rows = check(monkeypatch, edge_index, 60, 60)
    assert rows.report[Findings._fields.index("fault")] == 2 * 23 + 1 + side
