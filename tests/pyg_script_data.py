"""Tiny data for the scripts of ``tests/nn/scripts``, in the place of what PyG would download."""

import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import coalesce, to_undirected

CLASSES, FEAT = 3, 12


def _labelled(n, generator):
    """Draw labels, and features that tell them."""
    y = torch.randint(CLASSES, (n,), generator=generator)
    means = torch.randn(CLASSES, FEAT, generator=generator)
    return y, means[y] + torch.randn(n, FEAT, generator=generator)


def citations(n=60):
    """Make a graph of papers, most of whose neighbours are of their own class."""
    generator = torch.Generator().manual_seed(0)
    y, x = _labelled(n, generator)
    ends = torch.randint(n, (2, 12 * n), generator=generator)
    alike = y[ends[0]] == y[ends[1]]
    kept = (alike | (torch.rand(12 * n, generator=generator) < 0.1)) & (ends[0] != ends[1])
    data = Data(x=x, y=y, edge_index=to_undirected(ends[:, kept][:, : 3 * n], num_nodes=n))
    data.train_mask = torch.arange(n) < n // 2
    data.test_mask = ~data.train_mask
    return data


def molecules(count=24):
    """Make rings and paths of several lengths; the label tells which."""
    generator, found = torch.Generator().manual_seed(1), []
    for number in range(count):
        n = int(torch.randint(4, 9, (1,), generator=generator))
        path = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
        ring = torch.cat([path, torch.tensor([[n - 1], [0]])], dim=1)
        edges = to_undirected(ring if number % 2 else path, num_nodes=n)
        x = torch.randn(n, FEAT, generator=generator)
        found.append(Data(x=x, edge_index=edges, y=torch.tensor([number % 2])))
    return found


def bibliography():
    """Make papers and authors, with edges of two types between them."""
    generator, data = torch.Generator().manual_seed(2), HeteroData()
    data["paper"].y, data["paper"].x = _labelled(30, generator)
    data["author"].x = torch.randn(14, 5, generator=generator)
    ends = [torch.randint(n, (60,), generator=generator) for n in (14, 30)]
    data["author", "writes", "paper"].edge_index = coalesce(torch.stack(ends))
    ends = torch.randint(30, (2, 70), generator=generator)
    data["paper", "cites", "paper"].edge_index = coalesce(ends)
    return data


class NeighborLoader(DataLoader):
    """Batches as those of PyG's ``NeighborLoader``, without its native sampler.

    A vertex that was drawn in one hop draws in the next one; seeds come first.
    """

    def __init__(self, data, num_neighbors, batch_size, input_nodes=None, shuffle=False):
        self.data, self.fanouts = data, num_neighbors
        self.generator_of_neighbors = torch.Generator().manual_seed(3)
        nodes = torch.arange(data.num_nodes)
        nodes = nodes if input_nodes is None else nodes[input_nodes]
        options = {"batch_size": batch_size, "shuffle": shuffle, "collate_fn": self._batch}
        super().__init__(nodes.tolist(), **options)

    def _batch(self, seeds):
        source, target = self.data.edge_index
        nodes, last, edges = list(seeds), list(seeds), []
        place = {node: k for k, node in enumerate(nodes)}
        for fanout in self.fanouts:
            drawn = []
            for node in last:
                found = source[target == node]
                order = torch.randperm(len(found), generator=self.generator_of_neighbors)
                order = order if fanout < 0 else order[:fanout]
                for neighbor in found[order].tolist():
                    if neighbor not in place:
                        place[neighbor] = len(nodes)
                        nodes.append(neighbor)
                        drawn.append(neighbor)
                    edges.append((place[neighbor], place[node]))
            last = drawn
        n_id = torch.tensor(nodes)
        return Data(
            x=self.data.x[n_id],
            y=self.data.y[n_id],
            edge_index=torch.tensor(edges, dtype=torch.long).reshape(-1, 2).T.contiguous(),
            n_id=n_id,
            batch_size=len(seeds),
        )
