"""Products whose float32 features torch allows to go by bfloat16, forward and backward."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import make_graph, matmul_precision, tensors  # noqa: E402

from sparsefmt import autograd, nn  # noqa: E402
from sparsefmt.autograd import gat_aggregate, gat_of_vectors, gatv2_aggregate, spmm  # noqa: E402
from sparsefmt.ops import explain  # noqa: E402

pytestmark = pytest.mark.usefixtures("medium")
SCALES = ("row_scale", "col_scale")


@pytest.fixture
def medium(rounds_always):
    """Let torch's own products go by bfloat16, and round small matrices too."""
    with matmul_precision("medium"):
        yield


def rounded(x):
    return x.detach().to(torch.bfloat16).to(x.dtype)


def exactly(function, *args, **options):
    """The same without rounding."""
    with matmul_precision("highest"):
        return function(*args, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("names", [(), SCALES[:1], SCALES[1:], SCALES])
@pytest.mark.parametrize("weighted", [True, False])
def test_features_and_their_gradient_are_rounded_once(weighted, names, reduce):
    graph = make_graph(40, 30, 600, device="cuda", weighted=weighted)
    if weighted:
        graph = graph.with_data(graph.csr.data.astype(np.float32))
    x, grad, r, c = tensors("cuda", (30, 24), (40, 24), (40,), (30,), dtype=torch.float32)
    scales = {n: s.detach() for n, s in zip(SCALES, (r, c), strict=True) if n in names}
    y = spmm(graph, x, reduce=reduce, **scales)
    (dx,) = torch.autograd.grad(y, x, grad.detach())
    near = rounded(x).requires_grad_()
    expected = exactly(spmm, graph, near, reduce=reduce, **scales)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)
    (dnear,) = exactly(torch.autograd.grad, expected, near, rounded(grad))
    torch.testing.assert_close(dx, dnear, rtol=2e-5, atol=2e-5)
    assert not torch.equal(y, exactly(spmm, graph, x, reduce=reduce, **scales))


@pytest.mark.gpu
def test_gradients_of_edge_values_are_not_rounded():
    graph = make_graph(40, 30, 600, device="cuda")
    x, grad, a = tensors("cuda", (30, 24), (40, 24), (graph.nnz,), dtype=torch.float32)
    grad = grad.detach()
    found = torch.autograd.grad(spmm(graph, x, a), (x, a), grad)
    expected = torch.autograd.grad(exactly(spmm, graph, x, a), (x, a), grad)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


EXACT = {
    **{str(dtype): (spmm, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)},
    "max": (lambda graph, x: spmm(graph, x, reduce="max"), torch.float32),
    "gatv2": (lambda graph, x: gatv2_aggregate(graph, by_head(x), by_head(x), x[0].view(4, 6)),
              torch.float32),
    "dot": (lambda graph, x: autograd.dot_aggregate(graph, *[by_head(x)] * 3), torch.float32),
}  # fmt: skip


def by_head(x):
    return x.view(-1, 4, 6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT)
def test_other_dtypes_and_functions_are_as_before(name):
    function, dtype = EXACT[name]
    graph = make_graph(30, 30, 600, device="cuda")
    (x,) = tensors("cuda", (30, 24), dtype=dtype, grad=False)
    assert torch.equal(function(graph, x), exactly(function, graph, x))


@pytest.mark.gpu
def test_explain_tells_of_it():
    graph = make_graph(40, 30, 600, device="cuda")
    (x,) = tensors("cuda", (30, 24), dtype=torch.float32, grad=False)
    assert explain("spmm", graph, x).chosen.name == "spmm_csr_rounded"
    assert exactly(explain, "spmm", graph, x).chosen.name == "spmm_csr_balanced"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "make",  # one aggregates first: what is rounded is alike
    [lambda: nn.SAGEConv(24, 32), lambda: nn.GATConv(24, 16, heads=4)],
    ids=["sage", "gat"],
)
def test_layers_take_it_compiled_and_captured_too(make):
    graph, layer = make_graph(30, 30, 600, device="cuda"), make().cuda()
    (x,) = tensors("cuda", (30, 24), dtype=torch.float32, grad=False)
    with torch.no_grad():
        expected = layer(x, graph)
        assert not torch.equal(expected, exactly(layer, x, graph))
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, graph), expected)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            replayed = layer(x, graph)
        captured.replay()
        torch.testing.assert_close(replayed, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("heads", "feat"), [(4, 32), (1, 24), (3, 5)])
def test_attention_gathers_features_and_their_gradient_rounded(heads, feat, dropout):
    graph = make_graph(40, 30, 600, device="cuda")
    shapes = (30, heads, feat), (30, heads), (40, heads), (graph.nnz, heads), (40, heads, feat)
    *given, grad = tensors("cuda", *shapes, dtype=torch.float32)
    options, grad = {"dropout": dropout, "seed": 3}, grad.detach()
    y = gat_aggregate(graph, *given, **options)
    found = torch.autograd.grad(y, given, grad)
    near = [rounded(given[0]).requires_grad_(), *given[1:]]
    expected = exactly(gat_aggregate, graph, *near, **options)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)
    dx, *_ = exactly(torch.autograd.grad, expected, near, rounded(grad), retain_graph=True)
    torch.testing.assert_close(found[0], dx, rtol=2e-5, atol=2e-5)
    # Of targets from gradients as they are, of sources from both: no further off than they are.
    _, _, d_er, _ = exactly(torch.autograd.grad, expected, near, grad)
    torch.testing.assert_close(found[2], d_er, rtol=2e-5, atol=2e-5)
    exact = exactly(gat_aggregate, graph, *given, **options)
    assert not torch.equal(y, exact)
    for one, other in zip(found, exactly(torch.autograd.grad, exact, given, grad), strict=True):
        largest = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=2**-6 * largest)


@pytest.mark.gpu
@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize(("heads", "feat"), [(4, 16), (1, 72), (3, 5)])
def test_scores_of_vectors_and_a_bias_are_as_if_made_apart(heads, feat, edges):
    graph = make_graph(30, 30, 600, device="cuda")
    shapes = (30, heads, feat), *[(heads, feat)] * 3, (graph.nnz, heads), (30, heads, feat)
    h, source, target, bias, scores, grad = tensors("cuda", *shapes, dtype=torch.float32)
    given = h, source, target, bias, *[scores] * edges
    edge_scores, options = scores if edges else None, {"self_loops": True}
    el, er = ((h * vector).sum(-1) for vector in (source, target))
    apart = gat_aggregate(graph, h, el, er, edge_scores, **options) + bias
    together = gat_of_vectors(graph, h, source, target, edge_scores, bias=bias, **options)
    torch.testing.assert_close(together, apart, rtol=2e-5, atol=2e-5)
    exact = exactly(gat_of_vectors, graph, h, source, target, edge_scores, bias=bias, **options)
    assert not torch.equal(together, exact)
    pair = (
        torch.autograd.grad(y, given, grad.detach(), retain_graph=True) for y in (together, apart)
    )
    torch.testing.assert_close(*pair, rtol=2e-4, atol=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["windows", "deterministic"])
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_of_kept_features_are_rounded_once(weighted, how, request):
    if how == "deterministic":
        request.getfixturevalue("deterministic")
    graph = make_graph(40, 30, 600, device="cuda")
    x, grad, a = tensors("cuda", (30, 64), (40, 64), (graph.nnz,), dtype=torch.float32)
    given = (a.detach(),) if weighted else ()
    y = autograd.maxk_aggregate(graph, x, 8, *given)
    assert torch.equal(y, exactly(autograd.maxk_aggregate, graph, x, 8, *given))
    (dx,) = torch.autograd.grad(y, x, grad.detach(), retain_graph=True)
    (near,) = exactly(torch.autograd.grad, y, x, rounded(grad), retain_graph=True)
    torch.testing.assert_close(dx, near, rtol=2e-5, atol=2e-5)
    (exact,) = exactly(torch.autograd.grad, y, x, grad.detach())
    assert not torch.equal(dx, exact)


def test_on_a_cpu_nothing_is_rounded():
    graph = make_graph(40, 30, 600)
    (x,) = tensors("cpu", (30, 24), dtype=torch.float32, grad=False)
    assert torch.equal(spmm(graph, x), exactly(spmm, graph, x))
    el, er = x[:, 0], torch.cat([x, x])[:40, 1]
    found = gat_aggregate(graph, x, el, er)
    assert torch.equal(found, exactly(gat_aggregate, graph, x, el, er))
