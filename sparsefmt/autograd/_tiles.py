"""The tiles of a structure, by which its products go to tensor cores; ``prepare`` gives them."""

from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..formats.compressed import CSR
from ..formats.sgt import SGT
from ..interop.torch import to_tensor
from ..ops.engine.structure import Structure
from ..ops.tiles import costs as tile_costs
from ..ops.tiles import cuda as tiles_cuda
from ..ops.tiles.costs import Costs
from ..ops.tiles.cuda import TileStructure
from ..ops.tiles.split import HEIGHTS, Split
from ._kept import Kept, Place, place_of

# 0.1 µs, whichever way it was set; builds before torch 2.9 have one way, and ask it.
_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)


@dataclass(frozen=True, slots=True)
class Reading:
    """Tiles for edge values in some order; keep it until the launch is enqueued."""

    structure: TileStructure
    numbers: Tensor  #: of each entry in tiles, its number in that order
    perm: Tensor | None = None  #: by which ``numbers`` was found
    others: Tensor | None = None  #: numbers of the other entries, which ``structure`` points to


class Tiled:
    """One split of a structure as kernels see it, and what a product reads beside it."""

    def __init__(self, csr: CSR, split: Split, inverse_degree: Tensor) -> None:
        self.split = split  # the memory of what kernels read
        self.inverse_degree = inverse_degree  #: (n_rows,) float32, for means
        self._outside = _rows_outside(csr, split)
        structure = tiles_cuda.tile_structure(split, csr.shape)
        self._reading = Reading(structure, to_tensor(split.perm))
        # Made now: a capture could not take it over from CuPy's stream.
        self._others = None if split.rest_perm is None else to_tensor(split.rest_perm)
        self._through: dict[int, Reading] = {}
        sizes = (2, 4) if split.baked else ()
        self._places = {size: to_tensor(split.places(size)) for size in sizes}

    def packed(self, values: Tensor, reading: Reading, *, scaled: bool) -> Tensor:
        """The values as the kernel reads them: of the entries in tiles, or of all cells."""
        found = values.index_select(0, reading.numbers)
        if scaled or not self.split.baked:
            return found
        cells = values.new_zeros(self.split.n_cells)
        return cells.index_copy_(0, self._places[values.itemsize], found)

    def reading(self, perm: Tensor | None) -> Reading:
        """For edge values that are read through ``perm``."""
        if perm is None:
            return self._reading
        return self._through.get(perm.data_ptr()) or self._compose(perm)

    def _compose(self, perm: Tensor) -> Reading:
        structure, others = self._reading.structure, self._others
        with torch.inference_mode(False), torch.no_grad():
            numbers = perm.index_select(0, self._reading.numbers)
            if others is not None:
                others = perm.index_select(0, others)
                structure = replace(structure, rest_perm=others.data_ptr())
        found = Reading(structure, numbers, perm, others)
        if not torch.cuda.is_current_stream_capturing():  # memory of that CUDA graph: not to keep
            torch.cuda.current_stream(perm.device).synchronize()  # synchronize!
            self._through[perm.data_ptr()] = found
        return found

    def row_factors(self, row_scale: Tensor | None, *, mean: bool) -> tuple[Tensor | None, ...]:
        """What multiplies all sums of each row, and those of its entries in tiles, in float32.

        The latter is 0 where tiles have no entry of the row: 0 times Inf or NaN would not be 0.
        """
        if row_scale is None:
            return (self.inverse_degree,) * 2 if mean else (None, None)
        rows = row_scale * self.inverse_degree if mean else row_scale
        return rows, rows if self._outside is None else rows.masked_fill(self._outside, 0)


def _rows_outside(csr: CSR, split: Split) -> Tensor | None:
    """(n_rows,) whether tiles have no entry of the row; None if they have one of each."""
    ptr = to_tensor(csr.indptr)
    inside = ptr[1:] - ptr[:-1]
    if split.rest is not None:
        left = to_tensor(split.rest.indptr)
        inside = inside - (left[1:] - left[:-1])
    outside = inside == 0
    return outside if outside.any() else None  # synchronize!


class Given:
    """The tiles that products with a structure go by: for each kind of product a split of its own.

    Each is built by the first product of its kind, but not in a capture of a CUDA graph.
    """

    def __init__(self, csr: CSR, tiles: SGT, inverse_degree: Tensor, costs: Costs | None) -> None:
        self.tiles, self.costs = tiles, costs
        self._csr, self._inverse_degree = csr, inverse_degree
        self._lock = Lock()
        self._tiled: dict[Costs, Tiled | None] = {}

    def of(self, op: str, dtype: torch.dtype, feat: int, *, weighted: bool) -> Tiled | None:
        """None where CUDA cores do best."""
        costs = self.costs or tile_costs.measured(op, dtype.itemsize, weighted, feat)
        if costs is None:
            return None
        if costs not in self._tiled and not torch.cuda.is_current_stream_capturing():
            with self._lock, torch.inference_mode(False):
                if costs not in self._tiled:
                    self._tiled[costs] = self._build(costs)
        return self._tiled.get(costs)

    def _build(self, costs: Costs) -> Tiled | None:
        split = self.tiles.split(costs)
        return Tiled(self._csr, split, self._inverse_degree) if split.share else None


#: By place; empty unless a graph on a GPU has been given tiles.
given: dict[Place, ref[Given]] = {}


def give(kept: Kept, tiles: SGT, inverse_degree: Tensor, costs: Costs | None) -> None:
    """Products with this structure go by these tiles from now on, unless CUDA cores do best."""
    device = inverse_degree.get_device()
    able = torch.cuda.get_device_capability(device) >= tiles_cuda.CAPABILITY
    fit = able and tiles.nnz and tiles.tile[0] in HEIGHTS
    with kept.lock:
        before = kept.given
        if before is not None and before.tiles is tiles and before.costs == costs:
            return
        kept.given = Given(kept.csr, tiles, inverse_degree, costs) if fit else None
        if kept.given is not None:
            given[kept.place] = ref(kept.given, partial(_forget, kept.place))
        if before is not None:
            torch.cuda.synchronize(device)  # synchronize! what it has composed may go


def _forget(place: Place, gone: ref[Given]) -> None:
    if given.get(place) is gone:
        del given[place]


def find(
    S: Structure,
    op: str,
    x: Tensor,
    *,
    weighted: bool = False,
    reduce: str = "sum",
    col_scale: Tensor | None = None,
) -> Tiled | None:
    """The tiles that such a product with these features goes by, None where CUDA cores do it."""
    found, dtype = given.get(place_of(S)), x.dtype
    if found is None or reduce not in ("sum", "mean") or dtype is torch.float64:
        return None
    if dtype is torch.float32 and not _tf32_is_allowed():
        return None
    if dtype is torch.float16 and col_scale is not None:
        return None  # their products may leave its range
    tiles = found()
    weighted = weighted or col_scale is not None
    return None if tiles is None else tiles.of(op, dtype, x.shape[-1], weighted=weighted)


def _tf32_is_allowed() -> bool:
    """Whether torch's own products of float32 matrices may round to it, now."""
    if _precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return bool(_precision("cuda", "matmul") == "tf32")
