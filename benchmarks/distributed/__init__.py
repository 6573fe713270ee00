"""Benchmarks of training over several ranks."""
