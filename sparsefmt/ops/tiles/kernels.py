"""When tensor cores may run products, and the kernels over tiles that ``spmm`` and ``sddmm`` have.

Tiles are those of an SGT, or were prepared for a structure.  Tensor cores take the entries that pay
there, CUDA cores the rest.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from ..._caches import cache
from ...formats.arrays import Array, import_cupy, is_cupy
from ...formats.base import Format
from ...formats.sgt import SGT
from ..engine.bind import TF32
from ..engine.structure import Structure, all_tiles
from ..engine.table import Kernel
from . import cuda, cuda_edges
from .costs import Costs
from .operands import OwnTiles, PreparedTiles, costs_of, tiles_of
from .split import HEIGHTS

#: Tiles to convert to for tensor cores: ``A.tosgt(MMA_TILE)``.
MMA_TILE = (64, 16)
_NOTE = "float32 sums; what does not pay on tensor cores runs on CUDA cores"
_ON_STRUCTURE = "on CUDA cores, by the CSR that A was made of"
_IS_CSR = ["A is CSR"]  # made once: each call on a CSR is told so


def spmm_kernels(on_csr: Callable[..., Any]) -> tuple[Kernel, ...]:
    """List the kernels of ``spmm`` over tiles; ``on_csr`` is the one of a CSR on a GPU."""
    return (
        Kernel("spmm_sgt_mma", partial(cuda.spmm, on_csr), refuses=against_spmm, note=_NOTE),
        Kernel("spmm_sgt_csr", _on_structure(on_csr), ("sgt",), "gpu", note=_ON_STRUCTURE),
    )


def sddmm_kernels(on_csr: Callable[..., Any]) -> tuple[Kernel, ...]:
    """List the kernels of ``sddmm`` over tiles; ``on_csr`` is the one of a CSR on a GPU."""
    mma = partial(cuda_edges.sddmm, on_csr)
    return (
        Kernel("sddmm_sgt_mma", mma, refuses=against_sddmm, note=_NOTE),
        Kernel("sddmm_sgt_csr", _on_structure(on_csr), ("sgt",), "gpu", note=_ON_STRUCTURE),
    )


def _on_structure(on_csr: Callable[..., Any]) -> Callable[..., Any]:
    """Make a kernel of an SGT of one of a CSR: it runs on the CSR that the SGT was made of."""

    def run(A: SGT, *args: Any, **options: Any) -> Any:
        return on_csr(A._structure(), *args, **options)

    return run


# When tensor cores may run


def against_spmm(
    A: Format | Structure, x: Array, values: Array | None = None, perm: Array | None = None,
    row_scale: Array | None = None, col_scale: Array | None = None, reduce: str = "sum",
    own: Array | None = None, *_: Any, precision: str | None = None, costs: Costs | None = None,
    **__: Any,
) -> list[str]:  # fmt: skip
    """List the reasons against tensor cores; entries are split only if there is no other one."""
    if A.format == "csr" and precision is None and not all_tiles:
        return _IS_CSR
    tiles, reasons = _tiles_for(A, x, precision)
    if tiles is None:
        return reasons
    if reduce not in ("sum", "mean"):
        reasons.append(f"tensor cores do not take a {reduce}")
    if own is not None:
        reasons.append("tensor cores add no part of a row's own")
    if values is not None and values.ndim == 2:
        return [*reasons, "tensor cores take one value an entry"]
    if col_scale is not None and x.itemsize == 2 and "bfloat16" not in str(x.dtype):
        reasons.append("values times col_scale may leave the range of float16")
    weighted = values is not None or col_scale is not None
    return reasons or _against_split(tiles, costs_of(tiles, "spmm", x, costs, weighted=weighted), x)


def against_sddmm(
    A: Format | Structure,
    X: Array,
    *_: Any,
    precision: str | None = None,
    costs: Costs | None = None,
    **__: Any,
) -> list[str]:
    """List the reasons against tensor cores; entries are split only if there is no other one."""
    if A.format == "csr" and precision is None and not all_tiles:
        return _IS_CSR
    tiles, reasons = _tiles_for(A, X, precision)
    if tiles is None or reasons:
        return reasons
    return _against_split(tiles, costs_of(tiles, "sddmm", X, costs), X)


def _tiles_for(
    A: Format | Structure, x: Array, precision: str | None
) -> tuple[OwnTiles | PreparedTiles | None, list[str]]:
    """Find the tiles for any product, and the reasons against tensor cores that all have."""
    tiles, reasons = tiles_of(A), list[str]()
    if tiles is None:
        reasons.append(f"A is {A.format.upper()}")
        if precision == TF32:
            use = f'precision="{precision}" is for tiles, A.tosgt({MMA_TILE})'
            reasons.append(f"{use}: it changes nothing here")
        return None, reasons
    if isinstance(tiles, OwnTiles):  # prepared ones were looked at when they were prepared
        order = tiles.sgt.order
        on_gpu = is_cupy(order)
        reasons += against_device(order.device.id) if on_gpu else ["the arrays are on the CPU"]
        reasons += against_height(tiles.sgt)
    if x.itemsize == 8:
        reasons.append("tensor cores would round float64")
    elif x.itemsize == 4 and isinstance(tiles, PreparedTiles):
        reasons += tiles.refuses_float32()
    elif x.itemsize == 4 and precision is None:
        reasons.append(f'tensor cores round float32: allow it with precision="{TF32}"')
    return tiles, reasons


@cache
def against_device(device: int) -> tuple[str, ...]:
    """Return why that GPU has no tensor cores for these products, or nothing."""
    version = import_cupy().cuda.Device(device).compute_capability
    capability = int(version[:-1]), int(version[-1])
    if capability >= cuda.CAPABILITY:
        return ()
    least, has = (".".join(map(str, version)) for version in (cuda.CAPABILITY, capability))
    return (f"it needs compute capability {least}, cuda:{device} has {has}",)


def against_height(A: SGT) -> list[str]:
    """Return why no kernel takes windows as high as those of this SGT, or nothing."""
    if A.tile[0] in HEIGHTS:
        return []
    heights = ", ".join(map(str, HEIGHTS))
    mend = f"it takes {heights}, A.tosgt({MMA_TILE}) for instance"
    return [f"its tiles have {A.tile[0]} rows: {mend}"]


def _against_split(tiles: OwnTiles | PreparedTiles, costs: Costs | None, x: Array) -> list[str]:
    if costs is None:
        return [f"for {x.shape[-1]} features CUDA cores do best"]
    if tiles.operands(costs) is not None:
        return []
    return ["its windows are too sparse, or too few: CUDA cores do best"]
