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
    from .errors import DtypeError as DtypeError
    from .errors import FileFormatError as FileFormatError
    from .errors import FormatError as FormatError
    from .errors import IndexRangeError as IndexRangeError
    from .errors import KernelLaunchError as KernelLaunchError
    from .errors import OutOfMemoryError as OutOfMemoryError
    from .errors import ShapeError as ShapeError
    from .errors import SparseFmtError as SparseFmtError
    from .errors import UnsupportedError as UnsupportedError
    from .generate import power_law as power_law
    from .graph import Graph as Graph
    from .interop import as_sparse as as_sparse
    from .interop import from_cupyx as from_cupyx
    from .interop import from_dgl as from_dgl
    from .interop import from_edge_index as from_edge_index
    from .interop import from_networkx as from_networkx
    from .interop import from_pyg as from_pyg
    from .interop import from_scipy as from_scipy
    from .interop import from_torch as from_torch
    from .interop import to_cupyx as to_cupyx
    from .interop import to_dgl as to_dgl
    from .interop import to_edge_index as to_edge_index
    from .interop import to_networkx as to_networkx
    from .interop import to_pyg as to_pyg
    from .interop import to_scipy as to_scipy
    from .interop import to_torch as to_torch
    from .io import read as read
    from .io import read_planetoid as read_planetoid
    from .io import write as write
    from .partition import EdgeGroups as EdgeGroups
    from .partition import edge_groups as edge_groups
    from .reorder import Order as Order
    from .reorder import community_order as community_order
    from .reorder import degree_order as degree_order
    from .reorder import rcm_order as rcm_order
    from .sgt import SGT as SGT
    from .stats import Stats as Stats
    from .stats import summarize as summarize

#: Module -> the public names that it defines; resolved on first use (PEP 562).
_MODULES = {
    "base": ("Format",),
    "cbsr": ("CBSR",),
    "compressed": (
        "CSC",
        "CSR",
    ),
    "convert": ("from_dense",),
    "coo": ("COO",),
    "errors": (
        "DeviceError",
        "DtypeError",
        "FileFormatError",
        "FormatError",
        "IndexRangeError",
        "KernelLaunchError",
        "OutOfMemoryError",
        "ShapeError",
        "SparseFmtError",
        "UnsupportedError",
    ),
    "generate": ("power_law",),
    "graph": ("Graph",),
    "interop": (
        "as_sparse",
        "from_cupyx",
        "from_dgl",
        "from_edge_index",
        "from_networkx",
        "from_pyg",
        "from_scipy",
        "from_torch",
        "to_cupyx",
        "to_dgl",
        "to_edge_index",
        "to_networkx",
        "to_pyg",
        "to_scipy",
        "to_torch",
    ),
    "io": (
        "read",
        "read_planetoid",
        "write",
    ),
    "partition": (
        "EdgeGroups",
        "edge_groups",
    ),
    "reorder": (
        "Order",
        "community_order",
        "degree_order",
        "rcm_order",
    ),
    "sgt": ("SGT",),
    "stats": (
        "Stats",
        "summarize",
    ),
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_PUBLIC]


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
    return sorted([*__all__, "__version__"])
