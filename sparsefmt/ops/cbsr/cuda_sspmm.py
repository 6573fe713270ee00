"""Launch ``sspmm``: by windows of rows on chip, with atomics, or by panels, deterministic."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..._caches import cache, lru_cache
from ...errors import UnsupportedError
from ...formats.arrays import VALUE_DTYPES, Array, finish, import_cupy
from ...formats.compressed import CSR
from ...reorder import Order
from ..engine import jit
from ..engine.call import Launcher, Prepared, Result, with_options
from ..engine.jit import ITEMSIZE, Launch, capturing, filling
from ..engine.memory import Memory, memory_of
from ..engine.structure import Structure, built_at, csr_of, csr_over, structure_of, without_chunks
from ..matmul import cuda as matmul_cuda
from ..matmul.cuda import DENSE_ROWS, NARROW, rounded, rounded_width
from .cuda import ALIGNED, COLUMNS, dense_to_cbsr
from .windows import MOST_COLUMNS, MOST_ROWS, Windows, WindowSizes, prepared_order, windows_of

#: Bytes of rows on chip, and most entries of a piece, for graphs of many entries and for others.
#: More rows share more columns; but a multiprocessor has 228 KiB on the H200, and what is left of
#: them is the L1, where the edge values of a window want to stay: 216 KiB take 1.6x as long as 128.
TALL_BYTES, TALL_PIECE = 132 * 2**10, 2**15
LOW_BYTES, LOW_PIECE = 66 * 2**10, 2**11
#: Threads that a multiprocessor shall have, shared by as many blocks as its memory holds.
THREADS = 1024
#: Entries from which a graph of dense rows has tall windows: several pieces a multiprocessor.
MANY_ENTRIES = 2**24
#: The part of the L2 that sums may take: with more of them, columns are taken in parts.
L2_SHARE = 0.8
#: Entries of a row in a part below which parts do not pay, since each reads all rows again, in
#: an order by length and in one that brings locality itself.  H200, two parts: k = 64 on reddit 8.9
#: to 6.3 ms; four: k = 16 on products 8.5 to 7.2, but nothing in order of communities.
PART_ENTRIES, PART_ENTRIES_ORDERED = 12, 128
#: Places of a block by the most that are asked for, in lanes of four; beyond them, lanes of one.
LANES = {8: 2, 16: 4, 32: 8, 64: 16}
GENERAL_LANES, SCALAR_LANES = 8, 32
#: Features at a time of the deterministic way, in bytes: the widest slice of spmm.
PANEL_BYTES = 256

_FILE = "cbsr/sspmm.cu"


class Chip(NamedTuple):
    """Bytes that a device has."""

    of_block: int  #: shared memory, at most
    of_multiprocessor: int
    l2: int


def instantiations() -> Iterator[tuple[str, str]]:
    """Yield file and C++ name of every kernel that this file may launch."""
    for dtype, index, column in product(VALUE_DTYPES, ("int32", "int64"), COLUMNS.values()):
        tuned = column == "uint8" and dtype != "float64"
        fours = {GENERAL_LANES} | ({*LANES.values()} if tuned else set())
        shapes = [(SCALAR_LANES, 1), *((lanes, 4) for lanes in sorted(fours))]
        for gathered in (dtype, NARROW) if dtype == "float32" else (dtype,):
            if column == "int32" and ITEMSIZE[gathered] > 2:  # no row fits on chip
                continue
            types = dtype, index, column, gathered
            for shape in shapes:
                yield _FILE, jit.expression("sspmm_csr_windows", types, shape)
    for dtype in ("float16", "bfloat16"):
        yield _FILE, jit.expression("narrowed", (dtype,), ())


# Sizes of windows


@cache
def chip(device: int) -> Chip:
    """Return the memory of the device with this number."""
    attributes = import_cupy().cuda.Device(device).attributes
    return Chip(
        int(attributes["MaxSharedMemoryPerBlockOptin"]),
        int(attributes["MaxSharedMemoryPerMultiprocessor"]),
        int(attributes["L2CacheSize"]),
    )


@lru_cache(maxsize=256)
def window_sizes(
    shape: tuple[int, int], nnz: int, size: int, feat: int, k: int, chip: Chip, *, ordered: bool
) -> WindowSizes | None:
    """Choose how to cut a CSR into windows; None if not one row of features fits on chip.

    ``size`` is that of a feature; ``ordered``: rows come in an order of the caller's.
    """
    n_rows, n_cols = shape
    if not _fits(feat, size, chip):
        return None
    wide, few = max(size, 4), PART_ENTRIES_ORDERED if ordered else PART_ENTRIES
    row = feat * size + wide  # with its factor
    tall = nnz >= max(MANY_ENTRIES, DENSE_ROWS * n_rows)
    most = min(TALL_BYTES if tall else LOW_BYTES, chip.of_block - wide) // row
    height = 1 << min(max(most, 1), MOST_ROWS).bit_length() - 1  # few heights, so few windows
    sums = n_cols * min(k, 64) * wide
    parts = min(int(-(-sums // (L2_SHARE * chip.l2))), nnz // max(n_rows * few, 1))
    parts = max(parts, -(-n_cols // MOST_COLUMNS), 1)
    return WindowSizes(height, parts, TALL_PIECE if tall else LOW_PIECE)


def _fits(feat: int, size: int, chip: Chip) -> bool:
    """Return True if a row of features of that size, its factor and one more fit on chip."""
    return 0 < feat and feat * size + 2 * max(size, 4) <= chip.of_block


def threads_of_block(on_chip: int, chip: Chip) -> int:
    """Return the share of a block; each block takes 1 KiB more than it asks for."""
    blocks = max(chip.of_multiprocessor // (on_chip + 1024), 1)
    return int(max(1 << (THREADS // blocks).bit_length() - 1, 128))


# By windows


def no_windows(
    A: CSR | Structure, columns: Array, grad: Array, *_: Any, deterministic: bool = False,
    order: Order | None = None, narrow: bool = False, **__: Any,
) -> list[str]:  # fmt: skip
    """List the reasons against windows: a fixed order of sums, or rows that do not fit on chip."""
    if type(grad) is np.ndarray:
        return ["deterministic is asked for"] if deterministic else []
    m, feat = memory_of(grad), grad.shape[1]
    reasons = ["deterministic is asked for"] if deterministic or m.deterministic() else []
    if type(A) is Structure and built_at(A) is None:
        reasons.append("nobody keeps windows of this structure")
    elif not _fits(feat, ITEMSIZE[NARROW if narrow else m.dtype(grad)], chip(m.device(grad))):
        reasons.append(f"a row of {feat} features does not fit on chip")
    return reasons


def _prepare_windows(
    S: Structure, m: Memory, columns: Array, grad: Array, values: Array | None = None,
    row_scale: Array | None = None, col_scale: Array | None = None, *, narrow: bool = False,
    **_: Any,
) -> Any:  # fmt: skip
    """Prepare ``out[j, t] = sum_i (diag(r) A diag(c))[i, j] grad[i, columns[j, t]]``, by atomics.

    ``narrow`` rounds ``grad``, of float32, to bfloat16 once: sums and all else stay float32.
    """
    dtype, feat, k = m.dtype(grad), grad.shape[1], columns.shape[1]
    if not S.n_cols:
        return Prepared((), (Result((k,), dtype, "n_cols"),))
    gathered = NARROW if narrow else dtype
    stride = rounded_width(feat) if narrow else m.row_stride(grad)
    rows = 0 if narrow else m.pointer(grad)  # new memory is aligned
    shape = (S.n_rows, S.n_cols), S.nnz, ITEMSIZE[gathered], feat, k, chip(m.device(grad))
    sizes = [window_sizes(*shape, ordered=ordered) for ordered in (False, True)]
    case = S.n_cols, dtype, gathered, columns.itemsize, k, feat, stride, rows, m.pointer(columns)
    n_cols, prepare = S.n_cols, partial(_outer_product, case=case)

    def run(
        A: CSR | Structure, columns: Array, grad: Array, values: Array | None = None,
        row_scale: Array | None = None, col_scale: Array | None = None, *,
        order: Order | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        own, factors = csr_of(A), (values, row_scale, col_scale)
        if own is None:  # what was built of the graph has gone
            return sspmm_panels(A, columns, grad, *factors, narrow=narrow, **options)
        if order is None and type(A) is Structure:  # of tensors, which take the graph's
            order = prepared_order(own)
        stream, size = m.stream(grad), sizes[order is not None]
        assert size is not None  # as no_windows found
        W = windows_of(own, size, order, stream=stream)
        out = sums = m.empty((n_cols, k), dtype, grad)
        if ITEMSIZE[dtype] == 2:
            sums = m.empty((n_cols, k), "float32", grad)
        rows = rounded(grad) if narrow else grad
        zero, launch, narrowed = W.prepared(prepare)
        zero(stream, m.pointer(sums))
        if launch is not None:
            launch(stream, *m.pointers(values, col_scale, row_scale, columns, rows, sums))
        if narrowed is not None:
            narrowed(stream, *m.pointers(sums, out))
        return out

    return run


_OPTIONS: Any = {"in_place": ("grad",), "structure": without_chunks}
sspmm_windows = Launcher(_prepare_windows, **_OPTIONS)
sspmm_windows_rounded = Launcher(
    with_options("_prepare_rounded_windows", _prepare_windows, narrow=True), **_OPTIONS
)


def _outer_product(
    W: Windows, case: tuple[int, str, str, int, int, int, int, int, int]
) -> tuple[Callable[..., None], Launch | None, Launch | None]:
    """Prepare launches over windows: what sets sums to 0, what adds to them, what rounds them.

    There is no second one without entries, and no third one unless values have 2 bytes.
    """
    n_cols, dtype, gathered, index_bytes, k, feat, stride, rows, places = case
    total, narrowed, launch = n_cols * k, None, None
    if ITEMSIZE[dtype] == 2:
        blocks = jit.warps_to_blocks(-(-total // jit.WARP))
        narrowed = jit.load(_FILE, "narrowed", "2Pq", (dtype,)).ready(blocks, after=(total,))
    zero = filling(total * max(ITEMSIZE[dtype], 4))
    if not len(W.perm):
        return zero, None, narrowed
    size, device = ITEMSIZE[gathered], chip(jit.current_device())
    wide = max(size, 4)
    lanes, each = _lanes(dtype, index_bytes, k, places)
    on_chip = -(-W.height * feat * size // wide) * wide + W.height * wide
    aligned = (rows | stride * size | feat * size) % 16 == 0
    n_rows = len(W.order)
    types = dtype, W.perm.dtype.name, COLUMNS[index_bytes], gathered
    layout, shared = "10P4q5i", device.of_block
    kernel = jit.load(_FILE, "sspmm_csr_windows", layout, types, (lanes, each), shared=shared)
    sizes = stride, n_rows, -(-n_rows // W.height), W.part_size, W.n_pieces
    launch = kernel.ready(
        W.n_pieces * -(-k // (lanes * each)),
        tuple(a.data.ptr for a in (W.pieces, W.order, W.words, W.perm)),
        (*sizes, W.height, k, feat, ALIGNED * aligned),
        threads=threads_of_block(on_chip, device),
        shared=on_chip,
    )
    return zero, launch, narrowed


def _lanes(dtype: str, index_bytes: int, k: int, columns: int) -> tuple[int, int]:
    """Choose lanes of a block, and places of each: 4 where words of four places are aligned."""
    if k % 4 or columns * (4 // index_bytes) % 16:
        return SCALAR_LANES, 1
    if index_bytes > 1 or dtype == "float64":
        return GENERAL_LANES, 4
    return LANES[min((most for most in LANES if most >= k), default=64)], 4


# By panels


def sspmm(
    T: CSR | Structure,
    columns: Array,
    grad: Array,
    values: Array,
    perm: Array,
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    *,
    narrow: bool = False,
) -> Any:
    """Compute the same of the transposed structure, deterministic: ``spmm``, then a choice."""
    m, feat = memory_of(grad), grad.shape[1]
    dtype = m.dtype(grad)
    width = min(feat, PANEL_BYTES // ITEMSIZE[NARROW if narrow else dtype])
    out = m.empty(columns.shape, dtype, grad)
    grad, columns, values = m.rows_in_place(grad), m.contiguous(columns), m.contiguous(values)
    for first in range(0, feat, width):
        panel = grad[:, first : first + width]
        product = matmul_cuda.spmm_rounded if narrow else matmul_cuda.spmm
        dense = product(T, panel, values, perm, col_scale, row_scale)
        dense_to_cbsr(None, dense, columns, out=out, first=first, width=panel.shape[1])
        del dense  # before the next ones
    return out


def sspmm_panels(
    A: CSR | Structure, columns: Array, grad: Array, values: Array | None = None,
    row_scale: Array | None = None, col_scale: Array | None = None, *,
    transposed: CSR | None = None, perm: Array | None = None, narrow: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """Compute ``sspmm`` with the transpose that is given, or made for this call."""
    arrays, scales = (columns, grad, values), (row_scale, col_scale)
    if transposed is not None:
        return sspmm(transposed, *arrays, perm, *scales, narrow=narrow)
    m = memory_of(grad)
    if isinstance(A, Structure) and capturing(m.stream(grad)):
        raise UnsupportedError(
            "a capture cannot transpose a graph, which rows need that are too wide for the chip: "
            "torch.use_deterministic_algorithms(True) takes the transpose that the graph keeps."
        )
    own = csr_of(A)
    T, numbers = (csr_over(structure_of(A)) if own is None else own).tocsc_with_perm()
    if not isinstance(A, Structure):
        return sspmm(T.T, *arrays, numbers, *scales, narrow=narrow)
    rows = T.T
    structure = structure_of(rows)
    finish(numbers)  # synchronize!
    with m.on_device(grad):
        runtime, stream = import_cupy().cuda.runtime, m.stream(grad)
        own_numbers = m.empty((A.nnz,), A.index_dtype, grad)
        bytes_, on_device = numbers.nbytes, runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(m.pointer(own_numbers), numbers.data.ptr, bytes_, on_device, stream)
        out = sspmm(structure, *arrays, own_numbers, *scales, narrow=narrow)
        runtime.streamSynchronize(stream)  # synchronize! T goes back to CuPy
    return out
