"""Classify papers by two layers of graph attention."""

import torch
import torch.nn.functional as F
from pyg_script_data import CLASSES, citations
from torch_geometric.nn import GATConv


class GAT(torch.nn.Module):
    def __init__(self, n_in, n_hidden, n_out, heads, dropout=0.0):
        super().__init__()
        self.first = GATConv(n_in, n_hidden, heads, dropout=dropout)
        self.last = GATConv(n_hidden * heads, n_out, heads=1, concat=False, dropout=dropout)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.6, training=self.training)
        x = F.elu(self.first(x, edge_index))
        x = F.dropout(x, p=0.6, training=self.training)
        return self.last(x, edge_index)


data = citations()
model = GAT(data.num_features, 8, CLASSES, heads=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
losses, accuracies = [], []
for _ in range(12):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        found = model(data.x, data.edge_index).argmax(dim=-1)
    accuracies.append(float((found == data.y)[data.test_mask].double().mean()))
