"""Launches of ``sspmm``: by windows of rows on chip, with atomics, or panels, deterministic.

Conventions as in ``_launch_cbsr``.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

from ...formats.arrays import import_cupy
from ...formats.windows import MOST_COLUMNS, MOST_ROWS, Cut, Windows
from ..engine import jit
from ..engine.launch import ITEMSIZE, fill
from ..engine.structure import Structure
from ..matmul.cuda import DENSE_ROWS
from ..matmul.cuda import spmm_of_pointers as _spmm
from ..matmul.cuda import spmm_workspace as _spmm_workspace
from . import cuda_dense
from .cuda import ALIGNED

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


@dataclass(frozen=True, slots=True)
class Windowed:
    """A CSR cut into ``Windows``, as the kernel sees it: sizes and device pointers."""

    n_rows: int
    n_cols: int
    nnz: int
    index_dtype: str
    pieces: int
    order: int
    words: int
    perm: int
    n_pieces: int
    height: int
    part_size: int


@dataclass(frozen=True, slots=True)
class Chip:
    """Bytes that a device has."""

    of_block: int  #: shared memory, at most
    of_multiprocessor: int
    l2: int


def windowed(W: Windows, n_cols: int) -> Windowed:
    """The windows of a CSR on a GPU."""
    return Windowed(
        n_rows=len(W.order),
        n_cols=n_cols,
        nnz=len(W.words),
        index_dtype=W.perm.dtype.name,
        pieces=W.pieces.data.ptr,
        order=W.order.data.ptr,
        words=W.words.data.ptr,
        perm=W.perm.data.ptr,
        n_pieces=W.n_pieces,
        height=W.height,
        part_size=W.part_size,
    )


@cache
def chip(device: int) -> Chip:
    """That of the device with this number."""
    found = import_cupy().cuda.Device(device).attributes
    return Chip(
        int(found["MaxSharedMemoryPerBlockOptin"]),
        int(found["MaxSharedMemoryPerMultiprocessor"]),
        int(found["L2CacheSize"]),
    )


def cut(
    shape: tuple[int, int], nnz: int, dtype: str, *, feat: int, k: int, ordered: bool, device: int
) -> Cut | None:
    """How to cut a CSR on that device; None if not one row of features fits on chip.

    ``ordered``: rows come in an order of the caller's.
    """
    few = PART_ENTRIES_ORDERED if ordered else PART_ENTRIES
    return _cut(shape, nnz, ITEMSIZE[dtype], feat, k, few, chip(device))


@lru_cache(maxsize=256)
def _cut(
    shape: tuple[int, int], nnz: int, size: int, feat: int, k: int, few: int, chip: Chip
) -> Cut | None:
    n_rows, n_cols = shape
    wide = max(size, 4)
    one = feat * size + wide  # with its factor
    if one + wide > chip.of_block or not feat:
        return None
    tall = nnz >= max(MANY_ENTRIES, DENSE_ROWS * n_rows)
    most = min(TALL_BYTES if tall else LOW_BYTES, chip.of_block - wide) // one
    height = 1 << min(max(most, 1), MOST_ROWS).bit_length() - 1  # few heights, so few windows
    sums = n_cols * min(k, 64) * wide
    parts = min(int(-(-sums // (L2_SHARE * chip.l2))), nnz // max(n_rows * few, 1))
    parts = max(parts, -(-n_cols // MOST_COLUMNS), 1)
    return Cut(height, parts, TALL_PIECE if tall else LOW_PIECE)


def _threads(on_chip: int, chip: Chip) -> int:
    """The share of a block; each block takes 1 KiB more than it asks for."""
    blocks = max(chip.of_multiprocessor // (on_chip + 1024), 1)
    return int(max(1 << (THREADS // blocks).bit_length() - 1, 128))


def lanes(dtype: str, index_bytes: int, k: int, *, together: int) -> int:
    """``together`` has the lowest bits of all addresses, in words of four places 16 bytes."""
    if k % 4 or together % 16:
        return SCALAR_LANES
    if index_bytes > 1 or dtype == "float64":
        return GENERAL_LANES
    return LANES[min((most for most in LANES if most >= k), default=64)]


def sums_workspace(W: Windowed, dtype: str, k: int) -> int:
    """Bytes for sums in float32 of what is stored in 2 bytes."""
    return 4 * W.n_cols * k if ITEMSIZE[dtype] == 2 else 0


def sspmm_windows(
    W: Windowed,
    dtype: str,
    *,
    feat: int,
    k: int,
    index_bytes: int,
    indices: int,
    data: int,
    grad: int,
    ldg: int,
    row_scale: int,
    col_scale: int,
    out: int,
    workspace: int,
    stream: int,
) -> None:
    """``out[j, t] = sum_i (diag(r) A diag(c))[i, j] grad[i, indices[j, t]]``, by atomics."""
    size = ITEMSIZE[dtype]
    wide = max(size, 4)
    sums = workspace or out
    total = W.n_cols * k
    if total:
        fill(sums, total * wide, 0, stream)
    if W.nnz and total:
        width = lanes(dtype, index_bytes, k, together=sums | indices * (4 // index_bytes))
        places = 1 if width == SCALAR_LANES else 4
        on_chip = -(-W.height * feat * size // wide) * wide + W.height * wide
        here = chip(import_cupy().cuda.runtime.getDevice())
        kernel = jit.load(
            "cbsr/sspmm.cu",
            "sspmm_csr_windows",
            "10P4q5i",
            (dtype, W.index_dtype, cuda_dense.COLUMNS[index_bytes]),
            (width, places),
            shared=here.of_block,
        )
        kernel(
            W.n_pieces * -(-k // (width * places)),
            (
                *(W.pieces, W.order, W.words, W.perm, data, col_scale, row_scale, indices),
                *(grad, sums, ldg, W.n_rows, -(-W.n_rows // W.height), W.part_size),
                *(W.n_pieces, W.height, k, feat),
                ALIGNED * ((grad | ldg * size | feat * size) % 16 == 0),
            ),
            threads=_threads(on_chip, here),
            shared=on_chip,
            stream=stream,
        )
    if workspace and total:
        kernel = jit.load("cbsr/sspmm.cu", "narrowed", "2Pq", (dtype,))
        kernel(jit.warps_to_blocks(-(-total // jit.WARP)), (workspace, out, total), stream=stream)


def panel(dtype: str, feat: int) -> int:
    """Features at a time of ``sspmm``."""
    return min(feat, PANEL_BYTES // ITEMSIZE[dtype])


def panels_workspace(T: Structure, dtype: str, feat: int) -> int:
    """Bytes for a panel of the dense product and what ``spmm`` takes for it."""
    width = panel(dtype, feat)
    dense = -(-T.n_rows * width * ITEMSIZE[dtype] // 16) * 16
    return dense + _spmm_workspace(T, dtype, width, arg=False)


def sspmm_panels(
    T: Structure,
    dtype: str,
    *,
    feat: int,
    k: int,
    index_bytes: int,
    indices: int,
    data: int,
    perm: int,
    grad: int,
    ldg: int,
    row_scale: int,
    col_scale: int,
    out: int,
    workspace: int,
    stream: int,
) -> None:
    """As ``sspmm_windows``, of the transposed structure, deterministic: ``spmm``, then a choice."""
    size, width = ITEMSIZE[dtype], panel(dtype, feat)
    rest = workspace + -(-T.n_rows * width * size // 16) * 16
    for first in range(0, feat, width):
        columns = min(width, feat - first)
        _spmm(
            T, dtype, "sum", feat=columns, ldx=ldg, data=data, X=grad + first * size,
            row_scale=col_scale, col_scale=row_scale, out=workspace, arg=0, workspace=rest,
            stream=stream, perm=perm,
        )  # fmt: skip
        cuda_dense.dense_to_cbsr(
            dtype, n_rows=T.n_rows, k=k, ldx=columns, index_bytes=index_bytes, X=workspace,
            indices=indices, out=out, stream=stream, first=first, width=columns,
        )  # fmt: skip
