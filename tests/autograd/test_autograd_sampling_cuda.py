"""What only a GPU shows of samples: both devices, streams, CUDA graphs, memory, synchronisation."""

import itertools
import time
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import DTYPES, make_graph, tensors  # noqa: E402
from test_autograd_attention_cuda import Seen, captured, hub_graph  # noqa: E402

from sparsefmt.autograd import prepare, sampled_aggregate, spmm  # noqa: E402
from sparsefmt.autograd import sampling as autograd_sampling  # noqa: E402

pytestmark = pytest.mark.gpu
STRATEGIES = ("bucket", "fastrand", "random")
FACTORS = ({}, {"mean": True}, {"rescale": True})
SEED = 1234567890123


def inputs(graph, feat, *, dtype=torch.float32, device="cuda"):
    """So small that float16 holds what hubs add up to."""
    shapes = (graph.n_cols, feat), (graph.nnz,), (graph.n_rows,), (graph.n_cols,)
    made = tensors(device, *shapes, dtype=dtype, grad=False)
    return [one.div_(8).requires_grad_() for one in made]


def step(graph, given, width, *, trained=True, **options):
    """The result and the gradients of features and edge values, and of scales that are trained."""
    x, a, r, c = given
    scales = [one if trained else one.detach() for one in (r, c)]
    options |= {"row_scale": scales[0], "col_scale": scales[1]}
    y = sampled_aggregate(graph, x, width, a, **options)
    wanted = (x, a, r, c) if trained else (x, a)
    return [y, *torch.autograd.grad(y, wanted, torch.ones_like(y) + y.detach())]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_devices_agree(strategy, dtype):
    cases = [
        (make_graph(300, 200, 5000, device="cuda"), 64, 8),
        (make_graph(300, 200, 5000, device="cuda", index_dtype=np.int64), 33, 8),
        (make_graph(300, 200, 5000, device="cuda"), 300, 1),
        (make_graph(301, 200, 5000, device="cuda"), 129, 7),  # an odd number of places
        (make_graph(301, 200, 5000, device="cuda"), 129, 10**9),
        (hub_graph(), 16, 40),
        (hub_graph(), 100, 7000),
    ]
    half = dtype.itemsize == 2
    # Sums of up to 27 000 products in another order; half gradients read half results.
    units = 1000 * torch.finfo(torch.float32 if half else dtype).eps
    relative = 2e-2 if half else units
    for (graph, feat, width), factors in itertools.product(cases, FACTORS):
        given = inputs(graph, feat, dtype=dtype)
        same = [one.detach().cpu().requires_grad_() for one in given]
        for trained in (False, True):
            options = {"strategy": strategy, "seed": SEED, "trained": trained, **factors}
            found = step(graph, given, width, **options)
            expected = step(graph.to("cpu"), same, width, **options)
            for mine, theirs in zip(found, expected, strict=True):
                assert mine.dtype is dtype
                largest = float(theirs.detach().abs().max())
                torch.testing.assert_close(
                    mine.cpu(), theirs, rtol=relative, atol=relative * largest
                )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_long_rows_repeat_bit_by_bit(strategy):
    graph = hub_graph()
    given = inputs(graph, 48)
    options = {"strategy": strategy, "seed": SEED, "mean": True}
    for width in (5, 9000):
        first = step(graph, given, width, **options)
        for _ in range(5):
            assert all(map(torch.equal, first, step(graph, given, width, **options)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_work_runs_on_the_streams_of_torch(strategy):
    """A long wait on the side stream: work on any other stream would read what is not there yet."""
    graph = make_graph(300, 200, 5000, device="cuda")
    given = inputs(graph, 64)
    options = {"strategy": strategy, "seed": SEED, "trained": False, "rescale": True}
    expected = step(graph, given, 8, **options)
    late = [torch.zeros_like(one).requires_grad_() for one in given]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            for one, value in zip(late, given, strict=True):
                one.copy_(value)
        found = step(graph, late, 8, **options)
    side.synchronize()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("width", [3, 2**40])
def test_nothing_waits_for_the_gpu(width):
    graph = make_graph(300, 200, 5000, device="cuda")
    given = inputs(graph, 64)
    step(graph, given, width, strategy="random", mean=True)
    try:
        with warnings.catch_warnings():  # that it is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        step(graph, given, width, strategy="random", mean=True)
        step(graph, given, width, strategy="random", rescale=True, trained=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("width", [3, 8, 2**40])
@pytest.mark.parametrize("factors", FACTORS, ids=str)
def test_a_captured_step_replays_with_changed_inputs_and_seeds(width, factors):
    graph = make_graph(300, 200, 5000, device="cuda")
    prepare(graph, transposed=False)
    given, seed = inputs(graph, 64), torch.tensor([5], device="cuda")
    options = {"strategy": "random", **factors}
    replayed, results = captured(lambda: step(graph, given, width, seed=seed, **options))
    for _ in range(100):
        with torch.no_grad():
            for one in given:
                one.copy_(torch.randn_like(one))
            seed.random_()
        replayed.replay()
        fresh = [one.detach().clone().requires_grad_() for one in given]
        expected = step(graph, fresh, width, seed=int(seed), **options)
        assert all(map(torch.equal, results, expected))


def test_each_replay_draws_anew():
    """The gradient tells that it has the sample of the result, which is linear in the features."""
    graph = make_graph(300, 200, 5000, device="cuda")
    prepare(graph, transposed=False)
    x, a, *_ = inputs(graph, 64, dtype=torch.float64)

    def once():
        y = sampled_aggregate(graph, x, 8, a, strategy="random", rescale=True)
        return y, *torch.autograd.grad(y, (x, a), y.detach())

    torch.manual_seed(0)
    replayed, (y, dx, da) = captured(once)
    seen = []
    for _ in range(100):
        replayed.replay()
        torch.testing.assert_close((dx * x).sum(), y.square().sum())
        torch.testing.assert_close((da * a).sum(), y.square().sum())
        seen.append(y.detach().clone())
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(seen))
    found, error = torch.stack(seen).mean(0), torch.stack(seen).std(0) / 10
    excess = (found - spmm(graph, x, a)).abs() - 6 * error
    assert excess.max() <= 1e-9  # of 19 200 places, 6 standard errors; rows sampled whole have none


def test_memory_is_that_of_the_sample():
    graph = make_graph(10_000, 10_000, 8_000_000, device="cuda")
    prepare(graph, transposed=False)
    (x,) = tensors("cuda", (10_000, 32), dtype=torch.float32)
    grad = torch.rand(10_000, 32, device="cuda")

    def once():
        y = sampled_aggregate(graph, x, 16, strategy="random", mean=True)
        return torch.autograd.grad(y, x, grad)

    once()  # kernels are loaded
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    peak = torch.cuda.max_memory_allocated() - before
    # Result and gradient; for each place three indices, their sorted copies, an order of int64 and
    # what sorting needs.
    assert peak < 4 * grad.nbytes + 10_000 * 16 * 80 < graph.nnz * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("width", [8, 2**40])
def test_both_ways_to_a_kernel_agree_to_the_last_bit(monkeypatch, strategy, width):
    graph = make_graph(300, 200, 5000, device="cuda")
    given = inputs(graph, 48)
    options = {"strategy": strategy, "seed": SEED, "trained": False, "mean": True}
    with Seen() as seen:
        watched = step(graph, given, width, **options)
    names = "spmm_sampled", "spmm_sampled_dx", "spmm_sampled_da"
    assert seen.names >= {f"sparsefmt::{name}" for name in names}
    for op in vars(autograd_sampling).values():
        if hasattr(op, "library"):
            monkeypatch.setattr(op, "library", None)
    assert all(map(torch.equal, watched, step(graph, given, width, **options)))


def test_the_host_is_soon_done():
    """The promise is 20 µs a forward op on an idle host; here only that nothing costs far more."""
    graph = make_graph(300, 200, 5000, device="cuda")
    prepare(graph)
    (x,) = tensors("cuda", (200, 32), dtype=torch.float32)
    grad = torch.rand(300, 32, device="cuda")

    def best_of(function, count=200):
        found = []
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                function()
            found.append((time.perf_counter() - start) / count)
        return min(found)

    def call():
        return sampled_aggregate(graph, x, 8)

    with torch.no_grad():
        forward = best_of(call)
    both = best_of(lambda: torch.autograd.grad(call(), x, grad))
    assert forward < 200e-6, f"{forward * 1e6:.1f} µs"
    assert both < 1000e-6, f"{both * 1e6:.1f} µs"


def test_other_devices_may_be_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    graph = make_graph(300, 200, 5000, device="cuda:1")
    given = [one.detach().to("cuda:1").requires_grad_() for one in inputs(graph, 16)]
    options = {"strategy": "random", "seed": 3}
    with torch.cuda.device(0):
        found = step(graph, given, 8, **options)
    with torch.cuda.device(1):
        assert all(map(torch.equal, found, step(graph, given, 8, **options)))
