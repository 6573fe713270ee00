"""Loops of dtypes that `make test` does not compile as for users; `make test-all` does.

numba takes 1 to 5 s for a loop of this package, for each dtype of values and of indices.
"""

import os
from functools import cache, partial
from types import FunctionType
from typing import Any
from unittest.mock import patch

import numba
import numpy as np
from numba.core import config
from numba.core.dispatcher import Dispatcher

#: Loops that are compiled for int64 too, one of a room; the others run on copies in int32.
FOR_INT64 = {"softmax_of_rows", "arg_da", "products_at_entries", "_row_degrees", "_sample"}
#: What tells ranks.
TOLD = "SPARSEFMT_COMPILES_FEW_LOOPS"
#: Parameters whose arrays are int64 beside int32 too.
ALWAYS_INT64 = {"to"}


def arrays_of(arg: Any) -> list[np.ndarray]:
    """List the arrays of an argument."""
    parts = arg if isinstance(arg, tuple) else ()
    return [arg] if isinstance(arg, np.ndarray) else [a for part in parts for a in arrays_of(part)]


def in_int32(arg: Any, pairs: list[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Copy int64 arrays of an argument to int32, and note each with its copy."""
    if isinstance(arg, tuple):
        parts = [in_int32(part, pairs) for part in arg]
        return type(arg)(*parts) if hasattr(arg, "_fields") else tuple(parts)
    if not isinstance(arg, np.ndarray) or arg.dtype != np.int64:
        return arg
    pairs.append((arg, arg.astype(np.int32)))
    return pairs[-1][1]


def run_for_int32(loop: Any, names: tuple[str, ...], *args: Any) -> Any:
    """Run a loop on int32 copies of int64 arrays, and write back what it wrote."""
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    named = zip(names, args, strict=True)
    result = loop(*(a if name in ALWAYS_INT64 else in_int32(a, pairs) for name, a in named))
    for array, copy in pairs:
        if array.flags.writeable:
            array[...] = copy
    return result


@cache
def on_one_thread(loop: Any) -> Any:
    """Return a loop without threads, which compiles in half the time, with a cache of its own.

    Within loops of threads numba divides by 0 as NumPy does, without an error.
    """
    own = loop.py_func
    twin = FunctionType(
        own.__code__, own.__globals__, own.__name__, own.__defaults__, own.__closure__
    )
    twin.__module__, twin.__qualname__ = own.__module__, f"{own.__qualname__}_on_one_thread"
    return numba.njit(cache=True, nogil=True, error_model="numpy")(twin)


def compile_few(compile_for_args: Any) -> Any:
    """Wrap what compiles a loop for its arguments: as for users for float32 and int32 alone."""

    def compiled(loop: Any, *args: Any) -> Any:
        function = loop.py_func
        if not function.__module__.startswith("sparsefmt."):
            return compile_for_args(loop, *args)
        names = function.__code__.co_varnames[: len(args)]
        arrays = [
            array
            for name, arg in zip(names, args, strict=True)
            for array in arrays_of(arg)
            if name not in ALWAYS_INT64
        ]
        dtypes = {array.dtype.name for array in arrays}
        if "int64" in dtypes and ("float64" in dtypes or function.__name__ not in FOR_INT64):
            return partial(run_for_int32, loop, names)
        is_rare = dtypes & {"uint16", "uint64"} or dtypes & {"float32", "float64"} == {"float64"}
        is_rare = is_rare or not all(array.flags.writeable for array in arrays)
        if is_rare and loop.targetoptions.get("parallel"):
            return on_one_thread(loop)
        # Twins are less optimised, in 0.6 of the time.
        is_twin = function.__qualname__.endswith("_on_one_thread")
        with patch.object(config, "OPT", type(config.OPT)(1) if is_twin else config.OPT):
            return compile_for_args(loop, *args)

    return compiled


def install() -> None:
    """Have numba compile so from here on, and tell ranks, which are processes of their own."""
    os.environ[TOLD] = "1"
    Dispatcher._compile_for_args = compile_few(Dispatcher._compile_for_args)


def install_if_told() -> None:
    """Have numba compile so where the process that started this one does."""
    if TOLD in os.environ:
        install()
