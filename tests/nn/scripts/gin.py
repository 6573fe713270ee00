"""Classify small graphs by GIN, in batches of a DataLoader, with sums over each graph."""

import torch
import torch.nn.functional as F
from pyg_script_data import FEAT, molecules
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv
from torch_geometric.nn.pool import global_add_pool


class GIN(torch.nn.Module):
    def __init__(self, n_in, n_hidden, n_out, n_layers):
        super().__init__()
        self.convs = torch.nn.ModuleList()
        for number in range(n_layers):
            network = Sequential(
                *(Linear(n_hidden if number else n_in, n_hidden), BatchNorm1d(n_hidden), ReLU()),
                *(Linear(n_hidden, n_hidden), ReLU(inplace=True)),
            )
            self.convs.append(GINConv(network, train_eps=True))
        self.first, self.last = Linear(n_hidden, n_hidden), Linear(n_hidden, n_out)

    def forward(self, x, edge_index, batch):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        x = global_add_pool(x, batch)
        x = F.dropout(F.relu(self.first(x)), p=0.5, training=self.training)
        return self.last(x)


dataset = molecules()
train_loader = DataLoader(dataset[:16], batch_size=8, shuffle=True)
test_loader = DataLoader(dataset[16:], batch_size=8)
model = GIN(FEAT, 16, 2, n_layers=3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses, accuracies = [], []
for _ in range(8):
    model.train()
    for batch in train_loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index, batch.batch)
        loss = F.cross_entropy(out, batch.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        right = [
            int((model(one.x, one.edge_index, one.batch).argmax(dim=-1) == one.y).sum())
            for one in test_loader
        ]
    accuracies.append(sum(right) / len(dataset[16:]))
