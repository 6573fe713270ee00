"""Epochs of a 3-layer GraphSAGE with MaxK and with ReLU, and the memory of one layer.

The model is MaxK-GNN's: a linear layer to the hidden width, three of GraphSAGE, and a linear one to
the classes.  In each of the three the weights come first, then MaxK or ReLU, then the mean over the
in-neighbours; all variants have the same parameters.  The graph is prepared once, with its rows in
order of communities for the gradient of MaxK.  An epoch is forward, loss, backward and a
step of Adam over all vertices, in float32; matrix products in float32 too, and once more in TF32,
in all variants alike.
"""

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch.nn.functional import cross_entropy, linear, relu

from sparsefmt import Graph, autograd, reorder
from sparsefmt.nn import MaxK, SAGEConv

from .. import _baselines, _graphs, _harness, _memory
from .._harness import Target
from .._memory import MIB

#: Reddit's features and classes, and the paper's hidden width.
FEAT, HIDDEN, CLASSES, LAYERS = 602, 256, 41, 3
KS = (32, 16)
#: Largest difference from the reference, relative to its norm.  Sums in another order may differ in
#: which of two nearly equal features is kept.
LIMIT = 1e-2
COLUMNS = {
    "case": "<34",
    "ms": "9.2f",
    "over_torch": "10.2f",
    "over_relu": "9.2f",
    "peak_mib": "9.0f",
    "error": "8.1e",
}
MEMORY_COLUMNS = {
    "case": "<18",
    "peak_mib": "9.1f",
    "relu_mib": "9.1f",
    "share": "6.3f",
    "error": "8.1e",
}
TORCH, RELU = "torch.sparse, ReLU", "sparsefmt, ReLU"
#: Least speed-up over torch.sparse with ReLU, on reddit and a GPU.
TARGETS = {("highest", "MaxK k=32"): 4.0, ("highest", "MaxK k=16"): 6.0, ("medium", RELU): 2.2}
#: Torch's names for the precision of matrix products, and ours.
PRECISIONS = {"highest": "", "high": ", TF32", "medium": ", bfloat16"}
Unary = Callable[[Tensor], Tensor]
MakeLayer = Callable[[], Module]


class Layer(SAGEConv):
    """``y = mean_j(s(x W_l)[j]) + b + x W_r``, with any ``s`` and any way to take the mean."""

    def __init__(self, activation: Unary, mean: Unary) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.activation, self.mean = activation, mean

    def forward(self, x: Tensor, graph: Any, edge_weight: Tensor | None = None) -> Tensor:
        """The graph is the mean's affair."""
        y = self.mean(self.activation(linear(x, self.lin_l.weight))) + self.lin_l.bias
        own: Tensor = self.lin_r(x)
        return y + own


class Model(Module):
    """Three layers between linear ones."""

    def __init__(self, layer: MakeLayer) -> None:
        super().__init__()
        self.first, self.last = Linear(FEAT, HIDDEN), Linear(HIDDEN, CLASSES)
        self.layers = ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        """(n, FEAT) to (n, CLASSES)."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, graph)
        out: Tensor = self.last(x)
        return out


class Epochs:
    """A graph with features and labels, and models to train on it, all from the same weights."""

    def __init__(self, name: str, device: str, ks: tuple[int, ...]) -> None:
        A = _graphs.load(name, device=device)
        self.graph = Graph(A)
        autograd.prepare(self.graph, order=reorder.community_order(A))
        self.x = _baselines.tensor(_graphs.normal(A.indptr, (A.n_rows, FEAT)))
        self.labels = torch.arange(A.n_rows, device=self.x.device) % CLASSES
        ours = partial(autograd.spmm, self.graph, reduce="mean")
        theirs = _baselines.torch_mean(A)
        self.layers: dict[str, MakeLayer] = {
            TORCH: partial(Layer, relu, theirs),
            RELU: partial(Layer, relu, ours),
            "no aggregation, ReLU": partial(Layer, relu, torch.nn.Identity()),
        }
        #: The same by torch.sparse, of those that have it.
        self.references: dict[str, MakeLayer] = {RELU: self.layers[TORCH]}
        for k in ks:
            self.layers[f"MaxK k={k}"] = partial(SAGEConv, HIDDEN, HIDDEN, k=k)
            self.references[f"MaxK k={k}"] = partial(Layer, MaxK(k), theirs)
        torch.manual_seed(0)  # a near tie that rounding decides changes what MaxK keeps
        self.weights = Model(self.layers[TORCH]).state_dict()

    def model(self, layer: MakeLayer) -> Model:
        """With the common weights."""
        model = Model(layer).to(self.x.device)
        model.load_state_dict(self.weights)
        return model

    def checked(self, name: str) -> dict[str, Any]:
        """The error of logits and gradients, where there is a reference, and if it is too large."""
        if name not in self.references:
            return {}
        both = (self.layers[name], self.references[name])
        error = worst(*(self._backward(self.model(layer)) for layer in both))
        return {"error": error} | _complaint(error)

    def _backward(self, model: Model) -> list[Tensor]:
        logits = model(self.x, self.graph)
        loss = cross_entropy(logits, self.labels)
        return [logits.detach(), *torch.autograd.grad(loss, [*model.parameters()])]

    def epoch(self, name: str) -> Callable[[], None]:
        """A function that trains for one."""
        model = self.model(self.layers[name])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def run() -> None:
            optimizer.zero_grad()
            loss = cross_entropy(model(self.x, self.graph), self.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return run


def worst(found: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """The largest norm of a difference, relative to that of the exact tensor."""
    pairs = zip(found, exact, strict=True)
    return float(torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max())  # NaN if any is


def _complaint(error: float) -> dict[str, str]:
    right = error <= LIMIT
    return {} if right else {"wrong": f"differs by {error:.3g}, at most {LIMIT:g} is right"}


def training(options: argparse.Namespace) -> bool:
    """Every variant, in turn."""
    cuda = options.device == "cuda"
    title = f"epochs, {LAYERS} layers of {HIDDEN}, {FEAT} features, {CLASSES} classes"
    _harness.print_head(title, COLUMNS)
    rows = []
    for name in options.graphs or ("reddit" if cuda else "small",):
        epochs = Epochs(name, options.device, options.k or KS)
        for precision in PRECISIONS if cuda else ("highest",):
            torch.set_float32_matmul_precision(precision)
            for row in _rows_of(epochs, Path(name).stem, precision, cuda, options.quick):
                _harness.print_row(row, COLUMNS)
                rows.append(row | options.facts)
        torch.set_float32_matmul_precision("highest")
        _harness.free()
    return _harness.keep("maxk", "training", rows, judge, cuda=cuda, folder=options.out)


def _rows_of(
    epochs: Epochs, graph: str, precision: str, cuda: bool, quick: bool
) -> list[dict[str, Any]]:
    """Checked in float32: in TF32 more of the nearly equal features change places."""
    rows: dict[str, dict[str, Any]] = {}
    for name in epochs.layers:
        case = f"{graph}: {name}{PRECISIONS[precision]}"
        row = {"case": case, "graph": graph, "model": name, "precision": precision}
        rows[name] = row | (epochs.checked(name) if precision == "highest" else {})
    calls = {name: epochs.epoch(name) for name, row in rows.items() if "wrong" not in row}
    times, runs = _harness.paced(list(calls.values()), cuda=cuda, quick=quick)
    found = dict(zip(calls, times, strict=True))
    for name, ms in found.items():
        rows[name] |= {"ms": ms, "runs": runs}
        for ratio, baseline in (("over_torch", TORCH), ("over_relu", RELU)):
            if baseline in found:
                rows[name][ratio] = found[baseline] / ms
        if cuda:
            rows[name]["peak_mib"] = sum(_memory.torch_peak_bytes(calls[name])) / MIB
    return list(rows.values())


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Over torch.sparse; over this library's ReLU, to know."""
    found = []
    for row in rows:
        if "over_torch" in row and row["model"] != TORCH:
            here = row["graph"] == "reddit" and "peak_mib" in row
            limit = TARGETS.get((row["precision"], row["model"])) if here else None
            found.append(Target(f"{row['case']}, over torch.sparse", row["over_torch"], limit))
    return found


# The memory of one layer


def memory(options: argparse.Namespace) -> bool:
    """Peak of ``maxk_aggregate`` and its gradient, beside that of ReLU and ``spmm``."""
    _harness.print_head(f"forward and backward of a layer, width {HIDDEN}", MEMORY_COLUMNS)
    rows = []
    for name in options.graphs or ("reddit",):
        for row in _peaks_of(name, options.k or KS):
            _harness.print_row(row, MEMORY_COLUMNS)
            rows.append(row)
        _harness.free()
    return _harness.keep("maxk", "memory", rows, judge_memory, cuda=True, folder=options.out)


def _peaks_of(name: str, ks: tuple[int, ...]) -> Iterable[dict[str, Any]]:
    """Results and gradients are part of the peak; the graph, prepared, counts as an input.

    So do its windows, 8 bytes an entry, as much as the transpose that the dense layer reads.
    """
    A = _graphs.load(name)
    graph = Graph(A)
    autograd.prepare(graph)
    x = _baselines.tensor(_graphs.normal(A.indptr, (A.n_cols, HIDDEN))).requires_grad_()
    gradient = torch.ones(A.n_rows, HIDDEN, device=x.device)

    def both(layer: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        y = layer()
        return y.detach(), *torch.autograd.grad(y, x, gradient)

    def peak(layer: Callable[[], Tensor]) -> float:
        both(layer)  # compiles
        return sum(_memory.torch_peak_bytes(lambda: both(layer))) / MIB

    relu_mib = peak(lambda: autograd.spmm(graph, relu(x)))
    for k in ks:
        sparse = partial(autograd.maxk_aggregate, graph, x, k)
        dense = partial(autograd.spmm, graph, autograd.maxk(x, k))
        error = worst(both(sparse), both(dense))
        row = {"case": f"{Path(name).stem} k={k}", "error": error} | _complaint(error)
        if "wrong" not in row:
            peak_mib = peak(sparse)
            row |= {"peak_mib": peak_mib, "relu_mib": relu_mib, "share": peak_mib / relu_mib}
        yield row


def judge_memory(rows: list[dict[str, Any]]) -> list[Target]:
    """Less than the dense layer."""
    return [
        Target(f"peak of {row['case']} over that of ReLU", row["share"], 1.0, at_least=False)
        for row in rows
    ]
