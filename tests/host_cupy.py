"""A CuPy for machines without a GPU: NumPy arrays of its own class, kernels compiled as C++.

An element-wise kernel runs its places one after another; where lanes of a warp ask each other, 32
of them take turns.  That shows the arithmetic, the bounds and which branch runs; it shows nothing
of concurrency, streams or speed.
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
    "bool": "bool",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float16": "_Float16",
    "float32": "float",
    "float64": "double",
}
_HEAD = """
#include <algorithm>
using std::max;
using std::min;
#define __device__
static inline void atomicMin(long long* at, long long value) { *at = min(*at, value); }
template <typename T> static void atomicAdd(T* at, T value) { *at += value; }
template <typename T> static void atomicOr(T* at, T value) { *at |= value; }
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
"""
#: Lanes are contexts with a stack each.  What they tell each other lies in one of two rows by
#: turns: none writes again to a row before all have read it.
_WARP = """
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
static ucontext_t warp, lanes[32];
static char stacks[32][1 << 16];
static long long told[2][32], first_place;
static int lane, turns[32], running;
static const long long* tell(long long value) {
    const int turn = turns[lane]++ % 2;
    told[turn][lane] = value;
    swapcontext(&lanes[lane], &warp);
    return told[turn];
}
template <typename T> static T __shfl_sync(unsigned mask, T value, unsigned from) {
    return (T)tell((long long)value)[from % 32];
}
template <typename T> static T __shfl_up_sync(unsigned mask, T value, unsigned by) {
    const long long* values = tell((long long)value);
    return lane < (int)by ? value : (T)values[lane - by];
}
static unsigned __ballot_sync(unsigned mask, bool value) {
    const long long* values = tell(value);
    unsigned bits = 0;
    for (int k = 0; k < 32; ++k) bits |= (unsigned)values[k] << k;
    return bits;
}
static void place(long i);
static void start() {
    place(first_place + lane);
    --running;
}
static void run_warp(long long begin) {
    first_place = begin;
    running = 32;
    for (lane = 0; lane < 32; ++lane) {
        turns[lane] = 0;
        getcontext(&lanes[lane]);
        lanes[lane].uc_stack = {stacks[lane], 0, sizeof(stacks[lane])};
        lanes[lane].uc_link = &warp;
        makecontext(&lanes[lane], start, 0);
    }
    while (running) {
        const int before = running;
        for (lane = 0; lane < 32; ++lane) swapcontext(&warp, &lanes[lane]);
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

    def __call__(self, *args: Any, size: int | None = None) -> Any:
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
            results = tuple(np.empty(shape, dtype).view(ndarray) for dtype in dtypes)
            args += results
        self._launch(args, types, int(np.prod(shape)))
        return results[0] if len(results) == 1 else results

    def _launch(self, args: Any, types: dict[str, np.dtype[Any]], size: int) -> None:
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
        warps = "_sync(" in self.preamble + self.body
        assert not (warps and size % 32)
        _compile(
            f"{_HEAD}{_WARP if warps else ''}{self.preamble}\n{' '.join(letters)}\n"
            f"static struct {{ {' '.join(one + ';' for one in declared)} }} _given;\n"
            f"static void place(long i) {{\n"
            f"auto& [{', '.join(one.split()[-1] for one in declared)}] = _given;\n"
            f"{' '.join(bound)}\n{self.body};\n}}\n"
            f'extern "C" void kernel({", ".join(declared)}, long long _size) {{\n'
            f"_given = {{{', '.join(one.split()[-1] for one in declared)}}};\n"
            f"for (long i = 0; i < _size; i += {32 if warps else 1})"
            f" {'run_warp' if warps else 'place'}(i);\n}}"
        )(*values, ctypes.c_longlong(size))


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
    return cupy
