"""What the operations of graph attention launch: CuPy arrays in, pointers out.

The arrays are checked and packed: features (n, heads, feat), scores (n, heads) of the type of sums.
"""

from typing import Any

import numpy as np

from ...formats.arrays import Array, namespace
from ...formats.compressed import CSR
from ..edges import cuda as edges_cuda
from ..engine.choose import pointer
from ..matmul import cuda as matmul_cuda
from . import cuda_gat, cuda_gat_entries


def _forward(
    A: CSR, H: Array, el: Array, er: Array, edges: Array | None, out: Array, plus: Array | None,
    stats: Array | None, *, slope: float, loops: bool, dropout: float = 0.0, seed: int = 0,
) -> None:  # fmt: skip
    S, dtype, (heads, feat) = matmul_cuda.structure(A), str(H.dtype), H.shape[1:]
    workspace = _scratch(H, cuda_gat.gat_workspace(S, dtype, heads=heads, feat=feat))
    cuda_gat.gat(
        S,
        dtype,
        heads=heads,
        feat=feat,
        slope=slope,
        dropped=cuda_gat.dropout(dropout, seed),
        loops=loops,
        H=pointer(H),
        el=pointer(el),
        er=pointer(er),
        edges=pointer(edges),
        loop_edges=0,
        bias=0,
        out=pointer(out),
        plus=pointer(plus),
        stats=pointer(stats),
        workspace=pointer(workspace),
        stream=matmul_cuda.stream(),
    )


def gat(
    A: CSR, H: Array, el: Array, er: Array, edges: Array | None, *, out: Array, **options: Any
) -> None:
    """Launch the attention of ``ops.gat``."""
    _forward(A, H, el, er, edges, out, None, None, **options)


def gat_attention(
    A: CSR, el: Array, er: Array, edges: Array | None, *, out: Array, slope: float, loops: bool
) -> None:
    """Launch the softmax of ``ops.gat_attention``, one value an entry and head."""
    xp, (rows, heads) = namespace(el), er.shape
    # The statistics come with a product: here of no features.
    H, none = (xp.empty((n, heads, 0), el.dtype) for n in (A.n_cols, rows))
    stats = xp.empty((rows, heads, 4), el.dtype)
    _forward(A, H, el, er, edges, none, None, stats, slope=slope, loops=loops)
    cuda_gat_entries.gat_attention(
        matmul_cuda.structure(A),
        str(el.dtype),
        heads=heads,
        slope=slope,
        loops=loops,
        el=pointer(el),
        er=pointer(er),
        edges=pointer(edges),
        forward=pointer(stats),
        out=pointer(out),
        stream=matmul_cuda.stream(),
    )


def gat_backward(
    A: CSR, H: Array, el: Array, er: Array, edges: Array | None, grad: Array, *, out: Array,
    dell: Array, der: Array, dedges: Array | None, **options: Any,
) -> None:  # fmt: skip
    """Launch the gradients of ``ops.gat``."""
    stats = _statistics(A, H, el, er, edges, grad, der, **options)
    _sources(A, H, el, edges, grad, stats, out, dell, **options)
    if dedges is not None:
        dropped = cuda_gat.dropout(options["dropout"], options["seed"])
        _edges(A, H, el, edges, grad, stats, dedges, dropped, options)


def _statistics(
    A: CSR, H: Array, el: Array, er: Array, edges: Array | None, grad: Array, der: Array,
    **options: Any,
) -> Array:  # fmt: skip
    """What entries read of their targets, and the gradient of ``er``."""
    xp, items = namespace(H), (A.n_rows, H.shape[1])
    result, plus = (xp.empty(grad.shape, H.dtype) for _ in range(2))
    forward, stats = (xp.empty((*items, 4), el.dtype) for _ in range(2))
    _forward(A, H, el, er, edges, result, plus, forward, **options)
    cuda_gat.gat_statistics(
        str(H.dtype),
        items=er.size,
        heads=H.shape[1],
        feat=H.shape[2],
        slope=options["slope"],
        dropped=cuda_gat.dropout(options["dropout"], options["seed"]),
        loops=options["loops"],
        nnz=A.nnz,
        H=pointer(H),
        el=pointer(el),
        loop_edges=0,
        bias=0,
        out=pointer(result),
        plus=pointer(plus),
        grad=pointer(grad),
        er=pointer(er),
        forward=pointer(forward),
        stats=pointer(stats),
        der=pointer(der),
        dloop=0,
        stream=matmul_cuda.stream(),
    )
    return stats


def _sources(
    A: CSR, H: Array, el: Array, edges: Array | None, grad: Array, stats: Array, out: Array,
    dell: Array, *, slope: float, dropout: float, seed: int, loops: bool,
) -> None:  # fmt: skip
    """The gradients of ``H`` and ``el``, over the transpose."""
    columns, perm = A.with_data(None).tocsc_with_perm()
    rows = columns.T  # which holds the cut of the work that the kernels read
    T, dtype, (heads, feat) = matmul_cuda.structure(rows), str(H.dtype), H.shape[1:]
    arrays = {"grad": pointer(grad), "H": pointer(H), "out": pointer(out)}
    together = arrays["grad"] | arrays["H"] | arrays["out"]
    slices = cuda_gat.gat_slices(dtype, heads=heads, feat=feat, together=together)
    parts = dell if slices == 1 else namespace(H).empty((*dell.shape, slices), dell.dtype)
    workspace = _scratch(H, cuda_gat.gat_workspace(T, dtype, heads=heads, feat=feat))
    cuda_gat.gat_backward(
        T,
        dtype,
        heads=heads,
        feat=feat,
        slope=slope,
        dropped=cuda_gat.dropout(dropout, seed),
        loops=loops,
        perm=pointer(perm),
        el=pointer(el),
        edges=pointer(edges),
        loop_edges=0,
        stats=pointer(stats),
        dell=pointer(parts),
        workspace=pointer(workspace),
        stream=matmul_cuda.stream(),
        **arrays,
    )
    if slices > 1:
        parts.sum(axis=2, out=dell)


def _edges(
    A: CSR, H: Array, el: Array, edges: Array | None, grad: Array, stats: Array, out: Array,
    dropped: Any, options: dict[str, Any],
) -> None:  # fmt: skip
    """The gradient of the entries' own scores."""
    S, dtype, (heads, feat) = matmul_cuda.structure(A), str(H.dtype), H.shape[1:]
    dots, stride = namespace(H).empty((A.nnz, heads), H.dtype), heads * feat
    shared: dict[str, Any] = {"heads": heads, "stream": matmul_cuda.stream()}
    edges_cuda.sddmm_of_pointers(
        S,
        dtype,
        feat=feat,
        ldx=stride,
        ldy=stride,
        X=pointer(grad),
        Y=pointer(H),
        out=pointer(dots),
        **shared,
    )
    cuda_gat_entries.gat_edge_gradient(
        S,
        dtype,
        slope=options["slope"],
        dropped=dropped,
        loops=options["loops"],
        el=pointer(el),
        edges=pointer(edges),
        stats=pointer(stats),
        dots=pointer(dots),
        out=pointer(out),
        **shared,
    )


def _scratch(like: Array, nbytes: int) -> Array | None:
    return namespace(like).empty(nbytes, np.uint8) if nbytes else None
