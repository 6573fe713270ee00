"""The ops of attention between whole rows on CUDA: as ``_cuda_attention``."""

from typing import Any

import torch
from torch import Tensor

from ..ops.attention import cuda_pairwise as attention_cuda_pairwise
from ..ops.attention import pairwise_shape as attention_pairwise_shape
from ..ops.attention.column_blocks import Part, parts_of
from ..ops.engine.structure import Structure
from . import _kept
from ._cuda import _NAMES, _memory, _on_device_of, _pointer, _stream
from ._cuda_attention import dropped
from ._scores import ADDITIVE, DOT, heads_and_feat, shape_of, sums_dtype, wide


def _given(
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    att: Tensor | None,
    edges: Tensor | None,
    seed: Tensor | None,
    slope: float,
    scale: float,
    dropout: float,
    loops: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The tensors as kernels read them, to keep until a launch is enqueued, and what it takes."""
    (heads, feat), dtype = heads_and_feat(keys), sums_dtype(keys)
    queries, keys, values = queries.contiguous(), keys.contiguous(), wide(values, keys.dtype)
    att, edges = wide(att, dtype), wide(edges, dtype)
    common = {
        "kind": DOT if att is None else ADDITIVE,
        "one": values is None,
        "heads": heads,
        "feat": feat,
        "slope": slope,
        "scale": scale,
        "dropped": dropped(dropout, seed),
        "loops": loops,
        "queries": queries.data_ptr(),
        "keys": keys.data_ptr(),
        "values": _pointer(keys if values is None else values),
        "att": _pointer(att),
        "edges": _pointer(edges),
        "stream": _stream(keys),
    }
    return (queries, keys, values, att, edges), common


def _attend(S: Structure, train: bool, *args: Any) -> tuple[Tensor, Any]:
    given, common = _given(*args)
    keys, statistics, name = given[1], None, _NAMES[given[1].dtype]
    out = keys.new_empty(S.n_rows, *keys.shape[1:])
    if train:
        statistics = keys.new_empty(S.n_rows, common["heads"], 2, dtype=sums_dtype(keys))
    parts = _parts(S, name, attention_pairwise_shape.FORWARD, common)
    workspace = _workspace(S, keys, common, 1, parts)
    with _on_device_of(keys):
        attention_cuda_pairwise.attend(
            S,
            name,
            parts=parts,
            out=out.data_ptr(),
            statistics=_pointer(statistics),
            workspace=_pointer(workspace),
            **common,
        )
    return out, statistics


def attend(S: Structure, *args: Any) -> Tensor:
    return _attend(S, False, *args)[0]


def attend_with_statistics(S: Structure, *args: Any) -> Any:
    return _attend(S, True, *args)


def attend_backward(
    S: Structure,
    T: Structure,
    perm: Tensor,
    grad: Tensor,
    out: Tensor,
    statistics: Tensor,
    of_edges: bool,
    *args: Any,
) -> tuple[Tensor, ...]:
    given, common = _given(*args)
    queries, keys, values, att, edges = given
    dtype, shapes = sums_dtype(keys), (shape_of(values), shape_of(att), shape_of(edges, of_edges))
    dtypes = keys.dtype, dtype, dtype
    if not grad.numel():
        zeros = (keys.new_zeros(n, dtype=t) for n, t in zip(shapes, dtypes, strict=True))
        return torch.zeros_like(queries), torch.zeros_like(keys), *zeros
    dvalues, datt, dedges = (
        keys.new_empty(n, dtype=t) for n, t in zip(shapes, dtypes, strict=True)
    )
    grad, stats = grad.contiguous(), keys.new_empty(*statistics.shape[:2], 4, dtype=dtype)
    with _on_device_of(keys):
        attention_cuda_pairwise.attend_statistics(
            _NAMES[keys.dtype],
            items=statistics.numel() // 2,
            feat=common["feat"],
            out=out.data_ptr(),
            grad=grad.data_ptr(),
            statistics=statistics.data_ptr(),
            stats=stats.data_ptr(),
            stream=common["stream"],
        )
        common |= {"grad": grad.data_ptr(), "stats": stats.data_ptr()}
        dkeys = _of_sources(T, perm, keys, dvalues if values is not None else None, common)
        partial = None if att is None else keys.new_empty(S.blocks, *att.shape, dtype=dtype)
        written = edges is not None and of_edges
        dqueries = _of_targets(S, queries, partial, dedges if written else None, common)
        if partial is not None:
            datt = partial.sum(0)
    return dqueries, dkeys, dvalues, datt, dedges


def _of_sources(
    T: Structure, perm: Tensor, keys: Tensor, dvalues: Tensor | None, common: dict[str, Any]
) -> Tensor:
    """The gradient of the keys, which are the values too where ``dvalues`` is None."""
    dkeys, name = torch.empty_like(keys), _NAMES[keys.dtype]
    parts = _parts(T, name, attention_pairwise_shape.SOURCES, common)
    workspace = _workspace(T, keys, common, 2 - common["one"], parts)
    attention_cuda_pairwise.attend_sources(
        T,
        name,
        parts=parts,
        perm=perm.data_ptr(),
        dvalues=(dkeys if dvalues is None else dvalues).data_ptr(),
        dkeys=0 if dvalues is None else dkeys.data_ptr(),
        workspace=_pointer(workspace),
        **common,
    )
    return dkeys


def _of_targets(
    S: Structure,
    queries: Tensor,
    datt: Tensor | None,
    dedges: Tensor | None,
    common: dict[str, Any],
) -> Tensor:
    dqueries, name = torch.empty_like(queries), _NAMES[queries.dtype]
    parts = _parts(S, name, attention_pairwise_shape.TARGETS, common)
    workspace = _workspace(S, queries, common, 1, parts)
    attention_cuda_pairwise.attend_targets(
        S,
        name,
        parts=parts,
        dqueries=dqueries.data_ptr(),
        datt=_pointer(datt),
        dedges=_pointer(dedges),
        workspace=_pointer(workspace),
        **common,
    )
    return dqueries


def _parts(S: Structure, name: str, way: int, common: dict[str, Any]) -> tuple[Part, ...]:
    """Of the columns, where a graph holds the structure: they are kept with it."""
    sizes = {key: common[key] for key in ("kind", "one", "heads", "feat")}
    count = attention_cuda_pairwise.column_parts(S, name, way=way, **sizes)
    kept = _kept.find(_kept.place_of(S)) if count > 1 else None
    if kept is None or torch.cuda.is_current_stream_capturing():
        return ()
    with kept.lock:
        return parts_of(kept.csr, count)


def _workspace(
    S: Structure, like: Tensor, common: dict[str, Any], arrays: int, parts: tuple[Part, ...]
) -> Tensor | None:
    sizes = {"heads": common["heads"], "feat": common["feat"], "arrays": arrays, "parts": parts}
    return _memory(attention_cuda_pairwise.attend_workspace(S, _NAMES[like.dtype], **sizes), like)
