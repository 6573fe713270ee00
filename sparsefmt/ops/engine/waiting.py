"""Who is told when a compiler is waited for: the command line says so."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_told: ContextVar[Callable[[], object] | None] = ContextVar("told", default=None)


@contextmanager
def told(function: Callable[[], object]) -> Iterator[None]:
    """Call the function before each loop or kernel that is compiled in this context."""
    token = _told.set(function)
    try:
        yield
    finally:
        _told.reset(token)


def tell() -> None:
    """Call the function that waits to hear of a compilation."""
    function = _told.get()
    if function is not None:
        function()
