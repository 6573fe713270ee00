"""What every function and library op of torch must satisfy: tracers, autocast, and refusals."""

from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import RULES, TRANSFORMS, check_rules  # noqa: E402
from laws.calls import CALLS, Ops, assert_same, every_call, graph_of  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from sparsefmt import DeviceError, DtypeError, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt.autograd import prepare  # noqa: E402
from sparsefmt.autograd.tensors.prepare import tensors_of  # noqa: E402
from sparsefmt.ops.engine.table import find, operations  # noqa: E402

# torch's tracer itself instantiates the class that it warns of.
pytestmark = [
    pytest.mark.usefixtures("one_thread", "small_work"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
LIBRARY = [op.name for op in operations() if op.library]
every_row = pytest.mark.parametrize("row", LIBRARY)
#: Calls that make a graph, which tracers cannot.
MAKES_GRAPHS = {"gcn_norm with loops", "relational_aggregate mean", "relational_aggregate sum"}
#: One call of each function; the others trace the same code with other options.
FIRST = {call.name.split()[0]: call for call in reversed(CALLS) if call.name not in MAKES_GRAPHS}
#: Functions that tracers follow along different paths.
PATHS = {"spmm", "gat_aggregate", "maxk_aggregate", "sampled_aggregate", "aggregate_with_own"}
#: Those that are compiled as one graph for prepared graphs, which takes 1 s each.
SHARED = PATHS - {"spmm", "gat_aggregate"}


def traced(*names):
    """Parametrise by calls: the first of these functions, and all others in the grid."""
    often = [FIRST[name] for name in names]
    return pytest.mark.parametrize(
        "call",
        [
            pytest.param(call, marks=[pytest.mark.grid] * (call not in often), id=str(call))
            for call in CALLS
            if call.name not in MAKES_GRAPHS
        ],
    )


@pytest.fixture
def forget_what_was_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@cache
def recorded(device, index_dtype):
    """Return of each library op the different calls that steps of functions make of it."""
    results = {name: {} for name in LIBRARY}
    for call in CALLS:
        graph = graph_of(call, 6, 5, 24, device=device, index_dtype=index_dtype)
        args = call.arguments(graph, dtype=torch.float32, device=device)
        torch.use_deterministic_algorithms("relational" not in call.name and not call.atomics)
        with Ops() as ops:
            y = call.run(graph, args).square().sum()
            wanted = call.wanted(args)
            first = torch.autograd.grad(y, wanted, create_graph=call.twice)
            if call.twice:
                total = sum(one.square().sum() for one in first)
                torch.autograd.grad(total, wanted, allow_unused=True)
            call.run(graph, call.leaves(args, grad=False))
        torch.use_deterministic_algorithms(False)
        for op, given in (*ops.calls, *outer_products(graph, ops.calls)):
            given = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, given)
            kinds = [(v.dtype, v.dim()) if isinstance(v, torch.Tensor) else type(v) for v in given]
            results[op.name().split("::")[1]].setdefault(str(kinds), (op, given))
    return {name: list(calls.values()) for name, calls in results.items()}


def outer_products(graph, calls):
    """Return of gradients of kept features the calls that would add up by atomics on a GPU."""
    side = tensors_of(graph).rows
    structure = side.indptr, side.indices, side.n_cols, side.plan
    outer = torch.ops.sparsefmt.sspmm_outer.default
    gradients = (args for op, args in calls if "::sspmm" in op.name())
    return [(outer, (*structure, *args[4:7], *args[8:])) for args in gradients]


@RULES
@every_row
def test_every_op_keeps_the_rules_of_library_ops(device, row, index_dtype, traced):
    calls = recorded(device, index_dtype)[row]
    assert calls, "no call of a function reaches this op"
    check_rules([(op.overloadpacket, args) for op, args in calls], traced)


@pytest.mark.parametrize("row", [name for name in LIBRARY if find(name).narrowed is not None])
def test_ops_called_directly_obey_autocast(device, row):
    """The narrowed arguments of a row become bfloat16, others float32; float64 stays."""
    op = find(row)
    narrow = [{arg.name, "*"} & {*op.narrowed} for arg in op.arguments]
    dtypes = [torch.bfloat16 if each else torch.float32 for each in narrow]
    for call, args in recorded(device, np.int32)[row]:
        head, given = args[: 4 * op.structures], args[4 * op.structures :]
        if dict(zip(op.names, given, strict=False)).get("own") is not None:
            continue  # layers have cast what they add
        half, double = ([v.to(t) if is_floating(v) else v for v in given]
                        for t in (torch.half, torch.double))  # fmt: skip
        wanted = [v.to(t) if is_floating(v) else v for v, t in zip(half, dtypes, strict=False)]
        expected = call(*head, *wanted), call(*head, *double)
        with torch.autocast(device, dtype=torch.bfloat16):
            results = call(*head, *half), call(*head, *double)
        assert_same(pytree.tree_leaves(results), pytree.tree_leaves(expected), rtol=0, atol=0)


def is_floating(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@every_call
def test_autocast_narrows_results_and_leaves_gradients_as_they_are(device, call):
    graph = graph_of(call, 30, 20, 200, device=device)
    args = call.arguments(graph, dtype=torch.float32, device=device, feat=8)
    double = call.arguments(graph, device=device, feat=8)
    with torch.autocast(device, dtype=torch.bfloat16):
        y, z = call.run(graph, args), call.run(graph, double)
    assert (y.dtype, z.dtype) == (torch.bfloat16 if call.narrow else torch.float32, torch.float64)
    assert_same([z], [call.run(graph, double)], rtol=0, atol=0)
    torch.testing.assert_close(y.double(), z, rtol=0.05, atol=0.05 * float(z.detach().abs().max()))
    results = torch.autograd.grad(y.float().square().sum(), call.wanted(args))
    assert {one.dtype for one in results} == {torch.float32}
    for one, other in zip(
        results, torch.autograd.grad(z.square().sum(), call.wanted(double)), strict=True
    ):
        if not call.chooses:
            error = 0.1 * float(other.abs().max())
            torch.testing.assert_close(one.double(), other, rtol=0.1, atol=error)


@pytest.mark.where(lambda call: call.name not in MAKES_GRAPHS)
@every_call
def test_leaves_of_a_tracer_have_shapes(call):
    graph = graph_of(call, 9, 6, 40)
    args = call.arguments(graph)
    shape = call.run(graph, args).shape
    with FakeTensorMode() as mode:
        fake = pytree.tree_map(mode.from_tensor, graph)
        args = {name: mode.from_tensor(value) for name, value in args.items()}
        y = call.run(fake, args)
        y.sum().backward()
    assert y.shape == shape
    assert all(one.grad.shape == one.shape for one in call.wanted(args))


@pytest.mark.covering("call", "dynamic", one_in=2)
@pytest.mark.usefixtures("forget_what_was_compiled")
@pytest.mark.parametrize("dynamic", [None, True])
@traced(*(FIRST.keys() - SHARED))
def test_it_compiles_as_one_graph(device, call, dynamic):
    """Of a graph that it closes over and that was not prepared, with views as arguments."""
    graph = graph_of(call, 9, 6, 40, device=device)
    args = call.arguments(graph, device=device)

    def function(*values):
        wider = [torch.cat([v, v], -1)[..., : v.shape[-1]] for v in values]
        return call.run(graph, dict(zip(args, wider, strict=True)))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    steps = []
    for run in (function, compiled):
        y = run(*args.values())
        steps.append([y, *torch.autograd.grad(y.square().sum(), call.wanted(args))])
    assert_same(*steps)
    with torch.no_grad():
        assert_same([compiled(*args.values())], [function(*args.values())])


@pytest.mark.usefixtures("forget_what_was_compiled")
@traced(*PATHS)
def test_prepared_graphs_share_one_compilation(device, call):
    """The second graph makes sizes symbolic; from there on nothing is compiled again."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call.run, fullgraph=True, backend=counter)
    for n in range(8, 12):
        graph = graph_of(call, n, n - 2, 10 * n, device=device)
        prepare(graph)
        args = call.arguments(graph, device=device)
        y, z = (run(graph, args).square().sum() for run in (compiled, call.run))
        steps = [[one, *torch.autograd.grad(one, call.wanted(args))] for one in (y, z)]
        assert_same(*steps)
    assert counter.frame_count == 2 if call.graph else counter.frame_count <= 2


@pytest.mark.gpu
@pytest.mark.usefixtures("forget_what_was_compiled")
@pytest.mark.parametrize("name", ["spmm", "sampled_aggregate", "gat_aggregate"])
def test_it_compiles_with_inductor(name):
    call = FIRST[name]
    graph = graph_of(call, 9, 6, 40, device="cuda")
    args = call.arguments(graph, dtype=torch.float32, device="cuda")

    def function(*values):
        return call.run(graph, dict(zip(args, values, strict=True))).relu()

    compiled = torch.compile(function, fullgraph=True)
    assert_same([compiled(*args.values())], [function(*args.values())])


MEND = "use torch.autograd.grad"


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@every_call
def test_transforms_are_refused_with_what_to_do_instead(device, call, transform, grad):
    graph = graph_of(call, 9, 6, 40, device=device)
    args = call.arguments(graph, device=device, grad=False)
    call.run(graph, args)  # what graphs build of types of edges cannot be made within a transform
    for name in args:
        if name not in (*call.constants, "own"):  # torch multiplies by the factors of own parts
            value = args[name].clone().requires_grad_(grad)
            with pytest.raises(UnsupportedError, match=MEND):
                TRANSFORMS[transform](lambda v, n=name: call.run(graph, {**args, n: v}), value)


@pytest.mark.covering("call", "transform", one_in=len(FIRST))  # one call of each transform
@pytest.mark.usefixtures("forget_what_was_compiled")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", FIRST.values(), ids=str)
def test_transforms_within_compiled_code_are_refused(device, call, transform):
    graph = graph_of(call, 9, 6, 40, device=device)
    args = call.arguments(graph, device=device, grad=False)
    first = next(iter(args))

    def function(value):
        return TRANSFORMS[transform](lambda v: call.run(graph, {**args, first: v}), value)

    refused = "NEITHER_TORCH_FUNC_NOR_FORWARD_MODE"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=refused):
        torch.compile(function, fullgraph=True, backend="aot_eager")(args[first])
    with pytest.raises(UnsupportedError, match="cannot pass through"):
        torch.compile(function, backend="aot_eager")(args[first])


@every_call
def test_a_tangent_that_only_the_gradient_has_is_refused(device, call):
    graph = graph_of(call, 9, 6, 40, device=device)
    args = call.arguments(graph, device=device)
    y = call.run(graph, args)
    with torch.autograd.forward_ad.dual_level():
        grad = torch.autograd.forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(UnsupportedError, match=MEND):
            torch.autograd.grad(y, call.wanted(args), grad)


#: What is wrong with a tensor: the tensor, and the error.  The first is of all, others of floats.
FAULTS = {
    "array": (lambda v: v.detach().cpu().numpy(), DtypeError, " is a ndarray: give a torch.Tensor"),
    "number": (lambda v: 2.0, DtypeError, " is a float"),
    "integers": (lambda v: v.long(), DtypeError, " is torch.int64: give"),
    "complex": (lambda v: v.to(torch.complex64), DtypeError, " is torch.complex64: give"),
    "sparse": (lambda v: v.detach().to_sparse(), UnsupportedError, " has layout torch.sparse_coo"),
    "elsewhere": (lambda v: v.to("meta"), DeviceError, " is on meta but the graph is on"),
    "rows": (lambda v: torch.cat([v, v]), ShapeError, " has "),
    "axes": (lambda v: v[..., None, None, None], ShapeError, " has shape "),
    "dtype": (lambda v: v.double(), DtypeError, " is torch.float64"),
}


def missing_faults(call):
    """Return the faults of tensors that need another tensor, or a graph, to differ from."""
    alone = {"dtype"} if len(call.shapes) == 1 else set()
    return alone if call.graph else {"dtype", "rows", "elsewhere"}


@pytest.mark.where(lambda call, fault: fault not in missing_faults(call))
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("call", FIRST.values(), ids=str)
def test_what_is_wrong_is_refused_with_the_argument_named(device, call, fault):
    make, error, text = FAULTS[fault]
    graph = graph_of(call, 9, 6, 40, device=device)
    args = call.arguments(graph, dtype=torch.float32, device=device, grad=False)
    for name, value in args.items():
        wrong = make(value)
        if not value.is_floating_point() or (fault == "dtype" and name in ("own", "bias")):
            continue  # which may have any dtype
        with pytest.raises(error, match=name + text):
            call.run(graph, {**args, name: wrong})


@pytest.mark.gpu
@pytest.mark.where(lambda call: call.graph)
@every_call
def test_tensors_on_another_device_are_refused(call):
    graph = graph_of(call, 9, 6, 40)
    args = call.arguments(graph, dtype=torch.float32, grad=False)
    there = {name: value.cuda() for name, value in args.items()}
    for name in args:
        with pytest.raises(DeviceError, match=f"{name} is on cuda:0 but the graph is on cpu"):
            call.run(graph, {**args, name: there[name]})
        with pytest.raises(DeviceError, match=f"{name} is on cpu but the graph is on cuda:0"):
            call.run(graph.to("cuda"), {**there, name: args[name]})


@pytest.mark.where(lambda call: call.graph)
@pytest.mark.parametrize("call", FIRST.values(), ids=str)
def test_what_is_no_graph_is_refused(call):
    graph = graph_of(call, 9, 6, 40)
    args = call.arguments(graph)
    for wrong, kind in ((graph.csr, "CSR"), (None, "NoneType"), (3, "int")):
        with pytest.raises(DtypeError, match=f"graph is a {kind}: give a sparsefmt.Graph"):
            call.run(wrong, args)
