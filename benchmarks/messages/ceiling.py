"""The gather probe with a row of features for each entry: read, or read and written, besides.

What no kernel of messages can beat on a device: rows of X are read in a graph's order and rows of E
in theirs, by equal shares of entries per sub-warp, with nothing computed; see ``_probe``.
"""

from functools import cache
from itertools import product
from typing import Any

import numpy as np

from sparsefmt.formats.arrays import Array

from .. import _harness

THREADS = 256
UNROLLS, SHARES = (4, 8), (64, 128, 256)

SOURCE = r"""
// As the gather of _probe.py. E and out are read and written once: the L2 gives them up first.
template <int LANES, int UNROLL, bool READS, bool WRITES>
__global__ void __launch_bounds__(256)
gather(const int* __restrict__ indices, const int* __restrict__ perm,
       const uint4* __restrict__ X, const uint4* __restrict__ E, uint4* out, unsigned* sink,
       long long nnz, int words, int share) {
    const int lane = threadIdx.x % LANES;
    const long long start = (blockIdx.x * 256LL + threadIdx.x) / LANES * share;
    const int word = blockIdx.y * LANES + lane;
    const int w = word < words ? word : 0;
    uint4 sum = make_uint4(0, 0, 0, 0);
    for (long long e = start; e < min(start + share, nnz); e += UNROLL) {
        uint4 v[UNROLL], x[UNROLL];
        long long at[UNROLL];
#pragma unroll
        for (int j = 0; j < UNROLL; ++j) {
            const long long k = min(e + j, nnz - 1);
            at[j] = (perm ? (long long)perm[k] : k) * words + w;
            if (READS) v[j] = __ldcs(E + at[j]);
            x[j] = X[(long long)indices[k] * words + w];
        }
#pragma unroll
        for (int j = 0; j < UNROLL; ++j) {
            if (READS) x[j].x ^= v[j].x, x[j].y ^= v[j].y, x[j].z ^= v[j].z, x[j].w ^= v[j].w;
            if (WRITES) __stcs(out + at[j], x[j]);
            sum.x ^= x[j].x, sum.y ^= x[j].y, sum.z ^= x[j].z, sum.w ^= x[j].w;
        }
    }
    if ((sum.x | sum.y | sum.z | sum.w) == 0x12345677) *sink = sum.x;
}
"""


@cache
def _function(lanes: int, unroll: int, reads: bool, writes: bool) -> Any:
    import cupy

    flags = ", ".join(str(one).lower() for one in (reads, writes))
    name = f"gather<{lanes}, {unroll}, {flags}>"
    module = cupy.RawModule(code=SOURCE, options=("-std=c++17",), name_expressions=(name,))
    return module.get_function(name)


def best_ms(
    indices: Array, perm: Array | None, X: Array, E: Array | None, out: Array | None = None
) -> float:
    """The least milliseconds of any setting; rows are whole words of 16 bytes, of int32 indices.

    Without ``E`` only X is gathered, with ``out`` rows are written where those of E are read.
    """
    import cupy

    words = X.shape[1] * X.itemsize // 16
    lanes = 4 if words <= 4 else 8
    sink = cupy.zeros(1, np.uint32)
    pointers = [0 if one is None else one.data.ptr for one in (indices, perm, X, E, out)]
    found = []
    for unroll, share in product(UNROLLS, SHARES):
        function = _function(lanes, unroll, E is not None, out is not None)
        grid = (-(-len(indices) * lanes // (share * THREADS)), -(-words // lanes))
        sizes = np.int64(len(indices)), np.int32(words), np.int32(share)
        args = (*map(np.uintp, pointers), sink, *sizes)

        def run(function: Any = function, grid: Any = grid, args: Any = args) -> None:
            function(grid, (THREADS,), args)

        found += _harness.medians([run], cuda=True, runs=5, warmups=1)
    return min(found)
