"""What ranks send each other: how often, how much, and what they make of it."""

import gc
import math
from functools import partial
from unittest.mock import Mock, patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from dist_cases import (
    BOUNDS,
    FEAT,
    N,
    bounds_of,
    edges_of,
    here,
    numbers,
    said_of,
    shared_graph,
    shared_out,
    worst,
)
from ranks import on_ranks
from torch.nn.functional import cross_entropy as whole_cross_entropy

from sparsefmt import Graph, nn
from sparsefmt.autograd import gat_aggregate, propagate, spmm
from sparsefmt.distributed import (
    DistGraph,
    accuracy,
    broadcast_parameters,
    cross_entropy,
    dist_spmm,
    sum_gradients,
)
from sparsefmt.distributed import graph as graph_module
from sparsefmt.errors import SparseFmtError
from sparsefmt.formats import checks

LAYERS = {
    "gcn": lambda: nn.GCNConv(FEAT, 3),
    "gcn maxk": lambda: nn.GCNConv(FEAT, 8, k=3),
    "sage": lambda: nn.SAGEConv(FEAT, 3),
    "gin": lambda: nn.GINConv(torch.nn.Linear(FEAT, 3)),
    "gat": lambda: nn.GATConv(FEAT, 3, heads=2),
    "transformer": lambda: nn.TransformerConv(FEAT, 1, heads=2),
    "agnn": lambda: nn.AGNNConv(),
}


def layer_of(name):
    torch.manual_seed(0)
    return LAYERS[name]().double().to(here())


def sent(graph, step):
    """Exchanges and bytes of a step."""
    traffic = graph.halo.traffic
    before = traffic.exchanges, traffic.nbytes
    step()
    return traffic.exchanges - before[0], traffic.nbytes - before[1]


def test_the_judge_of_these_tests_sees_nan_empty_results_and_other_shapes():
    ones = torch.ones(5, 3)
    assert worst([(ones, ones), (None, None), (ones * math.nan, ones)]) == math.inf
    assert worst([(None, ones), (ones, ones)]) == 1
    assert worst([(ones[:0], ones[:0])]) == 0
    for other in (ones[:0], ones[:1]):
        with pytest.raises(AssertionError):
            worst([(other, ones)])


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
@on_ranks(3)
def test_features_without_a_gradient_are_exchanged_once(group, name):
    """Until they change in place."""
    conv, (graph, _) = layer_of(name), shared_graph(group)
    held = [graph.rows_of(numbers(N, FEAT))]  # a view, whose base nobody else holds

    def step():
        conv(held[0], graph).sum().backward()

    # GCN's factors too, which stay
    assert [sent(graph, step)[0] for _ in range(3)] == [2 if name == "gcn" else 1, 0, 0]
    held[0] += 1
    assert [sent(graph, step)[0], sent(graph, step)[0]] == [1, 0]
    held.clear()
    assert len(graph.halo.memory) == (name == "gcn")  # features are forgotten with their tensor


@pytest.mark.parametrize("name", ["gat", "transformer", "agnn", "sage"])
@on_ranks(2)
def test_all_steps_of_a_layer_share_one_exchange(group, name):
    conv, (graph, _) = layer_of(name), shared_graph(group)
    x = graph.rows_of(numbers(N, FEAT)).requires_grad_()
    assert sent(graph, lambda: conv(x, graph))[0] == 1


@pytest.mark.parametrize(("width", "number"), [(256, 1), (300, 2)])
@on_ranks(2)
def test_maxk_sends_its_values_and_column_numbers_alone(group, width, number):
    """Beside a layer without, in float32."""
    k, (graph, _) = 32, shared_graph(group)
    x = graph.rows_of(numbers(N, width)).float().requires_grad_()
    found = []
    for conv in (nn.SAGEConv(width, width, k=k), nn.SAGEConv(width, width)):
        conv.to(here())
        forward = sent(graph, lambda conv=conv: conv(x, graph))[1]
        found.append((forward, sent(graph, lambda conv=conv: conv(x, graph).sum().backward())[1]))
    (forward, step), (dense_forward, dense_step) = found
    assert forward / dense_forward == (k * (4 + number)) / (width * 4)
    assert step / dense_step < 1 / 5


@on_ranks(2, 4)
def test_features_travel_in_a_narrower_dtype(group):
    graph, whole = shared_graph(group, exchange_dtype=torch.bfloat16)
    wide, _ = shared_graph(group)
    given = numbers(N, FEAT).float()
    x, own = given.clone().requires_grad_(), graph.rows_of(given).clone().requires_grad_()
    y, z = spmm(whole, x), dist_spmm(graph, own)
    z.sum().backward()
    y.sum().backward()
    pairs = [(z.detach(), graph.rows_of(y.detach())), (own.grad, graph.rows_of(x.grad))]
    assert worst(pairs) < float(spmm(whole, given.abs()).max()) * 2**-8
    less = sent(graph, lambda: dist_spmm(graph, own))[1]
    assert less / max(sent(wide, lambda: dist_spmm(wide, own))[1], 1) == 0.5


@on_ranks(2, 3, 8)
def test_where_all_read_all_one_all_gather_brings_it(group):
    generator = torch.Generator().manual_seed(2)
    edges = torch.randint(0, N, (2, 40 * N), generator=generator).to(here())
    whole, ranks = Graph.from_edge_index(edges, num_nodes=N), dist.get_world_size(group)
    borders = (*(N * r // ranks + r % 2 for r in range(ranks)), N)
    graph = DistGraph.of(whole, (0, *borders[1:]), group)
    sparse, _ = shared_graph(group, "no edges between ranks")
    x = numbers(N, FEAT).requires_grad_()
    own = graph.rows_of(x.detach()).clone().requires_grad_()
    y, z = spmm(whole, x), dist_spmm(graph, own)
    seed = numbers(N, FEAT).flip(0)
    (y * seed).sum().backward()
    (z * graph.rows_of(seed)).sum().backward()
    assert dist.get_rank(group) == graph.rank
    assert graph.halo.gathered is not None
    assert sparse.halo.gathered is None
    assert worst([(z, graph.rows_of(y)), (own.grad, graph.rows_of(x.grad))]) < 1e-10


BETWEEN = {
    "sage": lambda: nn.SAGEConv((FEAT, 2), 3),
    "sage max": lambda: nn.SAGEConv((FEAT, 2), 3, aggr="max"),
    "gin": lambda: nn.GINConv(torch.nn.Linear(FEAT, 3)),
    "gat": lambda: nn.GATConv((FEAT, 2), 3, add_self_loops=False),
    "gatv2": lambda: nn.GATv2Conv((FEAT, 2), 3, add_self_loops=False),
    "transformer": lambda: nn.TransformerConv((FEAT, 2), 3),
}


@pytest.mark.parametrize("bounds", ["balanced", "one each"])
@pytest.mark.parametrize("name", BETWEEN)
@on_ranks(3)
def test_sources_may_be_other_vertices_than_targets(group, name, bounds):
    torch.manual_seed(3)
    m = 37
    alone, conv = (BETWEEN[name]().double() for _ in range(2))
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
    assert worst(pairs) < 1e-10


@pytest.mark.parametrize("bounds", BOUNDS)
@on_ranks(4)
def test_losses_and_scores_are_those_of_the_whole_graph(group, bounds):
    def model_of(seed):
        torch.manual_seed(seed)
        parts = torch.nn.Linear(FEAT, 4), torch.nn.BatchNorm1d(4)
        return torch.nn.Sequential(*parts).double().eval()

    model, alone = model_of(dist.get_rank(group)), model_of(0)  # ranks begin with other weights
    broadcast_parameters(model, group)
    pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
    assert worst(pairs) == 0
    whole = Graph.from_edge_index(edges_of("random"), num_nodes=N)
    graph = DistGraph.of(whole, bounds_of(bounds, whole, dist.get_world_size(group)), group)
    x, labels, mask = numbers(N, FEAT), torch.arange(N) % 4, torch.arange(N) % 3 == 0
    labels[6] = -100
    own, *parts = (graph.rows_of(one) for one in (x, labels, mask))
    wanted = whole_cross_entropy(alone(x)[mask], labels[mask])
    wanted.backward()
    logits = model(own)
    loss = cross_entropy(logits, *parts, group)
    loss.backward()
    sum_gradients(model.parameters(), group)
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    assert abs(float(total - wanted.detach())) < 1e-12
    assert worst([(a.grad, b.grad) for a, b in pairs]) < 1e-12
    counted = mask & (labels >= 0)
    right = float((alone(x).argmax(1) == labels)[counted].double().mean())
    assert abs(accuracy(logits, *parts, group) - right) < 1e-12
    nothing = parts[0], torch.zeros_like(parts[1]), group
    assert float(cross_entropy(logits, *nothing)) == accuracy(logits, *nothing) == 0


# What is refused


@on_ranks(1, 2)
def test_what_does_not_fit_is_refused_in_a_sentence_that_says_the_mend(group):
    graph, whole = shared_graph(group)
    x = graph.rows_of(numbers(N, FEAT))
    cases = of_graphs(graph, whole, group) + of_products(graph, whole, x)
    cases += of_training(x, group)
    if dist.get_world_size(group) > 1:  # one rank runs layers as with a Graph
        cases += of_layers(graph, whole, x, group)
    before = graph.halo.traffic.exchanges
    for case, kind, word in cases:
        with pytest.raises(SparseFmtError, match=word) as found:
            case()
        text = str(found.value)
        assert type(found.value).__name__ == kind, text
        assert text.endswith("."), text
        assert any(mend in text for mend in ("give", "leave", "use ", "run ", "make ")), text
    assert graph.halo.traffic.exchanges == before  # nothing has travelled


def of_graphs(graph, whole, group):
    """What no graph of ranks is made of."""
    short = [min(bound, N - 1) for bound in graph.bounds]
    floats = [float(bound) for bound in graph.bounds]
    wide = Graph.from_edge_index(edges_of("random"), num_nodes=(N + 1, N))
    weighted = whole.with_data(numbers(whole.nnz).numpy())

    def made(**options):
        return lambda: DistGraph.of(whole, graph.bounds, group, **options)

    return [
        (made(exchange_dtype="bfloat16"), "DtypeError", "exchange_dtype"),
        (made(exchange_dtype=torch.int64), "DtypeError", "exchange_dtype"),
        (made(exchange_dtype=torch.float8_e5m2), "DtypeError", "exchange_dtype"),
        (made(source_bounds=3), "ShapeError", "bounds"),
        (lambda: DistGraph.of(whole, graph.bounds[1:], group), "ShapeError", "bounds"),
        (lambda: DistGraph.of(whole, floats, group), "ShapeError", "bounds is"),
        (lambda: DistGraph.of(weighted, graph.bounds, group), "UnsupportedError", "values"),
        (lambda: DistGraph.of(whole.csr, graph.bounds, group), "DtypeError", "graph is a CSR"),
        (lambda: DistGraph.of(whole, short, group), "ShapeError", "bounds end at"),
        (lambda: DistGraph.of(wide, graph.bounds, group), "ShapeError", "source_bounds is not"),
        (made(source_bounds=short), "ShapeError", "source_bounds is"),
    ]


def of_products(graph, whole, x):
    """What no product takes."""
    n, ones = len(x), torch.ones(3, dtype=torch.float64)
    types = torch.zeros(graph.local.nnz, dtype=torch.int64)
    heads = torch.ones(graph.local.nnz, 2, dtype=torch.float64)
    attention = partial(gat_aggregate, graph, x, x[:, 0], x[:, 0])
    shared = [(attention, "UnsupportedError", "GATConv")] if graph.complete is None else []
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


def of_layers(graph, whole, x, group):
    """What no layer takes."""
    two = DistGraph.of(whole, graph.bounds, group, source_bounds=graph.bounds)
    turned = nn.SAGEConv(FEAT, 3, flow="target_to_source").double()
    sage, gcn = nn.SAGEConv(FEAT, 3).double(), nn.GCNConv(FEAT, 3).double()
    relational = nn.RGCNConv(N, 3, 2).double()
    gat = nn.GATConv((FEAT, FEAT), 3).double()
    types = torch.zeros(graph.local.nnz, dtype=torch.int64)
    fa, cheb = nn.FAConv(FEAT).double(), nn.ChebConv(FEAT, 3, 2).double()
    appnp = nn.APPNP(2, 0.1, dropout=0.5)
    return [
        (lambda: fa(x, x, graph), "UnsupportedError", "processes share the graph"),
        (lambda: cheb(x, graph), "UnsupportedError", "processes share the graph"),
        (lambda: appnp(x, graph), "UnsupportedError", "processes share the graph"),
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


def of_training(x, group):
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


def assert_told(cases, words, group):
    """All ranks say the same: these words, and the number of the last one, which differs."""
    last = f"rank {dist.get_world_size(group) - 1}"
    said = [said_of(case) for case in cases]
    for (kind, text), word in zip(said, words, strict=True):
        assert kind == "RankError"
        assert last in text
        assert word in text
        assert text.endswith(".")
    return said


@on_ranks(3)
def test_ranks_that_differ_are_refused_alike_by_the_number_of_the_rank(group):
    whole = Graph.from_edge_index(edges_of("random"), num_nodes=N)
    rank = dist.get_rank(group)
    last, even, mine = rank == 2, (0, 20, 40, N), edges_of("random")
    mine = mine[:, (mine[1] >= even[rank]) & (mine[1] < even[rank + 1])]
    wrong = mine.clone()
    wrong[1] += 20 * last
    values = numbers(whole.nnz).numpy()
    cases = [
        lambda: DistGraph.of(whole, (0, 21, 40, N) if last else even, group),
        lambda: DistGraph.of(whole, even, group, source_bounds=(0, 1, 2, N) if last else even),
        lambda: DistGraph.of(whole, even, group, exchange_dtype=torch.float16 if last else None),
        lambda: DistGraph(wrong, even, group),
        lambda: DistGraph(mine.int() if last else mine, even, group),
        lambda: DistGraph.of(whole.with_data(values) if last else whole, even, group),
        lambda: DistGraph.of(whole, even[1:] if last else even, group),
    ]
    words = ["bounds", "source_bounds", "exchange_dtype", "", "torch.int32", "values", "bounds"]
    return assert_told(cases, words, group)


@on_ranks(3)
def test_a_rank_that_runs_out_of_memory_tells_the_others(group):
    """Also where all of them do, alike."""
    rank, real = dist.get_rank(group), graph_module.halo_of
    errors = [MemoryError(), ValueError("odd"), torch.OutOfMemoryError("CUDA out of memory.")]
    for who, error in [*((rank == 1, one) for one in errors), (True, errors[0])]:
        failing = Mock(side_effect=error if who else real)
        with patch.object(graph_module, "halo_of", failing):
            kind, text = said_of(lambda: shared_graph(group))
        if who:
            assert (kind, text) == (type(error).__name__, str(error))
        else:
            assert kind == "RankError"
            assert text.startswith(f"rank 1 cannot take part: {type(error).__name__}")
            assert text.endswith("; see the error of that rank.")
    shared_graph(group)  # ranks are still in step


@on_ranks(3)
def test_products_that_differ_between_ranks_are_named_while_debugging(group):
    graph, whole = shared_graph(group)
    odd = graph.rank == dist.get_world_size(group) - 1
    x, weight = graph.rows_of(numbers(N, FEAT)).clone(), numbers(graph.local.nnz)
    mean, other = "mean" if odd else "sum", "max" if odd else "sum"
    scale, narrow = x[:, 0] if odd else None, x[:, 1:] if odd else x
    cases = {
        "reduce is mean": lambda: dist_spmm(graph, x, reduce=mean),
        "edge_weight is torch.float64": lambda: dist_spmm(graph, x, weight if odd else None),
        "col_scale is torch.float64": lambda: dist_spmm(graph, x, col_scale=scale),
        "x is torch.float64 with rows of shape (4,)": lambda: dist_spmm(graph, narrow),
        "x is torch.float32": lambda: dist_spmm(graph, x.float() if odd else x),
        "x is a list: give": lambda: dist_spmm(graph, x.tolist() if odd else x),
        "x.requires_grad is True": lambda: dist_spmm(graph, x.clone().requires_grad_(odd)),
        "k is 3": lambda: graph.maxk_aggregate(x, 3 if odd else 2),
        "k is 2": lambda: graph.maxk_aggregate(x, 2) if odd else dist_spmm(graph, x),
        "the call is an exchange": lambda: graph.spmm(x, reduce=other),
        "x.shape[1:] is (4,)": lambda: graph.extended(narrow),
    }
    with patch.object(checks, "DEBUG", True):
        said = assert_told(cases.values(), cases, group)
        dist_spmm(graph, x)
        if odd:
            graph.forget()
        for enabled, word in (
            (True, "whether x is as it was exchanged is False"),
            (odd, "torch.is_grad_enabled() is True"),
        ):
            with torch.set_grad_enabled(enabled):
                said += assert_told([lambda: dist_spmm(graph, x)], [word], group)
        wanted = graph.rows_of(spmm(whole, numbers(N, FEAT)))
        assert worst([(dist_spmm(graph, x.clone()), wanted)]) < 1e-12
    return said


@on_ranks(2)
def test_gradients_of_exchanged_features_are_not_differentiated_again(group):
    graph, _ = shared_graph(group)
    x = graph.rows_of(numbers(N, FEAT)).requires_grad_()
    weight = numbers(graph.local.nnz)
    for product in (
        lambda: dist_spmm(graph, x),
        lambda: dist_spmm(graph, x, weight),
        lambda: dist_spmm(graph, x, reduce="mean"),
        lambda: graph.maxk_aggregate(x, 2),
        lambda: graph.extended(x),
    ):
        (grad,) = torch.autograd.grad(product().square().sum(), x, create_graph=True)
        kind, text = said_of(lambda grad=grad: torch.autograd.grad(grad.square().sum(), x))
        assert kind == "UnsupportedError"
        assert "features that ranks exchange cannot be differentiated again" in text


# What is remembered


@on_ranks(3)
def test_rows_are_remembered_for_eight_tensors_until_they_change_or_are_forgotten(group):
    graph, whole = shared_graph(group)
    given = numbers(N, FEAT)
    x = graph.rows_of(given).clone()

    def compare(wanted, one, graph=graph):
        assert worst([(dist_spmm(graph, one), graph.rows_of(spmm(whole, wanted)))]) < 1e-10

    compare(given, x)
    x += 1
    compare(given + 1, x)
    x.copy_(graph.rows_of(given))
    compare(given, x)
    x.data.mul_(3)  # nobody counts this
    graph.forget()
    compare(3 * given, x)
    assert len(graph.halo.memory) == 1
    changed = graph.rows_of(given).clone()
    exchange = graph.halo.start(changed)
    changed += 1  # after its rows were sent
    exchange.finish()
    compare(given + 1, changed)
    empty = bounds_of("empty ranks", whole, dist.get_world_size(group))  # where views look alike
    for shared, count in ((graph, 20), (DistGraph.of(whole, empty, group), 4)):
        several = numbers(count, N, FEAT)
        mine = several[:, shared.bounds[shared.rank] : shared.bounds[shared.rank + 1]].clone()
        for wanted, one in zip(several, mine, strict=True):
            compare(wanted, one, shared)
        assert count < 8 or len(shared.halo.memory) == 8


@on_ranks(2)
def test_a_model_may_infer_before_it_trains(group):
    torch.manual_seed(0)
    conv = nn.GCNConv(FEAT, 4, k=3).double().to(here())
    graph, _ = shared_graph(group)
    own, weight = graph.rows_of(numbers(N, FEAT)).clone(), numbers(graph.local.nnz).requires_grad_()
    scale = numbers(len(own)).requires_grad_()

    def gradients():
        y = conv(own, graph).sum() + dist_spmm(graph, own, weight, row_scale=scale).sum()
        return torch.autograd.grad(y, [weight, scale, *conv.parameters()])

    with torch.inference_mode():
        conv(own, graph), dist_spmm(graph, own, weight, row_scale=scale)
    first = gradients()
    graph.forget()
    assert worst(list(zip(first, gradients(), strict=True))) < 1e-10


@on_ranks(2)
def test_an_exchange_keeps_nothing_upstream(group):
    """It goes with the result, or with backward."""
    graph, _ = shared_graph(group)
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
            assert upstream() is None
    finally:
        gc.enable()


# Results


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("k", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks(2)
def test_means_of_two_bytes_divide_in_float32(group, dtype, k, autocast):
    """Two times 20 000 / 40 000, which rounds to 1/2; a float16 of 1 / 40 000 is off by 0.001."""
    n, hub = 40_000, 3
    edges = torch.stack([torch.arange(n), torch.full((n,), hub)])
    whole = Graph.from_edge_index(edges, num_nodes=n)
    graph = DistGraph.of(whole, (0, n // 2, n), group)
    x = torch.ones(n, 2, dtype=torch.float32 if autocast else dtype)
    own = graph.rows_of(x).clone().requires_grad_()
    product = partial(dist_spmm, graph, own) if k is None else partial(graph.maxk_aggregate, own, k)
    with torch.autocast("cpu", dtype, enabled=autocast):
        y = product(reduce="mean")
    assert y.dtype is dtype
    y.float().mul(n).sum().backward()
    wanted = graph.rows_of(torch.zeros(n, 2))
    if graph.rank == 0:
        wanted[hub] = 1
    if k == 1:
        wanted[:, 1] = 0
    share = torch.ones_like(own, dtype=torch.float32)
    share[:, 1] = 1 if k is None else 0
    assert worst([(y.float(), wanted)]) == 0
    assert worst([(own.grad.float(), share)]) <= torch.finfo(dtype).eps


@on_ranks(2, 4)
def test_weights_of_attention_come_with_edges_of_the_whole_graph(group):
    conv, (graph, whole), x = layer_of("gat"), shared_graph(group), numbers(N, FEAT)
    y, (edges, weights) = conv(x, whole, return_attention_weights=True)
    z, (mine, found) = conv(graph.rows_of(x), graph, return_attention_weights=True)
    wanted = dict(zip(map(tuple, edges.T.tolist()), weights.detach(), strict=True))
    pairs = [(found[i], wanted[tuple(edge)]) for i, edge in enumerate(mine.T.tolist())]
    assert worst([*pairs, (z, graph.rows_of(y))]) < 1e-10


@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
@on_ranks(1)
def test_one_rank_computes_as_without_ranks(group, name):
    """Bit by bit."""
    conv, (graph, whole) = layer_of(name), shared_graph(group)
    x = numbers(N, FEAT).requires_grad_()
    assert torch.equal(conv(x, graph), conv(x, whole))
    assert torch.equal(dist_spmm(graph, x), spmm(whole, x))
    assert graph.halo.traffic.exchanges == 0


@pytest.mark.parametrize("name", ["gcn", "gcn maxk", "sage", "gin", "gat", "transformer"])
@on_ranks(2)
def test_layers_take_autocast(group, name):
    """Sums of two parts in bfloat16 differ from one sum by few roundings of 2**-8."""
    conv, (graph, whole) = layer_of(name).float(), shared_graph(group)
    x = numbers(N, FEAT).float()
    own = graph.rows_of(x).clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, z = conv(x, whole), conv(own, graph)
        z.float().sum().backward()
    assert y.dtype is z.dtype
    y = graph.rows_of(y.detach().float())
    assert worst([(z.float(), y)]) < 2**-4 * float(y.abs().max())


@on_ranks(4)
def test_products_and_gradients_are_the_same_at_each_call(group):
    graph, _ = shared_graph(group, "hub")
    found = []
    for _ in range(2):
        x = graph.rows_of(numbers(N, FEAT)).float().requires_grad_()
        weight = numbers(graph.local.nnz).float().requires_grad_()
        y = dist_spmm(graph, x, weight, reduce="mean")
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, weight])])
    assert all(map(torch.equal, *found))


@on_ranks(3)
def test_a_propagation_by_edge_weights_is_that_of_one_process(group):
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
    assert worst([(y[finite], expected[finite])]) < 1e-12


# Labels and models


@on_ranks(2)
def test_labels_below_0_are_none_and_what_is_no_number_is_wrong(group):
    logits = torch.eye(3, dtype=torch.float64)
    labels = torch.tensor([0, 1, -1 if dist.get_rank(group) else -100])
    loss = cross_entropy(logits, labels, group=group)
    dist.all_reduce(loss, group=group)
    assert abs(float(loss) + math.log(math.e / (math.e + 2))) < 1e-12
    assert accuracy(logits, labels, group=group) == 1
    logits[0, 2] = torch.nan
    assert accuracy(logits, labels, group=group) == 0.5
    kind, text = said_of(lambda: accuracy(torch.eye(3), torch.tensor([0, 3, 1]), group=group))
    assert kind == "IndexRangeError"
    assert "labels holds 3 but logits has 3 classes" in text


@on_ranks(3)
def test_all_ranks_name_the_one_with_another_model(group):
    model = torch.nn.Linear(4, 3 if dist.get_rank(group) == 1 else 2)
    kind, text = said_of(lambda: broadcast_parameters(model, group))
    assert kind == "ShapeError"
    assert text.startswith("rank 1 has ((3, 4), 'torch.float32') as weight where rank 0 has")
