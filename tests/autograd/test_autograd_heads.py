"""``autograd.spmm`` with several heads, against the product of each of them."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import DTYPES, empty_graph, make_graph, naive_spmm, tensors  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

from sparsefmt import COO, Graph  # noqa: E402
from sparsefmt.autograd import prepare, sddmm, spmm  # noqa: E402
from sparsefmt.errors import DtypeError, ShapeError, UnsupportedError  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def shuffled(graph, device):
    coo = graph.coo
    order = np.random.default_rng(1).permutation(coo.nnz)
    return Graph(COO(coo.row[order], coo.col[order], shape=coo.shape)).to(device)


def naive(graph, x, a, r=None, c=None, reduce="sum"):
    """One head after another, on the CPU."""
    of_heads = [x] * a.shape[1] if x.dim() == 2 else x.unbind(1)
    pairs = zip(of_heads, a.unbind(1), strict=True)
    return torch.stack([naive_spmm(graph, x, w, r, c, reduce) for x, w in pairs], 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["features of each", "of all"])
def test_sums_and_gradients_are_those_of_each_head(device, shared, dtype):
    cases = itertools.product((np.int32, np.int64), ((1, 4), (3, 7), (4, 16)), ("sum", "mean"))
    for index_dtype, (heads, feat), reduce in cases:
        sorted_graph = make_graph(40, 30, 300, index_dtype=index_dtype)
        for graph in (sorted_graph.to(device), shuffled(sorted_graph, device)):
            shape = (30, feat) if shared else (30, heads, feat)
            made = tensors(device, shape, (graph.nnz, heads), (40, heads, feat), dtype=dtype)
            x, a, grad = made
            y = spmm(graph, x, a, reduce=reduce)
            assert y.dtype is dtype
            assert y.shape == (40, heads, feat)
            found = torch.autograd.grad(y, (x, a), grad.detach())
            wide = [one.detach().cpu().double().requires_grad_() for one in made]
            exact = naive(graph, *wide[:2], reduce=reduce)
            wanted = torch.autograd.grad(exact, wide[:2], wide[2].detach())
            eps = torch.finfo(dtype).eps
            for one, mine in zip((y, *found), (exact, *wanted), strict=True):
                assert (one.detach().cpu().double() - mine).abs().max() <= 40 * eps * 8


@pytest.mark.parametrize("shared", [False, True], ids=["features of each", "of all"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_all_gradients_and_their_gradients(device, reduce, shared):
    graph = shuffled(make_graph(7, 6, 30), device)
    shape = (6, 3) if shared else (6, 2, 3)
    x, a, r, c = tensors(device, shape, (graph.nnz, 2), (7,), (6,))

    def run(x, a, r, c):
        return spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)

    exact = naive(graph, *(one.detach().cpu() for one in (x, a, r, c)), reduce=reduce)
    assert torch.allclose(run(x, a, r, c).detach().cpu(), exact)
    assert gradcheck(run, (x, a, r, c), nondet_tol=0)
    assert gradgradcheck(run, (x, a, r, c), nondet_tol=0)
    assert gradcheck(lambda x, a: spmm(graph, x, a, reduce=reduce), (x, a), nondet_tol=0)


def test_dots_of_heads_are_differentiated_by_products_of_heads(device):
    graph = shuffled(make_graph(7, 6, 30), device)
    x, y = tensors(device, (7, 2, 3), (6, 2, 3))
    assert gradcheck(lambda x, y: sddmm(graph, x, y), (x, y), nondet_tol=0)
    assert gradgradcheck(lambda x, y: sddmm(graph, x, y), (x, y), nondet_tol=0)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_heads_that_share_their_weights_are_one_product(device, reduce):
    graph = make_graph(7, 6, 30, device=device, weighted=True)
    x, a = tensors(device, (6, 2, 3), (graph.nnz,))
    for weight in (None, a):
        y = spmm(graph, x, weight, reduce=reduce)
        assert y.shape == (7, 2, 3)
        assert torch.equal(y.flatten(1), spmm(graph, x.flatten(1), weight, reduce=reduce))
    assert gradcheck(lambda x, a: spmm(graph, x, a, reduce=reduce), (x, a))


def test_nothing_to_multiply(device):
    graph = empty_graph(4, 3, device=device)
    for heads, feat in ((2, 5), (0, 5), (2, 0)):
        x, a = tensors(device, (3, heads, feat), (0, heads))
        y = spmm(graph, x, a)
        assert y.shape == (4, heads, feat)
        assert not y.any()
        y.sum().backward()
        assert x.grad.shape == x.shape
        assert a.grad.shape == a.shape


def test_strides_autocast_and_a_compiler(device):
    graph = make_graph(7, 6, 30, device=device)
    prepare(graph)
    x, a = tensors(device, (6, 3, 4), (graph.nnz, 3), dtype=torch.float32)
    y = spmm(graph, x, a)
    turned = x.detach().transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(spmm(graph, turned, a), y)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        assert spmm(graph, x, a).dtype is torch.bfloat16
    compiled = torch.compile(spmm, fullgraph=True, backend="eager")
    for reduce in ("sum", "mean"):
        found = compiled(graph, x, a, reduce=reduce)
        assert torch.allclose(found, spmm(graph, x, a, reduce=reduce))
    found.sum().backward()
    assert a.grad.shape == a.shape


GRAPH = make_graph(7, 6, 30)
X, A = tensors("cpu", (6, 2, 3), (GRAPH.nnz, 2))
BAD = {
    "heads": ((X[:, :1], A), {}, ShapeError, r"edge_weight has 2 heads but x has 1: give both the"),
    "entries": ((X, A[:3]), {}, ShapeError, r"edge_weight has shape \(3, 2\) but the graph st"),
    "axes": ((X, A[..., None]), {}, ShapeError, r"edge_weight has shape \(\d+, 2, 1\)"),
    "4-D": ((X[None], A), {}, ShapeError, r"x has shape \(1, 6, 2, 3\): give \(rows, feat\) or"),
    "5-D": ((X[:, None, None], A), {}, ShapeError, r"give \(rows, feat\) or \(rows, heads, feat\)"),
    "rows": ((X[:3], A), {}, ShapeError, "x has 3 rows but the graph has 6 columns"),
    "dtype": ((X, A.float()), {}, DtypeError, "edge_weight is torch.float32 but x is torch.float6"),
    "max": ((X, A), {"reduce": "max"}, UnsupportedError, "for one head at a time"),
    "scale": ((X, A), {"row_scale": X[:, 0, 0]}, ShapeError, r"row_scale has shape \(6,\)"),
    "array": ((X.detach().numpy(), A), {}, DtypeError, "x is a ndarray: give a torch.Tensor"),
    "weights": ((X[:, 0], np.ones((7, 2))), {}, DtypeError, "edge_weight is a ndarray: give a t"),
    "list": ((X, [1.0]), {}, DtypeError, "edge_weight is a list: give a torch.Tensor"),
    "sparse": ((X.detach().to_sparse(),), {}, UnsupportedError, "x has layout torch.sparse_coo"),
    "shared": ((X[:4],), {}, ShapeError, r"x has 4 rows .* \(x.shape == \(4, 2, 3\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    args, options, error, text = BAD[case]
    with pytest.raises(error, match=text):
        spmm(GRAPH, *args, **options)
