"""The ops of graph attention on CUDA, in the manner of ``_cuda``; shapes are as in ``_scores``."""

from typing import Any

import torch
from torch import Tensor

from ..ops.attention import cuda_gat as attention_cuda_gat
from ..ops.attention import cuda_gat_entries as attention_cuda_gat_entries
from ..ops.edges import cuda as edges_cuda
from ..ops.engine.structure import Structure
from ._cuda import _NAMES, _memory, _on_device_of, _pointer, _stream
from ._scores import heads_and_feat, shape_of, sums_dtype, wide

_NOTHING = attention_cuda_gat.Dropout()


def dropped(share: float, seed: Tensor | None) -> attention_cuda_gat.Dropout:
    """By the seed that lies on the device: a replayed CUDA graph reads another one."""
    return attention_cuda_gat.dropout(share, seed_at=_pointer(seed)) if share else _NOTHING


def _given(
    h: Tensor,
    el: Tensor,
    er: Tensor,
    edges: Tensor | None,
    loop_edges: Tensor | None,
    seed: Tensor | None,
    slope: float,
    dropout: float,
    loops: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The tensors as kernels read them, to keep until a launch is enqueued, and what it takes."""
    (heads, feat), dtype, h = heads_and_feat(h), sums_dtype(h), h.contiguous()
    el, er = wide(el, dtype), wide(er, dtype)
    edges, loop_edges = wide(edges, dtype), wide(loop_edges, dtype)
    common = {
        "heads": heads,
        "feat": feat,
        "slope": slope,
        "dropped": dropped(dropout, seed),
        "loops": loops,
        "H": h.data_ptr(),
        "el": el.data_ptr(),
        "loop_edges": _pointer(loop_edges),
        "stream": _stream(h),
    }
    return (h, el, er, edges, loop_edges), common


def _gat(
    S: Structure,
    train: bool,
    bias: Tensor | None,
    h: Tensor,
    el: Tensor,
    er: Tensor,
    edges: Tensor | None,
    loop_edges: Tensor | None,
    seed: Tensor | None,
    slope: float,
    dropout: float,
    loops: bool,
) -> tuple[Tensor, Any, Any]:
    """Without the dictionary of ``_given``: forward has one launch, and little time."""
    (heads, feat), dtype, name = heads_and_feat(h), sums_dtype(h), _NAMES[h.dtype]
    h, el, er = h.contiguous(), wide(el, dtype), wide(er, dtype)
    edges, loop_edges, bias = wide(edges, dtype), wide(loop_edges, dtype), wide(bias, h.dtype)
    out = h.new_empty(S.n_rows, *h.shape[1:])
    plus = torch.empty_like(out) if train else None
    stats = el.new_empty(S.n_rows, heads, 4) if train else None
    workspace = _workspace(S, name, h, heads, feat)
    with _on_device_of(h):
        attention_cuda_gat.gat(
            S,
            name,
            heads=heads,
            feat=feat,
            slope=slope,
            dropped=dropped(dropout, seed),
            loops=loops,
            H=h.data_ptr(),
            el=el.data_ptr(),
            er=er.data_ptr(),
            edges=_pointer(edges),
            loop_edges=_pointer(loop_edges),
            bias=_pointer(bias),
            out=out.data_ptr(),
            plus=_pointer(plus),
            stats=_pointer(stats),
            workspace=_pointer(workspace),
            stream=_stream(h),
        )
    return out, plus, stats


def _workspace(S: Structure, name: str, like: Tensor, heads: int, feat: int) -> Tensor | None:
    if not S.n_cuts:
        return None
    return _memory(attention_cuda_gat.gat_workspace(S, name, heads=heads, feat=feat), like)


def gat(S: Structure, *args: Any) -> Tensor:
    return _gat(S, False, *args)[0]


def gat_with_statistics(S: Structure, *args: Any) -> Any:
    return _gat(S, True, *args)


def gat_backward(
    S: Structure,
    T: Structure,
    perm: Tensor,
    grad: Tensor,
    out: Tensor,
    plus: Tensor,
    forward: Tensor,
    of_edges: bool,
    h: Tensor,
    *args: Any,
) -> tuple[Tensor, ...]:
    kept = grad, out, plus, forward
    dh, parts, *others = _gradients(S, T, perm, kept, of_edges, None, h, *args)
    return dh, parts.squeeze(-1) if parts.shape[-1] == 1 else parts.sum(-1), *others


def gat_of_vectors_backward(
    S: Structure,
    T: Structure,
    perm: Tensor,
    grad: Tensor,
    out: Tensor,
    plus: Tensor,
    forward: Tensor,
    of_edges: bool,
    source: Tensor,
    target: Tensor,
    bias: Tensor | None,
    h: Tensor,
    *args: Any,
) -> tuple[Tensor, ...]:
    grad, h = grad.contiguous(), h.contiguous()
    kept, bias = (grad, out, plus, forward), wide(bias, h.dtype)
    dh, parts, der, *others = _gradients(S, T, perm, kept, of_edges, bias, h, *args)
    result = None if bias is None else grad
    return dh, _of_vectors(h, dh, parts, der, source, target, result), *others


def _gradients(
    S: Structure,
    T: Structure,
    perm: Tensor,
    kept: tuple[Tensor, ...],
    of_edges: bool,
    bias: Tensor | None,
    h: Tensor,
    *args: Any,
) -> tuple[Tensor, ...]:
    """Of the features, of the sources' scores in parts (n, heads, parts), and of the others."""
    grad, out, plus, forward = kept
    (h, el, er, edges, loop_edges), common = _given(h, *args)
    shapes = er.shape, shape_of(loop_edges), shape_of(edges, of_edges)
    if not grad.numel():
        return h.new_zeros(h.shape), *map(el.new_zeros, ((*el.shape, 1), *shapes))
    der, dloop, dedges = map(el.new_empty, shapes)
    grad, heads = grad.contiguous(), common["heads"]
    stats = el.new_empty(S.n_rows, heads, 4)
    with _on_device_of(h):
        attention_cuda_gat.gat_statistics(
            _NAMES[h.dtype],
            items=S.n_rows * heads,
            nnz=S.nnz,
            bias=_pointer(bias),
            out=out.data_ptr(),
            plus=plus.data_ptr(),
            grad=grad.data_ptr(),
            er=er.data_ptr(),
            forward=forward.data_ptr(),
            stats=stats.data_ptr(),
            der=der.data_ptr(),
            dloop=_pointer(None if loop_edges is None else dloop),
            **common,
        )
        dh, parts = _of_sources(T, perm, grad, h, el, edges, stats, common)
        if edges is not None and of_edges:
            _of_edges(S, grad, h, edges, stats, dedges, common)
    return dh, parts, der, dloop, dedges


def _of_sources(
    T: Structure,
    perm: Tensor,
    grad: Tensor,
    h: Tensor,
    el: Tensor,
    edges: Tensor | None,
    stats: Tensor,
    common: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The gradients of the features and, in parts, of the sources' scores."""
    dh, name, heads, feat = torch.empty_like(h), _NAMES[h.dtype], common["heads"], common["feat"]
    together = grad.data_ptr() | common["H"] | dh.data_ptr()
    slices = attention_cuda_gat.gat_slices(name, heads=heads, feat=feat, together=together)
    parts = el.new_empty(*el.shape, slices)
    workspace = _workspace(T, name, h, heads, feat)
    attention_cuda_gat.gat_backward(
        T,
        name,
        perm=perm.data_ptr(),
        grad=grad.data_ptr(),
        edges=_pointer(edges),
        stats=stats.data_ptr(),
        out=dh.data_ptr(),
        dell=parts.data_ptr(),
        workspace=_pointer(workspace),
        **common,
    )
    return dh, parts


def _of_edges(
    S: Structure,
    grad: Tensor,
    h: Tensor,
    edges: Tensor,
    stats: Tensor,
    out: Tensor,
    common: dict[str, Any],
) -> None:
    """From the products at the entries, which are rounded to the dtype of the features."""
    heads, feat, dots = common["heads"], common["feat"], h.new_empty(out.shape)
    edges_cuda.sddmm_of_pointers(
        S,
        _NAMES[h.dtype],
        heads=heads,
        feat=feat,
        ldx=heads * feat,
        ldy=heads * feat,
        X=grad.data_ptr(),
        Y=h.data_ptr(),
        out=dots.data_ptr(),
        stream=common["stream"],
    )
    attention_cuda_gat_entries.gat_edge_gradient(
        S,
        _NAMES[h.dtype],
        edges=edges.data_ptr(),
        stats=stats.data_ptr(),
        dots=dots.data_ptr(),
        out=out.data_ptr(),
        **{k: common[k] for k in ("heads", "slope", "dropped", "loops", "el", "stream")},
    )


def gat_scores(h: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    (heads, feat), h = heads_and_feat(h), h.contiguous()
    source, target = wide(source, h.dtype), wide(target, h.dtype)
    el, er = (h.new_empty(h.shape[:-1], dtype=sums_dtype(h)) for _ in range(2))
    if not h.numel():
        return el.zero_(), er.zero_()
    with _on_device_of(h):
        attention_cuda_gat.gat_scores(
            _NAMES[h.dtype],
            n=h.shape[0],
            heads=heads,
            feat=feat,
            H=h.data_ptr(),
            source=source.data_ptr(),
            target=target.data_ptr(),
            el=el.data_ptr(),
            er=er.data_ptr(),
            stream=_stream(h),
        )
    return el, er


def _of_vectors(
    h: Tensor,
    dh: Tensor,
    parts: Tensor,
    der: Tensor,
    source: Tensor,
    target: Tensor,
    result: Tensor | None,
) -> Tensor:
    """The gradients of the vectors, and of the bias if ``result``, that of the result, is given.

    ``dh`` takes what the scores add to it.
    """
    (heads, feat), n = heads_and_feat(h), h.shape[0]
    of = 2 if result is None else 3
    if not h.numel():
        return parts.new_zeros(of, *source.shape)
    source, target = wide(source, h.dtype), wide(target, h.dtype)
    partial = parts.new_empty(
        attention_cuda_gat.gat_scores_blocks(n, heads, feat), of, *source.shape
    )
    with _on_device_of(h):
        attention_cuda_gat.gat_scores_backward(
            _NAMES[h.dtype],
            n=n,
            heads=heads,
            feat=feat,
            H=h.data_ptr(),
            grad_H=dh.data_ptr(),
            dell=parts.data_ptr(),
            slices=parts.shape[-1],
            der=der.data_ptr(),
            source=source.data_ptr(),
            target=target.data_ptr(),
            result=_pointer(result),
            out=dh.data_ptr(),
            partial=partial.data_ptr(),
            stream=_stream(h),
        )
        return partial.sum(0)
