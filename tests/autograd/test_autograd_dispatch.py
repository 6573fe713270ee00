"""Which calls go around torch's dispatcher: those of which nothing else would have heard."""

import contextlib
import threading

import pytest

torch = pytest.importorskip("torch")

from autograd_cases import make_graph, side_of  # noqa: E402
from torch._dispatch.python import enable_python_dispatcher  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from sparsefmt.autograd import (  # noqa: E402
    attention,
    cbsr,
    edge_softmax,
    edges,
    matmul,
    maxk,
    maxk_aggregate,
    sampling,
    sddmm,
    spmm,
)
from sparsefmt.autograd.engine import library  # noqa: E402
from sparsefmt.autograd.engine.library import LibraryOp  # noqa: E402

OPS = [
    op
    for module in (matmul, edges, cbsr)
    for op in vars(module).values()
    if isinstance(op, LibraryOp)
]


class Seen(TorchDispatchMode):
    """The names of the ops that the dispatcher sees."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


@contextlib.contextmanager
def autocast():
    """What ``torch.autocast("cuda")`` sets where there is a GPU."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.fixture
def side():
    """A structure that looks as if it were on a GPU."""
    side = side_of(make_graph(6, 5, 20), False)
    side.structure = "structure"
    return side


@pytest.fixture
def direct(side):
    """Whether a call with these features would go around the dispatcher."""
    return lambda x: library.direct((x, None, "sum"))


@pytest.fixture
def x():
    return torch.rand(5, 3)


@pytest.mark.parametrize(
    "context",
    [contextlib.nullcontext, torch.no_grad, torch.inference_mode, torch.autograd.detect_anomaly],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_an_eager_call_goes_straight_to_the_kernel(direct, x, context):
    with context():
        assert direct(x)
        assert direct(torch.rand(5, 3))
        assert direct(torch.nn.Parameter(x, requires_grad=False))


def test_so_does_one_of_another_thread_or_of_backward(direct, x):
    found = []

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            found.append(direct(x))
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            found.append(direct(grad))
            return grad

    Call.apply(x.requires_grad_()).sum().backward()
    thread = threading.Thread(target=lambda: found.append(direct(x)))
    thread.start()
    thread.join()
    assert found == [True] * 3


def test_an_op_goes_the_way_that_the_question_says(monkeypatch, side, x):
    op = LibraryOp("spmm")
    monkeypatch.setattr(library, "call", lambda row, structure, *args: structure)
    args = x, None, None, None, None, "sum"
    assert op(side, *args) == "structure"
    monkeypatch.undo()
    with Seen() as seen:
        op(side, *args)
    assert seen.names == {"sparsefmt::spmm"}
    side.structure = None  # as on the CPU
    assert torch.equal(op(side, *args), op.library(*structure(side), *args))


def structure(side):
    return side.indptr, side.indices, side.n_cols, side.plan


@pytest.mark.parametrize(
    "context",
    [
        Seen,
        FakeTensorMode,
        lambda: torch.profiler.profile(acc_events=True),
        torch.autograd.profiler.profile,
        enable_python_dispatcher,
        autocast,
        lambda: torch.device("cpu"),  # a mode for __torch_function__
    ],
)
def test_whatever_watches_sees_the_library_op(direct, x, context):
    with context():
        assert not direct(x)
    assert direct(x)


@pytest.mark.parametrize(
    "trace",
    [
        torch.vmap,
        lambda f: torch.func.grad(lambda x: f(x).sum()),
        torch.func.functionalize,
        make_fx,
        lambda f: make_fx(f, pre_dispatch=True),
        lambda f: lambda x: torch.jit.trace(f, x, check_trace=False),
        lambda f: torch.compile(f, backend="eager", fullgraph=True),
    ],
    ids=["vmap", "grad", "functionalize", "fx", "fx before autograd", "jit", "compile"],
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_so_does_whatever_traces_or_transforms(direct, x, trace):
    found = []

    def ask(x):
        found.append(direct(x))
        return x * 2

    trace(ask)(x)
    assert found == [False]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.as_subclass(Subclass),
        lambda x: FakeTensorMode().from_tensor(x),
        lambda x: torch.complex(x, x).conj().imag,  # its negation is put off
        lambda x: torch._efficientzerotensor(x.shape),  # as in the gradient of torch.sgn
    ],
    ids=["subclass", "fake", "negative", "zeros"],
)
def test_so_does_a_tensor_that_is_more_than_its_memory(direct, x, make):
    assert not direct(make(x))


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_both_ways_agree_to_the_last_bit(monkeypatch, reduce):
    graph = make_graph(300, 200, 5000, device="cuda")
    shapes = (graph.n_cols, 32), (graph.nnz,), (graph.n_rows,), (graph.n_cols,)
    given = [torch.rand(n, device="cuda").add_(0.1).requires_grad_() for n in shapes]

    def step():
        x, a, r, c = given
        y = spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)
        p = edge_softmax(graph, sddmm(graph, y, x))
        again = reduce in ("sum", "mean")
        if again:
            z = maxk_aggregate(graph, maxk(x, 20), 8, a, reduce=reduce, row_scale=r, col_scale=c)
            p = p + sddmm(graph, z, x)
        first = torch.autograd.grad(p.square().sum(), given, create_graph=again)
        energy = sum(one.square().sum() for one in first)
        return [y, p, *first], torch.autograd.grad(energy, given) if again else ()

    with Seen() as seen:
        watched, watched_again = step()
    assert seen.names >= {"sparsefmt::sddmm", "sparsefmt::edge_softmax_backward"}
    for op in OPS:
        monkeypatch.setattr(op, "library", None)
    direct, direct_again = step()
    assert all(map(torch.equal, direct, watched))
    # Torch adds the terms of a second derivative in an order by counters of two threads, which
    # differs between the first call of a process and the others.
    for mine, theirs in zip(direct_again, watched_again, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6 * float(theirs.abs().max()))


@pytest.mark.gpu
def test_the_profiler_knows_the_op_by_its_name():
    graph, activities = make_graph(6, 5, 20, device="cuda"), [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        spmm(graph, torch.rand(5, 3, device="cuda"))
    assert "sparsefmt::spmm" in {event.key for event in profile.key_averages()}


@pytest.mark.gpu
def test_gradients_that_are_zeros_without_memory():
    graph = make_graph(300, 200, 5000, device="cuda")
    x, a = (torch.rand(n, device="cuda").requires_grad_() for n in ((200, 32), (graph.nnz,)))
    torch.sgn(spmm(graph, x, a)).sum().backward()
    assert not x.grad.any()
    assert not a.grad.any()


def test_numbers_and_flags_are_no_hindrance(monkeypatch, side):
    """Of samples and of attention."""
    x, seed = torch.rand(6, 4), torch.tensor([3])
    args = x, None, None, None, seed, 3, "random", True, False
    columns, indptr = side_of(make_graph(6, 5, 20), True), side.indptr
    columns.structure = "T"
    scores = x, x[:, 0], x[:, 0], None, None, None, 0.2, 0.0, False
    assert library.direct(args)
    assert library.direct(scores)
    monkeypatch.setattr(library, "call", lambda row, *given, **beside: (*given, beside))
    for op in (sampling.SPMM_SAMPLED, sampling.SPMM_SAMPLED_DA):
        assert op(side, *args) == ("structure", *args, {})
    assert sampling.SPMM_SAMPLED_DX(side, *args) == ("structure", *args, {"indptr": indptr})
    result = attention.GAT_BACKWARD(side, columns, x, x, x, x, False, *scores)
    assert result[:3] == ("structure", "T", columns.perm)
    with torch.profiler.profile(acc_events=True):
        assert not library.direct(args)
        assert not library.direct(scores)
