"""Models that are planned for a graph of ranks, beside the same models of one process."""

import math
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from dist_cases import FEAT, N, edges_of, numbers, shared_out, worst
from torch import Tensor
from torch.nn import Linear, Module, ReLU, Sequential

from sparsefmt import Graph, nn, optimize
from sparsefmt.distributed import DistGraph, sum_gradients
from sparsefmt.distributed.halo import Halo
from sparsefmt.errors import SparseFmtError
from sparsefmt.model import optimizing
from sparsefmt.model.program import Program
from sparsefmt.plan.pricing import Constants

WIDE, OUT = 9, 3
#: Name -> a layer of these widths.
LAYERS: dict[str, Any] = {
    "gcn": nn.GCNConv,
    "sage": nn.SAGEConv,
    "gat": nn.GATConv,
    "gat without loops": lambda n_in, n_out: nn.GATConv(n_in, n_out, add_self_loops=False),
    "gin": lambda n_in, n_out: nn.GINConv(Sequential(Linear(n_in, n_out), ReLU())),
    "gin of its own": lambda n_in, n_out: nn.GINConv(Linear(n_in, n_out), 0.5),
    "sg": lambda n_in, n_out: nn.SGConv(n_in, n_out, K=2),
    "sg without loops": lambda n_in, n_out: nn.SGConv(n_in, n_out, K=2, add_self_loops=False),
    "tag": lambda n_in, n_out: nn.TAGConv(n_in, n_out, K=2),
}


class Net(Module):
    """Two layers: one that widens, one that narrows."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = LAYERS[name](FEAT, WIDE), LAYERS[name](WIDE, OUT)
        self.double()

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        return self.last(self.first(x, graph).tanh(), graph)


def of_ranks(group: Any, graph: str, bounds: str = "balanced") -> tuple[DistGraph, slice]:
    """The part of a graph that this rank has, and its rows."""
    edges = edges_of(graph)
    _, borders, rows, mine = shared_out(group, edges, bounds)
    return DistGraph(edges[:, mine], borders, group), rows


def step(model: Module, x: Tensor, graph: Any, rows: slice = slice(None)) -> list[Any]:
    """The result of a model, and the gradients of its parameters and features."""
    model.zero_grad()
    x.grad = None
    y = model(x, graph)
    (y * numbers(N, y.shape[1]).flip(0)[rows]).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def all_compositions(group: Any, name: str, graph: str, bounds: str, constant: bool) -> float:
    """Largest difference from one process of a step by the choice, and by each composition."""
    model, edges = Net(name), edges_of(graph)
    alone = deepcopy(model)
    whole, borders, rows, mine = shared_out(group, edges, bounds)
    wanted = step(alone, numbers(N, FEAT).requires_grad_(not constant), whole)
    wanted = [wanted[0][rows], None if constant else wanted[1][rows], *wanted[2:]]
    shared = DistGraph(edges[:, mine], borders, group)
    x = numbers(N, FEAT)[rows].clone().requires_grad_(not constant)
    found = optimize(model, shared, x=x, training=True)

    def difference() -> float:
        y, grad, *_ = step(model, x, shared, rows)
        sum_gradients(model, group)
        given = [y, grad, *(p.grad for p in model.parameters())]
        return worst(list(zip(given, wanted, strict=True)))

    seen = [difference(), difference()]  # the second with what was kept
    made = [one for plans in found.compositions.values() for one in plans.plans.values()]
    # GAT's own way is alone in sending features that stay once, and no scores.
    assert len(made) == (0 if name == "gin of its own" else 1 if constant and "gat" in name else 2)
    for number in range(max((len(one.plan.candidates) for one in made if one.plan), default=0)):
        for module in model.children():
            module._plan.left.clear()  # type: ignore[union-attr]
        for one in made:
            trees = [candidate.tree for candidate in one.plan.candidates] if one.plan else []
            one.program = Program(trees[number % len(trees)])
        seen.append(difference())
    return max(seen)


def of_a_lost_halo(group: Any, name: str) -> float:
    """The same difference where each exchange brings NaN."""
    real = Halo.receive
    Halo.receive = lambda halo, received: real(halo, received) * math.nan
    try:
        return all_compositions(group, name, "random", "balanced", False)
    finally:
        Halo.receive = real


def choices(group: Any, name: str, graph: str, bounds: str, training: bool) -> list[str]:
    """What a rank says of its plan; ranks have constants of their own."""
    (shared, rows), rank = of_ranks(group, graph, bounds), dist.get_rank(group)
    real = optimizing.constants_of
    optimizing.constants_of = lambda device: scaled(real(device), 10.0**rank)
    try:
        x = numbers(N, FEAT)[rows].clone()
        found = optimize(Net(name), shared, x=x, training=training, steps=5)
        return [found.explain(), *(str(found).splitlines())]
    finally:
        optimizing.constants_of = real


def scaled(constants: Constants, factor: float) -> Constants:
    """Constants of a device whose products take longer, and whose maps do not."""
    seconds = {
        kind: row if kind == "gemm" else tuple(factor * part for part in row)
        for kind, row in constants.seconds.items()
    }
    return Constants(constants.device, constants.cache, seconds)


def bytes_of(group: Any, name: str, widths: tuple[int, int]) -> dict[str, Any]:
    """What a layer of these widths sends in a step, and what would go at each width."""
    shared, rows = of_ranks(group, "random")
    torch.manual_seed(3)
    model = LAYERS[name](*widths).double()
    x = numbers(N, widths[0])[rows].clone().requires_grad_()
    found = optimize(model, shared, training=True, mode="model")
    (plan,) = found.layers.values()
    step(model, x, shared, rows)  # factors of vertices travel once
    before = shared.halo.traffic.nbytes
    step(model, x, shared, rows)
    sent, received = sum(shared.halo.sent), sum(shared.halo.received)
    if shared.halo.gathered is not None:
        sent = (shared.halo.gathered.ranks - 1) * shared.halo.gathered.most
    return {
        "bytes": shared.halo.traffic.nbytes - before,
        "each": (sent + received) * 8,
        "tree": str(plan.chosen.tree),
        "exchange": plan.chosen.parts["exchange"],
    }


def constant_features(group: Any) -> list[int]:
    """Exchanges of the first forward, and of a second one, of features that stay."""
    shared, rows = of_ranks(group, "random")
    x, model = numbers(N, FEAT)[rows].clone(), nn.GCNConv(FEAT, OUT).double()
    plan = optimize(model, shared, x=x, training=True)
    made = []
    for _ in range(2):
        before = shared.halo.traffic.exchanges
        model(x, shared).sum().backward()
        made.append(shared.halo.traffic.exchanges - before)
    (found,) = plan.layers.values()
    assert "((D·A·D)·H)·W" in found.explain()
    assert found.chosen.parts.get("exchange", 0.0) == 0
    return made


def forgotten(group: Any) -> list[float]:
    """Differences after a write that torch does not count, once the graph forgets what it has."""
    whole, borders, rows, mine = shared_out(group, edges_of("random"), "balanced")
    shared = DistGraph(edges_of("random")[:, mine], borders, group)
    x, model = numbers(N, FEAT)[rows].clone(), nn.GCNConv(FEAT, WIDE).double()
    alone = deepcopy(model)
    optimize(model, shared, x=x, training=True)
    runs = [(model(x, shared), alone(numbers(N, FEAT), whole)[rows])]
    x.data.mul_(3)
    shared.forget()
    runs.append((model(x, shared), alone(3 * numbers(N, FEAT), whole)[rows]))
    return [worst([run]) for run in runs]


def not_given(group: Any) -> int:
    """Exchanges of a later step of a model planned without its features, which stay."""
    shared, rows = of_ranks(group, "random")
    x, model = numbers(N, FEAT)[rows].clone(), nn.GCNConv(FEAT, OUT).double()
    optimize(model, shared, training=True)
    for _ in range(2):
        before = shared.halo.traffic.exchanges
        model(x, shared).sum().backward()
    return shared.halo.traffic.exchanges - before


def others(group: Any) -> list[float]:
    """Differences from one process of a planned model on other graphs, copied and restored."""
    whole, borders, rows, mine = shared_out(group, edges_of("hub"), "balanced")
    other = DistGraph(edges_of("hub")[:, mine], borders, group)
    model = Net("gcn")
    wanted = step(deepcopy(model), numbers(N, FEAT).requires_grad_(), whole)[0][rows]
    x = numbers(N, FEAT)[rows].clone().requires_grad_()
    found = optimize(model, of_ranks(group, "random", "one each")[0], training=True)
    on_one = Net("gcn")
    optimize(on_one, whole, training=True)
    runs = [model(x, other), deepcopy(model)(x, other), on_one(x, other)]
    found.restore()
    runs.append(model(x, other))
    assert not any("_plan" in vars(module) for module in model.modules())
    return [worst([(run, wanted)]) for run in runs]


class Holding(Module):
    """A model that has its graph."""

    def __init__(self, graph: Any) -> None:
        super().__init__()
        self.conv, self.graph = nn.SAGEConv(FEAT, OUT).double(), graph

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x, self.graph)


def held(group: Any) -> str:
    """The plan of a model that has its graph; only the first rank asks what it says."""
    shared, rows = of_ranks(group, "random")
    model = Holding(shared)
    x = numbers(N, FEAT)[rows].clone()
    found = optimize(model, model.graph, x=x, training=True)
    return found.explain() if dist.get_rank(group) == 0 else str(found.layers.keys())


def refusals(group: Any) -> list[tuple[str, str]]:
    """What is said where ranks ask for different plans, or one of them for none."""
    shared, rows = of_ranks(group, "random")
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    x = numbers(N, FEAT)[rows].clone()
    model = Net("gcn")
    found = []
    frozen, wider = nn.GCNConv(FEAT, OUT), nn.GCNConv(FEAT, WIDE if last else OUT)
    frozen.lin.requires_grad_(not last)
    for asked, options in (
        (model, {"steps": 3 if last else 4, "x": x}),
        (model, {"training": last}),
        (model, {"x": x.clone().requires_grad_() if last else x}),
        (model, {"mode": "fast" if last else "auto"}),
        (frozen, {"training": True}),
        (wider, {"training": True}),
        (model, {"mode": "fast"}),
    ):
        try:
            optimize(asked, shared, **options)
        except SparseFmtError as error:
            found.append((type(error).__name__, str(error)))
    assert not any("_plan" in vars(module) for module in model.modules())
    return found


def of_one_rank(group: Any) -> list[str]:
    """Plans of a graph that one rank has, and of the same graph by itself."""
    whole = Graph.from_edge_index(edges_of("random"), num_nodes=N)
    x = numbers(N, FEAT)
    plans = []
    for graph in (DistGraph(edges_of("random"), (0, N), group), whole):
        model = Net("gcn")
        plans.append(optimize(model, graph, x=x, training=True, mode="model").explain())
    return plans


def narrow(group: Any) -> list[float]:
    """Seconds of a plan's exchanges where features travel as they are, and in fewer bytes."""
    edges = edges_of("random")
    _, borders, _, mine = shared_out(group, edges, "balanced")
    found = []
    for dtype in (None, torch.float16):
        shared = DistGraph(edges[:, mine], borders, group, exchange_dtype=dtype)
        plan = optimize(nn.GATConv(FEAT, 4096).double(), shared, training=True)
        found.append(plan.layers[""].chosen.parts["exchange"])
    return found
