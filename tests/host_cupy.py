"""A CuPy for machines without a GPU: NumPy arrays of its own class, kernels compiled as C++.

An element-wise kernel runs its places one after another; where lanes of a warp ask each other, 32
of them take turns, where threads of a block wait for each other, the block.  Memory that nobody
wrote holds what no index is.  That shows the arithmetic, the bounds and which branch runs; it shows
nothing of concurrency, streams or speed.
"""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

COMPILER = shutil.which("g++")

_TYPES = {
    **{"bool": "bool", "uint8": "unsigned char", "uint16": "unsigned short", "int32": "int"},
    **{"uint32": "unsigned int", "int64": "long long", "uint64": "unsigned long long"},
    **{"float16": "_Float16", "float32": "float", "float64": "double"},
}
_HEAD = """
template <typename T> static T max(T a, T b) { return a < b ? b : a; }
template <typename T> static T min(T a, T b) { return b < a ? b : a; }
#define __device__
#define __shared__ static
static inline void atomicMin(long long* at, long long value) { *at = min(*at, value); }
static inline void atomicMax(long long* at, long long value) { *at = max(*at, value); }
template <typename T> static void atomicAdd(T* at, T value) { *at += value; }
template <typename T> static void atomicOr(T* at, T value) { *at |= value; }
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
"""
#: Threads are contexts with a stack each, and jump from one to the next without the system's help.
#: What they tell each other lies in one of two rows by turns: none writes again to a row before all
#: have read it.
_TOGETHER = """
#include <cstdlib>
#include <cstring>
#include <setjmp.h>
#include <ucontext.h>
static ucontext_t all, threads[TOGETHER];
static jmp_buf back, places[TOGETHER];
static char stacks[TOGETHER][1 << 16];
static long long told[2][TOGETHER], first_place;
static int thread_, turns[TOGETHER], running;
static const long long* tell(long long value) {
    const int turn = turns[thread_]++ % 2;
    told[turn][thread_] = value;
    if (!_setjmp(places[thread_])) _longjmp(back, 1);
    return told[turn] + thread_ / 32 * 32;
}
template <typename T> static T __shfl_sync(unsigned mask, T value, unsigned from) {
    return (T)tell((long long)value)[from % 32];
}
template <typename T> static T __shfl_up_sync(unsigned mask, T value, unsigned by) {
    const long long* values = tell((long long)value);
    return thread_ % 32 < (int)by ? value : (T)values[thread_ % 32 - by];
}
static unsigned __ballot_sync(unsigned mask, bool value) {
    const long long* values = tell(value);
    unsigned bits = 0;
    for (int k = 0; k < 32; ++k) bits |= (unsigned)values[k] << k;
    return bits;
}
static void __syncwarp() { tell(0); }
static void __syncthreads() { tell(0); }
static void place(long i);
static void start() {
    place(first_place + thread_);
    --running;
    _longjmp(back, 1);
}
static void resume() {
    if (_setjmp(back)) return;
    if (turns[thread_]) _longjmp(places[thread_], 1);
    swapcontext(&all, &threads[thread_]);  // it begins
}
static void run_together(long long begin) {
    first_place = begin;
    running = TOGETHER;
    for (thread_ = 0; thread_ < TOGETHER; ++thread_) {
        turns[thread_] = 0;
        getcontext(&threads[thread_]);
        threads[thread_].uc_stack = {stacks[thread_], 0, sizeof(stacks[thread_])};
        makecontext(&threads[thread_], start, 0);
    }
    while (running) {
        const int before = running;
        for (thread_ = 0; thread_ < TOGETHER; ++thread_) resume();
        for (int turn : turns)
            if (turn != turns[0] || (running && running != before)) abort();  // not all asked
    }
}
"""


class Device:
    """The one device; also a context."""

    def __init__(self, id: int = 0) -> None:
        self.id = id

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class ndarray(np.ndarray):  # CuPy's name
    """An array on the simulated device."""

    @property
    def device(self) -> Device:  # type: ignore[override]
        return Device()

    def get(self) -> np.ndarray:
        return np.array(self)


def _on_device(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_on_device(one) for one in value)
    return value.view(ndarray) if type(value) is np.ndarray else value


@cache
def _compile(source: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cpp"
        path.write_text(source)
        library = path.with_suffix(".so")
        command = [COMPILER, "-std=c++17", "-O0", "-shared", "-fPIC", path, "-o", library]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + source
        return ctypes.CDLL(str(library)).kernel


class ElementwiseKernel:
    """The part of CuPy's that the library uses."""

    def __init__(self, inputs: str, outputs: str, body: str, name: str, preamble: str = "") -> None:
        self.inputs, self.outputs = ([p.split() for p in s.split(", ")] for s in (inputs, outputs))
        self.body, self.preamble = body, preamble

    def __call__(self, *args: Any, size: int | None = None, block_size: int = 128) -> Any:
        parameters = self.inputs + self.outputs
        types: dict[str, np.dtype[Any]] = {}
        for (*_, kind, _), value in zip(parameters, args, strict=False):
            if isinstance(value, np.ndarray):
                expected = types.setdefault(kind, value.dtype)
                assert value.dtype == (expected if len(kind) == 1 else np.dtype(kind)), kind
        places = [a for p, a in zip(parameters, args, strict=False) if p[0] != "raw"]
        shape = np.broadcast_shapes(*(np.shape(a) for a in places)) if size is None else (size,)
        results = args[len(self.inputs) :]
        if not results:
            dtypes = [types.get(kind) or np.dtype(kind) for *_, kind, _ in self.outputs]
            results = tuple(_poisoned(shape, dtype) for dtype in dtypes)
            args += results
        self._launch(args, types, int(np.prod(shape)), block_size)
        return results[0] if len(results) == 1 else results

    def _launch(
        self, args: Any, types: dict[str, np.dtype[Any]], size: int, block_size: int
    ) -> None:
        declared, bound, values = [], [], []
        for (*raw, kind, name), value in zip(self.inputs + self.outputs, args, strict=True):
            ctype = _TYPES[np.dtype(types.get(kind, kind)).name]
            if isinstance(value, np.ndarray):
                assert value.flags.c_contiguous
                declared.append(f"{ctype}* {name}" if raw else f"{ctype}* {name}_")
                bound.append("" if raw else f"{ctype}& {name} = {name}_[i];")
                values.append(ctypes.c_void_p(value.ctypes.data))
            else:
                declared.append(f"{ctype} {name}")
                values.append(ctypes.c_longlong(value))
        letters = [f"using {k} = {_TYPES[d.name]};" for k, d in types.items() if len(k) == 1]
        together = 1  # threads that wait for each other
        for sign, number in (("_sync(", 32), ("__syncthreads(", block_size)):
            together = number if sign in self.preamble + self.body else together
        assert size % together == 0
        _compile(
            f"{_HEAD}{_TOGETHER.replace('TOGETHER', str(together)) if together > 1 else ''}"
            f"{self.preamble}\n{' '.join(letters)}\n"
            f"static struct {{ {' '.join(one + ';' for one in declared)} }} _given;\n"
            f"static void place(long i) {{\n"
            f"auto& [{', '.join(one.split()[-1] for one in declared)}] = _given;\n"
            f"do {{ {' '.join(bound)}\n{self.body};\n}} while (false); }}\n"  # CuPy's is a loop
            f'extern "C" void kernel({", ".join(declared)}, long long _size) {{\n'
            f"_given = {{{', '.join(one.split()[-1] for one in declared)}}};\n"
            f"for (long i = 0; i < _size; i += {together})"
            f" {'run_together' if together > 1 else 'place'}(i);\n}}"
        )(*values, ctypes.c_longlong(size))


def _poisoned(shape: Any, dtype: Any = np.float64) -> Any:
    found = np.empty(shape, dtype)
    found.view(np.uint8).fill(0xAB)
    return found.view(ndarray)


class _Module(ModuleType):
    """NumPy's functions, with results on the simulated device."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if not callable(found) or isinstance(found, type):
            return found
        return lambda *args, **options: _on_device(found(*args, **options))


def module() -> ModuleType:
    """What stands for ``cupy``."""
    cupy = _Module("cupy")
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 1, getDevice=lambda: 0, CUDARuntimeError=RuntimeError
    )
    stream = SimpleNamespace(synchronize=lambda: None)
    cupy.cuda = SimpleNamespace(runtime=runtime, Device=Device, get_current_stream=lambda: stream)
    cupy.ndarray, cupy.ElementwiseKernel = ndarray, ElementwiseKernel
    cupy.asarray = lambda a, dtype=None: np.array(a, dtype).view(ndarray)
    cupy.empty = _poisoned
    return cupy
