"""Products whose float32 features torch allows to go by bfloat16, forward and backward."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import make_graph, tensors  # noqa: E402

from sparsefmt import nn  # noqa: E402
from sparsefmt.autograd import spmm  # noqa: E402
from sparsefmt.ops import explain  # noqa: E402
from sparsefmt.ops.matmul import cuda as matmul_cuda  # noqa: E402

SCALES = ("row_scale", "col_scale")


@pytest.fixture
def medium(monkeypatch):
    """Let torch's own products go by bfloat16, and round small matrices too."""
    monkeypatch.setattr(matmul_cuda, "LEAST_GATHERS", 0)
    monkeypatch.setattr(matmul_cuda, "LEAST_FEATURES", 0)
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


def rounded(x):
    return x.detach().to(torch.bfloat16).to(x.dtype)


def exactly(function, *args, **options):
    """The same without rounding."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return function(*args, **options)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.usefixtures("medium")
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
@pytest.mark.usefixtures("medium")
def test_gradients_of_edge_values_are_not_rounded():
    graph = make_graph(40, 30, 600, device="cuda")
    x, grad, a = tensors("cuda", (30, 24), (40, 24), (graph.nnz,), dtype=torch.float32)
    grad = grad.detach()
    found = torch.autograd.grad(spmm(graph, x, a), (x, a), grad)
    expected = torch.autograd.grad(exactly(spmm, graph, x, a), (x, a), grad)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("medium")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_as_before(dtype):
    graph = make_graph(40, 30, 600, device="cuda")
    (x,) = tensors("cuda", (30, 24), dtype=dtype, grad=False)
    assert torch.equal(spmm(graph, x), exactly(spmm, graph, x))


@pytest.mark.gpu
@pytest.mark.usefixtures("medium")
def test_maxima_are_features_as_they_are():
    graph = make_graph(40, 30, 600, device="cuda")
    (x,) = tensors("cuda", (30, 24), dtype=torch.float32, grad=False)
    assert torch.equal(spmm(graph, x, reduce="max"), exactly(spmm, graph, x, reduce="max"))


@pytest.mark.gpu
@pytest.mark.usefixtures("medium")
def test_explain_tells_of_it():
    graph = make_graph(40, 30, 600, device="cuda")
    (x,) = tensors("cuda", (30, 24), dtype=torch.float32, grad=False)
    assert explain("spmm", graph, x).chosen.name == "spmm_csr_rounded"
    assert exactly(explain, "spmm", graph, x).chosen.name == "spmm_csr_balanced"


@pytest.mark.gpu
@pytest.mark.usefixtures("medium")
def test_layers_take_it_compiled_and_captured_too():
    graph = make_graph(30, 30, 600, device="cuda")
    (x,) = tensors("cuda", (30, 24), dtype=torch.float32, grad=False)
    layer = nn.SAGEConv(24, 16).cuda()
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


def test_on_a_cpu_nothing_is_rounded(medium):
    graph = make_graph(40, 30, 600)
    (x,) = tensors("cpu", (30, 24), dtype=torch.float32, grad=False)
    assert torch.equal(spmm(graph, x), exactly(spmm, graph, x))
