"""Equal shares of the rows of a CSR: how kernels over it divide their work."""

from dataclasses import dataclass

import numpy as np

from ._arrays import Array, allocating, finish, is_cupy, namespace, on_device_of

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
    """Equal shares of the rows of a CSR: what the threads of a kernel go by.

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

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.slot) - 1

    def arrays(self) -> list[Array]:
        """The four arrays, in the order of the fields."""
        return [self.start, self.slot, self.cut, self.long]


def chunks(indptr: Array, nnz: int, pieces: int = PIECES) -> Chunks:
    """Cut rows into chunks of about that many pieces; scans and searches.

    On a GPU it is finished when this returns, so that any stream may use it.
    """
    xp, n_rows, dtype = namespace(indptr), len(indptr) - 1, indptr.dtype
    with on_device_of(indptr), allocating(f"chunks of {nnz} entries"):
        lengths = indptr[1:] - indptr[:-1]
        begins = xp.zeros(n_rows + 1, np.int64)  # first piece of each row
        xp.cumsum(xp.maximum(-(-lengths // PIECE), 1), out=begins[1:])
        total = begins[-1:]
        blocks = _block_count(indptr, int(total[0]), pieces)  # synchronize!
        nominal = xp.arange(blocks + 1) * total // blocks
        following = begins[xp.searchsorted(begins, nominal)]
        border = xp.where(following - nominal > LONG_ROW // PIECE, nominal, following)
        share = -(-(border[1:] - border[:-1]) // CHUNKS_PER_BLOCK)
        within = border[:-1, None] + share[:, None] * xp.arange(CHUNKS_PER_BLOCK)
        piece = xp.append(xp.minimum(within, border[1:, None]).ravel(), total)
        row = xp.searchsorted(begins, piece, side="right") - 1
        entry = indptr[row] + (piece - begins[row]) * PIECE
        start = xp.stack([row, entry], axis=1).astype(dtype)
        cuts = entry[::CHUNKS_PER_BLOCK] > indptr[row[::CHUNKS_PER_BLOCK]]
        slot = xp.where(cuts, xp.cumsum(cuts) - 1, -1).astype(np.int32)
        cut = xp.flatnonzero(cuts).astype(np.int32)  # synchronize!
        long = xp.flatnonzero(lengths > LONG_ROW).astype(dtype)  # synchronize!
    finish(indptr)  # synchronize!
    return Chunks(start=start, slot=slot, cut=cut, long=long)


def _block_count(indptr: Array, total: int, pieces: int) -> int:
    """Whole waves of blocks of about that many pieces a chunk, but no chunk of less than two."""
    wave = 1
    if is_cupy(indptr):
        wave = RESIDENT_BLOCKS * int(indptr.device.attributes["MultiProcessorCount"])
    waves = max(round(total / (pieces * CHUNKS_PER_BLOCK * wave)), 1)
    return max(min(waves * wave, total // (2 * CHUNKS_PER_BLOCK)), 1)
