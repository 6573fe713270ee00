"""What ``sparsefmt.autograd`` refuses: the class of the error, and the argument that it names."""

import pytest

torch = pytest.importorskip("torch")

from autograd_cases import TRANSFORMS, make_graph  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

from sparsefmt import DeviceError, DtypeError, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt.autograd import edge_softmax, maxk, maxk_aggregate, prepare, sddmm, spmm  # noqa: E402

GRAPH = make_graph(9, 6, 40)
X, Y, A = torch.rand(6, 4), torch.rand(9, 4), torch.rand(GRAPH.nnz)
NNZ = GRAPH.nnz

REFUSED = [
    (lambda: spmm(GRAPH.csr, X), DtypeError, "graph is a CSR: give a sparsefmt.Graph"),
    (lambda: prepare(X), DtypeError, "graph is a .* tensor of .*: give a sparsefmt.Graph"),
    (lambda: spmm(GRAPH, X.numpy()), DtypeError, "x is a ndarray: give a torch.Tensor"),
    (lambda: spmm(GRAPH, X.int()), DtypeError, r"x is torch.int32: .* x.float\(\)"),
    (lambda: spmm(GRAPH, X.to(torch.complex64)), DtypeError, "x is torch.complex64"),
    (lambda: spmm(GRAPH, X.to_sparse()), UnsupportedError, "x has layout torch.sparse_coo"),
    (lambda: spmm(GRAPH, X.to("meta")), DeviceError, "meta but the graph is on cpu: make x on cpu"),
    (lambda: spmm(GRAPH, X[0]), ShapeError, r"x has shape \(4,\): .* x\[:, None\]"),
    (
        lambda: spmm(GRAPH, X[:, None, None]),
        ShapeError,
        r"x has shape \(6, 1, 1, 4\): .*reshape\(len\(x\), -1\)",
    ),
    (lambda: spmm(GRAPH, Y), ShapeError, "x has 9 rows but the graph has 6 columns"),
    (lambda: spmm(GRAPH, X, A[1:]), ShapeError, f"edge_weight has shape .* stores {NNZ} entries"),
    (lambda: spmm(GRAPH, X, A[:, None, None]), ShapeError, "edge_weight has shape"),
    (lambda: spmm(GRAPH, X, A.double()), DtypeError, "edge_weight is torch.float64 but x is"),
    (lambda: spmm(GRAPH, X, A.long()), DtypeError, "edge_weight is torch.int64"),
    (lambda: spmm(GRAPH, X, A.to_sparse()), UnsupportedError, "edge_weight has layout"),
    (lambda: spmm(GRAPH, X, A.to("meta")), DeviceError, "edge_weight is on meta"),
    (lambda: spmm(GRAPH, X, 2.0), DtypeError, "edge_weight is a float"),
    (lambda: spmm(GRAPH, X, reduce="max_"), UnsupportedError, 'reduce is .max_.: use "sum"'),
    (lambda: spmm(GRAPH, X, reduce=None), UnsupportedError, "reduce is None"),
    (
        lambda: spmm(GRAPH, X, row_scale=X[:, 0]),
        ShapeError,
        r"row_scale has shape \(6,\): give \(9,\)",
    ),
    (
        lambda: spmm(GRAPH, X, col_scale=Y[:, 0]),
        ShapeError,
        r"col_scale has shape \(9,\): give \(6,\)",
    ),
    (lambda: spmm(GRAPH, X, col_scale=X[:, 0].half()), DtypeError, "col_scale is torch.float16"),
    (
        lambda: spmm(make_graph(9, 6, 40, weighted=True), X),
        DtypeError,
        "x is torch.float32 but the graph's own edge values are torch.float64",
    ),
    (lambda: sddmm(GRAPH, X, X), ShapeError, "x has 6 rows but the graph has 9 rows"),
    (lambda: sddmm(GRAPH, Y, Y), ShapeError, "y has 9 rows but the graph has 6 columns"),
    (lambda: sddmm(GRAPH, Y, X[:, 1:]), ShapeError, r"y has shape \(6, 3\) but x has \(9, 4\)"),
    (
        lambda: sddmm(GRAPH, Y[:, None], X),
        ShapeError,
        r"y has shape \(6, 4\) but x has \(9, 1, 4\)",
    ),
    (lambda: sddmm(GRAPH, Y, X.double()), DtypeError, "y is torch.float64 but x is torch.float32"),
    (lambda: sddmm(GRAPH, Y, None), DtypeError, "y is a NoneType"),
    (lambda: edge_softmax(GRAPH, A[1:]), ShapeError, f"scores has shape .* stores {NNZ} entries"),
    (lambda: edge_softmax(GRAPH, A[:, None, None]), ShapeError, "scores has shape"),
    (lambda: edge_softmax(GRAPH, A.bool()), DtypeError, "scores is torch.bool"),
    (lambda: maxk(X.numpy(), 2), DtypeError, "x is a ndarray: give a torch.Tensor"),
    (lambda: maxk(X.long(), 2), DtypeError, r"x is torch.int64: .* x.float\(\)"),
    (lambda: maxk(X.to_sparse(), 2), UnsupportedError, "x has layout torch.sparse_coo"),
    (lambda: maxk(X[0], 2), ShapeError, r"x has shape \(4,\): .* x\[:, None\]"),
    (lambda: maxk(X[None], 2), ShapeError, r"x has shape \(1, 6, 4\): .* x.flatten\(1\)"),
    (lambda: maxk(X, 0), ShapeError, "k is 0 but a row has 4 features: k lies between 1 and 4"),
    (lambda: maxk(X, 5), ShapeError, "k is 5 but a row has 4 features"),
    (lambda: maxk(X, 2.0), DtypeError, "k is a float: give an integer"),
    (lambda: maxk(X, True), DtypeError, "k is True: give an integer"),
    (lambda: maxk(X, torch.tensor(True)), DtypeError, "k is True: give an integer"),
    (lambda: maxk_aggregate(GRAPH.csr, X, 2), DtypeError, "graph is a CSR: give a sparsefmt.Graph"),
    (lambda: maxk_aggregate(GRAPH, Y, 2), ShapeError, "x has 9 rows but the graph has 6 columns"),
    (
        lambda: maxk_aggregate(GRAPH, X, 2, A[1:]),
        ShapeError,
        f"edge_weight .* stores {NNZ} entries",
    ),
    (
        lambda: maxk_aggregate(GRAPH, X, 2, A.long()),
        DtypeError,
        r"edge_weight is torch.int64",
    ),
    (
        lambda: maxk_aggregate(GRAPH, X, 2, A[1:, None]),
        ShapeError,
        rf"stores {NNZ} entries: give \({NNZ},\)",
    ),
    (lambda: maxk_aggregate(GRAPH, X, 5), ShapeError, "k is 5 but a row has 4 features"),
    (lambda: maxk_aggregate(GRAPH, X, A), DtypeError, "k is a Tensor: give an integer"),
    (lambda: maxk_aggregate(GRAPH, X, False), DtypeError, "k is False: give an integer"),
    (
        lambda: maxk_aggregate(GRAPH, X, 2, reduce="max"),
        UnsupportedError,
        """reduce is 'max': use "sum" or "mean".""",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_bad_input_is_refused_with_the_argument_named(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: spmm(GRAPH, X.double(), A),
            "edge_weight is torch.bfloat16 but x is torch.float64",
        ),
        (lambda: spmm(GRAPH, X, A.double()), "edge_weight is torch.float64 but x is torch.bfloat"),
        (lambda: spmm(make_graph(9, 6, 40, weighted=True), X), "own edge values are torch.float64"),
        (lambda: sddmm(GRAPH, Y, X.double()), "y is torch.float64 but x is torch.bfloat16"),
    ],
)
def test_errors_tell_what_autocast_made_of_the_dtypes(call, text):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(DtypeError, match=f"{text}.* under autocast, which narrows all but"):
            call()


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_a_second_derivative_of_an_extremum_is_refused(reduce):
    x, a = X.clone().requires_grad_(), A.clone().requires_grad_()
    y = spmm(GRAPH, x, a, reduce=reduce)
    first = torch.autograd.grad(y.square().sum(), (x, a), create_graph=True)
    for one in first:
        assert one.isfinite().all()
        with pytest.raises(UnsupportedError, match=f"reduce is '{reduce}'.*cannot be different"):
            torch.autograd.grad(one.sum(), x, retain_graph=True)


FUNCTIONS = {
    "spmm": (lambda x: spmm(GRAPH, x), X),
    "weights": (lambda a: spmm(GRAPH, X, a), A),
    "max": (lambda x: spmm(GRAPH, x, reduce="max"), X),
    "scale": (lambda r: spmm(GRAPH, X, reduce="max", row_scale=r), Y[:, 0]),
    "sddmm": (lambda x: sddmm(GRAPH, Y, x), X),
    "softmax": (lambda s: edge_softmax(GRAPH, s), A),
    "maxk": (lambda x: maxk(x, 2), X),
    "maxk_aggregate": (lambda x: maxk_aggregate(GRAPH, x, 2), X),
    "maxk_weights": (lambda a: maxk_aggregate(GRAPH, X, 2, a), A),
}
MEND = "use torch.autograd.grad"


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms_are_refused_with_what_to_do_instead(name, transform, grad):
    function, value = FUNCTIONS[name]
    value = value.clone().requires_grad_(grad)
    with pytest.raises(UnsupportedError, match=MEND):
        TRANSFORMS[transform](function, value)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_tangents_forward_mode_changes_nothing(name):
    function, value = FUNCTIONS[name]
    x = value.clone().requires_grad_()
    (want,) = torch.autograd.grad(function(x).square().sum(), x)
    with forward_ad.dual_level():
        (inside,) = torch.autograd.grad(function(x).square().sum(), x)
    assert torch.equal(inside, want)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "scale"])  # torch's product
def test_a_tangent_that_only_the_gradient_has_is_refused(name):
    function, value = FUNCTIONS[name]
    x = value.clone().requires_grad_()
    y = function(x)
    with forward_ad.dual_level():
        grad = forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(UnsupportedError, match=MEND):
            torch.autograd.grad(y, x, grad)


@pytest.mark.gpu
def test_tensors_on_the_cpu_are_refused_for_a_graph_on_a_gpu():
    graph = GRAPH.to("cuda")
    for call in (
        lambda: spmm(graph, X),
        lambda: spmm(graph, X.cuda(), A),
        lambda: spmm(GRAPH, X.cuda()),
        lambda: sddmm(graph, Y.cuda(), X),
        lambda: edge_softmax(graph, A),
    ):
        with pytest.raises(DeviceError, match=r"is on (cpu|cuda:0) but the graph is on"):
            call()
