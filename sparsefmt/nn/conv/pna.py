"""Principal neighbourhood aggregation: several reductions, each scaled by degrees."""

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any, Unpack, cast

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList, Parameter, Sequential
from torch.nn.functional import pad
from torch.nn.modules import activation

from ...autograd.tensors.prepare import GraphLike
from ...autograd.tensors.tensors import GraphTensors
from ...errors import DtypeError, ShapeError, UnsupportedError
from .._inputs import check_counts, check_flags, refuse_pair, refuse_static
from .._maps import called, draw_map, linear_map, mapped
from .._passing import Direction, Passing
from ..gin import reset_network
from .edgewise import at_entries, check_features, reduced
from .propagation import check_fits

#: Reductions and scalers by PyG's names.
AGGREGATORS = ("sum", "add", "mean", "min", "max", "var", "std")
SCALERS = ("identity", "amplification", "attenuation", "linear", "inverse_linear")
#: The least variance that has a deviation.
LEAST = 1e-5


class PNAConv(Passing):
    """Principal neighbourhoods: ``y[i] = W [post_t([x[i], S_i R_e pre_t([x[i], x[j]])]) for t]``.

    ``R`` are all ``aggregators`` over the entries ``e = (i, j)`` of row ``i``, side by side, and
    ``S`` the ``scalers``, factors by the number of them; ``t`` runs over ``towers``, which have a
    network ``pre`` and a network ``post`` each.  With ``edge_dim`` a map of the entry's features is
    a third part of what ``pre`` reads.

    Parameters
    ----------
    in_channels, out_channels, aggregators, scalers, edge_dim, towers, pre_layers, post_layers
        As in PyG, but not -1 channels; aggregators are "sum", "mean", "min", "max", "var", "std".
    divide_input, act, act_kwargs, train_norm
        As in PyG; ``act`` is None, a module, or the name of a class of ``torch.nn``.
    deg : Tensor
        How many vertices of the training set have each number of entries, from 0 on.
    flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``, ``node_dim`` being 0.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``; also if there is no such aggregator, scaler or function, or widths are no
        multiples of ``towers``.

    Notes
    -----
    Features of both ends of each edge are made for ``pre``.  PNA (NeurIPS'20, arXiv 2004.05718),
    equations 5 to 8.
    """

    __module__ = "sparsefmt.nn"
    _node_dim = 0
    _shown = ("towers", "edge_dim")

    def __init__(  # noqa: PLR0913, of which PyG's has as many
        self,
        in_channels: int,
        out_channels: int,
        aggregators: Sequence[str],
        scalers: Sequence[str],
        deg: Tensor,
        edge_dim: int | None = None,
        towers: int = 1,
        pre_layers: int = 1,
        post_layers: int = 1,
        divide_input: bool = False,
        act: str | Module | None = "relu",
        act_kwargs: dict[str, Any] | None = None,
        train_norm: bool = False,
        **options: Unpack[Direction],
    ) -> None:
        counts = {"in_channels": in_channels, "out_channels": out_channels, "towers": towers}
        check_counts(**counts, pre_layers=pre_layers, post_layers=post_layers)
        check_counts(edge_dim=1 if edge_dim is None else edge_dim)
        check_flags(divide_input=divide_input, train_norm=train_norm)
        check_words("aggregators", aggregators, AGGREGATORS)
        check_words("scalers", scalers, SCALERS)
        if out_channels % towers or (divide_input and in_channels % towers):
            raise ShapeError(
                f"towers is {towers} but widths are {in_channels} and {out_channels}: each tower "
                "has as many of the features, give a divisor."
            )
        if "aggr" in options:
            raise UnsupportedError("aggr is given beside aggregators: name all of them there.")
        super().__init__(**options)
        activation_of(act, act_kwargs)  # which a single layer does not read
        self._reductions = ()
        self.in_channels, self.out_channels, self.edge_dim = in_channels, out_channels, edge_dim
        self.aggregators, self.scalers = [*aggregators], [*scalers]
        self.towers, self.divide_input = towers, divide_input
        self.F_in = in_channels // towers if divide_input else in_channels
        self.F_out = out_channels // towers
        self.aggr_module: Module = Degrees(deg, train_norm)
        if edge_dim is not None:
            self.edge_encoder = linear_map(edge_dim, self.F_in)

        of_pre = (2 if edge_dim is None else 3) * self.F_in
        of_post = (len(aggregators) * len(scalers) + 1) * self.F_in
        self.pre_nns, self.post_nns = ModuleList(), ModuleList()
        for _ in range(towers):
            for networks, width, out, layers in (
                (self.pre_nns, of_pre, self.F_in, pre_layers),
                (self.post_nns, of_post, self.F_out, post_layers),
            ):
                modules: list[Module | None] = [linear_map(width, out)]
                for _ in range(layers - 1):
                    modules += [activation_of(act, act_kwargs), linear_map(out, out)]
                networks.append(Sequential(*(m for m in modules if m is not None)))
        self.lin = linear_map(out_channels, out_channels)
        self.reset_parameters()

    @staticmethod
    def get_degree_histogram(loader: Iterable[Any]) -> Tensor:
        """Count the vertices that have each number of entries, in all batches of a loader."""
        total = torch.zeros(1, dtype=torch.long)
        for data in loader:
            degrees = data.edge_index[1].cpu().bincount(minlength=data.num_nodes)
            counts = degrees.bincount(minlength=len(total))
            total = pad(total, (0, len(counts) - len(total))) + counts
        return total

    def reset_parameters(self) -> None:
        """Draw all maps as ``torch.nn.Linear`` does, and set the means of degrees."""
        self.degrees.reset_parameters()
        if self.edge_dim is not None:
            draw_map(self.edge_encoder)
        for network in (*self.pre_nns, *self.post_nns):
            for module in cast(Sequential, network):
                reset = draw_map if isinstance(module, Linear) else reset_network
                reset(cast(Any, module))
        draw_map(self.lin)

    def forward(self, x: Tensor, edge_index: GraphLike, edge_attr: Tensor | None = None) -> Tensor:
        """Map (n, in_channels) to (n, out_channels).

        Parameters
        ----------
        x : Tensor, shape (n, in_channels)
            Features of one set of vertices.
        edge_index
            As for ``GCNConv``.  Only the structure of a graph is read.
        edge_attr : Tensor, shape (nnz, edge_dim)
            In the order of the edges, for a layer with ``edge_dim`` alone.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            As ``GCNConv``; also if features of edges do not fit ``edge_dim``.
        """
        refuse_pair(x)
        refuse_static(x, self)
        ends = self._between(x, edge_index).gathered()
        check_features(edge_attr, ends, self.edge_dim)
        check_fits("x", x, self.in_channels, self.lin.weight)
        tensors = ends.tensors
        ends_of_entries = (
            at_entries(tensors, x, sources=False),
            at_entries(tensors, ends.source, sources=True),
        )
        encoded = None
        if edge_attr is not None:
            encoded = mapped(self.edge_encoder, edge_attr, "edge_attr")
        parts = []
        for t in range(self.towers):
            of_tower = (
                slice(t * self.F_in, (t + 1) * self.F_in) if self.divide_input else slice(None)
            )
            pairs = [end[:, of_tower] for end in ends_of_entries]
            pairs += [] if encoded is None else [encoded]
            h = self._scaled(tensors, called(self.pre_nns[t], torch.cat(pairs, 1)))
            h = torch.cat([x[:, of_tower].to(h.dtype), h], 1)
            parts.append(called(self.post_nns[t], h))
        return mapped(self.lin, torch.cat(parts, 1), "x")

    def _scaled(self, tensors: GraphTensors, messages: Tensor) -> Tensor:
        """Reduce messages, (nnz, F_in), in all ways, and scale each of them in all ways."""
        made = {}
        for word in self.aggregators:
            if word in ("var", "std"):
                mean = reduced(tensors, messages, "mean")
                made[word] = reduced(tensors, messages * messages, "mean") - mean * mean
            else:
                made[word] = reduced(tensors, messages, "sum" if word == "add" else word)
            if word == "std":
                deviation = made[word].clamp(min=LEAST).sqrt()
                made[word] = deviation.masked_fill(deviation <= sqrt(LEAST), 0)
        h = torch.cat([made[word] for word in self.aggregators], 1)
        degree = tensors.rows.indptr.diff().to(h.dtype)[:, None]
        return torch.cat([h * self.degrees(degree, word).to(h.dtype) for word in self.scalers], 1)

    @property
    def degrees(self) -> "Degrees":
        """Return the module of the scalers."""
        return cast(Degrees, self.aggr_module)


class Degrees(Module):
    """Factors by the number of entries of a row, relative to that of the training set."""

    avg_deg_lin: Tensor
    avg_deg_log: Tensor

    def __init__(self, deg: Tensor, train_norm: bool) -> None:
        super().__init__()
        if not isinstance(deg, Tensor) or deg.dim() != 1 or not deg.sum() > 0:
            raise ShapeError(
                f"deg is {deg!r}: give a histogram, (largest degree + 1,), of all vertices."
            )
        numbers, n = torch.arange(len(deg), device=deg.device), float(deg.sum())
        sums = (numbers * deg).sum(), ((numbers + 1).log() * deg).sum()  # in float32, as PyG's
        self.means = {"avg_deg_lin": float(sums[0]) / n, "avg_deg_log": float(sums[1]) / n}
        for name in self.means:
            if train_norm:
                self.register_parameter(name, Parameter(torch.empty(1)))
            else:
                self.register_buffer(name, torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set both means to those of the training set."""
        with torch.no_grad():
            for name, mean in self.means.items():
                getattr(self, name).fill_(mean)

    def forward(self, degree: Tensor, scaler: str) -> Tensor:
        """Return the factors of rows with that many entries, (n, 1)."""
        if scaler == "identity":
            return torch.ones_like(degree)
        if scaler in ("linear", "amplification"):
            linear = scaler == "linear"
            return degree / self.avg_deg_lin if linear else (degree + 1).log() / self.avg_deg_log
        degree = degree.clamp(min=1)
        inverse = scaler == "inverse_linear"
        return self.avg_deg_lin / degree if inverse else self.avg_deg_log / (degree + 1).log()


def check_words(name: str, words: object, known: Sequence[str]) -> None:
    """Check for a list of some of the known words."""
    if not isinstance(words, list | tuple) or not words:
        raise DtypeError(f"{name} is {words!r}: give a list of some of {', '.join(known)}.")
    for word in words:
        if word not in known:
            raise UnsupportedError(f"{name} has {word!r}: give some of {', '.join(known)}.")


def activation_of(act: object, act_kwargs: dict[str, Any] | None) -> Module | None:
    """Build the activation of that name, or return the module that was given."""
    if act is None or isinstance(act, Module):
        return act
    names = {name.lower(): name for name in activation.__all__}
    name = names.get(str(act).lower().replace("_", ""))
    if name is None:
        raise UnsupportedError(
            f"act is {act!r}: give a module, or the name of one of torch.nn, 'relu' for instance."
        )
    made: Module = getattr(activation, name)(**(act_kwargs or {}))
    return made
