"""Graph attention on the CPU, in the manner of ``_cpu``; shapes are as in ``_scores``."""

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._cpu import _array, _space
from ._scores import heads_and_feat, shape_of, sums_dtype, wide


@cache
def _cpu() -> ModuleType:
    from ..ops.attention import cpu as attention_cpu

    return attention_cpu


def features(x: Tensor | None) -> Any:
    """An array of (n, heads, feat)."""
    return None if x is None else _array(x.contiguous().view(x.shape[0], *heads_and_feat(x)))


def flat(values: Tensor | None, heads: int, dtype: torch.dtype) -> Any:
    """An array of (n, heads) scores."""
    return None if values is None else _array(wide(values, dtype).view(values.shape[0], heads))


def seed_of(seed: Tensor | None) -> int:
    """The integer that it holds."""
    return 0 if seed is None else int(seed.item())


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
    """The arrays and the options of a twin."""
    (heads, _), dtype = heads_and_feat(h), sums_dtype(h)
    el, er, edges, loop_edges = (flat(one, heads, dtype) for one in (el, er, edges, loop_edges))
    options: dict[str, Any] = {"edges": edges, "loop_edges": loop_edges, "slope": slope}
    options |= {"dropout": dropout, "seed": seed_of(seed), "loops": loops}
    return (features(h), el, er), options


def _gat(
    train: bool,
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    bias: Tensor | None,
    h: Tensor,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    arrays, options = _given(h, *args)
    shape = indptr.shape[0] - 1, *h.shape[1:]
    dtype = h.dtype if bias is None else sums_dtype(h)  # rounded once
    out, plus = _space(shape, dtype), _space(shape if train else (0,), h.dtype)
    stats = h.new_zeros(shape[0], heads_and_feat(h)[0], 4, dtype=sums_dtype(h))
    if train:
        options |= {"plus": features(plus), "stats": _array(stats)}
    if out.numel():
        _cpu().gat(_array(indptr), _array(indices), *arrays, features(out), **options)
    if bias is not None:
        out += _bias(bias, h)
    return out.to(h.dtype), plus.to(h.dtype), stats


def gat(*args: Any) -> Tensor:
    return _gat(False, *args)[0]


def gat_with_statistics(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gat(True, *args)


def gat_backward(
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
    plus: Tensor,
    stats: Tensor,
    of_edges: bool,
    h: Tensor,
    el: Tensor,
    er: Tensor,
    edges: Tensor | None,
    loop_edges: Tensor | None,
    *args: Any,
) -> tuple[Tensor, ...]:
    (heads, _), dtype = heads_and_feat(h), sums_dtype(h)
    dh, shapes = _space(tuple(h.shape), h.dtype).zero_(), (el, er, loop_edges)
    found = [h.new_zeros(shape_of(one), dtype=dtype) for one in shapes]
    found.append(h.new_zeros(shape_of(edges, of_edges), dtype=dtype))
    if grad.numel():
        arrays, options = _given(h, el, er, edges, loop_edges, *args)
        structures = map(_array, (indptr, indices, t_indptr, t_indices, perm))
        dell, der, dloop, dedges = (flat(one, heads, dtype) for one in found)
        _cpu().gat_backward(
            *structures,
            features(grad),
            *arrays,
            *(features(out), features(plus), _array(stats)),
            **options,
            dH=features(dh),
            dell=dell,
            der=der,
            dloop=None if loop_edges is None else dloop,
            dedges=dedges if edges is not None and of_edges else None,
        )
    return dh.to(h.dtype), *found


def gat_scores(h: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.bmm(_by_head(h), _vectors(h, source, target).transpose(1, 2))
    el, er = (h.new_empty(h.shape[:-1], dtype=both.dtype) for _ in range(2))
    for k, one in enumerate((el, er)):
        one.view(h.shape[0], both.shape[0]).copy_(both[..., k].t())
    return el, er


def gat_of_vectors_backward(*args: Any) -> tuple[Tensor, ...]:
    """Of both structures, 8 arguments, and what the schema names."""
    structures, (grad, out, *kept), (source, target, bias, h, *others) = (
        *(args[:8], args[8:13], args[13:]),
    )
    dtype = sums_dtype(h)
    if bias is not None:
        out = out.to(dtype) - _bias(bias, h)
    dh, dell, der, *more = gat_backward(*structures, grad, out, *kept, h, *others)
    dh, dvectors = _of_vectors(h, dh, dell, der, source, target)
    if bias is not None:
        dbias = grad.to(dtype).sum(0).view(1, *source.shape)
        dvectors = torch.cat([dvectors, dbias])
    return dh, dvectors, *more


def _of_vectors(
    h: Tensor, grad: Tensor, dell: Tensor, der: Tensor, source: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """``grad`` with what the scores add to it, and the gradients of both vectors."""
    (heads, feat), dtype = heads_and_feat(h), sums_dtype(h)
    scores = torch.stack([one.reshape(h.shape[0], heads) for one in (dell, der)])
    with torch.autocast("cpu", enabled=False):
        of_vectors = torch.bmm(scores.permute(2, 0, 1), _by_head(h))  # (heads, 2, feat)
    found = of_vectors.transpose(0, 1).contiguous().view(2, *source.shape)
    vectors = _vectors(h, source, target)
    out = grad.to(dtype).view(h.shape[0], heads, feat)
    for k in range(2):
        out = torch.addcmul(out, scores[k, :, :, None], vectors[:, k])
    return out.view(h.shape).to(h.dtype), found


def _bias(bias: Tensor, h: Tensor) -> Tensor:
    """As the features of a row, rounded to their dtype."""
    return bias.to(h.dtype).to(sums_dtype(h)).view(h.shape[1:])


def _by_head(h: Tensor) -> Tensor:
    """(heads, n, feat), as sums run."""
    return h.to(sums_dtype(h)).reshape(h.shape[0], *heads_and_feat(h)).transpose(0, 1)


def _vectors(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """(heads, 2, feat): both, rounded to the dtype of the features."""
    both = (
        one.to(h.dtype).to(sums_dtype(h)).reshape(heads_and_feat(h)) for one in (source, target)
    )
    return torch.stack(tuple(both), dim=1)
