"""The one place for what is built once: of a structure, of its values, of a graph."""

from _thread import RLock  # ``threading`` has a function around it
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Made = TypeVar("Made")


class Built:
    """What was built of a structure, or of its values: each once, for all that share them.

    What is there is found without a lock.  Who builds holds it, so that nobody else builds too.
    """

    def __init__(self) -> None:
        self.lock = RLock()  # what is built may ask for something else
        self.found: dict[Hashable, Any] = {}  #: written to under the lock

    def ask(
        self, key: Hashable, build: Callable[[], Made], keep: Callable[[Made], bool] | None = None
    ) -> Made:
        """Return what was built for the key, or build it; ``keep`` may decline to store it."""
        found: Made | None = self.found.get(key)  # most calls: hardly anything is None
        if found is not None:
            return found
        with self.lock:
            if key in self.found:
                there: Made = self.found[key]
                return there
            made = self._run(key, build)
            if keep is None or keep(made):
                self.found[key] = made
            return made

    def items(self) -> list[tuple[Any, Any]]:
        """List what was built, with its keys."""
        with self.lock:
            return [*self.found.items()]

    def _run(self, key: Hashable, build: Callable[[], Made]) -> Made:
        """Build what nobody has asked for before, under the lock."""
        return build()
