"""Wall time of training steps, the host's included, beside PyG's: until the device is done.

Sections: ``changing``, a layer on an ``edge_index`` that no step has had before, beside one that
stays; ``eager``, steps on a graph of pubmed's size beside PyG's and the same linear maps without
any graph, the floor; ``captured``, such a step as one CUDA graph by ``nn.capture``; ``loader``, a
step of GraphSAGE on sampled neighbours; ``molecules``, an epoch of GIN on batches of 256 small
graphs; ``first_step``, the first step of a fresh process from a wheel, with empty caches and with
warm ones; and ``small``, a product of 34 vertices beside SciPy's.

Losses and gradients are compared with PyG's in float64 before any is timed; no error may be beyond
``MOST_ERROR``, or four times PyG's own in float32 (a sum over all edges, as attention's vectors
have it, cancels).  All take turns in one process.
"""

import argparse
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial, reduce
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch
from torch.nn import BatchNorm1d, Linear, Module, ModuleList, ReLU, Sequential
from torch.nn.functional import cross_entropy, dropout

from sparsefmt import CSR, Graph, nn, ops

from . import _graphs, _harness, _oracle
from ._harness import Call
from ._table import Benchmark, Limit, Row, Section
from .first_step import COLD, WARM, first_step

MOST_ERROR, MOST_OF_PYG = 1e-4, 1e-2
#: Vertices and edges of graphs used once, features of their layer, and how many take turns.
SIZES = ((1_000, 8_000), (20_000, 200_000), (200_000, 2_000_000))
CHANGING, FEAT, GRAPHS, SIZES_OF_ONE = ("SAGEConv", "GCNConv", "GINConv", "GATConv"), 64, 10, 997
#: Forward calls that tell what remembering an ``edge_index`` costs, and so many at a time.
CALLS, ROUND = 2000, 20
#: Of pubmed: vertices, edges and widths.
N, EDGES, WIDTHS, LAYERS = 19_717, 88_648, (500, 16, 3), ("GCNConv", "SAGEConv", "GATConv")
STEPS = 10  #: captured ones that are compared with eager ones
#: Vertices of a batch, neighbours of a vertex in each hop, width, features and classes.
BATCH, FAN_OUT, HIDDEN, PRODUCTS = 1024, (15, 10, 5), 256, (100, 47)
#: Small graphs of a batch, layers, width and features; vertices of each and bonds of a vertex.
MOLECULES, GIN, ATOMS, BONDS = 256, (5, 64, 32), (12, 36), 2.2


def random_edges(n: int, edges: int, device: str) -> Any:
    """Draw an ``edge_index`` without loops; of several of one vertex PyG's GCN takes the last."""
    source = torch.randint(0, n, (edges,), device=device)
    return torch.stack([source, (source + torch.randint(1, n, (edges,), device=device)) % n])


def runs_of(options: argparse.Namespace, runs: int = 40) -> dict[str, Any]:
    """Return how often steps are timed."""
    quick = options.quick
    return {"cuda": options.cuda, "runs": 5 if quick else runs, "warmups": 2 if quick else 10}


def error_row(ours: list[Any], theirs: Any, exact: Any) -> Row:
    """Return the largest error of ours, and ``wrong`` where it is beyond PyG's own."""
    error, of_pyg = (_oracle.norm_error(one, exact) for one in (ours, theirs))
    right = error <= max(MOST_ERROR, 4 * of_pyg) and of_pyg < MOST_OF_PYG
    row = {"error": error, "pyg_error": of_pyg}
    return row if right else row | {"wrong": f"off by {error:.1e}, PyG in float32 by {of_pyg:.1e}"}


# A graph used once


def changing(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every layer at every size."""
    for n, edges in SIZES[:1] if options.quick else SIZES:
        for name in CHANGING:
            row: Row = {"case": f"{name} {n}/{edges}", "edges": edges}
            yield row | _changing(name, n, edges, options)


def _changing(name: str, n: int, edges: int, options: argparse.Namespace) -> Row:
    import torch_geometric.nn as pyg

    def layer(library: Any) -> Any:
        width = (Linear(FEAT, FEAT),) if name == "GINConv" else (FEAT, FEAT)
        return getattr(library, name)(*width).to(options.device)

    torch.manual_seed(0)
    ours, theirs = layer(nn), layer(pyg)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(n, FEAT, device=options.device, requires_grad=True)
    gradient = torch.randn(n, FEAT, device=options.device)
    stock = [random_edges(n, edges, options.device) for _ in range(GRAPHS)]

    def step(layer: Any, graph: Any, x: Any = x) -> Any:
        y = layer(x, graph)
        inputs = [x, *layer.parameters()]
        return y.detach(), *torch.autograd.grad(y, inputs, gradient.to(y.dtype))

    def graph_of(edges: Any) -> Graph:
        return Graph.from_edge_index(edges, num_nodes=n)

    exact = step(deepcopy(theirs).double(), stock[0], x.detach().double().requires_grad_())
    results = [step(ours, graph) for graph in (graph_of(stock[0]), stock[0])]
    rows = [error_row(result, step(theirs, stock[0]), exact) for result in results]
    row = max(rows, key=lambda row: float(row["error"]))
    fresh = (stock[i % GRAPHS][:, i % SIZES_OF_ONE :].clone() for i in count())
    kept = stock[0].clone()
    graph = graph_of(kept)

    def new(run: Callable[[Any], Any]) -> Callable[[], Call]:
        def make() -> Call:
            edges = next(fresh)
            return lambda: run(edges)

        return make

    makers: dict[str, Callable[[], Call]] = {
        "ms": new(lambda edges: step(ours, graph_of(edges))),
        "edge_index_ms": new(lambda edges: step(ours, edges)),
        "pyg_ms": new(lambda edges: step(theirs, edges)),
        "kept_graph_ms": lambda: lambda: step(ours, graph),
        "kept_edge_index_ms": lambda: lambda: step(ours, kept),
    }
    row |= _harness.walls(makers, **runs_of(options))
    more = []
    with torch.no_grad():
        for _ in range((100 if options.quick else CALLS) // ROUND):
            seconds = []
            for known in (graph, kept):
                _harness.wait(cuda=options.cuda)
                start = time.perf_counter()
                for _ in range(ROUND):
                    ours(x, known)
                seconds.append(time.perf_counter() - start)
            more.append((seconds[1] - seconds[0]) / ROUND)
    return row | {"of_pyg": row["ms"] / row["pyg_ms"], "more_us": 1e6 * statistics.median(more)}


# Steps on a small graph


def loss_of(model: Any, graph: Any, x: Any, labels: Any, share: float = 0.5) -> Any:
    """Return the loss of two layers, with a share of the hidden features dropped."""
    first, second = model
    return cross_entropy(second(dropout(first(x, graph).relu(), share), graph), labels)


class Steps:
    """A model of two layers on a graph of pubmed's size, with the functions that are timed."""

    def __init__(self, make: Any, graph: Any, data: Any, *, capturable: bool = False) -> None:
        torch.manual_seed(0)
        x, self.graph = data[0], graph
        layers = [make(a, b).to(x.device) for a, b in pairwise(WIDTHS)]
        model = self.model = ModuleList(layers)
        more = {"fused": x.is_cuda, "capturable": capturable}
        adam = torch.optim.Adam(model.parameters(), lr=0.01, **more)

        def both(x: Any, labels: Any) -> Any:
            adam.zero_grad()
            loss = loss_of(model, graph, x, labels)
            loss.backward()
            return loss

        def step(x: Any, labels: Any) -> Any:
            loss = both(x, labels)
            adam.step()
            return loss

        self.calls = {"forward": partial(loss_of, model, graph), "both": both, "step": step}

    def gradients(self, data: Any, *, wide: bool = False) -> list[Any]:
        """Return the loss without dropout and the gradients, in float64 if ``wide``."""
        model, (x, labels) = deepcopy(self.model), data
        model, x = (model.double(), x.double()) if wide else (model, x)
        loss = loss_of(model, self.graph, x, labels, share=0.0)
        return [loss, *torch.autograd.grad(loss, [*model.parameters()])]


def linear_maps(name: str) -> Any:
    """Return a maker of the linear maps that the layer of that name has, without a graph."""

    class Maps(ModuleList):
        def __init__(self, *sizes: int) -> None:
            own = [Linear(*sizes, bias=False)] if name == "SAGEConv" else []
            super().__init__([Linear(*sizes), *own])

        def forward(self, x: Any, _: Any) -> Any:
            return reduce(torch.add, [maps(x) for maps in self])

    return Maps


def eager(options: argparse.Namespace) -> Iterator[Row]:
    """Yield forward, forward and backward, and steps, of each layer in three ways."""
    for name in LAYERS:
        ways, data = _steps_of(name, options.device)
        exact = ways["pyg"].gradients(data, wide=True)
        both = [ways[way].gradients(data) for way in ("ours", "pyg")]
        row = {"case": name} | error_row(*both, exact)
        makers = {
            f"{way}_{part}_ms": partial(partial, call, *data)
            for way, steps in ways.items()
            for part, call in steps.calls.items()
        }
        row |= _harness.walls(makers, **runs_of(options, 100))
        of = {other: row["ours_both_ms"] / row[f"{other}_both_ms"] for other in ("floor", "pyg")}
        yield row | {f"of_{other}": ratio for other, ratio in of.items()}


def _steps_of(name: str, device: str, *, capturable: bool = False) -> tuple[dict[str, Steps], Any]:
    """Return ours, PyG's and the linear maps alone, with the same weights."""
    import torch_geometric.nn as pyg

    torch.manual_seed(1)
    edges = random_edges(N, EDGES, device)
    data = (
        torch.randn(N, WIDTHS[0], device=device),
        torch.randint(WIDTHS[-1], (N,), device=device),
    )
    graph = Graph.from_edge_index(edges, num_nodes=N)
    ways = {
        "ours": Steps(getattr(nn, name), graph, data, capturable=capturable),
        "pyg": Steps(getattr(pyg, name), edges, data),
        "floor": Steps(linear_maps(name), None, data),
    }
    ways["pyg"].model.load_state_dict(ways["ours"].model.state_dict())
    return ways, data


def captured(options: argparse.Namespace) -> Iterator[Row]:
    """Yield steps of each layer eager, captured and by PyG; the first steps are compared."""
    for name in LAYERS:
        ways, data = _steps_of(name, options.device)
        steps = _steps_of(name, options.device, capturable=True)[0]["ours"]
        calls: dict[str, Any] = {"ms": nn.capture(steps.calls["step"], *data)}
        calls |= {"eager_ms": ways["ours"].calls["step"], "pyg_ms": ways["pyg"].calls["step"]}
        for call in (calls["ms"], calls["eager_ms"]):
            torch.manual_seed(2)
            for _ in range(STEPS):
                call(*data)
        left = [[*one.model.parameters()] for one in (steps, ways["ours"])]
        error = _oracle.norm_error(*left)
        row: Row = {"case": name} | _oracle.judged(error, MOST_ERROR)
        makers = {way: partial(partial, call, *data) for way, call in calls.items()}
        row |= _harness.walls(makers, **runs_of(options, 100))
        yield row | _harness.speed_ups(row)


# Batches


def sampled_batch(A: CSR, seeds: Any, chance: int) -> tuple[Any, Any]:
    """Return vertices, those of the batch first, and the edges in their numbers, hop by hop.

    As PyG's ``NeighborLoader`` gives them, which needs pyg-lib: each vertex of a hop gets its
    in-neighbours one after another, so that targets ascend.
    """
    number = np.full(A.n_rows, -1, np.int64)
    number[seeds] = np.arange(len(seeds))
    met, first, ends = [seeds], 0, []
    for hop, fan in enumerate(FAN_OUT):
        frontier = met[-1]
        near = ops.sample(A[frontier], fan, strategy="random", seed=chance + hop)
        new, places = np.unique(near.indices[number[near.indices] < 0], return_index=True)
        new = new[np.argsort(places)].astype(np.int64)
        total = first + len(frontier)
        number[new] = total + np.arange(len(new))
        targets = np.repeat(first + np.arange(len(frontier)), near.lengths)
        ends.append(np.stack([number[near.indices], targets]))
        met.append(new)
        first = total
    return np.concatenate(met), np.concatenate(ends, axis=1)


def loader(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a step on batches that are drawn before, each ``edge_index`` a new tensor."""
    for name, graph in _graphs.loaded(options, ("products",), cpu=("flickr",)):
        A = graph.to("cpu")
        order = np.random.default_rng(0).permutation(A.n_rows)
        size = min(BATCH, A.n_rows // 4)
        start, drawn = time.perf_counter(), []
        for at in range(4):
            drawn.append(sampled_batch(A, order[size * at : size * (at + 1)], 10 * at))
        sampling_ms = (time.perf_counter() - start) * 1e3 / len(drawn)
        torch.manual_seed(0)
        x, y = torch.randn(A.n_rows, PRODUCTS[0]), torch.randint(PRODUCTS[1], (A.n_rows,))
        batches = []
        for vertices, edges in drawn:
            n_id = torch.from_numpy(vertices)
            parts = x[n_id], torch.from_numpy(edges), y[n_id[:size]]
            batches.append([part.to(options.device) for part in parts])
        row: Row = {"case": name, "vertices": len(drawn[0][0]), "edges": drawn[0][1].shape[1]}
        yield row | {"sampling_ms": sampling_ms} | _batches("SAGEConv", batches, options)


def molecules(options: argparse.Namespace) -> Iterator[Row]:
    """Yield an epoch on batches that PyG's ``DataLoader`` collates, and on ``Graph.batch``."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    chance, graphs = np.random.default_rng(0), []
    for at in range(300 if options.quick else 8 * MOLECULES):
        n = int(chance.integers(*ATOMS))
        path = np.stack([np.arange(n - 1), np.arange(1, n)])
        others = chance.integers(0, n, (2, max(0, int((BONDS - 2) * n / 2))))
        bonds = np.concatenate([path, others], 1)
        edges = torch.from_numpy(np.concatenate([bonds, bonds[::-1]], 1))
        x = torch.from_numpy(chance.standard_normal((n, GIN[2])).astype(np.float32))
        graphs.append(Data(x=x, edge_index=edges, y=torch.tensor([at % 2]), at=at))
    start = time.perf_counter()
    # Of most orders a ReLU flips by rounding, and gradients by 1e-4, PyG's too: not of this one.
    order = torch.Generator().manual_seed(2)
    collated = [*DataLoader(graphs, MOLECULES, shuffle=True, generator=order)]
    loader_ms = (time.perf_counter() - start) * 1e3
    pieces = [
        Graph.from_edge_index(one.edge_index.to(options.device), num_nodes=one.num_nodes)
        for one in graphs
    ]
    members = ([pieces[at] for at in one.at.tolist()] for one in collated)
    joined = [partial(Graph.batch, graphs) for graphs in members]
    batches = [
        [part.to(options.device) for part in (one.x, one.edge_index, one.y, one.batch)]
        for one in collated
    ]
    row: Row = {"case": "generated", "graphs": len(graphs), "loader_ms": loader_ms}
    yield row | _batches("GINConv", batches, options, joined)


def _network(library: Any, name: str, feat: int, classes: int) -> Any:
    """Build three layers of GraphSAGE, or five of GIN with a sum over each graph's vertices."""
    from torch_geometric.nn import global_add_pool

    def gin(n: int, m: int) -> Any:
        maps = Linear(n, m), BatchNorm1d(m), ReLU(), Linear(m, m), ReLU()
        return library.GINConv(Sequential(*maps))

    class Model(Module):
        def __init__(self) -> None:
            super().__init__()
            sage = name == "SAGEConv"
            widths = (feat, HIDDEN, HIDDEN, classes) if sage else (feat, *[GIN[1]] * GIN[0])
            make = library.SAGEConv if sage else gin
            self.layers = ModuleList(make(*pair) for pair in pairwise(widths))
            self.last = None if sage else Linear(GIN[1], classes)

        def forward(self, x: Any, graph: Any, labels: int, batch: Any = None) -> Any:
            for at, layer in enumerate(self.layers):
                x = layer(x.relu() if at and self.last is None else x, graph)
            return x[:labels] if self.last is None else self.last(global_add_pool(x, batch, labels))

    return Model()


def _batches(name: str, batches: Any, options: argparse.Namespace, joined: Any = ()) -> Row:
    """Compare both libraries on a batch, then time epochs over all, each graph made anew."""
    import torch_geometric.nn as pyg

    sizes = batches[0][0].shape[1], PRODUCTS[1] if name == "SAGEConv" else 2
    torch.manual_seed(0)
    ours, theirs = (_network(one, name, *sizes).to(options.device) for one in (nn, pyg))
    theirs.load_state_dict(ours.state_dict())
    adams = {one: torch.optim.Adam(one.parameters(), lr=1e-3) for one in (ours, theirs)}

    def loss(model: Any, at: int, graph: Any) -> Any:
        x, _, y, *batch = batches[at]
        x = x.to(next(model.parameters()).dtype)
        return cross_entropy(model(x, graph, len(y), *batch), y)

    def gradients(model: Any, graph: Any) -> list[Any]:
        copied = deepcopy(model)  # whose running means may change
        value = loss(copied, 0, graph)
        parts = torch.autograd.grad(value, [*copied.parameters()])
        # As one tensor: a bias before a normalisation has a gradient of 0, which no error is near.
        return [value, torch.cat([one.flatten() for one in parts])]

    def epoch(model: Any, graphs: Any) -> None:
        for at in range(len(batches)):
            adams[model].zero_grad()
            loss(model, at, graphs[at]() if callable(graphs[at]) else graphs[at]).backward()
            adams[model].step()

    def fresh(model: Any) -> Callable[[], Call]:
        def make() -> Call:
            edges = [one[1].clone() for one in batches]
            return lambda: epoch(model, edges)

        return make

    edges = batches[0][1]
    exact = gradients(deepcopy(theirs).double(), edges)
    graphs = [edges, *(make() for make in joined[:1])]
    pyg_result = gradients(theirs, edges)
    rows = [error_row(gradients(ours, graph), pyg_result, exact) for graph in graphs]
    row = max(rows, key=lambda row: float(row["error"]))
    makers = {"ms": fresh(ours), "pyg_ms": fresh(theirs)}
    if joined:
        makers["joined_ms"] = lambda: lambda: epoch(ours, joined)
    row |= _harness.walls(makers, **runs_of(options, 20))
    ratios = {"of_pyg": "ms", "joined_of_pyg": "joined_ms"}
    return row | {to: row[name] / row["pyg_ms"] for to, name in ratios.items() if name in row}


def small(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a product with Zachary's 34 vertices: the least of the rounds, in us a call."""
    import scipy.sparse
    from torch_geometric.datasets import KarateClub

    import sparsefmt
    from sparsefmt.testing import error_bound, spmm_oracle

    edges = KarateClub()[0].edge_index.numpy()
    karate = sparsefmt.from_edge_index(edges, num_nodes=34, index_dtype=np.int32).tocsr()
    rng = np.random.default_rng(0)
    calls, rounds = (200, 5) if options.quick else (2000, 30)
    for feat, weighted in ((16, True), (16, False), (34, True), (34, False)):
        values = rng.uniform(1, 2, karate.nnz).astype(np.float32)
        A = karate.with_data(values if weighted else None)
        X = rng.standard_normal((A.n_cols, feat)).astype(np.float32)
        out, ones = np.empty_like(X), np.ones_like(values)
        csr = (values if weighted else ones, A.indices, A.indptr)
        theirs = scipy.sparse.csr_array(csr, shape=A.shape)
        ways: dict[str, Call] = {
            "spmm_us": lambda: ops.spmm(A, X),  # noqa: B023
            "out_us": lambda: ops.spmm(A, X, out=out),  # noqa: B023
            "matmul_us": lambda: A @ X,  # noqa: B023
            "scipy_us": lambda: theirs @ X,  # noqa: B023
        }
        off = np.abs(ops.spmm(A, X) - spmm_oracle(A, X)) > error_bound(A, X)
        row: Row = {"case": f"{feat} features{', weighted' * weighted}"}
        row |= _oracle.judged(float(off.sum()), 0)
        for _ in range(rounds):
            for way, call in ways.items():
                us = timeit.timeit(call, number=calls) / calls * 1e6
                row[way] = min(row.get(way, us), us)
        yield row


ON = ("cpu", "cuda")
SECTIONS = {
    "changing": Section(
        changing,
        (
            Limit("of_pyg", "each", most=lambda r: 0.8 if r["edges"] < 1_000_000 else 0.5, on=ON),
            Limit("more_us", "median", most=5.0),
        ),
    ),
    "eager": Section(
        eager,
        (Limit("of_floor", "each", most=1.8), Limit("of_pyg", "each", most=1.0)),
    ),
    "captured": Section(captured, (Limit("over_pyg", "each", least=10.0),), only="cuda"),
    "loader": Section(
        loader,
        (Limit("of_pyg", "each", most=lambda r: 0.8 if r["device"] == "cuda" else 0.9, on=ON),),
    ),
    "molecules": Section(
        molecules,
        (Limit("of_pyg", "each", most=0.8, on=ON), Limit("joined_of_pyg", "each", most=0.8, on=ON)),
    ),
    "first_step": Section(
        first_step,
        (
            Limit("cold_s", "each", most=lambda row: COLD[row["device"]][row["layer"]], on=ON),
            Limit("warm_s", "each", most=lambda row: WARM[row["layer"]], on=ON),
        ),
    ),
    "small": Section(small, (Limit("spmm_us", "each", most=12.0, on=ON),), only="cpu"),
}
BENCHMARKS = {"wallclock": Benchmark("wallclock", __doc__, SECTIONS)}
