"""Formats of a graph in memory, their conversions and checks, and what is built once of them."""
