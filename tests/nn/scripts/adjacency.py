"""Classify papers by GCN along an ``adj_t`` that a transformation of PyG's makes."""

import torch
import torch.nn.functional as F
from pyg_script_data import CLASSES, citations
from torch_geometric.nn import GCNConv
from torch_geometric.transforms import NormalizeFeatures, ToSparseTensor

data = ToSparseTensor()(NormalizeFeatures()(citations()))
first, last = GCNConv(data.num_features, 16), GCNConv(16, CLASSES)
optimizer = torch.optim.Adam([*first.parameters(), *last.parameters()], lr=0.05)
losses, accuracies = [], []
for _ in range(12):
    optimizer.zero_grad()
    out = last(F.relu(first(data.x, data.adj_t)), data.adj_t)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    found = out.argmax(dim=-1)
    accuracies.append(float((found == data.y)[data.test_mask].double().mean()))
