"""The ops on CUDA: torch allocates, ``ops._launch`` launches on torch's current stream.

They take a ``Structure``; ``of_tensors`` makes kernels of library ops of them.

Kernels take pointers: ``data_ptr()`` costs 0.1 µs where an exchange through DLPack costs 15.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..ops.engine import table
from ..ops.engine.structure import Structure
from ..ops.matmul.api import SPMM
from ..ops.tiles import cuda as tiles_cuda
from ..ops.tiles import cuda_edges as tiles_cuda_edges
from . import _tiles
from ._layout import rows_apart
from ._tiles import Tiled

_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
}

_WIDE = (torch.float32, torch.float64)

# Torch's own code generator reads both this way: 0.1 µs, where a Stream object costs 3.  Builds
# without CUDA lack them.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_HERE = nullcontext()


def _on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Torch's dispatcher does not switch devices for a Python kernel."""
    return _HERE if x.get_device() == _current_device() else torch.cuda.device(x.device)


def _stream(x: Tensor) -> int:
    return int(_raw_stream(x.get_device()))  # read at every launch


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _vector(values: Tensor | None) -> Tensor | None:
    """One value each, without gaps; keep the result until the launch is enqueued."""
    return None if values is None else values.contiguous()


def _factors(scale: Tensor | None) -> Tensor | None:
    """As ``_vector``; kernels take the scales of 2-byte features in float32."""
    if scale is None:
        return None
    return scale.contiguous() if scale.dtype in _WIDE else scale.to(torch.float32).contiguous()


_structure_at = lru_cache(maxsize=256)(Structure)


def of_tensors(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as a library op takes it: with the structure in tensors."""

    def run(indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], *args: Any) -> Any:
        _, slot, cut, long = plan
        structure = _structure_at(
            *(indptr.shape[0] - 1, n_cols, indices.shape[0], _NAMES[indices.dtype]),
            *(array.data_ptr() for array in (indptr, indices, *plan)),
            *(slot.shape[0] - 1, cut.shape[0], long.shape[0]),
        )
        return kernel(structure, *args)

    return run


def _memory(size: int, like: Tensor) -> Tensor | None:
    return like.new_empty(size, dtype=torch.uint8) if size else None


def spmm(
    S: Structure,
    x: Tensor,
    values: Tensor | None = None,
    perm: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    reduce: str = "sum",
    **_: Any,
) -> Tensor:
    """The product by the tiles that the graph has."""
    weighted = values is not None
    tiled = _tiles.find(S, "spmm", x, weighted=weighted, reduce=reduce, col_scale=col_scale)
    assert tiled is not None
    out = x.new_empty(S.n_rows, x.shape[1])
    _spmm_tiles(tiled, x, out, reduce == "mean", values, perm, row_scale, col_scale)
    return out


def _without_tiles(
    S: Structure,
    x: Tensor,
    values: Tensor | None = None,
    perm: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    reduce: str = "sum",
    **_: Any,
) -> list[str]:
    weighted = values is not None
    if (
        _tiles.given
        and type(S) is Structure
        and _tiles.find(S, "spmm", x, weighted=weighted, reduce=reduce, col_scale=col_scale)
    ):
        return []
    return ["the graph has no tiles for it"]


def prefer(op: table.Op, kernel: table.Kernel) -> None:
    """Let the kernel come first on a GPU, until rooms have kernels for graphs with tiles."""
    op.candidates["csr", True] = kernel, *op.candidates["csr", True]


prefer(SPMM, table.Kernel("spmm_of_tiles", spmm, refuses=_without_tiles))


def _spmm_tiles(
    tiled: Tiled,
    x: Tensor,
    out: Tensor,
    mean: bool,
    values: Tensor | None,
    perm: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> None:
    x, values = _readable(x), _vector(values)
    rows, tile_rows = tiled.row_factors(_factors(row_scale), mean=mean)
    col_scale = _factors(col_scale)
    reading = tiled.reading(perm if values is not None else None)
    scaled = col_scale is not None
    packed = None if values is None else tiled.packed(values, reading, scaled=scaled)
    T, dtype, feat = reading.structure, _NAMES[x.dtype], out.shape[1]
    workspace = _memory(tiles_cuda.spmm_tiles_workspace(T, dtype, feat), x)
    with _on_device_of(x):
        tiles_cuda.spmm_tiles(
            T,
            dtype,
            feat=feat,
            ldx=x.stride(0),
            data=_pointer(values),
            perm=0 if values is None else T.rest_perm,
            values=_pointer(packed),
            X=x.data_ptr(),
            row_scale=_pointer(rows),
            tile_scale=_pointer(tile_rows),
            col_scale=_pointer(col_scale),
            out=out.data_ptr(),
            workspace=_pointer(workspace),
            stream=_stream(x),
        )


def _sddmm_tiles(
    tiled: Tiled,
    x: Tensor,
    y: Tensor,
    out: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    perm: Tensor | None = None,
) -> None:
    x, y = _readable(x), _readable(y)
    row_scale, col_scale = _factors(row_scale), _factors(col_scale)
    reading, dtype = tiled.reading(perm), _NAMES[x.dtype]
    T, heads, feat = reading.structure, x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
    workspace = _memory(tiles_cuda_edges.sddmm_tiles_workspace(T, dtype, heads=heads, feat=feat), x)
    with _on_device_of(x):
        tiles_cuda_edges.sddmm_tiles(
            T,
            dtype,
            heads=heads,
            feat=feat,
            ldx=x.stride(0),
            ldy=y.stride(0),
            X=x.data_ptr(),
            Y=y.data_ptr(),
            perm=reading.numbers.data_ptr(),
            row_scale=_pointer(row_scale),
            col_scale=_pointer(col_scale),
            out=out.data_ptr(),
            workspace=_pointer(workspace),
            stream=_stream(x),
        )


def _readable(x: Tensor) -> Tensor:
    """``x``, or a copy of it, wider by zeros, whose heads begin where kernels of tiles read."""
    x, feat = rows_apart(x), x.shape[-1]
    width = tiles_cuda.copy_width(_NAMES[x.dtype], feat, ldx=x.stride(0), X=x.data_ptr())
    if not width:
        return x
    copy = x.new_zeros(*x.shape[:-1], width)
    copy[..., :feat] = x
    return copy
