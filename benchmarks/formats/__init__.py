"""Benchmarks of conversions."""
