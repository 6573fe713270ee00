"""Graph: one structure, every format of it, each built once, when it is first asked for."""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import numpy as np

from ..errors import DtypeError, ShapeError, UnsupportedError
from ..formats import checks
from ..formats.arrays import Array, namespace, to_device
from ..formats.base import Format, Made, Shaped
from ..formats.cbsr import CBSR
from ..formats.compressed import COO, CSC, CSR
from ..formats.sgt import DEFAULT_TILE, SGT, check_tile
from ..interop import adjacency
from ..interop.pyg import edges_of_store, from_edge_index, is_hetero, parts_of, stores_of
from ..reorder import Order
from ..stats import Stats, summarize
from .batch import Pieces, checked
from .batch import edges_of as joined_edges_of
from .built import GraphBuilt as GraphBuilt
from .built import Slots, _makers, _structural
from .edges import edges_of


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
    built of it; ``torch.load`` takes a graph as it takes tensors, and checks it, once a function or
    layer has been imported of ``sparsefmt.autograd`` or ``nn``.
    """

    __slots__ = ("__weakref__", "_built", "_flipped", "_slots")
    _built: "GraphBuilt"
    _flipped: bool
    _slots: Slots

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
        self._built, self._flipped, self._slots = GraphBuilt(structure), False, Slots()
        self._built.graphs[False] = ref(self)

    @classmethod
    def _on(cls, built: "GraphBuilt", flipped: bool, slots: Slots | None = None) -> "Graph":
        """Return the graph, or its transpose, over what was built; the same one while it lives."""
        with built.lock:
            weak = built.graphs[flipped]
            graph: Graph | None = None if weak is None else weak()
            if graph is None:
                graph = object.__new__(cls)
                graph._built, graph._flipped = built, flipped
                graph._slots = Slots() if slots is None else slots
                built.graphs[flipped] = ref(graph)
            return graph

    def _fill(self, slot: str, *options: Any) -> bool:
        """Make the content of a slot, see ``slot``, if it is missing."""
        places, at = getattr(self._slots, slot), int(self._flipped)
        with self._slots.lock if slot in _structural else self._built.lock:
            if places[at] is None:
                places[at] = _makers[slot](self, *options)
        return True

    # torch.compile runs this while it traces, then traces on with what was made.  As a method only:
    # of a function's argument it would guard the identity, and compile for each graph anew.
    _fill._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _ask(self, *key: Any, build: Callable[[], Made]) -> Made:
        """Return what was built for the key and this direction, or build it."""
        return self._built.ask((*key, self._flipped), build)

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Any,
        edge_weight: Array | None = None,
        *,
        num_nodes: int | tuple[int, int] | None = None,
        batch: Array | None = None,
    ) -> "Graph":
        """Make a graph from PyG's arrays: ``edge_index[0]`` are sources, ``edge_index[1]`` targets.

        Parameters
        ----------
        edge_index : array or tensor, tuple of two, EdgeIndex, sparse tensor or SparseTensor
            As for ``sparsefmt.from_edge_index``.  Of an ``EdgeIndex`` on the CPU that is sorted
            nothing is sorted again: by targets ("col") it is CSR, by sources ("row") CSC.  An
            ``adj_t``, a sparse tensor whose rows are targets, is taken in the format that it has.
        edge_weight, num_nodes : optional
            As for ``sparsefmt.from_edge_index``.
        batch : array or tensor, shape (n,), optional
            PyG's: the number of each vertex's graph.  It gives ``num_nodes``, for which nothing
            waits; with ``SPARSEFMT_DEBUG=1`` an edge between two graphs is refused.

        Raises
        ------
        ShapeError, DtypeError, IndexRangeError, DeviceError, UnsupportedError
            As ``sparsefmt.from_edge_index``.
        FormatError
            If an ``EdgeIndex`` is not sorted as it says.

        Notes
        -----
        Of CUDA tensors nothing is built here, and with ``num_nodes`` nothing waits for the GPU: the
        first function of ``sparsefmt.autograd`` builds what it needs on torch's stream.  Ids are
        checked there.  A wrong one raises ``IndexRangeError`` at the first use of this graph that
        finds the GPU done, and at the latest where a format of it is asked for, ``graph.structure``
        for instance; if the graph is gone by then, at the next build of another one.  Until then
        the edge counts as one of vertex 0, so that nothing reads or writes foreign memory.  With
        ``SPARSEFMT_DEBUG=1`` ids are checked here.

        The graph may share the memory of ``edge_index`` and ``edge_weight``: do not write to them.
        """
        if batch is not None:
            num_nodes = adjacency.vertices_of(batch, num_nodes)
        graph = cls._of_edges(edge_index, edge_weight, num_nodes)
        if checks.DEBUG and batch is not None:
            adjacency.refuse_crossing(graph.structure, batch)  # synchronize!
        return graph

    @classmethod
    def _of_edges(cls, edge_index: Any, edge_weight: Array | None, num_nodes: Any) -> "Graph":
        """Make a graph of edges, as ``from_edge_index`` takes them."""
        edges = edges_of(edge_index, edge_weight, num_nodes)
        if edges is None and adjacency.is_adj_t(edge_index):
            return cls(adjacency.structure_of(edge_index, edge_weight, num_nodes))
        if edges is None and adjacency.is_edge_index(edge_index):
            num_nodes = adjacency.known_sizes(edge_index) if num_nodes is None else num_nodes
            structure = adjacency.sorted_structure(edge_index, edge_weight, num_nodes)
            if structure is not None:
                return cls(structure)
            edge_index = edge_index.as_tensor()
            edges = edges_of(edge_index, edge_weight, num_nodes)
        if edges is None:
            return cls(from_edge_index(edge_index, edge_weight, num_nodes=num_nodes))
        if checks.DEBUG:
            edges.coo()  # synchronize!
        return cls._on(GraphBuilt(edges=edges), False)

    @classmethod
    def from_pyg(cls, data: Any) -> Any:
        """Make a graph from a ``torch_geometric.data.Data``: its ``adj_t``, or its ``edge_index``.

        Of a ``HeteroData`` a dict: for each edge type ``(source, relation, target)`` that has edges
        its graph, of as many rows as there are targets and columns as there are sources.  Weights
        are chosen as by ``sparsefmt.from_pyg``; notes and errors are those of
        ``Graph.from_edge_index`` and of that function.
        """
        if is_hetero(data):
            return {
                edge_type: cls.from_edge_index(*edges_of_store(store), num_nodes=sizes)
                for edge_type, (store, sizes) in stores_of(data).items()
            }
        edge_index, edge_weight, num_nodes = parts_of(data)
        return cls.from_edge_index(edge_index, edge_weight, num_nodes=num_nodes)

    @classmethod
    def batch(cls, graphs: Iterable["Graph"]) -> "Graph":
        """Join graphs side by side in one, whose matrix has theirs on its diagonal.

        Vertices are those of the first graph, then those of the second and so on, as PyG's
        ``Batch`` has them, and so are edges, each in the order of its ``structure``.

        Parameters
        ----------
        graphs : iterable of Graph
            One or more, of any shapes, empty ones too, on one device.  All with edge values of one
            dtype, or all without; index dtypes alike.

        Returns
        -------
        Graph, shape (sum of rows, sum of columns)

        Raises
        ------
        ShapeError
            If there is no graph.
        DtypeError, DeviceError
            If there is something else, or graphs differ in what they are to have in common.
        IndexRangeError
            If there are more rows, columns or entries than the index dtype counts.

        Notes
        -----
        What each graph builds once, its CSR and CSC with their permutations, is concatenated when
        it is first asked for, and not sorted again: keep the graphs of a data set, and batch them
        anew in each epoch.  Of graphs made of CUDA tensors the edges are concatenated, in a few
        launches and without a wait, and torch builds what it needs as for ``from_edge_index``, ids
        that one of them does not have being reported as there.
        """
        pieces = Pieces(checked(graphs, Graph))
        edges = joined_edges_of(pieces)
        if edges is not None:
            return cls._on(GraphBuilt(edges=edges), False)
        return cls._on(GraphBuilt(pieces=pieces), False)

    # The formats

    @property
    def structure(self) -> Format:
        """Return what the graph was made from, in the user's order, or its transpose."""
        source = self._built.structure
        if self._flipped:
            # The transpose of an SGT is a conversion, into another order.
            return self._built.csr()[0].T if isinstance(source, SGT) else source.T  # type: ignore[attr-defined]
        return source

    @property
    def csr(self) -> CSR:
        """Return the graph as CSR, with ``csr_perm``; entries of a row in the user's order."""
        return self._built.rows(self._flipped)

    @property
    def csc(self) -> CSC:
        """Return the graph as CSC, with ``csc_perm``; a column in CSR order, or as in a CSC."""
        return self._built.csr()[0].T if self._flipped else self._built.csc()[0]

    @property
    def coo(self) -> COO:
        """Return the graph as COO in CSR order; shares the columns and values of ``csr``."""
        return self._ask("coo", build=lambda: self.csr.tocoo())

    def sgt(self, tile: tuple[int, int] = DEFAULT_TILE) -> SGT:
        """Return condensed tiles of ``tile = (height, width)``, built once for each shape."""
        tile = check_tile(tile)
        source = self._built.structure
        if isinstance(source, SGT) and source.tile == tile and not self._flipped:
            return source
        return self._ask("sgt", tile, build=lambda: self.csr.tosgt(tile))

    @property
    def transposed(self) -> "Graph":
        """Return the graph of ``A.T``, whose transpose is this one; they share what is built."""
        return Graph._on(self._built, not self._flipped, self._slots)

    # Edge values

    @property
    def csr_perm(self) -> Array:
        """Return (nnz,) from the user's order to CSR order: ``csr.data == given[csr_perm]``."""
        numbers = self._built.numbers(self._flipped)
        if numbers is None:
            indices = self._built.structure._indices
            return self._ask(
                "csr_perm", build=lambda: namespace(indices).arange(self.nnz, dtype=indices.dtype)
            )
        return numbers

    @property
    def csc_perm(self) -> Array:
        """Return (nnz,) from CSR order to CSC order: ``csc.data == csr.data[csc_perm]``."""
        return self._built.places(self._flipped)

    def with_data(self, data: Array | None) -> "Graph":
        """Return the same structure with other edge values, in the order of ``structure``, or none.

        What was built is shared, its values exchanged.

        Raises
        ------
        ShapeError, DtypeError, DeviceError
            If ``data`` is not one value per stored entry.
        """
        return Graph._on(self._built.with_data(data), self._flipped, self._slots.with_data())

    def reordered(self, order: Order) -> "Graph":
        """Return the graph with its vertices in another order: vertex ``p`` is the old ``perm[p]``.

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
        """Return (n_rows,) stored entries of each row: in-neighbours."""
        return self._degree(columns=self._flipped)

    @property
    def out_degree(self) -> Array:
        """Return (n_cols,) stored entries of each column: out-neighbours."""
        return self._degree(columns=not self._flipped)

    def _degree(self, *, columns: bool) -> Array:
        """Count the entries of each row, or column."""

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
        """Compute degrees, symmetry, tile density: see ``summarize``; its parts are lazy too."""
        return self._ask("stats", build=lambda: summarize(self.csr))

    @property
    def shape(self) -> tuple[int, int]:
        """Return (n_rows, n_cols)."""
        rows, cols = self._built.source.shape
        return (cols, rows) if self._flipped else (rows, cols)

    @property
    def nnz(self) -> int:
        """Return the number of stored entries: edges."""
        return int(self._built.source.nnz)

    @property
    def device(self) -> str:
        """Return ``"cpu"`` or ``"cuda:<ordinal>"``."""
        return self._built.source.device

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """Return the dtype of the indices."""
        return self._built.source.index_dtype

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Return the dtype of the edge values, None for an unweighted structure."""
        return self._built.source.dtype

    @property
    def weighted(self) -> bool:
        """Return True if edges have values."""
        return self._built.source.dtype is not None

    def to(self, device: str) -> "Graph":
        """Move the graph to another device, with all that was built of it; itself if there."""
        probe = self._built.probe[:0]
        if to_device(probe, device) is probe:
            return self
        return Graph._on(self._built.mapped(lambda array: to_device(array, device)), self._flipped)

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (self._built.structure, self._flipped)

    def __repr__(self) -> str:
        values = f"{self.dtype} values" if self.weighted else "unweighted"
        names = ", ".join(self._names())
        return (
            f"Graph({self.n_rows} x {self.n_cols}, nnz={self.nnz}, {values}, "
            f"{self.index_dtype} indices, {self.device}; built: {names or 'nothing'})"
        )

    def _names(self) -> list[str]:
        """List the properties that have been built for this orientation."""
        keys = [key for key, _ in self._built.items()]
        both = ("csc", "csr") if self._flipped else ("csr", "csc")
        names = [both[key[0] == "csc"] for key in keys if key[0] in ("csr", "csc")]
        tiled = [key[1] for key in keys if key[0] == "sgt" and key[-1] == self._flipped]
        names += [f"sgt {height}x{width}" for height, width in tiled]
        return names + ["coo"] * (("coo", self._flipped) in keys)


def restored(structure: Format, *flipped: Any) -> Graph:
    """Make the graph of a pickle."""
    # Older pickles have a permutation, or None, before the flag.
    graph = Graph(structure)
    return graph.transposed if flipped[-1] else graph


_restore = restored  # the name in older pickles
