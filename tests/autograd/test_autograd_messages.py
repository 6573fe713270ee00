"""Messages with features of edges in ``sparsefmt.autograd``, against gathering and scattering."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from autograd_cases import (  # noqa: E402
    make_graph,
    tensors,
)
from laws.calls import messages  # noqa: E402

from sparsefmt import COO, Graph, ShapeError  # noqa: E402
from sparsefmt.autograd import (  # noqa: E402
    edge_combine,
    message_aggregate,
    sddmm,
)
from sparsefmt.ops import explain  # noqa: E402

MESSAGES, REDUCTIONS, OPS = ("mul", "add", "relu_add", "copy_edge"), ("sum", "mean"), "add sub mul"

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def shuffled_graph(n_rows, n_cols, nnz, *, device, index_dtype=np.int32):
    """The graph of the cases with its edges in no order."""
    coo = make_graph(n_rows, n_cols, nnz, index_dtype=index_dtype).coo
    order = np.random.default_rng(1).permutation(coo.nnz)
    return Graph(COO(coo.row[order], coo.col[order], shape=coo.shape)).to(device)


def test_third_gradients_are_those_of_gathering(device):
    graph = shuffled_graph(6, 4, 14, device=device)
    x, w = tensors(device, (4, 2), (graph.nnz, 2))

    def third(function, x, w):
        y = function(x, w).pow(3).sum()
        for _ in range(2):
            y = sum(one.pow(2).sum() for one in torch.autograd.grad(y, (x, w), create_graph=True))
        return torch.autograd.grad(y, (x, w))

    for message in ("mul", "add", "relu_add"):
        mine = third(lambda x, w, m=message: message_aggregate(graph, x, w, message=m), x, w)
        there = [one.detach().cpu().requires_grad_() for one in (x, w)]
        wanted = third(
            lambda x, w, m=message: messages(graph, w, x, message=m, reduce="sum"), *there
        )
        for one, other in zip(mine, wanted, strict=True):
            torch.testing.assert_close(one.cpu(), other)


def test_nan_and_infinity_go_through_a_relu_as_in_torch(device):
    nan, inf = float("nan"), float("inf")
    graph = Graph(COO([0, 0, 1, 1], [0, 1, 2, 3], shape=(3, 4))).to(device)
    x = torch.tensor([[nan], [1.0], [-inf], [2.0]], device=device)
    w = torch.tensor([[1.0], [-1.0], [1.0], [-3.0]], device=device)
    both = [one.requires_grad_() for one in (x, w)]
    found = message_aggregate(graph, *both, message="relu_add")
    mine = torch.autograd.grad(found.sum(), both)
    there = [one.detach().cpu().requires_grad_() for one in both]
    exact = messages(graph, there[1], there[0], message="relu_add", reduce="sum")
    torch.testing.assert_close(found.cpu(), exact, equal_nan=True)
    for one, other in zip(mine, torch.autograd.grad(exact.sum(), there), strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_half_gradients_of_a_mean_are_rounded_once():
    """A row of 80 000 entries: 1 / degree is subnormal in float16."""
    k = 80_000
    graph = Graph(COO(np.zeros(k, int), np.arange(k), shape=(1, k)))
    x, w = (torch.full((k, 2), 60.0, dtype=torch.half, requires_grad=True) for _ in range(2))
    y = message_aggregate(graph, x, w, reduce="mean")
    dx, dw = torch.autograd.grad(y, (x, w), torch.full((1, 2), 32.0, dtype=torch.half))
    for one in (dx, dw):
        assert float(one.detach()[0, 0]) == pytest.approx(60 * 32 / k, rel=1e-3)


def test_only_what_gradients_read_is_kept():
    graph = make_graph(9, 6, 40)
    x, w = tensors("cpu", (6, 4), (graph.nnz, 4))
    for message, kept in (("mul", True), ("add", False), ("relu_add", True), ("copy_edge", False)):
        y = message_aggregate(graph, x, w, message=message)
        assert all((one is not None) == kept for one in y.grad_fn.saved_tensors)


def test_an_edge_index_takes_the_place_of_a_graph(device):
    edge_index = torch.tensor([[0, 1, 2, 3, 0], [1, 0, 2, 2, 3]], device=device)
    graph = Graph.from_edge_index(edge_index, num_nodes=4)
    x, w = tensors(device, (4, 3), (5, 3), dtype=torch.float32)
    for message in MESSAGES:
        found = message_aggregate(edge_index, x, w, message=message)
        assert torch.equal(found, message_aggregate(graph, x, w, message=message))
    assert torch.equal(edge_combine(edge_index, x, x, "sub"), edge_combine(graph, x, x, "sub"))
    assert torch.equal(edge_combine(edge_index, x, x, "sub"), x[edge_index[1]] - x[edge_index[0]])


def test_products_summed_up_are_those_of_sddmm(device):
    graph = shuffled_graph(9, 6, 40, device=device)
    left, right = tensors(device, (9, 4), (6, 4))
    assert torch.equal(edge_combine(graph, left, right, "dot"), sddmm(graph, left, right))
    with pytest.raises(ShapeError, match=r"^right has shape .* but left has"):
        edge_combine(graph, left, right[:, 1:], "dot")


def test_explain_knows_messages(device):
    graph = make_graph(9, 6, 40, device=device)
    x, w, left = tensors(device, (6, 4), (graph.nnz, 4), (9, 4), grad=False)
    assert explain("message_aggregate", graph, x, w).chosen.deterministic
    assert explain("edge_combine", graph, left, x).chosen.deterministic


def test_gates_that_are_shut_let_no_infinite_gradient_through():
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    x = torch.full((2, 3), -5.0, requires_grad=True)
    y = message_aggregate(graph, x, torch.zeros(2, 3), message="relu_add")
    for again in (True, False):
        (dx,) = torch.autograd.grad(
            y, x, torch.full_like(y, torch.inf), create_graph=again, retain_graph=True
        )
        assert (dx == 0).all()
