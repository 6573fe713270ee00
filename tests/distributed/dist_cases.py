"""What ranks compute in the tests, beside what one process computes of the whole graph."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsefmt import Graph
from sparsefmt.autograd import spmm
from sparsefmt.distributed import DistGraph, balanced, dist_spmm

N, FEAT = 60, 5


def here() -> torch.device:
    """Where this process computes: on its GPU, if NCCL joins it to others."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def edges_of(name: str) -> Tensor:
    """Edges of a graph of ``N`` vertices, the same in each process."""
    make = torch.Generator().manual_seed(0)
    edges = torch.randint(0, N, (2, 400), generator=make)
    if name == "hub":
        edges[1, ::2], edges[0, ::3] = 7, N - 1
    if name == "isolated":  # vertices that nothing leads to or from
        edges = edges[:, (edges % 4 != 0).all(0)]
    if name == "no edges between ranks":
        edges = torch.arange(N).expand(2, N).contiguous()
    return (edges[:, :0] if name == "no edges" else edges).to(here())


GRAPHS = ("random", "hub", "isolated", "no edges between ranks", "no edges")


def bounds_of(name: str, graph: Graph, ranks: int) -> tuple[int, ...]:
    """Borders between ranks: even, uneven, and with ranks that have nothing."""
    if name == "balanced":
        return balanced(graph, ranks)
    if name == "all on the last":
        return (*(0,) * ranks, N)
    if name == "empty ranks":
        return (0,) * (ranks - 1) + (N // 2, N)
    return (0, *range(1, ranks), N)  # one vertex each, and all the rest


BOUNDS = ("balanced", "empty ranks", "one each", "all on the last")


def numbers(*shape: int) -> Tensor:
    """Random numbers in float64, the same in each process."""
    make = torch.Generator().manual_seed(1)
    return torch.randn(*shape, dtype=torch.float64, generator=make).to(here())


def shared_out(
    group: Any, edges: Tensor, bounds: str
) -> tuple[Graph, tuple[int, ...], slice, Tensor]:
    """The whole graph, borders between ranks, and the rows and edges of this rank."""
    whole = Graph.from_edge_index(edges, num_nodes=N)
    borders = bounds_of(bounds, whole, dist.get_world_size(group))
    rank = dist.get_rank(group)
    rows = slice(borders[rank], borders[rank + 1])
    return whole, borders, rows, (edges[1] >= rows.start) & (edges[1] < rows.stop)


def shared_graph(group: Any, name: str = "random", **options: Any) -> tuple[DistGraph, Graph]:
    """Make a graph that ranks share, and the whole of it."""
    whole = Graph.from_edge_index(edges_of(name), num_nodes=N)
    borders = balanced(whole, dist.get_world_size(group))
    return DistGraph.of(whole, borders, group, **options), whole


def said_of(case: Any) -> tuple[str, str]:
    """Run a case; return class and text of the error, whichever it is."""
    try:
        case()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def product(
    group: Any, graph: str, bounds: str, reduce: str, weighted: bool, scaled: bool
) -> float:
    """Largest difference of a product and its gradients from those of one process."""
    edges = edges_of(graph)
    whole, borders, rows, mine = shared_out(group, edges, bounds)
    x, r, c = numbers(N, FEAT), numbers(N), numbers(N).flip(0)
    given: list[Any] = [x, numbers(edges.shape[1]) if weighted else None]
    given += [r, c] if scaled else [None, None]
    cuts = [rows, mine, rows, rows]
    leaves = [None if one is None else one.clone().requires_grad_() for one in given]
    options = {"reduce": reduce}
    y = spmm(whole, leaves[0], leaves[1], row_scale=leaves[2], col_scale=leaves[3], **options)
    own = [
        None if one is None else one[cut].clone().requires_grad_()
        for one, cut in zip(given, cuts, strict=True)
    ]
    shared = DistGraph(edges[:, mine], borders, group)
    z = dist_spmm(shared, own[0], own[1], row_scale=own[2], col_scale=own[3], **options)
    seed = numbers(N, FEAT).flip(0)
    wanted = torch.autograd.grad(y, [one for one in leaves if one is not None], seed)
    found = torch.autograd.grad(z, [one for one in own if one is not None], seed[rows])
    there = [cut for one, cut in zip(given, cuts, strict=True) if one is not None]
    pairs = [(z, y[rows]), *((f, w[cut]) for f, w, cut in zip(found, wanted, there, strict=True))]
    return worst(pairs)


def worst(pairs: list[tuple[Any, Any]]) -> float:
    """Largest difference of pairs of tensors; None stands for zeros, and NaN counts as infinite."""
    found = [torch.zeros((), dtype=torch.float64)]
    for a, b in pairs:
        if a is None and b is None:
            continue
        a, b = (torch.zeros_like(b) if a is None else a), (torch.zeros_like(a) if b is None else b)
        assert a.shape == b.shape, (a.shape, b.shape)
        if a.numel():
            found.append((a.detach() - b.detach()).abs().double().max().cpu())
    return float(torch.stack(found).max().nan_to_num(nan=torch.inf, posinf=torch.inf))
