"""Attention in ``sparsefmt.autograd`` against gathering and scattering, in float64 on the CPU."""

import itertools

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
from autograd_cases import make_graph, tensors  # noqa: E402
from torch.autograd import gradcheck  # noqa: E402

from sparsefmt.autograd import (  # noqa: E402
    attention,
    dot_aggregate,
    gat_aggregate,
    gatv2_aggregate,
)
from sparsefmt.autograd.attention import gat_of_vectors  # noqa: E402
from sparsefmt.autograd.engine import precision  # noqa: E402
from sparsefmt.autograd.engine.precision import bf16_is_allowed  # noqa: E402
from sparsefmt.ops.attention.score import Options  # noqa: E402
from sparsefmt.ops.engine import small  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_layer_by_compiled_loops_is_the_sum_of_its_parts(monkeypatch):
    """By those of NumPy in ``tests/laws``."""
    monkeypatch.setattr(small, "MOST_OF_ATTENTION", -1)
    graph, dtype = loop_graph(30), torch.float32
    for heads, feat in (((4,), 16), ((1,), 5), ((), 33)):
        shapes = (30, *heads, feat), (*heads, feat), (*heads, feat), (graph.nnz, *heads)
        given = tensors("cpu", *shapes, (30, *heads), (30, *heads, feat), dtype=dtype)
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
    assert gradcheck(lambda x: dot_aggregate(graph, x, x, x), x)
    assert gradcheck(lambda x: dot_aggregate(graph, x, x), x)
    assert gradcheck(lambda x: gatv2_aggregate(graph, x, x, x[0]), x)
    assert gradcheck(lambda x: gat_aggregate(graph, x, x[:, 0], x[:, 0]), x)


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


# Shapes and rounding


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
    expected = gat_aggregate(graph, h, el, er, edges)
    wanted = torch.autograd.grad(expected.square().sum(), (h, el, er, edges))
    for flat, one in itertools.product((False, True), repeat=2):
        given = [
            value.detach().unsqueeze(1).requires_grad_() if there else value.detach()
            for value, there in zip((h, el, er, edges), (flat, one, not one, one), strict=True)
        ]
        given = [one.detach().requires_grad_() for one in given]
        y = gat_aggregate(graph, *given)
        assert torch.equal(y.reshape(9, 4), expected)
        found = torch.autograd.grad(y.square().sum(), given)
        for mine, theirs, value in zip(found, wanted, given, strict=True):
            assert mine.shape == value.shape
            assert torch.equal(mine.flatten(), theirs.flatten())


@pytest.mark.parametrize(("kind", "op"), [("gat", "GAT"), ("gatv2", "ATTEND"), ("dot", "ATTEND")])
def test_a_result_that_is_computed_again_is_rounded_as_before(monkeypatch, kind, op):
    """Torch allows bfloat16 between forward and backward: both passes of the op are exact."""
    forward, allowed = getattr(attention, f"{op}_WITH_STATISTICS"), []
    monkeypatch.setattr(
        *(attention, f"{op}_WITH_STATISTICS"),
        lambda *args: allowed.append(bf16_is_allowed()) or forward(*args),
    )
    graph = make_graph(9, 6, 40, device="cpu")
    given = tensors("cpu", *shapes_of(kind, graph, (2,), 4))
    y = call(kind, graph, given).relu_()
    monkeypatch.setattr(precision, "_precision", lambda *of: "bf16" if "mkldnn" in of else "tf32")
    torch.autograd.grad(y.sum(), given)
    assert bf16_is_allowed()
    assert allowed == [False, False]
