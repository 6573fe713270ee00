"""The rules that GCN's normalisation keeps: tracers, autocast, captures, and what is refused."""

import pytest

torch = pytest.importorskip("torch")

from attention_cases import loop_graph  # noqa: E402
from autograd_cases import RULES, TRANSFORMS, check_rules, make_graph, side_of  # noqa: E402
from test_autograd_norm import LOOPS, weights  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from sparsefmt import DeviceError, DtypeError, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt.autograd import gcn_norm, prepare, spmm  # noqa: E402
from sparsefmt.autograd.tensors.tensors import GraphTensors  # noqa: E402
from sparsefmt.interop.torch import from_tensor  # noqa: E402
from sparsefmt.ops.gcn import api as rows  # noqa: E402

# torch's tracer itself instantiates the class that it warns of.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
OPS = torch.ops.sparsefmt


def structure(side):
    return side.indptr, side.indices, side.n_cols, side.plan


@RULES
def test_every_op_keeps_the_rules_of_library_ops(device, index_dtype, traced):
    graph = loop_graph(device=device, index_dtype=index_dtype)
    A, calls = structure(side_of(graph, False)), []
    for loops in (False, True):
        for values in (None, weights(graph, grad=False), weights(graph, torch.float16, grad=False)):
            calls.append((OPS.gcn_norm, (*A, values, loops)))
            if values is not None:
                grad = OPS.gcn_norm(*A, values, loops).sin()
                calls.append((OPS.gcn_norm_backward, (*A, values, grad, loops)))
    assert {op for op, _ in calls} == {
        getattr(OPS, row.name) for row in (rows.GCN_NORM, rows.GCN_NORM_BACKWARD)
    }
    check_rules(calls, traced)


@pytest.fixture
def forget_what_was_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@LOOPS
@pytest.mark.usefixtures("forget_what_was_compiled")
def test_it_compiles_as_one_graph(device, self_loops):
    """Of a graph of which nothing has been made."""
    graph = loop_graph(device=device)
    w, x = weights(graph), torch.rand(7, 3, dtype=torch.float64, device=device, requires_grad=True)

    def function(w, x):
        normalised, values = gcn_norm(graph, w, self_loops=self_loops)
        return normalised, spmm(normalised, x, values), gcn_norm(graph, self_loops=self_loops)[1]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    (found, y, ones), (normalised, expected, wanted) = compiled(w, x), function(w, x)
    assert found is normalised
    torch.testing.assert_close((y, ones), (expected, wanted))
    torch.testing.assert_close(
        torch.autograd.grad(y.sin().sum(), (w, x)),
        torch.autograd.grad(expected.sin().sum(), (w, x)),
    )


@pytest.mark.usefixtures("forget_what_was_compiled")
def test_graphs_whose_loops_are_made_share_one_compilation(device):
    """The second graph makes sizes symbolic; from there on nothing is compiled again."""
    counter = CompileCounterWithBackend("aot_eager")

    def function(graph, w, x):
        normalised, values = gcn_norm(graph, w)
        return spmm(normalised, x, values)

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for n in range(6, 12):
        graph = make_graph(n, n, 10 * n, device=device)
        for one in (graph, gcn_norm(graph)[0]):
            prepare(one)
        w = weights(graph)
        x = torch.rand(n, 3, dtype=torch.float64, device=device, requires_grad=True)
        y, expected = compiled(graph, w, x), function(graph, w, x)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(
            torch.autograd.grad(y.sum(), (w, x)), torch.autograd.grad(expected.sum(), (w, x))
        )
    assert counter.frame_count == 2


def test_under_autocast_it_is_in_float32(device):
    graph = loop_graph(device=device)
    A, half = structure(side_of(graph, False)), weights(graph, torch.bfloat16)
    own = graph.with_data(from_tensor("w", half.detach()))
    with torch.autocast(device, dtype=torch.bfloat16):
        _, values = gcn_norm(graph, half)
        normalised, same = gcn_norm(own)
        double = gcn_norm(graph, half.double())[1]
        direct = [OPS.gcn_norm(*A, one, True) for one in (None, half.detach())]
        y = spmm(normalised, torch.ones(7, 2, device=device), values)
    assert {one.dtype for one in (values, same, *direct)} == {torch.float32}
    assert (double.dtype, y.dtype) == (torch.float64, torch.bfloat16)
    assert torch.equal(values, gcn_norm(graph, half.float())[1])
    assert torch.equal(values, same)
    assert torch.equal(values, direct[1])
    (found,) = torch.autograd.grad(values.sum(), half)
    assert found.dtype is torch.bfloat16


@pytest.mark.gpu
def test_a_captured_step_replays():
    graph = make_graph(300, 300, 9000, device="cuda")
    w = weights(graph, torch.float32)

    def once(w):
        _, values = gcn_norm(graph, w)
        return values, *torch.autograd.grad(values.square().sum(), w)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        once(w)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        values, grad = once(w)
    for _ in range(10):
        with torch.no_grad():
            w.copy_(torch.rand_like(w) + 0.1)
        captured.replay()
        expected, wanted = once(w.detach().clone().requires_grad_())
        assert torch.equal(values, expected)
        torch.testing.assert_close(grad, wanted)  # atomics


# What is refused


GRAPH, OBLONG = loop_graph(), make_graph(9, 6, 40)
A, NNZ = torch.rand(GRAPH.nnz), GRAPH.nnz
PARTS = pytree.tree_map(lambda leaf: torch.nn.Parameter(leaf, requires_grad=False), GRAPH)
REFUSED = [
    (lambda: gcn_norm(GRAPH.csr), DtypeError, "graph is a CSR: give a sparsefmt.Graph"),
    (lambda: gcn_norm(OBLONG), ShapeError, r"graph has shape \(9, 6\): .* as many columns as rows"),
    (
        lambda: gcn_norm(OBLONG, self_loops=False),
        ShapeError,
        r"graph has shape \(9, 6\): a vertex has one degree",
    ),
    (lambda: gcn_norm(GRAPH, self_loops=1), DtypeError, "self_loops is 1: give True or False"),
    (lambda: gcn_norm(GRAPH, self_loops=None), DtypeError, "self_loops is None"),
    (lambda: gcn_norm(GRAPH, A.numpy()), DtypeError, "edge_weight is a ndarray: give a torch.Ten"),
    (lambda: gcn_norm(GRAPH, 2.0), DtypeError, "edge_weight is a float"),
    (lambda: gcn_norm(GRAPH, A.long()), DtypeError, r"edge_weight is torch.int64: .*\.float\(\)"),
    (lambda: gcn_norm(GRAPH, A.bool()), DtypeError, "edge_weight is torch.bool"),
    (lambda: gcn_norm(GRAPH, A.to(torch.complex64)), DtypeError, "edge_weight is torch.complex64"),
    (lambda: gcn_norm(GRAPH, A[1:]), ShapeError, rf"edge_weight has shape .* stores {NNZ} e"),
    (lambda: gcn_norm(GRAPH, A[:, None]), ShapeError, "edge_weight has shape"),
    (lambda: gcn_norm(GRAPH, A.to_sparse()), UnsupportedError, "edge_weight has layout"),
    (lambda: gcn_norm(GRAPH, A.to("meta")), DeviceError, "edge_weight is on meta but the graph is"),
    (lambda: gcn_norm(PARTS), UnsupportedError, "graph is only the tensors .* self_loops=False"),
]


@pytest.mark.parametrize(("call", "kind", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_bad_input_is_refused_with_the_argument_named(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.gpu
def test_weights_elsewhere_than_the_graph_are_refused():
    with pytest.raises(DeviceError, match=r"edge_weight is on cuda:0 but the graph is on cpu"):
        gcn_norm(GRAPH, A.cuda())


def test_tensors_in_the_place_of_a_graph_have_no_loops_added():
    assert isinstance(PARTS, GraphTensors)
    found, values = gcn_norm(PARTS, A, self_loops=False)
    assert found is PARTS
    assert torch.equal(values, gcn_norm(GRAPH, A, self_loops=False)[1])


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused(transform):
    with pytest.raises(UnsupportedError, match=r"use torch\.autograd\.grad"):
        TRANSFORMS[transform](lambda w: gcn_norm(GRAPH, w)[1], A)
