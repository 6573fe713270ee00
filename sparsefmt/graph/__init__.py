"""One structure, and what is built of it."""

from .graph import Graph as Graph

__all__ = ["Graph"]
