"""Aggregation of a sample of each row, against gathering and scattering the same entries."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import (  # noqa: E402
    entries,
    make_graph,
    tensors,
)

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
