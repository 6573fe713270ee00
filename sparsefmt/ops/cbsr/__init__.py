"""MaxK-GNN: row-balanced sparse features and their products."""
