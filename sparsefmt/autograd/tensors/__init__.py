"""Graphs as torch tensors."""
