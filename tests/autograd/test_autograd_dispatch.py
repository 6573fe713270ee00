"""Which calls go around torch's dispatcher: those of which nothing else would have heard."""

import contextlib
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from autograd_cases import make_graph, side_of, tensors  # noqa: E402
from laws.calls import Ops  # noqa: E402
from torch._dispatch.python import enable_python_dispatcher  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from sparsefmt.autograd import attention, sampling, spmm  # noqa: E402
from sparsefmt.autograd.engine import library  # noqa: E402
from sparsefmt.autograd.engine.library import LibraryOp  # noqa: E402
from sparsefmt.ops.matmul import cuda_aggregate as matmul_cuda_aggregate  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


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
    with Ops() as seen:
        op(side, *args)
    assert seen.names == ["spmm"]
    side.structure = None  # as on the CPU
    assert torch.equal(op(side, *args), op.library(*structure(side), *args))


def structure(side):
    return side.indptr, side.indices, side.n_cols, side.plan


@pytest.mark.parametrize(
    "context",
    [
        Ops,
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
    columns.structure = SimpleNamespace(perm=0)  # or the address of what a build has made
    scores = x, x[:, 0], x[:, 0], None, None, None, 0.2, 0.0, False
    assert library.direct(args)
    assert library.direct(scores)
    monkeypatch.setattr(library, "call", lambda row, *given, **beside: (*given, beside))
    for op in (sampling.SPMM_SAMPLED, sampling.SPMM_SAMPLED_DA):
        assert op(side, *args) == ("structure", *args, {})
    assert sampling.SPMM_SAMPLED_DX(side, *args) == ("structure", *args, {"indptr": indptr})
    for address, perm in ((0, columns.perm), (64, 64)):
        columns.structure.perm = address
        result = attention.GAT_BACKWARD(side, columns, x, x, x, x, False, *scores)
        assert result[:3] == ("structure", columns.structure, perm)
    with torch.profiler.profile(acc_events=True):
        assert not library.direct(args)
        assert not library.direct(scores)


# Where the backward of spmm goes through both gradients in one pass, and where it may not


def backward_of(graph, reduce="sum", *, needs=(True, True, False, False), create_graph=False):
    """The ops of a backward, and the gradients."""
    shapes = [(graph.n_cols, 4), (graph.nnz,), (graph.n_rows,), (graph.n_cols,)]
    given = tensors(graph.device, *shapes, grad=False)
    given = [one.requires_grad_(need) for one, need in zip(given, needs, strict=True)]
    x, a, r, c = given
    y = spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)
    wanted = [one for one in given if one.requires_grad]
    with Ops() as seen:
        found = torch.autograd.grad(y.sum(), wanted, create_graph=create_graph)
    return seen.names, found


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_one_op_gives_the_gradients_of_features_and_values(device, reduce):
    graph = make_graph(9, 6, 40, device=device)
    names, _ = backward_of(graph, reduce)
    assert names == ["aggregate_backward"]


@pytest.mark.parametrize(
    ("needs", "names"),
    [
        ((True, False, False, False), {"spmm"}),
        ((False, True, False, False), {"sddmm"}),
        ((True, True, True, False), {"spmm", "sddmm"}),
        ((True, True, False, True), {"spmm", "sddmm"}),
    ],
)
def test_others_come_one_by_one(device, needs, names):
    graph = make_graph(9, 6, 40, device=device)
    assert set(backward_of(graph, needs=needs)[0]) == names


def test_what_is_to_be_differentiated_again_goes_through_each(device):
    graph = make_graph(6, 4, 14, device=device)
    names, found = backward_of(graph, create_graph=True)
    assert "aggregate_backward" not in names
    assert all(one.requires_grad for one in found)


@pytest.mark.gpu
def test_a_large_graph_keeps_the_inverse_of_its_permutation(monkeypatch):
    """Made by the second gradient, but not by a capture, which then goes without."""
    graph = make_graph(40, 30, 300, device="cuda")
    expected = backward_of(graph)[1]
    monkeypatch.setattr(matmul_cuda_aggregate, "goes_apart", lambda *_, **__: True)
    x, a = tensors("cuda", (30, 4), (graph.nnz,))
    built, stream = side_of(graph, True).built.parts, torch.cuda.Stream()
    place = side_of(graph, True).perm.data_ptr()

    def gradients():
        return torch.autograd.grad(spmm(graph, x, a).sum(), (x, a))

    with torch.cuda.stream(stream):
        gradients()
    assert ("perm", place) in built
    assert ("inverse", place) not in built
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        found = gradients()
    captured.replay()
    assert ("perm", place) in built
    assert ("inverse", place) not in built
    assert all(map(torch.equal, gradients(), found))
    for _ in range(2):
        torch.testing.assert_close(expected, backward_of(graph)[1])
    perm, inverse = built["perm", place], built["inverse", place]
    assert perm[torch.from_dlpack(inverse).long()].tolist() == list(range(graph.nnz))
