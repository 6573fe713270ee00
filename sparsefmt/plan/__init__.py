"""Composition of sparse and dense primitives: the fastest association of a layer's matrices."""
