"""Benchmarks: ``python -m benchmarks NAME``; each refuses to report when its own check fails."""
