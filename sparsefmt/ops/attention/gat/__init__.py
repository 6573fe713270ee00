"""Attention whose scores are sums of a number for each end of an edge (GAT)."""
