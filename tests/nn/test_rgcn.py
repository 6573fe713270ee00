"""``RGCNConv`` against PyG's: outputs and all gradients, states, graphs that carry their types."""

import itertools

import pytest

torch = pytest.importorskip("torch")
pyg = pytest.importorskip("torch_geometric.nn")

from op_cases import note_calls  # noqa: E402
from pyg_cases import SparseTensor, assert_same, both, outcome, seed  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402

from sparsefmt import Graph, nn  # noqa: E402
from sparsefmt.autograd import relational_aggregate, relations  # noqa: E402
from sparsefmt.autograd.tensors import types as typed_edges  # noqa: E402
from sparsefmt.errors import DeviceError, DtypeError, IndexRangeError, ShapeError, UnsupportedError  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

N, M, TYPES = 14, 9, 5
PARTS = {"full": (None, None), "bases": (3, None), "blocks": (None, 2)}


#: Most bytes of mapped features, vertices below which a type has few, bytes of whole matrices.
WAYS = {
    "one": (1, 4, 0),
    "few": (1, 0, 1 << 25),
    "two": (14 * 8 * 8 * 2, 4, 0),
    "all": (1 << 25, 4, 1 << 25),
}


@pytest.fixture(params=WAYS)
def together(request, monkeypatch):
    """Map the features of one type at a time, of its sources alone, of two types, or of all.

    Blocks stay blocks, or are parts of whole matrices.
    """
    resident, few, whole = WAYS[request.param]
    monkeypatch.setattr(relations, "RESIDENT_BYTES", resident)
    monkeypatch.setattr(relations, "MOST_OF_WHOLE", whole)
    monkeypatch.setattr(typed_edges, "FEW_SOURCES", few)


def edges(device="cpu", n_target=M - 2):
    """Directed, with repeated edges, loops, isolated vertices and a type that no edge has."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(0, N - 2, (60,), generator=generator)
    target = torch.randint(0, n_target, (60,), generator=generator)
    types = torch.randint(0, TYPES, (60,), generator=generator)
    types[types == 3] = 2
    source[:4], target[:4] = 1, 1
    return torch.stack((source, target)).to(device), types.to(device)


def pair(channels, parts="full", *, device="cpu", **options):
    """PyG's layer and ours, with the same weights, which they draw at the same seed."""
    ours, theirs = both(
        lambda library: library.RGCNConv(channels, 8, TYPES, *PARTS[parts], **options), device
    )
    assert repr(theirs) == repr(ours)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert all(map(torch.equal, theirs.state_dict().values(), ours.state_dict().values()))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(bipartite, ids, device="cpu"):
    """Features of one end or of both, or ids."""
    torch.manual_seed(1)
    sizes = (N, 6), (M, 4)
    x = [torch.randperm(n) if ids else torch.randn(n, width).double() for n, width in sizes]
    return [one.to(device) for one in x[: 1 + bipartite]]


def assert_alike(layers, x, edges, types):
    """Outputs and all gradients of both layers."""
    assert_same(*(outcome(layer, x, edges, {"edge_type": types}) for layer in layers))


@pytest.mark.covering("together", "parts", "aggr", "bipartite", one_in=3)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("aggr", ["mean", "add", "max", "min"])
@pytest.mark.parametrize("bipartite", [False, True], ids=["square", "bipartite"])
def test_it_is_pyg_s_of_features(device, together, parts, aggr, bipartite):
    given = edges(device)
    for root, bias in ((True, True), (False, True), (True, False)):
        channels = (6, 4) if bipartite else 6
        options = {"aggr": aggr, "root_weight": root, "bias": bias, "device": device}
        options |= {} if bias or bipartite else {"flow": "target_to_source"}
        assert_alike(pair(channels, parts, **options), inputs(bipartite, False, device), *given)


@pytest.mark.parametrize("parts", ["full", "bases"])
@pytest.mark.parametrize("aggr", ["mean", "add", "max"])
def test_it_is_pyg_s_of_ids(device, parts, aggr):
    given = edges(device)
    for bipartite, root in itertools.product((False, True), (False, True)):
        layers = pair((N, M) if bipartite else N, parts, aggr=aggr, root_weight=root, device=device)
        x = inputs(bipartite, True, device)
        assert_alike(layers, x, *given)
        nothing = (None, x[1]) if bipartite else None
        expected, found = (layer(nothing, *given) for layer in layers)
        assert torch.allclose(found, expected, rtol=0, atol=1e-10)


@pytest.mark.covering("together", "parts", one_in=2)
@pytest.mark.parametrize("parts", PARTS)
def test_gradients_are_differentiated_again(device, together, parts):
    graph, types = edges(device)
    layer = pair(6, parts, device=device)[1]
    weight = layer.weight
    if layer.comp is not None:
        weight = (layer.comp @ weight.flatten(1)).view(-1, *weight.shape[1:])
    weight = weight.detach().requires_grad_()
    x, own = (torch.randn(N, k, device=device, dtype=torch.float64) for k in (6, 8))
    given = x.requires_grad_(), weight, own.requires_grad_()

    def run(x, weight, own):
        return relational_aggregate(graph, x, weight, types, own=own)[:, ::3]

    assert gradcheck(run, given, nondet_tol=0, fast_mode=True)
    assert gradgradcheck(run, given, nondet_tol=0, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes(device, together, dtype):
    theirs, ours = pair(6, device=device)
    given = edges(device)
    ours = ours.to(dtype)
    (x,) = inputs(False, False, device)
    found = ours(x.to(dtype), *given)
    assert found.dtype is dtype
    bound = 40 * torch.finfo(dtype).eps
    assert torch.allclose(found.double(), theirs(x, *given), rtol=bound, atol=bound)
    found.sum().backward()
    assert ours.weight.grad.dtype is dtype


def test_types_with_few_sources_have_columns_for_these(device, monkeypatch):
    monkeypatch.setattr(relations, "RESIDENT_BYTES", 1)
    given, types = edges(device)
    given = torch.where(types == 1, given % torch.tensor([[3], [N]], device=device), given)
    x = inputs(False, False, device)
    for aggr in ("mean", "max"):
        assert_alike(pair(6, aggr=aggr, device=device), x, given, types)
    groups = typed_edges.groups_of(
        Graph.from_edge_index(given, num_nodes=N), types, typed_edges.Grouping(TYPES, 1)
    )
    few = {group.first: group.graph.shape[1] for group in groups if group.sources is not None}
    assert few == {1: 3}


def test_types_come_with_the_graph(device):
    given, types = edges(device, N)
    layer = pair(6, device=device)[1]
    (x,) = inputs(False, False, device)
    expected = layer(x, given, types)
    graph = Graph.from_edge_index(given, num_nodes=N)
    assert torch.equal(layer(x, graph, types), expected)
    typed = Graph.from_edge_index(given, types.double(), num_nodes=N)
    assert torch.equal(layer(x, typed), expected)
    order = torch.argsort(given[1], stable=True)
    rowptr = torch.searchsorted(given[1][order].contiguous(), torch.arange(N + 1, device=device))
    adj_t = SparseTensor(rowptr, given[0][order], types[order], (N, N))
    assert torch.allclose(layer(x, adj_t), expected, rtol=0, atol=1e-12)
    assert torch.allclose(layer(x, adj_t, types), expected, rtol=0, atol=1e-12)  # as in PyG
    with pytest.raises(DtypeError, match="edge_type is None and the graph has no values"):
        layer(x, graph)
    with pytest.raises(DtypeError, match="own values are no integers"):
        layer(x, Graph.from_edge_index(given, types + 0.5, num_nodes=N))


def test_groups_are_made_once_and_anew_for_other_types(device):
    given, types = edges(device)
    theirs, ours = pair((6, 4), device=device)
    x, other = tuple(inputs(True, False, device)), types.flip(0)

    def compare(types):
        assert torch.allclose(ours(x, given, types), theirs(x, given, types), atol=1e-10)

    compare(types)
    compare(types)
    types[:30] = 4
    compare(types)
    compare(other)
    graph = Graph.from_edge_index(given, num_nodes=(N, M))
    ours(x, graph, other)
    (kept,) = (one for one in graph._slots.typed if one is not None)
    assert len(kept) == 1
    del other
    assert not kept
    with torch.inference_mode():
        ours(x, graph, types.clone())
    assert not kept


def test_groups_are_made_anew_for_types_at_another_place(device):
    given, types = edges(device)
    graph = Graph.from_edge_index(given, num_nodes=N)
    (x,) = inputs(False, False, device)
    base = torch.cat((types, types.flip(0)))
    kept, layer = base[:60].detach(), pair(6, device=device)[1]
    layer(x, graph, kept)
    pointer = kept.data_ptr()
    kept.data = base[::2]
    assert kept.data_ptr() == pointer
    assert torch.equal(layer(x, graph, kept), layer(x, graph, base[::2].clone()))
    kept.data = types.clone()
    del base
    assert pointer not in [one.data_ptr() for one in [types.clone() for _ in range(50)]]


def test_all_ids_group_their_edges_once(device, monkeypatch):
    given, types = edges(device, N)
    graph, layer = Graph.from_edge_index(given, num_nodes=N), pair(N, device=device)[1]
    with torch.inference_mode():
        expected = layer(None, graph, types)
    calls = note_calls(monkeypatch, typed_edges, "_make")
    for _ in range(3):
        assert torch.equal(layer(None, graph, types), expected)
    assert len(calls) <= 1
    assert list(layer.state_dict()) == list(pair(N)[0].state_dict())


@pytest.mark.parametrize("wrong", [-1, M])
def test_ids_of_targets_are_checked_once_each(device, monkeypatch, wrong):
    (given, types), layer = edges(device), pair((N, M), device=device)[1]
    source, target = (torch.arange(n, device=device) for n in (N, M))
    layer((source, target), given, types)
    calls = note_calls(monkeypatch, typed_edges, "_check_range")
    layer((source, target), given, types)
    assert not calls
    target[2] = wrong
    with pytest.raises(IndexRangeError, match=rf"x\[1\] holds {wrong} but there are {M} in_chan"):
        layer((source, target), given, types)
    with torch.inference_mode(), pytest.raises(IndexRangeError, match="holds"):
        layer((source, target.clone()), given, types)
    with pytest.raises(DtypeError, match=r"x\[1\] is torch.int16: give floating features or ids"):
        layer((source, target.short()), given, types)
    with pytest.raises(ShapeError, match=r"x\[1\] has shape \(9, 1\): give ids of shape"):
        layer((source, target[:, None]), given, types)


def test_no_edges_at_all(device):
    """Every input has a gradient, of zeros."""
    none = torch.empty(2, 0, dtype=torch.int64, device=device)
    types = torch.empty(0, dtype=torch.int64, device=device)
    cases = itertools.product(PARTS, (True, False), ("mean", "max"), (True, False))
    for parts, root, aggr, ids in cases:
        if ids and parts == "blocks":
            continue
        options = {"root_weight": root, "aggr": aggr, "bias": False, "device": device}
        layers = pair(N if ids else 6, parts, **options)
        (x,) = inputs(False, ids, device)
        x.requires_grad = not ids
        found = layers[1](x, none, types)
        assert torch.allclose(found, layers[0](x, none, types), atol=1e-12)
        found.sum().backward()
        assert not layers[1].weight.grad.any()
        assert ids or x.grad.any() == root


def test_fast_rgcn_is_the_same_layer():
    given = edges()
    seed(5)
    fast = nn.FastRGCNConv(6, 8, TYPES).double()
    (x,) = inputs(False, False)
    assert repr(fast) == "FastRGCNConv(6, 8, num_relations=5)"
    assert torch.equal(fast(x, *given), pair(6)[1](x, *given))


def test_fast_rgcn_goes_by_ids_where_pygs_goes_by_places():
    (ids,), given = inputs(False, True), edges()
    ours, theirs = both(lambda library: library.FastRGCNConv(N, 8, TYPES), "cpu")
    same = pair(N)[1]
    for layer in (ours, same):
        layer.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(ids, *given), same(ids, *given))
    assert torch.allclose(ours(None, *given), theirs(None, *given), atol=1e-12)
    assert not torch.allclose(ours(ids, *given), theirs(ids, *given))


X, IDS = torch.ones(N, 6, dtype=torch.float64), torch.arange(N)
EDGES, TYPES_OF = edges()
BAD_CALLS = {
    "range": ((X, EDGES, TYPES_OF + 1), IndexRangeError, "edge_type holds 5 but there are 5 rel"),
    "negative": ((X, EDGES, TYPES_OF - 1), IndexRangeError, "edge_type holds -1"),
    "floats": ((X, EDGES, TYPES_OF.double()), DtypeError, "edge_type is torch.float64"),
    "list": ((X, EDGES, TYPES_OF.tolist()), DtypeError, "edge_type is a list"),
    "column": ((X, EDGES, TYPES_OF[:, None]), ShapeError, r"edge_type.view\(-1\) for instance"),
    "short": ((X, EDGES, TYPES_OF[1:]), ShapeError, "has 60 edges"),
    "nothing": ((X, EDGES), DtypeError, "edge_type is None and the graph has no values"),
    "width": ((X[:, 1:], EDGES, TYPES_OF), ShapeError, "features of targets have shape"),
    "dtype": ((X.float(), EDGES, TYPES_OF), DtypeError, "x is torch.float32 but the layer's"),
    "array": ((X.numpy(), EDGES, TYPES_OF), DtypeError, "x is a ndarray"),
    "target": (((X, None), EDGES, TYPES_OF), DtypeError, r"x\[1\] is a NoneType"),
    "three": (((X, X, X), EDGES, TYPES_OF), ShapeError, "x has 3 parts"),
    "mixed": (((X, EDGES[0]), EDGES, TYPES_OF), DtypeError, "give features of both ends, or ids"),
    "number": (((X[0, 0], X), EDGES, TYPES_OF), ShapeError, r"x\[0\] has shape \(\)"),
    "graph": ((X, 3, TYPES_OF), DtypeError, "edge_index is a int"),
    "meta": ((X, EDGES, TYPES_OF.to("meta")), DeviceError, "edge_type is on meta"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_are_refused(case):
    args, error, text = BAD_CALLS[case]
    with pytest.raises(error, match=text):
        pair(6)[1](*args)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_narrow_types_of_edges_count_like_wide_ones(dtype, monkeypatch):
    monkeypatch.setattr(relations, "RESIDENT_BYTES", 260 * N * 2 * 8)  # more types than 8 bits have
    types, weight = TYPES_OF * 25, torch.randn(300, 6, 2, dtype=torch.float64)
    y = relational_aggregate(EDGES, X, weight, types)
    assert torch.equal(relational_aggregate(EDGES, X, weight, types.to(dtype)), y)


W = torch.ones(TYPES, 6, 2, dtype=torch.float64)
BAD_OPERANDS = {
    "width": ((X[:, 1:], W), {}, ShapeError, r"x has shape \(14, 5\): give \(14, 6\)"),
    "dtype": ((X, W.float()), {}, DtypeError, "x is torch.float64 but weight is torch.float32"),
    "matrix": ((X, W[0]), {}, ShapeError, r"weight has shape \(6, 2\)"),
    "own": ((X, W), {"own": X[:, :3]}, ShapeError, r"own has shape \(14, 3\): give \(14, 2\)"),
    "own dtype": ((X, W), {"own": X[:, :2].float()}, DtypeError, "own is torch.float32 but weight"),
    "short ids": ((IDS.short(), W), {}, DtypeError, r"x is torch.int16 of shape \(14,\)"),
    "reduce": ((X, W), {"reduce": "lstm"}, UnsupportedError, "reduce is 'lstm'"),
    "column": ((IDS[:, None], W), {}, ShapeError, r"ids in torch.int64 of shape \(14,\)"),
}


@pytest.mark.parametrize("case", BAD_OPERANDS)
def test_bad_operands_are_refused(case):
    args, options, error, text = BAD_OPERANDS[case]
    with pytest.raises(error, match=text):
        relational_aggregate(EDGES, *args, TYPES_OF, **options)


def test_bad_ids_are_refused():
    with pytest.raises(IndexRangeError, match="x holds 14 but there are 14 in_channels"):
        pair(N, root_weight=False)[1](IDS + 1, EDGES, TYPES_OF)
    with pytest.raises(DtypeError, match="weight has blocks, which ids cannot choose rows of"):
        pair(N, "blocks", root_weight=False)[1](IDS, EDGES, TYPES_OF)


def test_new_types_in_a_capture_are_refused(monkeypatch):
    x, (there, types) = torch.randn(N, 6), edges(n_target=N - 2)
    conv = nn.RGCNConv(6, 4, TYPES)
    graph = Graph.from_edge_index(there, num_nodes=N)
    expected = conv(x, graph, types)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(conv(x, graph, types), expected)
    with pytest.raises(UnsupportedError, match="keep their tensors outside of the step"):
        conv(x, graph, types.clone())
