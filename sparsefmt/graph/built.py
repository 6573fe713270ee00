"""What a graph and its transpose share: the formats, and slots of the storeys above."""

from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any, cast
from weakref import ref

from ..formats import primitives
from ..formats.arrays import Array, allocating, finish, on_device_of
from ..formats.base import Built, Format, Made
from ..formats.compressed import COO, CSC, CSR
from ..formats.convert import numbered_csr
from ..reorder import Order
from .batch import Facts, Pieces
from .edges import Edges

#: By its name: what makes the content of a slot, of a graph and options.
_makers: dict[str, Callable[..., Any]] = {}
#: The slots of which ``Graph.with_data`` keeps the content: it depends on the structure alone.
_structural: set[str] = set()


def slot(name: str, make: Callable[..., Any], *, structural: bool = False) -> None:
    """Register a slot of graphs for a storey above, which reads ``graph._slots.NAME[flipped]``.

    ``make(graph, *options)`` makes the content for ``Graph._fill(name, *options)``.  A slot that is
    ``structural`` is shared with graphs of other edge values.
    """
    _makers[name] = make
    if structural:
        _structural.add(name)


class Slots:
    """What storeys above keep with a graph and its transpose: two places by the name of a slot.

    They lie apart from ``GraphBuilt``, which their content may hold: there is no cycle, so that
    memory of a GPU goes back at once.  Attributes, since torch.compile guards all keys of a dict.
    """

    def __init__(self, source: "Slots | None" = None) -> None:
        self._shared: dict[str, list[Any]] = {} if source is None else source._shared
        self.lock: Any = RLock() if source is None else source.lock  #: of what is structural

    def __getattr__(self, name: str) -> list[Any]:
        if name not in _makers:
            raise AttributeError(name)
        store = self._shared if name in _structural else self.__dict__
        places: list[Any] = store.setdefault(name, [None, None])
        self.__dict__[name] = places
        return places

    def with_data(self) -> "Slots":
        """Return slots for other edge values, which share what depends on the structure alone."""
        return Slots(self)


class GraphBuilt(Built):
    """What a graph and its transpose share: the structure, and all formats that are built of it.

    A key is a name, arguments, and whether that is one of the transpose.
    """

    def __init__(
        self,
        structure: Format | None = None,
        *,
        edges: Edges | None = None,
        pieces: Pieces | None = None,
    ) -> None:
        super().__init__()
        self._structure, self.edges, self.pieces = structure, edges, pieces
        self.facts: Facts | None = None  # once a batch has read them
        # Weak: both hold this.  Without cycles GPU memory goes back at once.
        self.graphs: list[ref[Any] | None] = [None, None]  # the graph and its transpose
        self.torch_rows: ref[Any] | None = None  #: the ``GraphTensors`` that torch built of edges

    @property
    def source(self) -> Format | Edges | Pieces:
        """Return what the graph was made from: a format, pieces, or edges not yet read."""
        return self._structure or self.edges or cast(Pieces, self.pieces)

    @property
    def structure(self) -> Format:
        """Return the format that the graph was made from; made at first use of edges and pieces."""
        if self._structure is None:
            with self.lock:
                if self._structure is None:
                    edges = self.edges or cast(Pieces, self.pieces)
                    self._structure = edges.coo()  # synchronize!
        return self._structure

    @property
    def probe(self) -> Array:
        """Return an array on the device of the graph."""
        return self.structure._indices if self.pieces is None else self.pieces.probe

    def _run(self, key: Hashable, build: Callable[[], Made]) -> Made:
        """Build on the device of the graph, and finish, so that any stream may read it."""
        name = key[0] if isinstance(key, tuple) else key
        with on_device_of(self.probe), allocating(f"{name} of a graph"):
            made = build()
        finish(self.probe)  # synchronize!
        return made

    def csr(self) -> tuple[CSR, Array | None]:
        """Return the CSR, and the permutation from the user's order to it if they differ."""
        return self.ask(("csr", False), self._csr)

    def _csr(self) -> tuple[CSR, Array | None]:
        """Return what torch has built of the edges, or build it."""
        if self.pieces is not None:
            return self.pieces.csr()
        rows = None if self.torch_rows is None else self.torch_rows()
        built: tuple[CSR, Array | None] | None = None if rows is None else rows.numbered_csr()
        return built or numbered_csr(self.structure)

    def csc(self) -> tuple[CSC, Array]:
        """Return the CSC, and the permutation from CSR order to CSC order."""
        return self.ask(("csc", False), self._csc)

    def _csc(self) -> tuple[CSC, Array]:
        """Return the CSC of pieces or of what torch has built, or build it."""
        if self.pieces is not None:
            return self.pieces.csc()
        source, (csr, numbers) = self._structure, self.csr()
        if isinstance(source, CSC) and numbers is not None:  # no need to sort back
            return source, primitives.inverse(numbers)
        rows = None if self.torch_rows is None else self.torch_rows()
        built: tuple[CSC, Array] | None = None if rows is None else rows.numbered_csc()
        return built or csr.tocsc_with_perm()

    def _join(self) -> None:
        """Join what pieces have built, for a graph that has none to sort less."""
        if self.pieces is not None:
            self.csr()
            self.csc()

    def inverse(self) -> Array:
        """Return the permutation from CSC order to CSR order."""
        return self.ask(("inverse", False), lambda: primitives.inverse(self.csc()[1]))

    def rows(self, transposed: bool) -> CSR:
        """Return the CSR of the graph, or of its transpose."""
        return self.csc()[0].T if transposed else self.csr()[0]

    def numbers(self, flipped: bool) -> Array | None:
        """Return the permutation from the user's order to CSR order, None if they are equal."""
        numbers = self.csr()[1]
        if not flipped:
            return numbers
        moved = self.csc()[1]
        if numbers is None:
            return moved
        return self.ask(("csr_perm", True), lambda: numbers[moved])

    def places(self, flipped: bool) -> Array:
        """Return the permutation from CSR order to CSC order."""
        return self.inverse() if flipped else self.csc()[1]

    def with_data(self, values: Array | None) -> "GraphBuilt":
        """Return the same structure with other values, in the user's order, or none."""
        result = GraphBuilt(self.structure.with_data(values))
        own = result.structure.data
        self._join()
        csr, numbers = self.csr()
        with self.lock:
            parts = {key: part for key, part in self.items() if key[0] != "stats"}
        data: dict[bool, Any] = {False: own, True: None}
        if own is not None:
            with on_device_of(own), allocating(f"values of {csr!r}"):
                data[False] = own if numbers is None else own[numbers]
                if ("csc", False) in parts:
                    data[True] = data[False][self.csc()[1]]
        for key, part in parts.items():
            if isinstance(part, Format):
                part = part.with_data(data[key[-1]])
            elif key[0] in ("csr", "csc"):
                part = part[0].with_data(data[key[0] == "csc"]), part[1]
            result.found[key] = part
        return result

    def reordered(self, order: Order) -> "GraphBuilt":
        """Move the vertices: the structure entry by entry, the CSR by rows."""
        csr, numbers = self.csr()
        moved, perm = order.apply_with_perm(csr)
        source = self.structure
        with on_device_of(source._indices), allocating(f"{source!r} in another order"):
            coo, places = source.tocoo_with_perm()
            row, col = coo.row, coo.col
            if not isinstance(source, COO):
                back = primitives.inverse(places)
                row, col = row[back], col[back]
            renamed = COO(row, col, source.data, shape=source.shape)
            result = GraphBuilt(order.apply(renamed))
            result.found["csr", False] = moved, perm if numbers is None else numbers[perm]
        finish(source._indices)  # synchronize!
        return result

    def mapped(self, move: Callable[[Array], Array]) -> "GraphBuilt":
        """Copy all that was built, each array by ``move``, which is called once for each."""
        seen: dict[int, tuple[Array, Array]] = {}

        def moved(array: Array) -> Array:
            if id(array) not in seen:
                seen[id(array)] = array, move(array)
            return seen[id(array)][1]

        self._join()
        with self.lock:
            parts = {key: part for key, part in self.items() if key[0] != "stats"}
        result = GraphBuilt(_map_arrays(self.structure, moved))
        result.found = {key: _map_arrays(part, moved) for key, part in parts.items()}
        return result


def _map_arrays(part: Any, move: Callable[[Array], Array]) -> Any:
    """Copy a format, a tuple or an array, each array by ``move``."""
    if part is None:
        return None
    if isinstance(part, tuple):
        return tuple(_map_arrays(item, move) for item in part)
    if isinstance(part, Format):
        return part._replace(**{name: move(array) for name, array in part._arrays().items()})
    return move(part)
