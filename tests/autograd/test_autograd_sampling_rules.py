"""The rules that the ops of samples keep: autocast, tracers, library ops, and what is refused."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import RULES, TRANSFORMS, check_rules, make_graph, side_of, tensors  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from sparsefmt import DeviceError, DtypeError, Graph, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt.autograd import prepare, sampled_aggregate  # noqa: E402
from sparsefmt.autograd import sampling as autograd_sampling  # noqa: E402
from sparsefmt.autograd.engine import library  # noqa: E402
from sparsefmt.ops.engine import table  # noqa: E402

STRATEGIES = ("bucket", "fastrand", "random")

# torch's tracer itself instantiates the class that it warns of.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
OPS = torch.ops.sparsefmt


# Autocast


def test_autocast_narrows(device):
    graph = make_graph(9, 6, 60, device=device)
    given = tensors(device, (6, 4), (graph.nnz,), (9,), (6,), dtype=torch.float32)
    cast = [one.detach().bfloat16().requires_grad_() for one in given]

    def call(x, a, r, c):
        scales = {"row_scale": r, "col_scale": c}
        return sampled_aggregate(graph, x, 3, a, strategy="random", seed=3, mean=True, **scales)

    for scaled in (False, True):
        some, same = (
            [*all_[:2], *(all_[2:] if scaled else (None, None))] for all_ in (given, cast)
        )
        with torch.autocast(device, dtype=torch.bfloat16):
            y = call(*some)
            double = sampled_aggregate(graph, given[0].double(), 3)
        assert (y.dtype, double.dtype) == (torch.bfloat16, torch.float64)
        assert torch.equal(y, call(*same))
        wanted = [one for one in some if one is not None]
        found = torch.autograd.grad(y.float().square().sum(), wanted)
        assert all(one.dtype is torch.float32 for one in found)


def test_ops_called_directly_obey_autocast(device):
    graph = make_graph(9, 6, 60, device=device)
    A = structure(side_of(graph, False))
    x, a = tensors(device, (6, 4), (graph.nnz,), dtype=torch.float32, grad=False)
    others = None, None, None, 3, "bucket", False, False
    with torch.autocast(device, dtype=torch.bfloat16):
        y = OPS.spmm_sampled(*A, x, a, *others)
        double = OPS.spmm_sampled(*A, x.double(), None, *others)
    assert (y.dtype, double.dtype) == (torch.bfloat16, torch.float64)
    assert torch.equal(y, OPS.spmm_sampled(*A, x.bfloat16(), a.bfloat16(), *others))


# Library ops and tracers


@pytest.fixture
def forget_what_was_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def structure(side):
    return side.indptr, side.indices, side.n_cols, side.plan


@RULES
def test_every_op_keeps_the_rules_of_library_ops(device, index_dtype, traced):
    graph = make_graph(6, 5, 60, device=device, index_dtype=index_dtype)
    A = structure(side_of(graph, False))
    x, grad, a, r, c = tensors(
        device, (5, 3), (6, 3), (graph.nnz,), (6,), (5,), dtype=torch.float32, grad=False
    )
    seed = torch.tensor([5], device=device)
    calls = []
    for values, others in (
        (None, (None, None, None, 2, "bucket", False, False)),
        (a, (r, c, seed, 3, "random", True, False)),
        (a, (r, None, None, 2**31 - 1, "fastrand", False, True)),
    ):
        calls += [
            (OPS.spmm_sampled, (*A, x, values, *others)),
            (OPS.spmm_sampled_dx, (*A, grad, values, *others)),
            (OPS.spmm_sampled_da, (*A, x, grad, *others)),
        ]
    names = {row.name for row in table.operations() if "sampled" in row.name}
    assert {op for op, _ in calls} == {getattr(OPS, name) for name in names}
    check_rules(calls, traced)


def gradients(function, given):
    y = function(*given)
    return [y, *torch.autograd.grad(y.square().sum(), given)]


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.covering("strategy", "dynamic", one_in=2)
@pytest.mark.usefixtures("forget_what_was_compiled")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_compiles_as_one_graph(device, strategy, dynamic):
    graph = make_graph(9, 6, 60, device=device)
    given = tensors(device, (6, 4), (graph.nnz,), (9,), (6,))

    def closure(x, a, r, c):
        options = {"strategy": strategy, "seed": torch.full((1,), 9, device=device)}
        y = sampled_aggregate(graph, x, 3, a, **options, row_scale=r, col_scale=c)
        scales = {"row_scale": r.detach(), "col_scale": c.detach()}
        return y.relu() + sampled_aggregate(graph, x, 2, a, strategy=strategy, seed=3, **scales)

    compiled = torch.compile(closure, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_same(gradients(compiled, given), gradients(closure, given))
    with torch.no_grad():
        assert_same([compiled(*given)], [closure(*given)])


@pytest.mark.gpu
@pytest.mark.usefixtures("forget_what_was_compiled")
def test_it_compiles_with_inductor():
    graph = make_graph(9, 6, 60, device="cuda")
    given = tensors("cuda", (6, 4), (graph.nnz,), dtype=torch.float32)

    def closure(x, a):
        return sampled_aggregate(graph, x, 3, a, strategy="random", seed=3, mean=True).relu()

    compiled = torch.compile(closure, fullgraph=True)
    assert_same(gradients(compiled, given), gradients(closure, given))


@pytest.mark.usefixtures("forget_what_was_compiled")
def test_what_is_compiled_draws_anew(device):
    graph = make_graph(60, 50, 2000, device=device)
    given = tensors(device, (50, 4), (graph.nnz,))

    def closure(x, a):
        return sampled_aggregate(graph, x.sin(), 4, a, strategy="random", rescale=True)

    compiled = torch.compile(closure, fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(*given), compiled(*given))
    torch.manual_seed(3)
    found = gradients(compiled, given)
    torch.manual_seed(3)
    assert_same(found, gradients(closure, given))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert compiled(*[one.detach().float() for one in given]).dtype is torch.bfloat16


@pytest.mark.usefixtures("forget_what_was_compiled")
def test_prepared_graphs_share_one_compilation(device):
    """The second graph makes sizes symbolic; from there on nothing is compiled again."""
    counter = CompileCounterWithBackend("aot_eager")

    def argument(graph, x, a):
        return sampled_aggregate(graph, x, 3, a, strategy="fastrand", mean=True).relu()

    compiled = torch.compile(argument, fullgraph=True, backend=counter)
    for n in range(6, 12):
        graph = make_graph(n, n - 2, 10 * n, device=device)
        prepare(graph)
        given = tensors(device, (n - 2, 4), (graph.nnz,))
        found = gradients(lambda *some, graph=graph: compiled(graph, *some), given)
        assert_same(found, gradients(lambda *some, graph=graph: argument(graph, *some), given))
    assert counter.frame_count == 2


def test_leaves_of_a_tracer_have_shapes():
    graph = make_graph(9, 6, 60)
    with FakeTensorMode() as mode:
        fake = pytree.tree_map(mode.from_tensor, graph)
        x, a = torch.empty(6, 4, requires_grad=True), torch.empty(graph.nnz, requires_grad=True)
        y = sampled_aggregate(fake, x, 3, a, strategy="random")
        y.sum().backward()
    assert (y.shape, x.grad.shape, a.grad.shape) == ((9, 4), (6, 4), (graph.nnz,))


def test_calls_in_eager_mode_on_a_gpu_need_no_dispatcher(monkeypatch):
    """A structure that looks as if it were on one."""
    side = side_of(make_graph(9, 6, 60), False)
    side.structure = "A"
    x, seed = torch.rand(6, 4), torch.tensor([3])
    args = x, None, None, None, seed, 3, "random", True, False
    assert library.direct(args)
    monkeypatch.setattr(library, "call", lambda row, *given, **beside: (*given, beside))
    for op in (autograd_sampling.SPMM_SAMPLED, autograd_sampling.SPMM_SAMPLED_DA):
        assert op(side, *args) == ("A", *args, {})
    op = autograd_sampling.SPMM_SAMPLED_DX
    assert op(side, *args) == ("A", *args, {"indptr": side.indptr})
    with torch.profiler.profile(acc_events=True):
        assert not library.direct(args)


# What is refused


GRAPH = make_graph(9, 6, 60)
X, Y, A = torch.rand(6, 4), torch.rand(9, 4), torch.rand(GRAPH.nnz)


def refused(**options):
    return sampled_aggregate(GRAPH, X, options.pop("width", 3), **options)


REFUSED = [
    (lambda: sampled_aggregate(GRAPH.csr, X, 3), DtypeError, "graph is a CSR: give a sparsefmt.Gr"),
    (
        lambda: sampled_aggregate(GRAPH, Y, 3),
        ShapeError,
        "x has 9 rows but the graph has 6 columns",
    ),
    (lambda: sampled_aggregate(GRAPH, X.numpy(), 3), DtypeError, "x is a ndarray: give a torch.Te"),
    (lambda: sampled_aggregate(GRAPH, X, 3, A[1:]), ShapeError, "edge_weight has shape .* stores"),
    (lambda: sampled_aggregate(GRAPH, X, A), DtypeError, "width is a Tensor: give an integer"),
    (lambda: refused(width=0), ShapeError, "width is 0: give the most entries of a row"),
    (lambda: refused(width=-(10**9999)), ShapeError, "width is less than any int64: give the most"),
    (lambda: refused(width=True), DtypeError, "width is True: give an integer"),
    (
        lambda: refused(width=torch.tensor(True)),
        DtypeError,
        "width is tensor\\(True\\): give an integer",
    ),
    (lambda: refused(width=2.0), DtypeError, "width is 2.0: give an integer"),
    (lambda: refused(width=None), DtypeError, "width is None: give an integer"),
    (
        lambda: refused(strategy="first"),
        UnsupportedError,
        """strategy is 'first': use "bucket", "fastrand" or "random".""",
    ),
    (lambda: refused(strategy=None), UnsupportedError, "strategy is None: use"),
    (lambda: refused(strategy=["random"]), UnsupportedError, r"strategy is \['random'\]: use"),
    (lambda: refused(mean=1), DtypeError, "mean is 1: give True or False"),
    (lambda: refused(rescale=None), DtypeError, "rescale is None: give True or False"),
    (
        lambda: refused(mean=True, rescale=True),
        UnsupportedError,
        "mean and rescale are both True: .* leave one out",
    ),
    (lambda: refused(seed=1.0), DtypeError, "seed is 1.0: give an integer, or an int64 tensor"),
    (lambda: refused(seed=False), DtypeError, "seed is False: give an integer"),
    (lambda: refused(seed=torch.ones(1)), DtypeError, r"seed is torch.float32: .* seed.long\(\)"),
    (
        lambda: refused(seed=torch.tensor([1, 2])),
        ShapeError,
        r"seed has shape \(2,\): give one int",
    ),
    (
        lambda: refused(seed=torch.tensor(1, device="meta")),
        DeviceError,
        "seed is on meta but the graph is on cpu: make it there",
    ),
    (lambda: refused(row_scale=X[:, 0]), ShapeError, r"row_scale has shape \(6,\).* \(9, 6\)"),
    (lambda: refused(col_scale=X[:, 0].half()), DtypeError, "col_scale is torch.float16"),
]


@pytest.mark.parametrize(("call", "kind", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_bad_input_is_refused_with_the_argument_named(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


def test_any_integer_is_a_width():
    same = refused(width=np.int64(3)), refused(width=torch.tensor(3)), refused(width=np.uint8(3))
    assert all(torch.equal(one, refused()) for one in same)


def test_a_second_derivative_is_refused():
    x, a = X.clone().requires_grad_(), A.clone().requires_grad_()
    y = sampled_aggregate(GRAPH, x, 3, a, strategy="random")
    first = torch.autograd.grad(y.square().sum(), (x, a), create_graph=True)
    again = torch.autograd.grad(y.square().sum(), (x, a))
    assert all(map(torch.equal, first, again))
    for one in first:
        with pytest.raises(
            UnsupportedError, match="sampled_aggregate cannot be differentiated aga"
        ):
            torch.autograd.grad(one.sum(), x, retain_graph=True)


FUNCTIONS = {
    "features": (lambda x: sampled_aggregate(GRAPH, x, 3), X),
    "weights": (lambda a: sampled_aggregate(GRAPH, X, 3, a), A),
    "scale": (lambda c: sampled_aggregate(GRAPH, X, 3, col_scale=c), X[:, 0]),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms_are_refused_with_what_to_do_instead(name, transform, grad):
    function, value = FUNCTIONS[name]
    with pytest.raises(UnsupportedError, match=r"use torch\.autograd\.grad"):
        TRANSFORMS[transform](function, value.clone().requires_grad_(grad))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tensors_in_the_place_of_a_graph_will_do(strategy):
    parts = pytree.tree_map(lambda leaf: torch.nn.Parameter(leaf, requires_grad=False), GRAPH)
    assert not isinstance(parts, Graph)
    x, a = X.clone().requires_grad_(), A.clone().requires_grad_()
    results = []
    for graph in (parts, GRAPH):
        y = sampled_aggregate(graph, x, 3, a, strategy=strategy, seed=4)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, a))])
    assert all(map(torch.equal, *results))


@pytest.mark.gpu
def test_tensors_on_the_cpu_are_refused_for_a_graph_on_a_gpu():
    graph = GRAPH.to("cuda")
    for call in (
        lambda: sampled_aggregate(graph, X, 3),
        lambda: sampled_aggregate(graph, X.cuda(), 3, A),
        lambda: sampled_aggregate(graph, X.cuda(), 3, seed=torch.tensor(3)),
    ):
        with pytest.raises(DeviceError, match="is on cpu but the graph is on cuda:0"):
            call()
