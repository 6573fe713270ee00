"""Full-graph training of vertex classes over ranks, each with its part of a folder."""

import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ... import _random
from ...errors import UnsupportedError
from ...formats.arrays import Array
from ...nn import GATConv, GCNConv, SAGEConv
from ..agreement import Group
from ..graph import DistGraph
from ..loss import UNLABELLED, accuracy, broadcast_parameters, cross_entropy, sum_gradients
from ..parts.files import Partition, read_part
from .checkpoint import load_checkpoint, restore, save_checkpoint
from .options import Options

#: Columns of results for more would hardly fit; ids in the place of classes are meant.
_MOST_CLASSES = 1 << 20


class Network(torch.nn.Module):
    """Layers of one kind, with a non-linearity and dropout between them, which MaxK's do.

    There is no dropout before the first, so that its constant features travel once.
    """

    def __init__(self, options: Options, width: int, classes: int) -> None:
        super().__init__()
        self.dropout, self.model = options.dropout, options.model
        widths = [width, *[options.hidden] * (options.layers - 1), classes]
        self.convs = torch.nn.ModuleList()
        for number, (n_in, n_out) in enumerate(pairwise(widths), 1):
            conv: torch.nn.Module
            if options.model == "gcn":
                conv = GCNConv(n_in, n_out)
            elif options.model == "gat":
                heads = 1 if number == options.layers else options.heads
                conv = GATConv(n_in, n_out // heads, heads=heads)
            else:
                conv = SAGEConv(n_in, n_out)
                if options.model == "maxk" and number > 1:
                    k = min(options.k, n_in)
                    conv = SAGEConv(n_in, n_out, k=k, dropout=options.dropout)
            self.convs.append(conv)

    def forward(self, x: Tensor, graph: DistGraph, edge_weight: Tensor | None) -> Tensor:
        """Compute logits: (n_local, width) to (n_local, classes)."""
        weights = {} if edge_weight is None else {"edge_weight": edge_weight}
        for number, conv in enumerate(self.convs):
            if number and self.model != "maxk":
                x = functional.elu(x) if self.model == "gat" else functional.relu(x)
                x = functional.dropout(x, self.dropout, self.training)
            x = conv(x, graph, **weights)
        return x


class Training:
    """A model, and what this rank has of the graph of a folder."""

    def __init__(
        self, partition: Partition, options: Options, group: Group, device: torch.device
    ) -> None:
        check_trainable(partition, options)
        self.options, self.group = options, group
        #: What a checkpoint must have alike.
        self.facts = {"graph": partition.graph, **options.shape()}
        self.rank = dist.get_rank(group)
        self._epochs = self._done = 0
        part = read_part(partition, self.rank, dist.get_world_size(group))
        dtype = getattr(torch, options.dtype)

        def tensor(array: Array) -> Tensor:  # a copy, since an array may be mapped and read-only
            return torch.tensor(array, device=device)

        self.graph = DistGraph(tensor(part.edge_index), part.bounds, group)
        self.x = tensor(part.features).to(dtype)
        weight = part.edge_weight
        self.weight = None if weight is None else tensor(weight).to(dtype)
        labels = tensor(part.labels)
        self.labels = labels.masked_fill(labels < 0, UNLABELLED)
        self.masks: dict[str, Any] = {name: tensor(mask) for name, mask in part.masks.items()}
        torch.manual_seed(options.seed)
        network = Network(options, partition.width, partition.classes)
        self.network = network.to(device=device, dtype=dtype)
        broadcast_parameters(self.network, group)
        self.optimizer = torch.optim.Adam(
            self.network.parameters(), lr=options.lr, weight_decay=options.weight_decay
        )

    def run(self, show: Callable[[str], None] = lambda line: None) -> list[float]:
        """Run the training to the last epoch; return the loss of each one that was run here."""
        losses: list[float] = []
        begin, epochs = self.resumed(show), self.options.epochs
        if begin >= epochs:
            show(f"nothing is left to do: epoch {begin} of {epochs} is done; give more --epochs")
        for epoch in range(begin + 1, epochs + 1):
            start = time.perf_counter()
            losses.append(self.step(epoch - 1))
            self._check_loss(losses[-1], epoch)
            self._done += 1
            seconds = time.perf_counter() - start
            scores = "".join(f"  {name} {score:.4f}" for name, score in self.scores().items())
            self._done += 1
            show(f"epoch {epoch}  loss {losses[-1]:.10g}{scores}  {seconds:.3f} s")
            if epoch % self.options.every == 0 or epoch == epochs:
                self.save(epoch)
            self._epochs += 1
        return losses

    def progress(self) -> tuple[int, int]:
        """Count the epochs finished here, and the steps: parts of epochs, and exchanges begun."""
        return self._epochs, self._done + self.graph.halo.traffic.exchanges

    def step(self, epoch: int) -> float:
        """Run one step on the whole graph; return the loss before it, the same on all ranks."""
        # Of seed, epoch and rank alone, so that a training that goes on draws what it would have.
        draw = _random.bits(np.array([epoch]), self.options.seed, self.rank + 1)
        torch.manual_seed(int(draw[0] >> np.uint64(1)))
        self.network.train()
        self.optimizer.zero_grad()
        logits = self.network(self.x, self.graph, self.weight)
        loss = cross_entropy(logits, self.labels, self.masks.get("train"), self.group)
        loss.backward()  # type: ignore[no-untyped-call]
        sum_gradients(self.network, self.group)
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return float(total)  # synchronize!

    def _check_loss(self, loss: float, epoch: int) -> None:
        """Raise UnsupportedError for a loss that is not finite; all ranks have the same."""
        if math.isfinite(loss):
            return
        broken = (~self.x.isfinite()).any().int()
        dist.all_reduce(broken, group=self.group)
        mend = "give a smaller --lr, or --dtype float64"
        if broken.item():
            mend = "features hold values that are not finite: mend them, and cut the graph again"
        raise UnsupportedError(f"the loss of epoch {epoch} is {loss}, nothing is saved: {mend}.")

    def scores(self) -> dict[str, float]:
        """Return accuracies of the vertices of each mask, without dropout; of all without masks."""
        self.network.eval()
        with torch.no_grad():
            logits = self.network(self.x, self.graph, self.weight)
        masks = self.masks or {"all": None}
        return {
            name: accuracy(logits, self.labels, mask, self.group) for name, mask in masks.items()
        }

    def save(self, epoch: int) -> None:
        """Write the checkpoint, if there is to be one: the first rank does."""
        path = self.options.checkpoint
        if path is not None and self.rank == 0:
            save_checkpoint(path, self.network, self.optimizer, epoch=epoch, facts=self.facts)

    def resumed(self, show: Callable[[str], None]) -> int:
        """Read the checkpoint on the first rank, if asked to; return the epochs that are done."""
        path = self.options.checkpoint
        if not self.options.resume or path is None:
            return 0
        state: list[Any] = [None]
        if self.rank == 0 and path.exists():
            state = [load_checkpoint(path, facts=self.facts)]
        dist.broadcast_object_list(state, group_src=0, group=self.group)
        if state[0] is None:
            show(f"there is no {path} yet: from the beginning")
            return 0
        done = restore(path, state[0], self.network, self.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = self.options.lr, self.options.weight_decay
        show(f"going on after epoch {done}, from {path}")
        return done


def check_trainable(partition: Partition, options: Options) -> None:
    """Raise UnsupportedError for a folder or options with which the model cannot train."""
    folder = partition.folder
    for name in ("features", "labels"):
        if name not in partition.dtypes:
            raise UnsupportedError(
                f"{folder} has no {name}: cut the graph with them, sparsefmt partition "
                "--data FOLDER."
            )
    if partition.classes > _MOST_CLASSES:
        raise UnsupportedError(
            f"{folder} has labels up to {partition.classes - 1}: number classes from 0 "
            "without gaps, and cut the graph again."
        )
    if not partition.classes:
        raise UnsupportedError(f"{folder} has no vertex with a label: give some.")
    if "weight" in partition.dtypes and options.model == "gat":
        raise UnsupportedError(
            f"{folder} has edge weights, which gat does not read: cut the graph without "
            "values, or take another model."
        )
    if options.model == "gat" and options.hidden % options.heads:
        raise UnsupportedError(
            f"--hidden {options.hidden} is no multiple of --heads {options.heads}: make it one."
        )
