"""The library ops under ``torch.library.opcheck`` and ``torch.compile``; ``Graph`` as a pytree."""

from importlib import import_module

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import RULES, TRANSFORMS, check_rules, make_graph  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from sparsefmt import COO, Graph, ShapeError, UnsupportedError, autograd  # noqa: E402
from sparsefmt.autograd import edge_softmax, matmul, maxk, maxk_aggregate, prepare, sddmm, spmm  # noqa: E402
from sparsefmt.ops.engine.table import Op  # noqa: E402

# torch's tracer itself instantiates the class that it warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
OPS = torch.ops.sparsefmt
REDUCTIONS = ("sum", "mean", "max", "min")
#: Whose ops are tried here; attention, samples and norms have tests of their own.
ROOMS = (
    "matmul.api",
    "matmul.aggregation",
    "edges.api",
    "messages.api",
    "cbsr.api",
)


@pytest.fixture(autouse=True)
def forget_what_was_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def structure(side):
    return side.indptr, side.indices, side.n_cols, side.plan


@RULES
def test_every_op_keeps_the_rules_of_library_ops(device, index_dtype, traced):
    graph = make_graph(6, 5, 20, device=device, index_dtype=index_dtype)
    prepare(graph)
    kept = graph._slots.torch[0]
    A, T, perm = structure(kept.rows), structure(kept.columns), kept.columns.perm
    x, y, r, c, a = (torch.randn(n, device=device) for n in ((5, 3), (6, 3), 6, 5, graph.nnz))
    out, arg = OPS.spmm_arg(*A, x, a, r, c, "max")
    s, w = (torch.randn(graph.nnz, feat, device=device) for feat in (2, 3))
    columns, kept = OPS.maxk(x, 2)
    calls = [
        (OPS.spmm, (*A, x, None, None, None, None, "sum")),
        (OPS.spmm, (*T, y, a, perm, c, r, "mean")),
        (OPS.spmm, (*T, y[:, None].repeat(1, 2, 1), s, perm, c, r, "mean")),
        (OPS.spmm, (*A, x, s, None, None, None, "sum")),
        (OPS.spmm_arg, (*A, x, a, r, c, "max")),
        (OPS.spmm_arg, (*A, x, None, None, None, "min")),
        (OPS.spmm_arg_dx, (*T, perm, out, arg, a, r, c)),
        (OPS.spmm_arg_da, (*A, x, out, arg, None, None)),
        (OPS.sddmm, (*A, y, x, r, None)),
        (OPS.sddmm, (*A, y[:, None], x[:, None], None, None)),
        (OPS.aggregate_backward, (*T, x, y, a, perm, r, c)),
        (OPS.aggregate_backward, (*T, x, y, a, perm, None, None)),
        (OPS.edge_softmax, (*A, s)),
        (OPS.edge_softmax_backward, (*A, s.softmax(1), s)),
        (OPS.message_aggregate, (*A, x, w, None, "relu_add", "sum")),
        (OPS.message_aggregate, (*T, y, w, perm, "mul", "mean")),
        (OPS.message_aggregate, (*A, None, w, None, "copy_edge", "mean")),
        (OPS.message_aggregate_backward, (*T, x, w, y, perm, r, "relu_add", True)),
        (OPS.message_aggregate_backward, (*T, x, w, y, perm, None, "mul", False)),
        (OPS.message_aggregate_backward, (*T, None, None, y, perm, None, "add", True)),
        (OPS.edge_combine, (*A, y, x, None, None, "sub")),
        (OPS.edge_combine, (*A, y, None, None, r, "left")),
        (OPS.maxk, (x, 2)),
        (OPS.maxk, (torch.randn(5, 300, device=device), 7)),
        (OPS.spgemm, (*A, columns, kept, 3, None, None, None, "mean")),
        (OPS.spgemm, (*A, columns, kept, 3, a, r, c, "sum")),
        (OPS.sspmm, (*T, columns, y, a, perm, r, c)),
        (OPS.sspmm, (*T, columns, y, None, perm, None, None)),
        (OPS.sspmm_outer, (*A, columns, y, a, r, c)),
        (OPS.sddmm_cbsr, (*A, y, columns, kept, r, c)),
        (OPS.cbsr_to_dense, (columns, kept, 3)),
        (OPS.dense_to_cbsr, (x, columns)),
    ]
    assert {op for op, _ in calls} == {getattr(OPS, name) for name in dir(OPS) if name in _names()}
    check_rules(calls, traced)


def test_ops_called_directly_obey_autocast(device):
    graph = make_graph(6, 5, 20, device=device)
    prepare(graph)
    A = structure(graph._slots.torch[0].rows)
    x, y = torch.randn(5, 3, device=device), torch.randn(6, 3, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = OPS.spmm(*A, x, None, None, None, None, "sum")
        s = OPS.sddmm(*A, y, x, None, None)
        p = OPS.edge_softmax(*A, s)
        columns, kept = OPS.maxk(x, 2)
        z = OPS.spgemm(*A, columns, kept, 3, None, None, None, "sum")
        double = OPS.spmm(*A, x.double(), None, None, None, None, "sum")
    narrow, wide = torch.bfloat16, torch.float32
    dtypes = [one.dtype for one in (out, s, z, p, kept, double)]
    assert dtypes == [narrow, narrow, narrow, wide, wide, torch.float64]


def _names():
    rooms = (import_module(f"sparsefmt.ops.{name}") for name in ROOMS)
    return {one.name for room in rooms for one in vars(room).values() if isinstance(one, Op)}


def gradients(function, *inputs):
    inputs = [one.detach().requires_grad_() for one in inputs]
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_spmm_compiles_as_one_graph(device, reduce):
    check_spmm_compiles(device, reduce, "aot_eager")


def check_spmm_compiles(device, reduce, backend):
    graph = make_graph(9, 6, 40, device=device)

    def closure(x, a, r, c):
        return spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c).relu()

    inputs = [torch.randn(n, device=device) for n in ((6, 4), (graph.nnz,), (9,), (6,))]
    compiled = torch.compile(closure, fullgraph=True, backend=backend)
    assert_same(gradients(compiled, *inputs), gradients(closure, *inputs))
    with torch.no_grad():
        assert_same([compiled(*inputs)], [closure(*inputs)])


@pytest.mark.gpu
def test_spmm_compiles_with_inductor():
    check_spmm_compiles("cuda", "mean", "inductor")


@pytest.mark.parametrize("heads", [(), (2,)])
def test_attention_compiles_as_one_graph(device, heads):
    graph = make_graph(9, 6, 40, device=device)

    def closure(x, y):
        return edge_softmax(graph, sddmm(graph, x, y)) * 2

    x, y = (torch.randn(n, *heads, 4, device=device) for n in (9, 6))
    compiled = torch.compile(closure, fullgraph=True, backend="aot_eager")
    assert_same(gradients(compiled, x, y), gradients(closure, x, y))


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a_tensor_may_be_given_twice(device, reduce):
    graph = make_graph(9, 9, 40, device=device)

    def closure(x, s):
        x, s = x.sin(), s.exp()
        y = spmm(graph, x, reduce=reduce, row_scale=s, col_scale=s)
        if reduce in ("sum", "mean"):
            y = y + maxk_aggregate(graph, x, 3, reduce=reduce, row_scale=s, col_scale=s)
        return y + spmm(graph, x, sddmm(graph, x, x))

    x, s = torch.randn(9, 4, device=device), torch.randn(9, device=device)
    compiled = torch.compile(closure, fullgraph=True, backend="aot_eager")
    assert_same(gradients(compiled, x, s), gradients(closure, x, s))


REFUSED = "NEITHER_TORCH_FUNC_NOR_FORWARD_MODE"


@pytest.mark.covering("name", "transform", one_in=2)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["spmm", "max", "sddmm", "softmax", "maxk", "aggregate"])
def test_transforms_within_compiled_code_are_refused(device, name, transform):
    graph = make_graph(9, 6, 40, device=device)
    x, y, s = (torch.rand(*shape, device=device) for shape in ((6, 4), (9, 4), (graph.nnz,)))
    function, value = {
        "spmm": (lambda x: spmm(graph, x), x),
        "max": (lambda x: spmm(graph, x, reduce="max"), x),
        "sddmm": (lambda x: sddmm(graph, y, x), x),
        "softmax": (lambda s: edge_softmax(graph, s), s),
        "maxk": (lambda x: maxk(x, 2), x),
        "aggregate": (lambda x: maxk_aggregate(graph, x, 2), x),
    }[name]

    def whole(x):
        return TRANSFORMS[transform](function, x)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=REFUSED):
        torch.compile(whole, fullgraph=True, backend="aot_eager")(value)
    with pytest.raises(UnsupportedError, match="cannot pass through"):
        torch.compile(whole, backend="aot_eager")(value)


def test_compiled_code_drops_no_tangent_that_comes_later(device):
    graph = make_graph(9, 6, 40, device=device)
    x = torch.rand(6, 4, device=device)
    for fullgraph, error in ((True, torch._dynamo.exc.Unsupported), (False, UnsupportedError)):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: spmm(graph, x), fullgraph=fullgraph, backend="aot_eager")
        assert_same([compiled(x)], [spmm(graph, x)])
        with pytest.raises(error):
            TRANSFORMS["forward_ad"](compiled, x)


class Layer(torch.nn.Module):
    def __init__(self, graph):
        super().__init__()
        self.graph, self.linear = graph, torch.nn.Linear(4, 3)

    def forward(self, x):
        return spmm(self.graph, self.linear(x), reduce="mean").relu()


def test_a_module_that_holds_a_graph_compiles(device):
    layer = Layer(make_graph(9, 6, 40, weighted=False, device=device)).to(device)
    x = torch.randn(6, 4, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(gradients(compiled, x), gradients(layer, x))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_same(gradients(compiled, x), gradients(layer, x))


def test_prepared_graphs_share_one_compilation(device):
    """The second graph makes sizes symbolic; from there on nothing is compiled again."""
    counter = CompileCounterWithBackend("aot_eager")

    def argument(graph, x, a):
        return spmm(graph, x, a).relu()

    compiled = torch.compile(argument, fullgraph=True, backend=counter)
    for n in range(6, 16):
        graph = make_graph(n, n - 2, 10 * n, device=device)
        prepare(graph)
        x, a = torch.randn(n - 2, 4, device=device), torch.randn(graph.nnz, device=device)
        found = gradients(lambda x, a, graph=graph: compiled(graph, x, a), x, a)
        assert_same(found, gradients(lambda x, a, graph=graph: argument(graph, x, a), x, a))
    assert counter.frame_count == 2


def test_prepared_graphs_share_one_compilation_of_maxk(device):
    counter = CompileCounterWithBackend("aot_eager")

    def argument(graph, x, a):
        return maxk_aggregate(graph, x, 2, a).relu()

    compiled = torch.compile(argument, fullgraph=True, backend=counter)
    for n in range(6, 12):
        graph = make_graph(n, n - 2, 10 * n, device=device)
        prepare(graph)
        x, a = torch.randn(n - 2, 4, device=device), torch.randn(graph.nnz, device=device)
        found = gradients(lambda x, a, graph=graph: compiled(graph, x, a), x, a)
        assert_same(found, gradients(lambda x, a, graph=graph: argument(graph, x, a), x, a))
    assert counter.frame_count == 2


@pytest.mark.parametrize("flipped", [False, True])
def test_values_of_edges_compile_in_the_users_order(device, flipped):
    counter = CompileCounterWithBackend("aot_eager")

    def argument(graph, x, w):
        return spmm(graph, x, w).relu()

    compiled = torch.compile(argument, fullgraph=True, backend=counter)
    rng = np.random.default_rng(0)
    for n in range(6, 12):
        row, col = rng.integers(0, n, 5 * n), rng.integers(0, n - 2, 5 * n)
        graph = Graph(COO(row, col, shape=(n, n - 2))).to(device)
        graph = graph.transposed if flipped else graph
        if n > 6:  # the first one is made while it is traced
            prepare(graph)
        x, w = torch.randn(graph.n_cols, 4, device=device), torch.randn(graph.nnz, device=device)
        found = gradients(lambda x, w, graph=graph: compiled(graph, x, w), x, w)
        assert_same(found, gradients(lambda x, w, graph=graph: argument(graph, x, w), x, w))
    assert counter.frame_count == 2


def test_sizes_may_be_symbolic_from_the_start(device):
    graph = make_graph(9, 6, 40, device=device)
    compiled = torch.compile(
        lambda x: spmm(graph, x), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for feat in (3, 5, 8):
        x = torch.randn(6, feat, device=device)
        assert_same(gradients(compiled, x), gradients(lambda x: spmm(graph, x), x))


def by_head(x):
    return x.view(-1, 3, 12)


def first_row(x):
    return x[0].view(3, 12)


def some(x, n, *heads):
    """The first numbers of x, (n, *heads)."""
    return x.view(-1)[: n * (heads[0] if heads else 1)].view(n, *heads)


#: Each public function of a graph of 20 vertices and 60 edges, with views of x, (20, 36).
OF_VIEWS = {
    "aggregate_with_own": [
        lambda g, x: autograd.aggregate_with_own(g, x, x[0, :1], some(x, 60)),
        lambda g, x: autograd.aggregate_with_own(g, x, x[:, :1], k=5, row_scale=x[:, 0]),
        lambda g, x: autograd.aggregate_with_own(g, x[:, 1:], x[:, 1:2], without=x[:, :1] > 0),
    ],
    "dot_aggregate": [
        lambda g, x: autograd.dot_aggregate(g, by_head(x), by_head(x), None, some(x, 60, 3)),
        lambda g, x: autograd.dot_aggregate(g, x, x[:, :36], x, some(x, 60, 1)),
    ],
    "edge_combine": [
        lambda g, x: autograd.edge_combine(g, x[:, 1:], x[:, :35], "mul"),
        lambda g, x: autograd.edge_combine(g, x[:, 1:], x[:, :35], "dot"),
    ],
    "edge_softmax": [
        lambda g, x: autograd.edge_softmax(g, some(x, 60)),
        lambda g, x: autograd.edge_softmax(g, some(x, 60, 3)),
    ],
    "gat_aggregate": [
        lambda g, x: autograd.gat_aggregate(g, x, x[:, 0], x[:, :1], some(x, 60)),
        lambda g, x: autograd.gat_aggregate(g, x[:, None], x[:, :1], x[:, 0], some(x, 60, 1)),
        lambda g, x: autograd.gat_aggregate(g, by_head(x), x[:, :3], x[:, 3:6], some(x, 60, 3)),
    ],
    "gat_of_vectors": [
        lambda g, x: autograd.gat_of_vectors(g, by_head(x), first_row(x), x[:1].view(3, 12)),
        lambda g, x: autograd.gat_of_vectors(
            g, by_head(x), by_head(x)[0], by_head(x)[:1], some(x, 60, 3), None, x[1].view(3, 12)
        ),
        lambda g, x: autograd.gat_of_vectors(
            g, x, x[0], x[:1], None, x[:, 0], x[2], self_loops=True
        ),
    ],
    "gatv2_aggregate": [
        lambda g, x: autograd.gatv2_aggregate(g, by_head(x), by_head(x), first_row(x)),
        lambda g, x: autograd.gatv2_aggregate(g, by_head(x), by_head(x), x[0].reshape(3, 12)),
        lambda g, x: autograd.gatv2_aggregate(g, x, x, x[0], some(x, 60, 1)),
        lambda g, x: autograd.gatv2_aggregate(g, x, x, x[:1], some(x, 60)),
    ],
    "gcn_norm": [lambda g, x: autograd.gcn_norm(g, some(x, 60).exp())[1]],
    "message_aggregate": [
        lambda g, x: autograd.message_aggregate(g, x[:, 1:9], some(x, 60, 8), message="relu_add"),
        lambda g, x: autograd.message_aggregate(g, x[:, :8], some(x, 60, 8), reduce="mean"),
    ],
    "maxk": [lambda g, x: autograd.maxk(x[:, 1:], 5)],
    "maxk_aggregate": [
        lambda g, x: autograd.maxk_aggregate(
            g, x[:, 1:], 5, some(x, 60), row_scale=x[:, 0], col_scale=x[:, 1]
        )
    ],
    "operands": [lambda g, x: matmul.operands(g, x, some(x, 60), x[:, 0], x[:, 1])[1]],
    "propagate": [
        lambda g, x: autograd.propagate(
            g, x, x[:, 0].detach(), x[:, :1].detach(), without=x[:, 1:2] > 0, bias=x[0]
        )
    ],
    "sampled_aggregate": [
        lambda g, x: autograd.sampled_aggregate(
            g, x, 3, some(x, 60), row_scale=x[:, 0], col_scale=x[:, 1]
        )
    ],
    "sddmm": [
        lambda g, x: autograd.sddmm(g, x[:, 1:], x[:, :35]),
        lambda g, x: autograd.sddmm(g, by_head(x), by_head(x)),
    ],
    "spmm": [
        lambda g, x: autograd.spmm(g, x[:, 1:], some(x, 60), row_scale=x[:, 0]),
        lambda g, x: autograd.spmm(g, x, some(x, 60), reduce="max", col_scale=x[:, 0]),
    ],
}
#: Public names that take no tensor to compute with.
OTHERS = {"as_graph", "prepare", "relational_aggregate"}  # the last breaks the graph


def test_every_function_is_tried_with_views():
    assert {*OF_VIEWS} | OTHERS == {*autograd.__all__, "operands"}


def graph_of_sixty(device):
    rng = np.random.default_rng(0)
    graph = Graph(COO(*rng.integers(0, 20, (2, 60)), shape=(20, 20))).to(device)
    prepare(graph)
    return graph


@pytest.mark.parametrize("name", OF_VIEWS)
def test_views_compile_with_symbolic_sizes(device, name):
    """Some of whose sizes become numbers while it is traced, and others stay symbols.

    In float64: compiled code adds gradients up in another order, which float32 tells by 1e-4.
    """
    graph, x = graph_of_sixty(device), torch.randn(20, 36, dtype=torch.float64, device=device)
    for function in OF_VIEWS[name]:
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
        found = gradients(lambda x, compiled=compiled: compiled(graph, x), x)
        assert_same(found, gradients(lambda x, function=function: function(graph, x), x))


@pytest.mark.parametrize(
    "function",
    [
        lambda g, x: autograd.gatv2_aggregate(g, by_head(x), by_head(x), x[0].view(2, 18)),
        lambda g, x: autograd.gat_aggregate(g, by_head(x), x[:, :2], x[:, :3]),
        lambda g, x: autograd.spmm(g, x[1:], some(x, 60)),
        lambda g, x: autograd.spmm(g, x, some(x, 59)),
    ],
)
def test_what_does_not_fit_is_refused_with_symbolic_sizes(function):
    graph, x = graph_of_sixty("cpu"), torch.randn(20, 36)
    with pytest.raises(ShapeError) as eager:
        function(graph, x)
    with pytest.raises(ShapeError) as found:
        torch.compile(function, backend="aot_eager", dynamic=True)(graph, x)
    assert str(found.value) == str(eager.value)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_graph_is_a_node_whose_leaves_are_its_tensors(device, weighted):
    graph = make_graph(9, 6, 40, weighted=weighted, device=device)
    leaves, spec = pytree.tree_flatten({"graph": graph})
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert pytree.tree_unflatten(leaves, spec)["graph"] is graph
    copy = pytree.tree_map(torch.clone, graph)
    assert isinstance(copy, Graph)
    assert copy is not graph
    x = torch.randn(6, 4, device=device, dtype=torch.float64, requires_grad=True)
    assert_same(gradients(lambda x: spmm(copy, x), x), gradients(lambda x: spmm(graph, x), x))
    assert pytree.tree_structure(copy) == pytree.tree_structure(graph)


def test_a_node_keeps_the_users_order():
    graph = make_graph(9, 6, 40).transposed
    copy = pytree.tree_map(torch.clone, graph)
    assert (copy.csr_perm == graph.csr_perm).all()
    assert (copy.csc_perm == graph.csc_perm).all()


@pytest.mark.parametrize("sort", [False, True])
def test_tensors_in_the_place_of_a_graph_keep_the_users_order(sort):
    graph = Graph(COO([2, 0, 0], [0, 1, 2], shape=(3, 4)))
    graph = Graph(graph.csr) if sort else graph
    # No plain tensors, so that no graph can be made of them.
    tensors = pytree.tree_map(lambda leaf: torch.nn.Parameter(leaf, requires_grad=False), graph)
    assert not isinstance(tensors, Graph)
    w, x = torch.rand(3), torch.rand(4, 2)
    for one in (tensors, pytree.tree_map(torch.Tensor.clone, tensors)):
        assert torch.equal(spmm(one, x, w), spmm(graph, x, w))


def test_leaves_of_a_tracer_make_tensors_to_compute_with():
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph = make_graph(9, 6, 40)
    with FakeTensorMode() as mode:
        fake = pytree.tree_map(mode.from_tensor, graph)
        y = spmm(fake, torch.empty(6, 4, requires_grad=True))
    assert y.shape == (9, 4)
    assert pytree.tree_structure(pytree.tree_map(lambda _: None, graph)) is not None
