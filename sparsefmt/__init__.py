"""Sparse formats and GPU kernels for graph neural networks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Format as Format
    from .cbsr import CBSR as CBSR
    from .compressed import CSC as CSC
    from .compressed import CSR as CSR
    from .convert import from_dense as from_dense
    from .coo import COO as COO
    from .errors import DeviceError as DeviceError
    from .sgt import SGT as SGT

#: Public name -> the module that defines it; resolved on first use (PEP 562).
_PUBLIC = {
    "COO": "coo",
    "CSR": "compressed",
    "CSC": "compressed",
    "CBSR": "cbsr",
    "SGT": "sgt",
    "Format": "base",
    "Graph": "graph",
    "from_dense": "convert",
}
_PUBLIC |= dict.fromkeys(
    (
        "SparseFmtError",
        "FormatError",
        "ShapeError",
        "DtypeError",
        "IndexRangeError",
        "DeviceError",
        "UnsupportedError",
        "FileFormatError",
        "OutOfMemoryError",
        "KernelLaunchError",
    ),
    "errors",
)

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("sparsefmt")
    if name in _PUBLIC:
        value = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
