"""Edges of several types."""
