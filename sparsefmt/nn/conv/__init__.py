"""Layers that are products along the edges and linear maps, by PyG's names."""
