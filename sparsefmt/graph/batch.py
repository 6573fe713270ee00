"""Graphs side by side in one: what was built of each is joined, nothing is sorted."""

from collections.abc import Sequence
from typing import Any

from ..errors import DtypeError, ShapeError
from ..formats.arrays import Array
from ..formats.compressed import CSC, CSR
from ..formats.coo import COO
from . import blocks
from .edges import Edges, joined_edges


class Pieces:
    """Graphs on the diagonal of one, joined format by format as each is asked for."""

    def __init__(self, graphs: Sequence[Any]) -> None:
        self.graphs, self.at = graphs, blocks.blocks_of([_facts_of(one) for one in graphs])
        first = graphs[0]
        self.shape, self.nnz = self.at.shape, self.at.nnz
        self.device, self.index_dtype, self.dtype = first.device, first.index_dtype, first.dtype

    @property
    def probe(self) -> Array:
        """Indices on the device of all."""
        found: Array = self.graphs[0].csr.indices
        return found

    def csr(self) -> tuple[CSR, Array | None]:
        """Join the CSR of each, and the permutations to it."""
        parts, numbers = zip(*map(_csr_of, self.graphs), strict=True)
        found = blocks.compressed(parts, self.at)
        return found, blocks.places(numbers, self.at, found.indices)

    def csc(self) -> tuple[CSC, Array]:
        """Join the CSC of each, and the permutations from CSR to it."""
        parts, places = zip(*map(_csc_of, self.graphs), strict=True)
        found = blocks.compressed(parts, self.at)
        perm = blocks.places(places, self.at, found.indices)
        assert perm is not None  # no piece has None
        return found, perm

    def coo(self) -> COO:
        """Join the edges of each, in the user's order."""
        return blocks.coordinates([blocks.user_coo(one.structure) for one in self.graphs], self.at)


def _csr_of(graph: Any) -> tuple[CSR, Array | None]:
    if graph._flipped:
        return graph.csr, graph._csr_numbers
    found: tuple[CSR, Array | None] = graph._built.csr()
    return found


def _csc_of(graph: Any) -> tuple[CSC, Array]:
    if graph._flipped:
        return graph.csc, graph.csc_perm
    found: tuple[CSC, Array] = graph._built.csc()
    return found


def _facts_of(graph: Any) -> blocks.Facts:
    """Give what a graph is, kept with what it has built: batches ask for many at once."""
    built = graph._built
    found: blocks.Facts | None = built.facts
    if found is None:
        given = built.given
        dtype = None if given.dtype is None else given.dtype.name
        sizes = (*given.shape, given.nnz)
        found = built.facts = blocks.Facts(given.device, dtype, given.index_dtype.name, *sizes)
    if not graph._flipped:
        return found
    return found._replace(n_rows=found.n_cols, n_cols=found.n_rows)


def checked(graphs: Any, kind: type) -> list[Any]:
    """Check for one or more graphs.

    Raises
    ------
    DtypeError, ShapeError
        If there is something else, or nothing.
    """
    if isinstance(graphs, kind):
        raise DtypeError("graphs is one Graph: give a list of them.")
    try:
        found = list(graphs)
    except TypeError as error:
        raise DtypeError(
            f"graphs is a {type(graphs).__name__}: give a list of sparsefmt.Graph."
        ) from error
    for number, one in enumerate(found):
        if not isinstance(one, kind):
            raise DtypeError(
                f"graphs[{number}] is a {type(one).__name__}: give a sparsefmt.Graph, such as "
                "Graph.from_edge_index(edge_index, num_nodes=n)."
            )
    if not found:
        raise ShapeError("graphs is empty: give one graph or more, whose dtypes the result has.")
    return found


def edges_of(pieces: Pieces) -> Edges | None:
    """Join edges in CUDA tensors, of which torch builds all; None if a piece is of another kind."""
    graphs = pieces.graphs
    if any(one._flipped or one._built.edges is None for one in graphs):
        return None
    at = pieces.at
    return joined_edges([one._built.edges for one in graphs], at.rows, at.cols, at.entries)
