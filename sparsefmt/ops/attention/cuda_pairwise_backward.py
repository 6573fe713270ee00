"""What the operations of attention between rows launch: CuPy arrays in, pointers out.

The arrays are checked and packed: features (n, heads, feat), ``att`` and scores of the type of
sums.
"""

from typing import Any

import numpy as np

from ...formats.arrays import Array, namespace
from ...formats.compressed import CSR
from ..engine.choose import pointer
from ..matmul import cuda as matmul_cuda
from . import cuda_gat, cuda_pairwise, pairwise_shape
from .column_blocks import Part, parts_of


def attend(
    A: CSR, queries: Array, keys: Array, values: Array | None, att: Array | None,
    edges: Array | None, *, out: Array, **options: Any,
) -> None:  # fmt: skip
    """Launch the attention of ``ops.gatv2`` and ``ops.dot_attention``."""
    common = _common(queries, keys, values, att, edges, **options)
    _forward(A, keys, out, None, common)


def attend_backward(
    A: CSR, queries: Array, keys: Array, values: Array | None, att: Array | None,
    edges: Array | None, grad: Array, *, out: Array, dkeys: Array, dvalues: Array | None,
    datt: Array | None, dedges: Array | None, **options: Any,
) -> None:  # fmt: skip
    """Launch the gradients of ``ops.gatv2`` and ``ops.dot_attention``."""
    gradients = out, dkeys, dvalues, datt, dedges
    if not grad.size:  # no kernel runs
        for gradient in gradients:
            if gradient is not None:
                gradient.fill(0)
        return
    common = _common(queries, keys, values, att, edges, **options)
    xp, sums = namespace(keys), np.float64 if keys.dtype == np.float64 else np.float32
    result, statistics = xp.empty(grad.shape, keys.dtype), xp.empty((*grad.shape[:2], 2), sums)
    stats = xp.empty((*grad.shape[:2], 4), sums)
    _forward(A, keys, result, statistics, common)
    cuda_pairwise.attend_statistics(
        str(keys.dtype),
        items=statistics.size // 2,
        feat=keys.shape[2],
        out=pointer(result),
        grad=pointer(grad),
        statistics=pointer(statistics),
        stats=pointer(stats),
        stream=common["stream"],
    )
    common |= {"grad": pointer(grad), "stats": pointer(stats)}
    _sources(A, keys, dkeys, dvalues, common)
    _targets(A, keys, out, datt, dedges, common)


def _common(
    queries: Array, keys: Array, values: Array | None, att: Array | None, edges: Array | None, *,
    dropout: float, seed: int, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """What every launch takes."""
    return {
        "kind": pairwise_shape.DOT if att is None else pairwise_shape.ADDITIVE,
        "one": values is None,
        "heads": keys.shape[1],
        "feat": keys.shape[2],
        "dropped": cuda_gat.dropout(dropout, seed),
        "queries": pointer(queries),
        "keys": pointer(keys),
        "values": pointer(keys if values is None else values),
        "att": pointer(att),
        "edges": pointer(edges),
        "stream": matmul_cuda.stream(),
        **options,
    }


def _forward(
    A: CSR, keys: Array, out: Array, statistics: Array | None, common: dict[str, Any]
) -> None:
    S, dtype = matmul_cuda.structure(A), str(keys.dtype)
    parts = _parts(A, S, dtype, pairwise_shape.FORWARD, common)
    workspace = _scratch(S, keys, 1, parts)
    cuda_pairwise.attend(
        S,
        dtype,
        parts=parts,
        out=pointer(out),
        statistics=pointer(statistics),
        workspace=pointer(workspace),
        **common,
    )


def _sources(
    A: CSR, keys: Array, dkeys: Array, dvalues: Array | None, common: dict[str, Any]
) -> None:
    """The gradients of keys and values, over the transpose."""
    columns, perm = A.with_data(None).tocsc_with_perm()
    rows = columns.T  # which holds the cut of the work that the kernels read
    T, dtype = matmul_cuda.structure(rows), str(keys.dtype)
    parts = _parts(rows, T, dtype, pairwise_shape.SOURCES, common)
    workspace = _scratch(T, keys, 1 if dvalues is None else 2, parts)
    cuda_pairwise.attend_sources(
        T,
        dtype,
        parts=parts,
        perm=pointer(perm),
        dvalues=pointer(dkeys if dvalues is None else dvalues),
        dkeys=0 if dvalues is None else pointer(dkeys),
        workspace=pointer(workspace),
        **common,
    )


def _targets(
    A: CSR, keys: Array, dqueries: Array, datt: Array | None, dedges: Array | None,
    common: dict[str, Any],
) -> None:  # fmt: skip
    """The gradients of queries, of ``att`` and of the edges' scores."""
    S, dtype, xp = matmul_cuda.structure(A), str(keys.dtype), namespace(keys)
    of_blocks = None if datt is None else xp.empty((S.blocks, *datt.shape), datt.dtype)
    parts = _parts(A, S, dtype, pairwise_shape.TARGETS, common)
    workspace = _scratch(S, keys, 1, parts)
    cuda_pairwise.attend_targets(
        S,
        dtype,
        parts=parts,
        dqueries=pointer(dqueries),
        datt=pointer(of_blocks),
        dedges=pointer(dedges),
        workspace=pointer(workspace),
        **common,
    )
    if of_blocks is not None:
        of_blocks.sum(axis=0, out=datt)


def _parts(
    A: CSR, S: matmul_cuda.Structure, dtype: str, way: int, common: dict[str, Any]
) -> tuple[Part, ...]:
    sizes = {key: common[key] for key in ("kind", "one", "heads", "feat")}
    return parts_of(A, cuda_pairwise.column_parts(S, dtype, way=way, **sizes))


def _scratch(
    S: matmul_cuda.Structure, keys: Array, arrays: int, parts: tuple[Part, ...]
) -> Array | None:
    heads, feat = keys.shape[1:]
    sizes = {"heads": heads, "feat": feat, "arrays": arrays, "parts": parts}
    nbytes = cuda_pairwise.attend_workspace(S, str(keys.dtype), **sizes)
    return namespace(keys).empty(nbytes, np.uint8) if nbytes else None
