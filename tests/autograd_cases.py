"""Graphs and a naive reference for the tests of ``sparsefmt.autograd``."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from sparsefmt import CSR, Graph
from sparsefmt.autograd.tensors.prepare import tensors_of


def side_of(graph, transposed):
    """The rows of a graph, or of its transpose."""
    return tensors_of(graph).side(transposed)


def _with_tangent(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x))).tangent


#: What neither passes through the functions nor may be dropped: of a function, at a tensor.
TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda z: f(z).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(lambda z: f(z).sum(), x)[1](torch.ones(()))[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "forward_ad": _with_tangent,
}


@contextmanager
def matmul_precision(word):
    """Let torch's products of float32 be rounded so far."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(word)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def results(layer, x, *args):
    """The result, and the gradients of the features and of all parameters that have some."""
    y = layer(x, *args)
    given = [one for one in (x, *layer.parameters()) if one.requires_grad]
    return [y, *torch.autograd.grad(y.square().sum(), given)]


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


#: Index dtypes of graphs, and whether ops are traced with symbolic sizes, which takes most of the
#: time of ``check_rules``: for one of them is enough.
RULES = pytest.mark.parametrize(
    ("index_dtype", "traced"),
    [(np.int32, True), (np.int64, False), pytest.param(np.int64, True, marks=pytest.mark.grid)],
)


def check_rules(calls, traced):
    """Check that ops keep the rules of library ops."""
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    for op, args in calls:
        torch.library.opcheck(
            op.default, args, test_utils=[*checks, *["test_aot_dispatch_dynamic"] * traced]
        )


def tensors(device, *shapes, dtype=torch.float64, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    return [one.to(device, dtype).requires_grad_(grad) for one in made]


def make_graph(
    n_rows, n_cols, nnz, *, device="cpu", index_dtype=np.int32, weighted=False, seed=0
) -> Graph:
    """Rectangular, not symmetric, with duplicates, a hub in the last row and empty rows."""
    rng = np.random.default_rng(seed)
    row = np.concatenate([rng.integers(0, n_rows, nnz - nnz // 4), np.full(nnz // 4, n_rows - 1)])
    row = np.sort(row[row % 3 != 1])
    indptr = np.searchsorted(row, np.arange(n_rows + 1)).astype(index_dtype)
    indices = rng.integers(0, n_cols, len(row)).astype(index_dtype)
    data = rng.random(len(row)) if weighted else None
    return Graph(CSR(indptr, indices, data, shape=(n_rows, n_cols))).to(device)


def captured(once):
    """Return a CUDA graph of a call, after runs on a side stream, and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, once()


def empty_graph(n_rows, n_cols, *, device="cpu") -> Graph:
    indptr, indices = np.zeros(n_rows + 1, np.int32), np.zeros(0, np.int32)
    return Graph(CSR(indptr, indices, shape=(n_rows, n_cols))).to(device)


def entries(graph) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each entry, on the CPU, in the order in which the edges were given."""
    graph = graph.to("cpu")
    csr, order = graph.csr, graph.csr_perm
    found = np.empty((2, csr.nnz), np.int64)
    found[0, order] = np.repeat(np.arange(csr.n_rows), np.diff(csr.indptr))
    found[1, order] = csr.indices
    rows, cols = torch.from_numpy(found)
    return rows, cols


def naive_spmm(graph, x, a=None, r=None, c=None, reduce="sum"):
    """By gathering a message for each entry and scattering it: differentiable, on the CPU."""
    rows, cols = entries(graph)
    messages = x[cols]
    messages = messages if c is None else messages * c[cols][:, None]
    messages = messages if a is None else messages * a[:, None]
    out = x.new_zeros(graph.n_rows, x.shape[1])
    if reduce in ("sum", "mean"):
        out = out.index_add(0, rows, messages)
        if reduce == "mean":
            out = out / torch.bincount(rows, minlength=len(out)).clamp(min=1)[:, None]
    else:
        at = rows[:, None].expand_as(messages)
        out = out.scatter_reduce(0, at, messages, "a" + reduce, include_self=False)
    return out if r is None else out * r[:, None]


def naive_sddmm(graph, x, y):
    rows, cols = entries(graph)
    return (x[rows] * y[cols]).sum(-1)


def naive_softmax(graph, scores):
    rows, _ = entries(graph)
    out = torch.empty_like(scores)
    for row in rows.unique():
        out[rows == row] = torch.softmax(scores[rows == row], dim=0)
    return out
