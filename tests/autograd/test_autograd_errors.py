"""What single functions refuse: options, shapes that do not fit together, and how errors say it.

What every function refuses of each of its tensors is in ``tests/laws``, and what their options
refuse too: here is one value of each.
"""

from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_cases import loop_graph  # noqa: E402
from autograd_cases import make_graph  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from sparsefmt import DeviceError, DtypeError, Graph, ShapeError, UnsupportedError, autograd  # noqa: E402
from sparsefmt.autograd import gcn_norm, maxk, maxk_aggregate, propagate, sddmm, spmm  # noqa: E402
from sparsefmt.autograd.attention import gat_of_vectors  # noqa: E402
from sparsefmt.autograd.cbsr import features_to_keep  # noqa: E402

GRAPH, SQUARE = make_graph(9, 6, 40), loop_graph()
WEIGHTED, NNZ = make_graph(9, 6, 40, weighted=True), GRAPH.nnz
PARTS = pytree.tree_map(lambda leaf: torch.nn.Parameter(leaf, requires_grad=False), SQUARE)
X, Y, A, E = torch.rand(6, 4), torch.rand(9, 4), torch.rand(NNZ), torch.rand(NNZ, 2)
H, R, EL, ER = torch.rand(6, 2, 4), torch.rand(9, 2, 4), torch.rand(6, 2), torch.rand(9, 2)
S, V, ATT, OWN = torch.rand(7, 2, 4), torch.rand(1, 2, 4), torch.rand(2, 4), torch.rand(7, 1)
F, W = S[:, 0], torch.rand(NNZ, 4)
MARKS = torch.zeros(7, 1, dtype=torch.bool)


def gat(h=H, el=EL, er=ER, edges=None, *, graph=GRAPH, **options):
    return autograd.gat_aggregate(graph, h, el, er, edges, **options)


def gatv2(left=H, right=R, att=ATT, edges=None, **options):
    return autograd.gatv2_aggregate(GRAPH, left, right, att, edges, **options)


def dot(queries=R, keys=H, values=None, edges=None, **options):
    return autograd.dot_aggregate(GRAPH, queries, keys, values, edges, **options)


def layer(h=S, source=V, target=V, *scores, graph=SQUARE, **options):
    return gat_of_vectors(graph, h, source, target, *scores, **options)


def sample(width=3, **options):
    return autograd.sampled_aggregate(GRAPH, X, width, **options)


def own(factor=OWN, graph=SQUARE, x=F, **options):
    return autograd.aggregate_with_own(graph, x, factor, **options)


def message(x=X, w=W, **options):
    return autograd.message_aggregate(GRAPH, x, w, **options)


#: Shapes, whose errors say which there may be.
SHAPES = [
    (lambda: spmm(GRAPH, X[0]), r"x has shape \(4,\): .* x\[:, None\]"),
    (lambda: spmm(GRAPH, H[:, :1], E), "edge_weight has 2 heads.*: give "),
    (lambda: spmm(GRAPH, H, E[:3]), r"edge_weight has shape \(3, 2\) but the graph"),
    (lambda: spmm(GRAPH, H[:, None, None], E), r"x has shape .*give \(rows, .*feat\)"),
    (lambda: spmm(GRAPH, H[:4]), "x has 4 rows but the graph has 6 columns"),
    (lambda: sddmm(GRAPH, Y, X[:, 1:]), r"has shape .* (and|but) \w+ .*\("),
    (lambda: sddmm(GRAPH, Y[:, None], X), r"has shape .* (and|but) \w+ .*\("),
    (lambda: maxk(X[0], 2), r"x has shape \(4,\): .* x\[:, None\]"),
    (lambda: maxk(X[None], 2), r"x has shape \(1, 6, 4\): .* x.flatten\(1\)"),
    (lambda: maxk(X, 0), "k is 0 but a row has 4 features: k lies between 1 and 4"),
    (lambda: maxk_aggregate(GRAPH, X, 5), "k is 5 but a row has 4 features"),
    (lambda: gat(H[0, 0]), r"h has shape \(4,\): give \(rows, feat\)"),
    (lambda: gat(el=EL[:, :1]), r"el has shape \(6, 1\): give \(6, 2\)"),
    (lambda: gat(H[:, 0]), r"el has shape \(6, 2\): give \(6,\)"),
    (lambda: gat(edges=E[1:]), rf"edge_scores has shape .* give \({NNZ}, 2\), one"),
    (lambda: gat(dropout=1.0), "dropout is 1.0: give a share from 0 to less than 1"),
    (lambda: gat(seed=torch.tensor([1, 2])), r"seed has shape \(2,\): give one integer"),
    (lambda: gat(self_loops=True), r"loops is True but the graph has shape \(9, 6\): give a sq"),
    (lambda: layer(source=V[0, 0]), r"source has shape \(4,\): give \(2, 4\), one vec"),
    (lambda: layer(H, graph=GRAPH), "h is of sources and targets but the graph has"),
    (lambda: layer(S, V, V, None, EL, self_loops=True), r"\(7, 2\), one score per vertex"),
    (lambda: gatv2(right=R[:, :, 1:]), r"right has shape \(9, 2, 3\) (and|but) left .*\(6, 2"),
    (lambda: gatv2(self_loops=True), "self_loops is True but the graph has shape"),
    (lambda: dot(R[:, 0]), r"queries has shape \(9, 4\) .* \(6, 2, 4\)"),
    (lambda: dot(values=H[:, :1]), r"values has shape \(6, 1, 4\) .* \(6, 2, 4"),
    (lambda: dot(scale=np.inf), "give a finite number, or leave it out"),
    (lambda: sample(0), "width is 0: give the most entries of a row"),
    (lambda: sample(seed=torch.tensor([1, 2])), r"seed has shape \(2,\): give one int"),
    (lambda: gcn_norm(GRAPH), r"graph has shape \(9, 6\): .* as many columns as rows"),
    (lambda: gcn_norm(GRAPH, self_loops=False), r"shape \(9, 6\): a vertex has one degree"),
    (lambda: own(graph=GRAPH, x=X), "takes part in its own"),
    (lambda: own(k=6), "k is 6 but a row has 4"),
    (lambda: own(without=MARKS[:3]), r"without has shape \(3, 1\)"),
    (lambda: propagate(SQUARE, F, OWN, OWN), r"scale has shape \(7, 1\)"),
    (lambda: propagate(SQUARE, F, OWN[:, 0], OWN, bias=OWN[:, 0]), r"bias has shape \(7,\)"),
    (lambda: features_to_keep(0), "k is 0: give 1 or more"),
    (lambda: features_to_keep(6, 5), "k is 6 but a row has 5 features"),
    (lambda: message(X, W[:, 0]), r"edge_features\[:, None\] for instance"),
    (lambda: message(X, W[:, :3]), "edge_features has .*3.* but x has .*4"),
    (lambda: autograd.edge_combine(GRAPH, Y, X[:, :3]), "right has .*3.* but left has .*4"),
]
KINDS = [
    (lambda: autograd.prepare(X), "graph is a .* tensor of .*: give a sparsefmt.Graph"),
    (lambda: spmm(WEIGHTED, X), "x is torch.float32 but the graph's own edge values are torch.fl"),
    *(
        (
            lambda k=k, function=function: function(k),
            "k is (a float|True|False|a Tensor): give an integer",
        )
        for function in (lambda k: maxk(X, k), lambda k: maxk_aggregate(GRAPH, X, k))
        for k in (2.0, True, torch.tensor(True))
    ),
    (lambda: maxk_aggregate(GRAPH, X, A), "k is a Tensor: give an integer"),
    (lambda: features_to_keep(2.5), "k is a float"),
    (lambda: gat(el=None), "el is a NoneType"),
    (lambda: gat(H.half(), EL.bfloat16()), "el is torch.bfloat16 but h is torch.fl"),
    (lambda: gat(negative_slope="a"), "negative_slope is 'a': give a number"),
    (lambda: gat(dropout=None), "dropout is None: give a number"),
    *(
        (lambda call=call, seed=seed: call(seed=seed), text)
        for call in (gat, sample)
        for seed, text in (
            (1.5, "seed is 1.5: give an integer, or an int64 tensor of one"),
            (True, "seed is True: give an integer"),
            (torch.tensor(1.0), r"seed is torch.float32: .*int64|seed.long\(\)"),
        )
    ),
    (lambda: gat(self_loops=1), "self_loops is 1: give True or False"),
    (lambda: gcn_norm(SQUARE, self_loops=None), "self_loops is None"),
    (lambda: dot(scale="1"), "scale is '1': give a number"),
    *(
        (lambda width=width: sample(width), "width is .*: give an integer")
        for width in (A, torch.tensor(True), 2.0)
    ),
    (lambda: sample(mean=1), "mean is 1: give True or False"),
    (lambda: sample(rescale=None), "rescale is None: give True or False"),
    (lambda: own(without=OWN), "without is torch.float32: give torch.bool"),
    (lambda: message(None), "x is a NoneType"),
]
OTHERS = [
    (lambda: gat(seed=torch.tensor(1).to("meta")), DeviceError, "seed is on meta but the graph"),
    (lambda: own(without=MARKS.to("meta")), DeviceError, "without is on meta"),
    *(
        (call, UnsupportedError, text)
        for call, text in (
            (lambda: spmm(GRAPH, X, reduce="max_"), 'reduce is .max_.: use "sum"'),
            (lambda: spmm(GRAPH, H, E, reduce="max"), "for one head at a time"),
            (lambda: maxk_aggregate(GRAPH, X, 2, reduce="max"), '\'max\': use "sum" or "mean".'),
            (lambda: layer(S, V, V, None, OWN), "loop_scores are given but self_loops is False"),
            (lambda: sample(strategy="first"), '\'first\': use "bucket", "fastrand" or "random".'),
            (lambda: sample(mean=True, rescale=True), "are both True: .* leave one out"),
            (lambda: gcn_norm(PARTS), "graph is only the tensors .* self_loops=False"),
            (lambda: message(message="max"), "message is \"max\"|is 'max': use"),
            (lambda: message(reduce="max"), r"spmm\(\.\.\., reduce=.max.\) takes"),
            (lambda: autograd.edge_combine(GRAPH, Y, X, "div"), "op is 'div': use"),
        )
    ),
]
REFUSED = [(call, ShapeError, text) for call, text in SHAPES]
REFUSED += [(call, DtypeError, text) for call, text in KINDS]
REFUSED += OTHERS


@pytest.mark.parametrize(("call", "kind", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_bad_input_is_refused_with_the_argument_named(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: spmm(GRAPH, X.double(), A), "edge_weight is torch.bfloat16 but x is torch.fl"),
        (lambda: spmm(GRAPH, X, A.double()), "edge_weight is torch.float64 but x is torch.bfloat"),
        (lambda: spmm(WEIGHTED, X), "own edge values are torch.float64"),
        (lambda: sddmm(GRAPH, Y, X.double()), "y is torch.float64 but x is torch.bfloat16"),
        (lambda: gat(H.double()), r"el is torch.float32 but h is .*64"),
    ],
)
def test_errors_tell_what_autocast_made_of_the_dtypes(call, text):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(DtypeError, match=f"{text}.* under autocast"):
            call()


def test_tensors_in_the_place_of_a_graph_have_no_loops_added():
    w = torch.rand(SQUARE.nnz)
    result, values = gcn_norm(PARTS, w, self_loops=False)
    assert result is PARTS
    assert torch.equal(values, gcn_norm(SQUARE, w, self_loops=False)[1])


def test_any_integer_is_a_width():
    for width in (np.int64(3), torch.tensor(3), np.uint8(3)):
        assert torch.equal(sample(width), sample(3))


def test_an_edge_index_without_features_of_vertices_is_refused():
    edges, features = torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 3)
    with pytest.raises(ShapeError, match="nothing says how many vertices"):
        autograd.message_aggregate(edges, None, features, message="copy_edge")


@pytest.mark.parametrize("is_new", [False, True], ids=["graph", "edge_index"])
def test_a_first_call_within_a_transform_is_refused_as_later_ones(is_new):
    edges, types = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([0, 1, 0])
    graph = edges if is_new else Graph.from_edge_index(edges, num_nodes=3)
    call = partial(
        autograd.relational_aggregate, graph, weight=torch.ones(2, 4, 5), edge_type=types
    )
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"transforms of torch\.func"):
            torch.func.grad(lambda x: call(x).sum())(torch.ones(3, 4))
        call(torch.ones(3, 4))
