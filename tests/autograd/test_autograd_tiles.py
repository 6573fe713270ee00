"""Products by the tiles of ``prepare(graph, tile=...)``: who goes by them, and how exactly.

Without a GPU one sees what kernels get: a twin in their place reads the same addresses.
"""

import gc
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import captured, make_graph, matmul_precision, naive_sddmm, naive_spmm, tensors  # noqa: E402
from op_cases import note_calls  # noqa: E402

from sparsefmt import COO, CSR, DtypeError, Graph, ShapeError, UnsupportedError, reorder  # noqa: E402
from sparsefmt.autograd import edge_softmax, prepare, sddmm, spmm  # noqa: E402
from sparsefmt.autograd.engine import precision  # noqa: E402
from sparsefmt.autograd.engine import tiles as _tiles  # noqa: E402
from sparsefmt.autograd.engine.memory import TorchMemory  # noqa: E402
from sparsefmt.autograd.tensors import prepare as structure  # noqa: E402
from sparsefmt.ops.engine import jit  # noqa: E402
from sparsefmt.ops.engine.structure import Structure, _at, all_tiles, built_at, built_for, place_of  # noqa: E402
from sparsefmt.ops.tiles import cuda as tiles_cuda  # noqa: E402
from sparsefmt.ops.tiles import cuda_edges as tiles_cuda_edges  # noqa: E402
from sparsefmt.ops.tiles import kernels, operands  # noqa: E402
from sparsefmt.ops.tiles.costs import Costs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
TILE = (64, 16)
ROWS, COLS = 1200, 700
NARROW = (torch.float16, torch.bfloat16)
#: Rounding of an operand, and of what is stored: TF32 has as many bits as float16.
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-11}
#: The same where SpMM alone has rounded, which splits float32 in two.
SPMM_UNIT = UNIT | {torch.float32: 2.0**-17}


@pytest.fixture(autouse=True)
def small_graphs_pay(monkeypatch):
    """As measured, tensor cores take no graph as small as those here."""
    costs = Costs(slab=16, window=24, left=1, again=96, row=0, piece=0, launch=0)
    monkeypatch.setattr("sparsefmt.ops.tiles.costs.measured", lambda *_: costs)


@pytest.fixture
def tf32():
    """Torch allows it in its own products."""
    with matmul_precision("high"):
        yield


def dense_windows(n_rows=ROWS, n_cols=COLS, *, device="cpu", index_dtype=np.int32, seed=0) -> Graph:
    """Two windows whose rows share 40 columns, and many that are sparse; some rows are empty."""
    rng = np.random.default_rng(seed)
    row = [np.repeat(np.arange(128), 20), rng.integers(0, n_rows, 2 * n_rows)]
    col = [rng.integers(0, 40, len(row[0])), rng.integers(0, n_cols, len(row[1]))]
    both = np.unique(np.stack([np.concatenate(row), np.concatenate(col)]), axis=1)
    row, col = (one[both[0] % 7 != 3].astype(index_dtype) for one in both)
    return Graph(COO(row, col, shape=(n_rows, n_cols)).tocsr()).to(device)


def longest(graph) -> int:
    return int(max(graph.csr.lengths.max(), graph.transposed.csr.lengths.max()))


@pytest.mark.parametrize(
    ("tile", "text"),
    [
        (16, "tile is 16: give two integers"),
        ((16, 8, 4), r"tile is \(16, 8, 4\): give two integers"),
        ((16.0, 8), "give two integers"),
        ((0, 8), r"tile is \(0, 8\): sizes are positive"),
        ((1024, 1024), "at most 65536 cells"),
    ],
)
def test_a_tile_is_checked_before_anything_is_built(tile, text):
    graph = make_graph(9, 6, 40)
    with pytest.raises(ShapeError, match=text):
        prepare(graph, tile=tile)
    assert graph._slots.torch == [None, None]


def test_costs_are_of_tiles(monkeypatch):
    graph = make_graph(9, 6, 40)
    with pytest.raises(UnsupportedError, match="costs are given without tile"):
        prepare(graph, costs=Costs())
    with pytest.raises(DtypeError, match="costs is a dict"):
        prepare(graph, tile=TILE, costs={})
    given = []
    monkeypatch.setattr(structure, "_prepare_tiles", lambda *args: given.append(args[-1]))
    prepare(graph, transposed=False, tile=TILE, costs=Costs(part=3))
    prepare(graph, transposed=False, tile=TILE)
    assert given == [Costs(part=3), None]


def test_tiles_of_the_graph_and_for_gradients_of_its_transpose_are_built():
    graph = dense_windows()
    prepare(graph, tile=TILE, transposed=False)
    assert "sgt 64x16" in repr(graph)
    assert "sgt" not in repr(graph.transposed)
    prepare(graph, tile=TILE)
    assert "sgt 64x16" in repr(graph.transposed)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("tf32")
def test_on_the_cpu_tiles_change_no_bit(dtype):
    results = []
    for tile in (None, (16, 8), TILE):
        graph = dense_windows()
        prepare(graph, tile=tile)
        x, a, grad = tensors("cpu", (COLS, 9), (graph.nnz,), (ROWS, 9), dtype=dtype)
        y = spmm(graph, x, a, reduce="mean")
        results.append([y, *torch.autograd.grad(y, (x, a), grad.detach())])
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))
    assert not all_tiles


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def step(graph, x, a=None, r=None, c=None, *, grad, reduce="sum", product=spmm):
    """The product and the gradients of what has any."""
    y = product(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)
    inputs = [one for one in (x, a, r, c) if one is not None]
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


@pytest.mark.usefixtures("tf32")
def test_compiled_code_goes_by_the_same_tiles(device):
    graph = dense_windows(device=device)
    prepare(graph, tile=TILE)
    shapes = (COLS, 16), (graph.nnz,), (ROWS,), (COLS,), (ROWS, 16)
    *given, grad = tensors(device, *shapes, dtype=torch.float32)
    grad = grad.detach()
    for count in (1, 2, 3, 4):
        expected = step(graph, *given[:count], grad=grad)
        found = step(graph, *given[:count], grad=grad, product=compiled(spmm))
        assert all(map(torch.equal, found, expected))
    torch._dynamo.reset()


# What kernels are asked for, on any machine


class Twin:
    """Products of float32 on the CPU, by the addresses that the kernels get."""

    def __init__(self):
        self.csr, self.splits, self.calls = None, {}, 0

    def tile_structure(self, split, shape):
        self.splits[id(split)] = split
        sizes = len(split.items), len(split.cuts), split.n_parts, id(split), 0, 0, 0, 0, 0
        rest = None if split.rest is None else on_a_gpu(split.rest)[0]
        return operands.TileStructure(
            *(*shape, split.nnz, split.perm.dtype.name, split.height, *sizes),
            *(split.n_cells, split.taken, rest),
        )

    @staticmethod
    def read(address, count, dtype="float32"):
        if not address:
            return None
        kind = np.ctypeslib.as_ctypes_type(dtype) * count
        return np.ctypeslib.as_array(kind.from_address(address))

    def load(self, file, kernel, layout, types, constants, *, shared=0):
        assert types[0] == "float32"
        known = {"spmm_sgt_mma": self.spmm_mma, "sddmm_sgt_mma": self.sddmm_mma}
        return partial(known[kernel], constants)

    def spmm_on_rest(self, S, x, values, perm, row_scale, col_scale, *, out):
        """What the CSR kernel does with the entries that tiles leave."""
        rest = next(one.rest for one in self.splits.values() if place(one.rest) == place_of(S))
        factor = torch.ones(rest.nnz) if values is None else values[perm.long()]
        row = torch.from_numpy(np.repeat(np.arange(rest.n_rows), rest.lengths))
        col = torch.from_numpy(rest.indices).long()
        factor = factor if col_scale is None else factor * col_scale[col]
        out.zero_().index_add_(0, row, factor[:, None] * x[col])
        if row_scale is not None:
            out *= row_scale.masked_fill(torch.from_numpy(rest.lengths == 0), 0)[:, None]

    def spmm_mma(self, constants, grid, args, *, threads, shared, stream):
        items, _, _, _, _, values, col_scale, row_scale, X, out, sums, *sizes = args
        n_rows, stride, _, feat, add = sizes
        split, csr = self.splits[items], self.csr
        assert (stride % 16, X % 16, sums, add) == (0, 0, 0, split.rest is not None)
        self.calls += 1
        X = self.read(X, csr.n_cols * (stride // 4)).reshape(csr.n_cols, -1)[:, :feat]
        row = np.repeat(np.arange(n_rows), csr.lengths)[split.perm]
        col = csr.indices[split.perm]
        weights, c = np.ones(split.taken), self.read(col_scale, csr.n_cols)
        assert constants[2] == (2 if col_scale else 0 if not values else 3 if split.baked else 1)
        if values and constants[2] == 3:
            weights = self.read(values, split.n_cells)[split.places(4)]
        elif values:
            weights = self.read(values, split.taken)
        weights = weights if c is None else weights * c[col]
        part = np.zeros((n_rows, feat))
        np.add.at(part, row, weights[:, None] * X[col])
        scale = self.read(row_scale, n_rows)
        part = part if scale is None else scale[:, None] * part
        out = self.read(out, part.size).reshape(part.shape)
        out[:] = part + (out if add else 0)

    def products(self, sides, row_scale, col_scale):
        """Of all entries, one for each head."""
        csr = self.csr
        row = np.repeat(np.arange(csr.n_rows), csr.lengths)
        found = (sides[0][row] * sides[1][csr.indices]).sum(-1)
        for scale, at in ((row_scale, row), (col_scale, csr.indices)):
            if scale is not None:
                found *= scale[at, None]
        return found

    def sddmm_on_rest(self, S, X, Y, row_scale, col_scale, *, out, perm):
        """What the CSR kernel does with the entries that tiles leave."""
        split = next(one for one in self.splits.values() if place(one.rest) == place_of(S))
        sides = [(side if side.ndim == 3 else side[:, None]).numpy() for side in (X, Y)]
        scales = (one if one is None else one.numpy() for one in (row_scale, col_scale))
        found = torch.from_numpy(self.products(sides, *scales)[split.rest_perm])
        out[perm.long()] = found.view(-1, *out.shape[1:]).to(out.dtype)

    def sddmm_mma(self, constants, grid, args, *, threads, shared, stream):
        items, _, _, _, perm, X, Y, row_scale, col_scale, out, sums, *sizes = args
        _, taken, *strides, _, heads, feat, _, flags = sizes
        csr, split = self.csr, self.splits[items]
        assert (X % 16, Y % 16, feat % 4, taken) == (0, 0, 0, split.taken)
        assert bool(sums) == (feat > 128)
        assert bool(constants[2]) == bool(sums or row_scale or col_scale)
        if flags & tiles_cuda_edges.KEEP:
            return  # the last launch does it all
        self.calls += 1
        sides = []
        for at, n, stride in zip((X, Y), csr.shape, strides, strict=True):
            side = self.read(at, (n - 1) * (stride // 4) + heads * feat)
            steps = stride, 4 * feat, 4
            sides.append(np.lib.stride_tricks.as_strided(side, (n, heads, feat), steps))
        scales = map(self.read, (row_scale, col_scale), csr.shape)
        numbers = self.read(perm, taken, split.perm.dtype.name)
        found = self.products(sides, *scales)
        self.read(out, found.size).reshape(found.shape)[numbers] = found[split.perm]


@pytest.fixture
def twin(monkeypatch, tf32):
    """A GPU as far as Python sees it; sides are made by ``on_a_gpu``."""
    found = Twin()
    monkeypatch.setattr(operands, "tile_structure", found.tile_structure)
    monkeypatch.setattr(jit, "load", found.load)
    found.spmm, *_ = kernels.spmm_kernels(found.spmm_on_rest)
    found.sddmm, *_ = kernels.sddmm_kernels(found.sddmm_on_rest)
    monkeypatch.setattr(_tiles, "against_device", lambda _: ())
    answers = {"stream": 0, "on_device": nullcontext(), "capturing": False, "finish": None}
    for name, answer in answers.items():
        monkeypatch.setattr(TorchMemory, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return found


def by_tiles(kernel, *args, **options):
    """What the kernel gives, which nothing speaks against."""
    assert kernel.refuses(*args, **options) == []
    return kernel.run(*args, **options)


def on_a_gpu(csr):
    """A structure, and what would be built for it."""
    places = csr.indptr.ctypes.data, csr.indices.ctypes.data
    sizes = *csr.shape, csr.nnz, csr.index_dtype.name
    S = Structure(*sizes, *places, 0, 0, 0, 0, 1, 0, 0)
    return S, built_for(S, lambda: csr)


def place(csr):
    """Where that CSR lies; None for none."""
    return csr and place_of(on_a_gpu(csr)[0])


def give(built, tile=TILE, costs=None):
    csr = built.csr()
    degree = torch.from_numpy(1 / np.maximum(csr.lengths, 1)).float()
    _tiles.prepare_tiles(built, csr.tosgt(tile), degree, costs)


def find(S, dtype=torch.float32, feat=64, *, weighted=False, col_scale=None, reduce="sum"):
    """What a product with such features reads of tiles; None where CUDA cores do it."""
    x, values = torch.empty(COLS, feat, dtype=dtype), torch.empty(1) if weighted else None
    refused = kernels.against_spmm(S, x, values, None, None, col_scale, reduce)
    found = operands.find_operands(S, "spmm", x, None, weighted=weighted or col_scale is not None)
    return None if refused else found[1]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_kernels_get_values_scales_and_rows_that_belong_together(twin, index_dtype, reduce):
    graph = dense_windows(index_dtype=index_dtype)
    twin.csr = graph.csr
    S, built = on_a_gpu(graph.csr)
    order = torch.randperm(graph.nnz, generator=torch.Generator().manual_seed(0))
    order = order.to(getattr(torch, np.dtype(index_dtype).name))
    give(built)
    assert 0 < find(S).split.share < 1
    for feat in (8, 9, 20):
        wide, a, r, c = tensors("cpu", (COLS, 32), (graph.nnz,), (ROWS,), (COLS,), grad=False)
        wide, a, r, c = (one.float() for one in (wide, a, r, c))
        for x in (wide[:, :feat], wide[:, :feat].clone(), wide[:, 3 : 3 + feat], wide.T[:feat].T):
            for perm, values, rows, cols in (
                (None, None, None, None),
                (None, a, None, None),
                (order, None, r, None),
                (order, a, None, c),
                (order, a, r, c),
            ):
                twin.calls = 0
                y = by_tiles(twin.spmm, S, x, values, perm, rows, cols, reduce)
                assert twin.calls == 1
                read = values if values is None or perm is None else values[perm.long()]
                torch.testing.assert_close(y, naive_spmm(graph, x, read, rows, cols, reduce))


@pytest.mark.parametrize("weighted", [True, False])
def test_so_they_do_where_slabs_are_well_filled(twin, weighted):
    keep = np.random.default_rng(0).random((ROWS, 64)) < 0.5
    graph = Graph(COO(*np.nonzero(keep), shape=(ROWS, COLS)).tocsr())
    twin.csr = graph.csr
    S, built = on_a_gpu(graph.csr)
    give(built)
    assert find(S, weighted=weighted).split.baked
    x, a, c = (one.float() for one in tensors("cpu", (COLS, 8), (graph.nnz,), (COLS,), grad=False))
    for scale in (None, c):
        values = a if weighted else None
        y = by_tiles(twin.spmm, S, x, values, None, None, scale, "sum")
        torch.testing.assert_close(y, naive_spmm(graph, x, values, None, scale))
    assert twin.calls == 2


def test_scales_of_rows_outside_the_tiles_touch_no_zero(twin):
    graph = dense_windows()
    twin.csr = graph.csr
    S, built = on_a_gpu(graph.csr)
    give(built)
    empty = torch.from_numpy(graph.csr.lengths == 0)
    r = torch.ones(ROWS).masked_fill(empty, torch.inf)
    y = by_tiles(twin.spmm, S, torch.rand(COLS, 8), None, None, r)
    assert y.isfinite().all()
    assert not y[empty].any()


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_so_they_do_for_products_at_the_entries(twin, index_dtype):
    graph = dense_windows(index_dtype=index_dtype)
    twin.csr = graph.csr
    S, built = on_a_gpu(graph.csr)
    give(built)
    r, c = (one.float() for one in tensors("cpu", (ROWS,), (COLS,), grad=False))
    rows = torch.from_numpy(np.repeat(np.arange(ROWS), graph.csr.lengths))
    cols = torch.from_numpy(graph.csr.indices).long()
    for heads, feat in (((), 8), ((), 9), ((), 200), ((3,), 8), ((2,), 10), ((1,), 33)):
        shapes = (ROWS, *heads, feat), (COLS, *heads, feat + 3)
        x, y = (one.float() for one in tensors("cpu", *shapes, grad=False))
        y = y[..., 2:-1]
        for row_scale, col_scale in ((None, None), (r, None), (None, c), (r, c)):
            twin.calls = 0
            found = by_tiles(twin.sddmm, S, x, y, row_scale, col_scale)
            assert twin.calls == 1
            factor = (1 if row_scale is None else r[rows]) * (1 if col_scale is None else c[cols])
            factor = torch.as_tensor(factor).expand(graph.nnz)
            expected = naive_sddmm(graph, x, y) * (factor[:, None] if heads else factor)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        perm = torch.randperm(graph.nnz, generator=torch.Generator().manual_seed(0))
        moved = by_tiles(twin.sddmm, S, x, y, r, c, perm=perm.to(getattr(torch, S.index_dtype)))
        torch.testing.assert_close(moved[perm], expected, atol=1e-4, rtol=1e-4)


def test_only_what_may_be_rounded_goes_by_tiles(twin):
    S, built = on_a_gpu(dense_windows().csr)
    give(built)
    c = torch.rand(COLS)

    def taken(dtype, reduce="sum", scale=None):
        return find(S, dtype, reduce=reduce, col_scale=scale) is not None

    assert all(taken(dtype) for dtype in (*NARROW, torch.float32))
    assert not taken(torch.float64)
    assert not taken(torch.float16, scale=c)
    assert taken(torch.bfloat16, scale=c)
    assert taken(torch.float32, reduce="mean")
    assert not any(taken(torch.float32, reduce=one) for one in ("max", "min"))
    torch.set_float32_matmul_precision("highest")
    assert [taken(dtype) for dtype in (*NARROW, torch.float32)] == [True, True, False]


@pytest.mark.parametrize(
    ("switch", "tf32", "bf16"),
    [
        (lambda: torch.set_float32_matmul_precision("medium"), True, True),
        (lambda: torch.set_float32_matmul_precision("high"), True, False),
        (lambda: torch.set_float32_matmul_precision("highest"), False, False),
        (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True), True, False),
        (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False), False, False),
    ],
)
def test_every_switch_of_torch_is_heard(switch, tf32, bf16, monkeypatch):
    try:
        switch()
        assert (precision.tf32_is_allowed(), precision.bf16_is_allowed()) == (tf32, bf16)
        monkeypatch.setattr(precision, "_precision", None)  # as in torch 2.8
        assert (precision.tf32_is_allowed(), precision.bf16_is_allowed()) == (tf32, bf16)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(
    precision._precision is None, reason="torch before 2.9 has the older switches only"
)
def test_so_are_those_after_which_torch_refuses_the_older_questions():
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert precision.tf32_is_allowed()
        assert not precision.bf16_is_allowed()
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")
    assert not precision.tf32_is_allowed()


def test_every_kind_of_product_has_its_own_costs(twin, monkeypatch):
    S, built = on_a_gpu(dense_windows().csr)
    asked, costs = [], Costs(slab=16, window=24, left=1, again=96, row=0, piece=0, launch=0)

    def measured(*kind):
        asked.append(kind)
        return None if kind[-1] < 8 else replace(costs, part=2) if kind[2] else costs

    monkeypatch.setattr("sparsefmt.ops.tiles.costs.measured", measured)
    give(built)
    assert find(S, feat=7) is None
    plain = find(S, feat=8)
    assert plain is find(S, torch.bfloat16, 9)
    assert plain is not find(S, weighted=True)
    assert find(S, col_scale=torch.ones(COLS)) is find(S, weighted=True)
    assert ("spmm", 4, False, 7) in asked
    assert ("spmm", 2, False, 9) in asked
    assert ("spmm", 4, True, 64) in asked
    give(built, costs=replace(costs, part=3))
    assert find(S, feat=7) is find(S, weighted=True)  # what is given decides alone
    assert operands.find_operands(S, "sddmm", torch.empty(COLS, 1), None)[1] is find(S)


def test_nothing_is_built_in_a_capture(twin, monkeypatch):
    S, built = on_a_gpu(dense_windows().csr)
    give(built)
    for capturing, found in ((True, False), (False, True), (True, True)):
        monkeypatch.setattr(TorchMemory, "capturing", lambda _, c=capturing: c)
        assert (find(S) is not None) is found


def test_a_new_tile_replaces_the_earlier_one_and_the_same_changes_nothing(twin):
    S, built = on_a_gpu(dense_windows().csr)
    tiles, degree = built.csr().tosgt(TILE), torch.ones(ROWS)
    _tiles.prepare_tiles(built, tiles, degree)
    first = find(S)
    _tiles.prepare_tiles(built, tiles, degree)
    assert first is find(S)
    give(built, (32, 16))
    assert find(S).split.height == 32
    give(built, (24, 16))  # windows that no kernel is made for
    assert "tiles" not in built.parts
    assert find(S) is None


def test_sparse_windows_and_old_devices_keep_to_cuda_cores(twin, monkeypatch):
    n = 2000
    sparse = CSR(np.arange(n + 1), np.random.default_rng(0).permutation(n), shape=(n, n))
    dense = dense_windows().csr
    old = "it needs compute capability 8.0"
    for csr, reasons in ((sparse, ()), (dense, (old,))):
        monkeypatch.setattr(_tiles, "against_device", lambda _, reasons=reasons: reasons)
        S, built = on_a_gpu(csr)
        give(built)
        assert find(S) is None
        assert ("tiles" not in built.parts) is bool(reasons)


def test_sides_on_the_same_arrays_share_their_tiles_and_the_last_one_takes_them_along(twin):
    csr = dense_windows().csr
    S, built = on_a_gpu(csr)
    _, again = on_a_gpu(csr.with_data(np.ones(csr.nnz)))
    assert again is built
    _, other = on_a_gpu(csr._replace(shape=(ROWS, 4000)))
    assert other is not built
    give(built)
    del built
    assert find(S) is not None
    del again
    gc.collect()
    assert not all_tiles
    assert built_at(S) is None


def assert_within(found, exact, size, *, terms, dtype, unit=UNIT):
    """Operands and results are rounded, twice where CUDA cores add a part; sums are of float32."""
    bound = (4 * unit[dtype] + terms * 2.0**-22) * size.detach()
    bound += 2.0**-24 * (dtype is torch.float16)  # the step of its smallest numbers
    excess = (found.detach().cpu().double() - exact.detach()).abs() - bound
    assert excess.max() <= 0, f"{float(excess.max())} beyond the bound"


#: Of the product and the gradients of features, edge values and both scales.
UNITS = SPMM_UNIT, SPMM_UNIT, UNIT, UNIT, UNIT


def references(function, given, grad):
    """Return results and gradients in float64, and the same of absolute values."""
    found = []
    for change in (lambda one: one, torch.abs):
        leaves = [change(one.detach().cpu().double()).requires_grad_() for one in given]
        y = function(*leaves)
        found.append([y, *torch.autograd.grad(y, leaves, change(grad.cpu().double()))])
    return found


@pytest.fixture
def launches(monkeypatch):
    """How often the kernels of tiles have been launched."""
    return note_calls(monkeypatch, tiles_cuda, "_launch")


@pytest.mark.gpu
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("count", [1, 2, 4], ids=["features", "values too", "scales too"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
def test_results_and_gradients_are_within_the_rounding_of_their_operands(
    launches, dtype, reduce, count
):
    for shape, index_dtype, feat in (((ROWS, COLS), np.int32, 64), ((900, 2500), np.int64, 33)):
        graph = dense_windows(*shape, device="cuda", index_dtype=index_dtype)
        prepare(graph, tile=TILE)
        (rows, cols), before = shape, len(launches)
        shapes = (cols, feat), (graph.nnz,), (rows,), (cols,), (rows, feat)
        *given, grad = tensors("cuda", *shapes, dtype=dtype)
        given, grad = given[:count], grad.detach()
        found = step(graph, *given, grad=grad, reduce=reduce)
        assert len(launches) > before or count == 4
        exact, size = references(partial(naive_spmm, graph, reduce=reduce), given, grad)
        terms = longest(graph) * feat if count == 4 else max(longest(graph), feat)
        for one, unit in zip(zip(found, exact, size, strict=True), UNITS, strict=False):
            assert_within(*one, terms=terms, dtype=dtype, unit=unit)


@pytest.mark.gpu
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("heads", [(), (1,), (3,)], ids=str)
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
def test_so_are_products_at_the_entries(monkeypatch, dtype, heads):
    counted = note_calls(monkeypatch, tiles_cuda_edges, "_launch")
    for index_dtype, feat in ((np.int32, 64), (np.int64, 33), (np.int32, 300)):
        graph = dense_windows(device="cuda", index_dtype=index_dtype)
        prepare(graph, tile=TILE)
        for one in (graph, graph.transposed):
            shapes = *((n, *heads, feat) for n in one.shape), (one.nnz, *heads)
            x, y, grad = tensors("cuda", *shapes, dtype=dtype)
            before = len(counted)
            s = sddmm(one, x, y)
            assert len(counted) == before + 1
            found = [s.detach(), *torch.autograd.grad(s, (x, y), grad.detach())]
            exact, size = references(partial(naive_sddmm, one), (x, y), grad.detach())
            for each in zip(found, exact, size, strict=True):
                assert_within(*each, terms=max(longest(graph), feat), dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_what_is_not_to_be_rounded_has_the_bits_of_cuda_cores(launches, reduce):
    graph, plain = dense_windows(device="cuda"), dense_windows(device="cuda")
    prepare(graph, tile=TILE)
    for dtype in (torch.float32, torch.float64):
        shapes = (COLS, 32), (graph.nnz,), (ROWS,), (COLS,), (ROWS, 32)
        *given, grad = tensors("cuda", *shapes, dtype=dtype)
        both = (step(one, *given, grad=grad.detach(), reduce=reduce) for one in (graph, plain))
        assert all(map(torch.equal, *both))
        assert torch.equal(*(sddmm(one, grad.detach(), given[0]) for one in (graph, plain)))
    assert not launches


@pytest.mark.gpu
def test_what_shares_the_arrays_shares_the_tiles_and_copies_do_not(launches):
    graph = dense_windows(device="cuda")
    prepare(graph, tile=TILE)
    half = {"device": "cuda", "dtype": torch.float16}
    x, y = torch.rand(COLS, 16, **half), torch.rand(ROWS, 16, **half)
    weights = torch.rand(graph.nnz, **half)
    weighted = graph.with_data(weights)
    expected = spmm(graph, x, weights)
    assert len(launches) == 1
    assert torch.equal(spmm(weighted, x), expected)
    assert len(launches) == 2
    spmm(graph.transposed, y, weights)
    assert len(launches) == 3
    copy = graph.to("cpu").to("cuda")
    del graph
    gc.collect()
    assert torch.equal(spmm(weighted, x), expected)
    assert len(launches) == 4
    spmm(copy, x)
    assert len(launches) == 4


@pytest.mark.gpu
def test_tiles_and_windows_go_with_the_graph():
    gc.collect()
    before = len(all_tiles), len(_at)
    for seed in range(3):
        graph = dense_windows(device="cuda", seed=seed)
        prepare(graph, tile=TILE, order=reorder.degree_order(graph.csr))
        assert (len(all_tiles), len(_at)) == (before[0] + 2, before[1] + 2)
        del graph
        gc.collect()
        assert (len(all_tiles), len(_at)) == before


@pytest.mark.gpu
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_a_captured_step_replays_with_changed_inputs(launches, reduce, dtype):
    graph = dense_windows(device="cuda")
    prepare(graph, tile=TILE)
    shapes = (COLS, 33), (graph.nnz,), (ROWS,), (COLS,), (ROWS, 33)
    *given, grad = tensors("cuda", *shapes, dtype=dtype)
    grad = grad.detach()

    def once(given):
        x, a, r, c = given
        y = spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)
        p = edge_softmax(graph, sddmm(graph, y, x))
        return [y, p, *torch.autograd.grad([y, p], given, [grad, torch.ones_like(p)])]

    replayed, results = captured(lambda: launches.clear() or once(given))
    assert launches
    for _ in range(20):
        with torch.no_grad():
            for one in given:
                one.copy_(torch.rand_like(one))
        replayed.replay()
        fresh = [one.detach().clone().requires_grad_() for one in given]
        assert all(map(torch.equal, results, once(fresh)))


@pytest.mark.gpu
def test_a_capture_may_read_values_in_an_order_that_was_not_prepared():
    """Of the transposed graph: it shares the tiles, and its gradients read values as its own."""
    graph = dense_windows(device="cuda")
    prepare(graph, tile=TILE)
    prepare(graph.transposed)
    dtype = torch.bfloat16
    x, y, a = tensors("cuda", (COLS, 16), (ROWS, 16), (graph.nnz,), dtype=dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled here
        step(graph, x, a, grad=y.detach())
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = step(graph.transposed, y, a, grad=x.detach())
    for _ in range(3):
        captured.replay()
        assert all(map(torch.equal, results, step(graph.transposed, y, a, grad=x.detach())))


@pytest.mark.gpu
def test_autocast_goes_by_tiles(launches):
    graph = dense_windows(device="cuda")
    prepare(graph, tile=TILE)
    (x,) = tensors("cuda", (COLS, 16), dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = spmm(graph, x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)
    assert len(launches) == 2
