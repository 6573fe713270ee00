"""Equal shares of the rows of a CSR: how kernels over it divide their work."""

from dataclasses import dataclass

import numpy as np

from .._caches import cache
from .arrays import (
    Array,
    allocating,
    elementwise,
    finish,
    import_cupy,
    is_cupy,
    namespace,
    on_device_of,
)

#: Chunks of a block and most entries of a piece, as in common.cuh.
CHUNKS_PER_BLOCK = 32
PIECE = 8
#: About how many pieces a chunk has: 16 a sub-warp of 8 lanes beat 8 and 32 on the H200.
PIECES = 8
#: Blocks that a multiprocessor has room for: their number is made a multiple of what all have room
#: for, since a last wave of few blocks takes as long as a full one.
RESIDENT_BLOCKS = 7
#: Rows of more than this many entries are cut where a block ends.
LONG_ROW = 2048


@dataclass(frozen=True, eq=False)
class Chunks:
    """Equal shares of the rows of a CSR, which the threads of a kernel take.

    A row is cut into pieces of 8 entries, the last maybe of fewer; an empty row is one piece.  A
    chunk holds as many pieces as any other of its block, across row ends, so that neither hubs nor
    empty rows unbalance the work.  A block is 32 chunks and begins where a row begins, unless that
    row is long.

    Ask a CSR for its own, ``A.chunks``.
    """

    start: Array  #: (blocks * 32 + 1, 2) row and entry where a chunk begins; index dtype of the CSR
    slot: Array  #: (blocks + 1,) int32, numbers the borders of blocks that cut a row, -1 elsewhere
    cut: Array  #: (n_cuts,) int32, the block behind each such border
    long: Array  #: (n_long,) rows of more than ``LONG_ROW`` entries, ascending
    longest: int  #: entries of the longest row

    @property
    def blocks(self) -> int:
        """Return the number of blocks of 32 chunks: one for each thread block of a kernel."""
        return len(self.slot) - 1

    def arrays(self) -> list[Array]:
        """Return the four arrays, in the order of the fields."""
        return [self.start, self.slot, self.cut, self.long]


def chunks(indptr: Array, nnz: int, pieces: int = PIECES) -> Chunks:
    """Split the rows of a CSR into chunks, each of about ``pieces`` pieces of 8 entries.

    Takes a scan and searches.  On a GPU it is finished on return: any stream may use it.
    """
    xp, dtype = namespace(indptr), indptr.dtype
    with on_device_of(indptr), allocating(f"chunks of {nnz} entries"):
        start, longest = (_on_gpu if is_cupy(indptr) else _on_cpu)(indptr, pieces)
        first = start[::CHUNKS_PER_BLOCK]
        slot = xp.full(len(first), -1, np.int32)
        cut, long = xp.empty(0, np.int32), xp.empty(0, dtype)
        if longest > LONG_ROW:
            cuts = first[:, 1] > indptr[first[:, 0]]
            slot = xp.where(cuts, xp.cumsum(cuts) - 1, -1).astype(np.int32)
            cut = xp.flatnonzero(cuts).astype(np.int32)  # synchronize!
            long = xp.flatnonzero(indptr[1:] - indptr[:-1] > LONG_ROW).astype(dtype)  # synchronize!
    finish(indptr)  # synchronize!
    return Chunks(start=start, slot=slot, cut=cut, long=long, longest=longest)


def _on_cpu(indptr: Array, pieces: int) -> tuple[Array, int]:
    """Return where chunks begin, and the number of entries of the longest row."""
    n_rows, lengths = len(indptr) - 1, indptr[1:] - indptr[:-1]
    begins = np.zeros(n_rows + 1, np.int64)  # first piece of each row
    np.cumsum(np.maximum(-(-lengths // PIECE), 1), out=begins[1:])
    total = begins[-1]
    blocks = _block_count(int(total), pieces, wave=1)
    nominal = np.arange(blocks + 1) * total // blocks
    following = begins[np.searchsorted(begins, nominal)]
    border = np.where(following - nominal > LONG_ROW // PIECE, nominal, following)
    share = -(-(border[1:] - border[:-1]) // CHUNKS_PER_BLOCK)
    within = border[:-1, None] + share[:, None] * np.arange(CHUNKS_PER_BLOCK)
    piece = np.append(np.minimum(within, border[1:, None]).ravel(), total)
    row = np.searchsorted(begins, piece, side="right") - 1
    entry = indptr[row] + (piece - begins[row]) * PIECE
    start = np.stack([row, entry], axis=1).astype(indptr.dtype)
    return start, int(lengths.max(initial=0))


def _on_gpu(indptr: Array, pieces: int) -> tuple[Array, int]:
    """Return the same as ``_on_cpu``, by two kernels and a scan."""
    cupy, n_rows = namespace(indptr), len(indptr) - 1
    begins = cupy.zeros(n_rows + 2, np.int64)  # behind the last: the longest row
    _pieces_kernel()(indptr, n_rows, begins, size=n_rows)
    of_rows = begins[1:-1]
    cupy.cumsum(of_rows, out=of_rows)
    total, longest = begins[-2:].tolist()  # synchronize!
    wave = RESIDENT_BLOCKS * multiprocessors(indptr.device.id)
    blocks = _block_count(total, pieces, wave)
    start = cupy.empty((blocks * CHUNKS_PER_BLOCK + 1, 2), indptr.dtype)
    _starts_kernel()(indptr, begins, n_rows, total, blocks, start, size=len(start))
    return start, longest


def _block_count(total: int, pieces: int, wave: int) -> int:
    """Choose a number of blocks: whole waves, about ``pieces`` pieces a chunk, at least two."""
    waves = max(round(total / (pieces * CHUNKS_PER_BLOCK * wave)), 1)
    return max(min(waves * wave, total // (2 * CHUNKS_PER_BLOCK)), 1)


def most_blocks(n_rows: int, nnz: int, wave: int) -> int:
    """Return the most blocks that ``n_rows`` rows with ``nnz`` entries can have."""
    return _block_count(n_rows + nnz // PIECE, PIECES, wave)


@cache
def multiprocessors(device: int) -> int:
    """Return the number of multiprocessors of a GPU."""
    cupy = import_cupy()
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


#: Write the number of pieces of row i to ``begins[i + 1]``, and the longest row's length behind.
_pieces_kernel = elementwise(
    "raw I indptr, int64 n_rows",
    "raw int64 begins",
    f"""
    const long long length = indptr[i + 1] - indptr[i];
    begins[i + 1] = length > {PIECE} ? (length + {PIECE - 1}) / {PIECE} : 1;
    long long* const longest = &begins[n_rows + 1];
    if (length > *(volatile long long*)longest) atomicMax(longest, length);
    """,
    "sparsefmt_pieces",
)

#: Find the row and entry where each chunk begins; a thread owns one.
_starts_kernel = elementwise(
    "raw I indptr, raw int64 begins, int64 n_rows, int64 total, int64 blocks",
    "raw I start",
    f"""
    const auto row_behind = [&](long long piece) {{  // the first that begins behind it
        long long low = 0, high = n_rows + 1;
        while (low < high) {{
            const long long middle = low + (high - low) / 2;
            if (begins[middle] > piece) high = middle; else low = middle + 1;
        }}
        return low;
    }};
    const auto border = [&](long long block) {{
        const long long nominal = block * total / blocks;
        const long long following = begins[row_behind(nominal - 1)];
        return following - nominal > {LONG_ROW // PIECE} ? nominal : following;
    }};
    const long long block = i / {CHUNKS_PER_BLOCK};
    long long piece = total;
    if (block < blocks) {{
        const long long from = border(block), to = border(block + 1);
        const long long share = (to - from + {CHUNKS_PER_BLOCK - 1}) / {CHUNKS_PER_BLOCK};
        piece = min(from + share * (i % {CHUNKS_PER_BLOCK}), to);
    }}
    const long long row = row_behind(piece) - 1;
    start[2 * i] = row;
    start[2 * i + 1] = indptr[row] + (piece - begins[row]) * {PIECE};
    """,
    "sparsefmt_chunk_starts",
)
