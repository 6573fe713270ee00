"""The gather probe: how fast rows of X can be read in a graph's order, and nothing else done.

What SpMM cannot beat on this device: X's rows are read by equal shares of entries per sub-warp, in
the graph's order, without row boundaries, values or stores.  A sub-warp of LANES lanes reads slices
of LANES * 16 bytes; slices lie on the grid's slow axis, so that the active slice of X lives in the
L2.  The probe depends on the bytes of a row only, not on the dtype.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from sparsefmt.formats.arrays import Array

from . import _harness

THREADS = 256
LANES = (2, 4, 8, 16, 32)
UNROLLS = (4, 8, 16)
#: Entries of a sub-warp: the middle one for every setting, the others for the best one only.
SHARES = (128, 64, 256, 512)

SOURCE = r"""
// Where the 16-byte words of X's rows are XORed, which is the cheapest way to need them all. The
// store never happens: numbers in [0, 1) have no sign bit.
template <int LANES, int UNROLL, bool SHUFFLE>
__global__ void __launch_bounds__(256)
gather(const int* __restrict__ indices, const uint4* __restrict__ X, unsigned* __restrict__ sink,
       long long nnz, int words, int share) {
    constexpr int TRIP = UNROLL > LANES ? UNROLL : LANES;
    constexpr int BATCH = TRIP / LANES;
    const int lane = threadIdx.x % LANES;
    const long long subwarp = (blockIdx.x * 256LL + threadIdx.x) / LANES;
    const int word = blockIdx.y * LANES + lane;
    const uint4* x = X + (word < words ? word : 0);
    // A share and a trip are multiples of 4, so that 4 indices load as one. None of the entries
    // behind the last full trip, fewer than 32, is read. All lanes of a warp make the same trips.
    const long long last = nnz / TRIP * TRIP - TRIP;
    const long long start = min(subwarp * share, last);
    uint4 sum = make_uint4(0, 0, 0, 0);
    const auto add = [&](uint4 v) { sum.x ^= v.x; sum.y ^= v.y; sum.z ^= v.z; sum.w ^= v.w; };
    if (SHUFFLE) {
        int cols[BATCH], next[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) next[b] = indices[start + b * LANES + lane];
#pragma unroll 1
        for (int trip = 0; trip < share; trip += TRIP) {
            const long long ahead = min(start + trip + TRIP, last);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) cols[b] = next[b];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) next[b] = indices[ahead + b * LANES + lane];
#pragma unroll 1
            for (int group = 0; group < TRIP / UNROLL; ++group) {
                uint4 v[UNROLL];
#pragma unroll
                for (int j = 0; j < UNROLL; ++j) {
                    const int mine = cols[BATCH == 1 ? 0 : j / LANES];
                    const int from = (group * UNROLL + j) % LANES;
                    const int col = __shfl_sync(0xffffffff, mine, from, LANES);
                    v[j] = x[(long long)col * words];
                }
#pragma unroll
                for (int j = 0; j < UNROLL; ++j) add(v[j]);
            }
        }
    } else {
        int4 next[UNROLL / 4];
#pragma unroll
        for (int b = 0; b < UNROLL / 4; ++b) next[b] = *(const int4*)(indices + start + b * 4);
#pragma unroll 1
        for (int trip = 0; trip < share; trip += UNROLL) {
            const long long ahead = min(start + trip + UNROLL, last);
            uint4 v[UNROLL];
#pragma unroll
            for (int b = 0; b < UNROLL / 4; ++b) {
                v[b * 4] = x[(long long)next[b].x * words];
                v[b * 4 + 1] = x[(long long)next[b].y * words];
                v[b * 4 + 2] = x[(long long)next[b].z * words];
                v[b * 4 + 3] = x[(long long)next[b].w * words];
            }
#pragma unroll
            for (int b = 0; b < UNROLL / 4; ++b) next[b] = *(const int4*)(indices + ahead + b * 4);
#pragma unroll
            for (int j = 0; j < UNROLL; ++j) add(v[j]);
        }
    }
    if ((sum.x | sum.y | sum.z | sum.w) >> 31) *sink = sum.x;
}
"""


@dataclass(frozen=True)
class Probe:
    """The fastest gather and its settings."""

    ms: float
    lanes: int
    unroll: int
    shuffle: bool  #: indices loaded once per sub-warp and passed by shuffle, or by every lane
    share: int  #: entries of a sub-warp

    def __str__(self) -> str:
        how = "shuffle" if self.shuffle else "direct"
        return f"{self.lanes}x16B u{self.unroll} {how} {self.share}"


def expressions() -> list[str]:
    """Every instantiation."""
    return [_name(*setting) for setting in product(LANES, UNROLLS, (True, False))]


def _name(lanes: int, unroll: int, shuffle: bool) -> str:
    return f"gather<{lanes}, {unroll}, {str(shuffle).lower()}>"


@cache
def _module() -> Any:
    import cupy

    return cupy.RawModule(
        code=SOURCE, options=("-std=c++17",), name_expressions=tuple(expressions())
    )


@cache
def _function(lanes: int, unroll: int, shuffle: bool) -> Any:
    return _module().get_function(_name(lanes, unroll, shuffle))


def gather(indices: Array, X: Array, *, lanes: int, unroll: int, shuffle: bool, share: int) -> Any:
    """A function that launches the gather with these settings."""
    import cupy

    words = X.shape[1] * X.itemsize // 16
    blocks = -(-len(indices) * lanes // (share * THREADS))
    grid = (blocks, -(-words // lanes))
    sink = cupy.zeros(1, np.uint32)
    sizes = (np.int64(len(indices)), np.int32(words), np.int32(share))
    function = _function(lanes, unroll, shuffle)
    return lambda: function(grid, (THREADS,), (indices, X.data.ptr, sink, *sizes))


def applies(indices: Array, X: Array) -> bool:
    """Whether the probe takes them: int32, rows of whole aligned 16-byte words, some entries."""
    whole = X.shape[1] * X.itemsize % 16 == 0 and X.flags.c_contiguous
    aligned = X.data.ptr % 16 == 0 and indices.data.ptr % 16 == 0
    return bool(indices.dtype == np.int32 and whole and aligned and len(indices) >= 32)


def best(indices: Array, X: Array, *, runs: int = 10) -> Probe | None:
    """The fastest setting for these rows, chosen by two runs each; None if none applies.

    X holds numbers in [0, 1), of float32 or of a 2-byte dtype.
    """
    if not applies(indices, X):
        return None
    words = X.shape[1] * X.itemsize // 16
    fitting = [lanes for lanes in LANES if (2 if words > 4 else 1) < lanes <= max(words, 2)]
    settings = [Probe(0.0, *s, SHARES[0]) for s in product(fitting, UNROLLS, (True, False))]
    chosen = _fastest(indices, X, settings, runs=2)
    others = [
        Probe(0.0, chosen.lanes, chosen.unroll, chosen.shuffle, share) for share in SHARES[1:]
    ]
    chosen = _fastest(indices, X, [chosen, *others], runs=3)
    return _fastest(indices, X, [chosen], runs=runs)


def _fastest(indices: Array, X: Array, settings: list[Probe], *, runs: int) -> Probe:
    timed = []
    for s in settings:
        launch = gather(
            indices, X, lanes=s.lanes, unroll=s.unroll, shuffle=s.shuffle, share=s.share
        )
        ms = _harness.medians([launch], cuda=True, runs=runs, warmups=1)[0]
        timed.append(Probe(ms, s.lanes, s.unroll, s.shuffle, s.share))
    return min(timed, key=lambda probe: probe.ms)
