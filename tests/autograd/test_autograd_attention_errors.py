"""What attention in ``sparsefmt.autograd`` refuses: the class, and the argument that it names."""

import pytest

torch = pytest.importorskip("torch")

from attention_cases import KINDS, call, loop_graph, shapes_of  # noqa: E402
from autograd_cases import TRANSFORMS, make_graph, tensors  # noqa: E402

from sparsefmt import DeviceError, DtypeError, ShapeError, UnsupportedError  # noqa: E402
from sparsefmt.autograd import dot_aggregate, gat_aggregate, gatv2_aggregate  # noqa: E402
from sparsefmt.autograd.attention import gat_of_vectors  # noqa: E402

GRAPH, SQUARE = make_graph(9, 6, 40), loop_graph()
NNZ = GRAPH.nnz
H, EL, ER, E, ATT = (torch.rand(*shape) for shape in ((6, 2, 4), (6, 2), (9, 2), (NNZ, 2), (2, 4)))
R, S, V = torch.rand(9, 2, 4), torch.rand(7, 2, 4), torch.rand(1, 2, 4)


def gat(h=H, el=EL, er=ER, edges=None, *, graph=GRAPH, **options):
    return gat_aggregate(graph, h, el, er, edges, **options)


def gatv2(left=H, right=R, att=ATT, edges=None, **options):
    return gatv2_aggregate(GRAPH, left, right, att, edges, **options)


def dot(queries=R, keys=H, values=None, edges=None, **options):
    return dot_aggregate(GRAPH, queries, keys, values, edges, **options)


def layer(h=S, source=V, target=V, *scores, graph=SQUARE, **options):
    return gat_of_vectors(graph, h, source, target, *scores, **options)


REFUSED = [
    (lambda: gat(graph=GRAPH.csr), DtypeError, "graph is a CSR: give a sparsefmt.Graph"),
    (lambda: gat(H.numpy()), DtypeError, "h is a ndarray: give a torch.Tensor"),
    (lambda: gat(H.int()), DtypeError, r"h is torch.int32: .* h.float\(\)"),
    (lambda: gat(H.to_sparse()), UnsupportedError, "h has layout torch.sparse_coo"),
    (lambda: gat(H.to("meta")), DeviceError, "h is on meta but the graph is on cpu"),
    (lambda: gat(H[0, 0]), ShapeError, r"h has shape \(4,\): give \(rows, feat\)"),
    (lambda: gat(H[None]), ShapeError, r"h has shape \(1, 6, 2, 4\): give \(rows, feat\) or"),
    (
        lambda: gat(H[:, None]),
        ShapeError,
        r"h has shape \(6, 1, 2, 4\): give \(rows, feat\) or \(rows, h",
    ),
    (lambda: gat(R), ShapeError, "h has 9 rows but the graph has 6 columns"),
    (lambda: gat(el=None), DtypeError, "el is a NoneType"),
    (lambda: gat(el=ER), ShapeError, r"el has shape \(9, 2\): give \(6, 2\), one score per source"),
    (lambda: gat(el=EL[:, :1]), ShapeError, r"el has shape \(6, 1\): give \(6, 2\)"),
    (lambda: gat(H[:, 0]), ShapeError, r"el has shape \(6, 2\): give \(6,\)"),
    (lambda: gat(er=EL), ShapeError, r"er has shape \(6, 2\): give \(9, 2\), one score per target"),
    (lambda: gat(er=ER.double()), DtypeError, "er is torch.float64 but h is torch.float32"),
    (lambda: gat(el=EL.half()), DtypeError, "el is torch.float16 but h is torch.float32"),
    (lambda: gat(H.half(), EL.bfloat16()), DtypeError, "el is torch.bfloat16 but h is torch.fl"),
    (lambda: gat(edges=E[1:]), ShapeError, rf"edge_scores has shape .* give \({NNZ}, 2\), one"),
    (lambda: gat(edges=E.to("meta")), DeviceError, "edge_scores is on meta"),
    (lambda: gat(edges=2.0), DtypeError, "edge_scores is a float"),
    (lambda: gat(negative_slope="a"), DtypeError, "negative_slope is 'a': give a number"),
    (lambda: gat(negative_slope=True), DtypeError, "negative_slope is True: give a number"),
    (lambda: gat(dropout=None), DtypeError, "dropout is None: give a number"),
    (lambda: gat(dropout=1.0), ShapeError, "dropout is 1.0: give a share from 0 to less than 1"),
    (lambda: gat(dropout=-0.1), ShapeError, "dropout is -0.1"),
    (lambda: gat(dropout=float("nan")), ShapeError, "dropout is nan"),
    (lambda: gat(seed=1.5), DtypeError, "seed is 1.5: give an integer, or an int64 tensor of one"),
    (lambda: gat(seed=True), DtypeError, "seed is True: give an integer"),
    (lambda: gat(seed=torch.tensor(1.0)), DtypeError, "seed is torch.float32: give int64"),
    (
        lambda: gat(seed=torch.tensor([1, 2])),
        ShapeError,
        r"seed has shape \(2,\): give one integer",
    ),
    (lambda: gat(seed=torch.tensor(1).to("meta")), DeviceError, "seed is on meta but the graph"),
    (lambda: gat(self_loops=1), DtypeError, "self_loops is 1: give True or False"),
    (
        lambda: gat(self_loops=True),
        ShapeError,
        r"self_loops is True but the graph has shape \(9, 6\): give a square one",
    ),
    (lambda: layer(source=V[0, 0]), ShapeError, r"source has shape \(4,\): give \(2, 4\), one vec"),
    (lambda: layer(target=V.double()), DtypeError, "target is torch.float64 but h is torch.float"),
    (lambda: layer(H, graph=GRAPH), ShapeError, "h is of sources and targets but the graph has"),
    (
        lambda: layer(S, V, V, None, EL, self_loops=True),
        ShapeError,
        r"loop_scores has shape \(6, 2\): give \(7, 2\), one score per vertex",
    ),
    (lambda: gatv2(R), ShapeError, "left has 9 rows but the graph has 6 columns"),
    (lambda: gatv2(right=H), ShapeError, "right has 6 rows but the graph has 9 rows"),
    (
        lambda: gatv2(right=R[:, :, 1:]),
        ShapeError,
        r"right has shape \(9, 2, 3\) but left has \(6, 2",
    ),
    (lambda: gatv2(right=R.double()), DtypeError, "right is torch.float64 but left is torch.float"),
    (lambda: gatv2(att=ATT[0]), ShapeError, r"att has shape \(4,\): give \(2, 4\), one vector per"),
    (lambda: gatv2(att=ATT.half()), DtypeError, "att is torch.float16 but left is torch.float32"),
    (lambda: gatv2(edges=E[:, 0]), ShapeError, "edge_scores has shape"),
    (lambda: gatv2(self_loops=True), ShapeError, "self_loops is True but the graph has shape"),
    (lambda: dot(H), ShapeError, "queries has 6 rows but the graph has 9 rows"),
    (lambda: dot(keys=R), ShapeError, "keys has 9 rows but the graph has 6 columns"),
    (lambda: dot(R[:, 0]), ShapeError, r"queries has shape \(9, 4\) but keys has \(6, 2, 4\)"),
    (lambda: dot(values=R), ShapeError, "values has 9 rows but the graph has 6 columns"),
    (
        lambda: dot(values=H[:, :1]),
        ShapeError,
        r"values has shape \(6, 1, 4\) but keys has \(6, 2, 4",
    ),
    (lambda: dot(values=H.half()), DtypeError, "values is torch.float16 but keys is torch.float32"),
    (lambda: dot(scale="1"), DtypeError, "scale is '1': give a number"),
    (lambda: dot(edges=E.long()), DtypeError, "edge_scores is torch.int64"),
]


@pytest.mark.parametrize(("wrong", "kind", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_bad_input_is_refused_with_the_argument_named(wrong, kind, text):
    with pytest.raises(kind, match=text):
        wrong()


def test_errors_tell_what_autocast_made_of_the_dtypes():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(DtypeError, match=r"el is torch.float32 but h is .*64 under autocast"):
            gat(H.double())


FUNCTIONS = [*KINDS, "layer"]


def function_of(name):
    """Of one tensor that requires grad, and that tensor."""
    if name in KINDS:
        first, *others = tensors("cpu", *shapes_of(name, SQUARE, (2,), 4), grad=False)
        return (lambda x: call(name, SQUARE, [x, *others])), first
    return (lambda x: layer(x, V.double(), V.double())), S.double()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_derivative_is_refused(name):
    function, x = function_of(name)
    x = x.requires_grad_()
    (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    assert first.isfinite().all()
    said = {"gat": "gat_aggregate", "layer": "gat_of_vectors", "gatv2": "gatv2_aggregate"}
    text = f"the gradient of {said.get(name, 'dot_aggregate')} cannot be differentiated again"
    with pytest.raises(UnsupportedError, match=text):
        torch.autograd.grad(first.sum(), x)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms_are_refused_with_what_to_do_instead(name, transform, grad):
    function, x = function_of(name)
    with pytest.raises(UnsupportedError, match=r"use torch.autograd.grad"):
        TRANSFORMS[transform](function, x.requires_grad_(grad))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tangent_that_only_the_gradient_has_is_refused(name):
    function, x = function_of(name)
    x = x.requires_grad_()
    y = function(x)
    with torch.autograd.forward_ad.dual_level():
        grad = torch.autograd.forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(UnsupportedError, match=r"use torch.autograd.grad"):
            torch.autograd.grad(y, x, grad)


@pytest.mark.gpu
def test_tensors_on_the_cpu_are_refused_for_a_graph_on_a_gpu():
    graph = GRAPH.to("cuda")
    for wrong in (
        lambda: gat_aggregate(graph, H, EL, ER),
        lambda: gat_aggregate(graph, H.cuda(), EL, ER.cuda()),
        lambda: gat_aggregate(
            graph, H.cuda(), EL.cuda(), ER.cuda(), dropout=0.5, seed=torch.tensor(1)
        ),
        lambda: dot_aggregate(graph, R.cuda(), H),
    ):
        with pytest.raises(DeviceError, match=r"is on cpu but the graph is on"):
            wrong()
