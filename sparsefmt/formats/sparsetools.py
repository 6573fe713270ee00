"""SciPy's compiled loops, without the rest of SciPy, and without numba.

``import scipy.sparse`` takes 0.3 to 0.45 s, most of it for other array libraries; the one extension
module with its loops takes 0.5 ms.  They check nothing, run on one thread and hold Python's lock.
"""

from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

from .._caches import cache
from .arrays import Array


@cache
def loops() -> Any:
    """Import SciPy's compiled loops: ``csr_matvecs``, ``coo_tocsr`` and others."""
    package = find_spec("scipy")
    folders = [] if package is None else package.submodule_search_locations or []
    spec = PathFinder.find_spec("_sparsetools", [str(Path(path, "sparse")) for path in folders])
    if spec is None or spec.loader is None:  # where SciPy was frozen into something else
        return import_module("scipy.sparse._sparsetools")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def add_product(shape: tuple[int, int], A: tuple[Array, Array, Array], X: Array, Y: Array) -> None:
    """Add ``A X`` to ``Y`` for a CSR ``(indptr, indices, data)``, in the order of the entries.

    ``X`` and ``Y`` are contiguous and of the dtype of ``data``, float32 or float64.
    """
    loops().csr_matvecs(*shape, X.shape[1], *A, X.reshape(-1), Y.reshape(-1))


def add_transposed_product(
    shape: tuple[int, int], A: tuple[Array, Array, Array], X: Array, Y: Array
) -> None:
    """Add ``A' X`` to ``Y`` for a CSR of that shape, in the order of the entries."""
    loops().csc_matvecs(*shape[::-1], X.shape[1], *A, X.reshape(-1), Y.reshape(-1))
