"""The short way through graph attention of vectors: of plain CUDA tensors, in a plain eager call.

As ``_products`` does for products: the launches are those that the long way decides, with the same
bits, and what only they read lies in one piece of memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.attention.gat import backward, cuda
from ..ops.attention.gat.cuda import ANYTHING, NOTHING, ONLY_BIAS, Dropout, dropout_of, launch_case
from ..ops.engine.structure import Structure
from .engine.memory import MEMORY, NAMES
from .engine.precision import bf16_is_allowed
from .engine.products import ITEMSIZE, addresses, is_watched
from .tensors.tensors import Side

#: How many values of each row and head are kept beside the part with positive scores: those of the
#: statistics, and of the scores of sources and targets.
_N_STATISTICS, _N_SCORES = 4, 2
_N_BESIDE = _N_STATISTICS + _N_SCORES


class Heads(NamedTuple):
    """Features, the vectors and the bias of all heads, and the numbers of ``Options``."""

    h: Tensor  #: (n, heads * feat)
    source: Tensor  #: (1, heads, feat)
    target: Tensor
    bias: Tensor | None  #: (heads * feat,)
    seed: Tensor | None
    slope: float
    share: float
    loops: bool


def _places(
    begin: int, items: int, values: int, size: int, *, train: bool
) -> tuple[int, int, int, int]:
    """Tell where the parts of what is kept lie, the address of the first one given.

    Behind each other, for each row and head: the statistics (4 values), the part of the result with
    positive scores (``feat``), and the scores of sources and targets (1 each); ``values`` is their
    number.  The first two are kept only to ``train``; otherwise their addresses are 0, as of arrays
    that are not given.
    """
    one = items * size  # bytes of a value of each
    el = begin + (values - _N_SCORES) * one
    statistics, plus = (begin, begin + _N_STATISTICS * one) if train else (0, 0)
    return statistics, plus, el, el + one


def gat_at_once(side: Side, given: Heads, *, train: bool) -> tuple[Tensor, Tensor] | None:
    """Compute ``GAT`` and ``GAT_SCORES`` together, or with what backward reads if to ``train``.

    Returns
    -------
    out : Tensor, shape (n, heads * feat)
    kept : Tensor
        What ``gat_at_once_backward`` reads.  None in the place of both if the call may not.
    """
    h, source, target, bias, seed, slope, share, loops = given
    S, size = side.structure, ITEMSIZE.get(h.dtype)
    if S is None or size is None or not S.nnz or is_watched(h) or bf16_is_allowed():
        return None
    (n, width), (_, heads, feat) = h.shape, source.shape
    places = addresses(h, source, target, bias)
    if places is None or not width:
        return None
    X, left, right, added = places
    dtype, device = NAMES[h.dtype], h.get_device()
    out = torch.empty_like(h)
    values = feat + _N_BESIDE if train else _N_SCORES
    kept = h.new_empty(n * heads * values)
    statistics, plus, el, er = _places(kept.data_ptr(), n * heads, values, size, train=train)
    result, stream = out.data_ptr(), MEMORY.stream(h)

    vector = cuda.score_vector(dtype, feat, X | left | right)
    scores = cuda.scores_launch(device, dtype, n, heads, feat, vector)
    scores(stream, X, left, right, el, er)

    drop = dropout_of(MEMORY, share, seed)
    of_scores = el, er, *_behind_scores(S, slope, drop, loops=loops)
    params = (*of_scores, result, plus, added, statistics, heads, feat)
    extra = ANYTHING if loops else ONLY_BIAS if added else NOTHING
    alignment = (X | result | plus | added) % 16
    case = dtype, heads, feat, alignment, False, False, (int(drop.below > 0), extra)
    launch_case(S, MEMORY, h, stream, case, X, 0, params)
    return out, kept


def gat_at_once_backward(
    rows: Side, columns: Side, grad: Tensor, out: Tensor, kept: list[Tensor], *heads: Any
) -> tuple[Tensor, Tensor]:
    """Compute ``GAT_OF_VECTORS_BACKWARD`` of what ``gat_at_once`` gave for these ``Heads``.

    It rounds nothing, as forward did not, even if torch allows it by now.

    Returns
    -------
    dh : Tensor, shape (n, heads * feat)
    d_vectors : Tensor, shape (2 or 3, 1, heads, feat)
        Of the sources' and targets' vectors and, if there is one, the bias.
    """
    h, source, target, bias, seed, slope, share, loops = heads
    S, T = rows.structure, columns.structure
    assert S is not None  # as forward has found
    assert T is not None
    n, (_, count, feat), size = h.shape[0], source.shape, h.dtype.itemsize
    items, dtype, device, grad = n * count, NAMES[h.dtype], h.get_device(), grad.contiguous()
    dh = torch.empty_like(h)
    places = _places(kept[0].data_ptr(), items, feat + _N_BESIDE, size, train=True)
    (statistics, plus, el, er), added = places, 0 if bias is None else bias.data_ptr()
    X, features, result, stream = grad.data_ptr(), h.data_ptr(), dh.data_ptr(), MEMORY.stream(h)
    alignment = (X | features | result) % 16
    slices = cuda.row_shape(dtype, count, feat, alignment)[2]
    room = h.new_empty(items * (_N_STATISTICS + 1 + slices))
    stats = room.data_ptr()
    d_er = stats + _N_STATISTICS * items * size
    d_el = d_er + items * size

    drop = dropout_of(MEMORY, share, seed)
    of_scores = el, er, *_behind_scores(S, slope, drop, loops=loops)
    of_targets = S.once(backward.stats_launch, dtype, count, feat)
    read = out.data_ptr(), plus, added, X, features
    of_targets(stream, *read, *of_scores, statistics, stats, d_er, 0)

    perm = columns.perm.data_ptr() if drop.below and columns.perm is not None else 0
    of_scores = el, 0, *_behind_scores(T, slope, drop, loops=loops)
    extra = ANYTHING if loops else NOTHING
    case = dtype, count, feat, alignment, True, False, (int(drop.below > 0), extra)
    params = (*of_scores, stats, features, result, d_el, count, feat, slices)
    launch_case(T, MEMORY, h, stream, case, X, perm, params)

    left, right, of_result = source.data_ptr(), target.data_ptr(), 0 if bias is None else X
    blocks = backward.score_blocks(n, count, feat)
    partial = h.new_empty((blocks, 2 if bias is None else 3, 1, count, feat))
    vector = cuda.score_vector(dtype, feat, features | result | left | right | of_result)
    sizes = n, count, feat, slices, vector
    through = backward.through_launch(device, dtype, *sizes)
    written = of_result, result, partial.data_ptr()
    through(stream, features, result, d_el, d_er, left, right, *written)
    return dh, partial.sum(0)


def _behind_scores(S: Structure, slope: float, drop: Dropout, *, loops: bool) -> tuple[Any, ...]:
    """Return the fields of ``Scores`` in gat.cu behind both scores; entries have none."""
    first_loop = S.nnz if loops else -1
    return 0, 0, drop.seed_at, drop.seed, first_loop, slope, drop.scale, drop.below
