"""Converters from and to graphs of other libraries, without a copy where memory layouts agree.

``from_<library>`` converts another library's object to a format, ``to_<library>`` back, and
``as_sparse`` takes any of these.  A result that shares memory sees later changes of the
other object: nothing here writes, and ``A.copy()`` cuts the tie.  The components of a format cross
alone too: ``CSR(indptr, indices, data, shape=...)`` takes any array that speaks DLPack.
"""

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from ..formats import foreign
from ..formats.arrays import Array
from ..formats.base import Format, FormatName
from ..formats.convert import from_dense
from .graphs import from_dgl, from_networkx, to_dgl, to_networkx
from .pyg import from_edge_index, from_pyg, to_edge_index, to_pyg
from .scipy import from_cupyx, from_scipy, to_cupyx, to_scipy, wrong_kind
from .torch import from_torch, to_torch

__all__ = [
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
]


def as_sparse(x: object, format: FormatName | None = None) -> Any:
    """Convert a matrix or graph of any known library to a format of this package.

    Parameters
    ----------
    x : object
        A COO, CSR, CSC, SGT, CBSR or ``Graph``; a dense NumPy or CuPy array; a scipy.sparse or
        cupyx.scipy.sparse array or matrix; a torch tensor, dense or sparse; a
        torch_geometric ``Data`` or ``HeteroData``; a DGL graph; a NetworkX graph.
    format : "coo", "csr", "csc" or "sgt", optional
        By default the one that is nearest: that of ``x`` itself, COO for lists of edges, CSR for
        dense arrays and for layouts that this package does not have.

    Returns
    -------
    Format
        ``x`` itself if it has that format; otherwise memory is shared as the ``from_``
        function of that library says.  Of a ``HeteroData`` a dict with one for each edge type.

    Raises
    ------
    UnsupportedError
        If ``x`` is none of these, or something that its ``from_`` function refuses.
    SparseFmtError
        Any other that its ``from_`` function raises.

    Notes
    -----
    Asks only libraries that are loaded already: an object of any other cannot exist.
    """
    A = x if isinstance(x, Format) else _reader(x)(x)
    if format is None:
        return A
    if isinstance(A, dict):
        return {key: matrix.asformat(format) for key, matrix in A.items()}
    return A.asformat(format)


def _from_array(x: Array) -> Any:
    return from_dense(foreign.values("x", x))


#: Module, its classes, and their converter.
_READERS: tuple[tuple[str, tuple[str, ...], Callable[[Any], Any]], ...] = (
    ("scipy.sparse", ("sparray", "spmatrix"), from_scipy),
    ("torch", ("Tensor",), from_torch),
    ("torch_geometric.data", ("Data", "HeteroData"), from_pyg),
    ("networkx", ("Graph",), from_networkx),
    ("dgl", ("DGLGraph",), from_dgl),
    ("cupyx.scipy.sparse", ("sparray", "spmatrix"), from_cupyx),
    ("cupy", ("ndarray",), _from_array),
    ("numpy", ("ndarray",), _from_array),
    ("sparsefmt.graph", ("Graph",), attrgetter("structure")),
)


def _reader(x: object) -> Callable[[Any], Any]:
    for module, names, read in _READERS:
        loaded = sys.modules.get(module)
        if isinstance(x, tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))):
            return read
    known = ", ".join(f"{module}.{name}" for module, names, _ in _READERS for name in names)
    raise wrong_kind("as_sparse", x, f"give a sparsefmt format or one of {known}")
