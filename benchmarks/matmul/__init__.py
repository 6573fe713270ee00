"""Benchmarks of ``A @ X``: SpMM, and aggregation with both gradients."""
