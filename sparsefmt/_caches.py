"""One registry of the caches of the package, which ``sparsefmt.clear_caches`` empties."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

T = TypeVar("T")

_functions: "WeakSet[_lru_cache_wrapper[Any]]" = WeakSet()
_stores: list[Any] = []


def lru_cache(maxsize: int | None) -> "Callable[[Callable[..., T]], _lru_cache_wrapper[T]]":
    """Return ``functools.lru_cache``, whose results ``clear_caches`` drops."""

    def decorate(function: Callable[..., T]) -> "_lru_cache_wrapper[T]":
        cached = functools.lru_cache(maxsize)(function)
        _functions.add(cached)
        return cached

    return decorate


def cache(function: Callable[..., T]) -> "_lru_cache_wrapper[T]":
    """Keep all results of a function, until ``clear_caches`` drops them."""
    return lru_cache(None)(function)


def store(container: T) -> T:
    """Register a container with a method ``clear``, and return it."""
    _stores.append(container)
    return container


def clear_caches() -> None:
    """Drop what the package keeps between calls, apart from what belongs to a graph.

    Among these are graphs that were made of an ``edge_index``, plans that were priced, and how
    launches of a shape are cut.  All is made again when it is needed, with the same results.
    Kernels that are loaded stay, since CUDA graphs may launch them, and so does what a ``Graph`` or
    a matrix has built of itself, launches that were prepared for it (of each operation at most 256
    cases), and what ``optimize`` has computed of it, which goes with it.

    Notes
    -----
    Thread-safe.  Torch's and CuPy's caches of memory are their own: ``torch.cuda.empty_cache()``
    and ``cupy.get_default_memory_pool().free_all_blocks()`` give back what was dropped here.
    """
    for cached in [*_functions]:
        cached.cache_clear()
    for container in _stores:
        container.clear()
