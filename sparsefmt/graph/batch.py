"""Graphs side by side in one: what was built of each is joined, nothing is sorted."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from ..errors import DeviceError, DtypeError, ShapeError
from ..formats import checks, primitives
from ..formats.arrays import Array, allocating, finish, is_cupy, namespace, on_device_of
from ..formats.base import Format
from ..formats.compressed import COO, CSC, CSR, Compressed
from .edges import Edges, joined_edges

if TYPE_CHECKING:
    from .graph import Graph

SomeCompressed = TypeVar("SomeCompressed", bound=Compressed)


class Blocks(NamedTuple):
    """The first row, column and entry of each piece; the last number of each list is the end."""

    rows: list[int]
    cols: list[int]
    entries: list[int]

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the joined matrix."""
        return self.rows[-1], self.cols[-1]

    @property
    def nnz(self) -> int:
        """Return the number of entries of the joined matrix."""
        return self.entries[-1]


class Facts(NamedTuple):
    """Device, dtypes (None for no values) and sizes of a piece."""

    device: str
    dtype: str | None
    index_dtype: str
    n_rows: int
    n_cols: int
    nnz: int


def blocks_of(pieces: Sequence[Facts]) -> Blocks:
    """Compute where each piece begins.

    Raises
    ------
    DeviceError, DtypeError
        If they are on several devices, some have values and others none, or dtypes differ.
    IndexRangeError
        If there are more rows, columns or entries than the index dtype counts.
    """
    kind = pieces[0][:3]
    for number, piece in enumerate(pieces):
        if piece[:3] != kind:
            _refuse(number, piece, pieces[0])
    blocks = Blocks(*([0, *accumulate(sizes)] for sizes in list(zip(*pieces, strict=True))[3:]))
    checks.sizes_fit(blocks.shape, blocks.nnz, np.dtype(kind[2]))
    return blocks


def _refuse(number: int, facts: Facts, first: Facts) -> None:
    """Raise for a piece whose device or dtypes differ from the first one's."""
    if facts.device != first.device:
        raise DeviceError(
            f"graphs[{number}] is on {facts.device} but graphs[0] on {first.device}: move one of "
            f'them, graph.to("{first.device}") for instance.'
        )
    if facts.dtype != first.dtype:
        values = [
            "no values" if dtype is None else f"values of {dtype}" for dtype in (facts[1], first[1])
        ]
        raise DtypeError(
            f"graphs[{number}] has {values[0]} but graphs[0] has {values[1]}: give all values of "
            "one dtype, or none, with_data(None) for instance."
        )
    raise DtypeError(
        f"graphs[{number}] has {facts.index_dtype} indices but graphs[0] has "
        f"{first.index_dtype}: make all of them of one dtype."
    )


def _compressed(parts: Sequence[SomeCompressed], at: Blocks) -> SomeCompressed:
    """Join the CSR, or CSC, of all pieces."""
    first = parts[0]
    major, minor = (at.rows, at.cols)[first._major], (at.rows, at.cols)[1 - first._major]
    dtype, xp = first.index_dtype, namespace(first.indices)
    indptr = xp.empty(major[-1] + 1, dtype)
    indptr[-1] = at.nnz
    _joined([part.indptr[:-1] for part in parts], major, at.entries, out=indptr[:-1])
    indices = _joined([part.indices for part in parts], at.entries, minor)
    data = None if first.data is None else xp.concatenate([part.data for part in parts])
    return first._trusted(indptr=indptr, indices=indices, data=data, shape=at.shape)


def _coordinates(parts: Sequence[COO], at: Blocks) -> COO:
    """Join the COO of all pieces."""
    first = parts[0]
    xp = namespace(first.row)
    both = xp.empty((2, at.nnz), first.index_dtype)  # sources, then targets, as PyG has them
    _joined([part.col for part in parts], at.entries, at.cols, out=both[0])
    _joined([part.row for part in parts], at.entries, at.rows, out=both[1])
    data = None if first.data is None else xp.concatenate([part.data for part in parts])
    return COO._trusted(row=both[1], col=both[0], data=data, shape=at.shape)


def _places(parts: Sequence[Array | None], at: Blocks, like: Array) -> Array | None:
    """Join permutations of entries, where None means the identity."""
    if all(part is None for part in parts):
        return None
    xp, dtype = namespace(like), like.dtype
    counts = np.diff(at.entries)
    numbers = [
        xp.arange(int(count), dtype=dtype) if part is None else part
        for part, count in zip(parts, counts, strict=True)
    ]
    return _joined(numbers, at.entries, at.entries)


def _user_coo(A: Format) -> COO:
    """Convert a matrix to COO, keeping the order of its entries."""
    if isinstance(A, COO):
        return A
    coo, perm = A.tocoo_with_perm()
    back = primitives.inverse(perm)
    return COO._trusted(row=coo.row[back], col=coo.col[back], data=A.data, shape=A.shape)


def _joined(
    parts: Sequence[Array], begins: list[int], offsets: list[int], *, out: Array | None = None
) -> Array:
    """Concatenate arrays that begin at ``begins``, and add ``offsets[k]`` to part ``k``."""
    first = parts[0]
    xp, total = namespace(first), begins[-1]
    out = xp.empty(total, first.dtype) if out is None else out
    xp.concatenate(parts, out=out)
    if not is_cupy(first):
        out += np.repeat(np.array(offsets[:-1], first.dtype), np.diff(begins))
        return out
    both = xp.asarray(np.array([begins, offsets], first.dtype))
    out += both[1][primitives.expand(both[0], total)]
    return out


class Pieces:
    """Graphs on the diagonal of a matrix; each format is joined when it is first read."""

    def __init__(self, graphs: Sequence["Graph"]) -> None:
        self.graphs, self.at = graphs, blocks_of([_facts_of(graph) for graph in graphs])
        first = graphs[0]
        self.shape, self.nnz = self.at.shape, self.at.nnz
        self.device, self.index_dtype, self.dtype = first.device, first.index_dtype, first.dtype

    @property
    def probe(self) -> Array:
        """Return indices on the device of all."""
        return self.graphs[0].csr.indices

    def csr(self) -> tuple[CSR, Array | None]:
        """Join the CSR of each, and the permutations to it."""
        parts, numbers = zip(
            *((graph.csr, graph._built.numbers(graph._flipped)) for graph in self.graphs),
            strict=True,
        )
        joined = _compressed(parts, self.at)
        return joined, _places(numbers, self.at, joined.indices)

    def csc(self) -> tuple[CSC, Array]:
        """Join the CSC of each, and the permutations from CSR to it."""
        parts, places = zip(*((graph.csc, graph.csc_perm) for graph in self.graphs), strict=True)
        joined = _compressed(parts, self.at)
        perm = _places(places, self.at, joined.indices)
        assert perm is not None  # no piece has None
        return joined, perm

    def coo(self) -> COO:
        """Join the edges of each, in the user's order."""
        with on_device_of(self.probe), allocating("edges of a batch of graphs"):
            joined = _coordinates([_user_coo(graph.structure) for graph in self.graphs], self.at)
        finish(self.probe)  # synchronize!
        return joined


def _facts_of(graph: "Graph") -> Facts:
    """Return device, dtypes and sizes of a graph, which are kept with it."""
    built = graph._built
    facts = built.facts
    if facts is None:
        source = built.source
        dtype = None if source.dtype is None else source.dtype.name
        sizes = (*source.shape, source.nnz)
        facts = built.facts = Facts(source.device, dtype, source.index_dtype.name, *sizes)
    if not graph._flipped:
        return facts
    return facts._replace(n_rows=facts.n_cols, n_cols=facts.n_rows)


def checked(graphs: Iterable["Graph"], kind: type["Graph"]) -> list["Graph"]:
    """Check for one graph or more, and return them as a list.

    Raises
    ------
    DtypeError, ShapeError
        If there is something else, or nothing.
    """
    if isinstance(graphs, kind):
        raise DtypeError("graphs is one Graph: give a list of them.")
    try:
        result = list(graphs)
    except TypeError as error:
        raise DtypeError(
            f"graphs is a {type(graphs).__name__}: give a list of sparsefmt.Graph."
        ) from error
    for number, graph in enumerate(result):
        if not isinstance(graph, kind):
            raise DtypeError(
                f"graphs[{number}] is a {type(graph).__name__}: give a sparsefmt.Graph, such as "
                "Graph.from_edge_index(edge_index, num_nodes=n)."
            )
    if not result:
        raise ShapeError("graphs is empty: give one graph or more, whose dtypes the result has.")
    return result


def edges_of(pieces: Pieces) -> Edges | None:
    """Join edges in CUDA tensors; return None if a piece is made of anything else."""
    edges = [None if graph._flipped else graph._built.edges for graph in pieces.graphs]
    parts = [part for part in edges if part is not None]
    return joined_edges(parts, *pieces.at) if len(parts) == len(edges) else None
