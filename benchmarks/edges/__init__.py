"""Benchmarks of one number for each entry: SDDMM and the softmax."""
