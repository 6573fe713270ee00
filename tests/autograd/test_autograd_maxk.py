"""MaxK and its aggregation in ``sparsefmt.autograd``, against the dense features that it keeps."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import DTYPES, make_graph, tensors  # noqa: E402

from sparsefmt import DtypeError, ShapeError  # noqa: E402
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


def test_only_what_gradients_read_is_saved():
    graph = make_graph(9, 6, 40)
    x, a = tensors("cpu", (6, 300), (graph.nnz,))
    kept, *_, columns = maxk_aggregate(graph, x, 7).grad_fn.saved_tensors
    assert kept is None
    assert (columns.dtype, columns.shape) == (torch.uint16, (6, 7))
    assert maxk_aggregate(graph, x, 7, a).grad_fn.saved_tensors[0].shape == (6, 7)
    assert maxk_aggregate(graph, x[:, :256], 7).grad_fn.saved_tensors[-1].dtype is torch.uint8
    assert maxk_aggregate(graph, x.detach(), 7).grad_fn is None


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
