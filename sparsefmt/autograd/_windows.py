"""The windows of a structure whose arrays are tensors: found by the memory of its arrays.

So an op takes the structure alone, and a tracer sees nothing of them: they depend on the width of
the features, and are made when an op runs that needs them.
"""

from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .._interop_torch import from_tensor
from .._windows import Cut, Windows, windows
from ..errors import UnsupportedError
from ..ops import _launch_sspmm
from ..ops._launch_sspmm import Windowed
from ..reorder import Order


class _Kept:
    """What belongs to a structure, for as long as its column indices have memory."""

    def __init__(self, indices: Tensor) -> None:
        self.memory: Any = StorageWeakRef(indices.untyped_storage())  # type: ignore[no-untyped-call]
        self.order: Order | None = None
        self.made: dict[Cut, tuple[Windowed, Windows]] = {}


_lock = RLock()
_kept: dict[tuple[int, ...], _Kept] = {}


def order_rows(indptr: Tensor, indices: Tensor, n_cols: int, order: Order) -> None:
    """Rows of this structure share windows in that order from now on."""
    with _lock:
        kept = _kept_for(indptr, indices, n_cols)
        if kept.made:
            torch.cuda.synchronize(indices.device)  # synchronize! their memory goes back to CuPy
        kept.order, kept.made = order, {}


def windowed(
    indptr: Tensor, indices: Tensor, n_cols: int, dtype: str, *, feat: int, k: int
) -> Windowed | None:
    """The windows that ``sspmm`` takes for such features; None if no row of them fits on chip."""
    with _lock:
        kept = _kept_for(indptr, indices, n_cols)
        shape, given = (indptr.shape[0] - 1, n_cols), kept.order is not None
        sizes = {"feat": feat, "k": k, "device": indices.get_device()}
        cut = _launch_sspmm.cut(shape, indices.shape[0], dtype, **sizes, ordered=given)
        if cut is not None and cut not in kept.made:
            kept.made[cut] = _made(indptr, indices, n_cols, cut, kept.order)
        return None if cut is None else kept.made[cut][0]


def _kept_for(indptr: Tensor, indices: Tensor, n_cols: int) -> _Kept:
    sizes = indptr.shape[0], n_cols, indices.shape[0]
    key = (indptr.data_ptr(), indices.data_ptr(), *sizes)
    found = _kept.get(key)
    if found is None or found.memory.expired():
        expired = [old for old, kept in _kept.items() if kept.memory.expired()]
        if any(_kept[old].made for old in expired) and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()  # synchronize! their memory goes back to CuPy
            for old in expired:
                del _kept[old]
        found = _kept[key] = _Kept(indices)
    return found


def _made(
    indptr: Tensor, indices: Tensor, n_cols: int, cut: Cut, order: Order | None
) -> tuple[Windowed, Windows]:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "the rows of the graph are not in windows yet, and a capture cannot sort them: run the "
            "same step once before it."
        )
    rows = None if order is None else order.perm
    arrays = from_tensor("indptr", indptr), from_tensor("indices", indices)
    made = windows(*arrays, n_cols, cut, rows)
    return _launch_sspmm.windowed(made, n_cols), made
