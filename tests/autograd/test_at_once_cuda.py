"""Kernels that are called directly on a GPU give the bits of the library ops."""

import sys
from contextlib import nullcontext
from itertools import product

import pytest

torch = pytest.importorskip("torch")

from autograd_cases import matmul_precision, side_of  # noqa: E402

from sparsefmt import Graph, nn  # noqa: E402
from sparsefmt.autograd import spmm  # noqa: E402
from sparsefmt.autograd.engine.library import direct  # noqa: E402
from sparsefmt.autograd.matmul import SPMM  # noqa: E402

pytestmark = pytest.mark.gpu

N, M = 300, 7000


def edges(n_rows=N, n_cols=N, *, seed=0):
    """Random edges beside one target of 5000, which blocks share, and targets without any."""
    chance = torch.Generator().manual_seed(seed)
    source = torch.randint(n_cols, (M,), generator=chance)
    target = torch.randint(n_rows // 2, (M,), generator=chance)
    target[:5000] = 7
    return torch.stack([source, target]).cuda()


def poison(shape, dtype):
    """Leave NaN in the memory that torch gives next."""
    torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def test_what_is_rounded_is_that_of_the_library_op_and_nothing_is_zero():
    """What goes around the dispatcher is in ``test_autograd_dispatch``."""
    side, x = side_of(Graph.from_edge_index(edges(), num_nodes=N), False), torch.rand(N, 8).cuda()
    assert direct((x, None, "sum"))
    with matmul_precision("medium"):
        args = x, None, None, None, None, "sum"
        expected = SPMM.library(side.indptr, side.indices, side.n_cols, side.plan, *args)
        assert torch.equal(SPMM(side, *args), expected)
    empty = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64, device="cuda"), num_nodes=N)
    assert torch.equal(spmm(empty, x), torch.zeros_like(x))


def gat(heads, feat, **options):
    torch.manual_seed(0)
    return nn.GATConv(12, feat, heads=heads, **options).cuda()


def step(layer, graph, x, *, change=False, seen=False, rounds=False):
    """Result and gradients; the result may change, and backward be watched or rounded."""
    torch.cuda.manual_seed(3)
    y = layer(x, graph)
    kept = y.detach().clone()
    y = torch.relu_(y) if change else y
    weights = torch.linspace(-1, 1, y.numel(), device="cuda", dtype=y.dtype).view_as(y)
    with torch.profiler.profile(acc_events=True) if seen else nullcontext():
        with matmul_precision("medium") if rounds else nullcontext():
            found = torch.autograd.grad(y, [x, *layer.parameters()], weights)
    return kept, *found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("heads", "feat"), [(1, 1), (1, 33), (1, 64), (4, 8), (3, 5), (8, 16)])
def test_attention_is_that_of_the_library_ops(heads, feat, dtype):
    x = torch.randn(N, 12, device="cuda", dtype=dtype, requires_grad=True)
    graph = Graph.from_edge_index(edges(), num_nodes=N)
    for loops, bias, dropout, change in product(
        (True, False), (True, False), (0.0, 0.3), (False, True)
    ):
        layer = gat(heads, feat, add_self_loops=loops, bias=bias, dropout=dropout).to(dtype)
        poison((20 * N, heads * feat), dtype)
        found = step(layer, graph, x, change=change)
        seen = step(layer, graph, x, change=change, seen=True)
        layer.eval()
        with torch.no_grad():
            plain = layer(x, graph)
            with torch.profiler.profile(acc_events=True):
                assert torch.equal(plain, layer(x, graph))
        layer.train()
        with torch.profiler.profile(acc_events=True):
            expected = step(layer, graph, x, change=change)
        assert all(map(torch.equal, found, expected))
        assert all(map(torch.equal, seen, expected))


@pytest.mark.parametrize(("heads", "feat"), [(1, 64), (2, 8)])
def test_a_gradient_is_rounded_only_where_forward_may_be(heads, feat):
    graph, layer = Graph.from_edge_index(edges(), num_nodes=N), gat(heads, feat)
    x = torch.randn(N, 12, device="cuda", requires_grad=True)
    found, exact = step(layer, graph, x, rounds=True), step(layer, graph, x)
    for name, one, wanted in zip(
        ("y", "x", *dict(layer.named_parameters())), found, exact, strict=True
    ):
        if name not in ("x", "lin.weight"):  # products of torch's, which may be rounded
            assert torch.equal(one, wanted), name


def test_saved_tensors_may_go_to_the_cpu_and_back():
    graph, layer = Graph.from_edge_index(edges(), num_nodes=N), gat(2, 4)
    x = torch.randn(N, 12, device="cuda", requires_grad=True)
    expected = step(layer, graph, x)
    with torch.autograd.graph.save_on_cpu():
        found = step(layer, graph, x)
    assert all(map(torch.equal, found, expected))


# How much code a step runs, which is what a small graph waits for


def calls_of_python(run):
    """Calls of functions that are written in Python."""
    count = 0

    def watch(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("name", "kept", "new"), [("SAGEConv", 160, 270), ("GCNConv", 170, 290), ("GATConv", 200, 320)]
)
def test_a_step_on_a_small_graph_runs_little_python(name, kept, new):
    """A fifth or more above what it was when this was written, which was half of before."""
    layer, x = getattr(nn, name)(16, 16).cuda(), torch.randn(N, 16).cuda().requires_grad_()
    index, grad = edges(), torch.randn(N, 16).cuda()
    graph = Graph.from_edge_index(index, num_nodes=N)

    def step(of):
        torch.autograd.grad(layer(x, of()), [x, *layer.parameters()], grad)

    def another():
        return Graph.from_edge_index(index, num_nodes=N)

    with torch.autograd.set_multithreading_enabled(False):
        for of, most in ((lambda: graph, kept), (another, new)):
            for _ in range(50):
                step(of)
            torch.cuda.synchronize()
            assert calls_of_python(lambda of=of: step(of)) <= most
