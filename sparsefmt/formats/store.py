"""What a graph and its transpose share: the structure, what was built of it, and one lock."""

from collections.abc import Callable
from threading import RLock
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from . import primitives
from .arrays import Array, allocating, finish, on_device_of
from .base import Format
from .compressed import CSC, CSR

#: Name, arguments, and whether the part is one of the transpose.
Key: TypeAlias = tuple[Any, ...]


class Store:
    """The parts of a graph, each built once under the lock."""

    def __init__(self, structure: Any, perm: Array | None = None) -> None:
        self.structure = structure
        self.perm = perm  # user's order -> CSR order, where the structure no longer tells
        self.parts: dict[Key, Any] = {}
        self.lock = RLock()
        # Weak, since a graph holds its store: without cycles GPU memory goes back at once.
        self.graphs: WeakValueDictionary[bool, Any] = WeakValueDictionary()
        # The graph with self-loops, and that of the transpose: of the structure alone.
        self.looped: list[Any] = [None, None]

    def ask(self, key: Key, build: Callable[[], Any]) -> Any:
        """The part of that name, built and finished if nobody has asked for it before."""
        with self.lock:
            if key not in self.parts:
                with on_device_of(self.structure._indices), allocating(f"{key[0]} of a graph"):
                    part = build()
                finish(self.structure._indices)  # synchronize!
                self.parts[key] = part
            return self.parts[key]

    def csr(self) -> tuple[CSR, Array]:
        """CSR, and the permutation from the user's order to CSR order."""

        def build() -> tuple[CSR, Array]:
            if self.perm is not None:
                return self.structure, self.perm
            pair: tuple[CSR, Array] = self.structure.tocsr_with_perm()
            return pair

        pair: tuple[CSR, Array] = self.ask(("csr", False), build)
        return pair

    def csc(self) -> tuple[CSC, Array]:
        """CSC, and the permutation from CSR order to CSC order."""
        pair: tuple[CSC, Array] = self.ask(("csc", False), lambda: self.csr()[0].tocsc_with_perm())
        return pair

    def inverse(self) -> Array:
        """The permutation from CSC order to CSR order."""
        found: Array = self.ask(("inverse", False), lambda: primitives.inverse(self.csc()[1]))
        return found

    def with_data(self, csr: CSR) -> "Store":
        """A store of the same structure with the values of ``csr``; shares all other arrays."""
        other = Store(csr, self.csr()[1])
        other.looped = self.looped
        with self.lock:
            parts = {
                key: part for key, part in self.parts.items() if key[0] not in ("csr", "stats")
            }
        data = {False: csr.data, True: None}
        if csr.data is not None and ("csc", False) in parts:
            with on_device_of(csr.data), allocating(f"values of {csr!r}"):
                data[True] = csr.data[self.csc()[1]]
        for key, part in parts.items():
            if isinstance(part, Format):
                part = part.with_data(data[key[-1]])
            elif key[0] == "csc":
                part = part[0].with_data(data[True]), part[1]
            other.parts[key] = part
        return other

    def mapped(self, move: Callable[[Array], Array]) -> "Store":
        """A store of what ``move`` makes of each array; an array met twice is moved once."""
        seen: dict[int, tuple[Array, Array]] = {}

        def once(array: Array) -> Array:
            if id(array) not in seen:
                seen[id(array)] = array, move(array)
            return seen[id(array)][1]

        with self.lock:
            parts = {key: part for key, part in self.parts.items() if key[0] != "stats"}
        perm = None if self.perm is None else once(self.perm)
        other = Store(_map_arrays(self.structure, once), perm)
        other.parts = {key: _map_arrays(part, once) for key, part in parts.items()}
        return other


def _map_arrays(part: Any, move: Callable[[Array], Array]) -> Any:
    if isinstance(part, tuple):
        return tuple(_map_arrays(one, move) for one in part)
    if isinstance(part, Format):
        return part._replace(**{name: move(array) for name, array in part._arrays().items()})
    return move(part)
