"""Classify papers by GraphSAGE in batches of sampled neighbours, and infer layer by layer."""

import torch
import torch.nn.functional as F
from pyg_script_data import CLASSES, citations
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv


class SAGE(torch.nn.Module):
    def __init__(self, n_in, n_hidden, n_out):
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(n_in, n_hidden), SAGEConv(n_hidden, n_out)])

    def forward(self, x, edge_index):
        for number, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if number < len(self.convs) - 1:
                x = F.dropout(x.relu_(), p=0.5, training=self.training)
        return x

    @torch.no_grad()
    def inference(self, x_all, loader):
        for number, conv in enumerate(self.convs):
            found = []
            for batch in loader:
                x = conv(x_all[batch.n_id], batch.edge_index)
                x = x.relu() if number < len(self.convs) - 1 else x
                found.append(x[: batch.batch_size])
            x_all = torch.cat(found)
        return x_all


data = citations()
train_loader = NeighborLoader(
    data, num_neighbors=[4, 3], batch_size=10, input_nodes=data.train_mask, shuffle=True
)
all_loader = NeighborLoader(data, num_neighbors=[-1], batch_size=16)
model = SAGE(data.num_features, 16, CLASSES)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses, accuracies = [], []
for _ in range(6):
    model.train()
    for batch in train_loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    found = model.inference(data.x, all_loader).argmax(dim=-1)
    accuracies.append(float((found == data.y)[data.test_mask].double().mean()))
