"""TC-GNN: products by condensed tiles, on tensor cores where they pay."""
