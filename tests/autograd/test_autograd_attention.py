"""Attention in ``sparsefmt.autograd`` against gathering and scattering, in float64 on the CPU."""

import gc
import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_cases import (  # noqa: E402
    KINDS,
    OPTIONS,
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
    words,
)
from autograd_cases import DTYPES, empty_graph, make_graph, tensors  # noqa: E402
from torch.autograd import gradcheck  # noqa: E402

from sparsefmt import CSR, Graph  # noqa: E402
from sparsefmt.autograd import (  # noqa: E402
    dot_aggregate,
    edge_softmax,
    gat_aggregate,
    gatv2_aggregate,
    sddmm,
    spmm,
)
from sparsefmt.autograd.attention import gat_of_vectors  # noqa: E402
from sparsefmt.errors import ShapeError, UnsupportedError  # noqa: E402
from sparsefmt.ops.attention.score import Options  # noqa: E402
from sparsefmt.ops.engine import small  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_gathering(device, kind, dtype):
    for index_dtype, (heads, feat), options in itertools.product(
        (np.int32, np.int64), (((), 1), ((2,), 7), ((4,), 16), ((1,), 33)), OPTIONS
    ):
        graph = loop_graph(30, device=device, index_dtype=index_dtype)
        shapes = [*shapes_of(kind, graph, heads, feat), (30, *heads, feat)]
        *given, grad = tensors(device, *shapes, dtype=dtype)
        for count in (len(given) - 1, len(given)):
            some, grad = given[:count], grad.detach()
            y = call(kind, graph, some, **options)
            found = torch.autograd.grad(y, some, grad)
            exact = host(some)
            expected = naive(kind, graph, exact, **options)
            wanted = torch.autograd.grad(expected, exact, grad.cpu().double())
            assert (y.dtype, [one.dtype for one in found]) == (dtype, [dtype] * count)
            # Rows of some ten entries, whose products are of up to 33 features.
            assert_near(y, expected, dtype=dtype, gradient=False)
            for mine, theirs in zip(found, wanted, strict=True):
                assert_near(mine, theirs, dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_gradients_agree_with_finite_differences(device, shape, kind):
    graph = make_graph(*shape, 14, device=device)
    for heads, options in (((), {}), ((2,), {"dropout": 0.3, "seed": SEED})):
        given = tensors(device, *shapes_of(kind, graph, heads, 3))
        assert gradcheck(lambda *a: call(kind, graph, a, **options), given, nondet_tol=0)  # noqa: B023
        assert gradcheck(lambda *a: call(kind, graph, a, **options), given[:-1], nondet_tol=0)  # noqa: B023


@pytest.mark.parametrize("kind", KINDS)
def test_so_does_each_by_itself_with_loops(device, kind):
    graph = loop_graph(device=device)
    given = tensors(device, *shapes_of(kind, graph, (2,), 3))
    options = {"dropout": 0.3, "seed": SEED, "self_loops": True}
    for at in range(len(given)):
        some = [one.detach().requires_grad_(i == at) for i, one in enumerate(given)]
        assert gradcheck(lambda *a: call(kind, graph, a, **options), some, nondet_tol=0)


@pytest.mark.parametrize("loops", [False, True])
def test_gradients_of_a_layer_agree_with_finite_differences(device, loops):
    graph = loop_graph(device=device)
    shapes = (7, 2, 3), (1, 2, 3), (1, 2, 3), (graph.nnz, 2), (7, 2)
    given = tensors(device, *shapes)
    given = given if loops else given[:4]

    def layer(*given):
        return gat_of_vectors(graph, *given, dropout=0.3, seed=SEED, self_loops=loops)

    assert gradcheck(layer, given, nondet_tol=0)


@pytest.mark.parametrize("loops", [False, True])
def test_so_do_those_of_a_layer_with_a_bias(device, loops):
    graph = loop_graph(device=device)
    shapes = (7, 2, 3), (1, 2, 3), (1, 2, 3), (graph.nnz, 2), (7, 2), (6,)
    given = tensors(device, *shapes)
    options = Options(torch.tensor([SEED], device=device), 0.2, 0.3, loops)

    def layer(h, source, target, edges, own, bias):
        own = own if loops else None
        return from_vectors(graph, options, h, source, target, edges, own, bias=bias)

    assert gradcheck(layer, given, nondet_tol=0)
    for at in (0, 5):
        some = [one.detach().requires_grad_(i == at) for i, one in enumerate(given)]
        assert gradcheck(layer, some, nondet_tol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_is_added_to_each_row(device, dtype):
    graph, seed = loop_graph(30, device=device), torch.tensor([SEED], device=device)
    for loops, (heads, feat) in itertools.product((False, True), (((4,), 16), ((2,), 7), ((), 33))):
        shapes = (30, *heads, feat), (*heads, feat), (*heads, feat), (*heads, feat)
        *given, grad = tensors(device, *shapes, (30, *heads, feat), dtype=dtype)
        args = graph, Options(seed, 0.2, 0.3, loops), *given[:3], None, None
        y = from_vectors(*args, bias=given[3])
        found = torch.autograd.grad(y, given, grad.detach())
        h, source, target, bias = exact = host(given)
        scores = [(h * one).sum(-1) for one in (source, target)]
        expected = bias + naive_gat(graph, h, *scores, dropout=0.3, seed=SEED, loops=loops)
        wanted = torch.autograd.grad(expected, exact, grad.detach().cpu().double())
        assert [one.dtype for one in (y, *found)] == [dtype] * 5
        assert_near(y, expected, dtype=dtype, gradient=False)
        for mine, theirs in zip(found, wanted, strict=True):
            assert_near(mine, theirs, dtype=dtype)
        with torch.no_grad():
            assert torch.equal(y, from_vectors(*args, bias=given[3]))


@pytest.mark.parametrize("loops", [False, True])
def test_a_bias_stands_alone_where_there_are_no_entries(device, loops):
    graph, options = empty_graph(30, 30, device=device), Options(None, 0.2, 0.0, loops)
    h, source, target, bias = tensors(device, (30, 2, 8), (2, 8), (2, 8), (16,))
    y = from_vectors(graph, options, h, source, target, None, None, bias=bias)
    torch.testing.assert_close(y, bias.view(2, 8) + (h if loops else torch.zeros_like(h)))
    dh, dbias = torch.autograd.grad(y.sum(), (h, bias))
    torch.testing.assert_close(dh, torch.full_like(h, float(loops)))
    torch.testing.assert_close(dbias, torch.full_like(bias, 30.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_is_the_sum_of_its_parts(device, dtype):
    graph = loop_graph(30, device=device)
    for heads, feat in (((4,), 16), ((1,), 5), ((), 33)):
        shapes = (30, *heads, feat), (*heads, feat), (*heads, feat), (graph.nnz, *heads)
        given = tensors(device, *shapes, (30, *heads), (30, *heads, feat), dtype=dtype)
        *given, grad = given
        h, source, target, edges, own = given
        options = {"dropout": 0.3, "seed": SEED, "self_loops": True}
        y = gat_of_vectors(graph, *given, **options)
        found = torch.autograd.grad(y, given, grad.detach())
        h, source, target, edges, own = exact = host(given)
        scores = [(h * one).sum(-1) for one in (source, target)]
        expected = naive_gat(graph, h, *scores, edges, own, dropout=0.3, seed=SEED, loops=True)
        wanted = torch.autograd.grad(expected, exact, grad.detach().cpu().double())
        assert [one.dtype for one in (y, *found)] == [dtype] * 6
        assert_near(y, expected, dtype=dtype, gradient=False)
        for mine, theirs in zip(found, wanted, strict=True):
            assert_near(mine, theirs, dtype=dtype)


def test_so_is_a_large_one_by_compiled_loops(monkeypatch):
    monkeypatch.setattr(small, "MOST_OF_ATTENTION", -1)
    test_a_layer_is_the_sum_of_its_parts("cpu", torch.float32)


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


def test_attention_is_a_composition_of_the_other_functions(device):
    graph = make_graph(40, 30, 300, device=device)
    q, k, v = tensors(device, (40, 8), (30, 8), (30, 8))
    p = edge_softmax(graph, sddmm(graph, q, k) * 0.25)
    results = []
    for y in (dot_aggregate(graph, q, k, v, scale=0.25), spmm(graph, v, p)):
        results.append([y, *torch.autograd.grad(y.square().sum(), (q, k, v))])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_tensor_may_be_given_for_all(device):
    graph = make_graph(9, 9, 40, device=device)
    (x,) = tensors(device, (9, 4))
    assert gradcheck(lambda x: dot_aggregate(graph, x, x, x), x)
    assert gradcheck(lambda x: dot_aggregate(graph, x, x), x)
    assert gradcheck(lambda x: gatv2_aggregate(graph, x, x, x[0]), x)
    assert gradcheck(lambda x: gat_aggregate(graph, x, x[:, 0], x[:, 0]), x)


def test_the_transposed_graph_attends_too(device):
    graph = make_graph(9, 6, 40, weighted=True, device=device).transposed
    for kind in KINDS:
        given = tensors(device, *shapes_of(kind, graph, (2,), 3))
        exact = host(given)
        y, expected = call(kind, graph, given), naive(kind, graph, exact)
        assert_near(y, expected)
        found = torch.autograd.grad(y.square().sum(), given)
        wanted = torch.autograd.grad(expected.square().sum(), exact)
        for mine, theirs in zip(found, wanted, strict=True):
            assert_near(mine, theirs)


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


# Dropout


def test_the_mask_depends_on_the_seed_the_entry_and_the_head_alone(device):
    """One entry a row, whose weight is 1: what is left is the mask."""
    n, heads = 400, 3
    graph = Graph(CSR(np.arange(n + 1), np.arange(n), shape=(n, n))).to(device)
    h, scores = torch.ones(n, heads, 1, device=device), torch.zeros(n, heads, device=device)
    for seed in (0, np.int32(7), 2**63 - 1, -1, 2**64 - 1, 2**70 + 7):
        y = gat_aggregate(graph, h, scores, scores, dropout=0.25, seed=seed)
        z = dot_aggregate(graph, h, h, dropout=np.float32(0.25), seed=seed)
        seed = int(seed)
        stays = words(seed, torch.arange(n), heads) >= 2**30
        assert torch.equal(y[:, :, 0].cpu() != 0, torch.from_numpy(stays))
        assert torch.equal(y, z)
        torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 4 / 3))
        mask = {"dropout": 0.25, "seed": torch.tensor([(seed + 2**63) % 2**64 - 2**63]).to(device)}
        assert torch.equal(y, gat_aggregate(graph, h, scores, scores, **mask))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_seed_torch_draws_it(device, kind):
    graph = make_graph(40, 30, 300, device=device)
    given = tensors(device, *shapes_of(kind, graph, (2,), 4), grad=False)

    def drawn(count):
        torch.manual_seed(5)
        return [call(kind, graph, given, dropout=0.5) for _ in range(count)]

    first, second = drawn(2)
    assert not torch.equal(first, second)
    assert torch.equal(first, drawn(1)[0])
    torch.manual_seed(5)
    seed = torch.randint(2**63 - 1, (1,), device=device)
    assert torch.equal(first, call(kind, graph, given, dropout=0.5, seed=seed))


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_may_be_written_to_before_backward(device, kind):
    graph = make_graph(40, 30, 300, device=device)
    seed, results = torch.tensor([5], device=device), []
    for step in (0, 3):
        given = tensors(device, *shapes_of(kind, graph, (2,), 4))
        y = call(kind, graph, given, dropout=0.5, seed=seed)
        seed += step
        results.append(torch.autograd.grad(y.sin().sum(), given[0])[0])
    assert torch.equal(*results)


def test_nothing_is_drawn_where_nothing_is_dropped(device):
    graph = make_graph(9, 6, 40, device=device)
    h, el, er = tensors(device, (6, 4), (6,), (9,))
    generator = torch.cuda.default_generators[0] if device == "cuda" else torch.default_generator
    before = generator.get_state()
    y = gat_aggregate(graph, h, el, er, dropout=0.0)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(y, gat_aggregate(graph, h, el, er, seed=3))


def test_the_gradient_has_the_mask_of_the_result(device):
    graph = make_graph(40, 30, 300, device=device)
    h, el, er = tensors(device, (30, 2, 4), (30, 2), (40, 2))
    for _ in range(3):
        y = gat_aggregate(graph, h, el, er, dropout=0.5)
        (dh,) = torch.autograd.grad(y.sum(), h)
        torch.testing.assert_close((dh * h).sum(), y.sum())  # linear in h


# What is kept


def test_no_tensor_of_the_size_of_the_entries_is_kept():
    graph = make_graph(9, 6, 400)
    for kind in KINDS:
        given = tensors("cpu", *shapes_of(kind, graph, (2,), 3))[:-1]
        saved = call(kind, graph, given, dropout=0.1).grad_fn.saved_tensors
        assert all(one is None or one.numel() <= 9 * 2 * 4 for one in saved)
        with torch.no_grad():
            assert call(kind, graph, given).grad_fn is None


def test_backward_works_after_the_graph_is_dropped(device):
    graph = make_graph(9, 6, 40, device=device)
    h, el, er = tensors(device, (6, 4), (6,), (9,))
    y, z = gat_aggregate(graph, h, el, er), dot_aggregate(graph, er[:, None], el[:, None])
    del graph
    gc.collect()
    (y.sum() + z.sum()).backward()
    assert h.grad.any()


def test_backward_may_run_twice(device):
    graph = make_graph(9, 6, 40, device=device)
    for kind in KINDS:
        given = tensors(device, *shapes_of(kind, graph, (2,), 3))
        y = call(kind, graph, given, dropout=0.2)
        first, second = (
            torch.autograd.grad(y.square().sum(), given, retain_graph=True) for _ in range(2)
        )
        assert all(map(torch.equal, first, second))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kind", KINDS)
def test_results_repeat_bit_by_bit(device, kind):
    graph = loop_graph(200, device=device)
    given = tensors(device, *shapes_of(kind, graph, (2,), 33), dtype=torch.float32)

    def once():
        y = call(kind, graph, given, dropout=0.2, seed=3, self_loops=True)
        return [y, *torch.autograd.grad(y.square().sum(), given)]

    first = once()
    for _ in range(3):
        assert all(map(torch.equal, first, once()))


def test_an_infinite_scale_is_refused_as_by_ops():
    graph = loop_graph()
    (x,) = tensors("cpu", (7, 2, 3), grad=False)
    for scale in (np.inf, -np.inf, np.nan):
        with pytest.raises(ShapeError, match="give a finite number, or leave it out"):
            dot_aggregate(graph, x, x, scale=scale)


def test_scores_of_loops_that_are_not_asked_for_are_refused(device):
    graph = loop_graph(device=device)
    h, vector, own = tensors(device, (7, 2, 3), (2, 3), (7, 2))
    with pytest.raises(UnsupportedError, match="loop_scores are given but self_loops is False"):
        gat_of_vectors(graph, h, vector, vector, None, own)


def test_below_they_count_for_nothing(device):
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


def test_the_op_below_takes_loop_scores(device):
    graph = loop_graph(device=device)
    h, el, er, own = tensors(device, (7, 2, 3), (7, 2), (7, 2), (7, 2))
    options = Options(None, 0.2, 0.0, True)
    assert gradcheck(lambda *a: from_scores(graph, options, *a[:3], None, a[3]), (h, el, er, own))
    exact = host((h, el, er, own))
    expected = naive_gat(graph, *exact[:3], None, exact[3], loops=True)
    assert_near(from_scores(graph, options, h, el, er, None, own), expected)
