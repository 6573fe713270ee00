"""What you do with a graph: operations on NumPy arrays (numba) and CuPy arrays (CUDA)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._jit import compile_all as compile_all
    from ._registry import explain as explain
    from .features import maxk as maxk
    from .matmul import spmm as spmm

#: Public name -> the module that defines it; resolved on first use (PEP 562).
_PUBLIC = {"compile_all": "_jit", "explain": "_registry", "maxk": "features", "spmm": "matmul"}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
