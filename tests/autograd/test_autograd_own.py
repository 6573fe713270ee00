"""Aggregation with a part of each vertex's own, and what else layers are written with."""

import pytest

torch = pytest.importorskip("torch")

from attention_cases import loop_graph  # noqa: E402
from autograd_cases import make_graph, tensors  # noqa: E402

from sparsefmt import DeviceError, DtypeError, Graph, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt.autograd import aggregate_with_own, maxk, propagate, spmm  # noqa: E402
from sparsefmt.autograd.cbsr import features_to_keep  # noqa: E402
from sparsefmt.autograd.layers import propagated  # noqa: E402
from sparsefmt.autograd.matmul import operands  # noqa: E402
from sparsefmt.autograd.tensors.prepare import graph_tensors, has_tiles  # noqa: E402

# torch's tracer itself instantiates the class that it warns of.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
N, FEAT = 7, 5


def given(device, *, dtype=torch.float64):
    """A square graph, features, and factors of its vertices."""
    graph = loop_graph(device=device)
    return graph, *tensors(device, (N, FEAT), (N,), (N, 1), dtype=dtype)


@pytest.mark.parametrize("k", [None, 3])
def test_the_own_part_is_added_to_the_sum_over_the_neighbours(device, k):
    graph, x, scale, own = given(device)
    (w,) = tensors(device, (graph.nnz,), seed=1)
    without = torch.arange(N, device=device)[:, None] % 3 == 0
    for factor in (own, own[:1, 0]):
        chosen = x if k is None else maxk(x, k)
        y = aggregate_with_own(
            graph, x, factor, w, k=k, without=without, row_scale=scale, col_scale=scale
        )
        sums = spmm(graph, chosen, w, row_scale=scale, col_scale=scale)
        expected = sums + factor * chosen.masked_fill(without, 0)
        torch.testing.assert_close(y, expected)
        inputs = x, w, scale, own
        torch.testing.assert_close(
            torch.autograd.grad(y.sin().sum(), inputs),
            torch.autograd.grad(expected.sin().sum(), inputs),
        )


def test_constant_factors_go_by_one_node(device):
    graph, x, scale, own = given(device)
    scale, own = scale.detach(), own.detach()
    (bias,) = tensors(device, (FEAT,), seed=2)
    without = torch.arange(N, device=device)[:, None] % 3 == 0
    for marked, added in ((None, None), (without, bias)):
        y = propagate(graph, x, scale, own, without=marked, bias=added)
        scales = {"row_scale": scale, "col_scale": scale}
        expected = aggregate_with_own(graph, x, own, without=marked, **scales)
        expected = expected if added is None else expected + added
        torch.testing.assert_close(y, expected)
        inputs = (x,) if added is None else (x, added)
        torch.testing.assert_close(
            torch.autograd.grad(y.sin().sum(), inputs),
            torch.autograd.grad(expected.sin().sum(), inputs),
        )
    assert torch.autograd.gradcheck(lambda x, b: propagate(graph, x, scale, own, bias=b), (x, bias))


def test_compiled_it_keeps_its_gradients(device):
    graph, x, scale, own = given(device)
    scale, own = scale.detach(), own.detach()
    (bias,) = tensors(device, (FEAT,), seed=2)

    def function(x, bias):
        return propagate(graph, x, scale, own, bias=bias)

    torch._dynamo.reset()
    y = torch.compile(function, fullgraph=True, backend="aot_eager")(x, bias)
    torch.testing.assert_close(
        torch.autograd.grad(y.sin().sum(), (x, bias)),
        torch.autograd.grad(function(x, bias).sin().sum(), (x, bias)),
    )
    torch._dynamo.reset()


def test_where_own_is_0_own_features_add_nothing_in_any_mode(device):
    graph, x, scale, own = given(device, dtype=torch.float32)
    edges = torch.arange(N, device=device).expand(2, -1)[:, 1:]  # row 0 has none
    x, scale, own = x.detach(), scale.detach(), own.detach().index_fill(0, edges.new_zeros(1), 0)
    x[0] = float("inf")
    graph = Graph.from_edge_index(edges, torch.ones(N - 1, device=device), num_nodes=N)
    torch._dynamo.reset()
    compiled = torch.compile(propagate, backend="eager")
    assert propagate(graph, x, scale, own).isfinite().all()
    assert compiled(graph, x, scale, own).isfinite().all()
    with torch.autocast(device, dtype=torch.bfloat16):
        assert propagate(graph, x, scale, own).isfinite().all()
    torch._dynamo.reset()


def test_one_more_than_own_is_a_factor_like_any_in_both_ways(device):
    graph, x, _, own = given(device, dtype=torch.float32)
    x, minus = x.detach(), torch.full_like(own[0].detach(), -1)
    x[0] = float("inf")
    y = propagated(graph, x, None, minus, one_more=True)
    torch.testing.assert_close(y, aggregate_with_own(graph, x, 1 + minus), equal_nan=True)
    assert y[0].isnan().all()


def test_autocast_narrows_features_and_factors(device):
    graph, x, scale, own = given(device, dtype=torch.float32)
    scale, own = scale.detach(), own.detach()
    with torch.autocast(device, dtype=torch.bfloat16):
        assert propagate(graph, x, scale, own).dtype is torch.bfloat16
        narrow, values, r, c = operands(graph, x, None, scale)
    assert (narrow.dtype, r.dtype) == (torch.bfloat16, torch.bfloat16)
    assert values is None
    assert c is None


def test_tensors_of_a_graph(device):
    graph = loop_graph(device=device)
    found = graph_tensors(graph)
    assert found is graph_tensors(graph)
    assert (found.n_rows, found.n_cols, found.nnz) == (*graph.shape, graph.nnz)
    assert found.csr_values is None
    assert found.rows.indptr.shape == (graph.n_rows + 1,)
    assert found.cached("own", lambda: torch.ones(3)) is found.cached("own", lambda: torch.zeros(3))
    assert not has_tiles(graph)
    for function in (graph_tensors, has_tiles):
        with pytest.raises(DtypeError, match="graph is a CSR: give a"):
            function(graph.csr)


GRAPH, X, SCALE, OWN = (
    one.detach() if isinstance(one, torch.Tensor) else one for one in given("cpu")
)
OBLONG = make_graph(9, 6, 40)
MARKS = torch.zeros(N, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: aggregate_with_own(GRAPH, X, 2.0), DtypeError, "own is a float"),
        (lambda: aggregate_with_own(GRAPH, X, OWN.long()), DtypeError, "own is torch.int64"),
        (lambda: aggregate_with_own(GRAPH, X, OWN[:, 0]), ShapeError, r"own has shape \(7,\)"),
        (lambda: aggregate_with_own(GRAPH, X, OWN.to("meta")), DeviceError, "own is on meta"),
        (lambda: aggregate_with_own(OBLONG, X[:6], OWN), ShapeError, "takes part in its own"),
        (lambda: aggregate_with_own(GRAPH, X, OWN, k=6), ShapeError, "k is 6 but a row has 5"),
        (
            lambda: aggregate_with_own(GRAPH, X, OWN, without=OWN),
            DtypeError,
            "without is torch.float64: give torch.bool",
        ),
        (
            lambda: aggregate_with_own(GRAPH, X, OWN, without=MARKS[:3]),
            ShapeError,
            r"without has shape \(3, 1\)",
        ),
        (
            lambda: aggregate_with_own(GRAPH, X, OWN, without=MARKS.to("meta")),
            DeviceError,
            "without is on meta",
        ),
        (lambda: propagate(GRAPH, X, OWN, OWN), ShapeError, r"scale has shape \(7, 1\)"),
        (lambda: propagate(GRAPH, X, SCALE.float(), OWN), DtypeError, "scale is torch.float32"),
        (lambda: propagate(GRAPH, X, SCALE, OWN, bias=SCALE), ShapeError, r"bias has shape \(7,\)"),
        (
            lambda: propagate(GRAPH, X, SCALE, OWN.clone().requires_grad_()),
            UnsupportedError,
            "requires a gradient, which propagate does not compute: use aggregate_with_own",
        ),
        (lambda: features_to_keep(2.5), DtypeError, "k is a float"),
        (lambda: features_to_keep(0), ShapeError, "k is 0: give 1 or more"),
        (lambda: features_to_keep(6, 5), ShapeError, "k is 6 but a row has 5 features"),
    ],
)
def test_bad_input_is_refused_with_the_argument_named(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
