"""Benchmarks of condensed tiles: products, translation, and models with them."""
