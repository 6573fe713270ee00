"""Where arrays of the fuzzer are, in what strides, on what stream, and memory that shows itself."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np

from sparsefmt.formats.arrays import to_device

LAYOUTS = ("plain", "apart", "every other", "reversed", "last axis first")
#: How work is enqueued; all but the first on a GPU alone.
WAYS = ("plain", "stream", "capture")


def laid_out(values, layout, device):
    """Put an array on the device in odd strides; NaN lies between its elements."""
    values = np.asarray(values)
    plain = to_device(np.ascontiguousarray(values), device)
    if layout == "plain" or values.ndim == 0:
        return plain
    if layout == "last axis first":
        return plain.T.copy().T
    if layout == "reversed":
        return plain[::-1].copy()[::-1]
    if layout == "apart":
        shape, inside = (*values.shape[:-1], values.shape[-1] + 3), (..., slice(1, -2))
    else:
        shape, inside = (2 * values.shape[0], *values.shape[1:]), (slice(1, None, 2),)
    wide = to_device(np.full(shape, np.nan).astype(values.dtype), device)
    wide[inside] = plain
    return wide[inside]


def host(array):
    """Give the array on the CPU."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().numpy()
    return array.get() if hasattr(array, "get") else np.asarray(array)


def enqueued(call, way, device):
    """Do the work of ``call`` plainly, on a stream of its own, or by replaying a capture of it."""
    if device == "cpu" or way == "plain":
        return call()
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(2):  # what is built once is built now, with its synchronisations
            found = call()
        stream.synchronize()
        if way == "capture":
            stream.begin_capture()
            try:
                found = call()
            finally:
                graph = stream.end_capture()
            for _ in range(3):
                graph.launch()
        stream.synchronize()
    return found


def _fill(array):
    """Write into a new array what no right result holds."""
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        array.fill(np.nan)
    elif array.dtype.kind in "iu":
        array.fill(np.iinfo(array.dtype).max // 2)
    return array


def _poisoning(function):
    def poisoned(*args, **options):
        return _fill(function(*args, **options))

    return poisoned


def _poisoning_torch(function):
    def poisoned(*args, **options):
        found = function(*args, **options)
        return found.fill_(np.nan) if found.is_floating_point() else found

    return poisoned


@contextmanager
def poison(device):
    """Make new arrays of NumPy, CuPy and torch come poisoned; what numba compiles sees NumPy's.

    Memory that compiled code takes from the C library is poisoned by ``MALLOC_PERTURB_``.
    """
    import torch
    from numba.core.dispatcher import Dispatcher

    names, compile_ = ("empty", "empty_like"), Dispatcher.compile
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(np, name, _poisoning(getattr(np, name))))
            stack.enter_context(patch.object(torch, name, _poisoning_torch(getattr(torch, name))))
        if device != "cpu":
            import cupy

            for name in names:
                stack.enter_context(patch.object(cupy, name, _poisoning(getattr(cupy, name))))
        originals = {name: getattr(np, name).__closure__[0].cell_contents for name in names}

        def compile_unpoisoned(self, signature):
            with patch.multiple(np, **originals):
                return compile_(self, signature)

        stack.enter_context(patch.object(Dispatcher, "compile", compile_unpoisoned))
        yield
