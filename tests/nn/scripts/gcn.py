"""Classify papers by GCN, on the whole graph."""

import torch
import torch.nn.functional as F
from pyg_script_data import CLASSES, citations
from torch_geometric.nn import GCNConv


class GCN(torch.nn.Module):
    def __init__(self, n_in, n_hidden, n_out):
        super().__init__()
        self.first = GCNConv(n_in, n_hidden, cached=True)
        self.last = GCNConv(n_hidden, n_out, cached=True)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.5, training=self.training)
        x = F.relu_(self.first(x, edge_index))
        x = F.dropout(x, p=0.5, training=self.training)
        return self.last(x, edge_index).log_softmax(dim=1)


data = citations()
model = GCN(data.num_features, 16, CLASSES)
parts = [
    {"params": model.first.parameters(), "weight_decay": 5e-4},
    {"params": model.last.parameters(), "weight_decay": 0},
]
optimizer = torch.optim.Adam(parts, lr=0.01)
losses, accuracies = [], []
for _ in range(12):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.nll_loss(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        found = model(data.x, data.edge_index).argmax(dim=1)
    accuracies.append(float((found == data.y)[data.test_mask].double().mean()))
