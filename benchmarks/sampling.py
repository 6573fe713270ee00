"""SpMM over a sample of each row: speed, sampling rates, and the accuracy of models with it.

Sections of ``sampled``:

- ``table``: ``spmm_sampled`` against cuSPARSE's best float32 SpMM of the whole graph, and ``spmm``
  (on the CPU torch.sparse).  Ours reads the structure alone, as most graphs have it, cuSPARSE a
  value of each entry too, as it must; ``weighted_ms`` is ours with values;
- ``rates``: the share of the entries that is kept, over graphs: Table IV of ES-SpMM;
- ``models``: GCNs that are trained on whole graphs and run over samples as they are: accuracy on
  test vertices (of ``random`` the mean of draws) and time beside torch.sparse: its Table V.

Products are checked in float64 at sampled rows, against ``sample(...)``, whose entries are checked
too; models in float64 by torch.sparse.
"""

import argparse
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy, dropout, relu

from sparsefmt import COO, CSR, Graph, autograd, nn
from sparsefmt.formats.arrays import Array, is_cupy, namespace
from sparsefmt.ops import sample, sample_with_perm, sampling_rate, scale, spmm, spmm_sampled

from . import _baselines, _graphs, _harness, _oracle
from ._table import Benchmark, Limit, Row, Section, names, numbers

SAMPLES, STRATEGIES, FEAT, SEED = (16, 64, 256), ("bucket", "fastrand", "random"), 128, 0
#: Least speed-ups over cuSPARSE in float32, of ``SAMPLES`` in turn.
OVER_CUSPARSE = {
    ("reddit", "bucket"): (38.0, 13.0, 3.1),
    ("reddit", "fastrand"): (26.0, 10.0, 3.0),
    ("reddit", "random"): (20.0, 8.0, 2.4),
    ("products", "bucket"): (5.0, 2.5, 2.0),
}
#: Graphs of few entries in a row, where a sample is never to be slower than ``spmm``.
LOW_DEGREE = ("flickr", "com-amazon")
WEIGHTED = 1.15  #: most time with values over that without
PRIMES = (577, 587, 593, 599)
RATES, EXACT = (16, 32, 64, 128, 256, 512), 1e-12


def table(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every graph, dtype, strategy and number of entries, beside a float32 product."""
    for name, source in _graphs.chosen(options, ("reddit", "products", *LOW_DEGREE)):
        graph = _graphs.load(source, device=options.device)
        for feat in options.widths or (FEAT,):
            X = _graphs.uniform(graph.indptr, (graph.n_cols, feat))
            _, theirs = _baselines.best_spmm(_graphs.weighted(graph), X)
            dtypes = ("float32", "bfloat16") if name == "reddit" else ("float32",)
            for dtype in options.dtypes or dtypes:
                for width in options.sample or SAMPLES:
                    for strategy in options.strategies or STRATEGIES:
                        case = f"{name} {feat} {dtype} {strategy} S={width}"
                        row = {"case": case, "graph": name, "feat": feat, "dtype": dtype}
                        row |= {"strategy": strategy, "sample": width}
                        yield row | _cell(graph, row, theirs, options)


def _cell(graph: CSR, facts: Row, theirs: Any, options: argparse.Namespace) -> Row:
    """Check ours, without values and with them, and time both beside ``spmm`` and theirs."""
    width, strategy, dtype = facts["sample"], facts["strategy"], facts["dtype"]
    X = _graphs.uniform(graph.indptr, (graph.n_cols, facts["feat"]), dtype)
    Y = namespace(X).empty((graph.n_rows, facts["feat"]), X.dtype)
    row: Row = {"error": 0.0}
    calls = {}
    for name, A in (("ms", graph), ("weighted_ms", _graphs.weighted(graph, dtype))):
        A = CSR(A.indptr, A.indices, A.data, shape=A.shape, validate="cheap")  # nothing is built
        B, perm = sample_with_perm(A, width, strategy=strategy, seed=SEED)
        wrong = sample_complaint(A, B, perm, width, strategy)
        call = partial(spmm_sampled, A, X, width, out=Y, strategy=strategy, seed=SEED)
        _harness.poison(Y)
        call()
        error = _oracle.spmm_error(B, X, Y)
        row |= _oracle.refused(wrong or _oracle.complaint(error, X.dtype))
        row |= {"error": max(row["error"], error), "rate": B.nnz / A.nnz}
        calls[name] = call
    if "wrong" in row:
        return row
    calls |= {"spmm_ms": partial(spmm, graph, X, out=Y)}
    calls["cusparse_ms" if options.cuda else "torch_ms"] = theirs
    row |= _harness.timed(calls, cuda=options.cuda, quick=options.quick)
    row["gb_s"] = row["rate"] * graph.nnz * X.shape[1] * X.itemsize / row["ms"] / 1e6
    return row


def sample_complaint(A: CSR, B: CSR, perm: Array, width: int, strategy: str) -> str | None:
    """Return why ``B`` is no such sample of ``A``; None if it is one.

    All counts, values and columns are compared, and the places of the entries in sampled rows.
    """
    xp = namespace(A.indptr)
    if not (B.lengths == xp.minimum(A.lengths, width)).all():
        return "rows of the sample are not as long as they should be"
    if not (B.indices == A.indices[perm]).all():
        return "columns of the sample are not those of its entries"
    if A.data is not None and not (B.data == A.data[perm]).all():
        return "values of the sample are not those of its entries"
    for row in _oracle.sampled(_baselines.ends_of(A)[0], A.n_rows).tolist():
        start, stop = (int(A.indptr[row + i]) for i in (0, 1))
        span = slice(int(B.indptr[row]), int(B.indptr[row + 1]))
        if not is_sample(_host(perm[span]).astype(np.int64) - start, stop - start, width, strategy):
            return f"row {row} is no sample by {strategy}"
    return None


def is_sample(places: Any, length: int, width: int, strategy: str) -> bool:
    """Return True if the strategy may choose these places of a row of that length, in order."""
    numbers = np.arange(min(length, width))
    if strategy == "fastrand" and width < length:
        prime = next(prime for prime in PRIMES if length % prime)
        return bool(np.array_equal(places, numbers * prime % length))
    if strategy == "random" and width < length:
        inside = bool(((places >= 0) & (places < length)).all())
        return inside and len(np.unique(places)) == width
    return bool(np.array_equal(places, numbers))


def _host(array: Array) -> Any:
    return array.get() if is_cupy(array) else array


def rates(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every real graph of ``--data``, and those generated at the sizes of papers."""
    files = tuple(path.stem for path in sorted(Path(options.data).glob("*.npz")))
    small = [name for name, one in _graphs.PAPERS.items() if one.edges <= 2_500_000]
    papers = tuple(name for name in _graphs.PAPERS if name not in files)
    cpu = tuple(name for name in small if name not in files)
    for name, source in _graphs.chosen(options, papers, cpu=cpu, real=files):
        A = _graphs.load(source, device=options.device)
        lengths = np.diff(_host(A.indptr)).astype(np.int64)
        row: Row = {"case": name, "rows": A.n_rows, "entries": A.nnz, "longest": int(lengths.max())}
        row |= {"degree": A.nnz / A.n_rows, "error": 0.0}
        for width in options.sample or RATES:
            kept = int(np.minimum(lengths, width).sum())
            rate = row[f"rate_{width}"] = sampling_rate(A, width)
            row["error"] = max(row["error"], abs(rate - kept / A.nnz))
            for strategy in options.strategies or STRATEGIES:
                if sample(A, width, strategy=strategy).nnz != kept:
                    row["wrong"] = f"{strategy} of {width} does not keep {kept} entries"
        yield row | _oracle.refused(_oracle.over(row["error"], EXACT))


# Models

REAL = ("cora", "citeseer", "amazon_computers", "tolokers")
PARTS = ("train", "val", "test")
#: Beyond so many columns features are counts, whose rows are made to add up to one; below, columns
#: are measures, which are standardised.
MANY_COLUMNS = 100
#: Of a generated graph: features, and the spread of the means of its communities, by which nobody
#: tells more than 58 % of the vertices.
PLANTED_FEAT, SIGNAL, SIGNALS = 64, 0.32, {"small": 0.2}
DRAWS, QUICK_EPOCHS = 5, 5
MOST_LOST, OVER_TORCH = 1.0, 5.0  #: percentage points; on reddit, over torch.sparse
STATED = (("fastrand", 64), ("random", 64))
LOGITS = 1e-4  #: largest error of logits, relative to their norm


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained, by Adam on all training vertices at once."""

    hidden: int = 64
    dropout: float = 0.5
    weight_decay: float = 5e-4
    lr: float = 0.01
    epochs: int = 200


#: Those of the citation graphs are GCN's own; the others were chosen by validation accuracy.
RECIPES = {
    "cora": Recipe(hidden=16),
    "citeseer": Recipe(hidden=16),
    "amazon_computers": Recipe(weight_decay=0.0, lr=0.1),
    "tolokers": Recipe(dropout=0.0, weight_decay=0.0, lr=0.03),
}


@dataclass(frozen=True)
class Labelled:
    """A graph with features, labels and the vertices of each part, all on one device."""

    graph: Graph
    x: Tensor  #: (n, feat)
    y: Tensor  #: (n,), -1 where there is none
    parts: dict[str, Tensor]  #: ids

    def accuracy(self, logits: Tensor, part: str) -> float:
        """Return the share of a part's vertices whose largest logit is that of their label."""
        at = self.parts[part]
        return float((logits[at].argmax(1) == self.y[at]).double().mean())


def labelled(name: str, source: str, device: str) -> Labelled:
    """Return a real graph with its first split, or a generated one with planted labels.

    The mean of each community is a normal vector, and the features of a vertex are that and noise,
    so that they alone tell about half of the vertices; a tenth is for training, one for validation.
    """
    graph = Graph(_graphs.load(source, device=device))
    autograd.prepare(graph)
    chance = np.random.default_rng(0)
    if source in _graphs.RECIPES:
        y = _graphs.communities(source, device="cpu").astype(np.int64)
        shape = (int(y.max()) + 1, PLANTED_FEAT)
        means = SIGNALS.get(name, SIGNAL) * chance.standard_normal(shape, np.float32)
        x = means[y] + chance.standard_normal((len(y), PLANTED_FEAT), np.float32)
        cut = np.split(chance.permutation(len(y)), [len(y) // 10, len(y) // 5])
        parts = dict(zip(PARTS, cut, strict=True))
    else:
        with np.load(source, allow_pickle=False) as file:
            if "y" not in file.files:
                raise SystemExit(f"{source} has no labels: give one of {', '.join(REAL)}")
            x, y = _features(file), file["y"].astype(np.int64)
            parts = {part: np.flatnonzero(file[f"{part}_mask"]) for part in PARTS}
    tensors = {part: torch.from_numpy(ids).to(device) for part, ids in parts.items()}
    return Labelled(graph, *(torch.from_numpy(one).to(device) for one in (x, y)), tensors)


def _features(file: Any) -> Any:
    """Return (n, feat), dense, in float32."""
    if "x" in file.files:
        x = file["x"].astype(np.float32)
    else:
        data, shape = file["x_data"].astype(np.float32), tuple(file["x_shape"].tolist())
        x = CSR(file["x_indptr"], file["x_indices"], data, shape=shape).toarray()
    if x.shape[1] > MANY_COLUMNS:
        return x / np.maximum(x.sum(1, keepdims=True), 1)
    return (x - x.mean(0)) / np.maximum(x.std(0), 1e-6)


class GCN(Module):
    """Two layers with ReLU between them, and dropout before each."""

    def __init__(self, make: Callable[[int, int], Module], data: Labelled, recipe: Recipe) -> None:
        super().__init__()
        self.first = make(data.x.shape[1], recipe.hidden)
        self.second = make(recipe.hidden, int(data.y.max()) + 1)
        self.dropout = recipe.dropout

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """Return logits of (n, classes)."""
        h = relu(self.first(dropout(x, self.dropout, self.training), graph))
        out: Tensor = self.second(dropout(h, self.dropout, self.training), graph)
        return out


class Product(nn.GCNConv):
    """A layer of GCN with any way to multiply by the normalised graph."""

    def __init__(self, *channels: int, product: Callable[[Tensor], Tensor]) -> None:
        super().__init__(*channels)
        self.product = product

    def forward(self, x: Tensor, graph: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Return the product of the mapped features, and the bias."""
        y = self.product(self.lin(x))
        return y if self.bias is None else y + self.bias


def normalised(A: CSR) -> CSR:
    """Return ``D^-1/2 (A + I) D^-1/2`` of an unweighted graph; loops only where there are none."""
    coo, xp = A.tocoo(), namespace(A.indptr)
    missing = xp.ones(A.n_rows, bool)
    missing[coo.row[coo.row == coo.col]] = False
    loops = xp.flatnonzero(missing).astype(A.index_dtype)
    ends = (xp.concatenate([coo.row, loops]), xp.concatenate([coo.col, loops]))
    B = COO(*ends, shape=A.shape).tocsr().sorted_indices()
    factors = (1 / xp.sqrt(B.lengths)).astype(np.float32)
    result: CSR = scale(B, row=factors, col=factors)
    return result


def train(data: Labelled, recipe: Recipe) -> GCN:
    """Return the model of the epoch of the highest validation accuracy."""
    torch.manual_seed(0)
    model = GCN(nn.GCNConv, data, recipe).to(data.x.device)
    adam = torch.optim.Adam(model.parameters(), recipe.lr, weight_decay=recipe.weight_decay)
    at, best, highest = data.parts["train"], model.state_dict(), -1.0
    for _ in range(recipe.epochs):
        model.train()
        adam.zero_grad()
        loss = cross_entropy(model(data.x, data.graph)[at], data.y[at])
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        accuracy = data.accuracy(predict(model, data), "val")
        if accuracy > highest:
            best, highest = deepcopy(model.state_dict()), accuracy
    model.load_state_dict(best)
    return model.eval()


def predict(model: Module, data: Labelled) -> Tensor:
    """Return logits, in evaluation."""
    model.eval()
    with torch.no_grad():
        out: Tensor = model(data.x, data.graph)
    return out


def over_sample(model: GCN, width: int, strategy: str) -> Module:
    """Return the model over samples."""
    model = deepcopy(model)
    for layer in (model.first, model.second):
        layer.sample, layer.strategy = width, strategy  # type: ignore[assignment]
    return model


def by_torch(model: GCN, data: Labelled, recipe: Recipe, kept: CSR | None = None) -> Module:
    """Return the model with torch.sparse's products; in float64 over the graph that is ``kept``.

    Sums of its rows are multiplied by the entries they had over those they have; loops stay.
    """
    A, B = data.graph.csr, normalised(data.graph.csr)
    if kept is None:
        there, own = _baselines.torch_csr(B), 0.0
    else:
        xp, degrees = namespace(A.indptr), B.lengths.astype(np.float64)
        shares, root = A.lengths / kept.lengths.clip(1), 1 / xp.sqrt(degrees)
        own = _baselines.tensor((degrees - A.lengths) / degrees)[:, None]
        there = _baselines.torch_csr(scale(kept, row=root * shares, col=root))
    product = (lambda h: there @ h) if kept is None else (lambda h: there @ h + own * h)
    other = GCN(partial(Product, product=product), data, recipe)
    other.load_state_dict(model.state_dict())
    return other.to(data.x.device, torch.float32 if kept is None else torch.float64).eval()


def models(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every graph, number of entries and strategy."""
    for name, source in _graphs.chosen(options, ("reddit",), cpu=("small",), real=REAL):
        data, recipe = labelled(name, source, options.device), RECIPES.get(name, Recipe())
        recipe = replace(recipe, epochs=QUICK_EPOCHS) if options.quick else recipe
        model, A = train(data, recipe), data.graph.csr
        full = data.accuracy(predict(model, data), "test")
        facts = {"graph": name, "degree": A.nnz / A.n_rows, "full_test": full}
        calls = {"full_ms": partial(predict, model, data)}
        calls["torch_ms"] = partial(predict, by_torch(model, data, recipe), data)
        for width in options.sample or RATES:
            for strategy in options.strategies or STRATEGIES:
                row = {"case": f"{name} {strategy} S={width}", "strategy": strategy}
                ours = over_sample(model, width, strategy)
                row |= {"sample": width} | facts | _accuracy(ours, strategy, data)
                row["lost"] = 100 * (full - row["accuracy"])
                # Of ``random``, which draws anew, the model over all entries is checked.
                known = strategy != "random"
                kept = sample(A, width, strategy=strategy) if known else A
                exact = by_torch(model, data, recipe, kept)(data.x.double(), data.graph)
                logits = predict(ours if known else model, data)
                row["error"] = _oracle.norm_error([logits], [exact])
                row |= _oracle.refused(_oracle.over(row["error"], LOGITS))
                timed = {"ms": partial(predict, ours, data), **calls}
                yield row | _harness.timed(timed, cuda=options.cuda, quick=options.quick)


def _accuracy(model: Module, strategy: str, data: Labelled) -> Row:
    torch.manual_seed(0)
    draws = DRAWS if strategy == "random" else 1
    shares = [data.accuracy(predict(model, data), "test") for _ in range(draws)]
    return {"accuracy": float(np.mean(shares)), "draws": shares}


def _is_plain(row: Row) -> bool:
    return (row["dtype"], row["feat"]) == ("float32", FEAT)


def _least(row: Row) -> float | None:
    stated = OVER_CUSPARSE.get((row["graph"], row["strategy"]), ())
    return dict(zip(SAMPLES, stated, strict=False)).get(row["sample"])


def _is_stated(row: Row) -> bool:
    return row["graph"] == "reddit" and (row["strategy"], row["sample"]) in STATED


def _is_low(row: Row) -> bool:
    return _is_plain(row) and row["graph"] in LOW_DEGREE


SECTIONS = {
    "table": Section(
        table,
        (
            Limit("over_cusparse", "each", least=_least, where=_is_plain),
            Limit("over_spmm", least=1.0, by=("graph",), where=_is_low),
            Limit("over_weighted", most=WEIGHTED, where=_is_plain),
            Limit("error", most=lambda row: _oracle.LIMITS[row["dtype"]], by=("dtype",)),
        ),
    ),
    "rates": Section(rates, (Limit("error", most=EXACT, on=("cpu", "cuda")),)),
    "models": Section(
        models,
        (
            Limit("over_torch", "each", least=OVER_TORCH, where=_is_stated),
            Limit("lost", "each", most=MOST_LOST, where=_is_stated),
            Limit("full_test", by=("graph",)),
            Limit("over_torch", by=("graph",), high=True, where=lambda row: row["lost"] < 1),
            Limit("over_full", by=("graph",), high=True, where=lambda row: row["lost"] < 1),
            Limit("error", high=True),
        ),
    ),
}
EXTRA = {"dtypes": names, "strategies": names, "sample": numbers}
BENCHMARKS = {"sampled": Benchmark("sampled", __doc__, SECTIONS, EXTRA)}
