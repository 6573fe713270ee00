"""Benchmarks of MaxK, of products with its features, and of models with them."""
