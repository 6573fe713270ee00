"""The windows of a structure whose arrays are tensors, and the order of the rows in them.

They depend on the width of the features, and are made when an op runs that needs them.
"""

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..ops.cbsr import cuda_sspmm as cbsr_cuda_sspmm
from ..ops.cbsr.cuda_sspmm import Windowed
from ..reorder import Order
from ._kept import Kept, find


def order_rows(kept: Kept, order: Order) -> None:
    """Rows of this structure share windows in that order from now on."""
    with kept.lock:
        if kept.windowed and order is not kept.order:
            torch.cuda.synchronize(kept.csr.indptr.device.id)  # synchronize! the old ones may go
        kept.order, kept.windowed = order, {}


def windowed(
    indptr: Tensor, indices: Tensor, n_cols: int, dtype: str, *, feat: int, k: int
) -> Windowed | None:
    """The windows that ``sspmm`` takes for such features.

    None if no row of them fits on chip, or no graph holds the structure.
    """
    n_rows, nnz = indptr.shape[0] - 1, indices.shape[0]
    kept = find((indptr.data_ptr(), indices.data_ptr(), n_rows, n_cols, nnz))
    if kept is None:
        return None
    with kept.lock:
        sizes = {"feat": feat, "k": k, "device": indices.get_device()}
        cut = cbsr_cuda_sspmm.cut(
            (n_rows, n_cols), nnz, dtype, **sizes, ordered=kept.order is not None
        )
        if cut is None:
            return None
        found = kept.windowed.get(cut)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError(
                    "the rows of the graph are not in windows yet, and a capture cannot sort them: "
                    "run the same step once before it."
                )
            made = kept.csr._windows_of(cut, kept.order)
            found = kept.windowed[cut] = cbsr_cuda_sspmm.windowed(made, n_cols)
        return found
