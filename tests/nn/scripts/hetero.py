"""Classify papers among authors: one model, made one for several types by ``to_hetero``."""

import torch
import torch.nn.functional as F
from pyg_script_data import CLASSES, bibliography
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.to_hetero_transformer import to_hetero
from torch_geometric.transforms import ToUndirected


class GNN(torch.nn.Module):
    def __init__(self, n_hidden, n_out):
        super().__init__()
        self.first, self.last = SAGEConv((-1, -1), n_hidden), SAGEConv((-1, -1), n_out)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index).relu(), edge_index)


data = ToUndirected()(bibliography())
model = to_hetero(GNN(16, CLASSES), data.metadata(), aggr="sum")
with torch.no_grad():
    model(data.x_dict, data.edge_index_dict)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses, accuracies = [], []
for _ in range(12):
    optimizer.zero_grad()
    out = model(data.x_dict, data.edge_index_dict)["paper"]
    loss = F.cross_entropy(out, data["paper"].y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    accuracies.append(float((out.argmax(dim=-1) == data["paper"].y).double().mean()))
