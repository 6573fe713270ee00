"""Benchmarks of fused attention, of one layer and of models with it."""
