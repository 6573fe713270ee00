"""Sort, scan and search on either array library: what every conversion is made of."""

from functools import cache
from typing import Any

import numpy as np

from ._arrays import Array, is_cupy, namespace


def bits_for(count: int) -> int:
    """Bits that hold the integers 0 .. count - 1."""
    return max(int(count) - 1, 0).bit_length()


def expand(ptr: Array, nnz: int) -> Array:
    """Segment of each of the ``nnz`` entries behind ``ptr``: ``[0, 2, 3] -> [0, 0, 1]``."""
    if not is_cupy(ptr):
        return np.repeat(np.arange(len(ptr) - 1, dtype=ptr.dtype), np.diff(ptr))
    import cupy

    segment = cupy.empty(nnz, ptr.dtype)
    if nnz:
        _expand_kernel()(ptr, len(ptr) - 1, segment)
    return segment


def offsets(lengths: Array, dtype: Any) -> Array:
    """Where segments of these lengths begin, and the end: ``[2, 0, 1] -> [0, 2, 2, 3]``."""
    xp = namespace(lengths)
    ptr = xp.zeros(len(lengths) + 1, dtype)
    xp.cumsum(lengths, out=ptr[1:])
    return ptr


def pointers(sorted_keys: Array, n_keys: int, dtype: Any, *, step: int = 1) -> Array:
    """Where each of ``n_keys`` runs of ``step`` keys begins among ascending keys, and the end."""
    xp = namespace(sorted_keys)
    limits = xp.arange(0, (n_keys + 1) * step, step, dtype=sorted_keys.dtype)
    return xp.searchsorted(sorted_keys, limits).astype(dtype, copy=False)


def is_ascending(keys: Array) -> bool:
    """Whether the keys never decrease; a quick no where the first few already do."""
    head = slice(0, 1024)
    return all(bool((k[1:] >= k[:-1]).all()) for k in (keys[head], keys))  # synchronize!


def group(
    keys: Array, n_keys: int, *, tags: Array | None = None, n_tags: int = 0
) -> tuple[Array, Array]:
    """``(ptr, tags)`` after a stable sort by ``keys`` in ``[0, n_keys)``.

    ``tags`` must ascend, so that a sort by (key, tag) is stable; they default to the entries'
    places, which gives the permutation.  Key and tag share one 64-bit word: sorting moves 8 bytes
    an entry, in place.
    """
    xp = namespace(keys)
    if tags is None:
        tags, n_tags = xp.arange(len(keys), dtype=keys.dtype), len(keys)
    tag_bits = bits_for(n_tags)
    if bits_for(n_keys) + tag_bits > 64:
        distinct, ranks = xp.unique(keys, return_inverse=True)
        ptr, tags = group(ranks, len(distinct), tags=tags, n_tags=n_tags)
        every = xp.arange(n_keys + 1, dtype=distinct.dtype)
        return ptr[xp.searchsorted(distinct, every)].astype(keys.dtype, copy=False), tags
    words = keys.astype(np.uint64)
    words <<= np.uint64(tag_bits)
    words |= tags.astype(np.uint64)
    words.sort()
    tags = (words & np.uint64((1 << tag_bits) - 1)).astype(tags.dtype)
    words >>= np.uint64(tag_bits)
    return pointers(words, n_keys, keys.dtype), tags


def take_segments(ptr: Array, chosen: Array) -> tuple[Array, Array]:
    """``(new_ptr, places)`` of the entries of the chosen segments, one segment after another."""
    xp = namespace(ptr)
    starts = ptr[chosen]
    new_ptr = offsets(ptr[chosen + 1] - starts, ptr.dtype)
    nnz = int(new_ptr[-1])  # synchronize!
    places = xp.arange(nnz, dtype=ptr.dtype)
    places += (starts - new_ptr[:-1])[expand(new_ptr, nnz)]
    return new_ptr, places


@cache
def _expand_kernel() -> Any:
    import cupy

    return cupy.ElementwiseKernel(
        "raw I ptr, int64 n_segments",
        "I segment",
        """
        long long low = 0, high = n_segments;  // the answer lies in [low, high)
        while (high - low > 1) {
            long long middle = (low + high) >> 1;
            if (ptr[middle] <= i) low = middle; else high = middle;
        }
        segment = low;
        """,
        "sparsefmt_expand",
    )
