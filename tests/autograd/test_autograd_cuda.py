"""What only a GPU shows: long rows, replays that draw, launches, memory, the time of the host."""

import gc
import itertools
import time
import warnings
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_cases import KINDS, SEED, assert_near, call, from_vectors, loop_graph, shapes_of  # noqa: E402
from autograd_cases import DTYPES, make_graph, tensors  # noqa: E402

from sparsefmt import CSR, Graph, UnsupportedError  # noqa: E402
from sparsefmt.autograd import maxk_aggregate, prepare, sampled_aggregate, spmm  # noqa: E402
from sparsefmt.autograd.attention import gat_of_vectors  # noqa: E402
from sparsefmt.ops.attention.score import Options  # noqa: E402
from sparsefmt.ops.engine.structure import _at  # noqa: E402

pytestmark = pytest.mark.gpu
STRATEGIES = ("bucket", "fastrand", "random")


def hub_graph(n=3000):
    """Square, a row and a column of which many blocks share."""
    rng = np.random.default_rng(0)
    row = np.concatenate([rng.integers(0, n, 8 * n), np.full(9 * n, 5), rng.integers(0, n, 9 * n)])
    col = np.concatenate([rng.integers(0, n, 8 * n), rng.integers(0, n, 9 * n), np.full(9 * n, 7)])
    order = np.argsort(row, kind="stable")
    indptr = np.searchsorted(row[order], np.arange(n + 1)).astype(np.int32)
    return Graph(CSR(indptr, col[order].astype(np.int32), shape=(n, n))).to("cuda")


def attention(kind, graph, heads, feat, device="cuda", dtype=torch.float32):
    """Arguments of a function, or of "layer": features, vectors, edge scores and loop scores."""
    n = graph.n_rows
    of_layer = [(n, *heads, feat), (*heads, feat), (*heads, feat), (graph.nnz, *heads), (n, *heads)]
    of_bias = [(n, *heads, feat), (*heads, feat), (1, *heads, feat), (feat * heads[-1],)]
    shapes = {"layer": of_layer, "bias": of_bias}.get(kind) or shapes_of(kind, graph, heads, feat)
    return tensors(device, *shapes, dtype=dtype)


def attend(kind, graph, given, **options):
    if kind == "layer":
        return gat_of_vectors(graph, *given, **options)
    return call(kind, graph, given, **options)


def sample(graph, given, width, *, trained=True, **options):
    """Add up a sample, with scales that are trained or constant."""
    x, a, *scales = given
    r, c = (one if trained else one.detach() for one in scales)
    return sampled_aggregate(graph, x, width, a, row_scale=r, col_scale=c, **options)


def of_products(graph, feat, device="cuda", dtype=torch.float32):
    """So small that float16 holds what hubs add up to."""
    shapes = (graph.n_cols, feat), (graph.nnz,), (graph.n_rows,), (graph.n_cols,)
    made = tensors(device, *shapes, dtype=dtype, grad=False)
    return [one.div_(8).requires_grad_() for one in made]


def step(function, given):
    """The result, and the gradients of what has one."""
    y = function(*given)
    grad = torch.ones_like(y) + y.detach()
    return [y, *torch.autograd.grad(y, given, grad, allow_unused=True)]


def equal(first, second):
    pairs = zip(first, second, strict=True)
    return all(one is other or torch.equal(one, other) for one, other in pairs)


def with_bias(graph, h, source, target, bias):
    options = Options(torch.tensor([SEED], device=h.device), 0.2, 0.4, True)
    return from_vectors(graph, options, h, source, target, None, None, bias=bias)


MASKED = {"dropout": 0.3, "seed": SEED, "self_loops": True}
LONG = {"bias": with_bias}
for kind in (*KINDS, "layer"):
    LONG[kind] = lambda graph, *given, kind=kind: attend(kind, graph, given, **MASKED)
for strategy, width in itertools.product(STRATEGIES, (5, 9000)):
    options = {"width": width, "strategy": strategy, "seed": SEED, "mean": True}
    LONG[f"{strategy} {width}"] = lambda graph, *a, options=options: sample(graph, a, **options)
for reduce in ("sum", "max"):
    LONG[f"spmm {reduce}"] = lambda graph, x, a, r, c, reduce=reduce: spmm(
        graph, x, a, reduce=reduce, row_scale=r, col_scale=c
    )


def long_case(name, dtype, heads=(2,), feat=48):
    """A graph with long rows, and arguments."""
    graph = hub_graph()
    if name in ("bias", *KINDS, "layer"):
        return graph, attention(name, graph, heads, feat, dtype=dtype)
    return graph, of_products(graph, feat, dtype=dtype)


@pytest.mark.parametrize("name", LONG)
def test_long_rows_repeat_bit_by_bit(name):
    graph, given = long_case(name, torch.float32)
    first, *others = (step(partial(LONG[name], graph), given) for _ in range(6))
    assert all(equal(first, one) for one in others)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "feat"), [((2,), 16), ((1,), 300), ((3,), 7)])
@pytest.mark.parametrize("name", LONG)
def test_both_devices_agree_on_long_rows(name, heads, feat, dtype):
    graph, given = long_case(name, dtype, heads, feat)
    same = [one.detach().cpu().requires_grad_() for one in given]
    found = step(partial(LONG[name], graph), given)
    expected = step(partial(LONG[name], graph.to("cpu")), same)
    if name == "spmm max" and dtype.itemsize == 2:  # ties fall apart differently
        found, expected = found[:1], expected[:1]
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine.dtype is dtype
        # A rounding for each of up to 27 000 entries of a sum, and half results in backward.
        exact = theirs.detach().double()
        assert_near(mine, exact, units=27_000, dtype=dtype, gradient=i > 0)


@pytest.mark.parametrize("width", [3, 2**40])
def test_samples_wait_for_no_gpu(width):
    graph = make_graph(300, 200, 5000, device="cuda")
    given = of_products(graph, 64)

    def run(**options):
        step(lambda *a: sample(graph, a, width, strategy="random", **options), given)

    run(mean=True)
    try:
        with warnings.catch_warnings():  # that it is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        run(mean=True)
        run(rescale=True, trained=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_capture_of_maxk_needs_a_step_before():
    """With one it is captured and replayed in ``tests/laws``."""
    graph = make_graph(300, 200, 5000, device="cuda")
    prepare(graph)
    x, a, *_ = of_products(graph, 64)
    grad = torch.rand(graph.n_rows, 64, device="cuda")
    with pytest.raises(UnsupportedError, match="run the same step once before it"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.autograd.grad(maxk_aggregate(graph, x, 8, a), (x, a), grad)


def test_windows_go_with_their_structure():
    def alive():
        gc.collect()
        keys = [key for built in _at.values() for key in built.parts["csr"]._built().parts]
        return sum(key[0] == "windows" for key in keys)

    before = alive()
    for seed in range(3):
        graph = make_graph(30, 20, 200, device="cuda", seed=seed)
        x = torch.rand(20, 16, device="cuda", requires_grad=True)
        maxk_aggregate(graph, x, 4).sum().backward()
        assert alive() == before + 1
        del graph, x
    assert alive() == before


def test_windows_are_those_of_the_shape():
    """Matrices of other widths on the same arrays."""
    csr = make_graph(30, 20, 400, device="cuda").csr
    for n_cols in (20, 300_000):
        graph = Graph(csr._replace(shape=(30, n_cols)))
        x = torch.rand(n_cols, 300, device="cuda", requires_grad=True)
        (found,) = torch.autograd.grad(maxk_aggregate(graph, x, 64).square().sum(), x)
        torch.use_deterministic_algorithms(True)
        (expected,) = torch.autograd.grad(maxk_aggregate(graph, x, 64).square().sum(), x)
        torch.use_deterministic_algorithms(False)
        torch.testing.assert_close(found, expected)


def peak_of(once):
    """The most memory of a step above what there was, after one that loads the kernels."""
    once()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    return torch.cuda.max_memory_allocated() - before


def test_memory_is_torchs_and_no_more_than_results():
    import cupy

    graph = make_graph(20_000, 10_000, 4_000_000, device="cuda")
    prepare(graph)
    x, a, *_ = of_products(graph, 16)
    grad = torch.rand(graph.n_rows, 16, device="cuda")

    def once():
        torch.autograd.grad(spmm(graph, x, a), (x, a), grad)

    once()
    pool = cupy.get_default_memory_pool().used_bytes()
    assert peak_of(once) <= grad.nbytes + x.nbytes + 1.05 * a.nbytes + 4096
    assert cupy.get_default_memory_pool().used_bytes() == pool


@pytest.mark.parametrize("kind", [*KINDS, "layer"])
def test_no_memory_of_the_size_of_the_entries(kind):
    graph = make_graph(10_000, 10_000, 8_000_000, device="cuda")
    prepare(graph)
    given = attention(kind, graph, (4,), 8)
    del given[3 if kind == "layer" else -1 :]  # edge scores
    grad = torch.rand(10_000, 4, 8, device="cuda")
    peak = peak_of(
        lambda: torch.autograd.grad(attend(kind, graph, given, dropout=0.1), given, grad)
    )
    # Result, its positive part, as many gradients, statistics; sums of the rows that blocks share.
    assert peak < 12 * grad.nbytes < graph.nnz * 4


def test_memory_is_that_of_the_sample():
    graph = make_graph(10_000, 10_000, 8_000_000, device="cuda")
    prepare(graph, transposed=False)
    (x,) = tensors("cuda", (10_000, 32), dtype=torch.float32)
    grad = torch.rand(10_000, 32, device="cuda")

    def once():
        y = sampled_aggregate(graph, x, 16, strategy="random", mean=True)
        return torch.autograd.grad(y, x, grad)

    # Result and gradient; for each place three indices, their sorted copies, an order of int64 and
    # what sorting needs.
    assert peak_of(once) < 4 * grad.nbytes + 10_000 * 16 * 80 < graph.nnz * 4


def test_a_step_of_maxk_takes_less_memory_than_the_dense_one():
    graph = make_graph(20_000, 20_000, 400_000, device="cuda")
    prepare(graph)
    (w,) = tensors("cuda", (256, 256), dtype=torch.float32)
    (x,) = tensors("cuda", (20_000, 256), dtype=torch.float32, grad=False)
    sparse, dense = (
        peak_of(lambda aggregate=aggregate: aggregate(x @ w).sum().backward())
        for aggregate in (lambda h: maxk_aggregate(graph, h, 32), lambda h: spmm(graph, h.relu()))
    )
    assert sparse < dense


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


def test_the_host_is_soon_done_with_a_sample():
    """What others cost is counted in calls of Python by ``test_at_once_cuda``."""
    graph = loop_graph(300, device="cuda")
    prepare(graph)
    x, *_ = of_products(graph, 64)
    grad = torch.rand(300, 64, device="cuda")

    def best_of(function, count=200):
        seconds = []
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                function()
            seconds.append((time.perf_counter() - start) / count)
        return min(seconds)

    forward = best_of(lambda: sampled_aggregate(graph, x, 8))
    both = best_of(lambda: torch.autograd.grad(sampled_aggregate(graph, x, 8), x, grad))
    assert forward < 200e-6, f"{forward * 1e6:.1f} µs"
    assert both < 1000e-6, f"{both * 1e6:.1f} µs"


def test_other_devices_may_be_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    graph = loop_graph(300, device="cuda:1")
    cases = [
        (lambda x, *_: spmm(graph, x, reduce="mean"), of_products(graph, 8, "cuda:1")),
        (lambda *a: sample(graph, a, 3, seed=3), of_products(graph, 8, "cuda:1")),
        *(
            (partial(LONG[kind], graph), attention(kind, graph, (2,), 8, "cuda:1"))
            for kind in (*KINDS, "layer")
        ),
    ]
    for function, given in cases:
        with torch.cuda.device(0):
            found = step(function, given)
        assert found[0].device == torch.device("cuda:1")
        with torch.cuda.device(1):
            assert equal(found, step(function, given))
