"""Aggregation of a sample of each row, against gathering and scattering the same entries."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import (  # noqa: E402
    DTYPES,
    empty_graph,
    entries,
    make_graph,
    naive_spmm,
    tensors,
)
from torch.autograd import gradcheck  # noqa: E402

from sparsefmt import CSR, Graph  # noqa: E402
from sparsefmt.autograd import sampled_aggregate, spmm  # noqa: E402
from sparsefmt.ops import sample_with_perm  # noqa: E402

STRATEGIES = ("bucket", "fastrand", "random")
FACTORS = ({}, {"mean": True}, {"rescale": True})
SEED = -1234567890123456789

pytestmark = pytest.mark.usefixtures("one_thread")


def shares(graph, width, strategy, seed=SEED, *, mean=False, rescale=False):
    """(nnz,) What multiplies at each entry of the graph: 0 where it is not in the sample."""
    rows, _ = entries(graph)
    _, perm = sample_with_perm(graph.to("cpu").csr, width, strategy=strategy, seed=seed)
    sampled = torch.zeros(graph.nnz, dtype=torch.float64)
    sampled[torch.from_numpy(perm).long()] = 1
    kept = torch.bincount(rows, sampled, minlength=graph.n_rows)
    length = torch.bincount(rows, minlength=graph.n_rows)
    assert torch.equal(kept, length.clamp(max=width).double())
    factor = 1 / kept if mean else length / kept if rescale else torch.ones_like(kept)
    return sampled * factor[rows]


def naive(graph, x, a, r, c, share):
    """In float64, on the CPU, differentiable."""
    return naive_spmm(graph, x, share if a is None else a * share, r, c)


def assert_near(found, exact, size, *, terms):
    """``|found - exact| <= terms * eps * size``, where ``size`` sums the absolute products."""
    eps = torch.finfo(found.dtype).eps
    accumulated = max(eps, torch.finfo(torch.float32).eps * terms)
    bound = (4 * eps + (accumulated if found.dtype.itemsize == 2 else terms * eps)) * size
    excess = (found.detach().cpu().double() - exact).abs() - bound
    assert excess.numel() == 0 or excess.max() <= 4 * torch.finfo(found.dtype).tiny


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_and_its_gradients_are_those_of_gathering_the_sample(device, strategy, dtype):
    """Scales as constants, which the kernel applies, and with gradients, outside it."""
    cases = itertools.product((np.int32, np.int64), ((1, 3), (33, 8), (64, 1)), (None, False, True))
    for at, (index_dtype, (feat, width), scaled) in enumerate(cases):
        factors = FACTORS[at % 3]
        graph = make_graph(40, 30, 300, device=device, index_dtype=index_dtype)
        shapes = [(30, feat), (graph.nnz,), (40,), (30,), (40, feat)]
        x, a, r, c, grad = tensors(device, *shapes, dtype=dtype)
        r, c = (None if scaled is None else one.detach().requires_grad_(scaled) for one in (r, c))
        y = sampled_aggregate(
            *(graph, x, width, a),
            **{"strategy": strategy, "seed": SEED, "row_scale": r, "col_scale": c, **factors},
        )
        wanted = [x, a, r, c] if scaled else [x, a]
        found = torch.autograd.grad(y, wanted, grad.detach())
        share, results = shares(graph, width, strategy, **factors), []
        for transform in (torch.clone, torch.abs):  # the results, and the sums of absolute products
            given = [transform(one.detach().cpu().double()) for one in wanted]
            given = [one.requires_grad_() for one in given]
            rest = [
                None if one is None else transform(one.detach().cpu().double()) for one in (r, c)
            ]
            args = given if scaled else [*given, *rest]
            exact = naive(graph, *args, share)
            upper = transform(grad.detach().cpu().double())
            results.append([exact.detach(), *torch.autograd.grad(exact, given, upper)])
        assert y.dtype is dtype
        for one, mine, size in zip([y, *found], *results, strict=True):
            assert one.dtype is dtype
            assert_near(one, mine, 4 * size, terms=graph.nnz + feat)


@pytest.mark.parametrize("factors", FACTORS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_agree_with_finite_differences(device, strategy, factors):
    graph = make_graph(6, 4, 30, device=device)
    x, a, r, c = tensors(device, (4, 2), (graph.nnz,), (6,), (4,))
    for width, columns in itertools.product((1, 3, 10**20), (None, c)):
        options = {"strategy": strategy, "seed": 3, **factors}

        def scaled(x, a, r, c, width=width, options=options):
            return sampled_aggregate(graph, x, width, a, **options, row_scale=r, col_scale=c)

        given = x, a, r, columns
        assert gradcheck(scaled, given, nondet_tol=0)
        for at in range(4 if columns is c else 3):  # each gradient by itself
            some = [None if one is None else one.detach() for one in given]
            some[at].requires_grad_()
            assert gradcheck(scaled, some, nondet_tol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_a_sample_of_everything_is_spmm(device, strategy, reduce):
    graph = make_graph(40, 30, 300, weighted=True, device=device)
    x, a, r, c, grad = tensors(device, (30, 17), (graph.nnz,), (40,), (30,), (40, 17))
    longest = int(np.diff(graph.to("cpu").csr.indptr).max())
    for weight, (r_, c_) in itertools.product((None, a), ((None, None), (r, c))):
        wanted = [one for one in (x, weight, r_, c_) if one is not None]
        scales = {"row_scale": r_, "col_scale": c_}
        expected = spmm(graph, x, weight, reduce=reduce, **scales)
        theirs = torch.autograd.grad(expected, wanted, grad)
        for width in (longest, 2**31, 10**30):
            mean = {"mean": True} if reduce == "mean" else {"rescale": width > longest}
            y = sampled_aggregate(graph, x, width, weight, strategy=strategy, **mean, **scales)
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(torch.autograd.grad(y, wanted, grad), theirs)


def test_the_graphs_own_values_are_constants_in_csr_order(device):
    graph = make_graph(9, 6, 60, weighted=True, device=device)
    (x,) = tensors(device, (6, 3))
    data = torch.from_dlpack(graph.csr.data)
    y, z = sampled_aggregate(graph, x, 3), sampled_aggregate(graph, x, 3, data)
    assert torch.equal(y, z)
    (dx,), (dz,) = (torch.autograd.grad(one.sum(), x) for one in (y, z))
    assert torch.equal(dx, dz)


# Seeds


def test_a_seed_gives_one_sample_and_none_gives_another_at_each_call(device):
    graph = make_graph(60, 50, 2000, device=device)
    (x,) = tensors(device, (50, 4), grad=False)

    def call(**options):
        return sampled_aggregate(graph, x, 5, strategy="random", **options)

    first = call(seed=7)
    assert torch.equal(first, call(seed=7))
    assert torch.equal(first, call(seed=np.int64(7)))
    assert torch.equal(first, call(seed=7 + 2**64))  # modulo 2**64
    assert torch.equal(first, call(seed=torch.tensor([7], device=device)))
    assert torch.equal(first, call(seed=torch.tensor(7, device=device)))
    assert torch.equal(call(seed=-1), call(seed=2**64 - 1))
    assert not torch.equal(first, call(seed=8))
    assert not torch.equal(call(), call())
    torch.manual_seed(3)
    drawn = call(), call()
    torch.manual_seed(3)
    assert all(map(torch.equal, drawn, (call(), call())))
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    sampled_aggregate(graph, x, 5, strategy="fastrand", seed=7)
    sampled_aggregate(graph, x, 5)
    after = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(state, after)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backward_goes_over_the_sample_of_forward(device, strategy):
    """Linear in features and in edge values: with the result as gradient, both give its square."""
    graph = make_graph(60, 50, 2000, device=device)
    x, a = tensors(device, (50, 4), (graph.nnz,))
    for _ in range(3):
        y = sampled_aggregate(graph, x, 5, a, strategy=strategy, rescale=True)
        dx, da = torch.autograd.grad(y, (x, a), y.detach())
        torch.testing.assert_close((dx * x).sum(), y.square().sum())
        torch.testing.assert_close((da * a).sum(), y.square().sum())
        kept = torch.from_numpy(np.diff(graph.to("cpu").csr.indptr)).clamp(max=5).sum()
        assert da.count_nonzero() == kept


def test_rescaled_random_samples_have_the_whole_sum_as_their_mean(device):
    """Over 1 000 seeds, within 5 standard errors at 160 places."""
    graph = make_graph(20, 50, 600, device=device)
    (x,) = tensors(device, (50, 8), grad=False)
    found = torch.stack(
        [
            sampled_aggregate(graph, x, 5, strategy="random", seed=seed, rescale=True)
            for seed in range(1000)
        ]
    )
    error = found.std(0) / 1000**0.5
    excess = (found.mean(0) - spmm(graph, x)).abs() - 5 * error
    assert excess.max() <= 1e-12  # rows that are sampled whole


# Shapes and memory


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (4, 3)])
def test_empty_graphs_give_zeros(device, strategy, shape):
    graph = empty_graph(*shape, device=device)
    given = x, a, r, c = tensors(device, (shape[1], 4), (0,), (shape[0],), (shape[1],))
    y = sampled_aggregate(graph, x, 2, a, strategy=strategy, rescale=True, row_scale=r, col_scale=c)
    assert y.shape == (shape[0], 4)
    assert not y.any()
    assert not any(one.any() for one in torch.autograd.grad(y.sum(), given))
    y = sampled_aggregate(graph, x, 2, strategy=strategy, mean=True, row_scale=r.detach())
    assert not torch.autograd.grad(y.sum(), x)[0].any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_features_are_features_too(device, strategy):
    graph = make_graph(6, 5, 20, device=device)
    given = x, a, r, c = tensors(device, (5, 0), (graph.nnz,), (6,), (5,))
    y = sampled_aggregate(graph, x, 2, a, strategy=strategy, row_scale=r, col_scale=c)
    assert y.shape == (6, 0)
    assert not any(one.any() for one in torch.autograd.grad(y.sum(), given))


def test_rows_without_entries_stay_zero_whatever_their_scale(device):
    graph = make_graph(9, 6, 60, device=device)
    empty = torch.from_numpy(np.diff(graph.to("cpu").csr.indptr) == 0).to(device)
    assert empty.any()
    x, r = tensors(device, (6, 3), (9,))
    for options, trained in itertools.product(FACTORS, (False, True)):
        scale = r.detach().masked_fill(empty, torch.inf).requires_grad_(trained)
        y = sampled_aggregate(graph, x, 2, row_scale=scale, **options)
        assert not y[empty].any()
        found = torch.autograd.grad(y.sum(), [x, scale] if trained else [x])
        assert all(one.isfinite().all() for one in found)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strides_change_nothing(device, strategy):
    graph = make_graph(20, 12, 90, device=device)
    wide, a, grad = tensors(device, (24, 40), (2 * graph.nnz,), (20, 8), grad=False)
    options = {"strategy": strategy, "seed": 1, "mean": True}
    for view in (wide[::2, 5:13], wide[:12, ::5], wide[:8, :12].T, wide[:1, :8].expand(12, 8)):
        views = [one.detach().requires_grad_() for one in (view, a[::2])]
        same = [one.detach().clone().contiguous().requires_grad_() for one in views]
        y, z = (sampled_aggregate(graph, x, 3, w, **options) for x, w in (views, same))
        torch.testing.assert_close(y, z)  # other vector widths may sum in another order
        found = torch.autograd.grad(y, views, grad.T.contiguous().T)
        torch.testing.assert_close(found, torch.autograd.grad(z, same, grad))
    y = sampled_aggregate(graph, same[0], 3, same[1], **options)
    found = torch.autograd.grad(y.sum(), same, retain_graph=True)  # an expanded gradient
    assert all(map(torch.equal, found, torch.autograd.grad(y, same, torch.ones_like(y))))


def test_only_gradients_that_are_asked_for_hold_memory():
    graph = make_graph(9, 6, 60)
    x, a = tensors("cpu", (6, 4), (graph.nnz,))
    linear = sampled_aggregate(graph, x, 3, a.detach(), strategy="random")
    bilinear = sampled_aggregate(graph, x, 3, a, strategy="random")
    assert linear.grad_fn.saved_tensors[0] is None
    assert bilinear.grad_fn.saved_tensors[0] is not None
    assert [one.shape for one in bilinear.grad_fn.saved_tensors[4:]] == [(1,)]  # the seed
    torch.autograd.grad(bilinear.sum(), (x, a))
    assert graph._slots.torch[0]._columns is None  # nobody has read the transpose
    assert sampled_aggregate(graph, x.detach(), 3, a.detach()).grad_fn is None
    with torch.no_grad():
        assert sampled_aggregate(graph, x, 3, a).grad_fn is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_repeat_bit_by_bit_in_deterministic_mode(device, strategy, deterministic):
    graph = make_graph(60, 30, 2000, device=device)
    given = tensors(device, (30, 33), (graph.nnz,), (60,), (30,), dtype=torch.float32)

    def once():
        x, a, r, c = given
        y = sampled_aggregate(
            *(graph, x, 9, a), strategy=strategy, seed=2, row_scale=r, col_scale=c
        )
        return [y, *torch.autograd.grad(y.square().sum(), given)]

    first = once()
    for _ in range(3):
        assert all(map(torch.equal, first, once()))


def test_half_scales_round_once_whether_they_have_gradients_or_not(device):
    """Products with ``c`` leave the range of float16, those with ``r`` come back."""
    graph = make_graph(9, 6, 60, device=device)
    x = torch.full((6, 4), 600.0, dtype=torch.half, device=device, requires_grad=True)
    r, c = torch.full((9,), 1e-3, dtype=torch.half), torch.full((6,), 500.0, dtype=torch.half)
    results = []
    for trained in (False, True):
        scales = [one.to(device).requires_grad_(trained) for one in (r, c)]
        y = sampled_aggregate(graph, x, 3, mean=True, row_scale=scales[0], col_scale=scales[1])
        results.append([y, *torch.autograd.grad(y.sum(), x)])
        assert all(one.isfinite().all() for one in results[-1])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=0)


def test_fastrand_repeats_no_entry_of_rows_that_its_primes_divide(device):
    for length in (577, 577 * 2, 587, 577 * 587):
        indices = np.arange(length, dtype=np.int32)
        graph = Graph(CSR(np.array([0, length], np.int32), indices, shape=(1, length))).to(device)
        x = torch.ones(length, 1, device=device, requires_grad=True)
        (found,) = torch.autograd.grad(
            sampled_aggregate(graph, x, 100, strategy="fastrand").sum(), x
        )
        assert found.sum() == 100
        assert found.max() == 1


def test_what_nobody_sampled_has_no_part_in_the_gradient_of_a_scale(device):
    """Be it infinite: column 2 is beyond the first two entries of the only row."""
    graph = Graph(CSR(np.array([0, 3]), np.arange(3), shape=(1, 3)).to(device))
    x = torch.tensor([[1.0], [2.0], [torch.inf]], device=device, requires_grad=True)
    c = torch.ones(3, device=device, requires_grad=True)
    sampled_aggregate(graph, x, 2, col_scale=c).sum().backward()
    assert c.grad.tolist() == [1, 2, 0]
    assert x.grad.tolist() == [[1], [1], [0]]
