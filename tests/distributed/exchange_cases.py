"""What ranks exchange, and how often."""

import gc
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from dist_cases import FEAT, N, bounds_of, edges_of, here, numbers, shared_out, worst
from torch import Tensor

from sparsefmt import Graph, nn
from sparsefmt.autograd import gat_aggregate, propagate, spmm
from sparsefmt.distributed import (
    DistGraph,
    accuracy,
    balanced,
    broadcast_parameters,
    cross_entropy,
    dist_spmm,
    sum_gradients,
)
from sparsefmt.distributed import graph as graph_module
from sparsefmt.errors import SparseFmtError
from sparsefmt.formats import checks


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
    conv = convs[name](FEAT, 2 * FEAT).double().to(here())
    graph, _ = shared_graph(group)
    held = [graph.rows_of(numbers(N, FEAT))]  # a view, whose base nobody else holds

    def step() -> None:
        conv(held[0], graph).sum().backward()

    found = [sent(graph, step)[0] for _ in range(3)]
    held[0] += 1
    found += [sent(graph, step)[0], sent(graph, step)[0]]
    held.clear()
    return [*found, len(graph.halo.memory)]


def shared_exchange(group: Any, name: str) -> int:
    """Exchanges of a layer's forward pass whose features have a gradient."""
    torch.manual_seed(0)
    makes = {
        "gat": lambda: nn.GATConv(FEAT, 3, heads=2),
        "transformer": lambda: nn.TransformerConv(FEAT, 1, heads=2),
        "agnn": lambda: nn.AGNNConv(),
        "sage": lambda: nn.SAGEConv(FEAT, 3),
    }
    conv = makes[name]().double().to(here())
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
        conv.to(here())
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
    edges = torch.randint(0, N, (2, 40 * N), generator=generator).to(here())
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


Refusals = list[tuple[Any, str, str]]


def refusals(group: Any) -> list[tuple[str, str, str, str]]:
    """Class and words that are wanted of a refusal, and those that come, on each rank alike."""
    graph, whole = shared_graph(group)
    x = graph.rows_of(numbers(N, FEAT))
    cases = of_graphs(graph, whole, group) + of_products(graph, whole, x)
    cases += of_training(x, group)
    if dist.get_world_size(group) > 1:  # one rank runs layers as with a Graph
        cases += of_layers(graph, whole, x, group)
    before = graph.halo.traffic.exchanges
    found = []
    for case, kind, word in cases:
        try:
            case()
        except SparseFmtError as error:
            found.append((kind, word, type(error).__name__, str(error)))
        else:
            found.append((kind, word, "", ""))
    assert graph.halo.traffic.exchanges == before  # nothing has travelled
    return found


def of_graphs(graph: DistGraph, whole: Graph, group: Any) -> Refusals:
    """What no graph of ranks is made of."""
    short = [min(bound, N - 1) for bound in graph.bounds]
    wide = Graph.from_edge_index(edges_of("random"), num_nodes=(N + 1, N))
    weighted = whole.with_data(numbers(whole.nnz).numpy())

    def made(**options: Any) -> Any:
        return lambda: DistGraph.of(whole, graph.bounds, group, **options)

    return [
        (made(exchange_dtype="bfloat16"), "DtypeError", "exchange_dtype"),
        (made(exchange_dtype=torch.int64), "DtypeError", "exchange_dtype"),
        (made(exchange_dtype=torch.float8_e5m2), "DtypeError", "exchange_dtype"),
        (made(source_bounds=3), "ShapeError", "bounds"),
        (lambda: DistGraph.of(whole, graph.bounds[1:], group), "ShapeError", "bounds"),
        (lambda: DistGraph.of(weighted, graph.bounds, group), "UnsupportedError", "values"),
        (lambda: DistGraph.of(whole.csr, graph.bounds, group), "DtypeError", "graph is a CSR"),
        (lambda: DistGraph.of(whole, short, group), "ShapeError", "bounds end at"),
        (lambda: DistGraph.of(wide, graph.bounds, group), "ShapeError", "source_bounds is not"),
        (made(source_bounds=short), "ShapeError", "source_bounds is"),
    ]


def of_products(graph: DistGraph, whole: Graph, x: Tensor) -> Refusals:
    """What no product takes."""
    n, ones = len(x), torch.ones(3, dtype=torch.float64)
    types = torch.zeros(graph.local.nnz, dtype=torch.int64)
    heads = torch.ones(graph.local.nnz, 2, dtype=torch.float64)
    attention = partial(gat_aggregate, graph, x, x[:, 0], x[:, 0])
    shared = [(attention, "UnsupportedError", "GATConv")] if graph.whole is None else []
    return [
        *shared,
        (lambda: dist_spmm(graph, x, reduce="max"), "UnsupportedError", "reduce"),
        (lambda: dist_spmm(whole, x), "DtypeError", "graph is a Graph"),
        (lambda: dist_spmm(graph, torch.cat([x, x])), "ShapeError", "x has shape"),
        (lambda: dist_spmm(graph, x.tolist()), "DtypeError", "x is a list"),
        (lambda: dist_spmm(graph, x.long()), "DtypeError", "x is torch.int64"),
        (lambda: dist_spmm(graph, x.to_sparse()), "UnsupportedError", "x has layout"),
        (lambda: dist_spmm(graph, x, ones), "ShapeError", "edge_weight"),
        (lambda: dist_spmm(graph, x, types), "DtypeError", "edge_weight"),
        (lambda: dist_spmm(graph, x, 3.0), "DtypeError", "edge_weight is a float"),
        (lambda: dist_spmm(graph, x, heads, reduce="mean"), "ShapeError", "edge_weight"),
        (lambda: dist_spmm(graph, x, col_scale=ones), "ShapeError", "col_scale"),
        (lambda: dist_spmm(graph, x, row_scale=ones), "ShapeError", "row_scale"),
        (lambda: dist_spmm(graph, x, col_scale=x[:, 0].float()), "DtypeError", "col_scale"),
        (lambda: dist_spmm(graph, x, col_scale=[1.0] * n), "DtypeError", "col_scale is a list"),
        (lambda: graph.maxk_aggregate(x, 2, reduce="max"), "UnsupportedError", "reduce"),
        (lambda: graph.maxk_aggregate(x, 2, col_scale=ones), "ShapeError", "col_scale"),
    ]


def of_layers(graph: DistGraph, whole: Graph, x: Tensor, group: Any) -> Refusals:
    """What no layer takes."""
    two = DistGraph.of(whole, graph.bounds, group, source_bounds=graph.bounds)
    turned = nn.SAGEConv(FEAT, 3, flow="target_to_source").double()
    sage, gcn = nn.SAGEConv(FEAT, 3).double(), nn.GCNConv(FEAT, 3).double()
    relational = nn.RGCNConv(N, 3, 2).double()
    gat = nn.GATConv((FEAT, FEAT), 3).double()
    types = torch.zeros(graph.local.nnz, dtype=torch.int64)
    return [
        (lambda: gcn(x.to_sparse(), graph), "UnsupportedError", "layout"),
        (lambda: relational(None, graph, types), "UnsupportedError", "x is None"),
        (lambda: turned(x, graph), "UnsupportedError", "flow"),
        (lambda: sage(x, graph, size=(N, N)), "UnsupportedError", "size"),
        (lambda: sage(x, two), "ShapeError", "x"),
        (lambda: gcn(x, two), "ShapeError", "x"),
        (lambda: gat((x, x.clone()), two), "UnsupportedError", "loops"),
        (lambda: nn.GCNConv(FEAT, 3, aggr="max").double()(x, graph), "UnsupportedError", "max"),
        (lambda: gcn(x[1:], graph), "ShapeError", "x has shape"),
    ]


def of_training(x: Tensor, group: Any) -> Refusals:
    """What no loss, no score and no sum of gradients takes; ``x`` are logits too."""
    labels = torch.zeros(len(x), dtype=torch.int64)
    return [
        (lambda: sum_gradients(x, group), "DtypeError", "one tensor"),
        (lambda: sum_gradients([3], group), "DtypeError", "a int is given"),
        (lambda: sum_gradients(torch.nn.LazyLinear(3), group), "UnsupportedError", "no values"),
        (lambda: broadcast_parameters([x], group), "DtypeError", "module is a list"),
        (lambda: cross_entropy(x, labels[:0], group=group), "ShapeError", "labels"),
        (lambda: cross_entropy(x, labels.int(), group=group), "DtypeError", "labels"),
        (lambda: cross_entropy(x, labels, labels, group), "DtypeError", "mask"),
        (lambda: accuracy(labels, labels, group=group), "ShapeError", "logits"),
        (lambda: accuracy(x, [1], group=group), "DtypeError", "labels is a list"),
    ]


def disagreements(group: Any) -> list[tuple[str, str]]:
    """Class and text of what is said where arguments differ between ranks."""
    whole = Graph.from_edge_index(edges_of("random"), num_nodes=N)
    rank = dist.get_rank(group)
    last = rank == dist.get_world_size(group) - 1
    even = (0, 20, 40, N)
    mine = edges_of("random")
    mine = mine[:, (mine[1] >= even[rank]) & (mine[1] < even[rank + 1])]
    wrong = mine.clone()
    wrong[1] += 20 * last
    values = numbers(whole.nnz).numpy()
    cases: list[Any] = [
        lambda: DistGraph.of(whole, (0, 21, 40, N) if last else even, group),
        lambda: DistGraph.of(whole, even, group, source_bounds=(0, 1, 2, N) if last else even),
        lambda: DistGraph.of(whole, even, group, exchange_dtype=torch.float16 if last else None),
        lambda: DistGraph(wrong, even, group),
        lambda: DistGraph(mine.int() if last else mine, even, group),
        lambda: DistGraph.of(whole.with_data(values) if last else whole, even, group),
        lambda: DistGraph.of(whole, even[1:] if last else even, group),
    ]
    return [said_of(case) for case in cases]


def said_of(case: Any) -> tuple[str, str]:
    """Class and text of what a case raises."""
    try:
        case()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def failures_of_other_kinds(group: Any) -> list[tuple[str, str]]:
    """What ranks raise where one of them, or all, run out of memory while they make a graph."""
    rank, real = dist.get_rank(group), graph_module.halo_of
    errors = [MemoryError(), ValueError("odd"), torch.OutOfMemoryError("CUDA out of memory.")]
    found = []
    for who, error in [*((rank == 1, one) for one in errors), (True, errors[0])]:

        def fails(*_: Any, who: bool = who, error: Exception = error) -> Any:
            if who:
                raise error
            return real(*_)

        graph_module.halo_of = fails
        try:
            found.append(said_of(lambda: shared_graph(group)))
        finally:
            graph_module.halo_of = real
    shared_graph(group)  # ranks are still in step
    return found


def products_that_differ(group: Any) -> tuple[list[tuple[str, str]], float]:
    """What is said of products that differ on the last rank, and the error of one that does not."""
    graph, whole = shared_graph(group)
    odd = graph.rank == dist.get_world_size(group) - 1
    x = graph.rows_of(numbers(N, FEAT)).clone()
    weight = numbers(graph.local.nnz)
    mean, other = "mean" if odd else "sum", "max" if odd else "sum"
    cases: list[Any] = [
        lambda: dist_spmm(graph, x, reduce=mean),
        lambda: dist_spmm(graph, x, weight if odd else None),
        lambda: dist_spmm(graph, x, col_scale=x[:, 0] if odd else None),
        lambda: dist_spmm(graph, x[:, 1:] if odd else x),
        lambda: dist_spmm(graph, x.float() if odd else x),
        lambda: dist_spmm(graph, x.tolist() if odd else x),
        lambda: dist_spmm(graph, x.clone().requires_grad_(odd)),
        lambda: graph.maxk_aggregate(x, 3 if odd else 2),
        lambda: graph.maxk_aggregate(x, 2) if odd else dist_spmm(graph, x),
        lambda: graph.spmm(x, reduce=other),
        lambda: graph.extended(x[:, 1:] if odd else x),
    ]
    checks.DEBUG = True
    try:
        found = [said_of(case) for case in cases]
        dist_spmm(graph, x)
        if odd:
            graph.forget()
        found.append(said_of(lambda: dist_spmm(graph, x)))
        with torch.set_grad_enabled(odd):
            found.append(said_of(lambda: dist_spmm(graph, x)))
        wanted = graph.rows_of(spmm(whole, numbers(N, FEAT)))
        return found, worst([(dist_spmm(graph, x.clone()), wanted)])
    finally:
        checks.DEBUG = False


def second_gradients(group: Any) -> list[tuple[str, str]]:
    """What is said where a gradient of exchanged features is differentiated again."""
    graph, _ = shared_graph(group)
    x = graph.rows_of(numbers(N, FEAT)).requires_grad_()
    weight = numbers(graph.local.nnz)
    products: list[Any] = [
        lambda: dist_spmm(graph, x),
        lambda: dist_spmm(graph, x, weight),
        lambda: dist_spmm(graph, x, reduce="mean"),
        lambda: graph.maxk_aggregate(x, 2),
        lambda: graph.extended(x),
    ]

    def again(product: Any) -> None:
        (grad,) = torch.autograd.grad(product().square().sum(), x, create_graph=True)
        torch.autograd.grad(grad.square().sum(), x)

    return [said_of(lambda product=product: again(product)) for product in products]


def memory_of_constants(group: Any) -> list[Any]:
    """Errors and counts of features that are changed, viewed, forgotten or only inferred."""
    graph, whole = shared_graph(group)
    given = numbers(N, FEAT)
    x = graph.rows_of(given).clone()
    errors = []

    def compare(wanted: Tensor, one: Tensor) -> None:
        pair = dist_spmm(graph, one), graph.rows_of(spmm(whole, wanted))
        errors.append(worst([pair]))

    compare(given, x)
    x += 1
    compare(given + 1, x)
    x.copy_(graph.rows_of(given))
    compare(given, x)
    x.data.mul_(3)  # nobody counts this
    graph.forget()
    compare(3 * given, x)
    kept = len(graph.halo.memory)
    several = numbers(20, N, FEAT)
    mine = several[:, graph.bounds[graph.rank] : graph.bounds[graph.rank + 1]].clone()
    for wanted, one in zip(several, mine, strict=True):
        compare(wanted, one)
    return [max(errors), kept, len(graph.halo.memory)]


def views_beside_an_empty_rank(group: Any) -> float:
    """Error of products of one tensor's views, which all look alike on a rank without rows."""
    whole = Graph.from_edge_index(edges_of("random"), num_nodes=N)
    ranks = dist.get_world_size(group)
    graph = DistGraph.of(whole, bounds_of("empty ranks", whole, ranks), group)
    several = numbers(4, N, FEAT)
    mine = several[:, graph.bounds[graph.rank] : graph.bounds[graph.rank + 1]].clone()
    found = [
        (dist_spmm(graph, a), graph.rows_of(spmm(whole, b)))
        for a, b in zip(mine, several, strict=True)
    ]
    return worst(found)


def inference_before_training(group: Any) -> float:
    """Error of the gradients of a layer and of factors that infers first."""
    torch.manual_seed(0)
    conv = nn.GCNConv(FEAT, 4, k=3).double().to(here())
    graph, _ = shared_graph(group)
    x = numbers(N, FEAT)
    own, weight = graph.rows_of(x).clone(), numbers(graph.local.nnz).requires_grad_()
    scale = numbers(len(own)).requires_grad_()

    def gradients() -> list[Tensor]:
        y = conv(own, graph).sum() + dist_spmm(graph, own, weight, row_scale=scale).sum()
        leaves: list[Any] = [weight, scale, *conv.parameters()]
        return list(torch.autograd.grad(y, leaves))

    with torch.inference_mode():
        conv(own, graph), dist_spmm(graph, own, weight, row_scale=scale)
    first = gradients()
    graph.forget()
    return worst(list(zip(first, gradients(), strict=True)))


def freed_without_a_collection(group: Any) -> list[bool]:
    """Whether what lies upstream of a product goes with its result, or with backward."""
    graph, _ = shared_graph(group)
    found = []
    gc.disable()
    try:
        for steps in (False, True):
            x = graph.rows_of(numbers(N, FEAT)).requires_grad_()
            hidden = x * 2
            upstream = ref(hidden)
            y = dist_spmm(graph, hidden)
            del hidden
            if steps:
                y.sum().backward()
            del y
            found.append(upstream() is None)
    finally:
        gc.enable()
    return found


def means_of_two_bytes(
    group: Any, dtype: torch.dtype, k: int | None, autocast: bool
) -> list[float]:
    """Errors of means over a hub of ones, and their gradients, beside the plain ones."""
    n, hub = 40_000, 3
    sources = torch.arange(n)
    edges = torch.stack([sources, torch.full_like(sources, hub)])
    whole = Graph.from_edge_index(edges, num_nodes=n)
    graph = DistGraph.of(whole, (0, n // 2, n), group)
    x = torch.ones(n, 2, dtype=torch.float32 if autocast else dtype)
    own = graph.rows_of(x).clone().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=autocast):
        if k is None:
            y = dist_spmm(graph, own, reduce="mean")
        else:
            y = graph.maxk_aggregate(own, k, reduce="mean")
    assert y.dtype is dtype
    y.float().mul(n).sum().backward()
    wanted = graph.rows_of(torch.zeros(n, 2))
    if graph.rank == 0:
        wanted[hub] = 1
    if k == 1:
        wanted[:, 1] = 0
    share = torch.ones_like(own, dtype=torch.float32)
    share[:, 1] = 1 if k is None else 0
    return [worst([(y.float(), wanted)]), worst([(own.grad.float(), share)])]


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


def weighted_propagation(group: Any) -> float:
    """The largest difference from one process of a propagation with edge weights, and its bias."""
    whole, bounds, rows, mine = shared_out(group, edges_of("random"), "balanced")
    graph = DistGraph.of(whole, bounds, group)
    x, weight = numbers(N, FEAT), numbers(whole.nnz)
    scale, own, bias = numbers(N).abs(), numbers(N, 1), numbers(FEAT)
    x[0], own[0] = torch.inf, 0  # a vertex without an own part: nothing of its own is added
    parts = {"edge_weight": weight[mine], "bias": bias}
    y = propagate(graph, x[rows], scale[rows], own[rows], **parts)
    plain = propagate(graph, x[rows], scale[rows], own[rows])
    assert torch.equal(plain.isfinite(), propagate(whole, x, scale, own)[rows].isfinite())
    expected = propagate(whole, x, scale, own, edge_weight=weight, bias=bias)[rows]
    finite = expected.isfinite()
    assert finite.any()
    assert torch.equal(finite, y.isfinite())
    return worst([(y[finite], expected[finite])])
