"""The tiles of a structure, by which its products go to tensor cores; ``prepare`` gives them."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .._interop_torch import to_tensor
from .._split import Split
from ..compressed import CSR
from ..ops import _launch_tiles
from ..ops._launch import Structure
from ..ops._launch_tiles import TileStructure
from ..sgt import SGT
from ._kept import Kept, Place, place_of

#: Features of one matrix instruction: fewer would leave it idle for the most part.
FEWEST_FEATURES = 8

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
    """The tiles of one structure as kernels see them, and what a product reads beside them."""

    def __init__(self, csr: CSR, split: Split, inverse_degree: Tensor) -> None:
        self.split = split  # the memory of what kernels read
        self.inverse_degree = inverse_degree  #: (n_rows,) float32, for means
        self._outside = _rows_outside(csr, split)
        structure = _launch_tiles.tile_structure(split, csr.shape)
        self._reading = Reading(structure, to_tensor(split.perm))
        # Made now: a capture could not take it over from CuPy's stream.
        self._others = None if split.rest_perm is None else to_tensor(split.rest_perm)
        self._through: dict[int, Reading] = {}

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


#: By place; empty unless a graph on a GPU has been given tiles.
given: dict[Place, ref[Tiled]] = {}


def give(kept: Kept, tiles: SGT, inverse_degree: Tensor, perm: Tensor | None) -> None:
    """Products with this structure go by these tiles from now on, unless CUDA cores do best."""
    split, device = tiles.split(), inverse_degree.get_device()
    fit = bool(split.share and tiles.nnz) and (
        torch.cuda.get_device_capability(device) >= _launch_tiles.CAPABILITY
    )
    with kept.lock, torch.inference_mode(False):
        before = kept.tiled
        if before is None or before.split is not split:
            kept.tiled = Tiled(kept.csr, split, inverse_degree) if fit else None
            if kept.tiled is not None:
                given[kept.place] = ref(kept.tiled, partial(_forget, kept.place))
            if before is not None:
                torch.cuda.synchronize(device)  # synchronize! what it has composed may go
        if kept.tiled is not None:
            kept.tiled.reading(perm)


def _forget(place: Place, gone: ref[Tiled]) -> None:
    if given.get(place) is gone:
        del given[place]


def find(
    S: Structure, dtype: torch.dtype, feat: int, reduce: str, col_scale: Tensor | None
) -> Tiled | None:
    """The tiles that such a product goes by, None where CUDA cores do it."""
    found = given.get(place_of(S))
    if found is None or feat < FEWEST_FEATURES or reduce not in ("sum", "mean"):
        return None
    if dtype is torch.float32:
        return found() if _tf32_is_allowed() else None
    if dtype is torch.float16:
        return found() if col_scale is None else None  # their products may leave its range
    return found() if dtype is torch.bfloat16 else None


def _tf32_is_allowed() -> bool:
    """Whether torch's own products of float32 matrices may round to it, now."""
    if _precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return bool(_precision("cuda", "matmul") == "tf32")
