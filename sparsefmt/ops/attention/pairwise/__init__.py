"""Attention whose scores are functions of both ends' features (GATv2, dot products)."""
