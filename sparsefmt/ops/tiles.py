"""Products over the tiles of an SGT: on tensor cores those entries that pay, the rest on CSR."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .._arrays import Array, finish, import_cupy, namespace
from .._split import HEIGHTS, Split
from ..base import Format
from ..sgt import SGT
from . import _registry
from ._registry import Kernel, all_of, on_cpu, on_gpu, pointer, row_stride

#: Tiles to convert to for tensor cores: ``A.tosgt(MMA_TILE)``.
MMA_TILE = (64, 16)
#: What ``precision`` may allow; the only one.
TF32 = "tf32"
_ON_STRUCTURE = "on CUDA cores, by the CSR that A was made of"


def spmm_rows(on_csr: Callable[..., None]) -> tuple[Kernel, ...]:
    """The kernels of ``spmm`` on an SGT; ``on_csr`` is the one on a CSR on a GPU."""
    sgt = _registry.is_format("sgt")
    structure = _on_structure(on_csr)
    note = "float32 sums; what does not pay on tensor cores runs on CUDA cores"
    return (
        Kernel("spmm", "spmm_sgt_mma", _against_spmm, _spmm_mma_gpu, note=note),
        Kernel("spmm", "spmm_sgt_csr", all_of(on_gpu, sgt), structure, note=_ON_STRUCTURE),
        Kernel("spmm", "spmm_sgt_numba", all_of(on_cpu, sgt, _sums), _spmm_numba),
    )


def sddmm_rows(on_csr: Callable[..., None]) -> tuple[Kernel, ...]:
    """The kernels of ``sddmm`` on an SGT; ``on_csr`` is the one on a CSR on a GPU."""
    sgt = _registry.is_format("sgt")
    structure = _on_structure(on_csr)
    return (
        Kernel("sddmm", "sddmm_sgt_csr", all_of(on_gpu, sgt), structure, note=_ON_STRUCTURE),
        Kernel("sddmm", "sddmm_sgt_numba", all_of(on_cpu, sgt), _sddmm_numba),
    )


# What each kernel can run


def _against_mma(A: Format, X: Array, *, precision: str | None = None, **_: Any) -> list[str]:
    """The reasons against tensor cores that every product on them has."""
    if not isinstance(A, SGT):
        mend = f'precision="{TF32}" is for tiles, A.tosgt({MMA_TILE}): it changes nothing here'
        return [f"A is {A.format.upper()}", *([mend] if precision else [])]
    reasons = on_gpu(A) or [*_against_device(A._indices.device.id)]
    if A.tile[0] not in HEIGHTS:
        heights = ", ".join(map(str, HEIGHTS))
        reasons.append(
            f"its tiles have {A.tile[0]} rows: it takes {heights}, A.tosgt({MMA_TILE}) for instance"
        )
    if X.dtype == np.float64:
        reasons.append("tensor cores would round float64")
    elif X.dtype == np.float32 and precision != TF32:
        reasons.append(f'tensor cores round float32: allow it with precision="{TF32}"')
    return reasons


def _against_spmm(
    A: Format, X: Array, *, reduce: str = "sum", col_scale: Array | None = None, **options: Any
) -> list[str]:
    """The reasons against tensor cores; entries are split only if there is no other one."""
    reasons = _against_mma(A, X, **options)
    if not isinstance(A, SGT):
        return reasons
    if reduce not in ("sum", "mean"):
        reasons.append(f"tensor cores do not take a {reduce}")
    if col_scale is not None and X.dtype == np.float16:
        reasons.append("values times col_scale may leave the range of float16")
    if not reasons and not A.split().share:
        reasons.append("its windows are too sparse: CUDA cores do best")
    return reasons


@cache
def _against_device(device: int) -> tuple[str, ...]:
    from ._launch_tiles import CAPABILITY

    found = import_cupy().cuda.Device(device).compute_capability
    capability = int(found[:-1]), int(found[-1])
    if capability >= CAPABILITY:
        return ()
    least, has = (".".join(map(str, one)) for one in (CAPABILITY, capability))
    return (f"it needs compute capability {least}, cuda:{device} has {has}",)


def _sums(A: Format, X: Array, *, reduce: str = "sum", **_: Any) -> list[str]:
    return [] if reduce in ("sum", "mean") else [f"windows of tiles do not take a {reduce}"]


# Launchers


def _on_structure(on_csr: Callable[..., None]) -> Callable[..., None]:
    """The same product of the CSR that belongs to the SGT, which is not converted for it."""

    def run(A: SGT, *args: Array, **options: Any) -> None:
        csr = A._structure()
        _ = csr.chunks  # kept there, where the next call finds them
        on_csr(csr._replace(data=A.data), *args, **options)

    return run


def _spmm_mma_gpu(
    A: SGT,
    X: Array,
    *,
    out: Array,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    **_: Any,
) -> None:
    from . import _launch, _launch_tiles

    split, stream = A.split(), _launch.stream()
    T = A._keep(("pointers", split), lambda: _launch_tiles.tile_structure(split, A.shape))
    dtype, feat = str(X.dtype), X.shape[1]
    X, sums = _readable(X), _writable(out)
    row_scale, tile_scale = _row_factors(A, split, reduce, row_scale)
    nbytes = _launch_tiles.spmm_tiles_workspace(T, dtype, feat)
    workspace = namespace(X).empty(nbytes, np.uint8) if nbytes else None
    _launch_tiles.spmm_tiles(
        T,
        dtype,
        feat=feat,
        ldx=row_stride(X),
        data=pointer(A.data),
        values=pointer(_tile_values(A, split, stream)),
        X=pointer(X),
        row_scale=pointer(row_scale),
        tile_scale=pointer(tile_scale),
        col_scale=pointer(col_scale),
        out=pointer(sums),
        workspace=pointer(workspace),
        stream=stream,
    )
    if sums is not out:
        out[...] = sums


def _readable(X: Array) -> Array:
    """``X``, or a copy of it with rows where the kernel reads them."""
    from ._launch_tiles import copy_width

    feat = X.shape[1]
    width = copy_width(str(X.dtype), feat, ldx=row_stride(X), X=pointer(X))
    if not width:
        return X
    copy = namespace(X).zeros((len(X), width), X.dtype)
    copy[:, :feat] = X
    return copy


def _writable(out: Array) -> Array:
    """``out``, or another one for the kernel to write to if it begins where words do not."""
    return namespace(out).empty_like(out) if pointer(out) % 16 else out


def _row_factors(
    A: SGT, split: Split, reduce: str, row_scale: Array | None
) -> tuple[Array | None, Array | None]:
    """What multiplies the sums of each row, and those of its entries in tiles.

    The latter is 0 where tiles have no entry of the row: 0 times Inf or NaN would not be 0.
    """
    if reduce == "mean":
        share = A._keep("shares", lambda: _shares(A))
        if row_scale is None:
            return share, share
        row_scale = row_scale * share
    if row_scale is None:
        return None, None
    inside = A._keep(("rows", split), lambda: _rows_inside(A, split))
    if inside is None:
        return row_scale, row_scale
    return row_scale, namespace(inside).where(inside, row_scale, row_scale.dtype.type(0))


def _shares(A: SGT) -> Array:
    """1 over the entries of each row."""
    lengths = A._structure().lengths.astype(np.float32)
    found = 1 / namespace(lengths).maximum(lengths, np.float32(1))
    finish(found)  # synchronize!
    return found


def _rows_inside(A: SGT, split: Split) -> Array | None:
    """Whether the tiles of the split have an entry of each row; None if they have one of all."""
    lengths = A._structure().lengths
    found = lengths > (0 if split.rest is None else split.rest.lengths)
    return None if bool(found.all()) else found  # synchronize!


def _tile_values(A: SGT, split: Split, stream: int) -> Array | None:
    """The values in the order of the tiles; kept, for the stream that makes them."""
    data = A.data
    if data is None:
        return None
    # In a capture they are only made when the graph is launched: nobody else may find them.
    keep = not import_cupy().cuda.get_current_stream().is_capturing()
    return A._keep_values(("tiles", split, stream), lambda: data[split.perm], keep=keep)


def _spmm_numba(
    A: SGT,
    X: Array,
    *,
    out: Array,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    **_: Any,
) -> None:
    from . import _cpu_sgt

    _cpu_sgt.spmm(A, X, row_scale, col_scale, out, mean=reduce == "mean")


def _sddmm_numba(A: SGT, X: Array, Y: Array, *, out: Array, **_: Any) -> None:
    from . import _cpu_sgt

    X, Y = (a if a.ndim == 3 else a[:, None] for a in (X, Y))
    _cpu_sgt.sddmm(A, X, Y, out.reshape(A.nnz, X.shape[1]))
