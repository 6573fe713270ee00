"""Products over the tiles of an SGT: on tensor cores those entries that pay, the rest on CSR."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ...formats import costs as formats_costs
from ...formats.arrays import Array, finish, import_cupy, namespace
from ...formats.base import Format
from ...formats.compressed import CSR
from ...formats.costs import Costs
from ...formats.sgt import SGT
from ...formats.split import HEIGHTS, Split
from ..engine import table
from ..engine.choose import on_gpu, pointer, row_stride
from ..engine.memory import memory_of

#: Tiles to convert to for tensor cores: ``A.tosgt(MMA_TILE)``.
MMA_TILE = (64, 16)
#: What ``precision`` may allow; the only one.
TF32 = "tf32"
#: Address of the stream that every thread has by default, if CuPy is told so.
_PER_THREAD = 2
_ON_STRUCTURE = "on CUDA cores, by the CSR that A was made of"


def spmm_kernels(on_csr: Callable[..., Any]) -> tuple[table.Kernel, ...]:
    """The kernels of ``spmm`` on an SGT; ``on_csr`` is the one on a CSR on a GPU."""
    note = "float32 sums; what does not pay on tensor cores runs on CUDA cores"
    structure = _on_structure(on_csr)
    return (
        table.Kernel("spmm_sgt_mma", _spmm_mma_gpu, refuses=_against_spmm, note=note),
        table.Kernel("spmm_sgt_csr", structure, ("sgt",), "gpu", note=_ON_STRUCTURE),
        table.Kernel("spmm_sgt_numba", _spmm_numba, ("sgt",), "cpu", refuses=_sums),
    )


def sddmm_kernels(on_csr: Callable[..., Any]) -> tuple[table.Kernel, ...]:
    """The kernels of ``sddmm`` on an SGT; ``on_csr`` is the one on a CSR on a GPU."""
    note = "float32 sums; what does not pay on tensor cores runs on CUDA cores"
    structure = _on_structure(on_csr)
    return (
        table.Kernel("sddmm_sgt_mma", _sddmm_mma_gpu, refuses=_against_sddmm, note=note),
        table.Kernel("sddmm_sgt_csr", structure, ("sgt",), "gpu", note=_ON_STRUCTURE),
        table.Kernel("sddmm_sgt_numba", _sddmm_numba, ("sgt",), "cpu"),
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
    A: Format,
    X: Array,
    values: Array | None = None,
    perm: Array | None = None,
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    reduce: str = "sum",
    *,
    costs: Costs | None = None,
    **options: Any,
) -> list[str]:
    """The reasons against tensor cores; entries are split only if there is no other one."""
    reasons = _against_mma(A, X, **options)
    if not isinstance(A, SGT):
        return reasons
    if reduce not in ("sum", "mean"):
        reasons.append(f"tensor cores do not take a {reduce}")
    if col_scale is not None and X.dtype == np.float16:
        reasons.append("values times col_scale may leave the range of float16")
    return reasons or _against_split(A, _costs_of_spmm(A, X, col_scale, costs), X)


def _against_split(A: SGT, costs: Costs | None, X: Array) -> list[str]:
    if costs is None:
        return [f"for {X.shape[-1]} features CUDA cores do best"]
    if A.split(costs).share:
        return []
    return ["its windows are too sparse, or too few: CUDA cores do best"]


def _costs_of_spmm(A: SGT, X: Array, col_scale: Array | None, costs: Costs | None) -> Costs | None:
    """Those given, else as measured for such a product; None where CUDA cores do best."""
    weighted = A.data is not None or col_scale is not None
    return costs or formats_costs.measured("spmm", X.itemsize, weighted, X.shape[-1])


def _against_sddmm(
    A: Format, X: Array, Y: Array, *_: Any, costs: Costs | None = None, **options: Any
) -> list[str]:
    """The reasons against tensor cores; entries are split only if there is no other one."""
    reasons = _against_mma(A, X, **options)
    if reasons or not isinstance(A, SGT):
        return reasons
    return _against_split(A, _costs_of_sddmm(X, costs), X)


def _costs_of_sddmm(X: Array, costs: Costs | None) -> Costs | None:
    return costs or formats_costs.measured("sddmm", X.itemsize, False, X.shape[-1])


@cache
def _against_device(device: int) -> tuple[str, ...]:
    from .cuda import CAPABILITY

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
        on_csr(A._keep_values("csr", lambda: _with_values(A), keep=True), *args, **options)

    return run


def _with_values(A: SGT) -> CSR:
    csr = A._structure()
    _ = csr.chunks  # kept there, for all values
    return csr._replace(data=A.data)


def _spmm_mma_gpu(
    A: SGT,
    X: Array,
    *,
    out: Array,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    costs: Costs | None = None,
    **_: Any,
) -> None:
    from ..matmul import cuda as matmul_cuda
    from . import cuda

    split = A.split(_costs_of_spmm(A, X, col_scale, costs))
    T = A._keep(("pointers", split), lambda: cuda.tile_structure(split, A.shape))
    dtype, feat = str(X.dtype), X.shape[1]
    X = _readable(X)
    row_scale, tile_scale = _row_factors(A, split, reduce, row_scale)
    nbytes = cuda.spmm_tiles_workspace(T, dtype, feat)
    workspace = namespace(X).empty(nbytes, np.uint8) if nbytes else None
    cuda.spmm_tiles(
        T,
        dtype,
        feat=feat,
        ldx=row_stride(X),
        data=pointer(_rest_values(A, split)),
        perm=0,
        values=pointer(_tile_values(A, split, baked=split.baked and col_scale is None)),
        X=pointer(X),
        row_scale=pointer(row_scale),
        tile_scale=pointer(tile_scale),
        col_scale=pointer(col_scale),
        out=pointer(out),
        workspace=pointer(workspace),
        stream=matmul_cuda.stream(),
    )


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


def _tile_values(A: SGT, split: Split, *, baked: bool) -> Array | None:
    """The values of the entries in tiles, one by one or in the cells that have them."""

    def build(data: Array) -> Array:
        if not baked:
            return data[split.perm]
        places = A._keep(("places", split, data.itemsize), lambda: split.places(data.itemsize))
        cells = namespace(data).zeros(split.n_cells, data.dtype)
        cells[places] = data[split.perm]
        return cells

    return _kept_values(A, ("tiles", split, baked), build)


def _rest_values(A: SGT, split: Split) -> Array | None:
    """Those of the other entries."""
    if split.rest is None:
        return None
    return _kept_values(A, ("rest", split), lambda data: data[split.rest_perm])


def _kept_values(A: SGT, key: tuple[Any, ...], build: Callable[[Array], Array]) -> Array | None:
    """What is built of the values; kept, for the stream that makes it."""
    data = A.data
    if data is None:
        return None
    stream = import_cupy().cuda.get_current_stream()
    # In a capture it is only made when the graph is launched: nobody else may find it.
    keep = not stream.is_capturing()

    def finished() -> Array:
        made = build(data)
        if keep and stream.ptr == _PER_THREAD:  # one address, a stream for each thread
            finish(made)  # synchronize!
        return made

    return A._keep_values((*key, stream.ptr), finished, keep=keep)


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
    from . import cpu

    cpu.spmm(A, X, row_scale, col_scale, out, mean=reduce == "mean")


def _sddmm_mma_gpu(
    A: SGT, X: Array, Y: Array, *, out: Array, costs: Costs | None = None, **_: Any
) -> None:
    from ..matmul import cuda as matmul_cuda
    from . import cuda, cuda_edges

    split, dtype = A.split(_costs_of_sddmm(X, costs)), str(X.dtype)
    T = A._keep(("pointers", split), lambda: cuda.tile_structure(split, A.shape))
    X, Y = _readable(X), _readable(Y)
    heads, feat = X.shape[1] if X.ndim == 3 else 1, X.shape[-1]
    nbytes = cuda_edges.sddmm_tiles_workspace(T, dtype, heads=heads, feat=feat)
    workspace = namespace(X).empty(nbytes, np.uint8) if nbytes else None
    cuda_edges.sddmm_tiles(
        T,
        dtype,
        heads=heads,
        feat=feat,
        ldx=row_stride(X),
        ldy=row_stride(Y),
        X=pointer(X),
        Y=pointer(Y),
        perm=pointer(split.perm),
        out=pointer(out),
        workspace=pointer(workspace),
        stream=matmul_cuda.stream(),
    )


def _readable(X: Array) -> Array:
    """``X``, or a copy of it, wider by zeros, whose heads begin where the kernel reads them."""
    from .cuda import copy_width

    X, feat = memory_of(X).rows_in_place(X), X.shape[-1]
    width = copy_width(str(X.dtype), feat, ldx=row_stride(X), X=pointer(X))
    if not width:
        return X
    copy = namespace(X).zeros((*X.shape[:-1], width), X.dtype)
    copy[..., :feat] = X
    return copy


def _sddmm_numba(A: SGT, X: Array, Y: Array, *, out: Array, **_: Any) -> None:
    from . import cpu

    X, Y = (a if a.ndim == 3 else a[:, None] for a in (X, Y))
    cpu.sddmm(A, X, Y, out.reshape(A.nnz, X.shape[1]))
