"""Benchmarks of messages with features of edges."""
