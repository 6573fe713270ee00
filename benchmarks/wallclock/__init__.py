"""Benchmarks of what a user waits for: wall time, the host's included."""
