"""Launches of graph attention that read or write a value of each entry and head.

Conventions as in ``_launch_gat``.
"""

from typing import Any

from ..engine import jit
from ..engine.structure import Structure
from .cuda_gat import THREADS, Dropout, size_of_sums

_FLOATS = {4: "f", 8: "d"}  # by the size of sums


def gat_attention(
    S: Structure,
    dtype: str,
    *,
    heads: int,
    slope: float,
    loops: bool,
    el: int,
    er: int,
    edges: int,
    forward: int,
    out: int,
    stream: int,
) -> None:
    """``P[e, h]`` before dropout, 0 at loops that are left out; ``forward`` is ``gat``'s stats."""
    if not (S.nnz and heads):
        return
    size = size_of_sums(dtype)
    types = ("float64" if size == 8 else "float32", S.index_dtype)
    kernel = jit.load("attention/gat_entries.cu", "gat_attention", f"8Pqii{_FLOATS[size]}", types)
    arrays = (S.indptr, S.indices, S.start, el, er, edges, forward, out)
    args: tuple[Any, ...] = (*arrays, S.nnz, heads, int(loops), slope)
    kernel(S.blocks, args, threads=THREADS, stream=stream)


def gat_edge_gradient(
    S: Structure,
    dtype: str,
    *,
    heads: int,
    slope: float,
    dropped: Dropout,
    loops: bool,
    el: int,
    edges: int,
    stats: int,
    dots: int,
    out: int,
    stream: int,
) -> None:
    """The gradient of ``edges`` from ``dots[e, h]``, which is <dO[i, h], H[j, h]>."""
    if not (S.nnz and heads):
        return
    size = size_of_sums(dtype)
    layout, types = f"9PQqii2{_FLOATS[size]}I", (dtype, S.index_dtype)
    kernel = jit.load("attention/gat_entries.cu", "gat_edge_gradient", layout, types)
    arrays = (S.indptr, S.indices, S.start, el, edges, stats, dots, out, dropped.seed_at)
    sizes = (dropped.seed, S.nnz, heads, int(loops))
    args: tuple[Any, ...] = (*arrays, *sizes, slope, dropped.kept, dropped.below)
    kernel(S.blocks, args, threads=THREADS, stream=stream)
