"""What every public function of ``autograd`` must satisfy: results, gradients, order of edges."""

import gc
import io
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_cases import assert_near as near_largest  # noqa: E402
from autograd_cases import DTYPES  # noqa: E402
from laws.calls import CALLS, NO_OPERATIONS, SHAPES, Ops, assert_same, every_call, graph_of, ramp  # noqa: E402
from torch.autograd import forward_ad, gradcheck, gradgradcheck  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from sparsefmt import COO, Graph, UnsupportedError, autograd  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread", "small_work"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
#: Of atomics that add up to 100 terms of about 1 in another order each time.
ATOMICS = 100 * torch.finfo(torch.float64).eps


def calls(**traits):
    """Parametrise by the calls of these traits."""
    chosen = [call for call in CALLS if all(getattr(call, k) == v for k, v in traits.items())]
    return pytest.mark.parametrize("call", chosen, ids=str)


def may_be_deterministic(call, device):
    """Return False for what adds up by atomics, or by cuBLAS, which asks for an environment."""
    return device == "cpu" or not (call.atomics or call.name.startswith("relational"))


def assert_within(result, exact, size, *, terms):
    """Check ``|result - exact| <= terms * eps * size``, ``size`` sums the absolute products."""
    eps = torch.finfo(result.dtype).eps
    accumulated = max(eps, torch.finfo(torch.float32).eps * terms)
    bound = (4 * eps + (accumulated if result.dtype.itemsize == 2 else terms * eps)) * size
    excess = (result.detach().cpu().double() - exact).abs() - bound
    assert excess.numel() == 0 or excess.max() <= 4 * torch.finfo(result.dtype).tiny


def oracle_step(call, graph, args, *, absolute=False):
    """Return result and gradients of the oracle, in float64 on the CPU."""
    wide = {name: value.detach().cpu() for name, value in args.items()}
    wide = {name: v.double() if v.is_floating_point() else v for name, v in wide.items()}
    if absolute:
        wide = {name: v.abs() if v.is_floating_point() else v for name, v in wide.items()}
    leaves = call.leaves(wide)
    sums = {"reduce": "sum"} if absolute and call.chooses else {}
    y = call.expected(graph, leaves, **sums)
    grad = ramp(y.to(next(iter(args.values())).dtype)).double()
    found = torch.autograd.grad(y, call.wanted(leaves), grad.abs() if absolute else grad)
    return [y.detach(), *found]


def check_step(call, graph, args, *, terms):
    """Check result and gradients of a call against those of its oracle."""
    results = call.step(graph, args)
    dtype = next(iter(args.values())).dtype
    assert {one.dtype for one in results} == {dtype}
    expected = oracle_step(call, graph, args)
    if call.chooses and dtype.itemsize == 2:  # of products that round to the same, another wins
        results, expected = results[:1], expected[:1]
    if not call.absolute:
        for i, (one, other) in enumerate(zip(results, expected, strict=True)):
            near_largest(one, other, dtype=dtype, gradient=i > 0 or call.name.startswith("prop"))
        return
    sizes = oracle_step(call, graph, args, absolute=True)[: len(results)]
    for one, other, size in zip(results, expected, sizes, strict=True):
        assert_within(one, other, 4 * size, terms=terms)


def test_every_function_has_a_call():
    assert {call.name.split()[0] for call in CALLS} == {*autograd.__all__} - NO_OPERATIONS


@pytest.mark.covering("call", "dtype", "index_dtype", "kind", one_in=3)
@pytest.mark.parametrize("kind", ["shuffled", "sorted", "transposed"])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_call
def test_results_and_gradients_are_those_of_the_oracle(device, call, dtype, index_dtype, kind):
    graph = graph_of(call, 40, 30, 300, kind=kind, device=device, index_dtype=index_dtype)
    for feat in (2, 7, 33):
        args = call.arguments(graph, dtype=dtype, device=device, feat=feat)
        check_step(call, graph, args, terms=graph.nnz + feat)


@pytest.mark.where(lambda call, shape: shape != "no features" or "k" not in call.options)
@pytest.mark.covering("call", "shape", one_in=2)
@pytest.mark.parametrize("shape", [*SHAPES, "no features"], ids=str)
@every_call
def test_nothing_to_compute_is_computed_too(device, call, shape):
    """Without rows, columns, entries or features."""
    sizes, feat = ((6, 5, 20), 0) if shape == "no features" else ((*shape, 0), 4)
    graph = graph_of(call, *sizes, device=device)
    args = call.arguments(graph, device=device, feat=feat)
    results = call.step(graph, args)
    assert_same([one.cpu() for one in results], oracle_step(call, graph, args))


@every_call
def test_gradients_agree_with_finite_differences(device, deterministic, call):
    """All at once, and each by itself."""
    torch.use_deterministic_algorithms(may_be_deterministic(call, device))
    graph = graph_of(call, 6, 4, 16, device=device)
    args = call.arguments(graph, device=device, feat=2 + ("k" in call.options))
    some = [{name} for name in args if name not in call.constants]
    options = {"nondet_tol": ATOMICS if call.atomics and device == "cuda" else 0}
    for names in (set(args), *(some if len(some) > 1 else ())):
        leaves = tuple(v if n in names else v.detach() for n, v in args.items())
        assert gradcheck(call.of_values(graph), leaves, **options)


@calls(twice=True)
def test_second_derivatives_agree_with_finite_differences(device, deterministic, call):
    torch.use_deterministic_algorithms(may_be_deterministic(call, device))
    graph = graph_of(call, 6, 4, 16, device=device)
    args = call.arguments(graph, device=device, feat=2 + ("k" in call.options))
    assert gradgradcheck(call.of_values(graph), tuple(args.values()), nondet_tol=0)


@calls(twice=False)
def test_second_derivatives_that_are_not_promised_are_refused(device, call):
    graph = graph_of(call, 6, 4, 16, device=device)
    args = call.arguments(graph, device=device)
    wanted = call.wanted(args)
    first = torch.autograd.grad(call.run(graph, args).square().sum(), wanted, create_graph=True)
    again = torch.autograd.grad(call.run(graph, args).square().sum(), wanted)
    assert_same([one.detach() for one in first], again)
    for one in first[:2]:  # behind them are scales, which torch's product may apply
        with pytest.raises(UnsupportedError, match="cannot be differentiated again"):
            torch.autograd.grad(one.sum(), wanted[0], retain_graph=True)


@pytest.mark.parametrize(
    ("call", "name"),
    [pytest.param(call, name, id=f"{call}-{name}") for call in CALLS for name in call.linear],
)
def test_a_linear_function_and_its_gradient_are_adjoint(device, call, name):
    graph = graph_of(call, 60, 50, 900, device=device)
    args, others = (call.arguments(graph, device=device, feat=9, seed=seed) for seed in (0, 1))
    y, z = (call.run(graph, {**args, name: one[name]}) for one in (args, others))
    both = call.run(graph, {**args, name: args[name] - 2 * others[name]})
    torch.testing.assert_close(both, y - 2 * z)
    direction = ramp(y)
    (grad,) = torch.autograd.grad(y, args[name], direction)
    torch.testing.assert_close((y * direction).sum(), (grad * args[name]).sum())


@calls(numbered=False)
def test_numbers_of_vertices_do_not_matter(device, call):
    """Edges stay in their order, and their values too."""
    graph = graph_of(call, 40, 30, 300, device=device)
    args = call.arguments(graph, device=device, feat=5)
    rows, cols = (
        torch.randperm(n, generator=torch.Generator().manual_seed(n)) for n in graph.shape
    )
    cols = rows if call.square else cols
    coo = graph.to("cpu").structure  # edges in their order
    row, col = rows.numpy()[coo.row], cols.numpy()[coo.col]
    moved = COO(row.astype(coo.row.dtype), col.astype(coo.col.dtype), shape=coo.shape)
    places = {"rows": rows.argsort().to(device), "cols": cols.argsort().to(device)}

    def move(value, axis):
        return value[places[axis]] if axis in places else value

    there = call.leaves({n: move(v, call.shapes[n][0]) for n, v in args.items()})
    there = {n: v.requires_grad_(args[n].requires_grad) for n, v in there.items()}
    y, z = call.run(graph, args), call.run(Graph(moved).to(device), there)
    if not call.of_entries:
        y = move(y, "rows" if call.graph else "cols")
    torch.testing.assert_close(z, y)
    wanted = torch.autograd.grad(y.sin().sum(), call.wanted(args))
    results = torch.autograd.grad(z.sin().sum(), call.wanted(there))
    names = [name for name in args if name not in call.constants]
    assert_same(results, [move(v, call.shapes[n][0]) for n, v in zip(names, wanted, strict=True)])


def as_parts(graph):
    """Return what stands for a graph where no graph can be made: no plain tensors."""
    return pytree.tree_map(lambda leaf: torch.nn.Parameter(leaf, requires_grad=False), graph)


def makes_graphs(call):
    return "with loops" in call.name or "relational" in call.name


def saved(graph):
    """Save a graph by torch and load it by torch's default, which runs no code of the file."""
    torch.save(graph, buffer := io.BytesIO())
    return torch.load(io.BytesIO(buffer.getvalue()))


ROADS = {
    "pickled": lambda graph: pickle.loads(pickle.dumps(graph)),
    "saved": saved,
    "node": lambda graph: pytree.tree_map(torch.clone, graph),
    "parts": as_parts,
}


@pytest.mark.where(lambda call, road: road != "parts" or not makes_graphs(call))
@pytest.mark.covering("call", "road", one_in=2)
@pytest.mark.parametrize("road", ROADS)
@every_call
def test_copies_of_a_graph_do_the_same(device, deterministic, call, road):
    torch.use_deterministic_algorithms(may_be_deterministic(call, device))
    graph = graph_of(call, 9, 6, 40, kind="transposed", device=device)
    args = call.arguments(graph, device=device)
    results = call.step(ROADS[road](graph), args)
    same = {"rtol": 0, "atol": 0 if not call.atomics else ATOMICS}
    assert_same(results, call.step(graph, args), **same)


@every_call
def test_strides_change_nothing(device, call):
    """Of arguments, and of the gradient of the result."""
    graph = graph_of(call, 20, 12, 90, device=device)
    args = call.arguments(graph, device=device, feat=8)
    makes = {
        "every second": lambda v: torch.stack([v, v.flip(0)], 1)[:, 0],
        "reversed": lambda v: v.permute(*range(v.dim())[::-1]).contiguous().permute(
            *range(v.dim())[::-1]
        ),
        "in wider rows": lambda v: torch.cat([v, v, v], -1)[..., v.shape[-1] : 2 * v.shape[-1]],
    }  # fmt: skip
    y, *_ = expected = call.step(graph, args)
    uneven = makes["reversed"](ramp(y))
    for make in makes.values():
        views = {n: make(v.detach()).requires_grad_(v.requires_grad) for n, v in args.items()}
        assert_same(call.step(graph, views, uneven), expected)
    ones = [torch.ones_like(y), torch.ones((), dtype=y.dtype, device=device).expand(y.shape)]
    assert_same(*(call.step(graph, args, one) for one in ones))


@every_call
def test_results_repeat_bit_by_bit_in_deterministic_mode(device, deterministic, call):
    graph = graph_of(call, 200, 150, 4000, device=device)
    args = call.arguments(graph, dtype=torch.float32, device=device, feat=33)
    if call.atomics and device == "cuda":
        with pytest.raises(UnsupportedError, match="adds up by atomics"):
            call.step(graph, args)
        return
    torch.use_deterministic_algorithms(may_be_deterministic(call, device))
    first = call.step(graph, args)
    for _ in range(3):
        assert all(map(torch.equal, first, call.step(graph, args)))


@every_call
def test_backward_may_run_twice_and_after_the_graph_is_dropped(device, call):
    graph = graph_of(call, 9, 6, 40, device=device)
    args = call.arguments(graph, device=device)
    _, *expected = call.step(graph, args, torch.ones((), dtype=torch.float64, device=device)
                             .expand(call.run(graph, args).shape))  # fmt: skip
    y = call.run(graph, args).sum()
    del graph
    gc.collect(1)  # it is young
    for _ in range(2):
        results = torch.autograd.grad(y, call.wanted(args), retain_graph=True)
        assert_same(results, expected, rtol=1e-13, atol=1e-13)


@every_call
def test_nothing_is_recorded_that_nobody_asks_for(call):
    graph = graph_of(call, 9, 6, 40)
    args = call.arguments(graph)
    with torch.no_grad():
        expected = call.run(graph, args)
    assert not expected.requires_grad
    constants = call.arguments(graph, grad=False)
    assert not call.run(graph, constants).requires_grad
    assert_same([call.run(graph, one).detach() for one in (constants, args)], [expected] * 2)


@every_call
def test_without_tangents_forward_mode_changes_nothing(call):
    graph = graph_of(call, 9, 6, 40)
    args = call.arguments(graph)
    expected = call.step(graph, args)
    with forward_ad.dual_level():
        assert all(map(torch.equal, call.step(graph, args), expected))


@pytest.mark.gpu
@calls(atomics=False)
def test_calls_without_the_dispatcher_are_those_with_it(deterministic, call):
    """A mode of torch that sees each op, as a profiler does, sends calls through it."""
    graph = graph_of(call, 200, 150, 4000, device="cuda")
    args = call.arguments(graph, dtype=torch.float32, device="cuda", feat=32)
    torch.use_deterministic_algorithms(may_be_deterministic(call, "cuda"))
    direct = call.step(graph, args)
    with Ops() as ops:
        watched = call.step(graph, args)
    assert ops.calls
    assert all(map(torch.equal, direct, watched))


# Steps outside the capture meet nodes of leaves that were made on its stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.gpu
@every_call
def test_a_captured_step_runs_on_its_stream_and_replays_with_changed_inputs(call):
    """The streams that torch sets; what graphs build is made before the capture."""
    graph = graph_of(call, 200, 150, 4000, device="cuda")
    args = call.arguments(graph, dtype=torch.float32, device="cuda", feat=32)
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    grad = ramp(call.run(graph, args))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call.step(graph, args, grad)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(captured, stream=stream):
        results = call.step(graph, args, grad)
    for seed in range(10):
        fresh = call.arguments(graph, dtype=torch.float32, device="cuda", feat=32, seed=seed)
        with torch.no_grad():
            for name, value in args.items():
                if name not in call.constants:
                    value.copy_(fresh[name])
        for one in results:
            if one.data_ptr() != grad.data_ptr():  # as that of ``own`` is
                one.detach().fill_(float("nan"))
        captured.replay()
        tolerances = {"rtol": 1e-4, "atol": 1e-5} if call.atomics else {}
        assert_same(results, call.step(graph, args, grad), **tolerances)
