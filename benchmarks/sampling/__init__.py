"""Benchmarks of products over a sample of each row, and of models with them."""
