"""A CUDA for machines without a GPU: a kernel whose blocks wait for each other, on the host.

Every thread of the launch is one there; those of a warp and of a block meet at barriers.  That
shows the arithmetic, the bounds, and much of what happens at the same time; nothing of speed.
"""

import ctypes
import struct
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from host_cupy import COMPILER as COMPILER

from sparsefmt.ops.engine import jit

_HEAD = """
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>
#undef LONG_BIT
#define __device__
#define __global__
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(n)
struct Three { unsigned x; };
static thread_local Three threadIdx, blockIdx;
static Three gridDim, blockDim{256};
constexpr int WARP = 32, PIECE = 8, CHUNKS = 32;
constexpr unsigned FULL_WARP = 0xffffffff;
template <typename Index> struct alignas(2 * sizeof(Index)) Place { Index row, entry; };
template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)b < (C)a ? (C)b : (C)a;
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)a < (C)b ? (C)b : (C)a;
}
struct WarpOfHost { std::barrier<> all{32}; long long told[2][32]; };
struct BlockOfHost { std::barrier<> all{256}; WarpOfHost warps[8]; };
static thread_local BlockOfHost* block_;
static thread_local void* shared_;
static thread_local int turn_;
static void __syncthreads() { block_->all.arrive_and_wait(); }
static const long long* tell(long long value) {  // by turns: no row is written before all read it
    WarpOfHost& warp = block_->warps[threadIdx.x / 32];
    const int turn = turn_++ % 2;
    warp.told[turn][threadIdx.x % 32] = value;
    warp.all.arrive_and_wait();
    return warp.told[turn];
}
static unsigned __match_any_sync(unsigned, int value) {
    const long long* told = tell(value);
    unsigned bits = 0;
    for (int k = 0; k < 32; ++k) bits |= (unsigned)(told[k] == value) << k;
    return bits;
}
static unsigned __ballot_sync(unsigned, bool value) {
    const long long* told = tell(value);
    unsigned bits = 0;
    for (int k = 0; k < 32; ++k) bits |= (unsigned)(told[k] != 0) << k;
    return bits;
}
static long long __shfl_up_sync(unsigned, long long value, unsigned by) {
    const long long* told = tell(value);
    return threadIdx.x % 32 < by ? value : told[threadIdx.x % 32 - by];
}
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static void __threadfence() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    std::this_thread::yield();
}
static double rsqrt(double value) { return 1 / std::sqrt(value); }
static void __threadfence_system() { __threadfence(); }
constexpr int STRICT = __ATOMIC_SEQ_CST;
template <typename T> static T atomicAdd(T* at, T value) {
    return __atomic_fetch_add(at, value, STRICT);
}
template <typename T> static T atomicSub(T* at, T value) {
    return __atomic_fetch_sub(at, value, STRICT);
}
template <typename T> static void atomicMax(T* at, T value) {
    T held = *at;
    while (held < value &&
           !__atomic_compare_exchange_n(at, &held, value, false, STRICT, STRICT)) {}
}
"""
_LAUNCH = """
extern "C" void launch(int blocks, const char* bytes) {
    Parameters p;
    memcpy(&p, bytes, sizeof(p));
    gridDim.x = blocks;
    std::vector<BlockOfHost> all(blocks);
    std::vector<Shared> shared(blocks);
    std::vector<std::thread> threads;
    for (int b = 0; b < blocks; ++b)
        for (int t = 0; t < 256; ++t)
            threads.emplace_back([&, b, t] {
                threadIdx.x = t, blockIdx.x = b, turn_ = 0;
                block_ = &all[b], shared_ = &shared[b];
                CALL;
            });
    for (auto& thread : threads) thread.join();
}
"""


@cache
def compiled(file: str, parameters: str, call: str) -> Any:
    """The function that launches a kernel of the file; ``parameters`` are C++ members."""
    code = jit.source(file)
    code = code[code.index("// What both ways to build") :]  # behind common.cuh, for a GPU alone
    own = "Shared& shared = *(Shared*)shared_;"
    code = code.replace("__shared__ Shared shared;", own)
    code = code.replace("< step) {}", "< step) std::this_thread::yield();")
    head = f"{_HEAD}{code}\nstruct Parameters {{ {parameters} }};"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cpp"
        path.write_text(head + _LAUNCH.replace("CALL", call))
        library = path.with_suffix(".so")
        options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread"]
        command = [COMPILER, *options, path, "-o", library]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(library)).launch


class Kernel:
    """What stands in for ``jit.Kernel``: a launch is done when it returns."""

    def __init__(self, file: str, layout: str, parameters: str, call: str) -> None:
        self._launch, self._layout = compiled(file, parameters, call), layout

    def ready(
        self, blocks: int, before: tuple[int, ...] = (), after: tuple[int, ...] = (), **_: Any
    ) -> Callable[..., None]:
        """A launch of which the stream and some arguments are missing."""

        def run(stream: int, *args: int) -> None:
            packed = struct.pack(self._layout, *before, *args, *after)
            self._launch(blocks, ctypes.create_string_buffer(packed))

        return run
