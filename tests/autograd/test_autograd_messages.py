"""Messages with features of edges in ``sparsefmt.autograd``, against gathering and scattering."""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import (  # noqa: E402
    DTYPES,
    TRANSFORMS,
    empty_graph,
    entries,
    make_graph,
    tensors,
)
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

from sparsefmt import COO, Graph  # noqa: E402
from sparsefmt.autograd import (  # noqa: E402
    edge_combine,
    message_aggregate,
    prepare,
    sddmm,
)
from sparsefmt.errors import (  # noqa: E402
    DtypeError,
    ShapeError,
    UnsupportedError,
)
from sparsefmt.ops import explain  # noqa: E402

MESSAGES, REDUCTIONS, OPS = ("mul", "add", "relu_add", "copy_edge"), ("sum", "mean"), "add sub mul"

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def shuffled_graph(n_rows, n_cols, nnz, *, device, index_dtype=np.int32):
    """The graph of the cases with its edges in no order."""
    coo = make_graph(n_rows, n_cols, nnz, index_dtype=index_dtype).coo
    order = np.random.default_rng(1).permutation(coo.nnz)
    return Graph(COO(coo.row[order], coo.col[order], shape=coo.shape)).to(device)


def graphs(device, *sizes, **options):
    return make_graph(*sizes, device=device, **options), shuffled_graph(
        *sizes, device=device, **options
    )


def naive(graph, x, w, message, reduce):
    rows, cols = entries(graph)
    messages = {
        "mul": lambda: x[cols] * w,
        "add": lambda: x[cols] + w,
        "relu_add": lambda: torch.relu(x[cols] + w),
        "copy_edge": lambda: w,
    }[message]()
    out = w.new_zeros(graph.n_rows, w.shape[1]).index_add(0, rows, messages)
    if reduce == "mean":
        out = out / torch.bincount(rows, minlength=len(out)).clamp(min=1)[:, None]
    return out


def naive_combination(graph, left, right, op):
    rows, cols = entries(graph)
    combine = {"add": torch.add, "sub": torch.sub, "mul": torch.mul}[op]
    return combine(left[rows], right[cols])


def assert_near(found, exact, size, *, terms):
    """``|found - exact| <= terms * eps * size``, where ``size`` sums the absolute messages."""
    eps = torch.finfo(found.dtype).eps
    accumulated = max(eps, torch.finfo(torch.float32).eps * terms)
    bound = (4 * eps + (accumulated if found.dtype.itemsize == 2 else terms * eps)) * size
    excess = (found.detach().cpu().double() - exact).abs() - bound
    assert excess.numel() == 0 or excess.max() <= 4 * torch.finfo(found.dtype).tiny


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("message", MESSAGES)
def test_sums_and_gradients_are_those_of_gathering(device, message, dtype):
    for index_dtype, feat, reduce in itertools.product(
        (np.int32, np.int64), (1, 7, 33), REDUCTIONS
    ):
        for graph in graphs(device, 40, 30, 300, index_dtype=index_dtype):
            x, w, grad = tensors(device, (30, feat), (graph.nnz, feat), (40, feat), dtype=dtype)
            x = None if message == "copy_edge" else x
            given = [one for one in (x, w) if one is not None]
            y = message_aggregate(graph, x, w, message=message, reduce=reduce)
            assert y.dtype is dtype
            found = torch.autograd.grad(y, given, grad.detach())
            wide = [one.detach().cpu().double().requires_grad_() for one in given]
            exact = naive(graph, wide[0], wide[-1], message, reduce)
            wanted = torch.autograd.grad(exact, wide, grad.detach().cpu().double())
            size = [one.detach().abs().requires_grad_() for one in wide]
            largest = naive(graph, size[0], size[-1], message, reduce)
            sizes = torch.autograd.grad(largest, size, grad.detach().cpu().double().abs())
            assert_near(y, exact.detach(), largest.detach(), terms=graph.nnz)
            for one, mine, bound in zip(found, wanted, sizes, strict=True):
                assert_near(one, mine, 2 * bound, terms=graph.nnz)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS.split())
def test_combinations_and_gradients_are_those_of_gathering(device, op, dtype):
    for feat in (1, 7, 33):
        for graph in graphs(device, 40, 30, 300):
            left, right, grad = tensors(
                device, (40, feat), (30, feat), (graph.nnz, feat), dtype=dtype
            )
            found = edge_combine(graph, left, right, op)
            both = torch.autograd.grad(found, (left, right), grad.detach())
            wide = [one.detach().cpu().double().requires_grad_() for one in (left, right)]
            exact = naive_combination(graph, *wide, op)
            wanted = torch.autograd.grad(exact, wide, grad.detach().cpu().double())
            size = [one.detach().abs().requires_grad_() for one in wide]
            largest = naive_combination(graph, *size, "add" if op == "sub" else op)
            sizes = torch.autograd.grad(largest, size, grad.detach().cpu().double().abs())
            assert_near(found, exact.detach(), largest.detach(), terms=1)
            for one, mine, bound in zip(both, wanted, sizes, strict=True):
                assert_near(one, mine, 2 * bound, terms=graph.nnz)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("message", MESSAGES)
def test_gradients_agree_with_finite_differences_twice(device, message, reduce):
    for graph in graphs(device, 6, 4, 14):
        x, w = tensors(device, (4, 2), (graph.nnz, 2))

        def function(x, w):
            return message_aggregate(graph, x, w, message=message, reduce=reduce)  # noqa: B023

        first = x.detach() if message == "copy_edge" else x
        for inputs in ((first, w), (first, w.detach()), (x.detach(), w)):
            if any(one.requires_grad for one in inputs):
                assert gradcheck(function, inputs, nondet_tol=0)
                assert gradgradcheck(function, inputs, nondet_tol=0)


@pytest.mark.parametrize("op", [*OPS.split(), "dot"])
def test_gradients_of_combinations_agree_with_finite_differences_twice(device, op):
    for graph in graphs(device, 6, 4, 14):
        left, right = tensors(device, (6, 2), (4, 2))

        def function(left, right):
            return edge_combine(graph, left, right, op)  # noqa: B023

        for inputs in ((left, right), (left, right.detach()), (left.detach(), right)):
            assert gradcheck(function, inputs, nondet_tol=0)
            assert gradgradcheck(function, inputs, nondet_tol=0)


def test_third_gradients_are_those_of_gathering(device):
    graph = shuffled_graph(6, 4, 14, device=device)
    x, w = tensors(device, (4, 2), (graph.nnz, 2))

    def third(function, x, w):
        y = function(x, w).pow(3).sum()
        for _ in range(2):
            y = sum(one.pow(2).sum() for one in torch.autograd.grad(y, (x, w), create_graph=True))
        return torch.autograd.grad(y, (x, w))

    for message in ("mul", "add", "relu_add"):
        mine = third(lambda x, w, m=message: message_aggregate(graph, x, w, message=m), x, w)
        there = [one.detach().cpu().requires_grad_() for one in (x, w)]
        wanted = third(lambda x, w, m=message: naive(graph, x, w, m, "sum"), *there)
        for one, other in zip(mine, wanted, strict=True):
            torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (4, 3)])
def test_empty_graphs_give_zeros(device, shape, reduce):
    graph = empty_graph(*shape, device=device)
    for message in MESSAGES:
        x, w = tensors(device, (shape[1], 4), (0, 4))
        y = message_aggregate(graph, x, w, message=message, reduce=reduce)
        y.sum().backward()
        assert y.shape == (shape[0], 4)
        assert not y.any()
        assert x.grad is None or not x.grad.any()
        assert w.grad.shape == (0, 4)
    left, right = tensors(device, (shape[0], 4), (shape[1], 4))
    for op in OPS.split():
        found = edge_combine(graph, left, right, op)
        found.sum().backward()
        assert found.shape == (0, 4)
        assert not left.grad.any()


def test_no_features_are_features_too(device):
    graph = make_graph(6, 5, 20, device=device)
    for message in MESSAGES:
        x, w = tensors(device, (5, 0), (graph.nnz, 0))
        y = message_aggregate(graph, x, w, message=message)
        y.sum().backward()
        assert y.shape == (6, 0)
        assert w.grad.shape == (graph.nnz, 0)
    left, right = tensors(device, (6, 0), (5, 0))
    edge_combine(graph, left, right, "mul").sum().backward()
    assert left.grad.shape == (6, 0)


@pytest.mark.parametrize("message", MESSAGES)
def test_strides_change_nothing(device, message):
    graph = shuffled_graph(20, 12, 90, device=device)
    wide, edges, grad = tensors(device, (24, 40), (graph.nnz, 40), (20, 8), grad=False)
    views = [wide[::2, 5:13], wide[:12, ::5], wide[:8, :12].T, wide[:1, :8].expand(12, 8)]
    for view in views:
        pairs = [
            [x.detach().requires_grad_() for x in pair]
            for pair in ((view, edges[:, 3:11]), (view.contiguous(), edges[:, 3:11].contiguous()))
        ]
        (x, w), copies = pairs
        y = message_aggregate(graph, x, w, message=message)
        z = message_aggregate(graph, *copies, message=message)
        torch.testing.assert_close(y, z)
        y.backward(grad.T.contiguous().T)
        z.backward(grad)
        for one, other in zip((x, w), copies, strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(one.grad, other.grad)


def test_nan_and_infinity_go_through_a_relu_as_in_torch(device):
    nan, inf = float("nan"), float("inf")
    graph = Graph(COO([0, 0, 1, 1], [0, 1, 2, 3], shape=(3, 4))).to(device)
    x = torch.tensor([[nan], [1.0], [-inf], [2.0]], device=device)
    w = torch.tensor([[1.0], [-1.0], [1.0], [-3.0]], device=device)
    both = [one.requires_grad_() for one in (x, w)]
    found = message_aggregate(graph, *both, message="relu_add")
    mine = torch.autograd.grad(found.sum(), both)
    there = [one.detach().cpu().requires_grad_() for one in both]
    exact = naive(graph, *there, "relu_add", "sum")
    torch.testing.assert_close(found.cpu(), exact, equal_nan=True)
    for one, other in zip(mine, torch.autograd.grad(exact.sum(), there), strict=True):
        torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("message", MESSAGES)
def test_a_step_compiles_as_one_graph(device, message, reduce):
    graph = shuffled_graph(9, 6, 40, device=device)
    prepare(graph)

    def step(x, w, left):
        y = message_aggregate(graph, x, w.sin(), message=message, reduce=reduce)
        return message_aggregate(graph, x, edge_combine(graph, y * left, x, "mul"))

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    given = tensors(device, (6, 4), (graph.nnz, 4), (9, 4))
    for function in (step, compiled):
        y = function(*given)
        found = [y, *torch.autograd.grad(y.square().sum(), given)]
        if function is step:
            wanted = found
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused(device, name):
    graph = make_graph(9, 6, 40, device=device)
    x, w, left = tensors(device, (6, 4), (graph.nnz, 4), (9, 4), grad=False)
    for function in (
        lambda x: message_aggregate(graph, x, w, message="relu_add"),
        lambda x: edge_combine(graph, left, x),
    ):
        with pytest.raises(UnsupportedError, match="cannot pass through"):
            TRANSFORMS[name](function, x)


def test_autocast_narrows_messages(device):
    graph = shuffled_graph(9, 6, 40, device=device)
    x, w, left = tensors(device, (6, 4), (graph.nnz, 4), (9, 4), dtype=torch.float32)
    narrow = torch.bfloat16
    with torch.autocast(device, dtype=narrow):
        y = message_aggregate(graph, x, w, message="relu_add")
        s = edge_combine(graph, left, x)
        double = message_aggregate(graph, x.double(), w.double())
    assert (y.dtype, s.dtype, double.dtype) == (narrow, narrow, torch.float64)
    (y.float().sum() + s.float().sum()).backward()
    assert all(one.grad.dtype is torch.float32 for one in (x, w, left))


def test_half_gradients_of_a_mean_are_rounded_once():
    """A row of 80 000 entries: 1 / degree is subnormal in float16."""
    k = 80_000
    graph = Graph(COO(np.zeros(k, int), np.arange(k), shape=(1, k)))
    x, w = (torch.full((k, 2), 60.0, dtype=torch.half, requires_grad=True) for _ in range(2))
    y = message_aggregate(graph, x, w, reduce="mean")
    dx, dw = torch.autograd.grad(y, (x, w), torch.full((1, 2), 32.0, dtype=torch.half))
    for one in (dx, dw):
        assert float(one.detach()[0, 0]) == pytest.approx(60 * 32 / k, rel=1e-3)


def test_only_what_gradients_read_is_kept():
    graph = make_graph(9, 6, 40)
    x, w = tensors("cpu", (6, 4), (graph.nnz, 4))
    for message, kept in (("mul", True), ("add", False), ("relu_add", True), ("copy_edge", False)):
        y = message_aggregate(graph, x, w, message=message)
        assert all((one is not None) == kept for one in y.grad_fn.saved_tensors)


def test_an_edge_index_takes_the_place_of_a_graph(device):
    edge_index = torch.tensor([[0, 1, 2, 3, 0], [1, 0, 2, 2, 3]], device=device)
    graph = Graph.from_edge_index(edge_index, num_nodes=4)
    x, w = tensors(device, (4, 3), (5, 3), dtype=torch.float32)
    for message in MESSAGES:
        found = message_aggregate(edge_index, x, w, message=message)
        assert torch.equal(found, message_aggregate(graph, x, w, message=message))
    assert torch.equal(edge_combine(edge_index, x, x, "sub"), edge_combine(graph, x, x, "sub"))
    assert torch.equal(edge_combine(edge_index, x, x, "sub"), x[edge_index[1]] - x[edge_index[0]])


def test_products_summed_up_are_those_of_sddmm(device):
    graph = shuffled_graph(9, 6, 40, device=device)
    left, right = tensors(device, (9, 4), (6, 4))
    assert torch.equal(edge_combine(graph, left, right, "dot"), sddmm(graph, left, right))


def test_results_repeat_bit_by_bit(device):
    graph = shuffled_graph(60, 30, 2000, device=device)
    x, w = tensors(device, (30, 33), (graph.nnz, 33), dtype=torch.float32)

    def once():
        y = message_aggregate(graph, x, w, message="relu_add")
        return [y, *torch.autograd.grad(y.square().sum(), (x, w))]

    torch.use_deterministic_algorithms(True)
    try:
        first = once()
        for _ in range(3):
            assert all(map(torch.equal, first, once()))
    finally:
        torch.use_deterministic_algorithms(False)


G = make_graph(9, 6, 40)
X, W, L = (torch.ones(n, 4) for n in (6, G.nnz, 9))
BAD = {
    "message": ((X, W), {"message": "max"}, UnsupportedError, "message is \"max\"|is 'max': use"),
    "max": ((X, W), {"reduce": "max"}, UnsupportedError, r"spmm\(\.\.\., reduce=.max.\) takes"),
    "reduce": ((X, W), {"reduce": "prod"}, UnsupportedError, "reduce is 'prod': use"),
    "no x": ((None, W), {}, DtypeError, "x is a NoneType"),
    "rows": ((L, W), {}, ShapeError, "x has 9 rows but the graph has 6 columns"),
    "edges": ((X, X), {}, ShapeError, r"edge_features has shape \(6, 4\) but the graph stores"),
    "vector": ((X, W[:, 0]), {}, ShapeError, r"edge_features\[:, None\] for instance"),
    "width": (
        (X, W[:, :3]),
        {},
        ShapeError,
        r"edge_features has shape \(\d+, 3\) but x has \(6, 4\)",
    ),
    "dtype": ((X, W.double()), {}, DtypeError, "edge_features is torch.float64 but x is"),
    "integers": ((X, W.long()), {}, DtypeError, "edge_features is torch.int64"),
    "array": ((X, W.numpy()), {}, DtypeError, "edge_features is a ndarray"),
    "sparse": ((X, W.to_sparse()), {}, UnsupportedError, "has layout torch.sparse_coo"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case):
    args, options, error, text = BAD[case]
    with pytest.raises(error, match=text):
        message_aggregate(G, *args, **options)


def test_bad_combinations_are_refused():
    with pytest.raises(UnsupportedError, match="op is 'div': use"):
        edge_combine(G, L, X, "div")
    with pytest.raises(ShapeError, match=r"right has shape \(6, 3\) but left has \(9, 4\)"):
        edge_combine(G, L, X[:, :3])
    with pytest.raises(DtypeError, match=r"right is torch.float64 but left is torch.float32"):
        edge_combine(G, L, X.double())
    with pytest.raises(ShapeError, match="left has 6 rows but the graph has 9 rows"):
        edge_combine(G, X, L)


def test_explain_knows_messages(device):
    graph = make_graph(9, 6, 40, device=device)
    x, w, left = tensors(device, (6, 4), (graph.nnz, 4), (9, 4), grad=False)
    assert explain("message_aggregate", graph, x, w).chosen.deterministic
    assert explain("edge_combine", graph, left, x).chosen.deterministic


def test_an_edge_index_without_features_of_vertices_is_refused():
    edges, features = torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 3)
    with pytest.raises(ShapeError, match="nothing says how many vertices"):
        message_aggregate(edges, None, features, message="copy_edge")


def test_gates_that_are_shut_let_no_infinite_gradient_through():
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    x = torch.full((2, 3), -5.0, requires_grad=True)
    y = message_aggregate(graph, x, torch.zeros(2, 3), message="relu_add")
    for again in (True, False):
        (dx,) = torch.autograd.grad(
            y, x, torch.full_like(y, torch.inf), create_graph=again, retain_graph=True
        )
        assert (dx == 0).all()
