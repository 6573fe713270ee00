"""What a graph and its transpose share: the structure, and all that is built of it, each once."""

from collections.abc import Callable, Hashable
from typing import Any
from weakref import ref

from ..formats import primitives
from ..formats.arrays import Array, allocating, finish, on_device_of
from ..formats.base import Format
from ..formats.built import Built, Made
from ..formats.compressed import CSC, CSR
from ..formats.convert import numbered_csr
from ..formats.coo import COO
from ..reorder import Order
from .batch import Pieces
from .blocks import Facts
from .edges import Edges


class GraphBuilt(Built):
    """What a graph and its transpose share: the structure, and all that is built of it.

    A key is a name, arguments, and whether that is one of the transpose.
    """

    def __init__(
        self, structure: Any = None, *, edges: Edges | None = None, pieces: Pieces | None = None
    ) -> None:
        super().__init__()
        self._structure, self.edges, self.pieces = structure, edges, pieces
        self.facts: Facts | None = None  # once a batch has asked for them
        # Weak: a graph holds this.  Without cycles GPU memory goes back at once.
        self.graphs: list[ref[Any] | None] = [None, None]  # and of its transpose
        # Of the graph and of its transpose; what torch.compile reads while it traces, which would
        # guard the keys of a dict.
        self.tensors: list[Any] = [None, None]
        self.looped: list[Any] = [None, None]  # graphs with self-loops, of the structure alone
        self.typed: list[Any] = [None, None]  # graphs of groups of edges, by the types of edges

    @property
    def given(self) -> Any:
        """What the graph was made from: a format, pieces, or edges that nobody has looked at."""
        if self._structure is not None:
            return self._structure
        return self.pieces if self.edges is None else self.edges

    @property
    def structure(self) -> Any:
        """The format that the graph was made from; of edges and pieces, made at first use."""
        if self._structure is None:
            with self.lock:
                if self._structure is None:
                    self._structure = self._given_edges()  # synchronize!
        return self._structure

    def _given_edges(self) -> Any:
        """Give the edges of a tensor, or join those of pieces, where they are."""
        if self.pieces is None:
            return self.given.coo()
        with on_device_of(self.probe), allocating("edges of a batch of graphs"):
            found = self.pieces.coo()
        finish(self.probe)
        return found

    @property
    def probe(self) -> Array:
        """An array on the device of the graph."""
        pieces = self.pieces
        found: Array = self.structure._indices if pieces is None else pieces.probe
        return found

    def _run(self, key: Hashable, build: Callable[[], Made]) -> Made:
        """Build on the device of the graph, and finish, so that any stream may read it."""
        name = key[0] if isinstance(key, tuple) else key
        with on_device_of(self.probe), allocating(f"{name} of a graph"):
            found = build()
        finish(self.probe)  # synchronize!
        return found

    def csr(self) -> tuple[CSR, Array | None]:
        """Return the CSR, and the permutation from the user's order to it if they differ."""
        return self.ask(("csr", False), self._csr)

    def _csr(self) -> tuple[CSR, Array | None]:
        """Take over what torch has built of the edges, if it has, or build it."""
        if self.pieces is not None:
            return self.pieces.csr()
        made = self.tensors[0]
        return numbered_csr(self.structure) if made is None else made.numbered_csr()

    def csc(self) -> tuple[CSC, Array]:
        """Return the CSC, and the permutation from CSR order to CSC order."""
        return self.ask(("csc", False), self._csc)

    def _csc(self) -> tuple[CSC, Array]:
        if self.pieces is not None:
            return self.pieces.csc()
        given, (csr, numbers) = self._structure, self.csr()
        if isinstance(given, CSC) and numbers is not None:  # no need to sort back
            return given, primitives.inverse(numbers)
        made = self.tensors[0]
        found = None if made is None else made.numbered_csc()
        return csr.tocsc_with_perm() if found is None else found

    def _join(self) -> None:
        """Join what pieces have built, for a graph that has none to sort less."""
        if self.pieces is not None:
            self.csr()
            self.csc()

    def inverse(self) -> Array:
        """Return the permutation from CSC order to CSR order."""
        return self.ask(("inverse", False), lambda: primitives.inverse(self.csc()[1]))

    def with_data(self, values: Any) -> "GraphBuilt":
        """Share all but the values, which are others in the user's order, or none."""
        other = GraphBuilt(self.structure.with_data(values))
        other.looped = self.looped
        given = other.structure.data
        self._join()
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

        self._join()
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
