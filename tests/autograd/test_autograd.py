"""Products and gradients of ``sparsefmt.autograd`` against gathering and scattering."""

import gc
import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import (  # noqa: E402
    DTYPES,
    empty_graph,
    make_graph,
    naive_sddmm,
    naive_softmax,
    naive_spmm,
    tensors,
)
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

from sparsefmt import COO, CSR, Graph  # noqa: E402
from sparsefmt.autograd import edge_softmax, prepare, sddmm, spmm  # noqa: E402
from sparsefmt.autograd.engine.memory import TorchMemory  # noqa: E402
from sparsefmt.autograd.tensors.order import own_values  # noqa: E402

LINEAR, REDUCTIONS = ("sum", "mean"), ("sum", "mean", "max", "min")


pytestmark = pytest.mark.usefixtures("one_thread")


def assert_near(found, exact, size, *, terms):
    """``|found - exact| <= terms * eps * size``, where ``size`` sums the absolute products."""
    eps = torch.finfo(found.dtype).eps
    accumulated = max(eps, torch.finfo(torch.float32).eps * terms)
    bound = (4 * eps + (accumulated if found.dtype.itemsize == 2 else terms * eps)) * size
    excess = (found.detach().cpu().double() - exact).abs() - bound
    assert excess.numel() == 0 or excess.max() <= 4 * torch.finfo(found.dtype).tiny


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_spmm_and_its_gradients_are_those_of_gathering(device, reduce, dtype):
    for index_dtype, feat, scaled in itertools.product(
        (np.int32, np.int64), (1, 7, 33, 64), (False, True)
    ):
        graph = make_graph(40, 30, 300, device=device, index_dtype=index_dtype)
        shapes = [(30, feat), (graph.nnz,), (40,), (30,), (40, feat)]
        *given, grad = tensors(device, *shapes, dtype=dtype)
        given = given if scaled else given[:2]
        x, a, r, c = [*given, None, None][:4]
        spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c).backward(grad.detach())
        y = spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)
        exact = [one.detach().cpu().double().requires_grad_() for one in given]
        x, a, r, c = [*exact, None, None][:4]
        expected = naive_spmm(graph, x, a, r, c, reduce)
        found = torch.autograd.grad(expected, exact, grad.detach().cpu().double())
        size = [one.detach().abs().requires_grad_() for one in exact]
        x, a, r, c = [*size, None, None][:4]
        largest = naive_spmm(graph, x, a, r, c)
        sizes = torch.autograd.grad(largest, size, grad.detach().cpu().double().abs())
        # Of half-precision candidates that round to the same, another one may win than in float64.
        if reduce in LINEAR or dtype.itemsize > 2:
            for one, mine, bound in zip(given, found, sizes, strict=True):
                # Half gradients of scales pass through one rounded product for each entry.
                assert_near(one.grad, mine, 4 * bound, terms=graph.nnz + feat)
        assert y.dtype is dtype
        assert_near(y, expected.detach(), 2 * largest.detach(), terms=graph.nnz)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradients_of_spmm_agree_with_finite_differences(device, reduce):
    graph = make_graph(6, 4, 14, device=device)
    x, a, r, c = tensors(device, (4, 2), (graph.nnz,), (6,), (4,))

    def scaled(x, a, r, c):
        return spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)

    def weighted(x, a):
        return spmm(graph, x, a, reduce=reduce)

    def plain(x):
        return spmm(graph, x, reduce=reduce)

    for function, inputs in ((scaled, (x, a, r, c)), (weighted, (x, a)), (plain, (x,))):
        assert gradcheck(function, inputs, nondet_tol=0)
        if reduce in LINEAR:
            assert gradgradcheck(function, inputs, nondet_tol=0)
    for at in range(4):  # each gradient by itself
        some = [one.detach().requires_grad_(i == at) for i, one in enumerate((x, a, r, c))]
        assert gradcheck(scaled, some, nondet_tol=0)


@pytest.mark.parametrize("heads", [None, 1, 3])
def test_gradients_of_sddmm_and_softmax_agree_with_finite_differences(device, heads):
    graph = make_graph(7, 5, 20, device=device)
    middle = () if heads is None else (heads,)
    x, y, s = tensors(device, (7, *middle, 2), (5, *middle, 2), (graph.nnz, *middle))
    for function, inputs in (
        (lambda x, y: sddmm(graph, x, y), (x, y)),
        (lambda s: edge_softmax(graph, s), (s,)),
    ):
        assert gradcheck(function, inputs, nondet_tol=0)
        assert gradgradcheck(function, inputs, nondet_tol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [None, 1, 4, 5])
def test_sddmm_and_softmax_are_those_of_gathering(device, heads, dtype):
    graph = make_graph(40, 30, 300, device=device)
    middle = () if heads is None else (heads,)
    for feat in (1, 16, 33):
        shapes = (40, *middle, feat), (30, *middle, feat)
        x, y = tensors(device, *shapes, dtype=dtype, grad=False)
        wide = [one.cpu().double() for one in (x, y)]
        size = naive_sddmm(graph, *(one.abs() for one in wide))
        assert_near(sddmm(graph, x, y), naive_sddmm(graph, *wide), size, terms=feat)
    (s,) = tensors(device, (graph.nnz, *middle), dtype=dtype, grad=False)
    exact = naive_softmax(graph, s.cpu().double())
    assert_near(edge_softmax(graph, s), exact, 4 * exact, terms=graph.nnz)


def test_softmax_of_large_scores_is_right(device):
    graph = make_graph(40, 30, 300, device=device)
    (s,) = tensors(device, (graph.nnz, 2), dtype=torch.float32, grad=False)
    p = edge_softmax(graph, 1e4 * s.sign())
    torch.testing.assert_close(p.cpu(), naive_softmax(graph, 1e4 * s.sign().cpu()))


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (4, 3)])
def test_empty_graphs_give_zeros(device, reduce, shape):
    graph = empty_graph(*shape, device=device)
    x, a, r, c = tensors(device, (shape[1], 4), (0,), (shape[0],), (shape[1],))
    y = spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)
    y.backward(torch.ones_like(y))
    assert y.shape == (shape[0], 4)
    assert not y.any()
    assert not any(one.grad.any() for one in (x, a, r, c))
    left, right = tensors(device, (shape[0], 4), (shape[1], 4))
    s = edge_softmax(graph, sddmm(graph, left, right))
    s.sum().backward()
    assert s.shape == (0,)
    assert not left.grad.any()


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_no_features_are_features_too(device, reduce):
    graph = make_graph(6, 5, 20, device=device)
    x, a, r, c = tensors(device, (5, 0), (graph.nnz,), (6,), (5,))
    y = spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)
    y.sum().backward()
    assert y.shape == (6, 0)
    assert not any(one.grad.any() for one in (x, a, r, c))
    assert not sddmm(graph, torch.ones_like(y).detach(), x).any()
    heads = tensors(device, (6, 0, 4), (5, 0, 4))
    sddmm(graph, *heads).sum().backward()
    assert edge_softmax(graph, sddmm(graph, *heads)).shape == (graph.nnz, 0)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_strides_change_nothing(device, reduce):
    graph = make_graph(20, 12, 90, device=device)
    wide, a, grad = tensors(device, (24, 40), (2 * graph.nnz,), (20, 8), grad=False)
    views = [wide[::2, 5:13], wide[:12, ::5], wide[:8, :12].T, wide[:1, :8].expand(12, 8)]
    for view in views:
        some, all_of_it = view.detach().requires_grad_(), view.clone().contiguous()
        copies = all_of_it.requires_grad_()
        weights = a[::2].detach().requires_grad_()
        contiguous = a[::2].contiguous().requires_grad_()
        y = spmm(graph, some, weights, reduce=reduce)
        z = spmm(graph, copies, contiguous, reduce=reduce)
        torch.testing.assert_close(y, z)  # other vector widths may sum in another order
        y.backward(grad.T.contiguous().T)
        z.backward(grad)
        torch.testing.assert_close(some.grad, copies.grad)
        torch.testing.assert_close(weights.grad, contiguous.grad)


def test_rows_are_copied_only_where_their_values_lie_apart():
    wide = torch.arange(48.0).view(6, 8)
    of_heads = wide.view(2, 3, 8)
    stay = [wide[:, 2:6], wide[::2], wide[:, 3:4], wide[:1].expand(6, 8), wide[:0], of_heads[:, :2]]
    move = [wide.T, wide[:, ::2], wide[:1, ::2], of_heads[..., :4], of_heads.transpose(1, 2)]
    for rows in (wide, of_heads, *stay):
        assert TorchMemory().rows_in_place(rows) is rows
    for rows in move:
        found = TorchMemory().rows_in_place(rows)
        assert found.is_contiguous()
        assert torch.equal(found, rows)


def test_an_expanded_gradient_is_taken(device):
    graph = make_graph(20, 12, 90, device=device)
    x, z = tensors(device, (12, 8), (12, 8))
    spmm(graph, x).sum().backward()
    naive = naive_spmm(graph, (w := z.detach().cpu().requires_grad_()))
    naive.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), w.grad)


def test_heads_may_be_slices_of_wider_rows(device):
    graph = make_graph(20, 12, 90, device=device)
    x, y = tensors(device, (20, 6, 8), (12, 6, 8), grad=False)
    found = sddmm(graph, x[:, 1:3], y[:, 2:4])
    exact = naive_sddmm(graph, x[:, 1:3].cpu(), y[:, 2:4].cpu())
    torch.testing.assert_close(found.cpu(), exact)


def test_a_zero_row_scale_has_a_gradient_under_max(device):
    graph = make_graph(7, 5, 20, device=device)
    x, r = tensors(device, (5, 3), (7,))
    zero = torch.zeros_like(r).requires_grad_()
    spmm(graph, x, reduce="max", row_scale=zero).sum().backward()
    expected = spmm(graph, x.detach(), reduce="max").sum(1)
    torch.testing.assert_close(zero.grad, expected)


def test_the_graphs_own_values_are_constants(device):
    graph = make_graph(7, 5, 20, weighted=True, device=device)
    (x,) = tensors(device, (5, 3))
    y = spmm(graph, x)
    data = own_values(graph)
    assert torch.equal(y, spmm(graph, x, data))
    assert [kind for kind, _ in y.grad_fn.next_functions if kind is not None] != []
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, torch.autograd.grad(spmm(graph, x, data).sum(), x)[0])


def test_the_transposed_graph_is_the_adjoint(device):
    graph = make_graph(9, 6, 40, device=device)
    x, y, a = tensors(device, (6, 4), (9, 4), (graph.nnz,))
    left = (spmm(graph, x, a) * y).sum()
    right = (spmm(graph.transposed, y, a) * x).sum()
    torch.testing.assert_close(left, right)
    first = torch.autograd.grad(left, (x, y, a))
    for mine, theirs in zip(first, torch.autograd.grad(right, (x, y, a)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_backward_works_after_the_graph_is_dropped(device):
    graph = make_graph(9, 6, 40, device=device)
    (x,) = tensors(device, (6, 4))
    y = spmm(graph, x)
    del graph
    gc.collect()
    y.sum().backward()
    assert x.grad.any()


def test_tensors_share_the_graphs_memory_and_die_with_it():
    graph = make_graph(9, 6, 40)
    (x,) = tensors("cpu", (6, 4))
    spmm(graph, x)
    kept = graph._slots.torch[0]
    assert kept.rows.indptr.data_ptr() == graph.csr.indptr.ctypes.data
    assert kept._columns is None  # nobody has asked for a gradient
    prepare(graph)
    assert kept.columns.perm.data_ptr() == graph.csc_perm.ctypes.data
    assert graph._slots.torch[0] is kept


def test_only_gradients_that_are_asked_for_hold_memory():
    graph = make_graph(9, 6, 40)
    x, a = tensors("cpu", (6, 4), (graph.nnz,))
    linear, bilinear = spmm(graph, x, a.detach()), spmm(graph, x, a)
    assert linear.grad_fn.saved_tensors[0] is None
    assert bilinear.grad_fn.saved_tensors[0] is not None
    assert spmm(graph, x.detach(), a.detach()).grad_fn is None
    with torch.no_grad():
        assert spmm(graph, x, a).grad_fn is None


def test_a_graph_first_used_in_inference_mode_can_train(device):
    graph = make_graph(9, 6, 40, weighted=True, device=device)
    (x,) = tensors(device, (6, 4))
    with torch.inference_mode():
        spmm(graph, x)
    spmm(graph, x, reduce="mean").sum().backward()
    assert x.grad.any()


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_results_repeat_bit_by_bit_in_deterministic_mode(device, reduce):
    graph = make_graph(60, 30, 2000, device=device)
    x, a, r, c = tensors(device, (30, 33), (graph.nnz,), (60,), (30,), dtype=torch.float32)

    def once():
        y = spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)
        p = edge_softmax(graph, sddmm(graph, y, x))
        return [y, p, *torch.autograd.grad(p.square().sum(), (x, a, r, c))]

    torch.use_deterministic_algorithms(True)
    try:
        first = once()
        for _ in range(3):
            assert all(map(torch.equal, first, once()))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_autocast_narrows_products_and_widens_softmax(device, reduce):
    graph = make_graph(9, 6, 40, device=device)
    x, a, r, c = tensors(device, (6, 4), (graph.nnz,), (9,), (6,), dtype=torch.float32)
    narrow = torch.bfloat16
    with torch.autocast(device, dtype=narrow):
        y = spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)
        s = sddmm(graph, y, x)
        p = edge_softmax(graph, s)
        double = spmm(graph, x.double())
    assert (y.dtype, s.dtype, p.dtype) == (narrow, narrow, torch.float32)
    assert double.dtype is torch.float64
    p.square().sum().backward()
    assert all(one.grad.dtype is torch.float32 for one in (x, a, r, c))
    cast = [one.detach().to(narrow).requires_grad_() for one in (x, a, r, c)]
    options = {"reduce": reduce, "row_scale": cast[2], "col_scale": cast[3]}
    assert torch.equal(y, spmm(graph, *cast[:2], **options))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_half_gradients_are_rounded_once(reduce):
    """A row of 80 000 entries: 1 / degree is subnormal in float16, and products overflow."""
    k = 80_000
    graph = Graph(CSR([0, k, k], np.arange(k), shape=(2, k)))
    r = torch.tensor([1e-3, 1.0], dtype=torch.half)
    x = torch.full((k, 64), 60.0, dtype=torch.half, requires_grad=True)
    w = torch.ones(k, dtype=torch.half, requires_grad=True)
    grad = torch.full((2, 64), 32.0, dtype=torch.half)
    y = spmm(graph, x, w, reduce=reduce, row_scale=r)
    dx, dw = torch.autograd.grad(y, (x, w), grad)
    factor = float(r[0]) / (k if reduce == "mean" else 1)
    # One rounding to float16, whose step is 6e-8 where it is subnormal.
    assert float(dx[0, 0]) == pytest.approx(32 * factor, rel=1e-3, abs=3e-8)
    assert float(dw[0]) == pytest.approx(64 * 60 * 32 * factor, rel=1e-3)


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gradient_that_is_asked_for_does_not_change_an_extremum(device, reduce, dtype):
    graph = make_graph(60, 30, 2000, device=device)
    x, a, r, c = tensors(device, (30, 17), (graph.nnz,), (60,), (30,), dtype=dtype)
    plain = [one.detach() for one in (x, a, r, c)]
    want = spmm(graph, *plain[:2], reduce=reduce, row_scale=plain[2], col_scale=plain[3])
    found = spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)
    assert torch.equal(found, want)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_what_wins_nothing_leaves_no_nan_in_the_gradients(device, reduce):
    """Vertex 3 has no edge; an infinite one, or one of an infinite factor, loses."""
    graph = Graph(COO([0, 0, 1], [0, 1, 2], shape=(3, 4))).to(device)
    lost = -float("inf") if reduce == "max" else float("inf")
    inputs = (
        ([[1.0], [lost], [3.0], [float("nan")]], [1.0, 1, 1], [2.0, 2, lost], [1.0, 1, 1, 1]),
        ([[1.0], [1.0], [3.0], [1.0]], [1.0, lost, 1], [2.0, 2, lost], [1.0, 1, 1, lost]),
        ([[1.0], [1.0], [3.0], [1.0]], [1.0, 1, 1], [2.0, 2, lost], [1.0, lost, 1, lost]),
    )
    for given in inputs:
        x, a, r, c = (torch.tensor(one, device=device, requires_grad=True) for one in given)
        y = spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)
        dx, da, dr, dc = torch.autograd.grad(y.sum(), (x, a, r, c))
        assert dx.flatten().tolist() == [2.0, 0.0, 2.0, 0.0]
        assert da.tolist() == [2.0, 0.0, 6.0]
        assert dr.tolist() == [1.0, 3.0, 0.0]
        assert dc.tolist() == [2.0, 0.0, 6.0, 0.0]


def test_an_empty_row_is_zero_whatever_its_factor_also_with_gradient():
    graph = Graph(CSR([0, 2, 2], [0, 1], shape=(2, 2)))
    r = torch.tensor([2.0, float("inf")], requires_grad=True)
    assert spmm(graph, torch.eye(2), reduce="max", row_scale=r).tolist() == [[2.0, 2.0], [0.0, 0.0]]


def test_values_of_edges_follow_the_users_order():
    A = COO([1, 0, 1], [0, 1, 1], shape=(2, 2))
    w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    y = spmm(Graph(A), torch.eye(2), w)
    assert y.tolist() == [[0.0, 2.0], [1.0, 3.0]]
    y.sum().backward()
    assert w.grad.tolist() == [1.0, 1.0, 1.0]
