"""Sorts, scans and searches on either array library, and SciPy's compiled loops."""

from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .._caches import cache
from ..errors import IndexRangeError
from .arrays import Array, DType, elementwise, is_cupy, namespace

#: Entries that a thread of the expansion writes: 0.21 ms for 114.6 M entries on an H200, 0.24 ms
#: with 32, 0.30 ms with 16.
RUN = 64
#: Segments that NumPy looks at together: its temporaries have 8 bytes for each, and 2**31 rows with
#: one entry would take 48 GB of them.
PART = 1 << 18
#: Entries of a row that the CPU adds up one after the other; of a longer one BLOCK at a time.  Sums
#: of equal values are 4 units in the last place off; by 64, 8 and no faster.
SHORT, BLOCK = 512, 32
#: For kernels: the segment, among those from ``low`` to before ``high``, that has entry ``e``.
SEGMENT_OF = """
template <typename I>
__device__ long long segment_of(const I* ptr, long long low, long long high, long long e) {
    while (high - low > 1) {  // the answer lies in [low, high)
        const long long middle = (low + high) >> 1;
        if (ptr[middle] <= e) low = middle; else high = middle;
    }
    return low;
}
"""


def bits_for(count: int) -> int:
    """Return the number of bits that hold the integers 0 .. count - 1."""
    return max(int(count) - 1, 0).bit_length()


def expand(ptr: Array, nnz: int) -> Array:
    """Return the segment of each of ``nnz`` entries behind ``ptr``: ``[0, 2, 3] -> [0, 0, 1]``."""
    if not is_cupy(ptr):
        return expand_part(ptr, slice(int(ptr[0]), int(ptr[0]) + nnz))
    import cupy

    segment = cupy.empty(nnz, ptr.dtype)
    if nnz:
        lanes = -(-nnz // (32 * RUN)) * 32
        _expand_kernel()(ptr, len(ptr) - 1, nnz, segment, size=lanes)
    return segment


def parts(span: slice, size: int) -> Iterator[slice]:
    """Yield slices of ``size`` places that cover ``span``."""
    for start in range(span.start, span.stop, size):
        yield slice(start, min(start + size, span.stop))


def expand_part(ptr: Array, part: slice) -> Array:
    """Return the segments of the entries at the places ``part`` of ``ptr``, on the CPU.

    Segments without entries cost a look at every ``PART`` of them.
    """
    segment = np.empty(part.stop - part.start, ptr.dtype)
    ends = np.array([part.start, part.stop], ptr.dtype)
    low, high = np.searchsorted(ptr, ends[:1], "right")[0] - 1, np.searchsorted(ptr, ends[1])
    for first in range(low, high, PART):
        last = min(first + PART, high)
        limits = ptr[first : last + 1].clip(*ends)
        begin, end = (int(limit) - part.start for limit in (limits[0], limits[-1]))
        if begin < end:
            ids = np.arange(first, last, dtype=ptr.dtype)
            segment[begin:end] = np.repeat(ids, np.diff(limits))
    return segment


def offsets(lengths: Array, dtype: DType) -> Array:
    """Return where segments of these lengths begin, and the end: ``[2, 0, 1] -> [0, 2, 2, 3]``."""
    xp = namespace(lengths)
    ptr = xp.zeros(len(lengths) + 1, dtype)
    xp.cumsum(lengths, out=ptr[1:])
    return ptr


def sum_up(ptr: Array) -> Array:
    """Replace integers by their running sums, in place."""
    return ptr.cumsum(out=ptr)


def pointers(sorted_keys: Array, n_keys: int, dtype: DType, *, step: int = 1) -> Array:
    """Return where each of ``n_keys`` runs of ``step`` ascending keys begins, and the end."""
    xp = namespace(sorted_keys)
    part = n_keys + 1 if is_cupy(sorted_keys) else PART
    ptr = xp.empty(n_keys + 1, dtype)
    for first in range(0, n_keys + 1, part):
        limits = xp.arange(first, min(first + part, n_keys + 1), dtype=sorted_keys.dtype)
        limits *= step
        ptr[first : first + part] = xp.searchsorted(sorted_keys, limits)
    return ptr


def is_ascending(keys: Array) -> bool:
    """Return True if the keys never decrease; looks at the first few before all."""
    head = slice(0, 1024)
    return all(bool((k[1:] >= k[:-1]).all()) for k in (keys[head], keys))  # synchronize!


def group(keys: Array, n_keys: int) -> tuple[Array, Array]:
    """Return ``(ptr, perm)`` of a stable sort by ``keys`` in ``[0, n_keys)``; ``perm`` is int64."""
    xp = namespace(keys)
    perm = xp.argsort(keys, kind="stable")
    limits = xp.arange(n_keys + 1, dtype=keys.dtype)
    if not is_cupy(keys):
        return np.searchsorted(keys, limits, sorter=perm).astype(keys.dtype), perm
    return _search_kernel()(limits, keys, perm, len(keys)), perm


def inverse(perm: Array) -> Array:
    """Return the inverse of a permutation: ``inverse[perm[e]] = e``."""
    xp = namespace(perm)
    result = xp.empty_like(perm)
    result[perm] = xp.arange(len(perm), dtype=perm.dtype)
    return result


def take(perm: Array, indices: Array, data: Array | None) -> tuple[Array, Array | None]:
    """Return ``(indices[perm], data[perm])``.

    On a GPU two 4-byte arrays travel as one array of 8-byte words: random reads cost by the read.
    """
    if data is None:
        return indices[perm], None
    if not is_cupy(perm) or (indices.itemsize, data.itemsize) != (4, 4):
        return indices[perm], data[perm]
    words = _pack_kernel()(indices.view(np.uint32), data.view(np.uint32))
    first, second = _take_kernel()(perm, words)
    return first.view(indices.dtype), second.view(data.dtype)


def take_segments(ptr: Array, chosen: Array) -> tuple[Array, Array]:
    """Return ``(new_ptr, places)`` of the entries of chosen segments, one after another.

    Raises ``IndexRangeError`` if repeated segments make more entries than the dtype can count.
    """
    xp = namespace(ptr)
    starts = ptr[chosen]
    lengths = ptr[chosen + 1] - starts
    nnz = int(lengths.sum(dtype=np.int64))  # synchronize!
    if max(nnz, len(chosen)) > np.iinfo(ptr.dtype).max:
        raise IndexRangeError(
            f"the chosen {len(chosen)} rows or columns hold {nnz} entries, beyond {ptr.dtype}: "
            "use .astype(index_dtype=np.int64)."
        )
    new_ptr = offsets(lengths, ptr.dtype)
    places = xp.arange(nnz, dtype=ptr.dtype)
    places += (starts - new_ptr[:-1])[expand(new_ptr, nnz)]
    return new_ptr, places


@cache
def scipy_loops() -> Any:
    """Import SciPy's compiled loops, ``coo_tocsr`` and others, without the rest of SciPy.

    ``import scipy.sparse`` takes 0.3 to 0.45 s, this module 0.5 ms.  The loops check nothing, run
    on one thread and hold Python's lock.
    """
    package = find_spec("scipy")
    folders = [] if package is None else package.submodule_search_locations or []
    spec = PathFinder.find_spec("_sparsetools", [str(Path(path, "sparse")) for path in folders])
    if spec is None or spec.loader is None:  # where SciPy was frozen into something else
        return import_module("scipy.sparse._sparsetools")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: Where blocks of rows begin, and where the rows begin among the blocks.
Blocks: TypeAlias = tuple[Array, Array]


def blocks_of(indptr: Array) -> list[Blocks]:
    """Return blocks of rows, then blocks of those, until none has more than ``SHORT`` summands.

    A short row is one block, and there are none of short rows alone.
    """
    levels: list[Blocks] = []
    while indptr[-1] > SHORT:
        lengths = indptr[1:] - indptr[:-1]
        if np.maximum.reduce(lengths) <= SHORT:  # 1 µs less than ``lengths.max()``
            break
        counts = np.where(lengths > SHORT, -(-lengths // BLOCK), 1)
        ends = offsets(counts, indptr.dtype)
        places = np.arange(ends[-1], dtype=indptr.dtype) - np.repeat(ends[:-1], counts)
        begins = np.append(np.repeat(indptr[:-1], counts) + places * BLOCK, indptr[-1])
        levels.append((begins, ends))
        indptr = ends
    return levels


def add_product(
    shape: tuple[int, int],
    A: tuple[Array, Array, Array],
    X: Array,
    Y: Array,
    levels: list[Blocks],
) -> None:
    """Add ``A X`` to ``Y`` for a CSR ``(indptr, indices, data)``, in the order of the entries.

    ``X`` and ``Y`` are contiguous and of the dtype of ``data``, float32 or float64.  The sum of a
    long row is the sum of those of its blocks, which are ``blocks_of(indptr)``.
    """
    add, n_cols = scipy_loops().csr_matvecs, shape[1]
    for begins, ends in levels:
        n_blocks = len(begins) - 1
        sums = np.zeros((n_blocks, X.shape[1]), Y.dtype)
        add(n_blocks, n_cols, X.shape[1], begins, *A[1:], X.reshape(-1), sums.reshape(-1))
        A, X = (ends, np.arange(n_blocks, dtype=ends.dtype), np.ones(n_blocks, Y.dtype)), sums
        n_cols = n_blocks
    add(shape[0], n_cols, X.shape[1], *A, X.reshape(-1), Y.reshape(-1))


class LongColumns(NamedTuple):
    """The entries of a CSR in columns of more than ``SHORT``, as a CSR of its own, transposed."""

    columns: Array
    places: Array  #: of the entries among all
    indptr: Array
    rows: Array
    levels: list[Blocks]


def long_columns_of(indptr: Array, indices: Array, n_cols: int) -> LongColumns:
    """Return the entries of long columns."""
    lengths = np.bincount(indices, minlength=n_cols)
    columns = np.flatnonzero(lengths > SHORT)
    places = np.flatnonzero((lengths > SHORT)[indices]) if len(columns) else columns
    places = places[np.argsort(indices[places], kind="stable")]
    rows = (np.searchsorted(indptr, places, "right") - 1).astype(indptr.dtype)
    ends = offsets(lengths[columns], indptr.dtype)
    return LongColumns(columns, places, ends, rows, blocks_of(ends))


def add_transposed_product(
    shape: tuple[int, int],
    A: tuple[Array, Array, Array],
    X: Array,
    Y: Array,
    long: LongColumns,
) -> None:
    """Add ``A' X`` to ``Y`` for a CSR of that shape, long columns block by block."""
    sums = Y[long.columns]
    scipy_loops().csc_matvecs(*shape[::-1], X.shape[1], *A, X.reshape(-1), Y.reshape(-1))
    if len(sums):
        of_columns = long.indptr, long.rows, A[2][long.places]
        add_product((len(sums), shape[0]), of_columns, X, sums, long.levels)
        Y[long.columns] = sums


#: A warp finds the first segment of its run of entries; each lane walks on from its last one.
#:
#: The walk doubles its steps: long runs of empty segments cost their logarithm.
_expand_kernel = elementwise(
    "raw I ptr, int64 n_segments, int64 nnz",
    "raw I segment",
    f"""
    const long long first = i / 32 * {32 * RUN};
    const long long last = min(first + {32 * RUN}, (long long)nnz) - 1;
    long long here = segment_of(&ptr[0], 0, n_segments, first);
    for (long long e = first + i % 32; e <= last; e += 32) {{
        long long next = here + 1;
        for (long long step = 1; next < n_segments && ptr[next] <= e; step *= 2) {{
            here = next;
            next = min(here + step, (long long)n_segments);
        }}
        here = segment_of(&ptr[0], here, next, e);
        segment[e] = here;
    }}
    """,
    "sparsefmt_expand",
    preamble=SEGMENT_OF,
)

_search_kernel = elementwise(
    "I limit, raw I keys, raw int64 perm, int64 nnz",
    "I place",
    """
    long long low = 0, high = nnz;
    while (low < high) {
        const long long middle = (low + high) >> 1;
        if (keys[perm[middle]] < limit) low = middle + 1; else high = middle;
    }
    place = low;
    """,
    "sparsefmt_search_sorted_by_perm",
)

_pack_kernel = elementwise(
    "uint32 a, uint32 b",
    "uint64 word",
    "word = (unsigned long long)a << 32 | b",
    "sparsefmt_pack",
)

_take_kernel = elementwise(
    "int64 place, raw uint64 words",
    "uint32 a, uint32 b",
    "const unsigned long long word = words[place]; a = word >> 32; b = word",
    "sparsefmt_take",
)
