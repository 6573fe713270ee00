"""Functions where ``tests/laws`` do not go: kept features, messages, samples, attention."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_cases import (  # noqa: E402
    KINDS,
    SEED,
    assert_near,
    call,
    from_scores,
    from_vectors,
    host,
    loop_graph,
    naive,
    naive_gat,
    shapes_of,
)
from autograd_cases import DTYPES, make_graph, tensors  # noqa: E402
from laws.calls import assert_same, messages, product_of_largest  # noqa: E402
from torch.autograd import gradcheck  # noqa: E402

from sparsefmt import COO, CSR, DtypeError, Graph, ShapeError, autograd  # noqa: E402
from sparsefmt.autograd import cbsr  # noqa: E402
from sparsefmt.autograd.engine import precision  # noqa: E402
from sparsefmt.autograd.engine.precision import bf16_is_allowed  # noqa: E402
from sparsefmt.ops.attention.score import Options  # noqa: E402
from sparsefmt.ops.engine import small  # noqa: E402
from sparsefmt.reorder import Order, degree_order  # noqa: E402

REDUCTIONS = ("sum", "mean")
NAN, INF = torch.nan, torch.inf

pytestmark = pytest.mark.usefixtures("one_thread")


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
    y = autograd.maxk(x, k)
    y.backward(grad.detach())
    assert torch.equal(y, torch.where(mask(x, k), x, 0))
    assert torch.equal(x.grad, torch.where(mask(x, k), grad, 0))


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dense_product_of_kept_features_is_the_same(device, dtype, reduce, monkeypatch):
    graph = make_graph(9, 6, 40, device=device)
    x, r, grad = tensors(device, (6, 300), (9,), (9, 300), dtype=dtype)
    with torch.no_grad():
        x[1, :2], x[2, 3] = torch.tensor([NAN, -INF]), INF
    results = []
    for is_dense in (False, True):
        monkeypatch.setattr(cbsr, "dense_is_faster", lambda *_, is_dense=is_dense: is_dense)
        y = autograd.maxk_aggregate(graph, x, 99, reduce=reduce, row_scale=r)
        results.append((y, *torch.autograd.grad(y, (x, r), grad)))
    assert_same(*results, equal_nan=True)


@pytest.mark.parametrize(
    ("k", "feat", "dtype", "expected"),
    [
        (65, 260, torch.float32, True),
        (65, 261, torch.float32, False),
        (64, 64, torch.float32, False),
        (64, 512, torch.float16, True),
        (64, 513, torch.bfloat16, False),
        (99, 99, torch.float64, False),
    ],
)
def test_where_a_dense_product_is_faster(k, feat, dtype, expected):
    data = SimpleNamespace(shape=(3, k), itemsize=dtype.itemsize, is_cuda=True)
    assert cbsr.dense_is_faster(data, feat) == expected
    assert not cbsr.dense_is_faster(torch.empty(3, k, dtype=dtype), feat)


def test_zeros_of_kept_features_meet_no_infinite_factor(device, monkeypatch):
    monkeypatch.setattr(cbsr, "dense_is_faster", lambda *_: True)
    graph, x = Graph(CSR([0, 1], [0], shape=(1, 1))).to(device), torch.ones(1, 128, device=device)
    infinite = torch.full((1,), INF, device=device)
    for factor in ("edge_weight", "col_scale"):
        y = autograd.maxk_aggregate(graph, x, 64, **{factor: infinite})
        assert y[0].tolist() == [INF] * 64 + [0] * 64


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_autocast_narrows_before_the_choice(device, reduce):
    graph = make_graph(9, 6, 40, device=device)
    args = tensors(device, (6, 8), (graph.nnz,), (9,), (6,), dtype=torch.float32)

    def aggregate(x, a, r, c):
        return autograd.maxk_aggregate(graph, x, 3, a, reduce=reduce, row_scale=r, col_scale=c)

    with torch.autocast(device, dtype=torch.bfloat16):
        y = aggregate(*args)
        assert autograd.maxk(args[0], 3).dtype is torch.float32
    assert torch.equal(y, aggregate(*(one.detach().bfloat16() for one in args)))


def test_a_prepared_order_changes_rounding_alone(device):
    graph = make_graph(60, 30, 2000, device=device)
    x, a = tensors(device, (30, 33), (graph.nnz,))
    before = torch.autograd.grad(autograd.maxk_aggregate(graph, x, 9, a).square().sum(), (x, a))
    autograd.prepare(graph, order=degree_order(graph.csr, descending=False))
    after = torch.autograd.grad(autograd.maxk_aggregate(graph, x, 9, a).square().sum(), (x, a))
    assert_same(after, before)


def test_an_order_is_checked():
    graph = make_graph(6, 5, 20)
    with pytest.raises(DtypeError, match="order is a Tensor: give"):
        autograd.prepare(graph, order=torch.arange(6))
    with pytest.raises(ShapeError, match="order is of 5 vertices but there are 6 rows"):
        autograd.prepare(graph, order=Order(np.arange(5)))


#: A function, and its oracle on the CPU, of a graph, features of columns and values of entries.
THRICE = {
    "maxk": (
        lambda g, x, w: autograd.maxk_aggregate(g, x, 2, w[:, 0]),
        lambda g, x, w: product_of_largest(g, x, k=2, edge_weight=w[:, 0]),
    ),
    **{
        message: (
            lambda g, x, w, message=message: autograd.message_aggregate(g, x, w, message=message),
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
    args = torch.tensor([[NAN], [1.0], [-INF], [2.0]]), torch.tensor([[1.0], [-1], [1], [-3]])
    steps = []
    for function, place in zip(THRICE["relu_add"], (device, "cpu"), strict=True):
        leaves = [one.to(place).requires_grad_() for one in args]
        y = function(graph.to(place), *leaves)
        steps.append([one.cpu() for one in (y, *torch.autograd.grad(y.sum(), leaves))])
    assert_same(*steps, equal_nan=True)


def test_gates_that_are_shut_let_no_infinite_gradient_through():
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    x = torch.full((2, 3), -5.0, requires_grad=True)
    y = autograd.message_aggregate(graph, x, torch.zeros(2, 3), message="relu_add")
    for again in (True, False):
        (dx,) = torch.autograd.grad(
            y, x, torch.full_like(y, INF), create_graph=again, retain_graph=True
        )
        assert (dx == 0).all()


#: Of x, w and the factors of rows; those, and which of the four features count.
ROUNDED = {
    "spmm": lambda g, x, w, r, reduce: autograd.spmm(g, x, w[:, 0], reduce=reduce, row_scale=r),
    "maxk": lambda g, x, w, r, reduce: autograd.maxk_aggregate(
        g, x, 2, w[:, 0], reduce=reduce, row_scale=r
    ),
    "messages": lambda g, x, w, r, reduce: autograd.message_aggregate(g, x, w, reduce=reduce),
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
        y = autograd.sampled_aggregate(graph, x, 3, mean=True, row_scale=r, col_scale=c)
        steps.append([y, *torch.autograd.grad(y.sum(), x)])
        assert all(one.isfinite().all() for one in steps[-1])
    assert_same(*steps, rtol=1e-3, atol=0)


def test_rows_without_entries_stay_zero_whatever_their_scale(device):
    graph = make_graph(9, 6, 60, device=device)
    empty = torch.from_numpy(np.diff(graph.to("cpu").csr.indptr) == 0).to(device)
    x, r = tensors(device, (6, 3), (9,))
    for option, trained in itertools.product((None, "mean", "rescale"), (False, True)):
        scale = r.detach().masked_fill(empty, INF).requires_grad_(trained)
        y = autograd.sampled_aggregate(
            graph, x, 2, row_scale=scale, **({option: True} if option else {})
        )
        assert empty.any()
        assert not y[empty].any()
        grads = torch.autograd.grad(y.sum(), [x, scale] if trained else [x])
        assert all(one.isfinite().all() for one in grads)


def test_what_nobody_sampled_has_no_part_in_the_gradient_of_a_scale(device):
    """Be it infinite: column 2 is beyond the first two entries of the only row."""
    graph = Graph(CSR(np.array([0, 3]), np.arange(3), shape=(1, 3)).to(device))
    x = torch.tensor([[1.0], [2.0], [INF]], device=device, requires_grad=True)
    c = torch.ones(3, device=device, requires_grad=True)
    autograd.sampled_aggregate(graph, x, 2, col_scale=c).sum().backward()
    assert c.grad.tolist() == [1, 2, 0]
    assert x.grad.tolist() == [[1], [1], [0]]


def drawing(name, graph, args, **options):
    """Call what draws: attention with dropout, or a random sample."""
    if name == "sample":
        return autograd.sampled_aggregate(graph, *args, strategy="random", **options)
    return call(name, graph, args, dropout=np.float32(0.5), **options)


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
    number = torch.tensor(7, device=device)
    for seed in (7, np.int64(7), 7 + 2**64, number[None], number):
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
    y = autograd.gat_aggregate(graph, h, el, er, dropout=0.0)
    autograd.sampled_aggregate(graph, h, 5, strategy="fastrand", seed=7)
    autograd.sampled_aggregate(graph, h, 5)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(y, autograd.gat_aggregate(graph, h, el, er, seed=3))


@every_drawing
def test_a_seed_may_be_written_to_before_backward(device, name):
    seed, results = torch.tensor([5], device=device), []
    for change in (0, 3):
        graph, args = drawn_case(name, device)
        y = drawing(name, graph, args, seed=seed)
        seed += change
        results.append(torch.autograd.grad(y.sin().sum(), args[0])[0])
    assert torch.equal(*results)


#: The place of an argument in which a function that draws is linear.
LINEAR = {"gat": 0, "dot": 2, "sample": 0}


@pytest.mark.parametrize("name", LINEAR)
def test_backward_goes_over_what_forward_has_drawn(device, name):
    """With the result as its gradient, the argument's product with its own is the square."""
    graph, args = drawn_case(name, device)
    x = args[LINEAR[name]]
    for _ in range(3):
        y = drawing(name, graph, args)
        (dx,) = torch.autograd.grad(y, x, y.detach())
        torch.testing.assert_close((dx * x).sum(), y.square().sum())


SAVED = {
    "spmm": lambda g, x, a: autograd.spmm(g, x, a[:, 0]),
    "sampled": lambda g, x, a: autograd.sampled_aggregate(g, x, 3, a[:, 0], strategy="random"),
    "maxk": lambda g, x, a: autograd.maxk_aggregate(g, x, 7, a[:, 0]),
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
        y = autograd.message_aggregate(graph, x, w, message=message)
        assert all((one is not None) == kept for one in y.grad_fn.saved_tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_saves_no_tensor_of_the_size_of_the_entries(kind):
    graph = make_graph(9, 6, 400)
    args = tensors("cpu", *shapes_of(kind, graph, (2,), 3))[:-1]
    saved = call(kind, graph, args, dropout=0.1).grad_fn.saved_tensors
    assert all(one is None or one.numel() <= 9 * 2 * 4 for one in saved)


def test_a_layer_by_compiled_loops_is_the_sum_of_its_parts(monkeypatch):
    """By those of NumPy in ``tests/laws``."""
    monkeypatch.setattr(small, "MOST_OF_ATTENTION", -1)
    graph, dtype = loop_graph(30), torch.float32
    for heads, feat in (((4,), 16), ((1,), 5), ((), 33)):
        shapes = (30, *heads, feat), (*heads, feat), (*heads, feat), (graph.nnz, *heads)
        *given, grad = tensors("cpu", *shapes, (30, *heads), (30, *heads, feat), dtype=dtype)
        options = {"dropout": 0.3, "seed": SEED, "self_loops": True}
        y = autograd.gat_of_vectors(graph, *given, **options)
        found = torch.autograd.grad(y, given, grad.detach())
        h, source, target, edges, own = exact = host(given)
        scores = [(h * one).sum(-1) for one in (source, target)]
        expected = naive_gat(graph, h, *scores, edges, own, dropout=0.3, seed=SEED, loops=True)
        wanted = torch.autograd.grad(expected, exact, grad.detach().cpu().double())
        assert [one.dtype for one in (y, *found)] == [dtype] * 6
        assert_near(y, expected, dtype=dtype, gradient=False)
        for mine, theirs in zip(found, wanted, strict=True):
            assert_near(mine, theirs, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_may_be_float32_beside_two_bytes(device, dtype):
    graph = loop_graph(30, device=device)
    for kind in KINDS:
        given = tensors(device, *shapes_of(kind, graph, (2,), 8), dtype=dtype)
        wide = [one.shape[-1] != 8 or (kind == "gatv2" and i == 2) for i, one in enumerate(given)]
        some = [
            (one.detach().float() if w else one.detach()).requires_grad_()
            for one, w in zip(given, wide, strict=True)
        ]
        y = call(kind, graph, some)
        assert y.dtype is dtype
        assert torch.equal(y, call(kind, graph, given))
        found = torch.autograd.grad(y.float().square().sum(), some)
        assert [one.dtype for one in found] == [one.dtype for one in some]


def test_a_tensor_may_be_given_for_all(device):
    graph = make_graph(9, 9, 40, device=device)
    (x,) = tensors(device, (9, 4))
    assert gradcheck(lambda x: autograd.dot_aggregate(graph, x, x, x), x)
    assert gradcheck(lambda x: autograd.dot_aggregate(graph, x, x), x)
    assert gradcheck(lambda x: autograd.gatv2_aggregate(graph, x, x, x[0]), x)
    assert gradcheck(lambda x: autograd.gat_aggregate(graph, x, x[:, 0], x[:, 0]), x)


@pytest.mark.parametrize("kind", KINDS)
def test_large_scores_neither_overflow_nor_vanish(device, kind):
    graph = make_graph(40, 30, 300, device=device)
    # Scores that nothing rounds: of small integers, beside 1e4 or -1e4.
    given = tensors(device, *shapes_of(kind, graph, (2,), 4), dtype=torch.float32, grad=False)
    given = [(4 * one).round() for one in given]
    options = {}
    if kind == "gat":
        options = {"negative_slope": 0.25}
    elif kind == "gatv2":  # no slope
        given[:2] = (one.abs() for one in given[:2])
    given[-1] = 1e4 * (given[-1] + 0.5).sign() + given[-1]
    given, exact = [one.requires_grad_() for one in given], host(given)
    y = call(kind, graph, given, **options)
    expected = naive_gat(graph, *exact, slope=0.25) if kind == "gat" else naive(kind, graph, exact)
    found = torch.autograd.grad(y.square().sum(), given)
    wanted = torch.autograd.grad(expected.square().sum(), exact)
    for mine, theirs in zip((y, *found), (expected, *wanted), strict=True):
        # Of few targets nothing but 0 is left: a softmax's gradients cancel.
        largest = max(float(one.detach().abs().max()) for one in (theirs, wanted[-1]))
        torch.testing.assert_close(
            mine.detach().cpu().double(), theirs.detach(), rtol=0, atol=1e-5 * largest
        )


def test_scores_of_loops_that_are_not_added_count_for_nothing(device):
    graph, options = loop_graph(device=device), Options(None, 0.2, 0.0, False)
    h, el, er, own = tensors(device, (7, 2, 3), (7, 2), (7, 2), (7, 2))
    vector = el.new_ones(2, 3)
    for y in (
        from_scores(graph, options, h, el, er, None, own),
        from_vectors(graph, options, h, vector, vector, None, own),
    ):
        dh, down = torch.autograd.grad(y.square().sum(), (h, own))
        assert dh.isfinite().all()
        assert not down.any()


@pytest.mark.parametrize("loops", [False, True])
def test_no_features_and_no_heads(device, loops):
    graph = loop_graph(device=device)
    for kind, (heads, feat) in itertools.product(KINDS, (((), 0), ((0,), 0), ((0,), 3))):
        given = tensors(device, *shapes_of(kind, graph, heads, feat))
        y = call(kind, graph, given, self_loops=loops, dropout=0.1)
        assert y.shape == (7, *heads, feat)
        for one, mine in zip(given, torch.autograd.grad(y.sum(), given), strict=True):
            assert mine.shape == one.shape
            assert not mine.any()


def test_one_head_may_have_an_axis_or_none(device):
    graph = make_graph(9, 6, 40, device=device)
    h, el, er, edges = tensors(device, (6, 4), (6,), (9,), (graph.nnz,))
    expected = autograd.gat_aggregate(graph, h, el, er, edges)
    wanted = torch.autograd.grad(expected.square().sum(), (h, el, er, edges))
    for flat, one in itertools.product((False, True), repeat=2):
        given = [
            (value.unsqueeze(1) if there else value).detach().requires_grad_()
            for value, there in zip((h, el, er, edges), (flat, one, not one, one), strict=True)
        ]
        y = autograd.gat_aggregate(graph, *given)
        assert torch.equal(y.reshape(9, 4), expected)
        found = torch.autograd.grad(y.square().sum(), given)
        for mine, theirs, value in zip(found, wanted, given, strict=True):
            assert mine.shape == value.shape
            assert torch.equal(mine.flatten(), theirs.flatten())


@pytest.mark.parametrize(("kind", "op"), [("gat", "GAT"), ("gatv2", "ATTEND"), ("dot", "ATTEND")])
def test_a_result_that_is_computed_again_is_rounded_as_before(monkeypatch, kind, op):
    """Torch allows bfloat16 between forward and backward: both passes of the op are exact."""
    forward, allowed = getattr(autograd.attention, f"{op}_WITH_STATISTICS"), []
    monkeypatch.setattr(
        *(autograd.attention, f"{op}_WITH_STATISTICS"),
        lambda *args: allowed.append(bf16_is_allowed()) or forward(*args),
    )
    graph = make_graph(9, 6, 40, device="cpu")
    given = tensors("cpu", *shapes_of(kind, graph, (2,), 4))
    y = call(kind, graph, given).relu_()
    monkeypatch.setattr(precision, "_precision", lambda *of: "bf16" if "mkldnn" in of else "tf32")
    torch.autograd.grad(y.sum(), given)
    assert bf16_is_allowed()
    assert allowed == [False, False]
