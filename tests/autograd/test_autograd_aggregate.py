"""Where the backward of ``spmm`` goes through both gradients in one pass, and where it may not."""

import pytest

torch = pytest.importorskip("torch")

from autograd_cases import make_graph, side_of, tensors  # noqa: E402
from torch.autograd import gradgradcheck  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from sparsefmt.autograd import spmm  # noqa: E402
from sparsefmt.ops.matmul import cuda_aggregate as matmul_cuda_aggregate  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Seen(TorchDispatchMode):
    """The names of the library ops that the dispatcher sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sparsefmt":
            self.names.append(func.name().split("::")[1])
        return func(*args, **(kwargs or {}))


def backward_of(graph, reduce="sum", *, needs=(True, True, False, False), create_graph=False):
    """The ops of a backward, and the gradients."""
    shapes = [(graph.n_cols, 4), (graph.nnz,), (graph.n_rows,), (graph.n_cols,)]
    given = tensors(graph.device, *shapes, grad=False)
    given = [one.requires_grad_(need) for one, need in zip(given, needs, strict=True)]
    x, a, r, c = given
    y = spmm(graph, x, a, reduce=reduce, row_scale=r, col_scale=c)
    wanted = [one for one in given if one.requires_grad]
    with Seen() as seen:
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


def test_what_is_to_be_differentiated_again_is(device):
    graph = make_graph(6, 4, 14, device=device)
    names, found = backward_of(graph, create_graph=True)
    assert "aggregate_backward" not in names
    assert all(one.requires_grad for one in found)
    x, a = tensors(device, (4, 2), (graph.nnz,))
    for reduce in ("sum", "mean"):
        assert gradgradcheck(
            lambda x, a, reduce=reduce: spmm(graph, x, a, reduce=reduce), (x, a), nondet_tol=0
        )


@pytest.mark.gpu
def test_a_large_graph_keeps_the_inverse_of_its_permutation(monkeypatch):
    """Made by the second gradient, but not by a capture, which then goes without."""
    graph = make_graph(40, 30, 300, device="cuda")
    expected = backward_of(graph)[1]
    monkeypatch.setattr(matmul_cuda_aggregate, "goes_apart", lambda *_, **__: True)
    x, a = tensors("cuda", (30, 4), (graph.nnz,))
    built, stream = side_of(graph, True).built.found, torch.cuda.Stream()
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
    for one, other in zip(gradients(), found, strict=True):
        assert torch.equal(one, other)
    for _ in range(2):
        for one, other in zip(expected, backward_of(graph)[1], strict=True):
            torch.testing.assert_close(one, other)
    perm, inverse = built["perm", place], built["inverse", place]
    assert perm[torch.from_dlpack(inverse).long()].tolist() == list(range(graph.nnz))
