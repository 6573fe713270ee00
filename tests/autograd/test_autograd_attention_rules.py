"""The rules that the ops of attention keep: shapes, autocast, tracers, and what is refused."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from attention_cases import KINDS, call, from_vectors, loop_graph, shapes_of  # noqa: E402
from autograd_cases import RULES, check_rules, empty_graph, make_graph, side_of, tensors  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from sparsefmt.autograd import attention, dot_aggregate, gat_aggregate, prepare  # noqa: E402
from sparsefmt.autograd.attention import GAT_BACKWARD, gat_of_vectors  # noqa: E402
from sparsefmt.autograd.engine import library, precision  # noqa: E402
from sparsefmt.autograd.engine.precision import bf16_is_allowed  # noqa: E402
from sparsefmt.ops.attention import rows as attention_rows  # noqa: E402
from sparsefmt.ops.attention.score import Options  # noqa: E402
from sparsefmt.ops.engine.table import Op  # noqa: E402

# torch's tracer itself instantiates the class that it warns of.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
OPS = torch.ops.sparsefmt


# Shapes


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (4, 3), (4, 4)])
def test_empty_graphs(device, shape, loops):
    """Without entries a row is 0, with its loop alone it has the vertex's own features."""
    if loops and shape[0] != shape[1]:
        return
    graph = empty_graph(*shape, device=device)
    for kind in KINDS:
        given = tensors(device, *shapes_of(kind, graph, (2,), 4))
        y = call(kind, graph, given, self_loops=loops)
        found = torch.autograd.grad(y.sum(), given)
        assert y.shape == (shape[0], 2, 4)
        at = {"gat": 0, "gatv2": 0, "dot": 2, "dot of keys": 1}[kind]
        torch.testing.assert_close(y, given[at] if loops else torch.zeros_like(y))
        assert [one.shape for one in found] == [one.shape for one in given]
        for i, one in enumerate(found):
            torch.testing.assert_close(one, torch.full_like(one, float(loops and i == at)))


@pytest.mark.parametrize("loops", [False, True])
def test_no_features_and_no_heads(device, loops):
    graph = loop_graph(device=device)
    for kind, heads, feat in itertools.product(KINDS, ((), (2,), (0,)), (0, 3)):
        if feat and heads != (0,):
            continue
        given = tensors(device, *shapes_of(kind, graph, heads, feat))
        y = call(kind, graph, given, self_loops=loops, dropout=0.1)
        assert y.shape == (7, *heads, feat)
        for one, mine in zip(given, torch.autograd.grad(y.sum(), given), strict=True):
            assert mine.shape == one.shape
            assert not mine.any()
    vectors = tensors(device, (7, 2, 0), (2, 0), (2, 0))
    y = gat_of_vectors(graph, *vectors, self_loops=loops)
    assert [one.shape for one in torch.autograd.grad(y.sum(), vectors)] == [
        (7, 2, 0),
        *[(2, 0)] * 2,
    ]


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


@pytest.mark.parametrize("kind", KINDS)
def test_strides_change_nothing(device, kind):
    graph = make_graph(20, 12, 90, device=device)
    shapes = shapes_of(kind, graph, (2,), 8)
    (grad,) = tensors(device, (20, 2, 8), grad=False)
    twice = tensors(device, *((2 * n, *rest) for n, *rest in shapes), grad=False)
    last = tensors(device, *(tuple(reversed(shape)) for shape in shapes), grad=False)
    for views in (
        [one[::2] for one in twice],
        [one.permute(*range(one.dim())[::-1]) for one in last],
    ):
        some = [one.detach().requires_grad_() for one in views]
        same = [one.detach().clone().contiguous().requires_grad_() for one in views]
        y, z = (call(kind, graph, given, dropout=0.2, seed=1) for given in (some, same))
        assert torch.equal(y, z)
        uneven = grad.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        found = torch.autograd.grad(y, some, uneven), torch.autograd.grad(z, same, grad)
        assert all(map(torch.equal, *found))


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


def test_an_expanded_gradient_is_taken(device):
    graph = make_graph(20, 12, 90, device=device)
    for kind in KINDS:
        given = tensors(device, *shapes_of(kind, graph, (2,), 4))
        y = call(kind, graph, given)
        found = torch.autograd.grad(y.sum(), given, retain_graph=True)
        same = torch.autograd.grad(y, given, torch.ones_like(y))
        assert all(map(torch.equal, found, same))


# Autocast


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_narrows_features_and_widens_scores(device, kind):
    graph = loop_graph(30, device=device)
    given = tensors(device, *shapes_of(kind, graph, (2,), 8), dtype=torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = call(kind, graph, given)
        double = call(kind, graph, [one.double() for one in given])
    assert (y.dtype, double.dtype) == (torch.bfloat16, torch.float64)
    wide = [one.shape[-1] != 8 or (kind == "gatv2" and i == 2) for i, one in enumerate(given)]
    cast = [
        one.detach().to(torch.float32 if w else torch.bfloat16).requires_grad_()
        for one, w in zip(given, wide, strict=True)
    ]
    assert torch.equal(y, call(kind, graph, cast))
    found = torch.autograd.grad(y.float().square().sum(), given)
    assert all(one.dtype is torch.float32 for one in found)
    narrow = torch.autograd.grad(call(kind, graph, cast).float().square().sum(), cast)
    for mine, theirs in zip(found, narrow, strict=True):
        assert torch.equal(mine, theirs.float())


def test_a_layer_obeys_autocast(device):
    graph = loop_graph(30, device=device)
    h, source, target, edges = tensors(
        device, (30, 2, 8), (2, 8), (2, 8), (graph.nnz, 2), dtype=torch.float32
    )
    with torch.autocast(device, dtype=torch.bfloat16):
        y = gat_of_vectors(graph, h, source, target, edges)
    cast = [one.detach().bfloat16() for one in (h, source, target)]
    assert torch.equal(y, gat_of_vectors(graph, *cast, edges.detach()))
    found = torch.autograd.grad(y.float().square().sum(), (h, source, target, edges))
    assert all(one.dtype is torch.float32 for one in found)


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
    graph = loop_graph(device=device, index_dtype=index_dtype)
    rows, columns = side_of(graph, False), side_of(graph, True)
    A = structure(rows)
    both = *A, columns.indptr, columns.indices, columns.plan, columns.perm
    sizes = (7, 2, 3), (7, 2), (7, 2), (graph.nnz, 2), (7, 2), (2, 3), (2, 3), (7, 2, 3)
    given = tensors(device, *sizes, dtype=torch.float32, grad=False)
    h, el, er, edges, own, source, target, grad = given
    seed = torch.tensor([5], device=device)
    calls = []
    bare = h, el, er, None, None, None, 0.2, 0.0, False
    for args in (bare, (h, el, er, edges, own, seed, 0.2, 0.3, True)):
        found = OPS.gat_with_statistics(*A, *args)
        calls += [(op, (*A, *args)) for op in (OPS.gat, OPS.gat_with_statistics)]
        for of_edges in (False, True):
            kept = *both, grad, *found, of_edges
            calls.append((OPS.gat_backward, (*kept, *args)))
    forward = OPS.gat_of_vectors, OPS.gat_of_vectors_with_statistics
    wide = h, source, target, edges, own, seed, 0.2, 0.3, True
    none = h[:, 0], source[0], target[0], None, None, None, 0.2, 0.0, False
    flat = h.view(7, 6), source, target, *none[3:]  # as a layer has its heads
    for args, bias in ((wide, None), (wide, source.flatten()), (none, source[0]), (flat, None)):
        args = *args[:3], bias, *args[3:]
        calls += [(op, (*A, *args)) for op in forward]
        found = forward[1](*A, *args)
        for of_edges in (False, True):
            saved = *both, grad.view(-1, 6)[:, : args[0][0].numel()].reshape(args[0].shape), *found
            calls.append((OPS.gat_of_vectors_backward, (*saved, of_edges, *args)))
    for args in (
        (h, grad, None, source, None, None, 0.2, 1.0, 0.0, False),
        (h, grad, None, None, edges, seed, 0.0, 0.5, 0.3, True),
        (h, grad, h.sin(), None, edges, None, 0.0, 0.5, 0.0, False),
    ):
        found = OPS.attend_with_statistics(*A, *args)
        calls += [(OPS.attend, (*A, *args)), (OPS.attend_with_statistics, (*A, *args))]
        for of_edges in (False, True):
            calls.append((OPS.attend_backward, (*both, grad, *found, of_edges, *args)))
    rows = vars(attention_rows).values()
    names = {row.name for row in rows if isinstance(row, Op) and row.library}
    assert {op for op, _ in calls} == {getattr(OPS, name) for name in names}
    check_rules(calls, traced)


def test_ops_called_directly_obey_autocast(device):
    graph = loop_graph(device=device)
    A = structure(side_of(graph, False))
    h, el, source, edges = tensors(
        device, (7, 2, 3), (7, 2), (2, 3), (graph.nnz, 2), dtype=torch.float32, grad=False
    )
    numbers = None, 0.2, 0.0, False
    with torch.autocast(device, dtype=torch.bfloat16):
        x, _, kept = OPS.gat_of_vectors_with_statistics(
            *A, h, source, source, source, edges, None, *numbers
        )
        y, *stats = OPS.gat_with_statistics(*A, h, el, el, edges, None, *numbers)
        z = OPS.attend(*A, h, h, None, source, edges, None, 0.2, 1.0, 0.0, False)
        double = OPS.gat(*A, *(one.double() for one in (h, el, el)), None, None, *numbers)
    narrow, wide = torch.bfloat16, torch.float32
    dtypes = [one.dtype for one in (y, stats[0], z, x, stats[1], kept, double)]
    assert dtypes == [narrow, narrow, narrow, narrow, wide, wide, torch.float64]
    expected = OPS.gat(*A, h.to(narrow), el, el, edges, None, *numbers)
    assert torch.equal(y, expected)


def gradients(function, given):
    y = function(*given)
    return [y, *torch.autograd.grad(y.square().sum(), given)]


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("forget_what_was_compiled")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_compiles_as_one_graph(device, kind, dynamic):
    graph = loop_graph(device=device)
    given = tensors(device, *shapes_of(kind, graph, (2,), 4))

    def closure(*given):
        seed = torch.full((1,), 9, device=device)
        y = call(kind, graph, given, dropout=0.2, seed=3, self_loops=True)
        return (y + call(kind, graph, given[:-1], dropout=0.3, seed=seed)).sin()

    compiled = torch.compile(closure, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_same(gradients(compiled, given), gradients(closure, given))
    with torch.no_grad():
        assert_same([compiled(*given)], [closure(*given)])


@pytest.mark.usefixtures("forget_what_was_compiled")
def test_a_layer_compiles_and_draws_anew(device):
    graph = loop_graph(device=device)
    given = tensors(device, (7, 2, 4), (1, 2, 4), (1, 2, 4), (graph.nnz, 2), (7, 2))

    def layer(*given):
        return gat_of_vectors(graph, *given, dropout=0.5, self_loops=True)

    def biased(h, source, target, edges, bias):
        seed = torch.full((1,), 9, device=device)
        options = Options(seed, 0.2, 0.5, True)
        return from_vectors(graph, options, h, source, target, edges, None, bias=bias)

    alike = torch.compile(biased, fullgraph=True, backend="aot_eager")
    some = [*given[:4], torch.rand(8, device=device, dtype=torch.float64, requires_grad=True)]
    assert_same(gradients(alike, some), gradients(biased, some))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    first, second = compiled(*given), compiled(*given)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    found = gradients(compiled, given)
    torch.manual_seed(3)
    assert_same(found, gradients(layer, given))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert compiled(*[one.detach().float() for one in given]).dtype is torch.bfloat16


@pytest.mark.usefixtures("forget_what_was_compiled")
def test_prepared_graphs_share_one_compilation(device):
    """The second graph makes sizes symbolic; from there on nothing is compiled again."""
    counter = CompileCounterWithBackend("aot_eager")

    def argument(graph, *given):
        return gat_aggregate(graph, *given) + dot_aggregate(graph, given[0], given[0])

    compiled = torch.compile(argument, fullgraph=True, backend=counter)
    for n in range(6, 12):
        graph = make_graph(n, n, 10 * n, device=device)
        prepare(graph)
        given = tensors(device, (n, 2, 4), (n, 2), (n, 2), (graph.nnz, 2))
        found = gradients(lambda *a, graph=graph: compiled(graph, *a), given)
        assert_same(found, gradients(lambda *a, graph=graph: argument(graph, *a), given))
    assert counter.frame_count == 2


def test_calls_in_eager_mode_on_a_gpu_need_no_dispatcher(monkeypatch):
    """A structure that looks as if it were on one: numbers and flags are no hindrance."""
    graph = loop_graph()
    rows, columns = side_of(graph, False), side_of(graph, True)
    rows.structure, columns.structure = "A", "T"
    h, el = torch.rand(7, 4), torch.rand(7)
    args = h, el, el, None, None, None, 0.2, 0.0, False
    monkeypatch.setattr(library, "call", lambda *args: args)
    found = GAT_BACKWARD(rows, columns, h, h, h, h, False, *args)
    assert found[:4] == (attention_rows.GAT_BACKWARD, "A", "T", columns.perm)
    assert library.direct(args)
    with torch.profiler.profile(acc_events=True):
        assert not library.direct(args)
