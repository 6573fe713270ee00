"""The one place for what is built once of a structure, or of its values."""

from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any, TypeVar

Made = TypeVar("Made")


class Built:
    """What was built of a structure, or of its values: each once, for all that share them."""

    def __init__(self) -> None:
        self._lock = RLock()  # what is built may ask for something else
        self._parts: dict[Hashable, Any] = {}

    def parts(self) -> list[Any]:
        """All that was built and kept."""
        with self._lock:
            return [*self._parts.values()]

    def has(self, key: Hashable) -> bool:
        """Whether the part of that key has been built."""
        return key in self._parts

    def ask(self, key: Hashable, build: Callable[[], Made], *, keep: bool = True) -> Made:
        """The part of that key; one that is built now is kept only where told."""
        found: Made | None = self._parts.get(key)  # most calls: no part is None
        if found is not None:
            return found
        with self._lock:
            found = self._parts[key] if key in self._parts else build()
            if keep:
                self._parts[key] = found
            return found
