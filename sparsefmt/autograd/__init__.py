"""The torch layer: forward, backward and fake kernels around ``sparsefmt.ops``, nothing else."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .functions import edge_softmax as edge_softmax
    from .functions import edge_values as edge_values
    from .functions import sddmm as sddmm
    from .functions import spmm as spmm
    from .structure import prepare as prepare

#: Public name -> the module that defines it; resolved on first use (PEP 562), which imports torch.
_PUBLIC = {
    "edge_softmax": "functions",
    "edge_values": "functions",
    "prepare": "structure",
    "sddmm": "functions",
    "spmm": "functions",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
