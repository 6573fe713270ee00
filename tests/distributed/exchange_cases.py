"""What ranks exchange, and how often."""

from typing import Any

import torch
import torch.distributed as dist
from dist_cases import FEAT, N, bounds_of, edges_of, numbers, worst

from sparsefmt import Graph, nn, optimize
from sparsefmt.autograd import spmm
from sparsefmt.distributed import (
    DistGraph,
    accuracy,
    balanced,
    broadcast_parameters,
    cross_entropy,
    dist_spmm,
    sum_gradients,
)
from sparsefmt.errors import SparseFmtError


def shared_graph(group: Any, name: str = "random", **options: Any) -> tuple[DistGraph, Graph]:
    """A graph that ranks share, and the whole of it."""
    whole = Graph.from_edge_index(edges_of(name), num_nodes=N)
    borders = balanced(whole, dist.get_world_size(group))
    return DistGraph.of(whole, borders, group, **options), whole


def sent(graph: DistGraph, step: Any) -> tuple[int, int]:
    """Exchanges and bytes of a step."""
    traffic = graph.halo.traffic
    before = traffic.exchanges, traffic.nbytes
    step()
    return traffic.exchanges - before[0], traffic.nbytes - before[1]


def constant_features(group: Any, name: str) -> list[int]:
    """Exchanges of three steps with the same features, and of one after a change in place."""
    torch.manual_seed(0)
    convs = {"gcn": nn.GCNConv, "sage": nn.SAGEConv, "gat": nn.GATConv}
    conv = convs[name](FEAT, 2 * FEAT).double()
    graph, _ = shared_graph(group)
    held = [graph.rows_of(numbers(N, FEAT))]  # a view, whose base nobody else holds

    def step() -> None:
        conv(held[0], graph).sum().backward()

    found = [sent(graph, step)[0] for _ in range(3)]
    held[0] += 1
    found += [sent(graph, step)[0], sent(graph, step)[0]]
    held.clear()
    return [*found, len(graph.halo._known)]


def shared_exchange(group: Any, name: str) -> int:
    """Exchanges of a layer's forward pass whose features have a gradient."""
    torch.manual_seed(0)
    makes = {
        "gat": lambda: nn.GATConv(FEAT, 3, heads=2),
        "transformer": lambda: nn.TransformerConv(FEAT, 1, heads=2),
        "agnn": lambda: nn.AGNNConv(),
        "sage": lambda: nn.SAGEConv(FEAT, 3),
    }
    conv = makes[name]().double()
    graph, _ = shared_graph(group)
    x = graph.rows_of(numbers(N, FEAT)).requires_grad_()
    return sent(graph, lambda: conv(x, graph))[0]


def maxk_bytes(group: Any, k: int, width: int) -> list[float]:
    """Bytes of a step of SAGE with MaxK, and of one without, in float32."""
    torch.manual_seed(0)
    graph, _ = shared_graph(group)
    x = graph.rows_of(numbers(N, width)).float().requires_grad_()
    found = []
    for conv in (nn.SAGEConv(width, width, k=k), nn.SAGEConv(width, width)):
        found.append(sent(graph, lambda conv=conv: conv(x, graph))[1])
        found.append(sent(graph, lambda conv=conv: conv(x, graph).sum().backward())[1])
    return found


def narrow_exchange(group: Any) -> list[float]:
    """Error of products whose features travel as bfloat16, and bytes over those of float32."""
    graph, whole = shared_graph(group, exchange_dtype=torch.bfloat16)
    wide, _ = shared_graph(group)
    given = numbers(N, FEAT).float()
    x = given.clone().requires_grad_()
    y = spmm(whole, x)
    own = graph.rows_of(given).clone().requires_grad_()
    z = dist_spmm(graph, own)
    z.sum().backward()
    y.sum().backward()
    pairs = [(z.detach(), graph.rows_of(y.detach())), (own.grad, graph.rows_of(x.grad))]
    bound = float(spmm(whole, given.abs()).max()) * 2**-8
    less = sent(graph, lambda: dist_spmm(graph, own))[1]
    more = sent(wide, lambda: dist_spmm(wide, own))[1]
    return [worst(pairs) / bound, less / max(more, 1)]


def gathered(group: Any) -> list[float]:
    """Whether an all-gather is taken where all read all, and the error of products then."""
    generator = torch.Generator().manual_seed(2)
    edges = torch.randint(0, N, (2, 40 * N), generator=generator)
    whole = Graph.from_edge_index(edges, num_nodes=N)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    borders = (*(N * r // ranks + r % 2 for r in range(ranks)), N)
    graph = DistGraph.of(whole, (0, *borders[1:]), group)
    sparse, _ = shared_graph(group, "no edges between ranks")
    x = numbers(N, FEAT).requires_grad_()
    own = graph.rows_of(x.detach()).clone().requires_grad_()
    y, z = spmm(whole, x), dist_spmm(graph, own)
    seed = numbers(N, FEAT).flip(0)
    (y * seed).sum().backward()
    (z * graph.rows_of(seed)).sum().backward()
    pairs = [(z, graph.rows_of(y)), (own.grad, graph.rows_of(x.grad))]
    assert rank == graph.rank
    taken = graph.halo.gathered is not None, sparse.halo.gathered is not None
    return [*map(float, taken), worst([(a.detach(), b.detach()) for a, b in pairs])]


def between_two_sets(group: Any, name: str, bounds: str) -> float:
    """Largest difference of a layer from one process, where sources are other vertices."""
    torch.manual_seed(3)
    m = 37
    makes = {
        "sage": lambda: nn.SAGEConv((FEAT, 2), 3),
        "sage max": lambda: nn.SAGEConv((FEAT, 2), 3, aggr="max"),
        "gin": lambda: nn.GINConv(torch.nn.Linear(FEAT, 3)),
        "gat": lambda: nn.GATConv((FEAT, 2), 3, add_self_loops=False),
        "gatv2": lambda: nn.GATv2Conv((FEAT, 2), 3, add_self_loops=False),
        "transformer": lambda: nn.TransformerConv((FEAT, 2), 3),
    }
    alone, conv = (makes[name]().double() for _ in range(2))
    conv.load_state_dict(alone.state_dict())
    edges = edges_of("random") % torch.tensor([[N], [m]])
    whole = Graph.from_edge_index(edges, num_nodes=(N, m))
    count = dist.get_world_size(group)
    rows = bounds_of(bounds, whole, count) if bounds == "balanced" else (0,) * count + (m,)
    columns = bounds_of(bounds, Graph.from_edge_index(edges_of("hub"), num_nodes=N), count)
    graph = DistGraph.of(whole, rows, group, source_bounds=columns)
    assert graph.shape == whole.shape
    x, target = numbers(N, FEAT), numbers(m, 2 if name != "gin" else FEAT)
    ends = [one.clone().requires_grad_() for one in (x, target)]
    own = [graph.sources_of(x).clone().requires_grad_(), graph.rows_of(target).clone()]
    own[1].requires_grad_()
    y, z = alone(tuple(ends), whole), conv(tuple(own), graph)
    seed = numbers(m, y.shape[1])
    (y * seed).sum().backward()
    (z * graph.rows_of(seed)).sum().backward()
    sum_gradients(conv, group)
    pairs = [(z, graph.rows_of(y)), (own[0].grad, graph.sources_of(ends[0].grad))]
    pairs.append((own[1].grad, None if ends[1].grad is None else graph.rows_of(ends[1].grad)))
    pairs += [(a.grad, b.grad) for a, b in zip(conv.parameters(), alone.parameters(), strict=True)]
    return worst([tuple(None if one is None else one.detach() for one in pair) for pair in pairs])


def training(group: Any, bounds: str) -> list[float]:
    """Differences of a loss, its gradients and a score from those of the whole graph."""
    rank = dist.get_rank(group)
    torch.manual_seed(rank)  # ranks begin with other weights
    model = torch.nn.Sequential(torch.nn.Linear(FEAT, 4), torch.nn.BatchNorm1d(4)).double().eval()
    broadcast_parameters(model, group)
    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(FEAT, 4), torch.nn.BatchNorm1d(4)).double().eval()
    pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
    same = worst([(a.detach(), b.detach()) for a, b in pairs])
    whole = Graph.from_edge_index(edges_of("random"), num_nodes=N)
    graph = DistGraph.of(whole, bounds_of(bounds, whole, dist.get_world_size(group)), group)
    x, labels, mask = numbers(N, FEAT), torch.arange(N) % 4, torch.arange(N) % 3 == 0
    labels[6] = -100
    parts = [graph.rows_of(one) for one in (x, labels, mask)]
    wanted = torch.nn.functional.cross_entropy(alone(x)[mask], labels[mask])
    wanted.backward()
    logits = model(parts[0])
    loss = cross_entropy(logits, *parts[1:], group)
    loss.backward()
    sum_gradients(model.parameters(), group)
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    counted = mask & (labels >= 0)
    right = float((alone(x).argmax(1) == labels)[counted].double().mean())
    score = accuracy(logits, *parts[1:], group)
    empty = cross_entropy(logits, parts[1], torch.zeros_like(parts[2]), group)
    return [
        same,
        abs(float(total - wanted.detach())),
        worst([(a.grad, b.grad) for a, b in pairs]),
        abs(score - right),
        abs(float(empty.detach())),
        abs(accuracy(logits, parts[1], torch.zeros_like(parts[2]), group)),
    ]


def refusals(group: Any) -> list[str]:
    """What is said of arguments that do not fit, on each rank alike."""
    graph, whole = shared_graph(group)
    x = graph.rows_of(numbers(N, FEAT))
    two = DistGraph.of(whole, graph.bounds, group, source_bounds=graph.bounds)
    logits, labels = x, torch.zeros(len(x), dtype=torch.int64)
    turned = nn.SAGEConv(FEAT, 3, flow="target_to_source").double()
    cases: list[Any] = [
        lambda: dist_spmm(graph, x, reduce="max"),
        lambda: dist_spmm(whole, x),
        lambda: DistGraph.of(whole, graph.bounds, group, exchange_dtype="bfloat16"),
        lambda: dist_spmm(graph, torch.cat([x, x])),
        lambda: dist_spmm(graph, x.tolist()),
        lambda: dist_spmm(graph, x.long()),
        lambda: dist_spmm(graph, x, torch.ones(3)),
        lambda: DistGraph.of(whole.with_data(numbers(whole.nnz).numpy()), graph.bounds, group),
        lambda: DistGraph.of(whole, graph.bounds, group, exchange_dtype=torch.int64),
        lambda: DistGraph.of(whole, graph.bounds[1:], group),
        lambda: turned(x, graph),
        lambda: nn.SAGEConv(FEAT, 3).double()(x, graph, size=(N, N)),
        lambda: nn.SAGEConv(FEAT, 3).double()(x, two),
        lambda: nn.GCNConv(FEAT, 3).double()(x, two),
        lambda: nn.GATConv((FEAT, FEAT), 3).double()((x, x.clone()), two),
        lambda: nn.GCNConv(FEAT, 3, aggr="max").double()(x, graph),
        lambda: nn.GCNConv(FEAT, 3).double()(x[1:], graph),
        lambda: sum_gradients(x, group),
        lambda: sum_gradients([3], group),
        lambda: sum_gradients(torch.nn.LazyLinear(3), group),
        lambda: broadcast_parameters([x], group),
        lambda: cross_entropy(logits, labels[:0] if len(x) else x, group=group),
        lambda: cross_entropy(logits, labels.int(), group=group),
        lambda: cross_entropy(logits, labels, labels, group),
        lambda: accuracy(labels, labels, group=group),
        lambda: accuracy(logits, [1], group=group),
        lambda: optimize(nn.GCNConv(FEAT, 3).double(), graph),
    ]
    found = []
    for case in cases:
        try:
            case()
        except SparseFmtError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


def attention_weights(group: Any) -> float:
    """Largest difference of the weights of attention, by edges of the whole graph."""
    torch.manual_seed(0)
    conv = nn.GATConv(FEAT, 3, heads=2).double()
    graph, whole = shared_graph(group)
    x = numbers(N, FEAT)
    y, (edges, weights) = conv(x, whole, return_attention_weights=True)
    z, (mine, found) = conv(graph.rows_of(x), graph, return_attention_weights=True)
    wanted = dict(zip(map(tuple, edges.T.tolist()), weights.detach(), strict=True))
    pairs = [(found[i].detach(), wanted[tuple(edge)]) for i, edge in enumerate(mine.T.tolist())]
    return worst([*pairs, (z.detach(), graph.rows_of(y.detach()))])


def on_one_rank(group: Any, name: str) -> tuple[bool, int]:
    """Whether a layer on one rank gives what it gives of the whole graph, bit by bit."""
    torch.manual_seed(0)
    conv = {"sage": nn.SAGEConv, "gcn": nn.GCNConv, "gat": nn.GATConv}[name](FEAT, 3).double()
    graph, whole = shared_graph(group)
    x = numbers(N, FEAT).requires_grad_()
    same = torch.equal(conv(x, graph), conv(x, whole))
    same = same and torch.equal(dist_spmm(graph, x), spmm(whole, x))
    return same, graph.halo.traffic.exchanges


def autocast(group: Any, name: str) -> list[Any]:
    """The dtype of a layer's result within autocast, and its error over the largest value."""
    torch.manual_seed(0)
    makes = {
        "gcn": lambda: nn.GCNConv(FEAT, 3),
        "gcn maxk": lambda: nn.GCNConv(FEAT, 8, k=3),
        "sage": lambda: nn.SAGEConv(FEAT, 3),
        "gin": lambda: nn.GINConv(torch.nn.Linear(FEAT, 3)),
        "gat": lambda: nn.GATConv(FEAT, 3),
        "transformer": lambda: nn.TransformerConv(FEAT, 3),
    }
    conv = makes[name]()
    graph, whole = shared_graph(group)
    x = numbers(N, FEAT).float()
    own = graph.rows_of(x).clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, z = conv(x, whole), conv(own, graph)
        z.float().sum().backward()
    y = graph.rows_of(y.detach().float())
    return [y.dtype == z.float().dtype, worst([(z.detach().float(), y)]) / float(y.abs().max())]


def repeated(group: Any) -> bool:
    """Whether products and gradients of two calls are the same, bit by bit."""
    graph, _ = shared_graph(group, "hub")
    found = []
    for _ in range(2):
        x = graph.rows_of(numbers(N, FEAT)).float().requires_grad_()
        weight = numbers(graph.local.nnz).float().requires_grad_()
        y = dist_spmm(graph, x, weight, reduce="mean")
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, weight])])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))
