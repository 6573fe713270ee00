"""Fused attention: GAT, GATv2 and dot products."""
