"""What only a GPU shows of attention: both devices, streams, CUDA graphs, memory, launches."""

import itertools
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_cases import (  # noqa: E402
    KINDS,
    OPTIONS,
    SEED,
    assert_near,
    call,
    from_vectors,
    loop_graph,
    shapes_of,
)
from autograd_cases import DTYPES, make_graph, tensors  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from sparsefmt import CSR, Graph  # noqa: E402
from sparsefmt.autograd import attention, gat_aggregate, prepare  # noqa: E402
from sparsefmt.autograd.attention import gat_of_vectors  # noqa: E402
from sparsefmt.ops.attention.score import Options  # noqa: E402

pytestmark = pytest.mark.gpu


def inputs(kind, graph, heads, feat, *, dtype=torch.float32):
    """What the function takes; of "layer" features, vectors, edge scores and loop scores."""
    n = graph.n_rows
    of_layer = [(n, *heads, feat), (*heads, feat), (*heads, feat), (graph.nnz, *heads), (n, *heads)]
    shapes = of_layer if kind == "layer" else shapes_of(kind, graph, heads, feat)
    return tensors("cuda", *shapes, dtype=dtype)


def run(kind, graph, given, **options):
    if kind == "layer":
        return gat_of_vectors(graph, *given, **options)
    return call(kind, graph, given, **options)


def step(kind, graph, given, **options):
    y = run(kind, graph, given, **options)
    return [y, *torch.autograd.grad(y, given, torch.ones_like(y) + y.detach())]


def hub_graph(n=3000):
    """Square, a row and a column of which many blocks share."""
    rng = np.random.default_rng(0)
    row = np.concatenate([rng.integers(0, n, 8 * n), np.full(9 * n, 5), rng.integers(0, n, 9 * n)])
    col = np.concatenate([rng.integers(0, n, 8 * n), rng.integers(0, n, 9 * n), np.full(9 * n, 7)])
    order = np.argsort(row, kind="stable")
    indptr = np.searchsorted(row[order], np.arange(n + 1)).astype(np.int32)
    return Graph(CSR(indptr, col[order].astype(np.int32), shape=(n, n))).to("cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "layer"])
def test_both_devices_agree(kind, dtype):
    cases = [
        (loop_graph(300, device="cuda"), (8,), 8),
        (loop_graph(300, device="cuda", index_dtype=np.int64), (3,), 33),
        (loop_graph(300, device="cuda"), (), 300),
        (loop_graph(300, device="cuda"), (2,), 1),
        (hub_graph(), (2,), 16),
    ]
    for graph, heads, feat in cases:
        for options in OPTIONS:
            if kind == "layer":
                options = {**options, "self_loops": True}
            given = inputs(kind, graph, heads, feat, dtype=dtype)
            same = [one.detach().cpu().requires_grad_() for one in given]
            found = step(kind, graph, given, **options)
            expected = step(kind, graph.to("cpu"), same, **options)
            for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
                assert mine.dtype is dtype
                # Sums of up to 27 000 entries in another order, and half results in backward.
                exact = theirs.detach().double()
                assert_near(mine, exact, units=1000, dtype=dtype, gradient=i > 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "feat"), [(2, 16), (4, 8), (1, 300), (3, 7)])
def test_a_bias_is_that_of_the_cpu(heads, feat, dtype):
    """On rows that blocks share too, and where the gradient of the scores comes in slices."""
    for graph, loops in ((hub_graph(), True), (loop_graph(300, device="cuda"), False)):
        n, row = graph.n_rows, (heads, feat)
        given = tensors("cuda", (n, *row), row, (1, *row), (heads * feat,), dtype=dtype)

        def layer(graph, h, source, target, bias, loops=loops):
            seed = torch.tensor([SEED], device=h.device)
            options = Options(seed, 0.2, 0.4, loops)
            args = graph, options, h, source, target, None, None
            y = from_vectors(*args, bias=bias)
            with torch.no_grad():
                assert torch.equal(y, from_vectors(*args, bias=bias))
            wanted = h, source, target, bias
            return [y, *torch.autograd.grad(y, wanted, torch.ones_like(y) + y.detach())]

        found = layer(graph, *given)
        same = [one.detach().cpu().requires_grad_() for one in given]
        for i, (mine, theirs) in enumerate(zip(found, layer(graph.to("cpu"), *same), strict=True)):
            # A rounding for each of up to 27 000 entries of a sum: one thread adds them in turn.
            exact = theirs.detach().double()
            assert_near(mine, exact, units=27_000, dtype=dtype, gradient=i > 0)


@pytest.mark.parametrize("kind", [*KINDS, "layer"])
def test_long_rows_repeat_bit_by_bit(kind):
    graph = hub_graph()
    given = inputs(kind, graph, (2,), 48)
    options = {"dropout": 0.3, "seed": SEED, "self_loops": True}
    first = step(kind, graph, given, **options)
    for _ in range(5):
        assert all(map(torch.equal, first, step(kind, graph, given, **options)))


@pytest.mark.parametrize("kind", [*KINDS, "layer"])
def test_work_runs_on_the_streams_of_torch(kind):
    """A long wait on the side stream: work on any other stream would read what is not there yet."""
    graph = loop_graph(300, device="cuda")
    given = inputs(kind, graph, (2,), 16)
    options = {"dropout": 0.3, "seed": SEED, "self_loops": True}
    expected = step(kind, graph, given, **options)
    late = [torch.zeros_like(one).requires_grad_() for one in given]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            for one, value in zip(late, given, strict=True):
                one.copy_(value)
        found = step(kind, graph, late, **options)
    side.synchronize()
    assert all(map(torch.equal, found, expected))


def captured(once):
    """A CUDA graph of the call, after a run on a side stream, and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, once()


@pytest.mark.parametrize("kind", [*KINDS, "layer"])
def test_a_captured_step_replays_with_changed_inputs_and_seeds(kind):
    graph = loop_graph(300, device="cuda")
    prepare(graph)
    given, seed = inputs(kind, graph, (2,), 16), torch.tensor([5], device="cuda")
    options = {"dropout": 0.3, "self_loops": True}
    replayed, results = captured(lambda: step(kind, graph, given, seed=seed, **options))
    for _ in range(100):
        with torch.no_grad():
            for one in given:
                one.copy_(torch.randn_like(one))
            seed.random_()
        replayed.replay()
        fresh = [one.detach().clone().requires_grad_() for one in given]
        assert all(map(torch.equal, results, step(kind, graph, fresh, seed=int(seed), **options)))


def test_each_replay_drops_others():
    """The gradient tells that it has the mask of the result, which is linear in the features."""
    graph = loop_graph(300, device="cuda")
    prepare(graph)
    h, el, er, _ = given = inputs("gat", graph, (2,), 16)

    def once():
        y = gat_aggregate(graph, *given, dropout=0.5)
        return y, *torch.autograd.grad(y.sum(), (h, el, er))

    torch.manual_seed(0)
    replayed, (y, dh, *_) = captured(once)
    seen = []
    for _ in range(100):
        replayed.replay()
        torch.testing.assert_close((dh * h).sum(), y.sum(), rtol=1e-4, atol=1e-2)
        seen.append(y.detach().clone())
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(seen))
    # Of a hundred masks, whose mean is 1 and deviation 1: 5 deviations, features of up to 4.
    mean = torch.stack(seen).mean(0)
    torch.testing.assert_close(mean, gat_aggregate(graph, *given), rtol=0, atol=5 * 4 / 10)


@pytest.mark.parametrize("kind", [*KINDS, "layer"])
def test_no_memory_of_the_size_of_the_entries(kind):
    graph = make_graph(10_000, 10_000, 8_000_000, device="cuda")
    prepare(graph)
    given = inputs(kind, graph, (4,), 8)
    del given[3 if kind == "layer" else -1 :]  # edge scores
    grad = torch.rand(10_000, 4, 8, device="cuda")

    def once():
        return torch.autograd.grad(run(kind, graph, given, dropout=0.1), given, grad)

    once()  # kernels are loaded
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    peak = torch.cuda.max_memory_allocated() - before
    # Result, its positive part, as many gradients, statistics; sums of the rows that blocks share.
    assert peak < 12 * grad.nbytes < graph.nnz * 4


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("heads", "feat"), [(8, 8), (2, 300), (1, 7)])
@pytest.mark.parametrize("cut", [False, True])
def test_a_layer_is_few_launches(cut, heads, feat, dropout):
    graph = hub_graph() if cut else loop_graph(3000, device="cuda")
    prepare(graph)
    shapes = (3000, heads, feat), (1, heads, feat), (1, heads, feat), (heads * feat,)
    given = tensors("cuda", *shapes, dtype=torch.float32)
    grad = torch.rand(3000, heads, feat, device="cuda")
    seed = torch.tensor([SEED], device="cuda") if dropout else None
    options = Options(seed, 0.2, dropout, True)

    def once():
        y = from_vectors(graph, options, *given[:3], None, None, bias=given[3])
        return torch.autograd.grad(y, given, grad)

    once()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        once()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    # The profiler shows an op's own range on the device too.
    names = [
        event.name
        for event in profile.events()
        if event.device_type == on_device and not event.name.startswith("sparsefmt::")
    ]
    assert len(names) <= 6 + 2 * cut, names


class Seen(TorchDispatchMode):
    """The names of the ops that the dispatcher sees."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [*KINDS, "layer"])
def test_both_ways_to_a_kernel_agree_to_the_last_bit(monkeypatch, kind):
    graph = loop_graph(300, device="cuda")
    given = inputs(kind, graph, (2,), 16)
    options = {"dropout": 0.3, "seed": SEED, "self_loops": True}
    with Seen() as seen:
        watched = step(kind, graph, given, **options)
    family = {"gat": "gat", "layer": "gat_of_vectors"}.get(kind, "attend")
    names = f"{family}_with_statistics", f"{family}_backward"
    assert seen.names >= {f"sparsefmt::{name}" for name in names}
    for op in vars(attention).values():
        if hasattr(op, "library"):
            monkeypatch.setattr(op, "library", None)
    assert all(map(torch.equal, watched, step(kind, graph, given, **options)))


def test_the_host_is_soon_done():
    """The promise is 20 µs a forward op on an idle host; here only that nothing costs far more."""
    graph = loop_graph(300, device="cuda")
    prepare(graph)
    given = inputs("gat", graph, (2,), 16)[:3]
    grad = torch.rand(300, 2, 16, device="cuda")

    def best_of(function, count=200):
        found = []
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                function()
            found.append((time.perf_counter() - start) / count)
        return min(found)

    with torch.no_grad():
        forward = best_of(lambda: gat_aggregate(graph, *given))
    both = best_of(lambda: torch.autograd.grad(gat_aggregate(graph, *given), given, grad))
    assert forward < 200e-6, f"{forward * 1e6:.1f} µs"
    assert both < 1000e-6, f"{both * 1e6:.1f} µs"


def test_other_devices_may_be_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    graph = loop_graph(300, device="cuda:1")
    for kind in (*KINDS, "layer"):
        given = [one.detach().to("cuda:1").requires_grad_() for one in inputs(kind, graph, (2,), 8)]
        options = {"dropout": 0.2, "seed": 3, "self_loops": kind == "layer"}
        with torch.cuda.device(0):
            found = step(kind, graph, given, **options)
        with torch.cuda.device(1):
            assert all(map(torch.equal, found, step(kind, graph, given, **options)))
