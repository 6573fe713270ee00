"""Benchmarks of every operation at once: host time of a call, digests of results."""
