"""Sparse formats and GPU kernels for graph neural networks."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from ._caches import clear_caches as clear_caches
    from .errors import DeviceError as DeviceError
    from .errors import DtypeError as DtypeError
    from .errors import FileFormatError as FileFormatError
    from .errors import FormatError as FormatError
    from .errors import IndexRangeError as IndexRangeError
    from .errors import KernelLaunchError as KernelLaunchError
    from .errors import OutOfMemoryError as OutOfMemoryError
    from .errors import RankError as RankError
    from .errors import ShapeError as ShapeError
    from .errors import SparseFmtError as SparseFmtError
    from .errors import UnsupportedError as UnsupportedError
    from .formats.base import Format as Format
    from .formats.cbsr import CBSR as CBSR
    from .formats.compressed import COO as COO
    from .formats.compressed import CSC as CSC
    from .formats.compressed import CSR as CSR
    from .formats.convert import from_dense as from_dense
    from .formats.sgt import SGT as SGT
    from .generate import power_law as power_law
    from .graph.graph import Graph as Graph
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
    from .model.optimizing import optimize as optimize
    from .reorder import Order as Order
    from .reorder import community_order as community_order
    from .reorder import degree_order as degree_order
    from .reorder import rcm_order as rcm_order
    from .stats import Stats as Stats
    from .stats import summarize as summarize

#: Module -> the public names that it defines; resolved on first use (PEP 562).
_MODULES = {
    "_caches": "clear_caches",
    "model.optimizing": "optimize",
    "errors": (
        "DeviceError DtypeError FileFormatError FormatError IndexRangeError KernelLaunchError "
        "OutOfMemoryError RankError ShapeError SparseFmtError UnsupportedError"
    ),
    "formats.base": "Format",
    "formats.cbsr": "CBSR",
    "formats.compressed": "COO CSC CSR",
    "formats.convert": "from_dense",
    "formats.sgt": "SGT",
    "generate": "power_law",
    "graph.graph": "Graph",
    "interop": (
        "as_sparse from_cupyx from_dgl from_edge_index from_networkx from_pyg from_scipy "
        "from_torch to_cupyx to_dgl to_edge_index to_networkx to_pyg to_scipy to_torch"
    ),
    "io": "read read_planetoid write",
    "reorder": "Order community_order degree_order rcm_order",
    "stats": "Stats summarize",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}

#: Modules whose names users write behind ``import sparsefmt``.
_SUBMODULES = (
    "autograd cli distributed errors formats generate graph interop io model nn ops plan plot "
    "reorder stats testing"
).split()

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("sparsefmt")
    if name in _PUBLIC:
        value = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES, "__version__"])


_OLD_FORMATS = ("base", "cbsr", "compressed", "convert", "sgt")


class _Moved:
    """An import finder for old places of formats and layers, which earlier pickles name."""

    places: ClassVar = {
        **{f"{__name__}.{name}": f".formats.{name}" for name in _OLD_FORMATS},
        f"{__name__}.coo": ".formats.compressed",
        f"{__name__}.autograd.adapters": ".model.layers",
        f"{__name__}.autograd.composition": ".model.composition",
        f"{__name__}.distributed.files": ".distributed.parts.files",
        f"{__name__}.nn._linear": ".nn._maps",
        f"{__name__}.nn.attention": ".nn",
        f"{__name__}.nn.layers": ".nn",
    }

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of ``sparsefmt.coo``, for instance; None for all but the old places."""
        if name not in cls.places:
            return None
        return ModuleSpec(name, cls())  # type: ignore[arg-type]  # it is a loader by its methods

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that Python makes the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the module by that at the new place."""
        name = module.__name__
        sys.modules[name] = import_module(self.places[name], __name__)


sys.meta_path.append(_Moved)
