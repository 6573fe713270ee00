"""The library ops under ``torch.library.opcheck`` and ``torch.compile``; ``Graph`` as a pytree."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import TRANSFORMS, make_graph  # noqa: E402
from laws.calls import assert_same  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from sparsefmt import COO, Graph, ShapeError, UnsupportedError, autograd  # noqa: E402
from sparsefmt.autograd import matmul, maxk_aggregate, prepare, sddmm, spmm  # noqa: E402

# torch's tracer itself instantiates the class that it warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def forget_what_was_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(function, *inputs):
    inputs = [one.detach().requires_grad_() for one in inputs]
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_a_tensor_may_be_given_twice(device, reduce):
    graph = make_graph(9, 9, 40, device=device)

    def closure(x, s):
        x, s = x.sin(), s.exp()
        y = spmm(graph, x, reduce=reduce, row_scale=s, col_scale=s)
        if reduce == "sum":
            y = y + maxk_aggregate(graph, x, 3, reduce=reduce, row_scale=s, col_scale=s)
        return y + spmm(graph, x, sddmm(graph, x, x))

    x, s = (torch.randn(shape, device=device, dtype=torch.float64) for shape in ((9, 4), 9))
    compiled = torch.compile(closure, fullgraph=True, backend="aot_eager")
    assert_same(gradients(compiled, x, s), gradients(closure, x, s))


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


def by_head(x):
    return x.view(-1, 3, 12)


def some(x, n, *heads):
    """The first numbers of x, (n, *heads)."""
    return x.view(-1)[: n * (heads[0] if heads else 1)].view(n, *heads)


#: Functions of a graph of 20 vertices and 60 edges, whose arguments are views of x, (20, 36).
VIEWS = {
    "own number": lambda g, x: autograd.aggregate_with_own(g, x, x[0, :1], some(x, 60)),
    "dot flat": lambda g, x: autograd.dot_aggregate(g, x, x[:, :36], x, some(x, 60, 1)),
    "gat flat": lambda g, x: autograd.gat_aggregate(g, x, x[:, 0], x[:, :1], some(x, 60)),
    "gat of one": lambda g, x: autograd.gat_aggregate(
        g, x[:, None], x[:, :1], x[:, 0], some(x, 60, 1)
    ),
    "vectors flat": lambda g, x: autograd.gat_of_vectors(
        g, x, x[0], x[:1], None, x[:, 0], x[2], self_loops=True
    ),
    "gatv2 flat": lambda g, x: autograd.gatv2_aggregate(g, x, x, x[0], some(x, 60, 1)),
    "gatv2 of one": lambda g, x: autograd.gatv2_aggregate(g, x, x, x[:1], some(x, 60)),
    "operands": lambda g, x: matmul.operands(g, x, some(x, 60), x[:, 0], x[:, 1])[1],
    "maxk": lambda g, x: autograd.maxk_aggregate(
        g, x[:, 1:], 5, some(x, 60), row_scale=x[:, 0], col_scale=x[:, 1]
    ),
    "transposed": lambda g, x: autograd.spmm(g, x, some(x, 60)),  # values in the user's order
}
#: Calls at every commit, one for each path; all functions compile in ``tests/laws``, with heads.
PATHS = {"gat flat", "operands", "maxk", "transposed"}


def graph_of_sixty(device):
    rng = np.random.default_rng(0)
    graph = Graph(COO(*rng.integers(0, 20, (2, 60)), shape=(20, 20))).to(device)
    prepare(graph)
    return graph


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.grid] * (name not in PATHS)) for name in VIEWS]
)
def test_views_compile_with_symbolic_sizes(device, name):
    """Some of whose sizes become numbers while it is traced, and others stay symbols.

    In float64: compiled code adds gradients up in another order, which float32 tells by 1e-4.
    """
    graph, function = graph_of_sixty(device), VIEWS[name]
    graph = graph.transposed if name == "transposed" else graph
    x = torch.randn(20, 36, dtype=torch.float64, device=device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    steps = [gradients(lambda x, run=run: run(graph, x), x) for run in (compiled, function)]
    assert_same(*steps)


UNFIT = {
    "vector": lambda g, x: autograd.gatv2_aggregate(g, by_head(x), by_head(x), x[0].view(2, 18)),
    "scores": lambda g, x: autograd.gat_aggregate(g, by_head(x), x[:, :2], x[:, :3]),
    "rows": lambda g, x: autograd.spmm(g, x[1:], some(x, 60)),
    "values": lambda g, x: autograd.spmm(g, x, some(x, 59)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.grid] * (name != "values")) for name in UNFIT]
)
def test_what_does_not_fit_is_refused_with_symbolic_sizes(name):
    graph, x, function = graph_of_sixty("cpu"), torch.randn(20, 36), UNFIT[name]
    with pytest.raises(ShapeError) as eager:
        function(graph, x)
    with pytest.raises(ShapeError) as traced:
        torch.compile(function, backend="aot_eager", dynamic=True)(graph, x)
    assert str(traced.value) == str(eager.value)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_graph_is_a_node_whose_leaves_are_its_tensors(device, weighted):
    graph = make_graph(9, 6, 40, weighted=weighted, device=device)
    leaves, spec = pytree.tree_flatten({"graph": graph})
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert pytree.tree_unflatten(leaves, spec)["graph"] is graph
    copy = pytree.tree_map(torch.clone, graph)
    assert isinstance(copy, Graph)
    assert copy is not graph
    assert pytree.tree_structure(copy) == pytree.tree_structure(graph)


DRAWING = {
    "sample": lambda g, x: autograd.sampled_aggregate(g, x, 3, strategy="random", rescale=True),
    "gat_of_vectors": lambda g, x: autograd.gat_of_vectors(
        *(g, by_head(x), x[0].view(3, 12), x[:1].view(3, 12), some(x, 60, 3), x[:, :3]),
        **{"dropout": 0.5, "self_loops": True},
    ),
}


@pytest.mark.parametrize("name", DRAWING)
def test_what_is_compiled_draws_anew(device, name):
    graph, function = graph_of_sixty(device), DRAWING[name]
    x = torch.randn(20, 36, dtype=torch.float64, device=device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(graph, x), compiled(graph, x))
    steps = []
    for run in (compiled, function):
        torch.manual_seed(3)
        steps.append(gradients(lambda x, run=run: run(graph, x), x))
    assert_same(*steps)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert compiled(graph, x.float()).dtype is torch.bfloat16
