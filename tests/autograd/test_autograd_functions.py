"""Kept features, messages and samples where ``tests/laws`` do not go; what is saved, and drawn."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_cases import KINDS, call, shapes_of  # noqa: E402
from autograd_cases import DTYPES, make_graph, tensors  # noqa: E402
from laws.calls import assert_same, messages, product_of_largest  # noqa: E402

from sparsefmt import COO, CSR, DtypeError, Graph, ShapeError  # noqa: E402
from sparsefmt.autograd import (  # noqa: E402
    dot_aggregate,
    gat_aggregate,
    maxk,
    maxk_aggregate,
    message_aggregate,
    prepare,
    sampled_aggregate,
    spmm,
)
from sparsefmt.reorder import Order, degree_order  # noqa: E402

STRATEGIES = ("bucket", "fastrand", "random")
REDUCTIONS = ("sum", "mean")
NAN, INF = torch.nan, torch.inf

pytestmark = pytest.mark.usefixtures("one_thread")


# Kept features


def mask(x, k):
    """Mark the ``k`` largest of each row, NaN first, of equal ones the first: by sorting."""
    order = x.detach().cpu().double().sort(dim=1, descending=True, stable=True).indices
    return torch.zeros(x.shape).scatter_(1, order[:, :k], 1).bool().to(x.device)


@pytest.mark.covering("dtype", "feat", one_in=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("feat", "k"),  # columns of one, two and four bytes; one of many, half, all
    [(1, 1), (7, 3), (16, 16), (256, 32), (300, 40), (70_000, 3)],
)
def test_maxk_keeps_the_largest_and_lets_their_gradient_pass(device, feat, k, dtype):
    x, grad = tensors(device, (9, feat), (9, feat), dtype=dtype)
    y = maxk(x, k)
    y.backward(grad.detach())
    assert torch.equal(y, torch.where(mask(x, k), x, 0))
    assert torch.equal(x.grad, torch.where(mask(x, k), grad, 0))


def test_ties_and_nan_are_chosen_as_by_a_stable_sort(device):
    rows = [[0.0, -0.0, 0.0, -1.0], [NAN, 1.0, NAN, INF], [-INF, -INF, -INF, -INF], [2.0, 3, 3, 3]]
    x = torch.tensor(rows, device=device, requires_grad=True)
    for k in range(1, 5):
        y = maxk(x, k)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(dx.bool(), mask(x, k))
        assert torch.equal(y.nan_to_num(), torch.where(mask(x, k), x, 0).nan_to_num())


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_autocast_narrows_before_the_choice(device, reduce):
    graph = make_graph(9, 6, 40, device=device)
    args = tensors(device, (6, 8), (graph.nnz,), (9,), (6,), dtype=torch.float32)

    def aggregate(x, a, r, c):
        return maxk_aggregate(graph, x, 3, a, reduce=reduce, row_scale=r, col_scale=c)

    with torch.autocast(device, dtype=torch.bfloat16):
        y = aggregate(*args)
        assert maxk(args[0], 3).dtype is torch.float32
    assert torch.equal(y, aggregate(*(one.detach().bfloat16() for one in args)))


def test_a_prepared_order_changes_rounding_alone(device):
    graph = make_graph(60, 30, 2000, device=device)
    x, a = tensors(device, (30, 33), (graph.nnz,))
    before = torch.autograd.grad(maxk_aggregate(graph, x, 9, a).square().sum(), (x, a))
    prepare(graph, order=degree_order(graph.csr, descending=False))
    after = torch.autograd.grad(maxk_aggregate(graph, x, 9, a).square().sum(), (x, a))
    assert_same(after, before)


def test_an_order_is_checked():
    graph = make_graph(6, 5, 20)
    with pytest.raises(DtypeError, match="order is a Tensor: give"):
        prepare(graph, order=torch.arange(6))
    with pytest.raises(ShapeError, match="order is of 5 vertices but there are 6 rows"):
        prepare(graph, order=Order(np.arange(5)))


# Messages


#: A function, and its oracle on the CPU, of a graph, features of columns and values of entries.
THRICE = {
    "maxk": (
        lambda g, x, w: maxk_aggregate(g, x, 2, w[:, 0]),
        lambda g, x, w: product_of_largest(g, x, k=2, edge_weight=w[:, 0]),
    ),
    **{
        message: (
            lambda g, x, w, message=message: message_aggregate(g, x, w, message=message),
            lambda g, x, w, message=message: messages(g, w, x, message=message, reduce="sum"),
        )
        for message in ("mul", "add", "relu_add")
    },
}


@pytest.mark.parametrize("name", THRICE)
def test_third_derivatives_are_those_of_the_oracle(device, name):
    graph, steps = make_graph(6, 4, 14), []
    args = tensors("cpu", (4, 5), (graph.nnz, 5), grad=False)
    for function, place in zip(THRICE[name], (device, "cpu"), strict=True):
        leaves = [one.to(place).requires_grad_() for one in args]
        y = function(graph.to(place), *leaves).pow(4).sum()
        for _ in range(2):
            y = sum(g.pow(2).sum() for g in torch.autograd.grad(y, leaves, create_graph=True))
        steps.append([one.cpu() for one in torch.autograd.grad(y, leaves)])
    # A chain of some 1e3 sums, which cancel in messages.
    assert_same(*steps, rtol=1e-9, atol=0 if name == "maxk" else 1e-9)


def test_nan_and_infinity_go_through_a_relu_as_in_torch(device):
    graph = Graph(COO([0, 0, 1, 1], [0, 1, 2, 3], shape=(3, 4)))
    args, steps = (
        (torch.tensor([[NAN], [1.0], [-INF], [2.0]]), torch.tensor([[1.0], [-1], [1], [-3]])),
        [],
    )
    for place in (device, "cpu"):
        x, w = leaves = [one.to(place).requires_grad_() for one in args]
        y = (
            messages(graph, w, x, message="relu_add", reduce="sum")
            if steps
            else message_aggregate(graph.to(place), x, w, message="relu_add")
        )
        steps.append([one.cpu() for one in (y, *torch.autograd.grad(y.sum(), leaves))])
    assert_same(*steps, equal_nan=True)


def test_gates_that_are_shut_let_no_infinite_gradient_through():
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    x = torch.full((2, 3), -5.0, requires_grad=True)
    y = message_aggregate(graph, x, torch.zeros(2, 3), message="relu_add")
    for again in (True, False):
        (dx,) = torch.autograd.grad(
            y, x, torch.full_like(y, INF), create_graph=again, retain_graph=True
        )
        assert (dx == 0).all()


# Rounding


#: Of x, w and the factors of rows; those, and which of the four features count.
ROUNDED = {
    "spmm": lambda g, x, w, r, reduce: spmm(g, x, w[:, 0], reduce=reduce, row_scale=r),
    "maxk": lambda g, x, w, r, reduce: maxk_aggregate(g, x, 2, w[:, 0], reduce=reduce, row_scale=r),
    "messages": lambda g, x, w, r, reduce: message_aggregate(g, x, w, reduce=reduce),
}


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", ROUNDED)
def test_half_gradients_are_rounded_once(name, reduce):
    """A row of 80 000 entries: 1 / degree is subnormal in float16, and products overflow."""
    n = 80_000
    graph = Graph(CSR([0, n, n], np.arange(n), shape=(2, n)))
    r = torch.tensor([1e-3, 1.0], dtype=torch.half)
    x = torch.full((n, 4), 60.0, dtype=torch.half, requires_grad=True)
    w = torch.ones(n, 4, dtype=torch.half, requires_grad=True)
    y = ROUNDED[name](graph, x, w, r, reduce)
    dx, dw = torch.autograd.grad(y, (x, w), torch.full((2, 4), 32.0, dtype=torch.half))
    factor = 32 / (n if reduce == "mean" else 1) * (1 if name == "messages" else float(r[0]))
    kept = 2 if name == "maxk" else 4
    # One rounding to float16, whose step is 6e-8 where it is subnormal.
    exact = {"rel": 1e-3, "abs": 3e-8}
    assert dx[0].tolist() == pytest.approx([factor] * kept + [0] * (4 - kept), **exact)
    terms = 1 if name == "messages" else kept
    assert float(dw[0, 0]) == pytest.approx(terms * 60 * factor, **exact)


def test_half_scales_round_once_whether_they_have_gradients_or_not(device):
    """Products with ``c`` leave the range of float16, those with ``r`` come back."""
    graph = make_graph(9, 6, 60, device=device)
    x = torch.full((6, 4), 600.0, dtype=torch.half, device=device, requires_grad=True)
    r, c = torch.full((9,), 1e-3, dtype=torch.half), torch.full((6,), 500.0, dtype=torch.half)
    steps = []
    for trained in (False, True):
        r, c = (one.detach().to(device).requires_grad_(trained) for one in (r, c))
        y = sampled_aggregate(graph, x, 3, mean=True, row_scale=r, col_scale=c)
        steps.append([y, *torch.autograd.grad(y.sum(), x)])
        assert all(one.isfinite().all() for one in steps[-1])
    assert_same(*steps, rtol=1e-3, atol=0)


# Samples


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a_sample_of_everything_is_spmm(device, strategy, reduce):
    graph = make_graph(40, 30, 300, weighted=True, device=device)
    x, a, r, c, grad = tensors(device, (30, 17), (graph.nnz,), (40,), (30,), (40, 17))
    longest = int(np.diff(graph.to("cpu").csr.indptr).max())
    for weight, scales in itertools.product((None, a), ({}, {"row_scale": r, "col_scale": c})):
        wanted = [one for one in (x, weight, *scales.values()) if one is not None]
        z = spmm(graph, x, weight, reduce=reduce, **scales)
        expected = z, *torch.autograd.grad(z, wanted, grad)
        for width in (longest, 2**31, 10**30):
            mean = {"mean": True} if reduce == "mean" else {"rescale": width > longest}
            y = sampled_aggregate(graph, x, width, weight, strategy=strategy, **mean, **scales)
            assert_same((y, *torch.autograd.grad(y, wanted, grad)), expected)


def test_rows_without_entries_stay_zero_whatever_their_scale(device):
    graph = make_graph(9, 6, 60, device=device)
    empty = torch.from_numpy(np.diff(graph.to("cpu").csr.indptr) == 0).to(device)
    x, r = tensors(device, (6, 3), (9,))
    for option, trained in itertools.product((None, "mean", "rescale"), (False, True)):
        scale = r.detach().masked_fill(empty, INF).requires_grad_(trained)
        y = sampled_aggregate(graph, x, 2, row_scale=scale, **({option: True} if option else {}))
        assert empty.any()
        assert not y[empty].any()
        grads = torch.autograd.grad(y.sum(), [x, scale] if trained else [x])
        assert all(one.isfinite().all() for one in grads)


def test_what_nobody_sampled_has_no_part_in_the_gradient_of_a_scale(device):
    """Be it infinite: column 2 is beyond the first two entries of the only row."""
    graph = Graph(CSR(np.array([0, 3]), np.arange(3), shape=(1, 3)).to(device))
    x = torch.tensor([[1.0], [2.0], [INF]], device=device, requires_grad=True)
    c = torch.ones(3, device=device, requires_grad=True)
    sampled_aggregate(graph, x, 2, col_scale=c).sum().backward()
    assert c.grad.tolist() == [1, 2, 0]
    assert x.grad.tolist() == [[1], [1], [0]]


# What is drawn


def drawing(name, graph, args, **options):
    """Call what draws: attention with dropout, or a random sample."""
    if name == "sample":
        return sampled_aggregate(graph, *args, strategy="random", **options)
    return call(name, graph, args, dropout=0.5, **options)


def drawn_case(name, device, *, grad=True):
    graph = make_graph(40, 30, 900, device=device)
    if name == "sample":
        return graph, [*tensors(device, (30, 4), grad=grad), 5]
    return graph, tensors(device, *shapes_of(name, graph, (2,), 4), grad=grad)


every_drawing = pytest.mark.parametrize("name", [*KINDS, "sample"])


@every_drawing
def test_a_seed_gives_one_result_and_torch_draws_another_at_each_call(device, name):
    graph, args = drawn_case(name, device, grad=False)

    def drawn(**options):
        return drawing(name, graph, args, **options)

    first = drawn(seed=7)
    for seed in (
        7,
        np.int64(7),
        7 + 2**64,
        torch.tensor([7]).to(device),
        torch.tensor(7).to(device),
    ):
        assert torch.equal(first, drawn(seed=seed))
    assert torch.equal(drawn(seed=-1), drawn(seed=2**64 - 1))
    assert not torch.equal(first, drawn(seed=8))
    torch.manual_seed(5)
    both = drawn(), drawn()
    assert not torch.equal(*both)
    torch.manual_seed(5)
    assert all(map(torch.equal, both, (drawn(), drawn())))
    if name != "sample":
        torch.manual_seed(5)
        seed = torch.randint(2**63 - 1, (1,), device=device)
        assert torch.equal(both[0], drawn(seed=seed))


def test_nothing_is_drawn_where_nothing_is_dropped_or_a_seed_is_given(device):
    graph = make_graph(9, 6, 40, device=device)
    h, el, er = tensors(device, (6, 4), (6,), (9,))
    generator = torch.cuda.default_generators[0] if device == "cuda" else torch.default_generator
    before = generator.get_state()
    y = gat_aggregate(graph, h, el, er, dropout=0.0)
    sampled_aggregate(graph, h, 5, strategy="fastrand", seed=7)
    sampled_aggregate(graph, h, 5)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(y, gat_aggregate(graph, h, el, er, seed=3))


@every_drawing
def test_a_seed_may_be_written_to_before_backward(device, name):
    seed, results = torch.tensor([5], device=device), []
    for change in (0, 3):
        graph, args = drawn_case(name, device)
        y = drawing(name, graph, args, seed=seed)
        seed += change
        results.append(torch.autograd.grad(y.sin().sum(), args[0])[0])
    assert torch.equal(*results)


#: Functions that are linear in features, and in edge values, and draw for themselves.
LINEAR = {
    "gat": lambda g, x, a, r: gat_aggregate(g, x, x.detach()[:, 0], r, dropout=0.5),
    "dot": lambda g, x, a, r: dot_aggregate(
        g, r[:, None] * x.detach()[:1], x.detach(), x, dropout=0.5
    ),
    **{
        strategy: lambda g, x, a, r, strategy=strategy: sampled_aggregate(
            g, x, 5, a, strategy=strategy, rescale=True
        )
        for strategy in STRATEGIES
    },
}


@pytest.mark.parametrize("name", LINEAR)
def test_backward_goes_over_what_forward_has_drawn(device, name):
    """With the result as its gradient, each argument's product with its own is the square."""
    graph = make_graph(60, 50, 2000, device=device)
    x, a, r = tensors(device, (50, 4), (graph.nnz,), (60,))
    wanted = (x, a) if name in STRATEGIES else (x,)
    for _ in range(3):
        y = LINEAR[name](graph, x, a, r.detach())
        grads = torch.autograd.grad(y, wanted, y.detach())
        for one, grad in zip(wanted, grads, strict=True):
            torch.testing.assert_close((grad * one).sum(), y.square().sum())
    if name in STRATEGIES:
        lengths = torch.from_numpy(np.diff(graph.to("cpu").csr.indptr))
        assert grads[1].count_nonzero() == lengths.clamp(max=5).sum()


# What is saved for the backward pass


SAVED = {
    "spmm": lambda g, x, a: spmm(g, x, a[:, 0]),
    "sampled": lambda g, x, a: sampled_aggregate(g, x, 3, a[:, 0], strategy="random"),
    "maxk": lambda g, x, a: maxk_aggregate(g, x, 7, a[:, 0]),
}


@pytest.mark.parametrize("name", SAVED)
def test_features_are_saved_for_gradients_of_edge_values_alone(name):
    graph, function = make_graph(9, 6, 40), SAVED[name]
    x, a = tensors("cpu", (6, 300), (graph.nnz, 1))
    linear, bilinear = (function(graph, x, one).grad_fn.saved_tensors for one in (a.detach(), a))
    assert linear[0] is None
    assert bilinear[0].shape == ((6, 7) if name == "maxk" else x.shape)
    if name == "maxk":
        assert (linear[-1].dtype, linear[-1].shape) == (torch.uint16, (6, 7))
        narrow = function(graph, x[:, :256], a).grad_fn.saved_tensors
        assert narrow[-1].dtype is torch.uint8
    if name == "sampled":
        assert [one.shape for one in bilinear[4:]] == [(1,)]  # the seed
        torch.autograd.grad(function(graph, x, a).sum(), (x, a))
        assert graph._slots.torch[0]._columns is None  # nobody has read the transpose


def test_only_what_gradients_of_messages_read_is_saved():
    graph = make_graph(9, 6, 40)
    x, w = tensors("cpu", (6, 4), (graph.nnz, 4))
    for message, kept in (("mul", True), ("add", False), ("relu_add", True), ("copy_edge", False)):
        y = message_aggregate(graph, x, w, message=message)
        assert all((one is not None) == kept for one in y.grad_fn.saved_tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_saves_no_tensor_of_the_size_of_the_entries(kind):
    graph = make_graph(9, 6, 400)
    args = tensors("cpu", *shapes_of(kind, graph, (2,), 3))[:-1]
    saved = call(kind, graph, args, dropout=0.1).grad_fn.saved_tensors
    assert all(one is None or one.numel() <= 9 * 2 * 4 for one in saved)
