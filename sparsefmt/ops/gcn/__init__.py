"""GCN's symmetric normalisation of edge values, and its gradient."""
