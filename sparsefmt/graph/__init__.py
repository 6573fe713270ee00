"""One structure, and what is built of it."""

from .graph import Graph as Graph
from .graph import _restore as _restore  # earlier pickles name it here

__all__ = ["Graph"]
