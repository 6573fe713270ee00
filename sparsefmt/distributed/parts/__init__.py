"""Partitions of a graph, and the files that hold them; no torch."""
