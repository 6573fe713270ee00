"""The ops of attention between whole rows on the CPU: as ``_cpu_attention``."""

from functools import cache
from types import ModuleType
from typing import Any

from torch import Tensor

from ._cpu import _array, _space
from ._cpu_attention import features, flat, seed_of
from ._scores import heads_and_feat, shape_of, sums_dtype


@cache
def _cpu() -> ModuleType:
    from ..ops.attention import cpu_attend

    return cpu_attend


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
    """The arrays and the options of a twin."""
    (heads, feat), dtype = heads_and_feat(keys), sums_dtype(keys)
    options = {"slope": slope, "scale": scale, "dropout": dropout}
    options |= {"edges": flat(edges, heads, dtype), "seed": seed_of(seed), "loops": loops}
    vectors = None if att is None else _array(att.to(dtype).contiguous().view(heads, feat))
    return (features(queries), features(keys), features(values), vectors), options


def _attend(
    train: bool, indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], *args: Any
) -> tuple[Tensor, Tensor]:
    arrays, options = _given(*args)
    keys: Tensor = args[1]
    out = _space((indptr.shape[0] - 1, *keys.shape[1:]), keys.dtype)
    statistics = keys.new_zeros(out.shape[0], heads_and_feat(keys)[0], 2, dtype=sums_dtype(keys))
    if train:
        options["statistics"] = _array(statistics)
    if out.numel():
        _cpu().attend(_array(indptr), _array(indices), *arrays, features(out), **options)
    return out.to(keys.dtype), statistics


def attend(*args: Any) -> Tensor:
    return _attend(False, *args)[0]


def attend_with_statistics(*args: Any) -> tuple[Tensor, Tensor]:
    return _attend(True, *args)


def attend_backward(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    t_indptr: Tensor,
    t_indices: Tensor,
    t_plan: list[Tensor],
    perm: Tensor,
    grad: Tensor,
    out: Tensor,
    statistics: Tensor,
    of_edges: bool,
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    att: Tensor | None,
    edges: Tensor | None,
    *args: Any,
) -> tuple[Tensor, ...]:
    (heads, feat), dtype = heads_and_feat(keys), sums_dtype(keys)
    each = (_space(tuple(shape_of(one)), keys.dtype).zero_() for one in (queries, keys, values))
    dqueries, dkeys, dvalues = each
    datt = keys.new_zeros(shape_of(att), dtype=dtype)
    dedges = keys.new_zeros(shape_of(edges, of_edges), dtype=dtype)
    if grad.numel():
        arrays, options = _given(queries, keys, values, att, edges, *args)
        structures = map(_array, (indptr, indices, t_indptr, t_indices, perm))
        _cpu().attend_backward(
            *(*structures, features(grad), *arrays, features(out), _array(statistics)),
            **options,
            dQ=features(dqueries),
            dK=features(dkeys),
            dV=None if values is None else features(dvalues),
            datt=None if att is None else _array(datt.view(heads, feat)),
            dedges=flat(dedges, heads, dtype) if edges is not None and of_edges else None,
        )
    narrow = (one.to(keys.dtype) for one in (dqueries, dkeys, dvalues))
    return *narrow, datt, dedges
