"""Graph: one structure, every format of it, each built once, when it is first asked for."""

from collections.abc import Callable, Hashable
from typing import Any
from weakref import ref

import numpy as np

from .errors import DtypeError, ShapeError, UnsupportedError
from .formats import checks, primitives
from .formats.arrays import (
    Array,
    allocating,
    finish,
    namespace,
    on_device_of,
    to_device,
)
from .formats.base import Format, Shaped
from .formats.built import Built, Made
from .formats.cbsr import CBSR
from .formats.compressed import CSC, CSR
from .formats.convert import numbered_csr
from .formats.coo import COO
from .formats.sgt import DEFAULT_TILE, SGT, check_tile
from .interop.edges import Edges, edges_of
from .interop.pyg import from_edge_index
from .reorder import Order
from .stats import Stats, summarize


class Graph(Shaped):
    """One sparse structure and every format of it, each built once.

    Rows are target vertices, columns source vertices.  Whatever has a value for each edge is in the
    order in which the user gave the edges, that of ``structure``; ``csr_perm`` leads to the order
    of ``csr``, from which every format here comes, ``coo`` too.

    Parameters
    ----------
    structure : COO, CSR, CSC or SGT
        Kept, not copied, and never changed.

    Raises
    ------
    UnsupportedError
        If ``structure`` is a CBSR, which holds features.
    DtypeError
        If ``structure`` is no format.

    Notes
    -----
    Thread-safe and stream-safe: what several threads ask for at once is built once, and on a GPU
    formats are finished before anyone gets them (what torch's stream builds another one waits for),
    so ask before a CUDA graph is captured.  The arrays are the
    graph's own: read them, do not write to them.  Pickling keeps the structure and drops what was
    built of it.
    """

    __slots__ = ("__weakref__", "_built", "_flipped")
    _built: "GraphBuilt"
    _flipped: bool

    def __init__(self, structure: Format) -> None:
        if isinstance(structure, CBSR):
            raise UnsupportedError("structure is a CBSR, which holds features: give CSR, COO, ...")
        if not isinstance(structure, Format):
            raise DtypeError(
                f"structure is a {type(structure).__name__}: give a COO, CSR, CSC or SGT, or use "
                "Graph.from_edge_index."
            )
        if checks.DEBUG:
            structure.check()
        self._built, self._flipped = GraphBuilt(structure), False
        self._built.graphs[False] = ref(self)

    @classmethod
    def _on(cls, built: "GraphBuilt", flipped: bool) -> "Graph":
        """Return the graph, or its transpose, over what was built; the same one while it lives."""
        with built.lock:
            there = built.graphs[flipped]
            found: Graph | None = None if there is None else there()
            if found is None:
                found = object.__new__(cls)
                found._built, found._flipped = built, flipped
                built.graphs[flipped] = ref(found)
            return found

    def _ask(self, *key: Any, build: Callable[[], Made]) -> Made:
        return self._built.ask((*key, self._flipped), build)

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Any,
        edge_weight: Any = None,
        *,
        num_nodes: int | tuple[int, int] | None = None,
    ) -> "Graph":
        """Make a graph from PyG's arrays: ``edge_index[0]`` are sources, ``edge_index[1]`` targets.

        Arguments and errors are those of ``sparsefmt.from_edge_index``.

        Notes
        -----
        Of CUDA tensors nothing is built here, and with ``num_nodes`` nothing waits for the GPU: the
        first function of ``sparsefmt.autograd`` builds what it needs on torch's stream.  Ids are
        checked there.  A wrong one raises ``IndexRangeError`` at the first use of this graph that
        finds the GPU done, and at the latest where a format of it is asked for, ``graph.structure``
        for instance; if the graph is gone by then, at the next build of another one.  Until then
        the edge counts as one of vertex 0, so that nothing reads or writes foreign memory.  With
        ``SPARSEFMT_DEBUG=1`` ids are checked here.
        """
        edges = edges_of(edge_index, edge_weight, num_nodes)
        if edges is None:
            return cls(from_edge_index(edge_index, edge_weight, num_nodes=num_nodes))
        if checks.DEBUG:
            edges.coo()  # synchronize!
        return cls._on(GraphBuilt(edges=edges), False)

    # The formats

    @property
    def structure(self) -> Format:
        """What the graph was made from, in the user's order (of a transpose: its transpose)."""
        given: Format = self._built.structure
        if not self._flipped:
            return given
        if isinstance(given, SGT):  # whose transpose is a conversion, into another order
            given = self._built.csr()[0]
        transposed: COO | CSR | CSC = given.T  # type: ignore[attr-defined]
        return transposed

    @property
    def csr(self) -> CSR:
        """As CSR, with ``csr_perm``; entries of a row in the user's order."""
        return self._built.csc()[0].T if self._flipped else self._built.csr()[0]

    @property
    def csc(self) -> CSC:
        """As CSC, with ``csc_perm``; entries of a column in CSR order."""
        return self._built.csr()[0].T if self._flipped else self._built.csc()[0]

    @property
    def coo(self) -> COO:
        """As COO in CSR order; shares the columns and values of ``csr``."""
        return self._ask("coo", build=lambda: self.csr.tocoo())

    def sgt(self, tile: tuple[int, int] = DEFAULT_TILE) -> SGT:
        """Give condensed tiles of ``tile = (height, width)``, built once for each shape."""
        tile = check_tile(tile)
        given = self._built.structure
        if isinstance(given, SGT) and given.tile == tile and not self._flipped:
            return given
        return self._ask("sgt", tile, build=lambda: self.csr.tosgt(tile))

    @property
    def transposed(self) -> "Graph":
        """The graph of ``A.T``, whose transpose is this one; what either builds serves both."""
        return Graph._on(self._built, not self._flipped)

    # Edge values

    @property
    def csr_perm(self) -> Array:
        """(nnz,) from the user's order to CSR order: ``csr.data == given[csr_perm]``."""
        numbers = self._csr_numbers
        if numbers is None:
            indices = self._built.structure._indices
            return self._ask(
                "csr_perm", build=lambda: namespace(indices).arange(self.nnz, dtype=indices.dtype)
            )
        return numbers

    @property
    def _csr_numbers(self) -> Array | None:
        """``csr_perm``, None where the user gave the edges in that order."""
        built = self._built
        numbers = built.csr()[1]
        if not self._flipped:
            return numbers
        moved = built.csc()[1]
        if numbers is None:
            return moved
        return self._ask("csr_perm", build=lambda: numbers[moved])

    @property
    def csc_perm(self) -> Array:
        """(nnz,) from CSR order to CSC order: ``csc.data == csr.data[csc_perm]``."""
        return self._built.inverse() if self._flipped else self._built.csc()[1]

    def with_data(self, data: Any) -> "Graph":
        """Give the same structure other edge values, in the order of ``structure``, or none.

        What was built is shared, its values exchanged.

        Raises
        ------
        ShapeError, DtypeError, DeviceError
            If ``data`` is not one value per stored entry.
        """
        return Graph._on(self._built.with_data(data), self._flipped)

    def reordered(self, order: Order) -> "Graph":
        """Give the graph with its vertices in another order: vertex ``p`` is the old ``perm[p]``.

        Edges keep the order in which they were given, as a COO, and so do their values; features
        and labels go along by ``order.apply_features``, and come back by ``undo_features``.

        Parameters
        ----------
        order : Order
            Of as many vertices, on the device of the graph.

        Raises
        ------
        ShapeError
            If the graph is not square, or has more or fewer vertices.
        DeviceError
            If ``order`` is on another device.
        DtypeError
            If ``order`` is no Order.

        Notes
        -----
        The entries of a row keep their order, so that sums round as before, and a row keeps its
        first, last and evenly spaced entries.  What is drawn at random by the number of a row or of
        an entry (samples, dropout of attention) is drawn anew.
        """
        if not isinstance(order, Order):
            raise DtypeError(f"order is a {type(order).__name__}: give a reorder.Order.")
        if self.shape != (len(order), len(order)):
            raise ShapeError(
                f"graph has shape {self.shape} and order {len(order)} vertices: give one of as "
                "many as the graph has rows, and columns."
            )
        return Graph._on(self._built.reordered(order), self._flipped)

    # What it is

    @property
    def in_degree(self) -> Array:
        """(n_rows,) stored entries of each row: in-neighbours."""
        return self._degree(columns=self._flipped)

    @property
    def out_degree(self) -> Array:
        """(n_cols,) stored entries of each column: out-neighbours."""
        return self._degree(columns=not self._flipped)

    def _degree(self, *, columns: bool) -> Array:
        def build() -> Array:
            csr = self._built.csr()[0]
            if not columns:
                return csr.lengths
            xp = namespace(csr.indices)
            counts = xp.bincount(csr.indices, minlength=csr.n_cols)  # synchronize!
            return counts.astype(csr.index_dtype, copy=False)

        return self._built.ask(("degree", columns), build)

    @property
    def stats(self) -> Stats:
        """Degrees, symmetry, tile density: see ``summarize``; its parts are lazy too."""
        return self._ask("stats", build=lambda: summarize(self.csr))

    @property
    def shape(self) -> tuple[int, int]:
        """(n_rows, n_cols)."""
        rows, cols = self._built.given.shape
        return (cols, rows) if self._flipped else (rows, cols)

    @property
    def nnz(self) -> int:
        """Number of stored entries: edges."""
        return int(self._built.given.nnz)

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:<ordinal>"``."""
        found: str = self._built.given.device
        return found

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """Dtype of the indices."""
        found: np.dtype[Any] = self._built.given.index_dtype
        return found

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Dtype of the edge values, None for an unweighted structure."""
        found: np.dtype[Any] | None = self._built.given.dtype
        return found

    @property
    def weighted(self) -> bool:
        """Whether edges have values."""
        return self._built.given.dtype is not None

    def to(self, device: str) -> "Graph":
        """Move the graph to another device, with all that was built of it; itself if there."""
        probe = self._built.structure._indices[:0]
        if to_device(probe, device) is probe:
            return self
        return Graph._on(self._built.mapped(lambda array: to_device(array, device)), self._flipped)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._built.structure, self._flipped)

    def __repr__(self) -> str:
        values = f"{self.dtype} values" if self.weighted else "unweighted"
        names = ", ".join(self._names())
        return (
            f"Graph({self.n_rows} x {self.n_cols}, nnz={self.nnz}, {values}, "
            f"{self.index_dtype} indices, {self.device}; built: {names or 'nothing'})"
        )

    def _names(self) -> list[str]:
        """Name the properties that have been built for this orientation."""
        keys = [key for key, _ in self._built.items()]
        names = [("csc" if key[0] == "csr" else "csr") for key in keys if key[0] in ("csr", "csc")]
        if not self._flipped:
            names = ["csr" if name == "csc" else "csc" for name in names]
        tiled = [key[1] for key in keys if key[0] == "sgt" and key[-1] == self._flipped]
        names += [f"sgt {height}x{width}" for height, width in tiled]
        return names + ["coo"] * (("coo", self._flipped) in keys)


def _restore(structure: Format, *flipped: Any) -> Graph:
    # Older pickles have a permutation, or None, before the flag.
    return Graph._on(GraphBuilt(structure), flipped[-1])


class GraphBuilt(Built):
    """What a graph and its transpose share: the structure, and all that is built of it.

    A key is a name, arguments, and whether that is one of the transpose.
    """

    def __init__(self, structure: Any = None, *, edges: Edges | None = None) -> None:
        super().__init__()
        self._structure, self.edges = structure, edges
        # Weak: a graph holds this.  Without cycles GPU memory goes back at once.
        self.graphs: list[ref[Any] | None] = [None, None]  # and of its transpose
        # Of the graph and of its transpose; what torch.compile reads while it traces, which would
        # guard the keys of a dict.
        self.tensors: list[Any] = [None, None]
        self.looped: list[Any] = [None, None]  # graphs with self-loops, of the structure alone

    @property
    def given(self) -> Any:
        """What the graph was made from: edges that nobody has looked at yet, or a format."""
        return self.edges if self._structure is None else self._structure

    @property
    def structure(self) -> Any:
        """The format that the graph was made from; of edges, made at first use."""
        if self._structure is None:
            with self.lock:
                if self._structure is None and self.edges is not None:
                    self._structure = self.edges.coo()  # synchronize!
        return self._structure

    def _run(self, key: Hashable, build: Callable[[], Made]) -> Made:
        """Build on the device of the graph, and finish, so that any stream may read it."""
        name = key[0] if isinstance(key, tuple) else key
        with on_device_of(self.structure._indices), allocating(f"{name} of a graph"):
            found = build()
        finish(self.structure._indices)  # synchronize!
        return found

    def csr(self) -> tuple[CSR, Array | None]:
        """Return the CSR, and the permutation from the user's order to it if they differ."""
        return self.ask(("csr", False), self._csr)

    def _csr(self) -> tuple[CSR, Array | None]:
        """Take over what torch has built of the edges, if it has, or build it."""
        made = self.tensors[0]
        return numbered_csr(self.structure) if made is None else made.numbered_csr()

    def csc(self) -> tuple[CSC, Array]:
        """Return the CSC, and the permutation from CSR order to CSC order."""
        return self.ask(("csc", False), self._csc)

    def _csc(self) -> tuple[CSC, Array]:
        made = self.tensors[0]
        found = None if made is None else made.numbered_csc()
        return self.csr()[0].tocsc_with_perm() if found is None else found

    def inverse(self) -> Array:
        """Return the permutation from CSC order to CSR order."""
        return self.ask(("inverse", False), lambda: primitives.inverse(self.csc()[1]))

    def with_data(self, values: Any) -> "GraphBuilt":
        """Share all but the values, which are others in the user's order, or none."""
        other = GraphBuilt(self.structure.with_data(values))
        other.looped = self.looped
        given = other.structure.data
        csr, numbers = self.csr()
        with self.lock:
            parts = {key: part for key, part in self.items() if key[0] != "stats"}
        data = {False: given, True: None}
        if given is not None:
            with on_device_of(given), allocating(f"values of {csr!r}"):
                data[False] = given if numbers is None else given[numbers]
                if ("csc", False) in parts:
                    data[True] = data[False][self.csc()[1]]
        for key, part in parts.items():
            if isinstance(part, Format):
                part = part.with_data(data[key[-1]])
            elif key[0] in ("csr", "csc"):
                part = part[0].with_data(data[key[0] == "csc"]), part[1]
            other.found[key] = part
        return other

    def reordered(self, order: Order) -> "GraphBuilt":
        """Rename the vertices: the structure entry by entry, the CSR with whole rows moved."""
        csr, numbers = self.csr()
        moved, perm = order.apply_with_perm(csr)
        given = self.structure
        with on_device_of(given._indices), allocating(f"{given!r} in another order"):
            coo, places = given.tocoo_with_perm()
            row, col = coo.row, coo.col
            if not isinstance(given, COO):
                back = primitives.inverse(places)
                row, col = row[back], col[back]
            renamed = COO(row, col, given.data, shape=given.shape)
            other = GraphBuilt(order.apply(renamed))
            other.found["csr", False] = moved, perm if numbers is None else numbers[perm]
        finish(given._indices)  # synchronize!
        return other

    def mapped(self, move: Callable[[Array], Array]) -> "GraphBuilt":
        """Build the same of what ``move`` makes of each array; one met twice is moved once."""
        seen: dict[int, tuple[Array, Array]] = {}

        def once(array: Array) -> Array:
            if id(array) not in seen:
                seen[id(array)] = array, move(array)
            return seen[id(array)][1]

        with self.lock:
            parts = {key: part for key, part in self.items() if key[0] != "stats"}
        other = GraphBuilt(_map_arrays(self.structure, once))
        other.found = {key: _map_arrays(part, once) for key, part in parts.items()}
        return other


def _map_arrays(part: Any, move: Callable[[Array], Array]) -> Any:
    if part is None:
        return None
    if isinstance(part, tuple):
        return tuple(_map_arrays(item, move) for item in part)
    if isinstance(part, Format):
        return part._replace(**{name: move(array) for name, array in part._arrays().items()})
    return move(part)
