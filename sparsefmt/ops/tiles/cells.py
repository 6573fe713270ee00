"""Where the entries of a slab lie for matrix units: formulas for NumPy, and in CUDA.

A slab is 16 columns of a window, of up to 128 rows.  ``sgt.cu`` reads the same formulas backwards.
"""

from ...formats.arrays import Array

#: Columns of a slab, and rows of a tile of it.
SLAB = 16
#: Lanes of a warp, which share a tile.
LANES = 32


def cell(row: Array, column: Array) -> Array:
    """Number a row and a column among the cells of their slab, tile by tile.

    In a tile lane ``4 g + t`` has rows ``g`` and ``g + 8`` and columns ``2 t``, ``2 t + 1`` and
    these + 8; from the highest bit on: tile, lane, column + 8, row + 8, column + 1.
    """
    lane = row % 8 * 4 + column % 8 // 2
    return row // 16 * 256 + lane * 8 + column // 8 * 4 + row % 16 // 8 * 2 + column % 2


def place(cell: Array, itemsize: int) -> Array:
    """Place a cell on chip as the kernel does: what a lane reads at once, 16 bytes, together.

    ``cell`` are integers of 32 bits or more.
    """
    if itemsize == 2:
        return cell
    return (cell & ~0xFF) | (cell & 4) << 5 | (cell >> 3 & 31) << 2 | (cell & 3)


def mask_bit(row: Array, column: Array, tiles: int) -> Array:
    """Place their bit among those of the slab: bit ``place % 8`` of byte ``place // 8``.

    A lane has one byte for each tile.  Of two tiles, one above the other, the first byte has the
    even columns, 4 bits a tile, the second the odd ones; of a tile that is alone one has both.
    """
    lane = row % 8 * 4 + column % 8 // 2
    tile, odd = row // 16, column % 2
    byte, half = (0, odd) if tiles == 1 else (tile // 2 * 2 + odd, tile % 2)
    return (lane * tiles + byte) * 8 + half * 4 + column // 8 * 2 + row % 16 // 8


#: ``cell`` and ``mask_bit`` for kernels.
CUDA = """
__device__ unsigned lane_of(unsigned row, unsigned column) {
    return row % 8 * 4 + column % 8 / 2;
}
__device__ unsigned cell_of(unsigned row, unsigned column) {
    return row / 16 * 256 + lane_of(row, column) * 8 + column / 8 * 4 + row % 16 / 8 * 2
        + column % 2;
}
__device__ unsigned mask_bit_of(unsigned row, unsigned column, unsigned tiles) {
    const unsigned tile = row / 16, odd = column % 2;
    const unsigned byte = tiles == 1 ? 0 : tile / 2 * 2 + odd, half = tiles == 1 ? odd : tile % 2;
    return (lane_of(row, column) * tiles + byte) * 8 + half * 4 + column / 8 * 2 + row % 16 / 8;
}
"""
