"""MaxK and its aggregation in ``sparsefmt.autograd``, against the dense features that it keeps."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import DTYPES, empty_graph, make_graph, naive_spmm, tensors  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

from sparsefmt import CSR, DtypeError, Graph, ShapeError  # noqa: E402
from sparsefmt.autograd import maxk, maxk_aggregate, prepare, spmm  # noqa: E402
from sparsefmt.reorder import Order, degree_order  # noqa: E402

REDUCTIONS = ("sum", "mean")
#: Columns of one, two and four bytes; one of many, half, all.
SIZES = [(1, 1), (7, 3), (16, 16), (256, 32), (300, 40), (70_000, 3)]


pytestmark = pytest.mark.usefixtures("one_thread")


def mask(x, k):
    """1 at the ``k`` largest of each row, NaN first, of equal ones the first: by sorting."""
    order = x.detach().cpu().double().sort(dim=1, descending=True, stable=True).indices
    return torch.zeros(x.shape).scatter_(1, order[:, :k], 1).bool().to(x.device)


def naive(graph, x, k, a=None, r=None, c=None, reduce="sum"):
    return naive_spmm(graph, torch.where(mask(x, k), x, 0), a, r, c, reduce)


@pytest.mark.covering("dtype", "feat", one_in=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("feat", "k"), SIZES)
def test_maxk_keeps_the_largest_and_lets_their_gradient_pass(device, feat, k, dtype):
    x, grad = tensors(device, (9, feat), (9, feat), dtype=dtype)
    y = maxk(x, k)
    y.backward(grad.detach())
    chosen = mask(x, k)
    assert torch.equal(y, torch.where(chosen, x, 0))
    assert torch.equal(x.grad, torch.where(chosen, grad, 0))


def test_ties_and_nan_are_chosen_as_by_a_stable_sort(device):
    nan, inf = float("nan"), float("inf")
    rows = [[0.0, -0.0, 0.0, -1.0], [nan, 1.0, nan, inf], [-inf, -inf, -inf, -inf], [2.0, 3, 3, 3]]
    x = torch.tensor(rows, device=device, requires_grad=True)
    for k in range(1, 5):
        y = maxk(x, k)
        (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(found.bool(), mask(x, k))
        assert torch.equal(y.nan_to_num(), torch.where(mask(x, k), x, 0).nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_the_aggregation_is_that_of_the_features_that_are_kept(device, reduce, dtype):
    """Absolute inputs: no sum cancels, so that an error is at most (terms + 4) roundings."""
    eps = torch.finfo(dtype).eps
    for index_dtype, (feat, k), scaled in itertools.product(
        (np.int32, np.int64), SIZES[:5], (False, True)
    ):
        graph = make_graph(40, 30, 300, device=device, index_dtype=index_dtype)
        shapes = [(30, feat), (graph.nnz,), (40,), (30,), (40, feat)]
        *given, grad = (
            one.detach().abs().requires_grad_() for one in tensors(device, *shapes, dtype=dtype)
        )
        given = given if scaled else given[:2]
        x, a, r, c = [*given, None, None][:4]
        y = maxk_aggregate(graph, x, k, a, reduce=reduce, row_scale=r, col_scale=c)
        y.backward(grad.detach())
        exact = [one.detach().cpu().double().requires_grad_() for one in given]
        x, a, r, c = [*exact, None, None][:4]
        expected = naive(graph, x, k, a, r, c, reduce)
        found = torch.autograd.grad(expected, exact, grad.detach().cpu().double())
        wide = eps if dtype.itemsize > 2 else torch.finfo(torch.float32).eps
        tolerance = {"rtol": 4 * eps + (graph.nnz + feat) * wide, "atol": torch.finfo(dtype).tiny}
        for mine, theirs in zip([y, *(one.grad for one in given)], [expected, *found], strict=True):
            torch.testing.assert_close(mine.detach().cpu().double(), theirs.detach(), **tolerance)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_gradients_agree_with_finite_differences_any_number_of_times(device, shape, reduce):
    graph = make_graph(*shape, 14, device=device)
    x, a, r, c = tensors(device, (shape[1], 5), (graph.nnz,), (shape[0],), (shape[1],))

    def scaled(x, a, r, c):
        return maxk_aggregate(graph, x, 2, a, reduce=reduce, row_scale=r, col_scale=c)

    def plain(x):
        return maxk_aggregate(graph, x, 2, reduce=reduce)

    for function, inputs in ((scaled, (x, a, r, c)), (plain, (x,)), (lambda x: maxk(x, 2), (x,))):
        assert gradcheck(function, inputs, nondet_tol=0)
        assert gradgradcheck(function, inputs, nondet_tol=0)
    for at in range(4):  # each gradient by itself
        some = [one.detach().requires_grad_(i == at) for i, one in enumerate((x, a, r, c))]
        assert gradcheck(scaled, some, nondet_tol=0)
        assert gradgradcheck(scaled, some, nondet_tol=0)


def test_third_derivatives_are_those_of_the_dense_features(device):
    graph = make_graph(6, 4, 14, device=device)
    x, a = tensors(device, (4, 5), (graph.nnz,))

    def third(y):
        first = torch.autograd.grad(y.pow(4).sum(), (x, a), create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), (x, a), create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in second), (x, a))

    mine = third(maxk_aggregate(graph, x, 2, a))
    for found, theirs in zip(mine, third(spmm(graph, maxk(x, 2), a)), strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-9, atol=0)  # a chain of some 1e3 sums


def test_with_every_feature_it_is_spmm(device):
    graph = make_graph(9, 6, 40, weighted=True, device=device)
    (x,) = tensors(device, (6, 4))
    for reduce in REDUCTIONS:
        y, z = maxk_aggregate(graph, x, 4, reduce=reduce), spmm(graph, x, reduce=reduce)
        torch.testing.assert_close(y, z)
        grads = (torch.autograd.grad(one.square().sum(), x)[0] for one in (y, z))
        torch.testing.assert_close(*grads)


def test_the_transposed_graph_is_aggregated_too(device):
    graph = make_graph(9, 6, 40, weighted=True, device=device).transposed
    (x,) = tensors(device, (9, 5))
    y, z = maxk_aggregate(graph, x, 2), spmm(graph, maxk(x, 2))
    torch.testing.assert_close(y, z)
    torch.testing.assert_close(*(torch.autograd.grad(one.pow(2).sum(), x)[0] for one in (y, z)))


def test_only_what_gradients_read_is_saved():
    graph = make_graph(9, 6, 40)
    x, a = tensors("cpu", (6, 300), (graph.nnz,))
    kept, *_, columns = maxk_aggregate(graph, x, 7).grad_fn.saved_tensors
    assert kept is None
    assert (columns.dtype, columns.shape) == (torch.uint16, (6, 7))
    assert maxk_aggregate(graph, x, 7, a).grad_fn.saved_tensors[0].shape == (6, 7)
    assert maxk_aggregate(graph, x[:, :256], 7).grad_fn.saved_tensors[-1].dtype is torch.uint8
    assert maxk_aggregate(graph, x.detach(), 7).grad_fn is None


@pytest.mark.gpu
def test_a_step_takes_less_memory_than_the_dense_one():
    graph = make_graph(20_000, 20_000, 400_000, device="cuda")
    prepare(graph)
    (w,) = tensors("cuda", (256, 256), dtype=torch.float32)
    (x,) = tensors("cuda", (20_000, 256), dtype=torch.float32, grad=False)
    peaks = []
    for aggregate in (lambda h: maxk_aggregate(graph, h, 32), lambda h: spmm(graph, h.relu())):
        for _ in range(2):  # kernels are loaded in the first
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            aggregate(x @ w).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (4, 3)])
def test_empty_graphs_give_zeros(device, shape):
    graph = empty_graph(*shape, device=device)
    x, a, r, c = tensors(device, (shape[1], 4), (0,), (shape[0],), (shape[1],))
    y = maxk_aggregate(graph, x, 2, a, reduce="mean", row_scale=r, col_scale=c)
    y.backward(torch.ones_like(y))
    assert y.shape == (shape[0], 4)
    assert not y.any()
    assert not any(one.grad.any() for one in (x, a, r, c))
    assert maxk(x, 2).shape == x.shape


@pytest.mark.usefixtures("deterministic")
def test_strides_change_nothing(device):
    graph = make_graph(20, 12, 90, device=device)
    wide, a, grad = tensors(device, (24, 40), (2 * graph.nnz,), (20, 8), grad=False)
    for view in (wide[::2, 5:13], wide[:12, ::5], wide[:8, :12].T, wide[:1, :8].expand(12, 8)):
        some, copy = view.detach().requires_grad_(), view.clone().contiguous().requires_grad_()
        weights = a[::2].detach().requires_grad_()
        same = a[::2].contiguous().requires_grad_()
        y, z = maxk_aggregate(graph, some, 3, weights), maxk_aggregate(graph, copy, 3, same)
        assert torch.equal(y, z)
        assert torch.equal(maxk(some, 3), maxk(copy, 3))
        y.backward(grad.T.contiguous().T)
        z.backward(grad)
        assert torch.equal(some.grad, copy.grad)
        assert torch.equal(weights.grad, same.grad)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_half_gradients_are_rounded_once(reduce):
    """A row of 80 000 entries: 1 / degree is subnormal in float16."""
    n = 80_000
    indptr = np.array([0, n, n], np.int32)
    graph = Graph(CSR(indptr, np.arange(n, dtype=np.int32), shape=(2, n)))
    r = torch.tensor([1e-3, 1.0], dtype=torch.half)
    x = torch.full((n, 4), 60.0, dtype=torch.half, requires_grad=True)
    w = torch.ones(n, dtype=torch.half, requires_grad=True)
    grad = torch.full((2, 4), 32.0, dtype=torch.half)
    y = maxk_aggregate(graph, x, 2, w, reduce=reduce, row_scale=r)
    dx, dw = torch.autograd.grad(y, (x, w), grad)
    factor = float(r[0]) / (n if reduce == "mean" else 1)
    # One rounding to float16, whose step is 6e-8 where it is subnormal.
    assert dx[0].tolist() == pytest.approx([32 * factor] * 2 + [0, 0], rel=1e-3, abs=3e-8)
    assert float(dw[0]) == pytest.approx(2 * 60 * 32 * factor, rel=1e-3, abs=3e-8)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_autocast_narrows_before_the_choice(device, reduce):
    graph = make_graph(9, 6, 40, device=device)
    x, a, r, c = tensors(device, (6, 8), (graph.nnz,), (9,), (6,), dtype=torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = maxk_aggregate(graph, x, 3, a, reduce=reduce, row_scale=r, col_scale=c)
        assert maxk(x, 3).dtype is torch.float32
        assert maxk_aggregate(graph, x.double(), 3).dtype is torch.float64
    assert y.dtype is torch.bfloat16
    y.float().square().sum().backward()
    assert all(one.grad.dtype is torch.float32 for one in (x, a, r, c))
    cast = [one.detach().bfloat16() for one in (x, a, r, c)]
    options = {"reduce": reduce, "row_scale": cast[2], "col_scale": cast[3]}
    assert torch.equal(y, maxk_aggregate(graph, cast[0], 3, cast[1], **options))


def test_a_prepared_order_changes_nothing_but_the_way(device):
    graph = make_graph(60, 30, 2000, device=device)
    x, a = tensors(device, (30, 33), (graph.nnz,))
    before = torch.autograd.grad(maxk_aggregate(graph, x, 9, a).square().sum(), (x, a))
    prepare(graph, order=degree_order(graph.csr, descending=False))
    after = torch.autograd.grad(maxk_aggregate(graph, x, 9, a).square().sum(), (x, a))
    for mine, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_an_order_is_checked():
    graph = make_graph(6, 5, 20)
    with pytest.raises(DtypeError, match="order is a Tensor: give"):
        prepare(graph, order=torch.arange(6))
    with pytest.raises(ShapeError, match="order is of 5 vertices but there are 6 rows"):
        prepare(graph, order=Order(np.arange(5)))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_results_repeat_bit_by_bit_in_deterministic_mode(device, reduce):
    graph = make_graph(60, 30, 2000, device=device)
    x, a, r, c = tensors(device, (30, 33), (graph.nnz,), (60,), (30,), dtype=torch.float32)

    def once():
        y = maxk_aggregate(graph, maxk(x, 20), 9, a, reduce=reduce, row_scale=r, col_scale=c)
        return [y, *torch.autograd.grad(y.square().sum(), (x, a, r, c))]

    first = once()
    for _ in range(3):
        assert all(map(torch.equal, first, once()))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("feat", [8, 300])
def test_it_compiles_as_one_graph(device, feat, dynamic):
    graph = make_graph(9, 6, 40, device=device)

    def closure(x, a, r, c):
        y = maxk_aggregate(graph, x, 3, a, reduce="mean", row_scale=r, col_scale=c)
        return maxk(y, 2).sin()

    torch._dynamo.reset()
    compiled = torch.compile(closure, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    given = tensors(device, (6, feat), (graph.nnz,), (9,), (6,))
    results = []
    for function in (compiled, closure):
        y = function(*given)
        results.append([y, *torch.autograd.grad(y.sum(), given)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), results[0][0])
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_a_captured_step_replays_with_changed_inputs():
    graph = make_graph(300, 200, 5000, device="cuda")
    prepare(graph)
    given = tensors("cuda", (200, 64), (graph.nnz,), (300,), (200,), dtype=torch.float32)
    grad = torch.rand(300, 64, device="cuda")

    def step(given):
        x, a, r, c = given
        y = maxk_aggregate(graph, x, 8, a, row_scale=r, col_scale=c)
        return [y, *torch.autograd.grad(y, given, grad)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(given)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = step(given)
    for _ in range(20):
        with torch.no_grad():
            for one in given:
                one.copy_(torch.rand_like(one))
        captured.replay()
        fresh = [one.detach().clone().requires_grad_() for one in given]
        assert all(map(torch.equal, results, step(fresh)))
